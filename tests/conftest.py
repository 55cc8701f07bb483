"""`python -m pytest -m fault` runs the tests of faults alone, and ends with a table: each fault, its trials, its failures."""

import fcntl
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import prepare_data

TRIALS = Counter()


def trial():
    """Counts one trial of the test that runs; a test that never calls this is one trial."""
    TRIALS[os.environ['PYTEST_CURRENT_TEST'].rpartition(' ')[0]] += 1


def made_once(tmp_path_factory, name, make):
    """The folder `name`, which make(folder) fills once for all processes of pytest-xdist; the others wait until it is
    whole. Where make fails, the next one makes another."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if 'PYTEST_XDIST_WORKER' in os.environ else root
    whole = root / f'{name}.whole'
    with open(root / f'{name}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            folder = tmp_path_factory.mktemp(name)
            make(folder)
            whole.write_text(str(folder))
    return Path(whole.read_text())


def make_text(root):
    """A text dataset of eight documents, root/text, and its files."""
    (root / 'source').mkdir()
    for i in range(8):
        (root / 'source' / f'{i}.txt').write_text(''.join(f'line {j} of document {i}\n' for j in range(60)))
    prepare_data.main(['text', f'--source={root}/source', '--val_fraction=0.3', f'--out={root}/text'])


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """A text dataset and an aligned task."""
    root = tmp_path_factory.mktemp('data')
    make_text(root)
    sizes = [f'--n_{split}={n}' for split, n in (('train', 200), ('val', 40), ('test', 40))]
    prepare_data.main(['s5', '--group=3', '--steps=1-4', f'--out={root}/task', *sizes])
    return root


def pytest_configure(config):
    config.addinivalue_line('markers', 'fault(what, outcome): what may go wrong in a run, and what then holds')


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    marker = item.get_closest_marker('fault')
    report.fault = marker and marker.args
    report.trials = TRIALS[item.nodeid] or 1  # counted where the test ran; the report travels to where the table is printed


def pytest_terminal_summary(terminalreporter, config):
    if config.option.markexpr != 'fault':
        return
    trials, failed = Counter(), defaultdict(int)
    for outcome in ('passed', 'failed', 'error'):
        reports = [r for r in terminalreporter.getreports(outcome) if getattr(r, 'fault', None)]
        for report in sorted(reports, key=lambda r: r.location[:2]):  # in the order of the files, whichever ended first
            if report.when == 'call' or outcome == 'error':
                trials[report.fault] += report.trials
                failed[report.fault] += outcome != 'passed'
    print('\n\n| fault | what holds | trials | failed |\n| --- | --- | ---: | ---: |')
    for (what, holds), n in trials.items():
        print(f'| {what} | {holds} | {n:,} | {failed[what, holds]} |')
    print(f'| all | | {trials.total():,} | {sum(failed.values())} |')
