"""What a command asks of the processes around it: the signals it is sent, the box of torchrun, the compiler."""

import contextlib
import json
import os
import signal
import threading
import time
import traceback

import torch

from configurator import ConfigError

STOP = ('SIGINT', 'SIGTERM', 'SIGHUP', 'SIGUSR2')  # save and end
SAVE = ('SIGUSR1',)  # save and continue


class Signals:
    """Within `with`: a signal is noted here instead of ending the process. `stop` is the number of one that asks for the end,
    or 0, and `save` says whether one asked for a checkpoint. The handlers of before return at the end; a thread other than the
    main one, which may set none, notes nothing."""

    def __init__(self):
        self.stop, self.save, self.before = 0, False, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for name in (*STOP, *SAVE):
                number = getattr(signal, name, None)  # not every system has all
                # nohup has it ignored: a closed terminal is then no reason to end
                if number and not (name == 'SIGHUP' and signal.getsignal(number) == signal.SIG_IGN):
                    self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number, _):
        if signal.Signals(number).name in SAVE:
            self.save = True
        else:
            self.stop = number

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: C code had set it


@contextlib.contextmanager
def reporting_to_torchrun():
    """Around a whole command: the sentence of `fail`, or else the traceback, stands in the box that torchrun prints last."""
    try:
        yield
    except (Exception, SystemExit) as e:
        said = getattr(e, '__notes__', ()) if isinstance(e, SystemExit) else [traceback.format_exc()]
        if said and (path := os.environ.get('TORCHELASTIC_ERROR_FILE')):
            with contextlib.suppress(OSError), open(path, 'w', encoding='utf-8') as f:
                json.dump({'message': ' '.join(said), 'timestamp': int(time.time())}, f)
        raise


def check_compiler(device='cpu'):
    """Raises ConfigError where torch.compile cannot build a kernel for `device`, as without a C++ compiler."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    except Exception as e:
        cause = ' '.join(str(getattr(e, 'inner_exception', e)).split())[:200]
        raise ConfigError(
            f'compile=True finds no working compiler ({cause}); install one (g++ for the CPU), or take --compile=False.'
        ) from None
