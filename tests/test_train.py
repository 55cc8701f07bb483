"""Laws of training: resumed equals uninterrupted bit for bit, killed at any moment loses nothing saved, two processes and any
number of micro-batches equal one, compiled equals plain; the learning rate, the optimisers' groups, the log, the tracker."""

import contextlib
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import made_once, trial

import train
from configurator import ConfigError, read_config_file
from model import GPT, GPTConfig, build, listed_parameters, recurrence_parameters
from runs import soak
from schedule import Schedule
from support import accounting
from support import checkpoint as checkpoint_room
from support.accounting import count_memory, count_parameters
from support.checkpoint import load_optimizers, read_checkpoint, save_checkpoint
from support.data import Dataset
from support.loading import find_checkpoint, load_model
from support.log import Tracker
from support.optimizers import make_optimizers
from train import TrainConfig, learning_rate

ROOT = Path(train.__file__).parent
T2MLR = {'recurrence': 't2mlr', 'l_start': 1, 'l_end': 1, 'gamma_init': 0.3}
LRT = {'recurrence': 'lrt', 'source_layer': 1}
ARCHITECTURES = {
    'transformer': {},
    't2mlr': T2MLR | {'schedule': 'jacobi', 'd_forward': 3, 'd_backward': 2, 'device_batch_size': 2},
    'lrt': LRT | {'schedule': 'interleaved', 'optimizer': 'muon'},
    'lstm': {'architecture': 'lstm'},
}


def settings(folders, out, data='text', **changed):
    small = dict(n_layer=2, n_head=2, n_embd=16, block_size=24, batch_size=4, max_steps=20, decay_steps=20, warmup_steps=3)
    small |= dict(eval_interval=10, eval_batches=1, log_interval=1, device='cpu', threads=1, learning_rate=5e-3)
    if data == 'text':
        small['reset_token'] = 256
    else:
        small['block_size'] = 64
    if changed.get('architecture') == 'lstm':
        small['reset_token'] = -1
    config = TrainConfig(**small | {'data_dir': str(folders / data), 'out_dir': str(out)} | changed)
    config.check()
    return config


def log_of(out):
    """The lines of log.jsonl without what the clock decides."""
    lines = [json.loads(line) for line in (Path(out) / 'log.jsonl').read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != 'tokens_per_s'} for line in lines]


def losses(out):
    return [line['loss'] for line in log_of(out) if 'loss' in line]


