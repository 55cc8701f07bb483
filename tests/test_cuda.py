"""What a CUDA device in bfloat16 needs, seen without one: an autocast that promotes what CUDA's promotes, no index in a
backward that would be sorted there, no operation for which the host waits, masks that are made once, and FlexAttention that is
held against plain attention before it is used."""

import contextlib
import random
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_model import RESET, close, draw_batch, draw_model, seeds
from torch.nn.attention.flex_attention import create_mask
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPTConfig, build
from schedule import SEQUENTIAL, Schedule
from support import flex as flex_file
from support import masks as mask_file
from support.flex import choose_flex, flex_problem
from support.optimizers import freeze_base as freeze
from support.optimizers import make_optimizers, step_optimizers
from train import TrainConfig

# The float32 list of CUDA's autocast, as far as a model may use it; the lists of the CPU lack most of it.
IN_FLOAT32 = [torch.rms_norm, F.rms_norm, F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss]
IN_FLOAT32 += [torch.softmax, torch.log_softmax, torch.exp, torch.log, torch.pow, torch.rsqrt, torch.reciprocal, torch.norm]
IN_FLOAT32 += [torch.sum, torch.cumsum, torch.prod, torch.Tensor.sum, torch.Tensor.pow, torch.Tensor.norm, torch.Tensor.exp]
IN_FLOAT32 += [torch.Tensor.log, torch.Tensor.rsqrt, torch.Tensor.softmax, torch.Tensor.log_softmax, torch.Tensor.cumsum]


class CudaAutocast(TorchFunctionMode):
    """Inside torch.autocast('cpu', torch.bfloat16): what CUDA's autocast runs in float32 runs so here. Keeps the types that
    every call of attention was given."""

    def __init__(self):
        super().__init__()
        self.attention = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in IN_FLOAT32 and torch.is_autocast_enabled('cpu'):
            args = [a.float() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in args]
        if func is F.scaled_dot_product_attention:
            self.attention += [t.dtype for t in args[:3]]
            mask = kwargs.get('attn_mask')
            assert mask is None or mask.dtype == args[0].dtype
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_autocast():
    with CudaAutocast() as mode, torch.autocast('cpu', torch.bfloat16):
        yield mode


class Calls(TorchDispatchMode):
    """Counts operations by name; AssertionError at those for which the host would wait for a GPU."""

    waits = ('aten._local_scalar_dense.default', 'aten.nonzero.default', 'aten.equal.default', 'aten.is_nonzero.default')

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert str(func) not in self.waits, f'{func} waits for the device'
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


RECURRENCES = {
    'lrt': {'recurrence': 'lrt', 'source_layer': 1},
    'lrt-layerwise': {'recurrence': 'lrt', 'source_layer': -1, 'memory_projection': 'layerwise'},
    't2mlr': {'recurrence': 't2mlr', 'l_start': 1, 'l_end': 2, 'gamma_init': 0.2},
    't2mlr-loop': {'recurrence': 't2mlr', 'l_start': 0, 'l_end': 1, 'gamma_init': 0.2, 'n_loop': 2},
}
SCHEDULES = {
    'parallel': Schedule(),
    'jacobi': Schedule('jacobi', d_forward=3, d_backward=2),
    'jacobi-tol': Schedule('jacobi', d_forward=5, d_backward=2, jacobi_tol=1e-2),
    'interleaved': Schedule('interleaved', n_subsets=2),
    'sweeps': Schedule('interleaved', n_subsets=3, n_sweeps=2),
    'scan': Schedule('jacobi', d_forward=3, d_backward=2, scan=True),
    'scanned sweeps': Schedule('interleaved', n_sweeps=2, scan=True),
    'chunked': Schedule('chunked', chunk_size=3),
    'sequential': SEQUENTIAL,
}
FAMILIES = {'nanochat': {'value_embeddings': 'all'}, 'llama': {'family': 'llama', 'n_kv_head': 1}}
each_recurrence = pytest.mark.parametrize('recurrence', RECURRENCES)
each_family = pytest.mark.parametrize('family', FAMILIES)
each_schedule = pytest.mark.parametrize('name', SCHEDULES)


def small_model(recurrence, family, seed=0, **changed):
    torch.manual_seed(seed)
    shape = dict(vocab_size=7, block_size=16, n_layer=3, n_head=2, n_embd=16, reset_token=RESET)
    model = build(GPTConfig(**shape | RECURRENCES[recurrence] | FAMILIES[family] | changed))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def weighted(schedule, recurrence):
    """The schedule with a weight for each pass, where it has a fixed number of them."""
    scored = {'interleaved': schedule.n_subsets * schedule.n_sweeps + 1, 'jacobi': schedule.d_backward}.get(schedule.schedule)
    fits = scored and recurrence.startswith('lrt')
    return replace(schedule, pass_weights=tuple(float(i + 1) for i in range(scored))) if fits else schedule


