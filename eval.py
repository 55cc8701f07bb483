"""Measures checkpoints: `python eval.py` takes the newest one under out/, `--ckpt=A,B` compares several on one dataset.

Task data: accuracy of each score by position and by length. Text: bits per byte under the training schedule and under exact
decoding. Both run the model twice, as it was trained and with the exact sequential recurrence that decoding has. The numbers
also go to eval-DATASET-SPLIT.json beside the checkpoint. `--study=FOLDER` makes the table of a study from such files.
"""

import contextlib
import glob
import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from configurator import ConfigError, key, parse, reporting
from model import SEQUENTIAL, Schedule, count_flops, count_parameters
from sample import find_checkpoint, load_model
from train import Dataset, TrainConfig, pick_device, same_tokens


@dataclass
class EvalConfig:
    ckpt: str = key(
        '', 'checkpoint, or the folder that holds ckpt.pt; several joined by commas; empty takes the newest under out/'
    )
    data_dir: str = key('', 'dataset; empty takes the one it was trained on')
    split: str = key('', 'train, val or test; empty takes val for text and test for tasks')
    batch_size: int = key(64, 'sequences at a time')
    max_batches: int = key(0, 'batches at most; 0 takes the whole split')
    device: str = key('auto', 'cpu, cuda, mps; auto takes the first that is there, from the right')
    threads: int = key(0, 'CPU threads; 0 leaves the default')
    results: str = key('', 'tasks: write the accuracies at the longest trained length to this JSON file')
    figure: str = key(
        '', 'tasks: draw accuracy against position to this PNG file; with study, bits per byte against operations'
    )
    study: str = key('', 'measure nothing; print the table of the results in this folder, NAME-SEED.json each')
    json: bool = key(False, 'also print one JSON object as the last line')

    def check(self):
        for name, low, high in (('batch_size', 1, 2**31), ('max_batches', 0, 2**31), ('threads', 0, 1024)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f'{name}={getattr(self, name)} must be at least {low} and at most {high}.')
        for name, path in (('results', self.results), ('figure', self.figure)):
            if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or '.')):
                raise ConfigError(f'{name}={path} must be a file in a folder that exists.')
        if self.figure and not self.figure.endswith(('.png', '.pdf', '.svg')):
            raise ConfigError(f'figure={self.figure} must end in .png, .pdf or .svg.')


def schedules(saved):
    """The schedules to measure, by name: that of the training, and exact decoding where the model has a recurrence."""
    trained = Schedule(**{k: saved[k] for k in ('schedule', 'd_forward', 'd_backward', 'n_subsets', 'chunk_size')})
    return {'training': trained} | ({'exact': SEQUENTIAL} if saved['recurrence'] != 'none' else {})