def same_bits(a, b):
    """Whether two nested structures of tensors and plain values agree to the last bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return a == b


def same_run(a, b):
    """The checkpoints of two runs agree in all but where they were written and how they began; so do their logs."""
    a, b = Path(a), Path(b)
    one, other = read_checkpoint(a / 'ckpt.pt'), read_checkpoint(b / 'ckpt.pt')
    for checkpoint in (one, other):
        for name in ('out_dir', 'init_from', 'max_steps'):
            del checkpoint['config'][name]
        del checkpoint['path']
    assert same_bits(one, other)
    assert log_of(a) == log_of(b)


def command(config):
    """The command line of a config: everything that differs from the defaults."""
    plain = asdict(TrainConfig())
    given = {k: v for k, v in asdict(config).items() if v != plain[k]}
    return [f'--{k}={",".join(map(str, v)) if isinstance(v, tuple) else v}' for k, v in given.items()]


# Resume

# One layer, and no exact evaluation: its passes of one token are further shapes, each of which takes seconds to compile.
COMPILED = {'compile': True, 'n_layer': 1, 'l_start': 0, 'l_end': 0, 'eval_exact_batches': 0}


@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('name', ARCHITECTURES)
@pytest.mark.fault('a restart half way', 'the uninterrupted run, bit for bit')
def test_resumed_equals_uninterrupted(folders, tmp_path, name, compiled):
    """10 steps, a restart and 10 more are 20 steps, bit for bit."""
    changed = ARCHITECTURES[name] | (COMPILED if compiled else {})
    if compiled and name == 'lrt':
        changed |= {'source_layer': 0}
    torch._dynamo.reset()
    train.train(settings(folders, tmp_path / 'whole', **changed))
    train.train(settings(folders, tmp_path / 'parts', **changed, max_steps=10))
    before = read_checkpoint(tmp_path / 'parts' / 'ckpt.pt')
    assert before['step'] == 10
    train.train(settings(folders, tmp_path / 'parts', **changed, init_from='resume'))
    same_run(tmp_path / 'whole', tmp_path / 'parts')
    assert not same_bits(before['model'], read_checkpoint(tmp_path / 'parts' / 'ckpt.pt')['model'])


def test_a_task_resumes_too(folders, tmp_path):
    changed = ARCHITECTURES['t2mlr'] | {'data': 'task'}
    train.train(settings(folders, tmp_path / 'whole', **changed))
    train.train(settings(folders, tmp_path / 'parts', **changed, max_steps=10))
    train.train(settings(folders, tmp_path / 'parts', **changed, init_from='auto'))
    same_run(tmp_path / 'whole', tmp_path / 'parts')


@pytest.mark.parametrize('signals', [[signal.SIGKILL] * 10, [signal.SIGINT, signal.SIGTERM]])
@pytest.mark.fault('SIGKILL, SIGINT or SIGTERM at a random moment', 'the uninterrupted run, bit for bit')
def test_interrupted_at_any_moment(folders, tmp_path, signals):
    """Whatever ends the process, the checkpoint is whole, never goes back, and the finished run is the uninterrupted one."""
    rng = random.Random(len(signals))
    changed = ARCHITECTURES['t2mlr'] | {'max_steps': 2000, 'decay_steps': 2000, 'log_interval': 5, 'eval_interval': 10}
    config = settings(folders, tmp_path / 'out', **changed, init_from='auto')
    reached, path = 0, tmp_path / 'out' / 'ckpt.pt'
    for number in signals:
        # The killer waits for a sign of life, then a random moment: a step takes about 5 ms, a save as long.
        process = subprocess.Popen([sys.executable, 'train.py', *command(config)], cwd=ROOT, stdout=-3, stderr=subprocess.PIPE)
        since, there = time.time(), path.stat().st_mtime if path.exists() else 0
        while process.poll() is None and time.time() - since < 60 and (not path.exists() or path.stat().st_mtime == there):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1].decode()
        step = read_checkpoint(path)['step']
        trial()
        assert step > reached, said
        reached = step
        if number == signal.SIGKILL:
            assert process.returncode == -signal.SIGKILL
        else:
            assert process.returncode == 128 + number and f'step {step}' in said and '--init_from=resume' in said
    ending = {'max_steps': reached + 5, 'log_interval': 5, 'eval_interval': 10}
    train.train(replace(config, **ending))
    train.train(replace(config, **ending, out_dir=str(tmp_path / 'whole'), init_from='scratch'))
    one, other = read_checkpoint(path), read_checkpoint(tmp_path / 'whole' / 'ckpt.pt')
    assert same_bits(one['model'], other['model']) and same_bits(one['optimizers'], other['optimizers'])
    steps = [line['step'] for line in log_of(tmp_path / 'out') if 'loss' in line]
    assert steps == sorted(set(steps))
    whole = {line['step']: line['loss'] for line in log_of(tmp_path / 'whole') if 'loss' in line}
    assert all(whole[line['step']] == line['loss'] for line in log_of(tmp_path / 'out') if line.get('loss') in whole)


@pytest.mark.fault('a resume with another rate, decay or fused flag', 'what is asked for now holds')
def test_the_current_settings_decide_and_not_the_file(folders, tmp_path):
    """Rate, decay, betas and fusing of a resumed optimiser are those now asked for; what shapes the weights cannot change."""
    config = settings(folders, tmp_path, max_steps=5)
    train.train(config)
    saved = read_checkpoint(tmp_path / 'ckpt.pt')
    model = build(GPTConfig(**{k: saved['config'][k] for k in asdict(GPTConfig())}))
    new = make_optimizers(model, replace(config, learning_rate=1e-4, weight_decay=0.7, beta2=0.5), 'mps')[0]
    load_optimizers([new], saved)
    assert [g['weight_decay'] for g in new.param_groups if g['weight_decay']] == [0.7]
    assert {g['lr'] for g in new.param_groups} == {1e-4} and {g['betas'] for g in new.param_groups} == {(0.9, 0.5)}
    assert not any(g['fused'] for g in new.param_groups)
    assert {float(s['step']) for s in new.state.values()} == {5.0}
    train.train(replace(config, learning_rate=1e-3, init_from='resume', max_steps=6, lr_schedule='constant'))
    assert log_of(tmp_path)[-2]['lr'] == 1e-3
    for name, value in {'n_embd': 32, 'family': 'llama', 'optimizer': 'muon', 'dtype': 'float64', 'block_size': 25}.items():
        with pytest.raises(ConfigError, match=f'{name}={value}'):
            train.train(replace(config, init_from='resume', **{name: value}))


def test_a_resume_says_what_differs(folders, tmp_path, capsys):
    """Other settings and other data in one line, nothing where nothing differs; all that cannot differ in one sentence."""
    config = settings(folders, tmp_path / 'out', max_steps=2, decay_steps=9)
    train.train(config)
    resumed = replace(config, init_from='resume', max_steps=3)
    train.train(replace(resumed, max_steps=2))
    assert 'other settings' not in capsys.readouterr().out
    train.train(replace(resumed, learning_rate=1e-4))
    said = [line for line in capsys.readouterr().out.splitlines() if 'other settings' in line]
    assert len(said) == 1 and said[0].endswith('max_steps=3 (before: 2), learning_rate=0.0001 (before: 0.005)')
    data = copied(folders / 'text', tmp_path / 'data')
    meta = json.loads((data / 'meta.json').read_text())
    (data / 'meta.json').write_text(json.dumps(meta | {'source': 'elsewhere'}))
    train.train(replace(resumed, max_steps=4, data_dir=str(data)))
    assert f'other data in {data}' in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r'n_embd=32 \(before: 16\), optimizer=muon \(before: adamw\)'):
        train.train(replace(resumed, n_embd=32, optimizer='muon'))


def test_without_a_terminal_a_line_a_minute_shows_life(folders, tmp_path, monkeypatch, capsys):
    clock = itertools.count(0.0, 7.0)
    monkeypatch.setattr(time, 'monotonic', lambda: next(clock))
    train.train(settings(folders, tmp_path, max_steps=100, log_interval=2, eval_interval=100))
    said = [line for line in capsys.readouterr().out.splitlines() if 'tokens per second' in line]
    assert 2 < len(said) < 25 and said[0].startswith('step')


def test_what_stands_in_the_way_of_a_start(folders, tmp_path):
    config = settings(folders, tmp_path / 'out', max_steps=1, warmup_steps=0)
    with pytest.raises(ConfigError, match='there is no checkpoint .*ckpt.pt'):
        train.train(replace(config, init_from='resume'))
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'file').touch()
    with pytest.raises(ConfigError, match='file is no folder'):
        train.train(replace(config, out_dir=str(tmp_path / 'file')))
    train.train(config)
    with pytest.raises(ConfigError, match='init_from=resume'):
        train.train(config)
    whole = (tmp_path / 'out' / 'ckpt.pt').read_bytes()
    for damaged in (b'', whole[:1000], whole[: len(whole) // 2], b'\x00' * 500, b'0' * 500):
        (tmp_path / 'out' / 'ckpt.pt').write_bytes(damaged)
        with pytest.raises(ConfigError, match='cannot be used'):
            train.train(replace(config, init_from='resume'))


@pytest.mark.fault('a checkpoint with a flipped byte, a part lost or of another run', 'refused, nothing written')
def test_a_damaged_checkpoint_is_never_used(folders, tmp_path):
    """A flipped byte anywhere in the weights, a missing part, weights of another shape, another dataset."""
    config = settings(folders, tmp_path, max_steps=3)
    train.train(config)
    path = tmp_path / 'ckpt.pt'
    whole, found = path.read_bytes(), read_checkpoint(path)
    resumed = replace(config, init_from='resume', max_steps=4)
    with zipfile.ZipFile(path) as parts:
        data = [part for part in parts.infolist() if '/data/' in part.filename and part.file_size > 100]
    for part in data:
        at = part.header_offset + 200 + part.file_size // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        trial()
        with pytest.raises(ConfigError, match='checksum'):
            train.train(resumed)
    for name in ('model', 'optimizers', 'step', 'rng', 'best_loss', 'meta'):
        save_checkpoint(str(path), {k: v for k, v in found.items() if k != name})
        trial()
        with pytest.raises(ConfigError, match=f'lacks {name}'):
            train.train(resumed)
    log = (tmp_path / 'log.jsonl').read_bytes()
    wrong = [{'model': {'embed.weight': torch.zeros(3)}}, {'optimizers': []}, {'optimizers': [{}]}, {'rng': torch.ones(3)}]
    for changed in wrong:
        save_checkpoint(str(path), found | changed)
        trial()
        with pytest.raises(ConfigError, match='do(es)? not fit'):
            train.train(resumed)
    assert (tmp_path / 'log.jsonl').read_bytes() == log
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match='max_steps=2 is below step'):
        train.train(replace(resumed, max_steps=2, warmup_steps=0, decay_steps=0))
    meta = found['meta'] | {'tokenizer': 'another'}
    save_checkpoint(str(path), found | {'meta': meta})
    with pytest.raises(ConfigError, match='tokenizer differs'):
        train.train(resumed)


@pytest.mark.fault('the newest checkpoint is cut', 'the one before is taken, the end is the same bit for bit')
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(folders, tmp_path, capsys):
    """Said once; the resumed run is the uninterrupted one, and the damaged file never takes the place of the good one."""
    config = settings(folders, tmp_path / 'whole', **ARCHITECTURES['t2mlr'] | {'eval_interval': 5})
    train.train(config)
    size = (tmp_path / 'whole' / 'ckpt.pt').stat().st_size
    rng = random.Random(0)
    for i, at in enumerate((0, rng.randrange(size), size - 1)):
        out = shutil.copytree(tmp_path / 'whole', tmp_path / str(i))
        assert read_checkpoint(out / 'ckpt-previous.pt')['step'] == 15
        data = (out / 'ckpt.pt').read_bytes()
        (out / 'ckpt.pt').write_bytes(data[:at])
        trial()
        capsys.readouterr()
        assert load_model(find_checkpoint(str(out)))[1]['step'] == 15
        assert capsys.readouterr().err.count('ckpt-previous.pt, is taken') == 1
        train.train(replace(config, out_dir=str(out), init_from=rng.choice(['auto', 'resume'])))
        same_run(tmp_path / 'whole', out)
        assert read_checkpoint(out / 'ckpt-previous.pt')['step'] == 15
        (out / 'ckpt-previous.pt').write_bytes(data[:at])
        (out / 'ckpt.pt').write_bytes(data[:at])
        with pytest.raises(ConfigError, match='ckpt-previous.pt cannot be used'):
            read_checkpoint(out / 'ckpt.pt')


def test_checkpoints_that_are_kept(folders, tmp_path):
    """The newest, the one before, every fifth, the best: links to one file where they are the same checkpoint."""
    config = settings(folders, tmp_path, keep_every=5, keep_best=True, learning_rate=3e-2, eval_batches=4)
    train.train(config)
    steps = {path.name: read_checkpoint(path)['step'] for path in tmp_path.glob('*.pt')}
    val = {line['step']: line['val']['loss'] for line in log_of(tmp_path) if 'val' in line}
    every = {f'ckpt-{n:06}.pt': n for n in (5, 10, 15, 20)}
    assert steps == {'ckpt.pt': 20, 'ckpt-previous.pt': 15, 'best.pt': min(val, key=val.get), **every}
    assert len({path.stat().st_ino for path in tmp_path.glob('*.pt')}) == 4
    assert not list(tmp_path.glob('*.tmp'))


def test_checkpoints_by_the_clock(folders, tmp_path, monkeypatch):
    """A minute per step by this clock: with save_minutes=3 every third is saved, and the newest two remain."""
    clock, saved, write = [0.0], [], save_checkpoint

    def read():
        clock[0] += 30.0
        return clock[0]

    monkeypatch.setattr(time, 'monotonic', read)
    monkeypatch.setattr(
        checkpoint_room, 'save_checkpoint', lambda path, state, *rest: saved.append(state['step']) or write(path, state)
    )
    train.train(settings(folders, tmp_path, save_minutes=3.0, max_steps=19, eval_interval=100))
    assert saved[-1] == 19 and len(saved) > 3 and max(b - a for a, b in zip(saved, saved[1:], strict=False)) <= 6


@pytest.mark.fault('a full disk', 'a warning; older checkpoints are intact')
def test_a_full_disk_leaves_the_run_going(folders, tmp_path, monkeypatch, capsys):
    """A warning; what was saved before stays as it was; the next checkpoint that fits is written. The last one must fit."""
    config = settings(folders, tmp_path / 'a', eval_interval=5, keep_every=5, keep_best=True)
    train.train(replace(config, max_steps=10))
    before = {path.name: path.read_bytes() for path in (tmp_path / 'a').glob('*.pt')}
    os.symlink('/dev/full', tmp_path / 'a' / 'ckpt.pt.tmp')
    shutil.copytree(tmp_path / 'a', tmp_path / 'b', symlinks=True)
    trial()
    train.train(replace(config, init_from='resume'))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith('warning: ')]
    assert len(said) == 1 and 'step 15 in' in said[0] and 'could not be written' in said[0] and 'No space left' in said[0]
    steps = {path.name: read_checkpoint(path)['step'] for path in (tmp_path / 'a').glob('*.pt')}
    assert steps['ckpt.pt'] == 20 and steps['ckpt-previous.pt'] == 10 and 'ckpt-000015.pt' not in steps
    trial()
    with pytest.raises(SystemExit) as stop:
        train.train(replace(config, init_from='resume', out_dir=str(tmp_path / 'b'), max_steps=15))
    assert stop.value.code == 2 and 'make space' in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / 'b').glob('*.pt')} == before


# Losses and gradients that are not finite


@pytest.mark.fault('steps in a row that are not finite', 'code 3, the last good checkpoint stays')
def test_steps_that_are_not_finite_stop_the_run(folders, tmp_path, capsys):
    """After max_bad_steps in a row: exit code 3, one sentence, and the checkpoint of before; fewer do not stop it."""
    config = settings(folders, tmp_path, max_steps=4, log_interval=100)
    train.train(config)
    before = (tmp_path / 'ckpt.pt').read_bytes()
    diverging = replace(config, init_from='resume', max_steps=12, learning_rate=1e30, decay_steps=0, grad_clip=0.0)
    with pytest.raises(SystemExit) as stop:
        train.train(replace(diverging, max_bad_steps=3))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith('error: ')]
    assert stop.value.code == 3 and len(said) == 1 and 'learning_rate=1e+30' in said[0] and '--debug_nan' in said[0]
    assert (tmp_path / 'ckpt.pt').read_bytes() == before
    assert all(math.isfinite(loss) for loss in losses(tmp_path))


def poisoned(monkeypatch, bad):
    """From here on the loss of the steps `bad`, counted from 1, is infinite, though its derivative is not."""
    make = train.build

    def built(config):
        model, calls = make(config), 0
        forward = model.forward

        def spoiled(*args, **given):
            nonlocal calls
            if not model.training or len(args) < 2 or not torch.is_grad_enabled():
                return forward(*args, **given)
            calls += 1
            loss, means = forward(*args, **given)
            return (loss + math.inf if calls in bad else loss), means

        model.forward = spoiled
        return model

    monkeypatch.setattr(train, 'build', built)


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.fault('a step that is not finite', 'skipped and counted: weights and moments as before')
def test_a_skipped_step_leaves_no_trace(folders, tmp_path, monkeypatch, capsys, optimizer):
    """An infinite loss, whose own gradient is finite, leaves weights and optimiser as they were; it is counted, said, and
    counted on after a resume; bit for bit, whichever lines are logged."""
    config = settings(folders, tmp_path / 'clean', **ARCHITECTURES['lrt'] | {'optimizer': optimizer, 'max_steps': 6})
    train.train(replace(config, lr_schedule='constant', warmup_steps=0))
    clean = read_checkpoint(tmp_path / 'clean' / 'ckpt.pt')
    bad = {7, 8, 10}
    for name, ends, every in (('whole', [10], 1), ('parts', [8, 10], 1), ('rarely', [10], 4)):
        out = tmp_path / name
        shutil.copytree(tmp_path / 'clean', out)
        for end in ends:
            changed = dict(init_from='resume', max_steps=end, lr_schedule='constant', warmup_steps=0, log_interval=every)
            start = read_checkpoint(out / 'ckpt.pt')['step']
            with monkeypatch.context() as patch:
                poisoned(patch, {n - start for n in bad})
                train.train(replace(config, out_dir=str(out), **changed))
            if end == 8:
                after = read_checkpoint(out / 'ckpt.pt')
                assert same_bits(after['model'], clean['model']) and after['bad_steps'] == (2, 2)
                assert same_bits(after['optimizers'][0]['state'], clean['optimizers'][0]['state'])
        assert read_checkpoint(out / 'ckpt.pt')['bad_steps'] == (3, 1)
        lines = [line for line in log_of(out) if 'lr' in line]
        assert lines[-1]['skipped'] == 3 and all('loss' not in line for line in lines if line['step'] in bad)
    one, *others = (read_checkpoint(tmp_path / name / 'ckpt.pt') for name in ('whole', 'parts', 'rarely'))
    assert all(same_bits(one[part], other[part]) for other in others for part in ('model', 'optimizers', 'rng'))
    assert losses(tmp_path / 'whole') == losses(tmp_path / 'parts') and not same_bits(one['model'], clean['model'])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith('warning: ')]
    assert said and all('were skipped' in line for line in said)


@pytest.mark.parametrize('name', ARCHITECTURES)
@pytest.mark.fault('a weight that is no number, under debug_nan', 'module and pass are named')
def test_debug_nan_names_the_module_and_the_pass(folders, tmp_path, capsys, name):
    """A weight that is no number, at random places; a finite model is trained as without, bit for bit."""
    rng = random.Random(name)
    config = settings(folders, tmp_path / 'a', **ARCHITECTURES[name] | {'max_steps': 2, 'decay_steps': 0, 'warmup_steps': 0})
    train.train(config)
    train.train(replace(config, out_dir=str(tmp_path / 'b'), debug_nan=True))
    one, other = (read_checkpoint(tmp_path / out / 'ckpt.pt') for out in 'ab')
    assert same_bits(one['model'], other['model'])
    choices = [key for key in one['model'] if key.endswith(('o.weight', 'down.weight', 'f_rec.weight', 'memory.k.weight'))]
    for key in rng.sample(choices, min(4, len(choices))):
        spoiled = {k: v.clone() for k, v in one['model'].items()}
        spoiled[key].view(-1)[rng.randrange(spoiled[key].numel())] = math.nan
        save_checkpoint(str(tmp_path / 'b' / 'ckpt.pt'), one | {'model': spoiled})
        with pytest.raises(SystemExit) as stop:
            train.train(replace(config, out_dir=str(tmp_path / 'b'), debug_nan=True, init_from='resume', max_steps=4))
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith('error: ')]
        number = 1 if key.startswith(('fusion', 'memory')) else 0  # the initial pass reads no memory
        assert stop.value.code == 3
        assert said == [f'error: the output of {key.removesuffix(".weight")} in pass {number} is not finite.']


def test_debug_nan_names_a_gradient(folders, tmp_path, monkeypatch, capsys):
    make, calls = train.build, []

    def spoiled(gradient):
        calls.append(gradient)
        return gradient * (math.nan if len(calls) == 3 else 1)

    def built(config):
        model = make(config)
        model.blocks[1].mlp.up.weight.register_hook(spoiled)
        return model

    monkeypatch.setattr(train, 'build', built)
    with pytest.raises(SystemExit) as stop:
        train.train(settings(folders, tmp_path, debug_nan=True, max_steps=5))
    assert stop.value.code == 3
    assert 'error: the gradient of blocks.1.mlp.up.weight in step 3 is not finite' in capsys.readouterr().err


@pytest.mark.fault('code in a checkpoint', 'refused, not executed')
def test_a_checkpoint_executes_nothing(tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'executed'),)

    torch.save({'config': {}, 'model': Bomb()}, tmp_path / 'a.pt')
    (tmp_path / 'b.pt').write_bytes(pickle.dumps(Bomb()))
    for name in 'ab':
        with pytest.raises(ConfigError, match='cannot be used'):
            read_checkpoint(str(tmp_path / f'{name}.pt'))
    assert not (tmp_path / 'executed').exists()


# One process, several micro-batches, several processes

GRID = ARCHITECTURES | {
    f'{name} {schedule}': recurrence | {'schedule': schedule, 'd_forward': 2, 'd_backward': 2, 'n_subsets': 3, 'chunk_size': 5}
    for name, recurrence in (('t2mlr', T2MLR), ('lrt', LRT))
    for schedule in ('parallel', 'jacobi', 'interleaved', 'chunked', 'sequential')
}
GRID |= {
    # Muon orthogonalises in bfloat16, which magnifies the last bit of a float32 gradient; in float64 that bit is out of reach.
    'lrt': ARCHITECTURES['lrt'] | {'dtype': 'float64'},
    'KV only': LRT | {'schedule': 'interleaved', 'residual_injection': False},
    'residual only': LRT | {'schedule': 'interleaved', 'memory_projection': 'none'},
    'layerwise, per-pass weights': LRT
    | {'schedule': 'interleaved', 'memory_projection': 'layerwise', 'pass_weights': (0.0, 1.0, 2.0)},
    'frozen base': T2MLR | {'schedule': 'jacobi', 'd_forward': 2, 'd_backward': 2, 'freeze_base': True},
    'gammas 0': T2MLR | {'schedule': 'jacobi', 'd_forward': 2, 'd_backward': 2, 'gamma_init': 0.0},
    'no pass with memory': T2MLR | {'schedule': 'jacobi', 'd_forward': 0, 'd_backward': 1},
    'one pass with memory': T2MLR | {'schedule': 'jacobi', 'd_forward': 1, 'd_backward': 1},
    'growing from no memory': T2MLR
    | {'schedule': 'jacobi', 'd_forward': 3, 'd_backward': 2, 'd_forward_start': 0, 'd_forward_steps': 10},
    'tolerance': T2MLR | {'schedule': 'jacobi', 'd_forward': 8, 'd_backward': 2, 'jacobi_tol': 0.02},
    'loops in LRT': LRT | {'schedule': 'interleaved', 'n_loop': 2, 'l_start': 0, 'l_end': 1},
    'accumulation': LRT | {'schedule': 'interleaved', 'device_batch_size': 4, 'batch_size': 12},
    'task': T2MLR
    | {'schedule': 'jacobi', 'd_forward': 3, 'd_backward': 2, 'data': 'task', 'batch_size': 8, 'device_batch_size': 4},
    'checkpointing': T2MLR | {'schedule': 'jacobi', 'd_forward': 3, 'd_backward': 2, 'activation_checkpointing': True},
    'one token': LRT | {'schedule': 'interleaved', 'block_size': 1, 'eval_exact_batches': 0},
}
WORKER = """
import json, os, sys
import torch, train
configs, ports = json.loads(sys.argv[1]), json.loads(sys.argv[2])
models, make = [], train.build
train.build = lambda config: models.append(make(config)) or models[-1]
for config, port in zip(configs, ports):
    os.environ['MASTER_PORT'] = str(port)
    train.train(train.TrainConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}))
    torch.save(models[-1].state_dict(), f"{config['out_dir']}/rank{os.environ['RANK']}.pt")
