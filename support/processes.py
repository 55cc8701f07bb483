"""What a command asks of the processes around it: the signals it is sent, the box of torchrun, the compiler."""

import contextlib
import errno
import glob
import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from tqdm import tqdm

from configurator import ConfigError

try:
    import fcntl
except ImportError:  # not every system has it
    fcntl = None

STOP = ('SIGINT', 'SIGTERM', 'SIGHUP', 'SIGUSR2')  # save and end
SAVE = ('SIGUSR1',)  # save and continue


class Process:
    """This process of a run: which of how many it is, its device, and the type it computes in."""

    def __init__(self, config):
        """Raises ConfigError for a device that this machine lacks."""
        self.rank, self.world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
        self.first, self.parent = self.rank == 0, os.getppid()
        self.device = use_device(config)
        self.kind = self.device.split(':')[0]
        if self.world > 1 and self.kind == 'cuda':
            self.device = use_device(replace(config, device=f'cuda:{os.environ["LOCAL_RANK"]}'))
        name = {'auto': 'bfloat16' if self.kind == 'cuda' else 'float32'}.get(config.dtype, config.dtype)
        self.dtype = getattr(torch, name)

    def autocast(self):
        return torch.autocast(self.kind, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def connect(self):
        if self.world > 1:  # what only the hosts have to tell each other does not wait for the GPUs
            dist.init_process_group('cpu:gloo,cuda:nccl' if self.kind == 'cuda' else 'gloo')

    def sum(self, values):
        """Sums a tensor over all processes, in place, and returns it."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value):
        """[the value of each process], any object, in the memory of the host."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()

    def is_orphan(self):
        """Whether torchrun was killed, so that nobody would end this process any more."""
        return self.world > 1 and os.getppid() != self.parent


class Signals:
    """Within `with`, a signal is noted instead of ending the process. The old handlers return at the end. Outside the
    main thread, which alone may set handlers, nothing is noted.

    After `poll`: `stop` is the number of a signal that asks for the end, or 0; `save` says whether one asked for a checkpoint.
    """

    def __init__(self):
        self.stop, self.save, self.before = 0, False, {}
        self.noted_stop, self.noted_save = 0, False

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for name in (*STOP, *SAVE):
                number = getattr(signal, name, None)  # not every system has all
                # under nohup SIGHUP is ignored: a closed terminal must not end the run
                if number and not (name == 'SIGHUP' and signal.getsignal(number) == signal.SIG_IGN):
                    self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number, _):
        if signal.Signals(number).name in SAVE:
            self.noted_save = True
        else:
            self.noted_stop = number

    def poll(self, process, together):
        """Sets `stop` and `save`. Several processes do so only where `together`, at steps that all of them reach: all stop at
        one step, though the signal may have reached only some."""
        if process.is_orphan():
            self.noted_stop = signal.SIGTERM
        if process.world == 1:
            self.stop, self.save = self.noted_stop, self.noted_save
        elif together:
            flags = torch.tensor([self.noted_stop, self.noted_save])
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            self.stop, self.save = flags.tolist()

    def forget_save(self):
        self.noted_save = self.save = False

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: C code had set it


@contextlib.contextmanager
def reporting_to_torchrun():
    """Around a whole command: the sentence of `fail`, or else the traceback, stands in the box that torchrun prints last."""
    try:
        yield
    except (Exception, SystemExit) as e:
        message = getattr(e, '__notes__', ()) if isinstance(e, SystemExit) else [traceback.format_exc()]
        if message and (path := os.environ.get('TORCHELASTIC_ERROR_FILE')):
            with contextlib.suppress(OSError), open(path, 'w', encoding='utf-8') as f:
                json.dump({'message': ' '.join(message), 'timestamp': int(time.time())}, f)
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


def is_first():
    """Whether this is the process that speaks for all of a run."""
    return os.environ.get('RANK', '0') == '0'


def warn(sentence):
    """One line on stderr, from the first process, that leaves the progress bar whole."""
    if is_first():
        tqdm.write(f'warning: {sentence}', file=sys.stderr)


@contextlib.contextmanager
def warn_on_disk_error(what):
    """Around the writing of `what`: a disk that is full is a warning, and the run continues."""
    try:
        yield
    except OSError as e:
        warn(f'{what} could not be written ({e.strerror}); what was there before is intact.')


def use_device(config):
    """Sets the CPU threads of a command's settings; returns the device that they mean ('auto': the best there is). Raises
    ConfigError for one that this machine lacks."""
    if config.threads:
        torch.set_num_threads(config.threads)
    name = config.device
    kinds = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available(), 'cpu': True}
    available = [kind for kind, present in kinds.items() if present]
    if name == 'auto':
        return available[0]
    kind, _, number = name.partition(':')
    numbered = kind == 'cuda' and number.isdigit() and int(number) < torch.cuda.device_count()
    if name not in available and not numbered:
        raise ConfigError(f'device={name} is not available here; choose from auto, {", ".join(available)}.')
    if number:  # what names no device, in torch and in libraries, means the current one
        torch.cuda.set_device(name)
    return name


@contextlib.contextmanager
def locked(folder):
    """Holds folder/lock, which the kernel releases however the process ends; raises ConfigError where another run has it."""
    with open(os.path.join(folder, 'lock'), 'w') as f:
        try:
            if fcntl is None:
                raise OSError(errno.ENOLCK, 'this system has no fcntl')
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f'another run is writing to {folder}; wait for its end or choose another --out_dir.') from None
        except OSError as e:
            warn(f'{folder} cannot be locked ({e.strerror}); start no second run there.')
        yield


def check_processes_agree(config, data, step):
    """Raises ConfigError, in all processes alike, where they differ in code, data, settings or the step they start from."""
    code = hashlib.sha256()
    root = glob.escape(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for path in sorted(glob.glob(f'{root}/*.py') + glob.glob(f'{root}/support/*.py')):
        with open(path, 'rb') as f:
            code.update(f.read())
    meta = hashlib.sha256(json.dumps(data.meta, sort_keys=True).encode())  # it holds the checksums of the files
    values = {'checksum of the code': code.hexdigest()[:12], 'checksum of the data': meta.hexdigest()[:12]}
    values |= asdict(config) | {'step of the checkpoint': step}
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    for rank, others in enumerate(gathered):
        for name, value in gathered[0].items():
            if (other := others.get(name)) != value:
                raise ConfigError(f'process {rank} has {name}={other} and process 0 {name}={value}; start all with the same.')