def score_task(model, data, split, schedule, config):
    """{score: {'all', 'last', 'by_length': {steps: ..}, 'last_by_length': .., 'by_position': {step: ..}}} as fractions.

    Positions count the steps of an example from 1; 'last' is the last step of each example.
    """
    arrays = data.split(split)
    total = min(len(arrays['tokens']), (config.max_batches or math.inf) * config.batch_size)
    kinds = {name: [] for name in data.meta['scores']}
    device = model.embed.weight.device
    for low in tqdm(range(0, total, config.batch_size), unit='batch', leave=False, disable=None):
        rows = np.arange(low, min(low + config.batch_size, total))
        T = int(arrays['lengths'][rows].max())
        x, y, mask = (t[:, :T] for t in data.batch(split, rows, None, device))
        hit = (model(x, schedule=schedule, recur_mask=mask).argmax(-1) == y).cpu().numpy()
        y = y.cpu().numpy()
        for name, (first, end) in data.meta['scores'].items():
            row, column = np.nonzero((y >= first) & (y < end))
            slots = 1 if name == 'state' else data.meta['settings']['value_len']
            order = np.arange(len(row)) - np.searchsorted(row, row)  # how many of this kind came before, in its row
            kinds[name].append(np.stack([hit[row, column], 1 + order // slots, arrays['steps'][rows][row]]))
    found = {}
    for name, parts in kinds.items():
        hit, step, length = np.concatenate(parts, 1)
        last = step == length

        def table(by, chosen, hit=hit):
            return {int(v): float(hit[chosen & (by == v)].mean()) for v in np.unique(by[chosen])}

        every = np.ones_like(last)
        found[name] = {
            'all': float(hit.mean()),
            'last': float(hit[last].mean()),
            'by_length': table(length, every),
            'last_by_length': table(length, last),
            'by_position': table(step, every),
        }
    return found


def score_text(model, data, split, schedule, config):
    """{'bits_per_byte', 'nats_per_token', 'tokens'}: every token but the first is predicted once, windows do not overlap;
    tokens that stand for no bytes (the document token) are left out."""
    stream, T = data.split(split), model.config.block_size
    nothing = ConfigError(f'{data.folder}/{split}.bin has nothing to score: it holds {len(stream)} tokens.')
    if len(stream) < 2:
        raise nothing
    T = min(T, len(stream) - 1)
    sizes = torch.tensor(data.meta['token_bytes'])
    starts = np.arange(0, len(stream) - T, T)
    if config.max_batches:  # spread over the split
        starts = starts[np.linspace(0, len(starts) - 1, min(len(starts), config.max_batches * config.batch_size)).astype(int)]
    nats, octets, tokens = 0.0, 0, 0
    device = model.embed.weight.device
    for low in tqdm(range(0, len(starts), config.batch_size), unit='batch', leave=False, disable=None):
        x, y, _ = data.batch(split, starts[low : low + config.batch_size], T, device)
        logits = model(x, schedule=schedule)
        nll = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction='none').double().cpu()
        size = sizes[y.flatten().cpu()]
        nats, octets, tokens = nats + nll[size > 0].sum().item(), octets + size.sum().item(), tokens + (size > 0).sum().item()
    if not octets:
        raise nothing
    return {'bits_per_byte': nats / math.log(2) / octets, 'nats_per_token': nats / tokens, 'tokens': tokens}


def print_table(head, rows):
    """Aligned columns; numbers below 1000 with as many decimals as mean something."""
    cells = [[str(c) if isinstance(c, str | int) else f'{c:.4f}' for c in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print('  '.join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))


@torch.no_grad()
def evaluate(path, config):
    """Measures one checkpoint: {'checkpoint', 'update', 'data', 'split'} and, for each schedule, what score_* returns."""
    model, checkpoint = load_model(path, pick_device(config.device))
    saved = checkpoint['config']
    data = Dataset(config.data_dir or saved['data_dir'])
    split = config.split or ('val' if data.is_text else 'test')
    if split not in data.meta['splits']:
        raise ConfigError(f'split={split} is not in {data.folder}; choose from {", ".join(data.meta["splits"])}.')
    same_tokens(checkpoint, data)
    if not data.is_text and data.longest[split] > model.config.block_size:
        raise ConfigError(
            f'{data.folder} holds examples of {data.longest[split]} tokens in {split}, more than the context of '
            f'{model.config.block_size} that {path} was built for; train with a larger block_size.'
        )
    score = score_text if data.is_text else score_task
    found = {name: score(model, data, split, schedule, config) for name, schedule in schedules(saved).items()}
    about = {'checkpoint': path, 'update': checkpoint['step'], 'data': data.folder, 'split': split}
    about |= provenance(path, model, checkpoint, data)
    if not data.is_text:  # the dataset of the training, not of this measurement, says what was trained
        about['trained_length'] = max(int(n) for n in checkpoint['meta']['settings']['steps'].split('-'))
    name = f'eval-{os.path.basename(os.path.normpath(data.folder))}-{split}.json'
    with open(os.path.join(os.path.dirname(path), name), 'w', encoding='utf-8') as f:
        json.dump(about | found, f, indent=1)
    return about | found


def provenance(path, model, checkpoint, data):
    """What produced a checkpoint: its settings, its cost in operations and seconds, the code, the data and the machine."""
    config = TrainConfig(**checkpoint['config'])
    defaults = asdict(TrainConfig())
    flops = count_flops(model, config, config.block_size)
    tokens = config.batch_size * config.block_size
    seconds, last = 0.0, 0
    log = os.path.join(os.path.dirname(path), 'log.jsonl')
    if os.path.isfile(log):
        with open(log, encoding='utf-8', errors='replace') as f:
            for line in f:
                with contextlib.suppress(ValueError, LookupError, TypeError, ZeroDivisionError):
                    values = json.loads(line)
                    seconds, last = seconds + (values['step'] - last) * tokens / values['tokens_per_s'], values['step']
    revision = subprocess.run(
        ['git', '-C', os.path.dirname(os.path.abspath(__file__)), 'rev-parse', 'HEAD'], capture_output=True, text=True
    )
    return {
        'settings': {k: v for k, v in asdict(config).items() if v != defaults[k]},
        'parameters': sum(count_parameters(model).values()),
        'training_flops': flops['step'] * tokens * checkpoint['step'],
        'step_flops_ratio': flops['step'] / flops['plain_step'],
        'training_seconds': round(seconds, 1),
        'revision': revision.stdout.strip() or None,
        'data_sha256': {name: of['sha256'] for name, of in data.meta['splits'].items()},
        'machine': f'{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}',
    }


def read_study(folder):
    """{cell: [what evaluate returned, a seed each]} of the files NAME-SEED.json in `folder`; raises ConfigError for none."""
    cells = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), '*-*.json'))):
        try:
            with open(path, encoding='utf-8') as f:
                found = json.load(f)
            if not {'training', 'training_flops', 'training_seconds', 'parameters'} <= found.keys():
                raise ValueError('it is no measurement of a text model')
        except (ValueError, AttributeError) as e:
            raise ConfigError(f'{path} cannot be read ({e}); delete it and measure again.') from None
        cells.setdefault(os.path.basename(path).rpartition('-')[0], []).append(found)
    if not cells:
        raise ConfigError(f'study={folder} holds no results; files there are called NAME-SEED.json.')
    return cells


