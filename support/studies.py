"""Studies: the table and the figure of a folder of results."""

import json
from pathlib import Path

import numpy as np

from configurator import ConfigError
from support.figures import accuracy_curves, decoding_scores, draw_accuracies, draw_costs, print_markdown, summarise


def read_study(folder):
    """{cell: [result of each seed]} of the files NAME-SEED.json in `folder`; raises ConfigError where there is none."""
    cells = {}
    for path in sorted(Path(folder).glob('*-*.json')):
        try:
            result = json.loads(path.read_text(encoding='utf-8'))
            missing = {'training_flops', 'training_seconds', 'parameters'} - result.keys()
            if missing or not {'training', 'decoded'} & result.keys():
                raise ValueError('it is no measurement of a checkpoint')
        except (ValueError, AttributeError) as e:
            raise ConfigError(f'{path} cannot be read ({e}); delete it and measure again.') from None
        cells.setdefault(path.name.rpartition('-')[0], []).append(result)
    if not cells:
        raise ConfigError(f'study={folder} holds no results; files there are called NAME-SEED.json.')
    if len({tuple(summarise(result)) for results in cells.values() for result in results}) > 1:
        raise ConfigError(f'study={folder} holds results of different tasks; give each a folder.')
    return cells


def far_accuracies(result):
    """{'SCORE, step N': accuracy} at the longest trained step and twice and four times as far; of answers, by depth."""
    if 'decoded' in result:
        return summarise(result)
    steps = [str(result['trained_length'] * times) for times in (1, 2, 4)]
    curves = accuracy_curves(result).items()
    return {f'{name}, step {n}': curve[n] for name, curve in curves for n in steps if n in curve}


def study_row(results):
    """(what a cell is ranked by, rising; {score: mean over seeds}; {column: its text}), of texts in bits per byte, of tasks in
    accuracies."""
    first, n_seeds = results[0], len(results)
    flops = {'FLOPs, 1e12': f'{first["training_flops"] / 1e12:,.0f}'}
    size = {'parameters': f'{first["parameters"]:,}', 'seeds': str(n_seeds)}
    if summarise(first):
        accuracies = [far_accuracies(result) for result in results]
        means = {name: np.mean([scores[name] for scores in accuracies]) for name in accuracies[0]}
        return -sum(means.values()), means, {name: f'{mean:.1%}' for name, mean in means.items()} | flops | size
    exact = [decoding_scores(result)['bits_per_byte'] for result in results]
    trained = np.mean([result['training']['bits_per_byte'] for result in results])
    columns = {
        'training schedule': f'{trained:.4f}',
        'exact decoding': f'{np.mean(exact):.4f}',
        'spread of seeds': f'{max(exact) - min(exact):.4f}' if n_seeds > 1 else '-',
        **flops,
        'seconds': f'{np.mean([result["training_seconds"] for result in results]):.0f}',
    }
    return np.mean(exact), {'bits_per_byte': np.mean(exact), 'training_schedule': trained}, columns | size


def report_study(cells, config):
    """Prints the table of a study in Markdown and draws its figure: of tasks accuracies of the first seed, of texts costs."""
    rows = sorted(((cell, *study_row(results)) for cell, results in cells.items()), key=lambda row: row[1])
    print_markdown(['cell', *rows[0][-1]], [[cell, *columns.values()] for cell, *_, columns in rows])
    if config.json:
        print(json.dumps({cell: means for cell, _, means, _ in rows}))
    firsts = {cell: results[0] for cell, results in cells.items()}
    if config.figure and summarise(firsts[rows[0][0]]):
        draw_accuracies(firsts, config.figure)
    elif config.figure:
        draw_costs({cell: (firsts[cell]['training_flops'] / 1e12, bits) for cell, bits, *_ in rows}, config.figure)
