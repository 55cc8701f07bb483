"""Whatever is typed, and however a file is damaged: a command succeeds, or ends with exit code 2 and one sentence; never with a
traceback, a hang, or another result than that of the undamaged file. Over 2,000 cases, the same ones each time."""

import contextlib
import io
import json
import math
import shutil
from dataclasses import fields

import pytest
from conftest import trial
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eval as evaluation
import prepare_data
import sample
import train
from configurator import parse
from support.texts import argument_text

SMALL = ['--n_layer=1', '--n_head=1', '--n_embd=8', '--block_size=16', '--batch_size=2', '--device=cpu', '--threads=1']
SMALL += ['--max_steps=1', '--warmup_steps=0', '--eval_batches=1', '--eval_exact_batches=0']


def cases(n):
    return settings(
        max_examples=n,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def outcome(main, argv):
    """What `main(argv)` printed, or None when it refused as it should: code 2 and one sentence that is an error."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(argv)
    except SystemExit as stop:
        said = [line for line in err.getvalue().splitlines() if line.startswith('error: ')]
        assert stop.code == 2 and len(said) == 1 and 'Traceback' not in err.getvalue(), (argv, stop.code, err.getvalue())
        return None
    return out.getvalue()


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    """A text dataset and a trained model, of the smallest kind."""
    root = tmp_path_factory.mktemp('fuzz')
    (root / 'source').mkdir()
    for i in range(4):
        (root / 'source' / f'{i}.txt').write_text(f'some words of document {i}\n' * 8)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        prepare_data.main(['text', f'--source={root}/source', '--val_fraction=0.3', f'--out={root}/data'])
    memory = ['--recurrence=lrt', '--source_layer=0', '--schedule=interleaved']
    assert outcome(train.main, [*SMALL, *memory, f'--data_dir={root}/data', f'--out_dir={root}/run']) is not None
    return root


NUMBERS = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.0, -0.0, 0.1, 1.5, 1e-300, 1e300, math.inf, math.nan]),
    st.floats(),
).map(str)
TEXTS = st.one_of(
    st.text(max_size=12), st.sampled_from(['', 'True', 'none', 'jacobi', 'lrt', 't2mlr', 'llama', '1,2', ',', '0x1'])
)


def override(config_class):
    """Settings of a command: mostly declared keys, with values of their own kind and of others."""
    names = st.one_of(st.sampled_from([f.name for f in fields(config_class)]), st.text(max_size=8))
    choices = [c for f in fields(config_class) for c in f.metadata['choices']] or ['x']
    values = st.one_of(NUMBERS, TEXTS, st.sampled_from(choices))
    return st.one_of(
        st.builds('--{}={}'.format, names, values), st.text(max_size=8).filter(lambda t: t not in ('-h', '--help'))
    )


@pytest.mark.parametrize(
    'config_class', [train.TrainConfig, sample.SampleConfig, evaluation.EvalConfig], ids=lambda c: c.__name__
)
@pytest.mark.fault('random settings of a command', 'taken, or one sentence and code 2')
def test_settings(config_class, tmp_path, monkeypatch):
    """Either a config of the declared types, or a refusal."""
    monkeypatch.chdir(tmp_path)

    @cases(400)
    @given(st.lists(override(config_class), max_size=4))
    def check(argv):
        trial()

        def main(argv):
            config = parse(config_class, argv, 'a command')
            assert all(type(getattr(config, f.name)) is type(f.default) for f in fields(config))

        outcome(main, argv)

    check()


@pytest.mark.fault('random models and schedules', 'built, or one sentence and code 2')
def test_models(tmp_path, monkeypatch):
    """What the settings accept can be built and counted: a small model with any schedule and recurrence."""
    monkeypatch.chdir(tmp_path)
    sizes = (
        'n_layer',
        'n_head',
        'n_kv_head',
        'n_embd',
        'n_loop',
        'l_start',
        'l_end',
        'source_layer',
        'block_size',
        'mlp_hidden',
    )
    sizes += ('d_forward', 'd_backward', 'n_subsets', 'n_sweeps', 'min_passes', 'chunk_size', 'vocab_size', 'reset_token')
    declared = {f.name: f for f in fields(train.TrainConfig)}
    one = [
        st.builds(
            '--{}={}'.format, st.just(name), st.integers(-1, 12) if name in sizes else st.sampled_from(f.metadata['choices'])
        )
        for name, f in declared.items()
        if (name in sizes or f.metadata['choices']) and name not in ('wandb', 'dtype')
    ]

    @cases(300)
    @given(st.lists(st.one_of(one), max_size=6, unique_by=lambda s: s.partition('=')[0]))
    def check(argv):
        trial()
        given = {s.partition('=')[0] for s in argv}
        outcome(train.main, [*argv, *(s for s in [*SMALL, '--vocab_size=9'] if s.partition('=')[0] not in given), '--dry_run'])

    check()


@pytest.mark.fault('random prompts', 'continued, or one sentence and code 2')
def test_prompts(root):
    argv = [f'--ckpt={root}/run', '--max_tokens=2', '--device=cpu', '--temperature=0']

    @cases(300)
    @given(st.text(max_size=40), st.sampled_from(['stop', 'slide']), st.sampled_from(['jacobi', 'exact']), st.text(max_size=3))
    def check(prompt, overflow, prefill, stop):
        trial()
        found = outcome(
            sample.main, [*argv, f'--prompt={prompt}', f'--overflow={overflow}', f'--prefill={prefill}', f'--stop={stop}']
        )
        assert found is None or argument_text(prompt) in found

    check()


@pytest.mark.fault('a checkpoint with bytes flipped, cut, lost or put in', 'refused, or the same continuation')
def test_checkpoints(root, tmp_path):
    """Bytes flipped, cut off or put in between: refused, or the same continuation as before."""
    whole = (root / 'run' / 'ckpt.pt').read_bytes()
    argv = ['--prompt=some', '--max_tokens=4', '--device=cpu', '--temperature=0']
    expected = outcome(sample.main, [*argv, f'--ckpt={root}/run'])

    @cases(400)
    @given(st.integers(0, len(whole) - 1), st.sampled_from(['flip', 'cut', 'insert', 'drop', 'zero']), st.integers(1, 255))
    def check(at, how, n):
        damaged = {
            'flip': whole[:at] + bytes([whole[at] ^ n]) + whole[at + 1 :],
            'cut': whole[:at],
            'insert': whole[:at] + bytes(n) + whole[at:],
            'drop': whole[:at] + whole[at + n :],
            'zero': whole[:at] + bytes(n) + whole[at + n :],
        }[how]
        (tmp_path / 'ckpt.pt').write_bytes(damaged)
        trial()
        found = outcome(sample.main, [*argv, f'--ckpt={tmp_path}/ckpt.pt'])
        assert found is None or found == expected

    check()


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-2, 300), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)


@pytest.mark.fault('a meta.json with a value replaced, lost or cut', 'refused, or the same training')
def test_metadata(root, tmp_path):
    """A value of meta.json, at any depth, replaced or left out, or its text cut: refused, or the same training as before."""
    whole = json.loads((root / 'data' / 'meta.json').read_text())
    places = [(key,) for key in whole] + [('splits', split) for split in whole['splits']]
    places += [('splits', split, key) for split, about in whole['splits'].items() for key in about]

    def trained(folder):
        shutil.rmtree(tmp_path / 'out', ignore_errors=True)
        if outcome(train.main, [*SMALL, f'--data_dir={folder}', f'--out_dir={tmp_path}/out']) is None:
            return None
        lines = [json.loads(line) for line in (tmp_path / 'out' / 'log.jsonl').read_text().splitlines()]
        return [line.get('loss') or line['val'] for line in lines]

    expected = trained(root / 'data')
    shutil.copytree(root / 'data', tmp_path / 'data')

    @cases(250)
    @given(st.sampled_from(places), st.one_of(JSON, st.just(...)), st.integers(0, 2000))
    def check(place, value, length):
        meta = json.loads(json.dumps(whole))
        *path, name = place
        inner = meta
        for key in path:
            inner = inner[key]
        del inner[name]
        if value is not ...:
            inner[name] = value
        text = json.dumps(meta)
        (tmp_path / 'data' / 'meta.json').write_text(text[:-length] if length < 40 else text)
        trial()
        found = trained(tmp_path / 'data')
        assert found is None or found == expected

    check()
