"""The picture of the two recurrences, of what a scan adds to a pass, and of the positions that each pass computes."""

from schedule import SEQUENTIAL, Schedule
from support.figures import COLOURS, drawing

BLUE, RED, GREEN = COLOURS[:3]
LAYERS, TOP = 6, 7.1  # of the stack; the height of the memories above it


def draw_overview(path):
    """The recurrences as stacks of layers over three tokens, the scan, and the positions of each pass of each schedule."""
    schedules = [Schedule('jacobi', 3, 2), Schedule('interleaved'), Schedule('chunked', chunk_size=3), SEQUENTIAL]
    names = [schedule.schedule for schedule in schedules]
    mosaic = [['T2MLR'] * 4 + ['LRT'] * 4 + ['scan'] * 4, [name for name in names for _ in range(3)]]
    with drawing(path, mosaic, figsize=(12, 8.4), height_ratios=[1.5, 1]) as (figure, panels):
        draw_recurrence(panels['T2MLR'], 'T2MLR: a middle span', range(2, 4), 4, [2.35])
        draw_recurrence(panels['LRT'], 'LRT: every layer', range(LAYERS), 5, [layer + 0.35 for layer in range(LAYERS)])
        draw_scan(panels['scan'], 8)
        for name, schedule in zip(names, schedules, strict=True):
            draw_schedule(panels[name], schedule, 8)
        panels['T2MLR'].set_ylabel('layer')
        panels[names[0]].set_ylabel('pass, the first on top')
        for panel in panels.values():
            panel.spines[:].set_visible(False)
            panel.tick_params(length=0)
        meanings = {'reads no memory': ('0.75', 1), 'reads the memory': (BLUE, 1), 'paler: no gradient': (BLUE, 0.35)}
        handles = [panels[names[0]].bar(0, 0, color=colour, alpha=alpha) for colour, alpha in meanings.values()]
        figure.legend(handles, meanings, loc='outside lower center', ncols=3, frameon=False)


def draw_recurrence(panel, title, span, source, reads):
    """Layers of three tokens, those of the span in colour; above each the memory that it writes, from the height `source`; in
    red the reads of the next token, at the heights `reads`; in green the direct path from memory to memory."""
    for t in range(3):
        for layer in range(LAYERS):
            panel.bar(t, 0.7, 0.44, bottom=layer, edgecolor='0.3', color=BLUE if layer in span else '0.9', alpha=0.55)
        panel.plot([t + 0.22, t + 0.29, t + 0.29], [source - 0.65, source - 0.65, TOP - 0.7], '0.3', marker='')
        arrow(panel, (t + 0.29, TOP - 0.75), (t + 0.15, TOP - 0.4), '0.3')
        panel.plot(t, TOP, 'o', markersize=33, color='white', markeredgecolor=RED, markeredgewidth=2)
        panel.text(t, TOP - 0.02, ('$m_{t-1}$', '$m_t$', '$m_{t+1}$')[t], ha='center', va='center')
    for t in range(2):
        for height in reads:
            arrow(panel, (t + 0.2, TOP - 0.3), (t + 0.77, height), RED)
        arrow(panel, (t + 0.24, TOP), (t + 0.76, TOP), GREEN, linestyle='--', linewidth=2.2)
    panel.text(0.5, TOP + 0.55, 'direct path', color=GREEN, ha='center', fontsize=11)
    panel.set(xlim=(-0.5, 2.5), ylim=(-0.1, TOP + 1), title=title)
    panel.set_xticks(range(3), ['token t - 1', 'token t', 'token t + 1'])
    panel.set_yticks([layer + 0.35 for layer in range(LAYERS)], range(LAYERS))


def arrow(panel, start, end, colour, **style):
    properties = dict(arrowstyle='->', color=colour, linewidth=1.6, shrinkA=0, shrinkB=0)
    panel.annotate('', end, start, arrowprops=properties | style)


def draw_scan(panel, T):
    """How far what the first token writes has come after each pass, without the scan and with it."""
    for low, passes in ((0, 'plain passes'), (5.2, 'scan passes')):
        for row in range(4):
            reached = range(row + 1)
            panel.bar(range(T), 0.8, 0.86, bottom=-low - row, color='0.9')
            panel.bar(reached, 0.8, 0.86, bottom=-low - row, color=RED)
            if passes == 'scan passes':
                panel.bar(range(row + 1, T), 0.8, 0.86, bottom=-low - row, color=GREEN, alpha=0.45)
        panel.text(-0.43, 1.05 - low, passes, fontsize=11)
    panel.text(-0.43, -10.1, 'red: through the layers', color=RED, fontsize=11)
    panel.text(-0.43, -10.9, 'green: along the direct path alone', color=GREEN, fontsize=11)
    panel.set(xlim=(-0.6, T - 0.4), ylim=(-11.2, 1.9), title='The reach of one memory', xticks=[])
    panel.set_yticks([0.4 - low - row for low in (0, 5.2) for row in range(4)], ['initial', 'pass 1', 'pass 2', 'pass 3'] * 2)


def draw_schedule(panel, schedule, T):
    """The passes of a schedule over T positions, one row per pass."""
    for row, p in enumerate(schedule.passes(T)):
        colour, alpha = BLUE if p.reads_memory else '0.75', 1.0 if p.with_grad else 0.35
        panel.bar(p.positions, 0.8, 0.86, bottom=-row, align='edge', color=colour, alpha=alpha)
    uses = {'jacobi': 'jacobi: T2MLR', 'interleaved': 'interleaved: LRT', 'sequential': 'sequential: exact'}
    title = uses.get(schedule.schedule, schedule.schedule)
    panel.set(xlim=(-0.2, T), ylim=(-T + 0.8, 1), title=title, xlabel='position', xticks=[], yticks=[])
