"""Whether a long run leaks: `python -m runs.soak [--steps=N]` trains a tiny model, and samples from each of its checkpoints.

Training, evaluation, checkpoints and samples share one process, so whatever one of them leaks adds
up. Prints the resident memory on the way; exit code 1 when it grew after the warm-up.
"""

import contextlib
import os
import resource
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import sample
import train
from configurator import fail, key, parse, reporting, within
from support import validation

SETTINGS = """
    --n_layer=2 --n_head=2 --n_embd=32 --block_size=64 --batch_size=4 --threads=1 --device=cpu
    --recurrence=t2mlr --l_start=1 --l_end=1 --schedule=jacobi --d_forward=3 --d_backward=2
    --eval_batches=1 --eval_exact_batches=1 --keep_best=True --log_interval=5 --warmup_steps=10
""".split()
SLACK = 8.0  # MiB that the allocator and a first use of rare code may add


@dataclass
class SoakConfig:
    steps: int = key(5000, 'steps of training', bounds=(200, 10**9))
    interval: int = key(50, 'steps between evaluations, each with a checkpoint and samples of it')
    data_dir: str = key('data/stdlib', 'a text dataset made by prepare_data.py')

    def check(self):
        within('interval', self.interval, 1, self.steps // 8, f'steps={self.steps} need at least 8 evaluations')


def resident():
    """Resident memory of this process, in MiB."""
    return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize() / 2**20


def soak(config):
    """The memory after each evaluation and its samples, in MiB."""
    memory, evaluate = [], validation.evaluate
    flags = [f'--max_steps={config.steps}', f'--eval_interval={config.interval}', f'--keep_every={config.steps // 4}']
    with tempfile.TemporaryDirectory() as out:

        def evaluate_and_sample(*args, **given):
            result = evaluate(*args, **given)
            with open(os.devnull, 'w') as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                sample.main([f'--ckpt={out}', '--prompt=def ', '--num_samples=2', '--max_tokens=16', '--device=cpu'])
            memory.append(resident())
            return result

        with mock.patch.object(validation, 'evaluate', evaluate_and_sample):
            train.main([*SETTINGS, *flags, f'--data_dir={config.data_dir}', f'--out_dir={out}'])
    return memory


def main(argv):
    config = parse(SoakConfig, argv, 'python -m runs.soak [--key=value ...]')
    with reporting():
        memory = soak(config)
        quarter = len(memory) // 4
        before, after = (statistics.median(part) for part in (memory[quarter : 2 * quarter], memory[-quarter:]))
        for i in range(0, len(memory), max(1, len(memory) // 10)):
            print(f'step {(i // 2 + 1) * config.interval:>6}  {memory[i]:8.1f} MiB')
        print(f'memory in the second quarter {before:.1f} MiB, in the last {after:.1f} MiB')
        if after - before > SLACK:
            raise fail(f'memory grew by {after - before:.1f} MiB, more than {SLACK:g}.', 1)


if __name__ == '__main__':
    main(sys.argv[1:])