"""


PORTS = random.Random(os.getpid())


def free_ports(n):
    """Ports below those that the kernel gives to connections, so that none is taken between now and its use."""
    ports = []
    while len(ports) < n:
        port = PORTS.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(('127.0.0.1', port)):
            ports.append(port)
    return ports


def on_two_processes(configs):
    """Trains each config on two processes, one after the other; every rank also leaves its weights in out_dir."""
    argv = [sys.executable, '-c', WORKER, json.dumps([asdict(c) for c in configs]), json.dumps(free_ports(len(configs)))]
    shared = os.environ | {'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'GLOO_SOCKET_IFNAME': 'lo'}
    ranks = [
        subprocess.Popen(argv, cwd=ROOT, env=shared | {'RANK': str(r), 'LOCAL_RANK': str(r)}, stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    try:
        said = [p.communicate(timeout=400)[1] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0, 0], '\n'.join(said)
    return said


@pytest.fixture(scope='module')
def two_processes(folders, tmp_path_factory):
    """{name: (out_dir of one process, out_dir of two)} for every cell of GRID."""

    def make(root):
        single, pair = [], []
        for i, changed in enumerate(GRID.values()):
            single.append(settings(folders, root / f'{i}-one', **changed))
            # as many micro-batches, and so as many sequences in the exact validation
            half = single[-1].device_batch_size // 2
            pair.append(replace(single[-1], device_batch_size=half, out_dir=str(root / f'{i}-two')))
        for config in single:
            train.train(config)
        on_two_processes(pair)

    root = made_once(tmp_path_factory, 'ddp', make)
    return {name: (str(root / f'{i}-one'), str(root / f'{i}-two')) for i, name in enumerate(GRID)}


@pytest.mark.parametrize('name', GRID)
@pytest.mark.fault(
    'two processes: every schedule, accumulation, parameters without gradient', 'ranks bit-equal, the curve of one process'
)
def test_two_processes_equal_one(two_processes, name):
    one, two = two_processes[name]
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5, atol=1e-5)
    assert len(losses(one)) == 20 and losses(one)[-1] != losses(one)[0]
    for a, b in zip(log_of(one), log_of(two), strict=True):
        np.testing.assert_allclose(a.get('passes', 0), b.get('passes', 0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(a.get('grad_norm', 0), b.get('grad_norm', 0), rtol=1e-4)
        for which in ('val', 'val_exact'):
            assert (a.get(which) or {}) == pytest.approx(b.get(which) or {}, rel=1e-5, abs=1e-5)
    first, second = (torch.load(Path(two) / f'rank{r}.pt', weights_only=True) for r in range(2))
    assert same_bits(first, second)
    assert same_bits(first, read_checkpoint(Path(two) / 'ckpt.pt')['model'])


@pytest.mark.parametrize('name', ['transformer', 'lrt interleaved', 't2mlr jacobi', 'task', 'lstm'])
@pytest.mark.fault('a batch in 1, 2 and 4 micro-batches', 'one curve, to 1e-9')
def test_micro_batches_equal_one_batch(folders, tmp_path, name):
    """In float64 the curve of losses, of each pass and of the gradient's norm is the same for any split of the batch."""
    curves = []
    for micro_batch in (8, 4, 2):
        changed = GRID[name] | {'batch_size': 8, 'device_batch_size': micro_batch, 'dtype': 'float64', 'max_steps': 8}
        config = settings(folders, tmp_path / str(micro_batch), **changed)
        train.train(config)
        lines = [line for line in log_of(config.out_dir) if 'loss' in line]
        curves.append([[line['loss'], line['grad_norm'], *line['passes']] for line in lines])
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(curves[2], curves[0], rtol=1e-9, atol=1e-9)


