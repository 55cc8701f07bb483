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

from support.accounting import count_flops, count_parameters


class ResumableResults:
    """The results of an evaluation's batches, in a file until all are measured: an interrupted evaluation continues."""

    def __init__(self, path, identity):
        """path: that of the final results and `.part`. identity: all that they depend on, as JSON. Each line holds its digest:
        another evaluation may write to the same file, and its lines are skipped."""
        self.path, self.measured = path, {}
        self.identity = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        text = Path(path).read_text(encoding='utf-8', errors='replace') if os.path.exists(path) else ''
        self.gap = '' if text[-1:] in ('', '\n') else '\n'  # ends a last line that was cut short
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError):
                digest, name, start, value = json.loads(line)
                if digest == self.identity:
                    self.measured[name, start] = value

    def add(self, name, start, value):
        """Appends a batch to the file."""
        self.measured[name, start] = value
        with open(self.path, 'a', encoding='utf-8') as f:
            f.write(f'{self.gap}{json.dumps([self.identity, name, start, value])}\n')
        self.gap = ''

    def batches(self, name, starts, measure):
        """measure(start), JSON, for each of the starts; `name` tells measurements apart."""
        for start in tqdm(starts, unit='batch', leave=False, disable=None):
            if (name, start) not in self.measured:
                self.add(name, start, measure(start))
            yield self.measured[name, start]

    def finish(self, results):
        """Writes the results, JSON, removes the file and returns them."""
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