@each_schedule
@each_family
@each_recurrence
def test_bfloat16_as_on_cuda(recurrence, family, name):
    """A step and decoding under every schedule, with documents, resets, masks, weights of passes and checkpointing: nothing is
    refused, attention sees bfloat16 alone, and loss, gradients and logits are those of float32 to bfloat16's rounding."""
    schedule = weighted(SCHEDULES[name], recurrence)
    for number, document_attention in enumerate((False, True)):
        model = small_model(recurrence, family, document_attention=document_attention)
        model.activation_checkpointing = document_attention
        tokens, targets, _ = draw_batch(number, T=9, B=2)
        recur_mask = torch.rand(2, 9) < 0.8 if document_attention else None
        found = []
        for context in (contextlib.nullcontext, cuda_autocast):
            model.zero_grad()
            with context() as mode:
                loss, _ = model(tokens, targets, schedule, recur_mask)
                with torch.no_grad():
                    logits = model(tokens, schedule=schedule, recur_mask=recur_mask)
                    state = model.new_state(2, torch.tensor([0, 1]))
                    logits = [logits, model(tokens, schedule=schedule, recur_mask=recur_mask, state=state)]
                    logits += [model.token(tokens[:, t : t + 1], state) for t in range(3)]
            loss.backward()
            if mode is not None:
                assert mode.attention and set(mode.attention) == {torch.bfloat16}
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            found.append((loss.detach(), gradient, *logits))
        assert schedule.jacobi_tol or len(found[0][1]) == len(found[1][1])
        for exact, rounded in zip(*found, strict=True):
            assert rounded.dtype == torch.float32
            assert (rounded - exact).norm() <= 0.1 * exact.norm()


@each_family
@each_recurrence
def test_bfloat16_decoding_equals_the_exact_schedule(recurrence, family):
    """Token by token with a state and `sequential` over the sequence: the same logits to bfloat16's rounding of a sum."""
    model = small_model(recurrence, family)
    tokens, _, _ = draw_batch(1, T=8, B=2)
    with cuda_autocast(), torch.no_grad():
        whole, state = model(tokens, schedule=SEQUENTIAL), model.new_state(2)
        for t in range(8):
            token = model.token(tokens[:, t : t + 1], state)[:, 0]
            assert (token - whole[:, t]).norm() <= 0.02 * whole[:, t].norm()


@each_recurrence
@each_schedule
def test_a_backward_sorts_no_index(recurrence, name):
    """Positions of a pass are slices: index_put with accumulation, which CUDA sorts, comes from embeddings alone, and of those
    from none (their backward has an operation of its own)."""
    model = small_model(recurrence, 'nanochat', document_attention=True)
    tokens, targets, recur_mask = draw_batch(0, T=9, B=2)
    loss, _ = model(tokens, targets, replace(SCHEDULES[name], jacobi_tol=0.0), recur_mask)
    with Calls() as calls:
        loss.backward()
    assert calls.counts and not [op for op in calls.counts if 'index_put' in op or 'sort' in op]


@pytest.mark.parametrize('optimizer', ('adamw', 'muon'))
@pytest.mark.parametrize('freeze_base', (False, True))
@each_recurrence
def test_a_step_has_the_host_wait_for_nothing(recurrence, freeze_base, optimizer):
    """Two micro-batches, clipping and the optimisers, on tensors of the device alone; masks and counts included."""
    config = TrainConfig(optimizer=optimizer, freeze_base=freeze_base)
    model = small_model(recurrence, 'nanochat')
    if freeze_base:
        freeze(model)
    optimizers = make_optimizers(model, config, 'cpu')
    batches = [draw_batch(seed, T=9, B=2)[:2] for seed in range(2)]
    for schedule in (SCHEDULES[name] for name in ('jacobi', 'interleaved', 'scan', 'scanned sweeps', 'chunked')):
        counts = torch.full((len(model.scored_passes(schedule, 9)),), 10)
        with cuda_autocast(), Calls():
            changes = []
            for tokens, targets in batches:
                loss, _ = model(tokens, targets, schedule, None, counts, changes=changes)
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step_optimizers(optimizers, ~norm.isfinite())


# Masks


def test_masks_of_shapes_are_made_once(monkeypatch):
    """Passes of one shape share a mask for as long as the model lives; a mask that depends on documents is made for its batch;
    the number kept is bounded, whatever the lengths."""
    made, attention_mask = [], mask_file.attention_mask
    monkeypatch.setattr(mask_file, 'attention_mask', lambda *args: made.append(args) or attention_mask(*args))
    model = small_model('lrt', 'nanochat', block_size=128)
    tokens, targets, _ = draw_batch(0, T=9, B=2)
    with torch.inference_mode():  # a mask made here serves a later backward
        model(tokens, schedule=Schedule('interleaved'))
    for _ in range(3):
        model(tokens, targets, Schedule('interleaved'))[0].backward()
    assert len(made) == 2
    close(*(m(tokens, schedule=Schedule('interleaved')) for m in (model, small_model('lrt', 'nanochat', block_size=128))), 0)
    with torch.no_grad():
        for T in range(2, 100):
            model(torch.zeros(1, T, dtype=torch.long), schedule=Schedule('interleaved'))
    assert len(model.masks) <= 64
    made.clear()
    model = small_model('lrt', 'nanochat', document_attention=True)
    for _ in range(2):
        model(tokens, schedule=Schedule('interleaved'))
    assert len(made) == 6 and not model.masks