@pytest.mark.fault('micro-batches of unlike difficulty', 'the mean of the global batch is logged')
def test_the_logged_loss_is_the_mean_over_the_global_batch(folders, tmp_path):
    """Rows of very different difficulty and very different numbers of scored positions, split over 4 micro-batches."""
    config = settings(folders, tmp_path, 'task', **LRT, schedule='interleaved', batch_size=8, device_batch_size=2, max_steps=1)
    config.learning_rate, config.dtype, config.warmup_steps = 0.0, 'float64', 0
    train.train(config)
    saved = read_checkpoint(tmp_path / 'ckpt.pt')
    model = build(GPTConfig(**{k: saved['config'][k] for k in asdict(GPTConfig())})).double()
    model.load_state_dict(saved['model'])
    data = Dataset(config.data_dir)
    T = data.length('train', 0)
    x, y, mask = data.batch('train', data.rows('train', config.seed, 0, 8, T), T)
    assert len(set((y >= 0).sum(1).tolist())) > 2
    loss, passes = model(x, y, config, mask)
    (line,) = [line for line in log_of(tmp_path) if 'loss' in line]
    assert line['loss'] == pytest.approx(loss.item(), abs=1e-12)
    assert line['passes'] == pytest.approx(passes.tolist(), abs=1e-12)


def launch(n, config, **more):
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}']
    return subprocess.run(
        [*torchrun, 'train.py', *command(config)], cwd=ROOT, capture_output=True, text=True, timeout=300, **more
    )


@pytest.mark.fault('compiled and plain, one process and two, in turns', 'the same keys and curve')
def test_torchrun_compiled_and_plain_exchange_checkpoints(folders, tmp_path):
    """Two compiled processes, then one plain process, then two compiled ones again: the keys never change, and the curve is
    that of one plain process."""
    small = COMPILED | {'compile': False, 'batch_size': 8}  # the shapes that are compiled for a restart half way
    config = settings(folders, tmp_path / 'mixed', **ARCHITECTURES['t2mlr'] | small)
    train.train(replace(config, out_dir=str(tmp_path / 'plain')))
    done = launch(2, replace(config, compile=True, max_steps=8))
    assert done.returncode == 0, done.stderr
    train.train(replace(config, max_steps=14, init_from='resume'))
    done = launch(2, replace(config, compile=True, init_from='resume'))
    assert done.returncode == 0, done.stderr
    mixed, plain = (read_checkpoint(tmp_path / out / 'ckpt.pt')['model'] for out in ('mixed', 'plain'))
    assert list(mixed) == list(plain) and not any('_orig_mod' in k or 'module.' in k for k in mixed)
    np.testing.assert_allclose(losses(tmp_path / 'mixed'), losses(tmp_path / 'plain'), rtol=1e-5, atol=1e-5)


