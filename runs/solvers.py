"""How fast each solver finds the memory that decoding has: `python -m runs.solvers CKPT [CKPT ...]`, in the project's folder.

Solvers: Jacobi passes, and sweeps over three strided subsets, both plain and with the scan. The error is the mean change of the
log-likelihood of a scored token against exact decoding, after each number of passes over all positions (a sweep is one), the
initial one not counted. Writes results/solvers.json and results/solvers.png, one panel for each checkpoint.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from configurator import ConfigError, reporting
from schedule import SEQUENTIAL, Schedule
from support.data import Dataset
from support.figures import drawing
from support.loading import find_checkpoint, load_model

PASSES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SEQUENCES = 64
SOLVERS = {
    'Jacobi': lambda n: Schedule('jacobi', n, 1),
    'sweeps of 3 subsets': lambda n: Schedule('interleaved', n_subsets=3, n_sweeps=n) if n else Schedule(),
    'Jacobi with scan': lambda n: Schedule('jacobi', n, 1, scan=True),
    'sweeps with scan': lambda n: replace(SOLVERS['sweeps of 3 subsets'](n), scan=n > 0),
}


@torch.inference_mode()
def errors(path):
    """Of one checkpoint: {'errors': {solver: [mean |change of the log-likelihood| after each of PASSES]}, ..}."""
    model, checkpoint = load_model(find_checkpoint(path), 'cpu')
    if model.config.recurrence == 'none':
        raise ConfigError(f'{path} has no recurrence, and nothing to solve; name a checkpoint of T2MLR or LRT.')
    data = Dataset(checkpoint['config']['data_dir'])
    split = 'val' if data.is_text else 'test'
    T = data.length(split, model.config.block_size)
    x, y, mask = data.batch(split, data.rows(split, 0, 0, SEQUENCES, T), T)

    def nll(schedule):
        logits = model(x, schedule=schedule, recur_mask=mask).flatten(0, 1)
        return F.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction='none')

    exact, scored = nll(SEQUENTIAL), int((y >= 0).sum())
    runs = [(name, n) for name in SOLVERS for n in PASSES if n <= T]
    found = {name: [] for name in SOLVERS}
    for name, n in tqdm(runs, desc=path, disable=None):
        found[name].append(((nll(SOLVERS[name](n)) - exact).abs().sum() / scored).item())
    return {'tokens': T, 'scored': scored, 'errors': found}


def main(argv):
    if not argv or argv[0].startswith('-'):
        print(__doc__)
        return
    results = {path: errors(path) for path in argv}
    Path('results/solvers.json').write_text(json.dumps({'passes': PASSES, 'checkpoints': results}, indent=1))
    with drawing('results/solvers.png', 1, len(results), figsize=(5 * len(results), 3.6), squeeze=False) as (_, panels):
        for panel, (path, result) in zip(panels[0], results.items(), strict=True):
            for name, values in result['errors'].items():
                panel.plot(PASSES[: len(values)], np.maximum(values, 1e-9), label=name)
            panel.set(yscale='log', xscale='symlog', xlabel='passes over all positions', title=Path(path).name)
            panel.set_xticks([0, 1, 2, 4, 8, 16, 32], labels=['0', '1', '2', '4', '8', '16', '32'])
        panels[0, 0].set_ylabel('error of the log-likelihood, nats a token')
        panels[0, 0].legend()


if __name__ == '__main__':
    with reporting():
        main(sys.argv[1:])
