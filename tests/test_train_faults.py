"""What a run must bear: batches and splits that score nothing, signals, threads, no compiler, no lock, torchrun's own report.
And what it does not wait for: the next batch, numbers from the device, an exact validation of a whole batch."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_text, trial
from test_train import (
    LRT,
    ROOT,
    T2MLR,
    command,
    launch,
    log_of,
    losses,
    on_two_processes,
    running,
    same_bits,
    settings,
)
from torch.utils._python_dispatch import TorchDispatchMode

import eval as evaluation
import prepare_data
import train
from configurator import ConfigError
from model import GPT, GPTConfig, build
from schedule import SEQUENTIAL
from support import checkpoint as checkpoint_room
from support import processes
from support.checkpoint import read_checkpoint, save_checkpoint
from support.data import Dataset, read_ahead
from support.log import finite, one_number_each
from support.processes import SAVE, STOP
from train import TrainConfig


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A text dataset and an aligned task whose test examples are longer than those trained."""
    root = tmp_path_factory.mktemp('data')
    make_text(root)
    sizes = ['--n_train=200', '--n_val=40', '--n_test=40', '--steps=1-4', '--test_steps=1-6']
    prepare_data.main(['s5', '--group=3', *sizes, f'--out={root}/task'])
    return root


def with_targets(data, folder, change, split='train'):
    """A copy of the task in which `change` has changed the targets of a split in place."""
    shutil.copytree(data / 'task', folder / 'task')
    arrays = dict(np.load(folder / 'task' / f'{split}.npz'))
    change(arrays['targets'])
    np.savez(folder / 'task' / f'{split}.npz', **arrays)
    return folder


# What scores nothing


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.fault('batches that score nothing', 'skipped and counted: weights and moments as before')
def test_a_batch_that_scores_nothing_is_skipped(data, tmp_path, capsys, optimizer):
    """Every third example scores nothing, one example a step: those steps leave no trace but their count."""

    def change(targets):
        targets[::3] = -1

    folder = with_targets(data, tmp_path, change)
    config = settings(folder, tmp_path / 'out', 'task', batch_size=1, max_steps=12, optimizer=optimizer, keep_every=1)
    rows = [int(Dataset(config.data_dir).rows('train', config.seed, step, 1, 1)[0]) for step in range(12)]
    empty = [step for step in range(1, 12) if rows[step] % 3 == 0]
    assert 2 <= len(empty) <= 9
    train.train(config)
    lines = {line['step']: line for line in log_of(tmp_path / 'out') if 'lr' in line}
    assert lines[12]['skipped'] == sum(row % 3 == 0 for row in rows)
    before, *states = (tmp_path / 'out' / f'ckpt-{step:06}.pt' for step in range(1, 13))
    for step, path in enumerate(states, 1):
        assert ('loss' in lines[step + 1]) == (step not in empty)
        if before.exists() and path.exists():  # in a row of skipped steps none is written
            one, other = read_checkpoint(before), read_checkpoint(path)
            assert same_bits(one['model'], other['model']) == (step in empty)
        before = path
    final = read_checkpoint(tmp_path / 'out' / 'ckpt.pt')
    steps = {float(s['step']) for s in final['optimizers'][0]['state'].values() if 'step' in s}
    assert steps == {float(sum(row % 3 != 0 for row in rows))}
    assert 'score nothing' in capsys.readouterr().err


def test_a_pass_that_scores_nothing_has_no_mean(data, tmp_path):
    """Only even positions are scored: the pass over the odd ones is null in the log, and no number."""

    def change(targets):
        targets[:, 1::2] = -1
        targets[:, ::2] = np.maximum(targets[:, ::2], 0)

    folder = with_targets(data, tmp_path, change)
    config = settings(folder, tmp_path / 'out', 'task', **LRT, schedule='interleaved', max_steps=3)
    train.train(config)
    for line in log_of(tmp_path / 'out'):
        if 'loss' in line:
            first, even, odd = line['passes']
            assert first > 0 and even > 0 and odd is None and line['loss'] == pytest.approx((first + even) / 2, rel=1e-6)
            assert line['skipped'] == 0
    config = replace(config, out_dir=str(tmp_path / 'weighted'), pass_weights=(0.0, 0.0, 1.0), max_bad_steps=3)
    with pytest.raises(SystemExit) as stop:  # all the weight is on the pass that scores nothing
        train.train(config)
    assert stop.value.code == 3 and not losses(tmp_path / 'weighted')


