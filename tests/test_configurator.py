"""Laws of the settings: every malformed argument ends in one sentence and exit code 2 with nothing written; what is accepted
has its declared type; defaults give way to the config file and the config file to the command line."""

import os
import random
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from conftest import trial

import configurator
import eval as evaluation
import prepare_data
import sample
import train
from configurator import key, parse

ROOT = Path(train.__file__).parent


@dataclass
class Toy:
    """One key of each type."""

    count: int = key(3, 'a whole number of things')
    rate: float = key(1e-3, 'how fast')
    flag: bool = key(False, 'whether')
    name: str = key('abc', 'what it is called')
    weights: tuple = key((), 'one for each')
    kind: str = key('red', 'which colour', ('red', 'green'))
    share: float = key(0.5, 'how much of it', bounds=(0, 1))

    def check(self):
        if self.count == 13:
            raise configurator.ConfigError(f'count={self.count} is unlucky; take 12.')


def toy(*argv):
    return parse(Toy, list(argv), 'python toy.py')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data')
    for i in range(3):
        (folder / f'{i}.txt').write_text(f'document {i}: ' + 'words and words. ' * 12)
    prepare_data.main(['text', f'--source={folder}', '--val_fraction=0.3', f'--out={folder}/text'])
    return folder / 'text'


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder; importing a config from it leaves no bytecode behind and no module for the next test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], '__file__', None)):
            del sys.modules[name]


def snapshot(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob('*')}


def refused(capsys, call, *says):
    """`call` ends with code 2 and one line on stderr that holds each of `says`; the working folder stays as it was."""
    before = snapshot(Path.cwd())
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call()
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert said.out == ''
    assert len(said.err.splitlines()) == 1 and said.err.startswith('error: '), said.err
    for text in says:
        assert text in said.err
    assert snapshot(Path.cwd()) == before


# Arguments


@pytest.mark.parametrize(
    'argv, says',
    [
        (['--seed', '3'], ["'--seed'", '--seed=3']),
        (['--seed'], ["'--seed'", '--seed=']),
        (['-seed=3'], ["'-seed=3'", '--seed=3']),
        (['-seed', '3'], ["'-seed'", '--seed=3']),
        (['seed=3'], ["'seed=3'", '--seed=3']),
        (['3'], ["'3'", '--key=value']),
        (['config/x'], ["'config/x'", '.py']),
        (['--seed=3', '--seed=3'], ['--seed', 'twice']),
        (['--seed=3', '--seed=4'], ['--seed', 'twice']),
        (['--compile', '--compile=True'], ['--compile', 'twice']),
        (['--leraning_rate=1'], ["'leraning_rate'", "'learning_rate'"]),
        (['--max-steps=1'], ["'max-steps'", "'max_steps'"]),
        (['--Seed=1'], ["'Seed'", "'seed'"]),
        (['--max_steps=10.5'], ['max_steps=10.5', 'whole number']),
        (['--max_steps=ten'], ['max_steps=ten', 'whole number']),
        (['--max_steps='], ['max_steps=', 'whole number']),
        (['--max_steps=True'], ['max_steps=True', 'whole number']),
        (['--max_steps=inf'], ['max_steps=inf', 'whole number']),
        (['--learning_rate=nan'], ['learning_rate=nan', 'a number']),
        (['--learning_rate=-inf'], ['learning_rate=-inf', 'a number']),
        (['--learning_rate=1e999'], ['learning_rate=1e999', 'a number']),
        (['--learning_rate=fast'], ['learning_rate=fast', 'a number']),
        (['--learning_rate=1,5'], ['learning_rate=1,5', 'a number']),
        (['--compile=yes'], ['compile=yes', 'True or False']),
        (['--compile', 'false'], ["'false'", '--key=value']),
        (['--pass_weights=1,b'], ['pass_weights=b', 'number']),
        (['--schedule=jacobbi'], ['schedule=jacobbi', "'jacobi'"]),
        (['--optimizer=sgd'], ['optimizer=sgd', 'adamw', 'muon']),
        (['--dtype=float16'], ['dtype=float16', 'bfloat16']),
        (['--device=tpu'], ['device=tpu', 'cpu']),
    ],
)
@pytest.mark.fault('a malformed, repeated or unknown argument', 'one sentence, code 2, nothing written')
def test_a_malformed_argument_is_one_sentence(here, data, capsys, argv, says):
    refused(capsys, lambda: train.main([f'--data_dir={data}', f'--out_dir={here}/out', *argv]), *says)