def test_single_positions_take_plain_attention(monkeypatch):
    """Under FlexAttention too: a block mask of one row costs the host more than the attention of that row."""
    monkeypatch.setattr(mask_file, 'create_block_mask', None)  # whoever calls it fails
    model = small_model('t2mlr', 'llama')
    tokens, _, _ = draw_batch(0, T=9, B=2)
    plain = model(tokens, schedule=SEQUENTIAL)
    model.flex = True
    assert torch.equal(model(tokens, schedule=SEQUENTIAL), plain)


# FlexAttention


def right(q, k, v, block_mask, enable_gqa):
    """What FlexAttention is to compute, from the function that the block mask holds."""
    mask = create_mask(block_mask.mask_mod, q.size(0), None, q.size(2), k.size(2), device='cpu')
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)


def without_a_mask(q, k, v, block_mask, enable_gqa):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)


def with_a_wrong_gradient(q, k, v, block_mask, enable_gqa):
    return right(q, k.detach() + 0 * k, v, block_mask, enable_gqa)


def with_nan(q, k, v, block_mask, enable_gqa):
    y = right(q, k, v, block_mask, enable_gqa)
    return y + 0 * (v[..., :1, :1] * 0).sqrt().sum()  # a finite output whose gradient is not


def raises(*args, **kwargs):
    raise RuntimeError('no kernel for this shape\nand more')


def run_settings(seed, **changed):
    rng = random.Random(seed)
    shape = dict(vocab_size=7, block_size=64, n_layer=2, n_head=4, n_kv_head=rng.choice((0, 1, 2)), n_embd=32, source_layer=1)
    documents = dict(reset_token=RESET, document_attention=rng.random() < 0.5)
    return TrainConfig(**shape | documents | dict(recurrence='lrt', schedule='interleaved') | changed)


@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16))
@seeds(4)
def test_flex_attention_is_tried_before_it_is_used(seed, dtype):
    """Right outputs and gradients pass at every length; a mask left out, a wrong or NaN gradient and an exception do not."""
    config = run_settings(seed)
    T = random.Random(seed).randint(3, 40)
    for schedule in (config, Schedule('chunked', chunk_size=max(2, T // 3)), Schedule('jacobi', d_forward=3, d_backward=1)):
        assert flex_problem(config, schedule, 2, T, dtype, 'cpu', right) is None
    for wrong, words in (
        (without_a_mask, 'in the outputs'),
        (with_a_wrong_gradient, 'gradients of keys'),
        (with_nan, 'gradients of values'),
        (raises, 'fails on a pass of .* no kernel for this shape\\)'),
    ):
        assert re.search(words, flex_problem(config, config, 2, T, dtype, 'cpu', wrong))


def test_what_attention_auto_takes(monkeypatch):
    """On CUDA flex if it holds, with one line if it does not; elsewhere, and where no pass has a mask, sdpa; sdpa and flex are
    what they say."""
    problems = []
    monkeypatch.setattr(flex_file, 'flex_problem', lambda *args: problems.pop())
    config = run_settings(0, document_attention=False)

    def choose(config, device='cuda:0', dtype=torch.bfloat16):
        return choose_flex(config, config, 2, 8, dtype, device)

    problems += [None]
    assert choose(config) == (True, None)
    problems += ['differs']
    assert choose(config) == (False, 'FlexAttention differs; masked passes take plain attention.')
    assert choose(config, 'cpu') == choose(config, dtype=torch.float64) == (False, None)
    unmasked = replace(config, recurrence='t2mlr', l_start=0, l_end=0, schedule='jacobi', d_forward=2, d_backward=3)
    assert choose(unmasked) == (False, None)
    assert choose(replace(config, attention='sdpa')) == (False, None)
    assert choose(replace(config, attention='flex')) == (True, None)


def test_the_loss_is_compiled():
    """Norm, head, softcap and cross-entropy of a chunk are one graph, beside that of the block; a second step adds none."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager = draw_model(3, recurrence='none', family='nanochat', n_layer=1, n_loop=1, reset_token=-1).float()
    compiled = build(eager.config)
    compiled.load_state_dict(eager.state_dict())
    compiled.compile()
    tokens, targets, _ = draw_batch(3, T=8, B=2)
    for _ in range(2):
        losses = [model(tokens, targets)[0] for model in (eager, compiled)]
        close(losses[1], losses[0], 1e-5)
        assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 2
        losses[1].backward()
