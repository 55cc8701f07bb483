"""Settings that name what only the data know, keys by the names of other trainers, bounds, closed pipes, waiting threads."""

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import bench
import eval as evaluation
import prepare_data
import sample
import train
from configurator import ConfigError, parse
from model import GPT, GPTConfig
from support import suggestions
from support.checkpoint import read_checkpoint
from support.data import DOCUMENT, Dataset
from train import TrainConfig

ROOT = Path(train.__file__).parent
CONFIGS = sorted((ROOT / 'config').glob('*.py'))
CLASSES = [TrainConfig, sample.SampleConfig, evaluation.EvalConfig]
CLASSES += [of for of, *_ in [*bench.BENCHES.values(), *prepare_data.DATASETS.values()]]
CLASSES = list(dict.fromkeys(CLASSES))
SMALL = ['--n_layer=2', '--n_embd=16', '--n_head=2', '--block_size=32', '--batch_size=4', '--max_steps=2', '--warmup_steps=0']
SMALL += ['--l_start=0', '--l_end=1', '--d_forward=1', '--d_backward=1', '--eval_interval=2', '--eval_batches=1']
SMALL += ['--eval_exact_batches=0', '--device=cpu', '--threads=1']


def write_texts(folder):
    folder.mkdir()
    for i in range(12):
        (folder / f'{i}.txt').write_text(f'the text {i}, then that one. ' * (i + 2))
    return folder


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A folder with a text of bytes, a task of text with an example a row, one with several, and one without documents."""
    root = tmp_path_factory.mktemp('data')
    prepare_data.main(['text', f'--source={write_texts(root / "source")}', '--val_fraction=0.3', f'--out={root}/text'])
    sizes = ['--n_train=40', '--n_val=8', '--n_test=8']
    for name, pack in (('task', 0), ('packed', 200)):
        prepare_data.main(['variable_assignment', '--depth=1', *sizes, f'--pack={pack}', f'--out={root}/{name}'])
    prepare_data.main(['s5', '--group=3', '--steps=1-3', *sizes, f'--out={root}/s3'])
    return root


def error_of(capsys, call):
    """What `call` says when it ends with code 2: one line."""
    with pytest.raises(SystemExit) as stop:
        call()
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith('error: ') and len(said.splitlines()) == 1
    return said


def parsed(*argv):
    return parse(TrainConfig, argv, '')


# The token of documents


def test_no_config_names_a_token_of_one_tokenizer():
    for path in CONFIGS:
        assert parsed(str(path), '--dry_run').reset_token in (DOCUMENT, -1), path


@pytest.mark.parametrize('tokenizer', ['bytes', 'tokenizer.json'])
def test_memory_is_cleared_exactly_at_documents(tmp_path, monkeypatch, tokenizer):
    """README's path: a text under a tokenizer of one's own, and a config that knows nothing of it."""
    source = write_texts(tmp_path / 'source')
    if tokenizer != 'bytes':
        tokenizers = pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
        made = tokenizers.ByteLevelBPETokenizer()
        made.train_from_iterator([p.read_text() for p in source.iterdir()], vocab_size=257, show_progress=False)
        made.add_special_tokens(['<|endoftext|>'])
        tokenizer = str(tmp_path / tokenizer)
        made.save(tokenizer)
    out = tmp_path / 'data'
    prepare_data.main(['text', f'--source={source}', f'--tokenizer={tokenizer}', '--val_fraction=0.3', f'--out={out}'])
    meta = json.loads((out / 'meta.json').read_text())
    document, seen, site = meta['document_token'], [], GPT.site
    tokens = Dataset(str(out)).split('train')[:]
    assert (tokens == document).sum() == meta['splits']['train']['documents']
    assert document == 256 or 256 in tokens  # which bytes take for the document token

    def recorded(self, tokens, recur_mask, state):
        made = site(self, tokens, recur_mask, state)
        if state is None:  # a state's first position has nothing to read, whatever its token
            seen.append((tokens, made.reads.squeeze(-1)))
        return made

    monkeypatch.setattr(GPT, 'site', recorded)
    train.main([str(ROOT / 'config/text_t2mlr.py'), *SMALL, f'--data_dir={out}', f'--out_dir={tmp_path}/run'])
    assert any((tokens == document).any() for tokens, _ in seen)
    for tokens, reads in seen:
        assert torch.equal(reads, tokens != document)
    assert read_checkpoint(tmp_path / 'run/ckpt.pt')['config']['reset_token'] == document


T2MLR = dict(recurrence='t2mlr', schedule='jacobi', l_start=0, l_end=1)


@pytest.mark.parametrize(
    'name, settings, number',
    [
        ('text', T2MLR, 256),
        ('text', {}, 256),
        ('text', {'architecture': 'lstm'}, -1),
        ('text', T2MLR | {'reset_token': -1}, -1),
        ('text', T2MLR | {'reset_token': 256}, 256),
        ('text', {'reset_token': 32}, 32),  # which nothing reads
        ('task', T2MLR, -1),
        ('task', T2MLR | {'document_attention': True}, 256),
        ('packed', {'document_attention': True}, 256),
        ('s3', T2MLR, -1),
        ('s3', T2MLR | {'reset_token': -1}, -1),
    ],
)
def test_the_number_is_that_of_the_data(data, name, settings, number):
    assert Dataset(str(data / name)).reset_token(TrainConfig(**settings)) == number


@pytest.mark.parametrize('name, says', [('text', 'where 256 does'), ('packed', 'where 256 does'), ('s3', 'which marks none')])
def test_a_token_that_opens_no_document_is_refused(data, tmp_path, capsys, name, says):
    argv = [*SMALL, '--block_size=200', '--recurrence=lrt', '--source_layer=0', '--document_attention=True']
    argv = [a for a in argv if a != '--block_size=32']
    out = [f'--data_dir={data / name}', f'--out_dir={tmp_path}/run']
    said = error_of(capsys, lambda: train.main([*argv, *out, '--reset_token=5']))
    assert 'reset_token=5 opens no document of' in said and says in said and 'take document or none' in said
    assert not list(tmp_path.iterdir())


def test_documents_are_found_by_default_where_rows_hold_several(data, tmp_path):
    wide = [a for a in SMALL if not a.startswith('--block_size')] + ['--block_size=200', '--document_attention=True']
    train.main([*wide, f'--data_dir={data}/packed', f'--out_dir={tmp_path}/packed'])
    train.main([*SMALL, '--document_rows=True', f'--data_dir={data}/text', f'--out_dir={tmp_path}/rows'])
    for name in ('packed', 'rows'):
        assert read_checkpoint(tmp_path / name / 'ckpt.pt')['config']['reset_token'] == 256


def test_document_is_the_number_to_the_bit_and_in_a_resume(data, tmp_path, capsys):
    memory = ['--recurrence=t2mlr', '--schedule=jacobi', *SMALL, f'--data_dir={data}/text']
    found = []
    for token in ('document', '256'):
        train.main([*memory, f'--reset_token={token}', f'--out_dir={tmp_path}/{token}'])
        found.append(read_checkpoint(tmp_path / token / 'ckpt.pt'))
    assert all(torch.equal(found[0]['model'][name], p) for name, p in found[1]['model'].items())
    assert found[0]['config'] | {'out_dir': ''} == found[1]['config'] | {'out_dir': ''}
    resume = [*memory, f'--out_dir={tmp_path}/256', '--init_from=resume']
    for given in ([], ['--reset_token=256']):
        train.main([*resume, *given])
    said = error_of(capsys, lambda: train.main([*resume, '--reset_token=none']))
    assert 'reset_token=-1 (before: 256)' in said


def test_a_dry_run_without_data_needs_no_number(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main([*SMALL, '--vocab_size=64', '--document_attention=True', '--dry_run=True'])
    assert 'peak' in capsys.readouterr().out


def test_a_named_value_is_written_as_its_name(tmp_path, capsys):
    for text, number in (('document', DOCUMENT), ('none', -1), ('-1', -1), ('256', 256), ('0', 0)):
        assert parsed(f'--reset_token={text}').reset_token == number
        (tmp_path / 'c.py').write_text(f'reset_token = {text if text.lstrip("-").isdigit() else repr(text)}\n')
        assert parsed(str(tmp_path / 'c.py')).reset_token == number
    assert parsed().reset_token == DOCUMENT and GPTConfig().reset_token == -1
    said = error_of(capsys, lambda: parsed('--reset_token=documnt'))
    assert 'is not document or none or a whole number; write it like reset_token=document.' in said
    said = error_of(capsys, lambda: parsed('--reset_token=-9'))
    assert 'it must be document or none or 0 to' in said and 'the nearest is reset_token=0.' in said
    with pytest.raises(ConfigError, match='reset_token=-2'):  # a model is built with a number
        GPTConfig(reset_token=DOCUMENT).check()


@pytest.mark.parametrize('token', ['x', 1.5, None, 257, -2, [256]])
def test_a_document_token_that_is_none_is_one_sentence(data, tmp_path, token):
    meta = json.loads((data / 'text/meta.json').read_text())
    (tmp_path / 'meta.json').write_text(json.dumps(meta | {'document_token': token}))
    with pytest.raises(ConfigError, match='document_token='):
        Dataset(str(tmp_path))


# Keys and bounds


@pytest.mark.parametrize(
    'given, meant',
    [('lr', 'learning_rate'), ('LR', 'learning_rate'), ('bs', 'batch_size'), ('epochs', 'max_steps'), ('layers', 'n_layer')]
    + [('hidden_size', 'n_embd'), ('data', 'data_dir'), ('wd', 'weight_decay'), ('max-steps', 'max_steps')],
)
def test_a_key_is_known_by_what_others_call_it(capsys, given, meant):
    said = error_of(capsys, lambda: parsed(f'--{given}=1'))
    assert said == f"error: unknown key '{given}' in the command line; did you mean '{meant}'?\n"


@pytest.mark.parametrize('of', CLASSES)
def test_a_key_far_from_all_is_answered_without_a_list(capsys, of):
    said = error_of(capsys, lambda: parse(of, ['--zzqqxx=1'], ''))
    assert said == "error: unknown key 'zzqqxx' in the command line; --help lists the keys.\n"


def test_other_names_belong_to_keys_that_exist():
    declared = {f.name for of in CLASSES for f in fields(of)}
    assert set(suggestions.OTHER_NAMES) <= declared


@pytest.mark.parametrize('of', CLASSES)
def test_the_nearest_value_that_a_message_names_is_accepted(capsys, of):
    """Every bounded key of every command, below and above its bounds: what is advised is then taken."""
    apart = 'n_embd', 'warmup_steps'  # whose limits are other keys
    for f in (f for f in fields(of) if f.name not in apart):
        for beyond in (f.metadata['bounds'] and (f.metadata['bounds'][0] - 3, f.metadata['bounds'][1] * 2 + 1)) or ():
            if abs(beyond) == float('inf'):
                continue
            said = error_of(capsys, lambda: parse(of, [f'--{f.name}={beyond}'], ''))  # noqa: B023
            (near,) = re.findall(rf'the nearest is ({f.name}=\S+)\.$', said.strip())
            try:
                parse(of, [f'--{near}'], '')
            except SystemExit:
                assert not re.match(rf'error: {near}(\.0)? ', capsys.readouterr().err)  # but with another key it may not go


# Processes


COMMANDS = ['train.py', 'sample.py', 'eval.py', 'bench.py train', '-m runs.retrofit step', '-m runs.soak']


@functools.cache
def run_help(command, **environment):
    """(exit code, stderr, spin count) of a command's --help whose reader has left. The last is how often a waiting thread
    looks before it sleeps, as OpenMP prints when it is loaded; None where it prints nothing."""
    reader, writer = os.pipe()
    os.close(reader)
    there = {k: v for k, v in os.environ.items() if k not in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')}
    there |= {'OMP_DISPLAY_ENV': 'verbose'} | environment
    argv = [sys.executable, *command.split(), '--help']
    done = subprocess.run(argv, cwd=ROOT, env=there, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    spins = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    said = re.sub(r'\s*OPENMP DISPLAY ENVIRONMENT BEGIN.*?ENVIRONMENT END\s*', '', done.stderr, flags=re.DOTALL)
    return done.returncode, said, spins and int(spins[1])


@pytest.mark.parametrize('command', [*COMMANDS, 'bench.py', '-m runs.retrofit', 'prepare_data.py', 'prepare_data.py text'])
def test_a_reader_who_leaves_ends_the_help_quietly(command):
    assert run_help(command)[:2] == (141, '')


@pytest.mark.parametrize('command', COMMANDS)
def test_threads_that_wait_soon_leave_their_core(command):
    if (spins := run_help(command)[2]) is None:
        pytest.skip('this OpenMP does not say how its threads wait')
    assert spins == 10000


def test_how_threads_wait_is_left_to_who_says_it():
    if run_help('train.py')[2] is None:
        pytest.skip('this OpenMP does not say how its threads wait')
    assert run_help('train.py', GOMP_SPINCOUNT='77')[2] == 77
    assert run_help('train.py', OMP_WAIT_POLICY='active')[2] > 10000
    assert run_help('train.py', OMP_WAIT_POLICY='passive')[2] == 0


def test_a_closed_output_is_no_error():
    done = subprocess.run(f'{sys.executable} prepare_data.py >&-', shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, '')


# Configs


def test_configs_measured_on_cpu_cores_compute_as_there():
    small = [path for path in CONFIGS if re.search(r'^# (One|Two) CPU cores?\b', path.read_text(), re.MULTILINE)]
    assert len(small) >= 10
    for path in small:
        assert parsed(str(path)).dtype == 'float32', path
    assert parsed(str(ROOT / 'config/t2mlr_20L.py')).dtype == 'auto'
