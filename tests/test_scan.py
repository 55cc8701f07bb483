"""Scan passes beside what they solve: numerics, rounding, speed of convergence, launches; and the drawn number of passes."""

import pytest
import torch
import torch.nn.functional as F
from test_model import close, draw_batch, draw_model, seeds
from torch.utils._python_dispatch import TorchDispatchMode

from configurator import ConfigError
from schedule import SEQUENTIAL, Schedule
from support.scan import BLOCK, LinearRecurrence, Scan, linear_recurrence, solve_direct_path
from train import TrainConfig, full_schedule, schedule_at

torch.set_num_threads(1)


def token_by_token(x, a):
    q = [x[:, 0]]
    for t in range(1, x.size(1)):
        q.append(x[:, t] + a[:, t, None] * q[-1])
    return torch.stack(q, 1)


def random_recurrence(n, seed=0):
    torch.manual_seed(seed)
    return torch.randn(2, n, 3, dtype=torch.float64), 2 * torch.rand(2, n, dtype=torch.float64) - 1


@pytest.mark.parametrize('n', (1, 2, BLOCK, BLOCK + 1, 3 * BLOCK - 1, BLOCK**2, BLOCK**2 + 5))
def test_a_linear_recurrence_is_solved(n):
    """In one block, in several, and in several blocks of blocks; shares of 0 and of both signs."""
    x, a = random_recurrence(n)
    a[0, ::3], a[1] = 0.0, a[1].sign()
    close(linear_recurrence(x, a), token_by_token(x, a))


@pytest.mark.parametrize('n', (1, 5, BLOCK + 3))
def test_its_gradient_is_exact(n):
    x, a = random_recurrence(n)
    assert torch.autograd.gradcheck(LinearRecurrence.apply, (x.requires_grad_(), a.requires_grad_()))


ADVERSARIES = {  # what position t makes of the memory m that it read: source, and the coefficient
    'sources that cancel': (lambda m, noise: 1e-6 * noise, 1.0),
    'sources of 0': (lambda m, noise: 0 * noise, 1.0),
    'shares near 1': (lambda m, noise: m + 1e-3 * noise, 1.0),
    'shares near -1': (lambda m, noise: -m + 1e-3 * noise, -1.0),
    'a coefficient above all sources': (lambda m, noise: noise, 1e4),
    'a negative one': (lambda m, noise: noise, -1e4),
    'no coefficient': (lambda m, noise: noise, 0.0),
    'huge sources': (lambda m, noise: 1e15 * noise, 1.0),
}


@pytest.mark.parametrize('name', ADVERSARIES)
def test_adversarial_values_stay_finite_and_precise(name):
    """Over 2,048 positions in float32: finite, with finite gradients; and what float64 gives, to the rounding of their norm."""
    torch.manual_seed(0)
    make, c = ADVERSARIES[name]
    T, D = 2048, 8
    m = F.rms_norm(torch.randn(1, T, D, dtype=torch.float64), (D,))
    source = make(m, torch.randn(1, T, D, dtype=torch.float64))
    memory = torch.cat((torch.zeros(1, 1, D, dtype=torch.float64), m), 1)
    results = []
    for dtype in (torch.float64, torch.float32):
        given = source.to(dtype).requires_grad_()
        written, _ = Scan(c, None, False, 1e-6, solve_direct_path)(range(T), given, memory[:, :T].to(dtype), memory.to(dtype))
        (gradient,) = torch.autograd.grad((written * torch.linspace(0, 1, D, dtype=dtype)).sum(), given)
        assert written.isfinite().all() and gradient.isfinite().all()
        results.append(written.double())
    exact, single = results
    assert (exact.abs() <= D**0.5 + 1e-9).all()
    assert (single - exact).norm() < 2e-3 * exact.norm() + 1e-3


@seeds(4)
@torch.no_grad()
def test_where_a_pass_changes_nothing_a_scan_changes_nothing(seed):
    """Not by a bit, in float32: the last digits of a solved recurrence are those of the layers."""
    recurrence = ('t2mlr', 'lrt')[seed % 2]
    model = draw_model(seed, recurrence=recurrence, cache_residual='on', residual_injection=True).float()
    tokens, _, recur_mask = draw_batch(seed, T=9)
    outputs = [model(tokens, schedule=Schedule('jacobi', n, 1, scan=True), recur_mask=recur_mask) for n in (30, 31)]
    assert torch.equal(*outputs)


@torch.no_grad()
def test_under_bfloat16_the_scan_stays_float32(monkeypatch):
    seen = []
    monkeypatch.setattr(
        'support.scan.linear_recurrence', lambda x, a: seen.extend((x.dtype, a.dtype)) or linear_recurrence(x, a)
    )
    for recurrence in ('t2mlr', 'lrt'):
        model = draw_model(1, recurrence=recurrence, cache_residual='on', residual_injection=True).float()
        tokens, _, _ = draw_batch(1, T=9)
        with torch.autocast('cpu', torch.bfloat16):
            assert model(tokens, schedule=Schedule('jacobi', 2, 1, scan=True)).isfinite().all()
        model.bfloat16()
        assert model(tokens, schedule=Schedule('interleaved', n_sweeps=2, scan=True)).isfinite().all()
    assert seen and set(seen) == {torch.float32}


