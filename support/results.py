"""Results of a long evaluation, saved as they come, and what produced the checkpoint that they measure."""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from configurator import ConfigError
from support.accounting import count_flops, count_parameters
from support.processes import is_first


class ResumableResults:
    """The results of an evaluation's batches, in a file until all are measured: an interrupted evaluation continues, on any
    number of processes."""

    def __init__(self, path, identity, process=None):
        """path: that of the final results and `.part`. identity: all that they depend on, as JSON. Each line holds its digest:
        another evaluation may write to the same file, and its lines are skipped. process (Process): one of several that share
        the batches; the first alone reads and writes."""
        self.process = process if process and process.world > 1 else None
        self.path, self.measured = path, {}
        self.identity = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        text = Path(path).read_text(encoding='utf-8', errors='replace') if os.path.exists(path) else ''
        self.gap = '' if text[-1:] in ('', '\n') else '\n'  # ends a last line that was cut short
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError):
                digest, name, start, value = json.loads(line)
                if digest == self.identity:
                    self.measured[name, start] = value
        if self.process:
            self.measured = self.process.gather(self.measured)[0]

    def add(self, name, start, value):
        """Appends a batch to the file."""
        self.measured[name, start] = value
        if self.process and not self.process.first:
            return
        with open(self.path, 'a', encoding='utf-8') as f:
            f.write(f'{self.gap}{json.dumps([self.identity, name, start, value])}\n')
        self.gap = ''

    def batches(self, name, starts, measure):
        """[measure(start), JSON, for each of the starts]; `name` tells measurements apart. Several processes take one batch
        each at a time, and all get all. Raises ConfigError where their names differ."""
        missing = [start for start in starts if (name, start) not in self.measured]
        rank, world = (self.process.rank, self.process.world) if self.process else (0, 1)
        if self.process and len({*self.process.gather(f'{name} {missing}')}) > 1:
            raise ConfigError('the processes do not measure the same; start all with the same settings, code and data.')
        quiet = None if is_first() else True
        with tqdm(total=len(starts), initial=len(starts) - len(missing), unit='batch', leave=False, disable=quiet) as progress:
            for low in range(0, len(missing), world):
                together = missing[low : low + world]
                value = measure(together[rank]) if rank < len(together) else None
                values = self.process.gather(value) if self.process else [value]
                for start, value in zip(together, values[: len(together)], strict=True):
                    self.add(name, start, value)
                progress.update(len(together))
        return [self.measured[name, start] for start in starts]

    def finish(self, results):
        """Writes the results, JSON, removes the file and returns them."""
        if self.process and not self.process.first:
            return results
        Path(self.path.removesuffix('.part')).write_text(json.dumps(results, indent=1), encoding='utf-8')
        Path(self.path).unlink(missing_ok=True)
        return results


def provenance(path, model, checkpoint, data, config):
    """What produced a checkpoint: its settings (config), its cost in FLOPs and seconds, the code, the data and the machine."""
    T = config.block_size if data.is_text else checkpoint['meta']['longest']['train']
    flops, tokens, revision = count_flops(model, config, T), config.batch_size * T, None
    with contextlib.suppress(FileNotFoundError):  # a machine without git
        git = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=Path(__file__).parents[1], capture_output=True, text=True)
        revision = git.stdout.strip() or None
    return {
        'settings': {k: v for k, v in asdict(config).items() if v != getattr(type(config), k)},
        'parameters': sum(count_parameters(model).values()),
        'training_flops': flops['step'] * tokens * checkpoint['step'],
        'step_flops_ratio': flops['step'] / flops['plain_step'],
        'training_seconds': round(training_seconds(os.path.dirname(path), tokens), 3),
        'revision': revision,
        'data_sha256': {name: file['sha256'] for name, file in data.meta['splits'].items()},
        'machine': f'{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}',
    }


def training_seconds(folder, tokens):
    """The seconds that a training took, from the log.jsonl in its folder and its tokens per step; 0 without a log."""
    seconds, last = 0.0, 0
    with contextlib.suppress(FileNotFoundError), open(f'{folder}/log.jsonl', encoding='utf-8', errors='replace') as f:
        for line in f:
            with contextlib.suppress(ValueError, LookupError, TypeError, ZeroDivisionError):
                values = json.loads(line)
                seconds, last = seconds + (values['step'] - last) * tokens / values['tokens_per_s'], values['step']
    return seconds
