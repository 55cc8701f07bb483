"""Laws of the optimisers: Muon is torch's to the last bit, on any number of processes; a step that is not finite changes
nothing; the host reads nothing; the number of launches follows the shapes, not the matrices."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_train import ARCHITECTURES, ROOT, launch, losses, same_bits, settings
from torch.utils._python_dispatch import TorchDispatchMode

import train
from model import build
from support.checkpoint import load_optimizers, read_checkpoint
from support.optimizers import Muon, assign, make_optimizers, orthogonalize, step_optimizers

SHAPES = [(16, 16)] * 4 + [(13, 7)] * 3 + [(64, 16), (16, 64), (64, 16), (5, 1), (1, 9), (1, 1), (33, 17)]
VIEWS = ('view', 'transpose', 'unbind', 'split', 'slice', 'expand', 'detach', 'profiler')


class Launches(TorchDispatchMode):
    """Counts the operations that are no views, and refuses those that make the host wait."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__ if '::' in str(func) else str(func)
        assert not any(wait in name for wait in ('_local_scalar_dense', 'nonzero', 'aten.equal')), f'{name} waits'
        self.number += not any(view in name for view in VIEWS)
        return func(*args, **(kwargs or {}))


def parameters(dtype=torch.float32, shapes=SHAPES, device='cpu'):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator, dtype=dtype).to(device) for shape in shapes]
    return [torch.nn.Parameter(w) for w in weights]


def groups(matrices):
    half = len(matrices) // 2
    return [{'params': matrices[:half], 'weight_decay': 0.3}, {'params': matrices[half:], 'weight_decay': 0.0}]


def steps(optimizer, numbers, skipped=()):
    """Steps with gradients and rates that follow from the number of the step alone; now and then a matrix has no gradient."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for group in optimizer.param_groups:
            group['lr'] = 0.01 * (1 + number) * (1 + len(group['params']))
            for i, p in enumerate(group['params']):
                gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype)
                p.grad = gradient if (number + i) % 7 else None
        optimizer.found_inf = torch.tensor(float(number in skipped))
        optimizer.step()


def torch_muon(matrices):
    return torch.optim.Muon(groups(matrices), lr=0.1, adjust_lr_fn='match_rms_adamw')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_muon_is_that_of_torch(dtype):
    """Weights, moments and the form of the state, bit for bit on CPU; each can go on from the checkpoint of the other."""
    ours, theirs = parameters(dtype), parameters(dtype)
    one, other = Muon(groups(ours), lr=0.1), torch_muon(theirs)
    steps(one, range(10))
    steps(other, range(10))
    assert same_bits(one.state_dict(), other.state_dict()) and same_bits(ours, theirs)
    assert not same_bits(ours, parameters(dtype))
    for saved in (one.state_dict(), other.state_dict()):
        for make in (torch_muon, lambda matrices: Muon(groups(matrices), lr=0.1)):
            continued = copy.deepcopy(ours)
            optimizer = make(continued)
            load_optimizers([optimizer], {'optimizers': [copy.deepcopy(saved)], 'rng': torch.get_rng_state()})
            steps(optimizer, range(10, 15))
            whole = copy.deepcopy(theirs)
            reference = torch_muon(whole)
            reference.load_state_dict(copy.deepcopy(other.state_dict()))
            steps(reference, range(10, 15))
            assert same_bits(continued, whole) and same_bits(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize('poison', [float('nan'), float('inf'), -float('inf')])
@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_a_bad_step_changes_nothing_and_no_step_waits(optimizer, poison, dtype):
    """Weights, moments and counters keep their bits under gradients that are not finite; the next good step moves them. The
    host reads no value in either."""
    config = train.TrainConfig(vocab_size=16, n_layer=2, n_embd=16, n_head=2, block_size=8, optimizer=optimizer)
    torch.manual_seed(0)
    model = build(config).to(dtype)
    optimizers = make_optimizers(model, config, 'cpu')

    def step(bad):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
            p.grad.view(-1)[0] = poison if bad else 1.0
        with Launches():
            step_optimizers(optimizers, torch.tensor(bad))
        return copy.deepcopy((list(model.parameters()), [o.state_dict() for o in optimizers]))

    before = step(False)
    assert same_bits(step(True), before) and same_bits(step(True), before)
    weights, states = step(False)
    assert not any(torch.equal(a, b) for a, b in zip(weights, before[0], strict=True)) and not same_bits(states, before[1])
    assert all(w.isfinite().all() for w in weights)


def launches(layers):
    """Of a step of Muon on a device that computes nothing, for so many layers of the same shapes."""
    matrices = parameters(shapes=[(64, 64), (64, 64), (256, 64), (64, 256)] * layers, device='meta')
    optimizer = Muon(matrices, lr=0.1)
    for p in matrices:
        p.grad = torch.zeros_like(p)
    optimizer.found_inf = torch.zeros((), device='meta')
    optimizer.step()  # the first also makes the moments
    with Launches() as counted:
        optimizer.step()
    return counted.number


def test_launches_follow_the_shapes_not_the_matrices():
    """A step over three shapes launches as much for 12 layers as for 2, a few dozen kernels a shape, and never waits."""
    assert launches(2) == launches(12) < 3 * 40


def test_a_stack_is_orthogonalised_as_its_matrices():
    """Singular values near 1, the singular vectors those of the matrix, whatever it is stacked with."""
    defaults = Muon(parameters(), lr=0.1).defaults
    settings = {name: defaults[name] for name in ('ns_coefficients', 'ns_steps', 'eps')}  # noqa: F811
    for rows, columns in ((32, 32), (48, 16), (16, 48), (1, 9)):
        u, _, v = torch.linalg.svd(torch.randn(5, rows, columns, generator=torch.Generator().manual_seed(2)), False)
        stack = u * torch.linspace(0.2, 1, min(rows, columns)) @ v
        together = orthogonalize(stack, **settings).float()
        alone = torch.stack([orthogonalize(matrix, **settings) for matrix in stack]).float()
        inside = u.mT @ together @ v.mT
        values = inside.diagonal(dim1=1, dim2=2)
        assert 0.6 < values.min() and values.max() < 1.3
        assert (inside - torch.diag_embed(values)).abs().max() < 0.05
        assert (together - alone).abs().max() < 0.05


def test_each_matrix_has_one_owner_and_the_work_is_even():
    costs = {shape: min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in SHAPES}
    for world in (1, 2, 3, 8, 64):
        owners = assign(tuple(SHAPES), world)
        work = [sum(costs[s] for s, owner in zip(SHAPES, owners, strict=True) if owner == rank) for rank in range(world)]
        assert len(owners) == len(SHAPES) and sum(work) == sum(costs[s] for s in SHAPES)
        assert max(work) - min(work) <= max(costs.values())


WORKER = """
import json, sys
sys.path[:0] = ['tests', '.']
import torch
import torch.distributed as dist
from support import optimizers
from test_optimizers import PARTS, groups, parameters, steps

