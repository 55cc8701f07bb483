"""The benchmarks run, say what they promise and refuse what they cannot do. No test asserts a time."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch

import bench
import prepare_data
from model import build
from support.accounting import count_flops
from train import TrainConfig, train

ROOT = Path(bench.__file__).parent


def measured(capsys, *argv):
    capsys.readouterr()
    bench.main([*argv, '--json'])
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


def test_the_table_of_configs(capsys):
    """One row each; the sizes that the papers and the checkpoints publish; where the data decide the vocabulary, 257 tokens."""
    found, out = measured(capsys, 'configs')
    assert set(found) == {p.stem for p in ROOT.glob('config/*.py')} and all(f'`{name}`' in out for name in found)
    assert '| `text_lrt` | (257) |' in out and found['text_lrt']['vocab_size'] == 257
    assert '| `lrt_20L` | 32,768 |' in out and found['lrt_20L']['vocab_size'] == 32768
    assert found['transformer_135M']['total_parameters'] == 134_515_008
    assert 0.0025 <= found['lrt_20L']['recurrence_share'] <= 0.0035
    for name, low, high in (
        ('transformer_20L', 1.31e9, 1.32e9),
        ('transformer_24L', 1.985e9, 1.995e9),
        ('lrt_layerwise_24L', 2.095e9, 2.105e9),
        ('t2mlr_361M', 3.6e8, 3.7e8),
    ):
        assert low < found[name]['total_parameters'] < high
    assert found['transformer_20L']['step_flops_ratio'] == found['transformer_20L']['decode_ratio'] == 1
    assert 1.95 < found['lrt_20L']['step_flops_ratio'] < 2.1 and 3.9 < found['lrt_multirefine_20L']['step_flops_ratio'] < 4.1


@pytest.mark.parametrize('more', [[], ['--profile'], ['--dtype=bfloat16']])
def test_training_steps(capsys, more):
    small = ['--n_layer=3', '--n_embd=16', '--n_head=2', '--block_size=12', '--batch_size=2', '--l_start=1', '--l_end=1']
    found, out = measured(capsys, 'train', *small, '--source_layer=1', '--rounds=2', '--device=cpu', *more)
    assert list(found) == list(bench.VARIANTS)
    assert all(set(v) == {'ms', 'ratio', 'floor', 'tokens_s'} and v['ratio'] > 0 for v in found.values())
    assert found['plain']['ratio'] == found['plain']['floor'] == 1
    assert all(v['floor'] > 1 for name, v in found.items() if name not in ('plain', 'textbook'))


def test_the_share_of_a_gpus_flops(monkeypatch):
    assert bench.speed(1000, 1e12, 0.5, 'cpu') == {'tokens_s': 2000}
    for name, mfu in (('NVIDIA H200', 0.5), ('NVIDIA H100 PCIe', 0.6541), ('NVIDIA H100 80GB HBM3', 0.5), ('Tesla T4', None)):
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device, name=name: name)
        assert bench.speed(1000, 989e12, 2.0, 'cuda').get('mfu') == mfu


def test_the_start_of_compiled_steps(capsys, monkeypatch):
    """Each variant compiles in a process of its own: none is quicker for what another has left behind."""
    small = ['--n_layer=1', '--n_embd=16', '--n_head=2', '--block_size=12', '--batch_size=2', '--l_start=0', '--l_end=0']
    argv = ['train', *small, '--source_layer=0', '--rounds=1', '--device=cpu', '--compile', '--only=textbook']
    # The new processes ask for no trial run of the vector instructions, and compile; this one, whose times count for nothing
    # here, only traces.
    monkeypatch.setenv('TORCHINDUCTOR_VEC_ISA_OK', '1')
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='eager'))
    found, out = measured(capsys, *argv)
    assert list(found) == ['plain', 'textbook'] and 'start_s' in out
    assert all(row['start_s'] > 1 and set(row) == {'ms', 'ratio', 'floor', 'tokens_s', 'start_s'} for row in found.values())


def test_scaling(capsys):
    small = ['--n_layer=3', '--n_embd=16', '--n_head=2', '--block_size=12', '--batch_size=4', '--l_start=1', '--l_end=1']
    found, out = measured(capsys, 'scaling', *small, '--source_layer=1', '--rounds=1', '--device=cpu')
    assert len(found) == 3 * (len(bench.VARIANTS) - 1) + 3 and all(name in out for name in found)
    assert found['d_forward=4']['count'] == found['plain, T=12']['count'] == 1 < found['d_forward=8']['count']
    assert 1 < found['plain, T=24']['count'] < found['plain, T=48']['count']


def test_the_textbook_computes_the_same():
    """Same weights: the same loss and gradients as the plain transformer, so that their times compare."""
    config = bench.training_config(bench.TrainBench(n_layer=7, n_embd=24, n_head=2, block_size=20), 'plain')
    torch.manual_seed(0)
    ours, theirs = build(config).double(), bench.Textbook(config).double()
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.3)
    weights = {name.replace('attention.', '').replace('mlp.', ''): p for name, p in ours.state_dict().items()}
    assert not theirs.load_state_dict(weights, strict=False).unexpected_keys
    tokens, targets = torch.randint(257, (2, 3, 20)).unbind()
    losses = [model(tokens, targets)[0] for model in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6, check_dtype=False)  # its angles and logits are in float32
    for loss in losses:
        loss.backward()
    for name, p in theirs.named_parameters():
        name = re.sub(r'\.([qkvo])\.', r'.attention.\1.', re.sub(r'\.(up|down)\.', r'.mlp.\1.', name))
        torch.testing.assert_close(p.grad, ours.get_parameter(name).grad, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='the memory of a process is read from /proc')
@pytest.mark.parametrize(
    'size',
    [
        ['--only=lrt_interleaved_2', '--block_size=512', '--batch_size=2'],
        ['--only=t2mlr_4_4', '--n_layer=8', '--n_embd=384', '--n_head=6', '--batch_size=2'],
        ['--only=plain', '--vocab_size=8192', '--n_layer=7', '--batch_size=8'],
    ],
)
def test_memory_is_as_predicted(capsys, size):
    """What --dry_run says of three sizes lies within 20% of what a process grows by."""
    found, _ = measured(capsys, 'memory', '--device=cpu', *size)
    for row in found.values():
        assert 2**28 < row['measured'] < 2**31 and abs(row['predicted'] / row['measured'] - 1) < 0.2


def test_decoding(capsys):
    small = ['--n_layer=5', '--n_embd=16', '--n_head=2', '--block_size=12', '--prompt=3', '--tokens=2', '--vocab_size=20']
    found, out = measured(capsys, 'decode', *small, '--rounds=2', '--device=cpu')
    assert list(found) == ['plain', 't2mlr', 'lrt_shared', 'lrt_layerwise'] and all(name in out for name in found)
    assert all(set(v) == {'ms', 'ratio', 'floor', 'weights'} and v['ratio'] > 0 for v in found.values())
    assert 1 < found['lrt_shared']['weights'] < found['lrt_layerwise']['weights']
    assert bench.decoding_variants(20)['t2mlr']['l_start'] == 8 and bench.decoding_variants(20)['t2mlr']['l_end'] == 11
    assert bench.decoding_variants(20)['lrt_shared']['source_layer'] == 12
    for n in range(1, 30):  # whatever the depth, all can be built
        for variant in bench.decoding_variants(n).values():
            bench.DecodeBench(n_layer=n).model_config(**variant).check()


def test_prefill(capsys):
    small = ['--n_layer=5', '--n_embd=16', '--n_head=2', '--prompt=20', '--rounds=1', '--device=cpu', '--jacobi_tol=1e-7']
    found, _ = measured(capsys, 'prefill', *small)
    assert list(found) == ['t2mlr', 'lrt_shared', 'lrt_layerwise']
    for row in found.values():
        assert set(row) == {'exact_ms', 'jacobi_ms', 'speed_up', 'passes', 'difference'}
        assert 2 < row['passes'] <= 1 + 3 * 7 and row['difference'] < 1e-5


def test_prefill_of_a_checkpoint(capsys, tmp_path):
    (tmp_path / 'source').mkdir()
    for i in range(4):
        (tmp_path / 'source' / f'{i}.txt').write_text(f'text {i} ' * 40)
    prepare_data.main(['text', f'--source={tmp_path}/source', '--val_fraction=0.3', f'--out={tmp_path}/data'])
    small = dict(n_layer=2, n_head=2, n_embd=16, block_size=24, max_steps=2, warmup_steps=0, device='cpu', threads=1)
    small |= dict(data_dir=f'{tmp_path}/data', out_dir=f'{tmp_path}/run', recurrence='lrt', source_layer=1)
    train(TrainConfig(**small, schedule='interleaved', eval_batches=1, batch_size=2))
    found, _ = measured(capsys, 'prefill', f'--ckpt={tmp_path}/run', '--prompt=24', '--rounds=1', '--device=cpu')
    assert list(found) == ['lrt'] and found['lrt']['difference'] < 1e-3
    for argv, says in (
        (['decode', '--prompt=300'], 'prompt=300'),
        (['prefill', '--jacobi_tol=-1'], 'jacobi_tol=-1'),
        (['prefill', f'--ckpt={tmp_path}/run', '--prompt=25'], 'context of 24'),
    ):
        with pytest.raises(SystemExit) as stop:
            bench.main(argv)
        assert stop.value.code == 2 and says in capsys.readouterr().err


def test_the_loader(capsys, tmp_path):
    sizes = ['--n_train=100', '--n_val=10', '--n_test=10']
    prepare_data.main(['s5', '--group=3', '--steps=1-3', *sizes, f'--out={tmp_path}/s3'])
    config = ROOT / 'config' / 's3_t2mlr.py'
    found, out = measured(capsys, 'data', f'--data_dir={tmp_path}/s3', f'--config={config}', '--batches=3', '--rounds=1')
    assert set(found) == {'loader_tokens_per_s', 'training_tokens_per_s', 'ratio'} and min(found.values()) > 0
    with pytest.raises(SystemExit) as stop:
        bench.main(['data', f'--data_dir={tmp_path}'])
    assert stop.value.code == 2 and 'holds no dataset' in capsys.readouterr().err


def test_the_floor_is_the_ratio_of_flops(capsys):
    config = bench.TrainBench()
    step, floor, _ = bench.training_step(config, 't2mlr_4_4', 'cpu')
    model = next(c.cell_contents for c in step.__closure__ if hasattr(c.cell_contents, 'blocks'))
    train_config = next(c.cell_contents for c in step.__closure__ if hasattr(c.cell_contents, 'schedule'))
    flops = count_flops(model, train_config, 256)
    assert floor == flops['step'] / flops['plain_step'] and 1.6 < floor < 1.9


@pytest.mark.parametrize(
    'argv, says',
    [
        (['nonsense'], 'choose from: train'),
        (['train', '--rounds=0'], 'rounds=0'),
        (['train', '--only=t2mlr_9_9'], 'only=t2mlr_9_9'),
        (['train', '--n_embd=30'], 'n_embd=30'),
        (['decode', '--batch_size=0'], 'batch_size=0'),
        (['prefill', '--n_layer=0'], 'n_layer=0'),
        (['prefill', '--ckpt=nowhere'], 'no checkpoint nowhere'),
        (['data', '--config=config/nowhere.py'], 'nowhere.py'),
        (['train', '--nonsense=1'], 'nonsense'),
        (['configs', 'train'], 'train'),
        (['scaling', '--batch_size=6'], 'batch_size=6'),
    ],
)
def test_mistakes_are_one_sentence(capsys, argv, says):
    with pytest.raises(SystemExit) as stop:
        bench.main(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == '' and len(err.splitlines()) == 1 and says in err


def test_help_without_a_benchmark(capsys):
    for argv in ([], ['--help']):
        with pytest.raises(SystemExit) as stop:
            bench.main(argv)
        assert stop.value.code == 0 and 'bench.py train' in capsys.readouterr().out