@pytest.mark.parametrize('command', [train.main, sample.main, evaluation.main, lambda a: prepare_data.main(['s5', *a])])
def test_every_command_refuses_alike(here, capsys, command):
    refused(capsys, lambda: command(['--nonsense=1']), "'nonsense'")
    refused(capsys, lambda: command(['--seed', '3']), '--seed=3')
    refused(capsys, lambda: command(['missing.py']), 'missing.py')


def test_a_process_ends_with_code_2_and_one_line(tmp_path):
    done = subprocess.run([sys.executable, ROOT / 'train.py', '--seed', '3'], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ''
    assert len(done.stderr.splitlines()) == 1 and '--seed=3' in done.stderr
    assert not list(tmp_path.iterdir())


def test_only_the_first_of_several_processes_speaks(here, capsys, monkeypatch):
    for rank, lines in ((0, 1), (1, 0)):
        monkeypatch.setenv('RANK', str(rank))
        with pytest.raises(SystemExit) as stop:
            toy('--count=x')
        assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == lines


# Types


@pytest.mark.fault('numbers in every spelling', 'exact, or refused')
def test_numbers_are_read_in_every_usual_spelling():
    rng = random.Random(0)
    for _ in range(300):
        number = rng.choice([-1, 1]) * 10 ** rng.uniform(-9, 9)
        for text in (repr(number), f'{number:e}', f'{number:.3E}', f'{number:+f}'):
            trial()
            rate = toy(f'--rate={text}').rate
            assert type(rate) is float and rate == float(text)
        whole = rng.randint(14, 10**6)
        for text in (str(whole), f'+{whole}', f'{whole}.0', f'{whole}e2'):
            trial()
            count = toy(f'--count={text}').count
            assert type(count) is int and count == float(text)
    assert toy('--count=1e3').count == 1000 and toy('--count=-7').count == -7
    assert toy('--rate=1').rate == 1.0 and type(toy('--rate=1').rate) is float
    assert toy('--count=9007199254740993').count == 9007199254740993  # 2^53 + 1 is no float


@pytest.mark.fault('a fraction where a count is meant', 'one sentence, code 2, nothing written')
def test_fractions_are_no_counts(capsys):
    rng = random.Random(1)
    for _ in range(100):
        trial()
        text = f'{rng.randint(-50, 50)}.{rng.randint(1, 9)}'
        with pytest.raises(SystemExit):
            toy(f'--count={text}')
        assert f'count={text}' in capsys.readouterr().err


@pytest.mark.fault('other spellings of True and False', 'one sentence, code 2, nothing written')
def test_booleans_have_their_spellings_and_no_others(capsys):
    for text, value in {'True': True, 'true': True, '1': True, 'False': False, 'false': False, '0': False}.items():
        assert toy(f'--flag={text}').flag is value
    assert toy('--flag').flag is True
    for text in ('yes', 'no', 'on', 'off', 'TRUE', 'FALSE', 't', '', '2', '1.0', '-1', ' True', 'None'):
        trial()
        with pytest.raises(SystemExit) as stop:
            toy(f'--flag={text}')
        assert stop.value.code == 2 and 'True or False' in capsys.readouterr().err


@pytest.mark.parametrize('text', ['123', '1e3', 'True', '', 'a=b', '--x', 'None', ' ', 'ä', '1,2'])
@pytest.mark.fault('a text that looks like a number', 'it stays a text')
def test_a_text_key_keeps_what_it_is_given(text):
    assert toy(f'--name={text}').name == text
    assert sample.parse(sample.SampleConfig, [f'--prompt={text}'], '').prompt == text


def test_tuples_hold_numbers(capsys):
    assert toy('--weights=1,2.5,1e-2').weights == (1.0, 2.5, 0.01)
    assert toy('--weights=3').weights == (3.0,)
    assert toy('--weights=').weights == ()
    for text in ('a', '1,nan', '1;2', '(1,2)'):
        with pytest.raises(SystemExit):
            toy(f'--weights={text}')
        assert 'weights=' in capsys.readouterr().err


def test_a_bounded_number_may_be_at_its_bounds_and_not_beyond(capsys):
    assert toy('--share=0').share == 0 and toy('--share=1').share == 1
    for text, near in (('-0.01', 0), ('1.01', 1), ('1e300', 1)):
        with pytest.raises(SystemExit) as stop:
            toy(f'--share={text}')
        said = capsys.readouterr().err
        assert stop.value.code == 2 and f'it must be 0 to 1 (how much of it); the nearest is share={near}.' in said


# Config files


def test_the_config_file_overrides_defaults_and_the_command_line_the_file(here):
    (here / 'c.py').write_text("count = 5\nrate = 1\nname = 'file'\nweights = 1, 2\n")
    for argv in (['c.py', '--count=7'], ['--count=7', 'c.py']):
        config = toy(*argv)
        assert (config.count, config.rate, config.name, config.weights) == (7, 1.0, 'file', (1.0, 2.0))
        assert type(config.rate) is float and config.flag is False
    assert toy() == Toy()
    assert toy('c.py', '--weights=').weights == ()


def test_a_config_file_may_start_from_another_and_compute(here):
    (here / 'sub').mkdir()
    (here / 'sub' / 'toybase.py').write_text('count = 5\nrate = 0.5\n')
    (here / 'sub' / 'c.py').write_text(
        'import math\nfrom toybase import *\n\n\ndef half(x):\n    return x / 2\n\n\nrate = half(rate)\n_private = math.pi\n'
    )
    config = toy('sub/c.py')
    assert (config.count, config.rate) == (5, 0.25)
    assert str(here / 'sub') not in sys.path


@pytest.mark.parametrize(
    'text, says',
    [
        ('counts = 5', ["'counts'", 'c.py', "'count'"]),
        ('count = (', ['c.py', 'SyntaxError']),
        ('count = 1 / 0', ['c.py', 'ZeroDivisionError']),
        ('from nowhere_to_be_found import *', ['c.py', 'nowhere_to_be_found']),
        ('count = 2.5', ['count=2.5', 'whole number']),
        ('count = None', ['count=None', 'whole number']),
        ('count = [1]', ['count=[1]', 'whole number']),
        ('count = True', ['count=True', 'whole number']),
        ("rate = 'fast'", ['rate=fast', 'a number']),
        ("rate = float('nan')", ['rate=nan', 'a number']),
        ('rate = False', ['rate=False', 'a number']),
        ('flag = 2', ['flag=2', 'True or False']),
        ('flag = None', ['flag=None', 'True or False']),
        ('name = 5', ['name=5', 'a text']),
        ('weights = 1', ['weights=1', 'numbers']),
        ("weights = ('a',)", ['weights=a', 'number']),
        ("kind = 'gren'", ['kind=gren', "'green'"]),
        ('count = 13', ['count=13', 'take 12']),
        ("raise ValueError('first line\\nsecond line')", ['c.py', 'ValueError', 'first line']),
        ('import math', ['c.py', 'sets no key']),
        ('', ['c.py', 'sets no key']),
    ],
)
def test_a_faulty_config_file_is_one_sentence(here, capsys, text, says):
    (here / 'c.py').write_text(text)
    refused(capsys, lambda: toy('c.py'), *says)


def test_a_missing_config_file_is_answered_with_the_nearest(here, capsys):
    (here / 'config').mkdir()
    (here / 'config' / 's3_t2mlr.py').write_text('count = 1\n')
    (here / 'config' / 'other.py').write_text('count = 1\n')
    refused(capsys, lambda: toy('config/s3_tmlr.py'), 'config/s3_tmlr.py', "'config/s3_t2mlr.py'")
    refused(capsys, lambda: toy('s3_t2mlr.py'), "'config/s3_t2mlr.py'")
    refused(capsys, lambda: toy('config/zzqq.py'), 'there are config/other.py, config/s3_t2mlr.py')
    refused(capsys, lambda: toy('nowhere/x.py'), 'nowhere/x.py')
    refused(capsys, lambda: toy('config/s3_t2mlr.py', 'config/other.py'), 'config/s3_t2mlr.py', 'config/other.py', 'one')
    refused(capsys, lambda: toy('config/other.py', 'config/other.py'), 'config/other.py')
    (here / 'folder.py').mkdir()
    refused(capsys, lambda: toy('folder.py'), 'folder.py')


def test_what_the_config_files_of_the_project_say_is_accepted():
    files = sorted((ROOT / 'config').glob('*.py'))
    assert files
    for path in files:
        argv = [str(path), '--dry_run=True']  # which fetches no pretrained weights
        assert parse(train.TrainConfig, argv, '') != train.TrainConfig(dry_run=True)


# Help


@pytest.mark.parametrize(
    'main, config_class',
    [
        (train.main, train.TrainConfig),
        (sample.main, sample.SampleConfig),
        (evaluation.main, evaluation.EvalConfig),
        (lambda a: prepare_data.main(['text', *a]), prepare_data.TextConfig),
        (lambda a: prepare_data.main(['s5', *a]), prepare_data.S5Config),
    ],
)
@pytest.mark.parametrize('argv', [['--help'], ['-h'], ['--nonsense', '--help']])
def test_help_lists_every_key_with_default_and_meaning(here, capsys, main, config_class, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    said = capsys.readouterr()
    assert stop.value.code == 0 and said.err == ''
    lines = said.out.splitlines()
    for f in fields(config_class):
        (line,) = [n for n in lines if n.strip().startswith(f'--{f.name}=')]
        assert f.metadata['meaning'] and f.metadata['meaning'] in line
        assert line.strip().split('  ')[0] == f'--{f.name}={configurator.show(f.default, f.metadata["names"])}'
        assert all(str(c) in line for c in f.metadata['choices'])
    assert not list(here.iterdir())


# Combinations that cannot be


def flags(text):
    return [f'--{setting}' for setting in text.split()]


T2MLR = 'recurrence=t2mlr l_start=1 l_end=1'
LRT = 'recurrence=lrt source_layer=1'


@pytest.mark.parametrize(
    'settings, says',
    [
        *((f'{name}=0', [f'{name}=0']) for name in ('block_size', 'n_layer', 'n_head', 'n_embd')),
        *((f'{name}=-1', [f'{name}=-1']) for name in ('vocab_size', 'n_kv_head', 'n_hidden')),
        ('rope_base=0', ['rope_base=0']),
        ('norm_eps=0', ['norm_eps=0']),
        ('n_embd=18 n_head=4', ['n_embd=18', 'n_head=4', '16']),
        ('n_embd=3 n_head=4', ['n_embd=3', 'n_head=4', '4']),
        ('n_head=4 n_kv_head=3', ['n_kv_head=3', 'n_head=4', '1, 2, 4']),
        ('n_embd=12 n_head=4', ['n_embd=12', 'n_head=4', 'n_embd=16', 'positional=none']),
        (f'{T2MLR} l_end=3', ['l_end=3', 'n_layer=3', '2']),
        (f'{T2MLR} l_end=-1', ['l_end=-1', 'n_layer=3', '0']),
        (f'{T2MLR} l_start=-1', ['l_start=-1', 'n_layer=3', '0']),
        (f'{T2MLR} l_start=2', ['l_start=2', 'l_end=1']),
        (f'{LRT} source_layer=3', ['source_layer=3', 'n_layer=3', '2']),
        (f'{LRT} source_layer=-2', ['source_layer=-2', '-1']),
        (f'{LRT} memory_projection=none residual_injection=False', ['memory_projection=none', 'residual_injection=False']),
        (f'architecture=lstm {T2MLR}', ['architecture=lstm', 'recurrence=t2mlr']),
        ('architecture=lstm reset_token=1', ['architecture=lstm', 'reset_token=1']),
        ('reset_token=-3', ['reset_token=-3', 'document or none']),
        ('reset_token=257', ['reset_token=257', '257']),
        ('reset_token=300 vocab_size=300', ['reset_token=300', '300']),
        ('document_attention=True reset_token=none', ['document_attention=True', 'reset_token']),
        ('d_forward=-1', ['d_forward=-1']),
        ('d_backward=0', ['d_backward=0']),
        ('n_subsets=0', ['n_subsets=0']),
        ('chunk_size=0', ['chunk_size=0']),
        (f'{T2MLR} schedule=jacobi d_forward=2 d_backward=4', ['d_backward=4', 'd_backward=3']),
        (f'{LRT} schedule=interleaved n_subsets=2 pass_weights=1,2', ['pass_weights=', '3']),
        (f'{LRT} schedule=jacobi d_forward=3 d_backward=2 pass_weights=1,2,3', ['pass_weights=', '2']),
        (f'{LRT} schedule=interleaved pass_weights=1,-1,1', ['pass_weights=', 'negative']),
        (f'{LRT} schedule=interleaved pass_weights=0,0,0', ['pass_weights=']),
        (f'{T2MLR} schedule=jacobi d_forward=2 d_backward=2 pass_weights=1,1', ['pass_weights=', 'recurrence=t2mlr']),
        *((f'schedule={s}', [f'schedule={s}', 'parallel']) for s in ('jacobi', 'interleaved', 'chunked', 'sequential')),
        *(
            (f'{name}=0', [f'{name}=0', '1'])
            for name in ('max_steps', 'batch_size', 'eval_interval', 'eval_batches', 'log_interval')
        ),
        *((f'{name}=-1', [f'{name}=-1']) for name in ('warmup_steps', 'decay_steps', 'eval_exact_batches', 'threads', 'seed')),
        *(
            (f'{name}=-0.5', [f'{name}=-0.5'])
            for name in ('learning_rate', 'weight_decay', 'grad_clip', 'recurrence_lr_scale', 'final_lr_fraction')
        ),
        *((f'{name}={v}', [f'{name}={v}']) for name in ('beta1', 'beta2') for v in ('1.0', '-0.1')),
        *((f'warmdown_fraction={v}', [f'warmdown_fraction={v}']) for v in (-0.1, 1.5)),
        ('freeze_base=True', ['freeze_base=True', 'recurrence=none']),
        (f'freeze_base=True {T2MLR} schedule=parallel', ['freeze_base=True', 'parallel']),
        (f'freeze_base=True {T2MLR} schedule=jacobi d_forward=0 d_backward=1', ['freeze_base=True', 'd_forward=0']),
        (f'{T2MLR} schedule=jacobi d_forward_start=16 d_forward_steps=5', ['d_forward_start=16', 'd_forward=16']),
        (f'{T2MLR} schedule=jacobi d_forward_start=2', ['d_forward_steps=0', '1']),
        (f'{T2MLR} schedule=interleaved d_forward_start=2 d_forward_steps=5', ['d_forward_start=2', 'schedule=interleaved']),
        (f'{T2MLR} schedule=jacobi d_forward_start=-2', ['d_forward_start=-2', '-1']),
        (f'freeze_base=True {T2MLR} schedule=jacobi d_forward_start=0 d_forward_steps=5', ['d_forward_start=0', 'freeze_base']),
        (f'{T2MLR} schedule=jacobi jacobi_tol=-1', ['jacobi_tol=-1']),
        (f'{LRT} schedule=chunked jacobi_tol=0.1', ['jacobi_tol=0.1', 'schedule=jacobi or interleaved', 'chunked']),
        ('n_loop=0', ['n_loop=0', '1']),
        *((f'{name}={10**9}', [f'{name}={10**9}']) for name in ('n_layer', 'n_loop', 'n_embd', 'n_hidden', 'vocab_size')),
        ('threads=100000', ['threads=100000']),
        *((f'{name}={10**21}', [f'{name}={10**21}']) for name in ('d_forward', 'max_steps', 'eval_batches', 'batch_size')),
        ('out_dir=', ['out_dir']),
        ('device=cpu:abc', ['device=cpu:abc', 'cpu']),
        ('n_loop=2 l_end=3', ['l_end=3', 'n_layer=3']),
        ('batch_size=10 device_batch_size=4', ['device_batch_size=4', 'batch_size=10', '2 or 5']),
        ('device_batch_size=-1', ['device_batch_size=-1', '0']),
        ('seed=1e30', ['seed=']),
    ],
)
@pytest.mark.fault('settings that exclude each other', 'one sentence, code 2, nothing written')
def test_an_impossible_combination_is_one_sentence(here, data, capsys, settings, says):
    given = {'n_layer': 3, 'n_head': 2, 'n_embd': 16, 'block_size': 8, 'batch_size': 4, 'max_steps': 20, 'warmup_steps': 2}
    given |= {'data_dir': data, 'out_dir': 'out/run', 'device': 'cpu'}
    given |= dict(setting.split('=') for setting in settings.split())
    refused(capsys, lambda: train.main([f'--{k}={v}' for k, v in given.items()]), *says)


@pytest.mark.parametrize('world, batch, near', [(5, 12, '10 or 15'), (4, 10, '8 or 12'), (2, 3, '2 or 4'), (8, 4, '8')])
@pytest.mark.fault('a batch that does not divide over the processes', 'the nearest sizes that do are named')
def test_a_batch_divides_over_all_processes(here, data, capsys, monkeypatch, world, batch, near):
    monkeypatch.setenv('WORLD_SIZE', str(world))
    argv = [f'--data_dir={data}', '--out_dir=out', f'--batch_size={batch}']
    refused(capsys, lambda: train.main(argv), f'batch_size={batch}', f'{world} processes', f'take {near}.')
    for size in near.split(' or '):  # what it proposes is accepted, and nothing nearer divides
        assert int(size) % world == 0 and abs(int(size) - batch) < world or batch < world


def test_random_valid_settings_survive_the_round_trip_through_text(here):
    rng = random.Random(2)
    for _ in range(50):
        drawn = Toy(
            rng.randint(-99, 12),
            rng.choice([1.0, rng.random(), 10 ** rng.uniform(-8, 8)]),
            rng.random() < 0.5,
            rng.choice(['', 'x y', '1', 'a=b']),
            tuple(float(rng.randint(0, 9)) for _ in range(rng.randint(0, 3))),
            rng.choice(['red', 'green']),
        )
        values = {f.name: getattr(drawn, f.name) for f in fields(Toy)}
        in_file = {name for name in values if rng.random() < 0.5}
        Path('c.py').write_text(''.join(f'{n} = {values[n]!r}\n' for n in in_file))
        rest = [f'--{n}={",".join(map(str, v)) if isinstance(v, tuple) else v}' for n, v in values.items() if n not in in_file]
        assert toy('c.py', *rest) == drawn
    assert os.listdir() == ['c.py']