def test_a_growing_schedule(folders, tmp_path):
    """d_forward rises by whole passes from its start to its end and stays; d_backward never exceeds what there is."""
    config = settings(folders, tmp_path, **T2MLR, schedule='jacobi', d_forward=6, d_backward=3, max_steps=20)
    config.d_forward_start, config.d_forward_steps = 1, 10
    config.check()
    schedules = [train.schedule_at(config, step) for step in range(20)]
    depths = [s.d_forward for s in schedules]
    assert depths[0] == 1 and depths == sorted(depths) and set(depths) == set(range(1, 7)) and depths[10:] == [6] * 10
    assert all(s.d_backward == min(3, s.d_forward + 1) for s in schedules)
    train.train(config)
    passes = [len(line['changes']) for line in log_of(tmp_path) if 'loss' in line]
    assert passes == depths
    train.train(replace(config, out_dir=str(tmp_path / 'parts'), max_steps=5))
    train.train(replace(config, out_dir=str(tmp_path / 'parts'), init_from='resume'))
    one, other = (read_checkpoint(path / 'ckpt.pt')['model'] for path in (tmp_path, tmp_path / 'parts'))
    assert same_bits(one, other)


def test_a_tolerance_shortens_what_is_logged(folders, tmp_path):
    config = settings(folders, tmp_path, **T2MLR, schedule='jacobi', d_forward=12, d_backward=2, max_steps=3)
    train.train(config)
    config.out_dir, config.jacobi_tol = str(tmp_path / 'tolerant'), 0.05
    train.train(config)
    every, fewer = ([line['changes'] for line in log_of(out) if 'loss' in line] for out in (tmp_path, config.out_dir))
    assert {len(changes) for changes in every} == {12} and all(2 < len(changes) < 12 for changes in fewer)
    for changes in fewer:
        assert min(changes[:-3], default=1) >= 0.05 > changes[-3]


def test_torchrun_says_a_mistake_once(folders, tmp_path):
    config = settings(folders, tmp_path / 'out')
    config.batch_size = 5
    done = launch(2, config)
    said = [line for line in done.stderr.splitlines() if line.startswith('error: ')]  # the box of torchrun repeats it
    assert done.returncode != 0 and len(said) == 1 and 'batch_size=5 does not divide over 2 processes' in said[0]
    assert not (tmp_path / 'out').exists()


@pytest.mark.fault('a model larger than the memory', 'refused before it is built')
def test_a_model_that_does_not_fit_is_refused_before_it_is_built(folders, tmp_path, monkeypatch):
    """By the memory that is free: weights, gradients and a moment of what is trained; with freeze_base hardly the last two."""
    config = settings(folders, tmp_path / 'out', **ARCHITECTURES['t2mlr'] | {'optimizer': 'adamw'}, max_steps=1)
    config = replace(config, warmup_steps=0, decay_steps=0)
    with torch.device('meta'):
        config.vocab_size = Dataset(config.data_dir).vocab_size
        weights = 4 * sum(p.numel() for p in build(config).parameters())
    monkeypatch.setattr(accounting, 'free_memory', lambda: 2 * weights)
    with pytest.raises(ConfigError, match=r'at least .* are free; take a smaller n_layer=2'):
        train.train(config)
    assert not (tmp_path / 'out' / 'ckpt.pt').exists()
    train.train(replace(config, freeze_base=True))
    monkeypatch.undo()
    assert 2**20 < accounting.free_memory()
    for huge in (10**9, 10**7):  # sequences of 24 tokens
        with pytest.raises(ConfigError, match=rf'and {huge} sequences, .* or device_batch_size={huge},'):
            train.train(replace(config, batch_size=huge, device_batch_size=0, out_dir=str(tmp_path / 'many')))


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('name', ['learning_rate', 'weight_decay', 'recurrence_lr_scale', 'final_lr_fraction', 'grad_clip'])
def test_a_huge_setting_is_no_traceback(folders, tmp_path, capsys, name, optimizer):
    config = settings(folders, tmp_path / 'out', **ARCHITECTURES['t2mlr'] | {'optimizer': optimizer, 'max_steps': 12})
    with contextlib.suppress(SystemExit):
        train.main(command(replace(config, **{name: 1e99}, eval_exact_batches=0)))
        assert name in ('final_lr_fraction', 'grad_clip')
        return
    assert 'error: ' in capsys.readouterr().err


# Several runs, several processes, one that dies


@pytest.mark.fault('a second run in one out_dir', 'refused while the first lives')
def test_two_runs_in_one_folder(folders, tmp_path):
    """The second is refused in one sentence while the first lives, whatever it wants; the kernel ends the lock with it."""
    config = settings(folders, tmp_path / 'out', max_steps=10**6, eval_interval=10**6)
    first = subprocess.Popen([sys.executable, 'train.py', *command(config)], cwd=ROOT, stderr=-3)
    since = time.time()
    while not (tmp_path / 'out' / 'log.jsonl').exists() and time.time() - since < 120:
        time.sleep(0.05)
    for init_from in ('scratch', 'auto'):
        with pytest.raises(ConfigError, match='another run is writing to .*out'):
            train.train(replace(config, init_from=init_from, max_steps=1, warmup_steps=0))
    first.kill()
    first.wait(60)
    train.train(replace(config, max_steps=1, warmup_steps=0, decay_steps=0))
    train.train(replace(config, max_steps=2, warmup_steps=0, decay_steps=0, init_from='resume'))


@pytest.mark.fault('processes with unlike settings, code or data', 'code 2, what differs is named')
def test_processes_that_do_not_agree(folders, tmp_path, monkeypatch):
    """Each of settings, code and data, in one of two processes: all end with code 2, and one names what differs."""
    config = settings(folders, tmp_path / 'out', max_steps=3, decay_steps=0)
    data = copied(folders / 'text', tmp_path / 'data')
    meta = json.loads((data / 'meta.json').read_text())
    (data / 'meta.json').write_text(json.dumps(meta | {'source': 'elsewhere'}))
    code = tmp_path / 'code'
    code.mkdir()
    for path in ROOT.glob('*.py'):
        shutil.copy(path, code)
    shutil.copytree(ROOT / 'support', code / 'support')
    (code / 'bench.py').write_text('# another revision')
    for other, where, says in (
        (replace(config, seed=2), ROOT, 'process 1 has seed=2 and process 0 seed=1337'),
        (replace(config, data_dir=str(data)), ROOT, 'process 1 has checksum of the data='),
        (config, code, 'process 1 has checksum of the code='),
    ):
        said, codes = two_that_differ(config, other, where)
        trial()
        assert codes == [2, 2] and said[0].count(says) == 1 and 'error' not in said[1], said
    assert not (tmp_path / 'out' / 'log.jsonl').exists()


