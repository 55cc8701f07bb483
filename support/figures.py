"""Figures and tables of evaluations and studies. A result is what eval.py measures of one checkpoint, as in its JSON file."""

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np

from configurator import ConfigError, explaining
from schedule import SEQUENTIAL, Schedule

COLOURS = [f'tab:{name}' for name in 'blue orange green purple brown gray olive'.split()]


@contextlib.contextmanager
def drawing(path, *shape, **settings):
    """A figure and its panels (rows and columns in `shape`), written to the file `path`."""
    import matplotlib  # slow to import, and most commands draw nothing

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    cycle = plt.cycler(color=COLOURS) + plt.cycler(marker='osD^v<>')
    with plt.rc_context({'axes.prop_cycle': cycle, 'lines.markersize': 4}):
        figure, panels = plt.subplots(*shape, layout='constrained', **settings)
        yield figure, panels
        figure.savefig(path, dpi=150)
    print(f'wrote {path}', file=sys.stderr)


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
        panel.set(xlabel='step', ylabel='loss (nats per token): training faint, validation as decoded')
        panel.legend()


def draw_overview(path):
    """The two recurrences on a stack of layers over three tokens, and which positions each pass of each schedule touches."""
    layers, orange = 6, COLOURS[1]
    with drawing(path, 1, 2 + 4, figsize=(15, 4.2), width_ratios=[2.3, 2.3, 1, 1, 1, 1]) as (figure, panels):
        t2mlr, lrt, *rest = panels
        draw_recurrence(t2mlr, 'T2MLR', layers, range(2, 4), 0.9, [(2.1, 3.6, 1.8)])
        draw_recurrence(lrt, 'LRT', layers, range(layers), 0.45, [(layer + 0.35, 4.35, 1.0) for layer in range(layers)])
        t2mlr.set_ylabel('layer')
        shown = (Schedule('jacobi', 3, 2), Schedule('interleaved'), Schedule('chunked', chunk_size=3), SEQUENTIAL)
        for panel, schedule in zip(rest, shown, strict=True):
            draw_schedule(panel, schedule, 8)
        rest[0].set_ylabel('pass (first on top)')
        for panel in panels:
            panel.spines[:].set_visible(False)
            panel.tick_params(length=0)
        meanings = {'without memory': ('0.75', 1), 'reads the memory': (orange, 1), 'without gradient': (orange, 0.35)}
        handles = [rest[0].bar(0, 0, color=colour, alpha=alpha) for colour, alpha in meanings.values()]
        figure.legend(handles, meanings, loc='outside lower right', ncols=3)


def draw_recurrence(panel, title, layers, span, alpha, reads):
    """A stack of layers at three tokens, those of the span in colour. reads: of each arrow from a token to the next, the height
    at which it arrives, the height at which it starts, and the width."""
    blue, orange = COLOURS[:2]
    for layer in range(layers):
        face = dict(color=blue, alpha=alpha) if layer in span else dict(color='0.88', alpha=0.9)
        panel.bar(range(3), 0.7, 0.56, bottom=layer, edgecolor='0.3', **face)
    for t in range(2):
        for to, source, width in reads:
            arrow = dict(arrowstyle='->', color=orange, linewidth=width)
            panel.annotate('', (t + 0.72, to), (t + 0.28, source), arrowprops=arrow)
    panel.set(xlim=(-0.6, 2.6), ylim=(-0.1, layers + 0.1), title=title)
    panel.set_xticks(range(3), ['t - 1', 't', 't + 1'])
    panel.set_yticks([layer + 0.35 for layer in range(layers)], range(layers))


def draw_schedule(panel, schedule, T):
    """The passes of a schedule over T positions, one row per pass."""
    for row, p in enumerate(schedule.passes(T)):
        colour, alpha = COLOURS[1] if p.reads_memory else '0.75', 1.0 if p.with_grad else 0.35
        panel.bar(p.positions, 0.8, 0.86, bottom=-row, align='edge', color=colour, alpha=alpha)
    depths = f' {schedule.d_forward}, {schedule.d_backward}' if schedule.schedule == 'jacobi' else ''
    panel.set(xlim=(-0.2, T), ylim=(-T + 0.8, 1), title=schedule.schedule + depths, xlabel='position', xticks=[], yticks=[])


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


