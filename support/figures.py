"""Figures and tables of evaluations and studies. A result is what eval.py measures of one checkpoint, as in its JSON file."""

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np

from configurator import ConfigError, explaining

# The palette of Okabe and Ito, told apart by colour-blind eyes too, without its yellow, which is faint on white.
COLOURS = ['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000']
MARKERS = 'osD^vP*'


@contextlib.contextmanager
def drawing(path, *shape, **settings):
    """A figure and its panels (rows and columns, or a mosaic, in `shape`), written to the file `path`."""
    import matplotlib  # slow to import, and most commands draw nothing

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    cycle = plt.cycler(color=COLOURS) + plt.cycler(marker=MARKERS)
    make = plt.subplot_mosaic if shape and isinstance(shape[0], list) else plt.subplots
    with plt.rc_context({'axes.prop_cycle': cycle, 'lines.markersize': 5, 'font.size': 12}):
        figure, panels = make(*shape, layout='constrained', **settings)
        yield figure, panels
        figure.savefig(path, dpi=150)
    print(f'wrote {path}', file=sys.stderr)


def whole_numbers(panel):
    """Ticks of the horizontal axis at whole numbers alone."""
    panel.xaxis.get_major_locator().set_params(integer=True)


def draw_curves(folders, path):
    """Training loss, and validation loss as markers, against steps, one line per folder."""
    with drawing(path, figsize=(7, 4)) as (_, panel):
        for folder in folders:
            with explaining(f'curves={folder}: its log.jsonl cannot be read', 'name the folder of a run'):
                lines = [json.loads(line) for line in Path(folder, 'log.jsonl').read_text(encoding='utf-8').splitlines()]
            train, val = {}, {}
            for line in lines:  # a mean is missing where nothing was scored
                scored = line.get('val_exact') or line.get('val') or {}
                for points, loss in ((train, line.get('loss')), (val, scored.get('loss'))):
                    if 'step' in line and loss is not None:
                        points[line['step']] = loss
            if not train and not val:
                raise ConfigError(f'curves={folder}: its log.jsonl holds no loss; train it first.')
            (line,) = panel.plot(list(val), list(val.values()), label=os.path.basename(folder))
            panel.plot(list(train), list(train.values()), alpha=0.4, linewidth=1, color=line.get_color(), marker='')
        panel.set(xlabel='step', ylabel='loss, nats per token', title='faint: training; markers: validation, as decoded')
        whole_numbers(panel)
        panel.legend()


def markdown_table(head, rows):
    """A Markdown table of texts, the first column to the left."""
    rows = head, ['---', *['---:'] * (len(head) - 1)], *rows
    return '\n'.join('|' + ''.join(f' {cell} |' if cell else ' |' for cell in row) for row in rows)


def print_markdown(head, rows):
    print(markdown_table(head, rows))