def report_study(cells, config):
    """A table in Markdown of bits per byte (mean over seeds) against cost; and the same as a figure."""
    rows = []
    for cell, runs in cells.items():
        exact = [run.get('exact', run['training'])['bits_per_byte'] for run in runs]
        trained = [run['training']['bits_per_byte'] for run in runs]
        cost = runs[0]['training_flops'], np.mean([run['training_seconds'] for run in runs])
        rows.append((cell, np.mean(trained), np.mean(exact), max(exact) - min(exact), *cost, runs[0]['parameters'], len(runs)))
    rows.sort(key=lambda row: row[2])
    print('| cell | training schedule | exact decoding | spread of seeds | operations, 1e12 | seconds | parameters | seeds |')
    print('| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |')
    for cell, trained, exact, spread, flops, seconds, parameters, seeds in rows:
        print(
            f'| {cell} | {trained:.4f} | {exact:.4f} | {spread:.4f} | {flops / 1e12:,.0f} | {seconds:.0f} | {parameters:,} | '
            f'{seeds} |'
        )
    if config.json:
        print(json.dumps({cell: {'bits_per_byte': exact, 'training_schedule': trained} for cell, trained, exact, *_ in rows}))
    if config.figure:
        plt = pyplot()
        picture, panel = plt.subplots(figsize=(7, 4.6))
        for i, family in enumerate(sorted({row[0].split('-')[0] for row in rows})):
            mine = sorted((row[4] / 1e12, row[2], row[0]) for row in rows if row[0].split('-')[0] == family)
            joined = '-' if family == 'plain' else ''
            panel.plot(*zip(*(m[:2] for m in mine), strict=True), joined + 'osD^v'[i % 5], color=COLOURS[i % 7], label=family)
            for x, y, cell in mine:
                panel.annotate(cell.partition('-')[2], (x, y), fontsize=7, textcoords='offset points', xytext=(5, 3))
        panel.set(xscale='log', xlabel='operations of the training (1e12)', ylabel='bits per byte, exact decoding')
        panel.legend()
        picture.tight_layout()
        picture.savefig(config.figure, dpi=150)


