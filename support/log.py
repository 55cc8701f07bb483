"""What a run writes while it trains: log.jsonl, wandb, the progress bar, the warning of passes that diverge."""

import contextlib
import json
import math
import os
import time
from dataclasses import asdict

from tqdm import tqdm

from support.accounting import count_parameters
from support.processes import warn, warn_on_disk_error


class Log:
    """log.jsonl and wandb, written by the first process alone. `best_loss`: the lowest validation loss of its older lines."""

    def __init__(self, config, first, step, wandb_id):
        self.path = os.path.join(config.out_dir, 'log.jsonl') if first else None
        self.best_loss = continue_log(self.path, step) if first else math.inf
        self.tracker = Tracker(config, first, wandb_id)

    def write(self, values):
        if self.path:
            values = finite(values)
            with warn_on_disk_error(self.path), open(self.path, 'a', encoding='utf-8') as f:
                f.write(json.dumps(values) + '\n')
            self.tracker.log(values)


class Progress:
    """The progress bar, or a line per minute without a terminal. It also measures the speed."""

    def __init__(self, config, first, step):
        self.first, self.shown_at = first, time.monotonic()
        self.bar = tqdm(total=config.max_steps, initial=step, disable=not first or None, unit='step', mininterval=1)
        self.restart_clock(step)

    def restart_clock(self, step):
        self.since, self.counted_from = time.perf_counter(), step

    def speed(self, step):
        """Steps per second since the clock was started; restarts it."""
        speed = (step - self.counted_from) / (time.perf_counter() - self.since)
        self.restart_clock(step)
        return speed

    def show(self, step, loss, tokens_per_s):
        self.bar.set_postfix(loss=f'{loss:.4f}', refresh=False)
        if self.first and self.bar.disable and time.monotonic() - self.shown_at >= 60:
            self.shown_at = time.monotonic()
            print(f'step {step:>6}  loss {loss:.4f}, {tokens_per_s:,.0f} tokens per second', flush=True)

    def show_validation(self, step, results):
        """results: {schedule: {score: mean}}. The time of a validation does not count towards the speed."""
        if self.first:
            texts = {name: ', '.join(f'{k} {v:.4f}' for k, v in means.items()) for name, means in results.items()}
            line = ' | '.join(f'{name}: {text or "nothing is scored"}' for name, text in texts.items())
            self.bar.write(f'step {step:>6}  validation, {line}')
        self.restart_clock(step)


class DivergenceWarning:
    """Warns, once per run, when the last Jacobi pass changed the output of the span more than the first in 5 lines in a row."""

    def __init__(self):
        self.in_a_row, self.warned = 0, False

    def add(self, step, changes):
        """changes: those of each pass after the initial one, in a line of the log, or None."""
        self.in_a_row = self.in_a_row + 1 if changes and changes[-1] > max(changes[0], 1e-3) else 0
        if self.in_a_row == 5 and not self.warned:
            self.warned = True
            what = 'the passes do not converge: in 5 lines of the log in a row'
            why = f'the last changed the output of the span more than the first ({", ".join(f"{c:g}" for c in changes)})'
            warn(f'{what}, up to step {step}, {why}; lower recurrence_lr_scale or learning_rate.')


def finite(value):
    """`value` as JSON can hold it: a number that is not finite is left out of a dict, and becomes None in a list."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items() if not isinstance(v, float) or math.isfinite(v)}
    return [v if math.isfinite(v) else None for v in value] if isinstance(value, list) else value


def one_number_each(values):
    """{'pass/0': a, 'pass/1': b, 'val/loss': c} for {'passes': [a, b], 'val': {'loss': c}}; what is None is left out."""
    single = {}
    for name, value in values.items():
        if isinstance(value, list):
            name, value = {'passes': 'pass', 'changes': 'change'}[name], dict(enumerate(value))
        if isinstance(value, dict):
            single |= {f'{name}/{part}': number for part, number in value.items()}
        else:
            single[name] = value
    return {name: number for name, number in single.items() if number is not None}


class Tracker:
    """wandb, if asked for, on the first process only; whatever goes wrong there is one warning and no more. `id` is wandb's
    name of the run, which a checkpoint keeps: a resumed run continues it, and sends no step a second time."""

    def __init__(self, config, active, id=None):
        self.run, self.id, self.starts = None, id, 0
        if config.wandb != 'off' and active:
            with self.off_on_error():
                import wandb

                project, name = os.environ.get('WANDB_PROJECT', 'latent-memory'), config.out_dir.replace('/', '-')
                where = dict(project=project, name=name, dir=config.out_dir, mode=config.wandb)
                which = dict(id=id, resume='allow' if id else None, settings=wandb.Settings(init_timeout=30))
                self.run = wandb.init(config=asdict(config), **where, **which)
                self.id, self.starts = self.run.id, self.run.starting_step

    @contextlib.contextmanager
    def off_on_error(self):
        try:
            yield
        except Exception as e:
            self.run = None
            warn(f'wandb is off from here on ({type(e).__name__}: {e}); log.jsonl is complete.')

    def log(self, values):
        if self.run and values['step'] >= self.starts:
            with self.off_on_error():
                self.run.log(one_number_each({k: v for k, v in values.items() if k != 'step'}), step=values['step'])

    def finish(self):
        if self.run:
            with self.off_on_error():
                self.run.finish()


def continue_log(path, step):
    """Drops lines of log.jsonl after `step`, or cut short; returns the lowest validation loss of the rest."""
    kept, best = [], math.inf
    if os.path.exists(path):
        with open(path, encoding='utf-8', errors='replace') as f:
            for line in f:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    values = json.loads(line)
                    if values['step'] <= step:
                        kept.append(line)
                        best = min(best, (values.get('val') or {}).get('loss', math.inf))
    with open(path + '.tmp', 'w', encoding='utf-8') as f:
        f.writelines(kept)
    os.replace(path + '.tmp', path)
    return best


def announce(config, data, model, process, start, changed):
    """Prints what is about to run, and what may surprise a person."""
    T, dtype = data.length('train', config.block_size), str(process.dtype).removeprefix('torch.')
    n = sum(count_parameters(model).values())
    print(f'{n:,} parameters, {process.kind}, {dtype}, steps {start} to {config.max_steps}')
    if (epochs := data.epochs(config.max_steps * config.batch_size, T)) > 1:
        print(f'the run goes through the training data {epochs:,.1f} times')
    if config.document_rows:
        share = data.share_never_read(T)
        print(f'document_rows: {share:.1%} of train, after the first {T} tokens of a document, is never read')
    if config.warmup != config.warmup_steps:
        print(f'warmup_steps={config.warmup_steps} is above {config.decay_end} steps; the warm-up takes {config.warmup}')
    if changed:
        print(f'continues with other settings than before: {", ".join(changed)}')