@seeds(3)
@torch.no_grad()
def test_a_scan_carries_what_no_layer_changes_in_one_pass(seed):
    """Where the layers of the span add nothing and the fusion is shut, one pass solves the memory of T2MLR almost, whatever the
    length: a plain pass has reached one token."""
    fixed = {'recurrence': 't2mlr', 'cache_residual': 'on', 'detach_memory': False, 'reset_token': -1, 'n_loop': 1}
    model = draw_model(seed, **fixed, family='nanochat', document_attention=False)
    for block in model.blocks:
        block.attention.o.weight.zero_()
        block.mlp.down.weight.zero_()
        block.alpha.fill_(1.0)
        block.beta.fill_(0.0)
    model.fusion.gamma_cur.fill_(0.0)
    model.fusion.gamma_rec.fill_(0.0)
    tokens, _, _ = draw_batch(seed, T=32, B=2)
    exact, errors = model.new_state(2), {}
    model(tokens, schedule=SEQUENTIAL, state=exact)
    for scan in (False, True):
        state = model.new_state(2)
        model(tokens, schedule=Schedule('jacobi', 3, 1, scan=scan), state=state)
        errors[scan] = float((state.memory - exact.memory).norm() / exact.memory.norm())
    assert errors[True] < 0.1 * errors[False]


class Calls(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **kwargs or {})


def test_no_call_is_made_for_each_token():
    """Twice the tokens, the same calls: within a block, and from one number of blocks to another."""

    def count(n):
        x, a = (t.requires_grad_() for t in random_recurrence(n))
        with Calls() as calls:
            LinearRecurrence.apply(x, a).sum().backward()
        return calls.number

    assert count(BLOCK // 2) == count(BLOCK) < count(2 * BLOCK) == count(32 * BLOCK) < 100


# The drawn number of passes


def drawn(**settings):
    config = TrainConfig(recurrence='t2mlr', schedule='jacobi', d_forward=4, d_backward=2, **settings)
    config.check_model()
    return config


def test_passes_are_drawn_evenly_by_seed_and_step():
    config = drawn(min_passes=1)
    numbers = [schedule_at(config, step).d_forward for step in range(2000)]
    assert numbers == [schedule_at(drawn(min_passes=1), step).d_forward for step in range(2000)]
    assert numbers != [schedule_at(drawn(min_passes=1, seed=1), step).d_forward for step in range(2000)]
    assert all(400 < numbers.count(n) < 600 for n in (1, 2, 3, 4))
    assert all(schedule_at(config, step).d_backward == 2 for step in range(50))
    assert full_schedule(config, 3).d_forward == 4  # that of validation
    assert {schedule_at(drawn(), step).d_forward for step in range(50)} == {4}


def test_a_drawn_number_without_passes_carries_what_gradient_there_is():
    config = drawn(min_passes=0)
    schedules = [config.with_passes(n) for n in config.numbers]
    assert [(s.d_forward, s.d_backward) for s in schedules] == [(0, 1), (1, 2), (2, 2), (3, 2), (4, 2)]


def test_a_growing_number_is_the_largest_that_is_drawn():
    config = drawn(min_passes=2, d_forward_start=0, d_forward_steps=400)
    config.check()
    seen = [{schedule_at(config, step).d_forward for step in range(begin, begin + 100)} for begin in (0, 100, 200, 300, 400)]
    assert seen == [{0}, {1}, {2}, {2, 3}, {2, 3, 4}]


def test_sweeps_are_drawn():
    config = TrainConfig(recurrence='lrt', schedule='interleaved', n_sweeps=3, min_passes=1)
    config.check_model()
    assert {schedule_at(config, step).n_sweeps for step in range(50)} == {1, 2, 3}


@pytest.mark.parametrize(
    ('settings', 'named'),
    [
        ({'recurrence': 't2mlr', 'cache_residual': 'off', 'schedule': 'jacobi', 'scan': True}, 'cache_residual=off'),
        ({'recurrence': 'lrt', 'residual_injection': False, 'schedule': 'jacobi', 'scan': True}, 'residual_injection=False'),
        ({'recurrence': 'lrt', 'schedule': 'chunked', 'scan': True}, 'scan=True'),
        ({'recurrence': 'none', 'scan': True}, 'scan=True'),
        ({'recurrence': 'lrt', 'schedule': 'sequential', 'min_passes': 1}, 'min_passes=1'),
        ({'recurrence': 'lrt', 'schedule': 'interleaved', 'min_passes': 0}, 'min_passes=0'),
        ({'recurrence': 'lrt', 'schedule': 'interleaved', 'min_passes': 3}, 'min_passes=3'),
        ({'recurrence': 'lrt', 'schedule': 'jacobi', 'd_forward': 3, 'min_passes': 4}, 'min_passes=4'),
        (
            {'recurrence': 'lrt', 'schedule': 'jacobi', 'd_backward': 2, 'min_passes': 1, 'pass_weights': (1.0, 2.0)},
            'pass_weights',
        ),
        ({'recurrence': 'lrt', 'schedule': 'jacobi', 'min_passes': 0, 'freeze_base': True}, 'min_passes=0'),
    ],
)
def test_what_cannot_be_scanned_or_drawn_is_refused(settings, named):
    with pytest.raises(ConfigError) as stop:
        TrainConfig(**settings).check_model()
    assert named in str(stop.value) and '\n' not in str(stop.value)