def report(found):
    """Prints the tables of one checkpoint."""
    print(f'\n{found["checkpoint"]}, update {found["update"]}, {found["data"]}/{found["split"]}')
    measured = {name: found[name] for name in ('training', 'exact') if name in found}
    if 'trained_length' not in found:
        rows = [[name, f['bits_per_byte'], f['nats_per_token'], f['tokens']] for name, f in measured.items()]
        return print_table(['schedule', 'bits per byte', 'nats per token', 'tokens'], rows)
    columns = [(schedule, score) for schedule, scores in measured.items() for score in scores]
    for by, label in (('by_position', 'step'), ('by_length', 'length'), ('last_by_length', 'length, last step')):
        lengths = measured[columns[0][0]][columns[0][1]][by]
        rows = [[n, *(measured[s][k][by].get(n, math.nan) for s, k in columns)] for n in lengths]
        print_table([label, *(f'{k} ({s})' for s, k in columns)], rows)
        print()
    print_table(['all lengths', *(f'{k} ({s})' for s, k in columns)], [['', *(measured[s][k]['all'] for s, k in columns)]])


def summary(found):
    """{'state', 'state_last', 'retrieval'}: accuracies of decoding at the longest trained length, where it is measured."""
    scores, n = found.get('exact', found['training']), found['trained_length']
    state = {'state': scores['state']['by_length'].get(n), 'state_last': scores['state']['last_by_length'].get(n)}
    return state | {name: f['by_length'].get(n) for name, f in scores.items() if name != 'state'}


COLOURS = 'C0 C1 C2 C4 C5 C7 C8'.split()


def pyplot():
    """matplotlib.pyplot, drawing to files; raises ConfigError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('figure needs matplotlib; install it with pip install matplotlib.') from None
    matplotlib.use('Agg')
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(results, path):
    """Accuracy of decoding against the step, one panel a score, one line a checkpoint."""
    plt = pyplot()
    names = list(next(iter(results.values()))['training'])
    figure, panels = plt.subplots(
        1, len(names), figsize=(4.5 * len(names), 3.4), sharey=True, squeeze=False, layout='constrained'
    )
    for panel, name in zip(panels[0], names, strict=True):
        for i, (label, found) in enumerate(results.items()):
            points = found.get('exact', found['training'])[name]['by_position']
            style = dict(marker='osD^v<>'[i % 7], color=COLOURS[i % 7], markersize=4)
            panel.plot(list(points), list(points.values()), label=label, **style)
        panel.axvline(found['trained_length'] + 0.5, color='0.6', linestyle=':', linewidth=1)
        panel.set(xlabel='step of the example', title=name, ylim=(-0.03, 1.03))
    panels[0][0].set_ylabel('accuracy (fraction)')
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc='outside upper center', ncols=len(results))
    figure.savefig(path, dpi=150)


def main(argv):
    config = parse(EvalConfig, argv, 'python eval.py [--key=value ...]')
    if config.threads:
        torch.set_num_threads(config.threads)
    with reporting():
        if config.study:
            return report_study(read_study(config.study), config)
        results = {}
        paths = [find_checkpoint(part.strip()) for part in config.ckpt.split(',')]
        names = [os.path.basename(os.path.dirname(os.path.abspath(path))) for path in paths]
        for path, name in zip(paths, names if len(set(names)) == len(names) else paths, strict=True):
            results[name] = found = evaluate(path, config)
            report(found)
        task = all('trained_length' in found for found in results.values())
        if (config.results or config.figure) and not task:
            raise ConfigError('results and figure summarise tasks, and a checkpoint of a text model is among those given.')
        if task and len(results) > 1:
            rows = [[name, *summary(found).values()] for name, found in results.items()]
            print(f'\nexact decoding at the longest trained length, {found["trained_length"]} steps')
            print_table(['model', *summary(found)], rows)
        if config.results:
            with open(config.results, 'w', encoding='utf-8') as f:
                json.dump({name: summary(found) for name, found in results.items()}, f, indent=2)
        if config.figure:
            draw(results, config.figure)
        if config.json:
            print(json.dumps(results if len(results) > 1 else found))


if __name__ == '__main__':
    main(sys.argv[1:])