@pytest.mark.fault('a split without a scored token', 'train is refused, val has no loss and figures take it')
def test_a_split_that_scores_nothing(data, tmp_path, capsys):
    def change(targets):
        targets[:] = -1

    config = settings(data, tmp_path / 'good', 'task', **T2MLR, schedule='jacobi', d_forward=2, d_backward=2, max_steps=10)
    train.train(config)
    folder = with_targets(data, tmp_path / 'val', change, 'val')
    trial()
    train.train(replace(config, data_dir=str(folder / 'task'), out_dir=str(tmp_path / 'bad'), keep_best=True))
    said = capsys.readouterr()
    assert said.err.count('no token of val in') == 1 and 'nothing is scored' in said.out + said.err
    (line,) = [line for line in log_of(tmp_path / 'bad') if 'val' in line]
    assert line['val'] == {} and line['val_exact'] == {}
    evaluation.main([f'--curves={tmp_path}/bad,{tmp_path}/good', f'--figure={tmp_path}/c.png'])
    assert (tmp_path / 'c.png').stat().st_size > 1000
    folder = with_targets(data, tmp_path / 'train', change)
    trial()
    with pytest.raises(ConfigError, match='no token of train in .*task is scored'):
        train.train(replace(config, data_dir=str(folder / 'task'), out_dir=str(tmp_path / 'none')))
    assert not (tmp_path / 'none').exists()


def test_what_is_not_finite_is_no_json():
    values = {'step': 3, 'loss': float('nan'), 'passes': [1.0, float('inf')], 'val': {'loss': float('inf'), 'state': 0.5}}
    found = finite(values | {'val_exact': None})
    assert found == {'step': 3, 'passes': [1.0, None], 'val': {'state': 0.5}, 'val_exact': None}
    json.dumps(found, allow_nan=False)
    assert one_number_each(found) == {'step': 3, 'pass/0': 1.0, 'val/state': 0.5}


def test_every_split_is_counted_before_training(data, tmp_path):
    """Test examples are the longest: the size that the message names is one that evaluation takes."""
    longest = Dataset(str(data / 'task')).longest
    assert longest['test'] > max(longest['train'], longest['val'])
    config = settings(data, tmp_path / 'out', 'task', max_steps=1)
    with pytest.raises(ConfigError, match=rf'{longest["test"]} tokens in test, above .*; take {longest["test"]}\.'):
        train.train(replace(config, block_size=longest['train']))
    assert not (tmp_path / 'out').exists()
    train.train(replace(config, block_size=longest['test']))
    evaluation.main([f'--ckpt={tmp_path}/out', '--device=cpu', '--max_batches=1'])


# The tracker


class Tracked:
    """A run of wandb as its server keeps it: a resumed one continues behind its last step, and takes nothing before it."""

    def __init__(self, id):
        self.id, self.starting_step, self.history = id, 0, []

    def log(self, values, step):
        assert step >= self.starting_step and (not self.history or step >= self.history[-1][0])
        self.history.append((step, values))
        if step == 17 and self.starting_step == 0:
            raise KeyboardInterrupt  # the process dies

    def finish(self):
        pass


def test_a_resumed_run_is_one_tracked_run(data, tmp_path, monkeypatch):
    """It dies at step 17, seven steps after its checkpoint: one run there, each step once, a number a name."""
    runs, wandb = {}, types.ModuleType('wandb')

    def init(id=None, resume=None, **_):
        run = runs.setdefault(id or f'run{len(runs)}', Tracked(id or f'run{len(runs)}'))
        assert resume == 'allow' if run.history else id is None
        run.starting_step = run.history[-1][0] + 1 if run.history else 0
        return run

    wandb.init, wandb.Settings = init, lambda **given: given
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    changed = T2MLR | dict(schedule='jacobi', d_forward=3, d_backward=2, wandb='online', max_steps=30, decay_steps=30)
    config = settings(data, tmp_path / 'out', **changed)
    with pytest.raises(KeyboardInterrupt):
        train.train(config)
    assert read_checkpoint(tmp_path / 'out' / 'ckpt.pt')['step'] == 10
    train.train(replace(config, init_from='auto', max_steps=20, wandb='off'))
    train.train(replace(config, init_from='auto'))
    (run,) = runs.values()
    points = [(step, name) for step, values in run.history for name in values]
    assert len(set(points)) == len(points)
    assert [step for step, name in points if name == 'loss'] == [*range(1, 18), *range(21, 31)]
    assert {f'change/{i}' for i in range(3)} | {'pass/0', 'val/loss', 'val_exact/loss'} <= {name for _, name in points}
    assert all(isinstance(value, int | float) for _, values in run.history for value in values.values())
    copied = tmp_path / 'copy'
    shutil.copytree(tmp_path / 'out', copied)
    train.train(replace(config, init_from='auto', out_dir=str(copied), max_steps=31))
    assert len(runs) == 2  # a copy of the checkpoint elsewhere is another run


