"""How fast each solver finds the memory that decoding has: `python -m runs.solvers CKPT [CKPT ...]`, in the project's folder.

Solvers: Jacobi passes, and sweeps over three strided subsets, both plain and with the scan. The error is the mean change of the
log-likelihood of a scored token against exact decoding, after each number of passes over all positions (a sweep is one), the
initial one not counted. Also how much faster than token by token each reads one sequence as a prompt, at a tolerance of 1e-4,
in processor time. Writes results/solvers.json and results/solvers.png, one panel for each checkpoint.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from configurator import ConfigError, reporting
from schedule import SEQUENTIAL, Schedule
from support.data import Dataset
from support.figures import drawing, print_markdown
from support.loading import find_checkpoint, load_model

PASSES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SEQUENCES = 16
SOLVERS = {
    'Jacobi': lambda n: Schedule('jacobi', n, 1),
    'sweeps of 3 subsets': lambda n: Schedule('interleaved', n_subsets=3, n_sweeps=n) if n else Schedule(),
    'Jacobi with scan': lambda n: Schedule('jacobi', n, 1, scan=True),
    'sweeps with scan': lambda n: replace(SOLVERS['sweeps of 3 subsets'](n), scan=n > 0),
}


@torch.inference_mode()
def measure(path):
    """Of one checkpoint: {'errors': {solver: [mean |change of the log-likelihood| after each of PASSES]}, 'prompts': {solver:
    {'speed_up', 'passes'}}, ..}."""
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

    def seconds(schedule):
        """Processor time of reading the first sequence as a prompt, the fastest of three, and the passes it takes."""
        times = []
        for _ in range(3):
            begin, state, changes = time.process_time(), model.new_state(1), []
            if schedule is SEQUENTIAL:
                for token in x[0].split(1):
                    model.token(token[None], state)
            else:
                model(x[:1], schedule=schedule, state=state, changes=changes, logits_from=-1)
            times.append(time.process_time() - begin)
        return min(times), 1 + len(changes)

    exact, scored = nll(SEQUENTIAL), int((y >= 0).sum())
    runs = [(name, n) for name in SOLVERS for n in PASSES if n <= T]
    found = {name: [] for name in SOLVERS}
    for name, n in tqdm(runs, desc=path, disable=None):
        found[name].append(((nll(SOLVERS[name](n)) - exact).abs().sum() / scored).item())
    one_by_one, prompts = seconds(SEQUENTIAL)[0], {}
    for name, solver in SOLVERS.items():
        taken, passes = seconds(replace(solver(T), jacobi_tol=1e-4))
        prompts[name] = {'speed_up': round(one_by_one / taken, 2), 'passes': passes}
    return {'tokens': T, 'scored': scored, 'errors': found, 'prompts': prompts}


def main(argv):
    if not argv or argv[0].startswith('-'):
        print(__doc__)
        return
    torch.set_num_threads(1)
    results = {path: measure(path) for path in argv}
    for path, result in results.items():
        print_markdown(
            [path, 'speed-up', 'passes'], [[name, *map(str, row.values())] for name, row in result['prompts'].items()]
        )
    Path('results/solvers.json').write_text(json.dumps({'passes': PASSES, 'checkpoints': results}, indent=1))
    draw(results, 'results/solvers.png')


def draw(results, path):
    """Error against passes, a panel for each checkpoint."""
    with drawing(path, 1, len(results), figsize=(5 * len(results), 3.6), squeeze=False) as (_, panels):
        for panel, (name, result) in zip(panels[0], results.items(), strict=True):
            for solver, values in result['errors'].items():
                panel.plot(PASSES[: len(values)], np.maximum(values, 1e-9), label=solver)
            panel.set(yscale='log', xscale='symlog', xlabel='passes over all positions', title=Path(name).name)
            panel.set_xlim(left=-0.3)
            panel.set_xticks([0, 1, 2, 4, 8, 16, 32], labels=['0', '1', '2', '4', '8', '16', '32'])
        panels[0, 0].set_ylabel('error of the log-likelihood, nats a token')
        panels[0, 0].legend()


if __name__ == '__main__':
    with reporting():
        main(sys.argv[1:])