def two_that_differ(config, other, where):
    """Runs two processes, the second with another config and from another folder; what each said, and the exit codes."""
    shared = os.environ | {'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'GLOO_SOCKET_IFNAME': 'lo'}
    shared |= {'MASTER_PORT': str(free_ports(1)[0])}
    ranks = [
        subprocess.Popen(
            [sys.executable, 'train.py', *command(c)],
            cwd=folder,
            env=shared | {'RANK': str(r), 'LOCAL_RANK': str(r)},
            stderr=subprocess.PIPE,
            stdout=-3,
            text=True,
        )
        for r, (c, folder) in enumerate(((config, ROOT), (other, where)))
    ]
    try:
        said = [p.communicate(timeout=300)[1] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    return said, [p.returncode for p in ranks]


def running(pids, parent=None):
    """Those of `pids` that still run, or of them the children of `parent`."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            state, above = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[:2]
            if state != 'Z' and parent in (None, int(above)):
                found.append(int(pid))
    return sorted(found)


@pytest.mark.skipif(not Path('/proc').is_dir(), reason='reads /proc')
@pytest.mark.parametrize('dies', ['first', 'last', 'torchrun'])
@pytest.mark.fault('a process, or torchrun itself, is killed', 'all end within a minute, the run continues')
def test_a_dead_process_ends_the_run(folders, tmp_path, dies):
    """Within a minute, without orphans, with at most one message of ours; what was saved can be continued."""
    config = settings(folders, tmp_path / 'out', max_steps=10**6, eval_interval=10**6, keep_every=10, decay_steps=0)
    argv = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'train.py', *command(config)]
    with open(tmp_path / 'said', 'w') as f:
        run = subprocess.Popen(argv, cwd=ROOT, stderr=f, stdout=-3)
    since = time.time()
    while not (tmp_path / 'out' / 'ckpt.pt').exists() and time.time() - since < 300:
        time.sleep(0.05)
    workers = running((name for name in os.listdir('/proc') if name.isdigit()), run.pid)
    assert len(workers) == 2
    os.kill({'first': workers[0], 'last': workers[1], 'torchrun': run.pid}[dies], signal.SIGKILL)
    since = time.time()
    assert run.wait(60) != 0
    while running(workers) and time.time() - since < 60:
        time.sleep(0.05)
    assert not running(workers)
    said = (tmp_path / 'said').read_text()
    # The killed worker is whichever started first; torchrun names it, and the first process, if it lives, says that it ends.
    assert said.count('error: another process of this run has ended') <= 1 and 'train.py", line' not in said, said
    step = read_checkpoint(tmp_path / 'out' / 'ckpt.pt')['step']
    train.train(replace(config, init_from='resume', max_steps=step + 1))


@pytest.mark.skipif(not Path('/proc').is_dir(), reason='reads /proc')
@pytest.mark.parametrize('dies', ['process', 'node'])
@pytest.mark.fault('a process or a whole node of two is killed', 'restarted: the curve of one process')
def test_two_nodes_go_on_when_one_dies(folders, tmp_path, dies):
    """Two agents of torchrun, two processes each. A process that is killed is started again by its agent, and an agent that is
    killed by whoever watches over it; the run goes on from its checkpoint, and its curve is that of one process."""
    config = settings(folders, tmp_path / 'out', 'task', **ARCHITECTURES['lrt'] | {'schedule': 'interleaved'}, dtype='float64')
    config = replace(config, batch_size=12, max_steps=150, eval_interval=25, eval_batches=1, log_interval=1, init_from='auto')
    (port,) = free_ports(1)
    argv = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', '--nproc_per_node=2', '--max-restarts=3']
    argv += ['--rdzv_backend=c10d', f'--rdzv_endpoint=127.0.0.1:{port}', '--rdzv_id=run']
    env = os.environ | {'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'}  # or a restart may read addresses of the life before

    def agent(number):
        # The first agent, which lives, holds the meeting place. Left to themselves the first that comes would, and a run ends
        # with the agent that holds it.
        conf = f'--rdzv_conf=is_host={int(number == 0)},read_timeout=300'
        with open(tmp_path / f'said{number}', 'a') as f:
            return subprocess.Popen([*argv, conf, 'train.py', *command(config)], cwd=ROOT, stderr=f, stdout=-3, env=env)

    agents = [agent(0), agent(1)]
    try:
        since = time.time()
        while not (tmp_path / 'out' / 'ckpt.pt').exists() and time.time() - since < 300:
            time.sleep(0.05)
        workers = running((name for name in os.listdir('/proc') if name.isdigit()), agents[1].pid)
        assert len(workers) == 2
        os.kill(workers[0] if dies == 'process' else agents[1].pid, signal.SIGKILL)
        if dies == 'node':
            agents[1].wait(60)
            agents[1] = agent(1)
        codes = [a.wait(300) for a in agents]
        assert codes == [0, 0], [(tmp_path / f'said{number}').read_text() for number in range(2)]
    finally:
        for a in agents:
            a.kill()
    assert not running(workers)
    train.train(replace(config, out_dir=str(tmp_path / 'one')))
    np.testing.assert_allclose(losses(tmp_path / 'out'), losses(tmp_path / 'one'), rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not Path('/proc').is_dir(), reason='reads /proc')
@pytest.mark.parametrize('wait', [0.0, 0.3])
@pytest.mark.fault('Ctrl-C while torch loads', 'one line, code 130')
def test_an_interruption_during_the_imports_is_one_line(folders, tmp_path, wait):
    """Ctrl-C when torch begins to load, and some time after: code 130 and one line, never a traceback."""
    config = settings(folders, tmp_path / 'out', max_steps=10**6)
    process = subprocess.Popen([sys.executable, 'train.py', *command(config)], cwd=ROOT, stdout=-3, stderr=subprocess.PIPE)
    while process.poll() is None and 'libtorch' not in Path(f'/proc/{process.pid}/maps').read_text():
        time.sleep(0.01)
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 130 and said.count('interrupted') == 1 and 'Traceback' not in said, said


@pytest.mark.fault('Jacobi passes that diverge', 'reported once')
def test_passes_that_do_not_converge_are_reported_once(folders, tmp_path, monkeypatch, capsys):
    """When the last pass changes the span's output more than the first, in 5 lines in a row; not for fewer, nor otherwise."""
    config = settings(folders, tmp_path / 'quiet', **T2MLR, schedule='jacobi', d_forward=4, d_backward=2)
    train.train(config)
    assert 'do not converge' not in capsys.readouterr().err
    hidden, calls = GPT.hidden, []

    def growing(self, tokens, schedule, recur_mask, state, changes, scored):
        found = hidden(self, tokens, schedule, recur_mask, state, changes, scored)
        if changes:
            calls.append(changes)
            if len(calls) not in (1, 5):
                changes.reverse()
        return found

    monkeypatch.setattr(GPT, 'hidden', growing)
    train.train(replace(config, out_dir=str(tmp_path / 'growing')))
    said = [line for line in capsys.readouterr().err.splitlines() if 'do not converge' in line]
    assert len(said) == 1 and 'up to step 10,' in said[0]
    line = log_of(tmp_path / 'growing')[9]
    assert line['step'] == 10 and ', '.join(f'{c:g}' for c in line['changes']) in said[0]


# Learning rate and optimisers


def rates(**changed):
    config = TrainConfig(**{'max_steps': 100, 'learning_rate': 0.5, 'final_lr_fraction': 0.1} | changed)
    config.check()
    return config, [learning_rate(config, step) for step in range(config.max_steps + 5)]


@pytest.mark.parametrize('kind', ['cosine', 'linear', 'constant'])
@pytest.mark.parametrize('decay_steps', [0, 60, 100])
@pytest.mark.parametrize('warmup', [0, 1, 10, 59, 60, 100])
@pytest.mark.parametrize('warmdown', [0.0, 0.4, 1.0])
@pytest.mark.fault('warm-up and decay of any length, 0 and all included', 'a finite, continuous rate')
def test_the_learning_rate_is_finite_and_continuous(kind, decay_steps, warmup, warmdown):
    config, r = rates(lr_schedule=kind, decay_steps=decay_steps, warmup_steps=warmup, warmdown_fraction=warmdown)
    warmup = warmup if warmup <= (decay_steps or 100) else (decay_steps or 100) // 10
    assert all(math.isfinite(v) and 0.05 - 1e-12 <= v <= 0.5 for v in r[warmup:]) and max(r) <= 0.5
    if warmup:
        assert r[0] == pytest.approx(0.5 / warmup) and r[warmup - 1] == pytest.approx(0.5)
        assert all(b > a for a, b in zip(r[: warmup - 1], r[1:warmup], strict=True))
    end = decay_steps or 100
    falls = [a - b for a, b in zip(r[max(warmup, 1) - 1 :], r[max(warmup, 1) :], strict=False)]
    assert -1e-12 < min(falls) and max(falls) <= 0.45 * math.pi / 2 / max(1, min(end - warmup, end * (warmdown or 1)))
    if kind == 'constant':
        assert set(r[warmup:]) == {0.5}
    elif warmup < end and (kind, warmdown) != ('linear', 0.0):
        assert r[end - 1] == pytest.approx(0.05) and r[end + 3] == pytest.approx(0.05)


def test_one_step_may_be_all(folders, tmp_path):
    for kind in ('cosine', 'linear', 'constant'):
        for warmup in (0, 1):
            _, r = rates(max_steps=1, warmup_steps=warmup, lr_schedule=kind)
            assert math.isfinite(r[0]) and r[0] > 0
    train.train(settings(folders, tmp_path, max_steps=1, decay_steps=0, warmup_steps=1))
    assert losses(tmp_path)


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.fault('the first step under warm-up', 'it moves every group at its rate')
def test_the_first_step_moves_every_group_at_its_rate(folders, tmp_path, optimizer):
    """Warm-up 100: the first rate is peak / 100 and not 0; the recurrence has its multiple of it."""
    seen = []
    config = settings(folders, tmp_path, **T2MLR, schedule='jacobi', d_forward=2, d_backward=2, optimizer=optimizer)
    config.max_steps, config.decay_steps, config.warmup_steps, config.recurrence_lr_scale = 1, 200, 100, 10.0
    made, make = [], train.make_optimizers

    def watched(model, *rest):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        made.append((model, before, make(model, *rest)))
        return made[0][2]

    train.make_optimizers = watched
    try:
        train.train(config)
    finally:
        train.make_optimizers = make
    model, before, optimizers = made[0]
    for o in optimizers:
        for group in o.param_groups:
            seen.append((group['lr'], group['scale']))
            assert group['lr'] == pytest.approx(config.learning_rate / 100 * group['scale'])
    assert {scale for _, scale in seen} == {1.0, 10.0}
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    # The output projections start at 0, so at the first step no gradient passes them to what lies below.
    assert {'head.weight', 'blocks.0.attention.o.weight', 'blocks.1.mlp.down.weight'} <= moved


def all_configs():
    return sorted(ROOT.glob('config/*.py'))


def described(path):
    values = {k: v for k, v in read_config_file(str(path)).items() if k in asdict(TrainConfig())}
    # Those that start from a pretrained folder state its shape, so that a dry run needs no weights.
    return TrainConfig(**values | {'vocab_size': values.get('vocab_size', 0) or 512, 'dry_run': True})


@pytest.mark.parametrize('path', all_configs(), ids=lambda p: p.stem)
@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.fault('parameter groups of every config', 'each parameter once, tables and gates under AdamW')
def test_every_trainable_parameter_is_in_exactly_one_group(path, optimizer):
    config = replace(described(path), optimizer=optimizer)
    check_groups(config)


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('freeze', [False, True])
@pytest.mark.parametrize('family', ['nanochat', 'llama'])
@pytest.mark.parametrize('recurrence', [T2MLR, LRT | {'memory_projection': 'layerwise'}])
@pytest.mark.fault('parameter groups of every config', 'each parameter once, tables and gates under AdamW')
def test_groups_of_every_kind_of_parameter(optimizer, freeze, family, recurrence):
    config = TrainConfig(
        **recurrence, vocab_size=64, n_layer=3, n_embd=32, family=family, value_embeddings='all', optimizer=optimizer
    )
    config.schedule, config.freeze_base = 'interleaved', freeze
    check_groups(config)


def check_groups(config):
    config.check()
    with torch.device('meta'):
        model = build(config)
    recurrence, adamw = recurrence_parameters(model), listed_parameters(model, 'adamw_parts')
    if config.freeze_base:
        for name, p in model.named_parameters():
            p.requires_grad_(name in recurrence)
    optimizers = make_optimizers(model, config, 'cpu')
    held = [p for o in optimizers for g in o.param_groups for p in g['params']]
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(map(id, held)) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for o in optimizers:
        for g in o.param_groups:
            for p in g['params']:
                name = names[id(p)]
                inside = any(part in name for part in ('attention.q', 'attention.k', 'attention.v', 'attention.o', '.mlp.'))
                inside |= name.startswith(('memory.', 'fusion.w_rec', 'lstm.weight'))
                assert inside == (p.dim() == 2 and name not in adamw)
                assert isinstance(o, torch.optim.Muon) == (config.optimizer == 'muon' and inside)
                assert g['weight_decay'] == (config.weight_decay if inside else 0.0)
                assert g['scale'] == (config.recurrence_lr_scale if name in recurrence else 1.0)


def test_frozen_parameters_stay(folders, tmp_path):
    config = settings(folders, tmp_path, **T2MLR, schedule='jacobi', d_forward=2, d_backward=2, freeze_base=True, max_steps=5)
    train.train(config)
    torch.manual_seed(config.seed)
    model = build(config)
    start, end = model.state_dict(), read_checkpoint(tmp_path / 'ckpt.pt')['model']
    added = recurrence_parameters(model)
    assert all(torch.equal(start[k], end[k]) for k in start if k not in added)
    config.out_dir, config.freeze_base = str(tmp_path / 'free'), False
    train.train(config)
    end = read_checkpoint(tmp_path / 'free' / 'ckpt.pt')['model']
    assert not torch.equal(start['head.weight'], end['head.weight'])


# What a run leaves and says


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float64'])
@pytest.mark.parametrize('name', ARCHITECTURES)
def test_training_learns_in_every_precision(folders, tmp_path, name, dtype):
    config = settings(folders, tmp_path, **ARCHITECTURES[name] | {'dtype': dtype, 'max_steps': 60, 'decay_steps': 60})
    config.learning_rate = 1e-2
    train.train(config)
    curve = losses(tmp_path)
    assert curve[0] > 5 and curve[-1] < 3.9
    saved = read_checkpoint(tmp_path / 'ckpt.pt')
    assert {t.dtype for t in saved['model'].values()} == {torch.float64 if dtype == 'float64' else torch.float32}
    evaluations = [line for line in log_of(tmp_path) if 'val' in line]
    assert [line['step'] for line in evaluations] == [10, 20, 30, 40, 50, 60]
    for line in evaluations:
        assert (line['val_exact'] is not None) == (config.recurrence != 'none')
    assert saved['best_loss'] <= min(line['val']['loss'] for line in evaluations[:-1])


def test_a_task_reports_each_score(folders, tmp_path):
    train.train(settings(folders, tmp_path, 'task', **T2MLR, schedule='jacobi', d_forward=2, d_backward=2, max_steps=10))
    (line,) = [line for line in log_of(tmp_path) if 'val' in line]
    for which in ('val', 'val_exact'):
        assert set(line[which]) == {'loss', 'state', 'retrieval'}
        assert 0 <= line[which]['state'] <= 1 and 0 <= line[which]['retrieval'] <= 1


def test_batches_are_a_pure_function(folders):
    """The same rows whatever was drawn before, another for every seed and step; the training split is covered evenly."""
    data, again = Dataset(str(folders / 'text')), Dataset(str(folders / 'text'))
    first = [data.rows('train', 1, step, 8, 24) for step in range(50)]
    for step in reversed(range(50)):
        assert np.array_equal(first[step], again.rows('train', 1, step, 8, 24))
    assert len({tuple(r) for r in first}) == 50 and not np.array_equal(first[0], data.rows('train', 2, 0, 8, 24))
    choices = len(data.split('train')) - 24
    flat = np.concatenate([data.rows('train', 1, step, 64, 24) for step in range(100)])
    assert flat.min() >= 0 and flat.max() < choices and abs(flat.mean() / choices - 0.5) < 0.02
    x, y, mask = data.batch('train', [0, choices - 1], 24)
    stream = np.array(data.split('train')).astype(np.int64)
    assert mask is None and x[0].tolist() == stream[:24].tolist() and y[1].tolist() == stream[-24:].tolist()


@pytest.mark.fault('many steps with evaluations, samples and checkpoints', 'memory does not grow')
def test_memory_does_not_grow(folders, capsys):
    """A short form of runs/soak.sh: updates, evaluations, checkpoints and samples in one process."""
    soak.main(['--steps=240', '--interval=15', f'--data_dir={folders}/text'])
    assert 'memory in the second quarter' in capsys.readouterr().out


def test_a_soak_notices_what_grows(folders, monkeypatch, capsys):
    found = iter(range(100))
    monkeypatch.setattr(soak, 'soak', lambda config: [100 + 2 * next(found) for _ in range(32)])
    with pytest.raises(SystemExit) as stop:
        soak.main([])
    assert stop.value.code == 1 and 'memory grew by' in capsys.readouterr().err


def test_datasets_that_do_not_fit(folders, tmp_path):
    config = settings(folders, tmp_path / 'out')
    for name, changed, says in (
        ('missing', {'data_dir': str(tmp_path / 'none')}, 'holds no dataset'),
        ('vocabulary', {'vocab_size': 100}, 'vocab_size=100 is too small'),
        ('long block', {'block_size': 10**7}, 'too few for block_size=10000000'),
        ('long example', {'data_dir': str(folders / 'task'), 'block_size': 10, 'reset_token': -1}, 'above block_size=10'),
    ):
        with pytest.raises(ConfigError, match=says):
            train.train(replace(config, **changed))
        assert not (tmp_path / 'out').exists(), name
    with pytest.raises(ConfigError, match='holds no dataset'):
        train.train(replace(config, data_dir=str(folders / 'text' / 'train.bin')))


def copied(source, target):
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


@pytest.mark.fault('damaged metadata', 'one sentence, nothing written')
def test_damaged_metadata_is_one_sentence(folders, tmp_path):
    """Every key of meta.json that training reads, missing or of a wrong kind; and files that are no JSON object."""
    for kind in ('text', 'task'):
        config = settings(folders, tmp_path / 'out', kind, max_steps=1, warmup_steps=0)
        whole = json.loads((folders / kind / 'meta.json').read_text())
        cases = ['{"kind": ', '[]', 'null', '{}', '[' * 100_000]
        for name in {'kind', 'vocab_size', 'splits'} | ({'dtype'} if kind == 'text' else {'scores', 'longest'}):
            for value in (None, 'zzz', -1, 1.5, [], {}, float('nan')):
                if (name, value) not in (('scores', {}),):
                    cases.append(json.dumps(whole | {name: value}))
        cases += [json.dumps(whole | {'vocab_size': v}) for v in (0, 10**18)]
        for case in cases:
            folder = copied(folders / kind, tmp_path / 'data')
            (folder / 'meta.json').write_text(case)
            trial()
            try:
                train.train(replace(config, data_dir=str(folder)))
            except ConfigError as e:
                assert str(folder) in str(e) and not (tmp_path / 'out').exists()
            else:
                pytest.fail(f'accepted: {case[:300]}')


@pytest.mark.fault('cut, missing or foreign data files', 'one sentence, nothing written')
def test_damaged_data_is_one_sentence(folders, tmp_path):
    """Cut, empty, missing and of another type; ids outside the vocabulary end the run when they are met."""
    for kind, suffix in (('text', 'bin'), ('task', 'npz')):
        config = settings(folders, tmp_path / 'out', kind, max_steps=1, warmup_steps=0)
        for split in ('train', 'val'):
            whole = (folders / kind / f'{split}.{suffix}').read_bytes()
            middle = len(whole) // 2
            flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
            for content in (None, b'', whole[: middle // 2 * 2], whole[:-1], *([flipped] if kind == 'task' else [])):
                folder = copied(folders / kind, tmp_path / 'data')
                (folder / f'{split}.{suffix}').unlink()
                if content is not None:
                    (folder / f'{split}.{suffix}').write_bytes(content)
                trial()
                with pytest.raises(ConfigError, match=f'{split}.{suffix} cannot be read'):
                    train.train(replace(config, data_dir=str(folder)))
                assert not (tmp_path / 'out').exists()
    config = settings(folders, tmp_path / 'out', max_steps=1, warmup_steps=0, batch_size=400)
    folder = copied(folders / 'text', tmp_path / 'data')
    stream = np.fromfile(folder / 'train.bin', dtype=np.uint16)
    stream[::7] = 999
    stream.tofile(folder / 'train.bin')
    with pytest.raises(ConfigError, match='token 999 in train, outside its vocabulary of 257'):
        train.train(replace(config, data_dir=str(folder)))
    config = settings(folders, tmp_path / 'out2', 'task', max_steps=1, warmup_steps=0)
    for name, value in (('tokens', None), ('targets', np.zeros(3, int)), ('tokens', 'float'), ('tokens', 'text')):
        folder = copied(folders / 'task', tmp_path / 'data')
        arrays = dict(np.load(folder / 'train.npz'))
        value = arrays[name].astype(float) + 0.5 if isinstance(value, str) and value == 'float' else value
        value = arrays[name].astype(str) if isinstance(value, str) else value
        arrays = {k: v for k, v in (arrays | {name: value}).items() if v is not None}
        np.savez(folder / 'train.npz', **arrays)
        trial()
        with pytest.raises(ConfigError, match='train.npz cannot be read'):
            train.train(replace(config, data_dir=str(folder)))


class FakeRun:
    id, starting_step = 'an-id', 0

    def __init__(self, fails_at):
        self.lines, self.finished, self.fails_at = [], False, fails_at

    def log(self, values, step):
        if step == self.fails_at:
            raise OSError('no space left on device')
        self.lines.append((step, values))

    def finish(self):
        self.finished = True


@pytest.mark.parametrize('fault', ['none', 'absent', 'init', 'log'])
@pytest.mark.fault('wandb absent, refusing to start or failing later', 'one warning, the log is complete')
def test_a_failing_tracker_never_stops_a_run(folders, tmp_path, monkeypatch, capsys, fault):
    run = FakeRun(5 if fault == 'log' else None)
    fake, opened = types.ModuleType('wandb'), []

    def init(**given):
        opened.append(given)
        if fault == 'init':
            raise RuntimeError('no login')
        return run

    fake.init, fake.Settings = init, lambda **given: given
    monkeypatch.setitem(sys.modules, 'wandb', None if fault == 'absent' else fake)
    train.train(settings(folders, tmp_path, wandb='offline', max_steps=10))
    assert len(losses(tmp_path)) == 10
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith('warning: wandb')]
    assert len(warnings) == (fault != 'none')
    assert len(opened) == (fault != 'absent')
    if fault == 'none':
        assert run.finished and [s for s, v in run.lines if 'loss' in v] == list(range(1, 11))
        assert opened[0]['mode'] == 'offline' and opened[0]['settings']['init_timeout'] <= 30


def test_only_the_first_process_opens_a_tracker():
    fake = types.SimpleNamespace()
    assert Tracker(TrainConfig(wandb='online'), active=False).run is None and not vars(fake)


# Dry run and configs


@pytest.mark.parametrize('path', all_configs(), ids=lambda p: p.stem)
def test_every_config_describes_a_model(path, capsys, monkeypatch):
    """Each opens with a comment, builds without weights, and its dry run agrees with counting the parameters."""
    # The figures of count_memory have a test of their own; it takes long for long contexts and deep models.
    shallow = dict(n_layer=4, l_start=1, l_end=2, source_layer=2)

    def short(config):
        changed = shallow if config.n_layer > 4 else {}
        return count_memory(replace(config, block_size=min(config.block_size, 64), **changed))

    monkeypatch.setattr(accounting, 'count_memory', short)
    assert path.read_text().startswith('# ')
    config = described(path)
    config.check()
    train.main([str(path), '--dry_run', '--json', f'--vocab_size={config.vocab_size}'])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    with torch.device('meta'):
        model = build(config)
    total = sum(p.numel() for p in model.parameters())
    assert found['total_parameters'] == total == sum(count_parameters(model).values())
    assert found['parameters'] == count_parameters(model)
    recurrence = recurrence_parameters(model)
    added = sum(p.numel() for name, p in model.named_parameters() if name in recurrence)
    assert found['recurrence_share'] == pytest.approx(added / total)
    assert found['step_flops_ratio'] >= 1 - 1e-12 and found['forward_flops_per_token'] > 0


def test_the_dry_run_of_a_billion_parameters_allocates_nothing(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(
        [sys.executable, str(ROOT / 'train.py'), str(ROOT / 'config/t2mlr_20L.py'), '--dry_run=True', '--json=True'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    found = json.loads(done.stdout.splitlines()[-1])
    assert found['memory']['peak'] < 0.9 * found['memory_limit']  # of a GPU, whatever their number
    assert 1.3e9 < found['total_parameters'] < 1.35e9 and 0.005 < found['recurrence_share'] < 0.01
    for part in ('embedding', 'attention', 'MLP', 'recurrence', 'total', 'training step'):
        assert part in done.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert after == before or after < 2**20 * 1.5  # KiB: torch itself takes a third of this, the weights would take 5 GB


def test_a_run_whose_data_is_missing_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / 'train.py'), str(ROOT / 'config/t2mlr_20L.py')],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert 'data/fineweb_edu' in done.stderr and 'prepare_data.py' in done.stderr and not list(tmp_path.iterdir())


def test_a_retrofit_without_its_checkpoint_says_so(tmp_path, monkeypatch, capsys):
    """Its dry run names the folder; its control states only what differs; a training ends before anything is written."""
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.chdir(tmp_path)
    retrofits = [path for path in all_configs() if path.stem.startswith('retrofit_') and not path.stem.endswith('_control')]
    assert len(retrofits) == 3
    for path in retrofits:
        ours, control = described(path), described(path.with_stem(f'{path.stem}_control'))
        differ = {k for k, v in asdict(ours).items() if v != asdict(control)[k]}
        assert differ == {'recurrence', 'schedule', 'out_dir'} and control.recurrence == 'none'
        train.main([str(path), '--dry_run'])
        assert f'{ours.init_from[3:]} is no folder here' in capsys.readouterr().err
        with pytest.raises(SystemExit) as stop:
            train.main([str(path)])
        err = capsys.readouterr().err
        assert stop.value.code == 2 and f'{ours.init_from[3:]} is neither a folder' in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_activation_checkpointing_needs_layers():
    with pytest.raises(ConfigError, match='activation_checkpointing=True'):
        TrainConfig(architecture='lstm', activation_checkpointing=True).check()


def test_a_schedule_is_the_same_object_to_model_and_config():
    config = TrainConfig(schedule='jacobi', d_forward=3, d_backward=2)
    alone = Schedule('jacobi', d_forward=3, d_backward=2)
    assert config.passes(9) == alone.passes(9) and sum(p.with_grad for p in alone.passes(9)) == 2