# Signals, threads, devices, locks


def sending(monkeypatch, number, at):
    """From here on the process sends itself the signal when step `at`, counted from 0, begins."""
    rate = train.learning_rate

    def sent(config, step):
        if step == at:
            os.kill(os.getpid(), number)
        return rate(config, step)

    monkeypatch.setattr(train, 'learning_rate', sent)


@pytest.mark.parametrize('name', [*STOP, *SAVE])
@pytest.mark.fault('SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2', 'saved; SIGUSR1 goes on; the handlers of before return')
def test_a_signal_is_saved(data, tmp_path, monkeypatch, capsys, name):
    number = getattr(signal, name)
    numbers = [getattr(signal, other) for other in (*STOP, *SAVE)]
    before, saved, write = [signal.getsignal(n) for n in numbers], [], save_checkpoint
    sending(monkeypatch, number, 6)
    monkeypatch.setattr(
        checkpoint_room, 'save_checkpoint', lambda path, state, *more: saved.append(state['step']) or write(path, state)
    )
    config = settings(data, tmp_path / 'out', max_steps=15, eval_interval=100, log_interval=100)
    if name in SAVE:
        train.train(config)
        assert saved == [7, 15] and capsys.readouterr().err.count('holds step 7, as SIGUSR1 asked') == 1
    else:
        with pytest.raises(SystemExit) as stop:
            train.train(config)
        assert stop.value.code == 128 + number and saved == [7]
    assert [signal.getsignal(n) for n in numbers] == before


def test_under_nohup_a_closed_terminal_ends_nothing(data, tmp_path, monkeypatch):
    sending(monkeypatch, signal.SIGHUP, 3)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train.train(settings(data, tmp_path / 'out', max_steps=6))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(losses(tmp_path / 'out')) == 6


def test_a_run_in_a_thread(data, tmp_path):
    """It trains to its end, and no handler of the process changes."""
    numbers = [getattr(signal, name) for name in (*STOP, *SAVE)]
    before, ends = [signal.getsignal(n) for n in numbers], []
    config = settings(data, tmp_path / 'out', max_steps=4, decay_steps=0)

    def work():
        train.main(command(config))
        ends.append([signal.getsignal(n) for n in numbers])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert ends == [before] and read_checkpoint(tmp_path / 'out' / 'ckpt.pt')['step'] == 4


def test_one_process_sets_its_device(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'set_device', chosen.append)
    for name, sets in (('cuda:1', ['cuda:1']), ('cuda', []), ('auto', []), ('cpu', [])):
        chosen.clear()
        assert processes.use_device(TrainConfig(device=name)) == ('cuda' if name == 'auto' else name) and chosen == sets
    with pytest.raises(ConfigError, match='device=cuda:2 is not available'):
        processes.use_device(TrainConfig(device='cuda:2'))


def test_without_locks_a_run_warns(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(processes, 'fcntl', None)
    train.train(settings(data, tmp_path / 'out', max_steps=3))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith('warning: ')]
    assert len(said) == 1 and 'cannot be locked (this system has no fcntl)' in said[0]
    code = "import sys, torch; sys.modules['fcntl'] = None; from support import processes; assert processes.fcntl is None"
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


@pytest.mark.fault('no C++ compiler', 'one sentence, code 2, nothing written')
def test_without_a_compiler_compile_is_refused(data, tmp_path):
    config = settings(data, tmp_path / 'out', max_steps=3, compile=True)
    env = {name: value for name, value in os.environ.items() if name != 'CXX'}
    env |= {'PATH': str(tmp_path), 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path / 'cache')}
    argv = [sys.executable, str(ROOT / 'train.py'), *command(config)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert 'No working C++ compiler' in done.stderr and '--compile=False' in done.stderr
    assert not (tmp_path / 'out').exists()


# torchrun


def test_torchrun_ends_with_the_sentence(data, tmp_path):
    """Its box, the last that it prints, holds our sentence in place of a hint about tracebacks."""
    done = launch(2, settings(data, tmp_path / 'out', batch_size=4, data_dir=str(tmp_path / 'none')))
    box = done.stderr.rpartition('Root Cause')[2]
    assert done.returncode != 0 and f'error: data_dir={tmp_path}/none holds no dataset' in box, done.stderr
    assert 'To enable traceback' not in done.stderr and 'train.py", line' not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith('error: ')] == [
        line for line in done.stderr.splitlines() if line.startswith('error: data_dir=')
    ]
    assert not (tmp_path / 'out').exists()


