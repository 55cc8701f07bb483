"""Figures: nothing is cut, ticks count what is counted, models look different, and gates are shown as what they multiply by."""

import math
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

import configurator
import eval as evaluation
from support import figures

RESULTS = Path(configurator.__file__).parent / 'results'
STUDIES = ['quickstart', 's5', 'reasoning_paths', 'reasoning_variables', 'ablation']
DIAGNOSIS = {
    'gammas': {'fusion.gamma_cur': -0.5, 'fusion.gamma_rec': 0.1},
    'gates': {'cur': 0.75, 'rec': 0.6},
    'moved': 0.05,
    'residuals': [1.0, 1e-2, 1e-4],
    'carried': {0: 0.3, 1: 0.1, 2: 0.05, 4: 0.0},
}
BY_LAYER = {key: DIAGNOSIS[key] for key in ('gammas', 'residuals', 'carried')}
BY_LAYER |= {'gates': {layer: {'loc': 1.0, 'rec': 0.9} for layer in range(4)}}


@pytest.fixture
def drawn(monkeypatch):
    """What draws a figure without a file: `with drawn() as figures: ..` and then figures[0]."""

    @contextmanager
    def record():
        found = []
        monkeypatch.setattr(Figure, 'savefig', lambda figure, *_, **__: found.append(figure))
        yield found
        assert len(found) == 1

    return record


def draw(name, record):
    with record() as found:
        if name in STUDIES:
            evaluation.main([f'--study={RESULTS / name}', f'--figure={RESULTS / "new.png"}'])
        elif name == 'overview':
            evaluation.main([f'--overview={RESULTS / "new.png"}'])
        else:
            figures.draw_diagnosis(BY_LAYER if name == 'diagnosis of LRT' else DIAGNOSIS, 'new.png')
    return found[0]


@pytest.mark.parametrize('name', [*STUDIES, 'overview', 'diagnosis', 'diagnosis of LRT'])
def test_no_label_is_cut_and_whole_numbers_are_whole(drawn, name):
    figure = draw(name, drawn)
    figure.draw_without_rendering()
    drawn_box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert drawn_box.x0 > -0.01 and drawn_box.x1 < width + 0.01, f'{name} is cut at a side: {drawn_box}'
    assert drawn_box.y0 > -0.01 and drawn_box.y1 < height + 0.01, f'{name} is cut at the top or bottom: {drawn_box}'
    for panel in figure.axes:
        if panel.get_xlabel() in ('step of the example', 'depth', 'layer', 'pass', 'training FLOPs, 1e12'):
            assert all(tick == int(tick) for tick in panel.get_xticks()), panel.get_xlabel()


@pytest.mark.parametrize('name', ['quickstart', 's5'])
def test_models_look_different_and_a_guess_is_a_line(drawn, name):
    figure, cells = draw(name, drawn), figures.read_study(RESULTS / name)
    for panel in figure.axes:
        lines = {line.get_label(): line for line in panel.lines}
        assert set(cells) | {'chance', 'longest trained'} == set(lines)
        looks = {(lines[cell].get_color(), lines[cell].get_marker()) for cell in cells}
        assert len(looks) == len(cells)
        chance = next(iter(cells.values()))[0]['chance'][panel.get_title()]
        assert lines['chance'].get_ydata() == [chance, chance]
        best = max(cells, key=lambda cell: lines[cell].get_zorder())
        assert best.startswith('t2mlr') and lines[best].get_linewidth() == min(lines[cell].get_linewidth() for cell in cells)
    assert '1 seed; n = 2,000 test examples' in [t.get_text() for t in figure.texts]


def test_several_seeds_are_a_mean_and_a_band(drawn):
    cells = figures.read_study(RESULTS / 's5')
    both = {'pair': [cells['lstm'][0], cells['transformer'][0]], 'one': cells['loop']}
    with drawn() as found:
        figures.draw_accuracies(both, 'new.png')
    (panel, _), name = found[0].axes, 'state'
    curves = [figures.accuracy_curves(result)[name] for result in both['pair']]
    expected = [np.mean([curve[str(step)] for curve in curves]) for step in range(1, 41)]
    line = next(line for line in panel.lines if line.get_label() == 'pair')
    assert list(line.get_ydata()) == pytest.approx(expected)
    edge = panel.collections[0].get_paths()[0].vertices
    assert edge[:, 1].min() == pytest.approx(min(min(c.values()) for c in curves))
    assert '1 to 2 seeds; n = 2,000 test examples' in [t.get_text() for t in found[0].texts]


def test_every_variant_of_a_text_study_has_a_row(drawn):
    figure, cells = draw('ablation', drawn), figures.read_study(RESULTS / 'ablation')
    bits, cost = figure.axes
    names = [label.get_text() for label in bits.get_yticklabels()]
    assert sorted(names) == sorted(cells) and names[0] == 'plain-matched' and bits.yaxis_inverted()
    assert [bar.get_width() for bar in cost.patches] == [cells[name][0]['training_flops'] / 1e12 for name in names]


def test_gates_are_shown_as_they_act(drawn, capsys):
    """T2MLR's sigmoids act through tanh(gamma): a gate of 0.75 behind a gamma of 0 does nothing."""
    figure = draw('diagnosis', drawn)
    expected = [math.tanh(-0.5) * 0.75, math.tanh(0.1) * 0.6]
    assert [bar.get_height() for bar in figure.axes[0].patches] == pytest.approx(expected)
    figures.print_diagnosis(DIAGNOSIS)
    printed = capsys.readouterr().out
    assert all(f'{value:.4f}' in printed for value in (*expected, 0.75, 0.6))