def print_table(head, rows):
    """Prints aligned columns: floats with four decimals, and - for None, which was not measured."""
    cells = [['-' if c is None else f'{c:.4f}' if isinstance(c, float) else str(c) for c in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print('  '.join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))


def draw_costs(cells, path):
    """Bits per byte of {cell: results of its seeds}, the lowest on top, and beside it the FLOPs of its training; one colour per
    family. A filled marker is exact decoding, an open one the training schedule, both means; the line spans the seeds."""
    families, rows = list(dict.fromkeys(cell.split('-')[0] for cell in cells)), range(len(cells))
    settings = dict(figsize=(9, 1.3 + 0.3 * len(cells)), sharey=True, width_ratios=[3, 1.2])
    with drawing(path, 1, 2, **settings) as (figure, (bits, cost)):
        for row, (cell, results) in enumerate(cells.items()):
            family = families.index(cell.split('-')[0])
            style = dict(color=COLOURS[family % 7], marker=MARKERS[family % 7], markersize=7)
            exact, trained = ([s['bits_per_byte'] for s in scores] for scores in scores_of(results))
            bits.plot([min(exact), max(exact)], [row] * 2, color=style['color'], marker='', linewidth=2)
            bits.plot(np.mean(trained), row, fillstyle='none', **style)
            bits.plot(np.mean(exact), row, **style)
            cost.barh(row, results[0]['training_flops'] / 1e12, 0.6, color=style['color'])
        bits.set_yticks(rows, list(cells))
        bits.invert_yaxis()
        bits.set_xlabel('bits per byte, left is better')
        bits.set_title('filled: as decoded; open: as trained', fontsize=12)
        cost.set_xlabel('training FLOPs, 1e12')
        whole_numbers(cost)
        for panel in (bits, cost):
            panel.grid(axis='x', color='0.9')
            panel.set_axisbelow(True)
        caption(figure, cells)


def scores_of(results):
    """The scores of exact decoding and those of the training schedule, of each result."""
    return [decoding_scores(result) for result in results], [result['training'] for result in results]


def caption(figure, cells):
    """Writes below a figure how many seeds it shows, and on how many examples, answers or tokens they were measured."""
    seeds = sorted({len(results) for results in cells.values()})
    first = next(iter(cells.values()))[0]
    n, of = first.get('examples'), 'test examples'
    if 'decoded' in first:
        n, of = first['decoded']['answers'], 'answers'
    elif 'bits_per_byte' in first['training']:
        n, of = first['training']['tokens'], 'tokens'
    text = f'{" to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seed{"s" if seeds != [1] else ""}'
    figure.supxlabel(f'{text}; n = {n:,} {of}' if n else text, fontsize=10, color='0.35')


def decoding_scores(result):
    """The scores of exact decoding; a model without recurrence decodes as it was trained."""
    return result.get('exact', result['training'])


def accuracy_curves(result):
    """{score: {step, or depth of an answer: accuracy of decoding}} of a task."""
    if 'decoded' in result:
        return {'exact match': result['decoded']['by_depth']}
    return {name: accuracies['by_position'] for name, accuracies in decoding_scores(result).items()}


def summarise(result):
    """{'state', 'state_last', 'retrieval'}: accuracies of decoding at the longest trained length,
    where it was measured; of a task of answers {'exact match', 'depth 1', ..}; of a text {}."""
    if 'decoded' in result:
        by_depth = result['decoded']['by_depth'].items()
        return {'exact match': result['decoded']['exact_match']} | {f'depth {d}': share for d, share in by_depth}
    if 'trained_length' not in result:
        return {}
    scores, n = decoding_scores(result), str(result['trained_length'])
    summary = {'state': scores['state']['by_length'].get(n), 'state_last': scores['state']['last_by_length'].get(n)}
    return summary | {name: accuracies['by_length'].get(n) for name, accuracies in scores.items() if name != 'state'}


def print_result(result):
    """Prints the tables of one checkpoint."""
    print(f'\n{result["checkpoint"]}, step {result["update"]}, {result["data"]}/{result["split"]}')
    if 'decoded' in result:
        answers = result['decoded']
        rows = [['all', answers['exact_match']], *([f'depth {d}', share] for d, share in answers['by_depth'].items())]
        return print_table([f'{answers["answers"]} answers, {answers["cut"]} cut', 'exact match'], rows)
    measured = {name: result[name] for name in ('training', 'exact') if name in result}
    if not summarise(result):
        rows = [[name, s['bits_per_byte'], s['nats_per_token'], s['tokens']] for name, s in measured.items()]
        rows += [[name, bits, '', ''] for name, bits in result['training'].get('passes', {}).items()]
        print_table(['schedule', 'bits per byte', 'nats per token', 'tokens'], rows)
        print()
        buckets = result['training']['by_position']
        rows = [[bucket, *(scores['by_position'][bucket] for scores in measured.values())] for bucket in buckets]
        return print_table(['position', *(f'bits per byte ({name})' for name in measured)], rows)
    columns = {f'{name} ({schedule})': column for schedule, scores in measured.items() for name, column in scores.items()}
    for by, label in (('by_position', 'step'), ('by_length', 'length'), ('last_by_length', 'length, last step')):
        lengths = next(iter(columns.values()))[by]
        print_table([label, *columns], [[n, *(column[by].get(n) for column in columns.values())] for n in lengths])
        print()
    print_table(['all lengths', *columns], [['', *(column['all'] for column in columns.values())]])


def draw_accuracies(cells, path):
    """Accuracy of decoding of {cell: results of its seeds} against the step, one panel per score, or of answers against their
    depth: the mean over the seeds and a band from the worst to the best. The first cell is on top."""
    first = next(iter(cells.values()))[0]
    names = list(accuracy_curves(first))
    settings = dict(figsize=(5.5 * len(names), 4.2), sharey=True, squeeze=False)
    with drawing(path, 1, len(names), **settings) as (figure, panels):
        for panel, name in zip(panels[0], names, strict=True):
            for i, (cell, results) in enumerate(cells.items()):
                curves = [accuracy_curves(result)[name] for result in results]
                steps = [int(step) for step in curves[0] if all(step in curve for curve in curves)]
                values = np.array([[curve[str(step)] for step in steps] for curve in curves])
                # Of lines that coincide the lower ones are wider, and their markers stand at other steps.
                every = (i * len(steps) // len(cells) % (skip := 1 + len(steps) // 20), skip)
                style = dict(linewidth=1.6 + 0.4 * i, markersize=5 + 0.8 * i, zorder=3 - 0.1 * i, markevery=every)
                (line,) = panel.plot(steps, values.mean(0), label=cell, **style)
                panel.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
            lines = {'chance': (panel.axhline, first.get('chance', {}).get(name), '--')}
            lines['longest trained'] = (panel.axvline, first.get('trained_length'), ':')
            for label, (draw, at, dashes) in lines.items():
                if at is not None:
                    draw(at, color='0.45', linestyle=dashes, linewidth=1.2, label=label, zorder=1)
            panel.set(xlabel='depth' if 'decoded' in first else 'step of the example', title=name, ylim=(-0.03, 1.03))
            whole_numbers(panel)
            panel.yaxis.set_major_formatter('{x:.0%}')
        panels[0][0].set_ylabel('accuracy, as decoded')
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc='outside upper center', ncols=min(len(cells) + 2, 5))
        caption(figure, cells)


def effective_gates(diagnosis):
    """{gate: mean of what it multiplies by}: T2MLR's sigmoids times tanh(gamma); those of LRT as they are, for each layer."""
    if 'moved' not in diagnosis:
        return diagnosis['gates']
    return {name: np.tanh(diagnosis['gammas'][f'fusion.gamma_{name}']) * gate for name, gate in diagnosis['gates'].items()}


def print_diagnosis(diagnosis):
    """Prints the tables of a diagnosis."""
    print_table(['parameter', 'value'], list(diagnosis['gammas'].items()))
    gates, effective, moved = diagnosis['gates'], effective_gates(diagnosis), diagnosis.get('moved')
    print()
    if moved is not None:
        print_table(['gate', 'sigmoid', 'tanh(gamma) sigmoid'], [[name, gates[name], float(effective[name])] for name in gates])
        print(f'\nPhi changes the stream by {moved:.4f} of its norm')
    else:
        print_table(['layer', 'gate_loc', 'gate_rec'], [[layer, *gate.values()] for layer, gate in gates.items()])
    print('\nlargest relative change of the span by pass: ' + ' '.join(f'{r:.1e}' for r in diagnosis['residuals']))
    print('\nnats lost at token t + k without the memory that token t reads:')
    print_table(['k', 'nats'], list(diagnosis['carried'].items()))


def draw_diagnosis(diagnosis, path):
    """The gates of a recurrence, its residuals by pass, and the effect of its memory on later tokens."""
    gates, residuals, carried = effective_gates(diagnosis), diagnosis['residuals'], diagnosis['carried']
    with drawing(path, 1, 3, figsize=(13, 4)) as (_, panels):
        if 'moved' in diagnosis:
            panels[0].bar(list(gates), list(gates.values()), 0.5, color=COLOURS[:2])
            panels[0].axhline(0, color='0.45', linewidth=1)
            panels[0].set(title='effective gates', ylabel='mean of tanh(gamma) sigmoid')
        else:
            panels[0].plot(list(gates), [list(gate.values()) for gate in gates.values()], label=['loc', 'rec'])
            panels[0].legend()
            panels[0].set(title='gates', xlabel='layer', ylabel='mean')
            whole_numbers(panels[0])
        panels[1].plot(range(1, len(residuals) + 1), residuals)
        panels[1].set(title='fixed point', xlabel='pass', ylabel='largest relative change', yscale='log')
        whole_numbers(panels[1])
        panels[2].plot(list(carried), list(carried.values()))
        panels[2].set(title='memory at t set to 0', xlabel='tokens later', ylabel='nats lost', xscale='symlog')
        panels[2].set_xticks(list(carried), [str(k) for k in carried])


def read_study(folder):
    """{cell: [result of each seed]} of the files NAME-SEED.json in `folder`; raises ConfigError where there is none."""
    cells = {}
    for path in sorted(Path(folder).glob('*-*.json')):
        with explaining(f'{path} cannot be read', 'delete it and measure again'):
            result = json.loads(path.read_text(encoding='utf-8'))
            missing = {'training_flops', 'training_seconds', 'parameters'} - result.keys()
            if missing or not {'training', 'decoded'} & result.keys():
                raise ValueError('it is no measurement of a checkpoint')
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
    """(what ranks a cell, lowest first; {score: mean over seeds}; {column: text}), bits per byte or accuracies."""
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
    """Prints the table of a study in Markdown and draws its figure: of tasks accuracies, of texts bits per byte and costs."""
    rows = sorted(((cell, *study_row(results)) for cell, results in cells.items()), key=lambda row: row[1])
    print_markdown(['cell', *rows[0][-1]], [[cell, *columns.values()] for cell, *_, columns in rows])
    if config.json:
        print(json.dumps({cell: means for cell, _, means, _ in rows}))
    if config.figure:
        ranked = {cell: cells[cell] for cell, *_ in rows}
        draw = draw_accuracies if summarise(next(iter(ranked.values()))[0]) else draw_costs
        draw(ranked, config.figure)