@pytest.mark.skipif(not Path('/proc').is_dir(), reason='reads /proc')
@pytest.mark.fault('SIGUSR1 to a process, SIGHUP to torchrun', 'saved, and goes on; saved, and ended')
def test_signals_under_torchrun(data, tmp_path):
    config = settings(data, tmp_path / 'out', max_steps=10**6, eval_interval=10**6, decay_steps=0)
    argv = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'train.py', *command(config)]
    path, log = tmp_path / 'out' / 'ckpt.pt', tmp_path / 'out' / 'log.jsonl'
    with open(tmp_path / 'said', 'w') as f:
        run = subprocess.Popen(argv, cwd=ROOT, stderr=f, stdout=-3)
    try:
        until(lambda: log.exists() and log.stat().st_size)
        workers = running((name for name in os.listdir('/proc') if name.isdigit()), run.pid)
        os.kill(workers[-1], signal.SIGUSR1)  # the first process writes, whichever is told
        until(path.exists)
        step, size = read_checkpoint(path)['step'], log.stat().st_size
        until(lambda: log.stat().st_size > size)
        run.send_signal(signal.SIGHUP)
        assert run.wait(60) != 0 and not running(workers)
    finally:
        run.kill()
    assert read_checkpoint(path)['step'] > step and 'as SIGUSR1 asked' in (tmp_path / 'said').read_text()


def until(holds):
    since = time.time()
    while not holds():
        assert time.time() - since < 200
        time.sleep(0.05)


# What does not wait


def test_reading_ahead():
    """In order, one ahead of use; what goes wrong is raised where it belongs; the thread ends with the generator."""
    begun = [threading.Event() for _ in range(5)]

    def read(n):
        begun[n].set()
        if n == 3:
            raise ConfigError('three')
        return n * n

    threads = threading.active_count()
    numbers = read_ahead(read, range(5))
    assert next(numbers) == 0 and begun[1].wait(20)  # nobody asked for it yet
    assert next(numbers) == 1 and next(numbers) == 4
    with pytest.raises(ConfigError, match='three'):
        next(numbers)
    assert threading.active_count() == threads
    numbers = read_ahead(read, range(3))
    assert next(numbers) == 0 and threading.active_count() == threads + 1
    numbers.close()
    assert threading.active_count() == threads and list(read_ahead(read, range(1))) == [0] and not [*read_ahead(read, ())]


def test_a_reader_that_fails_ends_the_run_at_its_step(data, tmp_path):
    """A wrong token is met while the step before still runs: that step is done and logged; no thread is left."""
    config = settings(data, tmp_path / 'out', max_steps=9)
    dataset, threads = Dataset(config.data_dir), threading.active_count()
    wanted = dataset.rows('train', config.seed, 4, config.batch_size, config.block_size)
    earlier = [dataset.rows('train', config.seed, step, config.batch_size, config.block_size) for step in range(4)]
    read = {int(row) + i for rows in earlier for row in rows for i in range(config.block_size + 1)}
    at = next(int(row) + i for row in wanted for i in range(config.block_size) if int(row) + i not in read)
    shutil.copytree(data / 'text', tmp_path / 'text')
    stream = np.fromfile(tmp_path / 'text' / 'train.bin', dtype=np.uint16)
    stream[at] = 999
    stream.tofile(tmp_path / 'text' / 'train.bin')
    with pytest.raises(ConfigError, match='token 999 in train'):
        train.train(replace(config, data_dir=str(tmp_path / 'text')))
    assert len(losses(tmp_path / 'out')) == 4 and threading.active_count() == threads