def draw_costs(points, path):
    """Bits per byte against the FLOPs (1e12) of the training, of {cell: (FLOPs, bits)}, one colour per family."""
    families = sorted({cell.split('-')[0] for cell in points})
    with drawing(path, figsize=(8, 4.6)) as (figure, panel):
        for i, (cell, (flops, bits)) in enumerate(points.items()):
            colour = COLOURS[families.index(cell.split('-')[0]) % 7]
            style = dict(marker='osD^v<>pP*Xhd'[i % 13], markersize=6, color=colour, markeredgecolor='0.2', linestyle='')
            panel.plot(flops, bits, label=f'{bits:.3f}  {cell}', **style)
        plain = sorted(point for cell, point in points.items() if cell.split('-')[0] == 'plain')
        if plain:  # the transformer itself, at several costs
            panel.plot(*zip(*plain, strict=True), color='0.5', linewidth=1, marker='', zorder=0)
        panel.set(xscale='log', xlabel='FLOPs of the training (1e12)', ylabel='bits per byte, exact decoding')
        figure.legend(loc='outside right upper', fontsize=8)


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


def draw_accuracies(results, path):
    """Accuracy of decoding against the step, one panel per score, one line per checkpoint; of answers against their depth."""
    names = list(accuracy_curves(next(iter(results.values()))))
    settings = dict(figsize=(4.5 * len(names), 3.4), sharey=True, squeeze=False)
    with drawing(path, 1, len(names), **settings) as (figure, panels):
        for panel, name in zip(panels[0], names, strict=True):
            for label, result in results.items():
                points = accuracy_curves(result)[name]
                panel.plot([int(step) for step in points], list(points.values()), label=label)
            if 'trained_length' in result:
                panel.axvline(result['trained_length'] + 0.5, color='0.6', linestyle=':', linewidth=1)
            panel.set(xlabel='depth' if 'decoded' in result else 'step of the example', title=name, ylim=(-0.03, 1.03))
        panels[0][0].set_ylabel('accuracy (fraction)')
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc='outside upper center', ncols=min(len(results), 4))


def print_diagnosis(diagnosis):
    """Prints the tables of a diagnosis."""
    print_table(['parameter', 'value'], list(diagnosis['gammas'].items()))
    gates, moved = diagnosis['gates'], diagnosis.get('moved')
    print()
    if moved is not None:
        print(f'mean gates: cur {gates["cur"]:.4f}, rec {gates["rec"]:.4f}; Phi moves the stream by {moved:.4f}')
    else:
        print_table(['layer', 'gate_loc', 'gate_rec'], [[layer, *gate.values()] for layer, gate in gates.items()])
    print('\nlargest relative change of the span by pass: ' + ' '.join(f'{r:.1e}' for r in diagnosis['residuals']))
    print('\nnats lost at token t + k without the memory that token t reads:')
    print_table(['k', 'nats'], list(diagnosis['carried'].items()))


def draw_diagnosis(diagnosis, path):
    """The gates of a recurrence, its residuals by pass, and the effect of its memory on later tokens."""
    gates, residuals, carried = diagnosis['gates'], diagnosis['residuals'], diagnosis['carried']
    with drawing(path, 1, 3, figsize=(12, 3.4)) as (_, panels):
        if 'moved' in diagnosis:
            panels[0].bar(list(gates), list(gates.values()), color=COLOURS[:2])
        else:
            panels[0].plot(list(gates), [list(gate.values()) for gate in gates.values()], label=['loc', 'rec'])
            panels[0].legend()
        panels[0].set(title='gates', xlabel='gate' if 'moved' in diagnosis else 'layer', ylabel='mean')
        panels[1].plot(range(1, len(residuals) + 1), residuals)
        panels[1].set(title='fixed point', xlabel='pass', ylabel='largest relative change', yscale='log')
        panels[2].plot(list(carried), list(carried.values()))
        panels[2].set(title='memory at t set to 0', xlabel='tokens later', ylabel='nats lost', xscale='symlog')


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