folder, rank, world = json.loads(sys.argv[1])
dist.init_process_group('gloo', init_method=f'file://{folder}/meeting', rank=rank, world_size=world)
computed, orthogonalize = [], optimizers.orthogonalize
optimizers.orthogonalize = lambda x, **settings: computed.append(x.shape) or orthogonalize(x, **settings)
for name, shapes in PARTS.items():
    computed.clear()
    matrices = parameters(shapes=shapes)
    optimizer = optimizers.Muon(groups(matrices), lr=0.1)
    steps(optimizer, range(8), skipped=(3,))
    torch.save((matrices, optimizer.state_dict(), len(computed)), f'{folder}/{name}{rank}.pt')
dist.destroy_process_group()
"""
PARTS = {'many': SHAPES, 'fewer': SHAPES[:2]}  # matrices than processes


def test_three_processes_share_the_work(tmp_path):
    """Every process ends with the weights and the whole state of one process, bit for bit; each has done a part of the work."""
    argv = [[sys.executable, '-c', WORKER, json.dumps([str(tmp_path), rank, 3])] for rank in range(3)]
    env = os.environ | {'GLOO_SOCKET_IFNAME': 'lo'}
    ranks = [subprocess.Popen(a, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) for a in argv]
    try:
        said = [p.communicate(timeout=200)[1] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0, 0, 0], said
    for name, shapes in PARTS.items():
        matrices = parameters(shapes=shapes)
        optimizer = Muon(groups(matrices), lr=0.1)
        steps(optimizer, range(8), skipped=(3,))
        computed = []
        for rank in range(3):
            weights, state, number = torch.load(tmp_path / f'{name}{rank}.pt', weights_only=False)
            assert same_bits(weights, matrices) and same_bits(state, optimizer.state_dict())
            computed.append(number)
        per_group = [range(len(group['params'])) for group in optimizer.param_groups]
        assert sum(computed) == sum((number + i) % 7 > 0 for number in range(8) for positions in per_group for i in positions)
        assert sum(number > 0 for number in computed) == min(3, len(shapes))


def test_checkpoints_go_from_one_process_to_two_and_back(folders, tmp_path):  # noqa: F811
    """One process, two, one again: the curve and the moments of one process."""
    config = settings(folders, tmp_path / 'mixed', **ARCHITECTURES['lrt'] | {'dtype': 'float64'})
    train.train(replace(config, out_dir=str(tmp_path / 'one')))
    train.train(replace(config, max_steps=8))
    done = launch(2, replace(config, max_steps=14, init_from='resume'))
    assert done.returncode == 0, done.stderr
    train.train(replace(config, init_from='resume'))
    np.testing.assert_allclose(losses(tmp_path / 'mixed'), losses(tmp_path / 'one'), rtol=1e-9, atol=1e-9)
    mixed, one = (read_checkpoint(tmp_path / out / 'ckpt.pt')['optimizers'][1]['state'] for out in ('mixed', 'one'))
    assert mixed.keys() == one.keys()
    for number, state in one.items():
        torch.testing.assert_close(mixed[number]['momentum_buffer'], state['momentum_buffer'], rtol=1e-9, atol=1e-9)