@pytest.mark.parametrize('micro_batch', [8, 2])
def test_the_exact_validation_runs_on_one_micro_batch(data, tmp_path, monkeypatch, micro_batch):
    """Its loss is that of the first device_batch_size sequences of val, in one forward."""
    forward, sizes = GPT.forward, []

    def watched(self, tokens, *args, **given):
        if given.get('schedule') is SEQUENTIAL:
            sizes.append(len(tokens))
        return forward(self, tokens, *args, **given)

    changed = T2MLR | dict(
        schedule='jacobi', d_forward=2, d_backward=2, batch_size=8, device_batch_size=micro_batch, max_steps=2
    )
    config = settings(data, tmp_path / 'out', 'task', **changed)
    with monkeypatch.context() as patch:
        patch.setattr(GPT, 'forward', watched)
        train.train(config)
    assert sizes == [micro_batch]
    saved = read_checkpoint(tmp_path / 'out' / 'ckpt.pt')
    model = build(GPTConfig(**{k: saved['config'][k] for k in GPTConfig.__dataclass_fields__}))
    model.load_state_dict(saved['model'])
    dataset = Dataset(config.data_dir)
    x, y, mask = dataset.batch('val', np.arange(micro_batch), dataset.length('val', 0))
    with torch.no_grad():
        loss, _ = model(x, y, SEQUENTIAL, mask)
    assert log_of(tmp_path / 'out')[-1]['val_exact']['loss'] == pytest.approx(loss.item(), rel=1e-5)


class Reads(TorchDispatchMode):
    """Counts the numbers that the host asks tensors for."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('recurrence', [T2MLR | {'schedule': 'jacobi'}, LRT | {'schedule': 'interleaved'}])
def test_a_step_without_a_line_asks_for_no_number(data, tmp_path, monkeypatch, recurrence):
    """On a GPU each would be a wait for all that is queued."""
    reads, counts, rate = Reads(), [], train.learning_rate

    def watched(config, step):
        counts.append(reads.found)
        return rate(config, step)

    monkeypatch.setattr(train, 'learning_rate', watched)
    with reads:
        train.train(settings(data, tmp_path / 'out', **recurrence, max_steps=12, log_interval=10, eval_interval=100))
    assert counts[0] == counts[9] < counts[10] == counts[11]


def test_two_processes_skip_and_validate_as_one(data, tmp_path):
    """Batches of which one process, or both, score nothing; and the exact validation of a micro-batch each."""

    def change(targets):
        targets[: len(targets) * 3 // 4] = -1

    folder = with_targets(data, tmp_path, change)
    changed = T2MLR | dict(
        schedule='jacobi', d_forward=2, d_backward=2, device_batch_size=2, eval_batches=2, eval_exact_batches=2
    )
    one = settings(folder, tmp_path / 'one', 'task', **changed)
    two = replace(one, device_batch_size=1, out_dir=str(tmp_path / 'two'))
    train.train(one)
    on_two_processes([two])
    a, b = log_of(one.out_dir), log_of(two.out_dir)
    assert [line.get('skipped') for line in a] == [line.get('skipped') for line in b]
    assert 0 < a[-2]['skipped'] < 20
    np.testing.assert_allclose(losses(two.out_dir), losses(one.out_dir), rtol=1e-5, atol=1e-5)
    for line, other in zip(a, b, strict=True):
        assert (line.get('val_exact') or {}) == pytest.approx(other.get('val_exact') or {}, rel=1e-5, abs=1e-5)


# What is said at the start


@pytest.mark.parametrize('steps', [1, 7, 60])
def test_a_warm_up_longer_than_the_run_is_shortened(data, tmp_path, capsys, steps):
    config = settings(data, tmp_path / 'out', max_steps=steps, decay_steps=0, warmup_steps=100, learning_rate=1e-2)
    train.train(config)
    warmup = max(1, steps // 10)
    assert capsys.readouterr().out.count(f'warmup_steps=100 is above {steps} steps; the warm-up takes {warmup}') == 1
    rates = [line['lr'] for line in log_of(tmp_path / 'out') if 'lr' in line]
    assert rates[warmup - 1] == max(rates) == 1e-2 and rates[0] == pytest.approx(1e-2 / warmup)


@pytest.mark.parametrize('kind', ['text', 'task'])
def test_data_that_repeat_are_mentioned(data, tmp_path, capsys, kind):
    dataset = Dataset(str(data / kind))
    size = len(dataset.split('train')) / 24 if kind == 'text' else len(dataset.split('train')['tokens'])
    steps = int(3.25 * size / 16) + 1
    config = settings(data, tmp_path / 'out', kind, batch_size=16, max_steps=steps, eval_interval=1000, log_interval=1000)
    train.train(config)
    assert f'goes through the training data {steps * 16 / size:.1f} times' in capsys.readouterr().out
    train.train(replace(config, out_dir=str(tmp_path / 'short'), max_steps=2))
    assert 'goes through' not in capsys.readouterr().out
