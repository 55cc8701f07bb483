"""The layout of the code: what a file may import, how long it may be, and that every key of a model is under the laws."""

import ast
import random
from dataclasses import fields
from pathlib import Path

import pytest
from test_model import SCHEDULES, draw_config, draw_schedule

import configurator
from model import GPTConfig
from schedule import Schedule

ROOT = Path(configurator.__file__).parent
FILES = {
    '.'.join(path.relative_to(ROOT).with_suffix('').parts): path
    for pattern in ('*.py', 'support/*.py', 'runs/*.py')
    for path in sorted(ROOT.glob(pattern))
}
TREES = {name: ast.parse(path.read_text(encoding='utf-8')) for name, path in FILES.items()}

MAY_IMPORT = {  # what a stage leans on besides support/ and the modules below it
    'prepare_data': set(),
    'train': set(),
    'sample': set(),
    'eval': {'sample', 'train'},
    'bench': {'sample', 'train'},
}

LINES = {  # a file's most lines; any of support/ has those of 'support'
    'model': 760,
    'schedule': 130,
    'train': 480,
    'sample': 380,
    'prepare_data': 520,
    'eval': 480,
    'bench': 500,
    'configurator': 211,
    'support': 320,
}
LONGER_FILES = {  # more than LINES allows, and why: it may shrink and not grow
}
LONGEST_FUNCTION = 110
LONGER_FUNCTIONS = {}

NOT_DRAWN = {  # keys that the random cases leave alone, and why
    GPTConfig: {
        'architecture': 'the LSTM has tests of its own',
        'recurrence': 'each law names those that it holds for',
        'vocab_size': 'a fixed size, so that tokens can be drawn before the model',
        'block_size': 'a fixed size, so that lengths can be drawn before the model',
        'rope_scaling': 'compared with another implementation in test_pretrained.py',
        'gamma_init': 'draw_model draws the parameters that it would set',
    },
    Schedule: {
        'jacobi_tol': 'laws hold to its tolerance only; it has tests of its own',
        'min_passes': 'a training step runs one of the schedules that it stands for',
    },
}


def imports(tree):
    """The modules of this project that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, 'a relative import'
            found |= {node.module} | {f'{node.module}.{alias.name}' for alias in node.names}
    return found & FILES.keys() - {'support.__init__'}


IMPORTS = {name: imports(tree) for name, tree in TREES.items()}


@pytest.mark.parametrize('name', [name for name in FILES if not name.startswith('runs.')])
def test_no_import_points_up(name):
    stages = IMPORTS[name] & MAY_IMPORT.keys()
    assert stages <= MAY_IMPORT.get(name, set())
    assert not any(other.startswith('runs.') for other in IMPORTS[name])


def test_imports_have_no_circle():
    left = dict(IMPORTS)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f'{sorted(left)} import each other, or what does'


def test_files_are_short():
    assert LONGER_FILES.keys() <= LINES.keys()
    for name, path in FILES.items():
        size = len(path.read_text(encoding='utf-8').splitlines())
        most = LINES.get('support' if name.startswith('support.') else name)
        longer = LONGER_FILES.get(name)
        if most is not None:
            assert size <= (longer[0] if longer else most), f'{name} has {size} lines; split it'
            assert not longer or size > most, f'{name} fits its {most} lines; delete it from LONGER_FILES'


def functions(node, prefix):
    """(qualified name, node) of every function below a node."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f'{prefix}.{child.name}' if named else prefix
        if named and not isinstance(child, ast.ClassDef):
            yield name, child
        yield from functions(child, name)


def test_functions_are_short():
    sizes = {name: f.end_lineno - f.lineno + 1 for file, tree in TREES.items() for name, f in functions(tree, file)}
    assert LONGER_FUNCTIONS.keys() <= sizes.keys()
    for name, size in sizes.items():
        longer = LONGER_FUNCTIONS.get(name)
        assert size <= (longer[0] if longer else LONGEST_FUNCTION), f'{name} has {size} lines; give it steps'
        assert not longer or size > LONGEST_FUNCTION, f'{name} is short; delete it from LONGER_FUNCTIONS'


def drawn_values(config_class):
    """{key: the values that 300 random cases give it}."""
    rng = random.Random(0)
    if config_class is GPTConfig:
        cases = [draw_config(rng) for _ in range(300)]
    else:
        cases = [draw_schedule(seed, rng.randint(1, 11), SCHEDULES[seed % len(SCHEDULES)]) for seed in range(300)]
    return {f.name: {getattr(case, f.name) for case in cases} for f in fields(config_class)}


@pytest.mark.parametrize('config_class', [GPTConfig, Schedule])
def test_every_key_is_drawn(config_class):
    """A new key is under the laws of test_model.py from its first day: the random cases give it several values, and each of its
    choices."""
    values, left_alone = drawn_values(config_class), NOT_DRAWN[config_class]
    assert left_alone.keys() <= values.keys()
    for f in fields(config_class):
        if f.name in left_alone:
            assert len(values[f.name]) == 1, f'{f.name} is drawn; delete it from NOT_DRAWN'
        else:
            assert len(values[f.name]) > 1, f'{f.name} is not drawn: draw it in tests/test_model.py'
            assert set(f.metadata['choices']) <= values[f.name], f'{f.name}: not every choice is drawn'
