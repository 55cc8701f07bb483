"""How a run is spread over its processes: one config on any number of them, and what a dry run says of one."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_train import LRT, T2MLR, launch, log_of, losses, on_two_processes, same_bits, settings
from test_train_faults import with_targets

import train
from configurator import ConfigError, parse
from support.accounting import count_memory
from support.checkpoint import read_checkpoint, save_checkpoint
from support.sharding import check_batch
from train import TrainConfig

# The batch


@pytest.mark.parametrize(
    'batch, device, processes, says',
    [
        (256, 8, 3, 'batch_size=256 does not divide over 3 processes; take 255 or 258.'),
        (4, 0, 8, 'batch_size=4 does not divide over 8 processes; take 8.'),
        (256, 7, 8, 'device_batch_size=7 does not divide 32 sequences, .* 8 processes has of batch_size=256; take 4 or 8.'),
        (34, 3, 2, 'device_batch_size=3 does not divide 17 sequences, .* take 1 or 17.'),
        (2**31 - 1, 2**30, 1, 'take 1 or 2147483647.'),
    ],
)
def test_a_batch_that_does_not_divide_is_one_sentence(batch, device, processes, says):
    with pytest.raises(ConfigError, match=says):
        check_batch(batch, device, processes)


def test_every_batch_is_refused_or_split_into_equal_parts(monkeypatch):
    split = 0
    for processes in (1, 2, 3, 8, 64):
        monkeypatch.setenv('WORLD_SIZE', str(processes))
        for batch in (1, 6, 8, 64, 192):
            for device in (0, 1, 2, 3, 8, 100):
                config = TrainConfig(batch_size=batch, device_batch_size=device)
                try:
                    config.check()
                except ConfigError:
                    continue
                assert processes * config.accumulation * config.micro_batch == batch
                assert config.micro_batch <= (device or batch)
                split += 1
    assert split > 50


def flagship(folders, out, config):
    """A config of the papers, scaled down."""
    small = [f'--data_dir={folders}/text', '--vocab_size=0', '--reset_token=256', '--n_layer=4', '--n_head=2', '--n_embd=32']
    small += ['--block_size=24', '--batch_size=8', '--device_batch_size=2', '--max_steps=12', '--warmup_steps=2']
    small += ['--eval_interval=6', '--eval_batches=1', '--log_interval=1', '--compile=False', '--device=cpu', '--threads=1']
    spans = {'t2mlr_20L': ['--l_start=1', '--l_end=2'], 'lrt_20L': ['--source_layer=2']}
    argv = [f'config/{config}.py', *small, *spans.get(config, []), f'--out_dir={out}']
    return parse(TrainConfig, argv, '')


@pytest.mark.parametrize('name', ['t2mlr_20L', 'lrt_20L'])
@pytest.mark.fault('one config under torchrun, on one process and on two', 'one curve')
def test_one_config_has_one_curve_on_one_process_and_two(folders, tmp_path, name):
    for n in (1, 2):
        done = launch(n, flagship(folders, tmp_path / str(n), name))
        assert done.returncode == 0, done.stderr
    one, two = (losses(tmp_path / str(n)) for n in (1, 2))
    assert len(one) == 12 and one[-1] < one[0] - 0.1
    np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5)
    val = [[line['val']['loss'] for line in log_of(tmp_path / str(n)) if 'val' in line] for n in (1, 2)]
    np.testing.assert_allclose(val[1], val[0], rtol=1e-5, atol=1e-5)


def test_a_run_of_before_device_batch_size_continues(folders, tmp_path, capsys):
    """Its checkpoint states a number of micro-batches; the curve is that of one run, and the old key names the new one."""
    config = settings(folders, tmp_path / 'out', **T2MLR, schedule='jacobi', d_forward=2, d_backward=2, max_steps=6)
    train.train(config)
    train.train(replace(config, out_dir=str(tmp_path / 'whole'), max_steps=12))
    saved = read_checkpoint(tmp_path / 'out' / 'ckpt.pt')
    for name in ('device_batch_size', 'world_size', 'device_memory'):
        del saved['config'][name]
    saved['config']['accumulation'] = 2
    save_checkpoint(str(tmp_path / 'out' / 'ckpt.pt'), saved)
    train.train(replace(config, device_batch_size=2, max_steps=12, init_from='resume'))
    np.testing.assert_allclose(losses(tmp_path / 'out'), losses(tmp_path / 'whole'), rtol=1e-5, atol=1e-5)
    with pytest.raises(SystemExit):
        train.main(['--accumulation=2'])
    assert "unknown key 'accumulation'" in (err := capsys.readouterr().err) and "'device_batch_size'" in err


# The dry run


SMALL = ['--vocab_size=64', '--n_layer=2', '--n_embd=32', '--n_head=2', '--block_size=16', '--data_dir=none']


def described(capsys, *given):
    train.main([*SMALL, *given, '--dry_run', '--json'])
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), out, err


def test_a_dry_run_speaks_of_one_process_of_the_run_that_is_meant(capsys, monkeypatch):
    """--world_size=N says what N processes would: the same batch on each as far as it is large enough, then less."""
    peaks = {}
    for n in (1, 4, 16, 64):
        found, out, _ = described(capsys, '--batch_size=64', '--device_batch_size=4', f'--world_size={n}')
        micro = min(4, 64 // n)
        assert f'one of {n} processes, {64 // n // micro} x {micro} sequences, bfloat16' in out
        monkeypatch.setenv('WORLD_SIZE', str(n))
        assert described(capsys, '--batch_size=64', '--device_batch_size=4')[0] == found
        monkeypatch.delenv('WORLD_SIZE')
        peaks[n] = found['memory']['peak']
    assert peaks[1] == peaks[4] == peaks[16] > peaks[64]
    with pytest.raises(SystemExit):
        train.main([*SMALL, '--batch_size=64', '--world_size=3', '--dry_run'])
    assert 'does not divide over 3 processes; take 63 or 66.' in capsys.readouterr().err


def test_a_dry_run_is_that_of_a_gpu_unless_the_device_is_another(capsys):
    for device, dtype in (('auto', 'bfloat16'), ('cuda', 'bfloat16'), ('cpu', 'float32'), ('mps', 'float32')):
        assert f', {dtype}, as on CPU' in described(capsys, f'--device={device}')[1]


def test_a_dry_run_puts_the_peak_beside_the_memory_of_a_device(capsys):
    found, out, err = described(capsys)
    assert found['memory_limit'] == 80e9 and f'{80e9 / 2**20:,.0f} MiB' in out and 'of device_memory=80 GB' in out and not err
    found, out, err = described(capsys, '--device_memory=1', '--batch_size=65536')
    assert found['memory']['peak'] > found['memory_limit'] == 1e9
    assert f'{found["memory"]["peak"] / 1e9:.0%} of device_memory=1 GB' in out
    assert (
        'take a device_batch_size below 65536, --activation_checkpointing=True or --shard=True.' in err
        and len(err.splitlines()) == 1
    )


def test_gradients_stay_while_micro_batches_run():
    """The last of several begins with the gradients of those before, and DDP keeps its buckets: the peak counts them."""
    config = TrainConfig(vocab_size=4096, n_layer=1, n_embd=128, n_head=2, block_size=64, batch_size=8, dtype='float32')
    weights = count_memory(config)['weights']
    one = count_memory(replace(config, batch_size=2))['peak']
    several = count_memory(replace(config, device_batch_size=2))['peak']
    shared = count_memory(replace(config, dry_run=True, world_size=4))['peak']
    assert several == shared and weights / 2 < several - one < 1.5 * weights


def test_a_dry_run_of_shards_divides_what_stays_and_adds_what_is_gathered():
    """Weights and moments by the number of processes; the peak falls by the rest of the moments, not by the activations."""
    config = TrainConfig(vocab_size=4096, n_layer=1, n_embd=128, n_head=2, block_size=64, batch_size=64, dtype='float32')
    config = replace(config, dry_run=True, device_batch_size=1)
    whole = count_memory(replace(config, world_size=8))
    few, many = (count_memory(replace(config, world_size=n, shard=True)) for n in (8, 64))
    assert few['weights'] == whole['weights'] // 8 and many['optimiser'] == whole['optimiser'] // 64
    held = whole['weights'] * 2 + whole['optimiser']  # the gradients are as large as the weights
    assert few['peak'] - many['peak'] == pytest.approx(held / 8 - held / 64, rel=1e-2)
    assert whole['peak'] - few['peak'] < whole['optimiser'] + whole['weights']
    assert few['peak'] > 2 * whole['weights'] and many['peak'] < whole['peak']


# Shards


JACOBI = T2MLR | {'schedule': 'jacobi', 'd_forward': 3, 'd_backward': 2}
INTERLEAVED = LRT | {'schedule': 'interleaved'}
SHARDED = {
    'transformer': {'family': 'llama'},
    't2mlr': JACOBI | {'device_batch_size': 2},
    'lrt': INTERLEAVED | {'optimizer': 'muon', 'memory_projection': 'layerwise', 'value_embeddings': 'all'},
    'lrt, muon, uneven': INTERLEAVED | {'optimizer': 'muon', 'n_layer': 3, 'n_head': 1, 'n_embd': 18, 'n_hidden': 7},
    'chunked': LRT | {'schedule': 'chunked', 'chunk_size': 5, 'family': 'llama'},
    'sequential': T2MLR | {'schedule': 'sequential', 'block_size': 8},
    'frozen base': JACOBI | {'freeze_base': True},
    'frozen base, LRT and Muon': INTERLEAVED | {'freeze_base': True, 'optimizer': 'muon'},
    'no pass with memory': T2MLR | {'schedule': 'jacobi', 'd_forward': 0, 'd_backward': 1},
    'growing from no memory': JACOBI | {'d_forward_start': 0, 'd_forward_steps': 6},
    'loops': LRT | {'schedule': 'interleaved', 'n_loop': 2, 'l_start': 0, 'l_end': 1},
    'checkpointing': JACOBI | {'activation_checkpointing': True},
    'task': JACOBI | {'data': 'task', 'batch_size': 8, 'device_batch_size': 2, 'optimizer': 'muon'},
    'little clipped': JACOBI | {'grad_clip': 0.01},
}


@pytest.fixture(scope='module')
def shards(folders, tmp_path_factory):
    """{name: (out_dir of one process, out_dir of two that share weights, gradients and moments)}."""
    root = tmp_path_factory.mktemp('shards')
    single = {
        name: settings(folders, root / f'{i}-one', **{'dtype': 'float64', 'max_steps': 12} | changed)
        for i, (name, changed) in enumerate(SHARDED.items())
    }
    for config in single.values():
        train.train(config)
    # Alike in the number of sequences that the exact validation of a process sees.
    pair = {
        name: replace(c, shard=True, device_batch_size=c.device_batch_size // 2, out_dir=c.out_dir.replace('one', 'two'))
        for name, c in single.items()
    }
    on_two_processes(list(pair.values()))
    return {name: (single[name].out_dir, pair[name].out_dir) for name in SHARDED}


def assert_close(a, b, tolerance):
    """Nested structures of tensors and plain values agree to a tolerance."""
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a:
            assert_close(a[k], b[k], tolerance)
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_close(x, y, tolerance)
    else:
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance) if isinstance(a, float) else a == b


@pytest.mark.parametrize('name', SHARDED)
@pytest.mark.fault('two processes that share weights, gradients and moments', 'one process, to 1e-9, checkpoint included')
def test_sharded_equals_one_process(shards, name):
    one, two = shards[name]
    assert len(losses(one)) == 12 and len(set(losses(one))) > 1
    logs = [[{k: v for k, v in line.items() if k != 'changes'} for line in log_of(out)] for out in (one, two)]
    assert_close(*logs, 1e-9)  # the changes are those of the first process's sequences
    a, b = (read_checkpoint(f'{out}/ckpt.pt') for out in (one, two))
    for part in ('model', 'optimizers'):
        assert_close(a[part], b[part], 1e-9)


def stages(folders, root, *settings_of_stages, **common):
    """Runs one training in stages of 4 steps, each with its own number of processes and settings; returns out_dir."""
    config = settings(folders, root, dtype='float64', eval_interval=4, decay_steps=16, **common)
    for i, (processes, changed) in enumerate(settings_of_stages):
        stage = replace(config, max_steps=4 * i + 4, init_from='auto', **changed)
        if processes == 1:
            train.train(stage)
        else:
            on_two_processes([stage])
    return root


@pytest.mark.parametrize('common', [JACOBI, INTERLEAVED | {'optimizer': 'muon'}], ids=['t2mlr', 'lrt, muon'])
@pytest.mark.fault('sharded, averaged and single processes, in turns', 'one curve and checkpoint, to 1e-9')
def test_checkpoints_go_between_sharded_averaged_and_single_runs(folders, tmp_path, common):
    single, averaged, sharded = (1, {}), (2, {}), (2, {'shard': True})
    one = stages(folders, tmp_path / 'one', *[single] * 4, **common)
    mixed = stages(folders, tmp_path / 'mixed', sharded, single, sharded, averaged, **common)
    again = stages(folders, tmp_path / 'again', averaged, sharded, (1, {'shard': True}), sharded, **common)
    for other in (mixed, again):
        np.testing.assert_allclose(losses(other), losses(one), rtol=1e-9, atol=1e-9)
        a, b = (read_checkpoint(out / 'ckpt.pt') for out in (one, other))
        for part in ('model', 'optimizers'):
            assert_close(a[part], b[part], 1e-9)


def test_a_sharded_run_skips_and_resumes_as_one(folders, tmp_path):
    """Batches of which one process, or both, score nothing; the clock of the first process asks both for a checkpoint; a run
    in two parts is the whole one, bit for bit."""

    def change(targets):
        targets[: len(targets) * 3 // 4] = -1

    folder = with_targets(folders, tmp_path, change)
    common = INTERLEAVED | {'optimizer': 'muon', 'data': 'task', 'dtype': 'float64', 'max_steps': 14}
    one = settings(folder, tmp_path / 'one', **common)
    whole = replace(one, out_dir=str(tmp_path / 'whole'), shard=True)
    parts = replace(whole, out_dir=str(tmp_path / 'parts'), max_steps=7, save_minutes=1e-6)
    resumed = replace(parts, max_steps=14, init_from='resume')
    train.train(one)
    on_two_processes([whole, parts, resumed])
    skipped = [[line.get('skipped') for line in log_of(c.out_dir)] for c in (one, whole)]
    assert skipped[0] == skipped[1] and 0 < skipped[0][-2] < 14
    np.testing.assert_allclose(losses(whole.out_dir), losses(one.out_dir), rtol=1e-9, atol=1e-9)
    a, b = (read_checkpoint(f'{c.out_dir}/ckpt.pt') for c in (whole, resumed))
    assert same_bits(a['model'], b['model']) and same_bits(a['optimizers'], b['optimizers'])


def test_shards_need_layers():
    with pytest.raises(ConfigError, match='shard=True .* architecture=lstm'):
        TrainConfig(architecture='lstm', shard=True).check()
