"""Compares FlexAttention with plain attention before a run relies on it."""

import torch
import torch.nn.functional as F

from support.masks import attention_mask, compiled_flex

TOLERANCE = 0.02  # of the largest value: several roundings of bfloat16, and far below what a wrong kernel does


def masked_passes(config, schedule, T):
    """One pass, a range of positions, for each length above 1 of passes over T that need a mask."""
    passes = {len(p.positions): p.positions for p in schedule.passes(T) if len(p.positions) > 1}
    return [p for n, p in passes.items() if n < T or config.document_attention or not schedule.initial]


def flex_problem(config, schedule, batch_size, T, dtype, device, flex=None):
    """Why FlexAttention cannot replace plain attention in this run, as the end of a sentence; None where it can. For each
    length of masked pass, queries (batch_size, H, n, d), keys and values (batch_size, G, T, d) of `dtype` and documents are
    drawn; outputs and gradients are compared with plain attention in float32. flex: in place of compiled FlexAttention."""
    flex = flex or compiled_flex()
    d, gqa = config.head_dim, config.kv_dim != config.n_embd
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads, n):
        return torch.randn(batch_size, heads, n, d, dtype=dtype, device=device, generator=generator)

    for positions in masked_passes(config, schedule, T):
        n = len(positions)
        slots = torch.arange(positions.start, positions.stop, positions.step, device=device)
        first = None
        if config.document_attention:
            starts = torch.randint(0, T, (batch_size, 1), device=device, generator=generator)
            first = torch.where(slots >= starts, starts, 0)
        tensors = draw(config.n_head, n), draw(config.kv_dim // d, T), draw(config.kv_dim // d, T)
        upstream = draw(config.n_head, n)
        expected_inputs = [t.float().requires_grad_() for t in tensors]
        flex_inputs = [t.clone().requires_grad_() for t in tensors]
        plain = attention_mask(slots, first, T, torch.float32, False)
        blocks = attention_mask(slots, first, T, dtype, True)
        try:
            expected = F.scaled_dot_product_attention(*expected_inputs, attn_mask=plain, enable_gqa=gqa)
            actual = flex(*flex_inputs, block_mask=blocks, enable_gqa=gqa)
            expected = expected, *torch.autograd.grad(expected, expected_inputs, upstream.float())
            actual = actual, *torch.autograd.grad(actual, flex_inputs, upstream)
        except Exception as e:  # whatever a compiler or a kernel may raise
            return f'fails on a pass of {n} of {T} positions ({type(e).__name__}: {(str(e).splitlines() or [""])[0][:120]})'
        names = 'outputs', 'gradients of queries', 'gradients of keys', 'gradients of values'
        for name, a, b in zip(names, expected, actual, strict=True):
            error = ((a - b.float()).abs().max() / a.abs().max()).item()
            if not error <= TOLERANCE:
                return f'differs from plain attention by {error:.1%} in the {name} of a pass of {n} of {T} positions'
    return None


def choose_flex(config, schedule, batch_size, T, dtype, device):
    """Whether a run's masked passes take FlexAttention, and a sentence for the log or None. attention=auto takes it on CUDA
    where a pass is masked and `flex_problem` finds nothing. CUDA has no kernel for float64."""
    if config.attention != 'auto':
        return config.attention == 'flex', None
    if not str(device).startswith('cuda') or dtype == torch.float64 or not masked_passes(config, schedule, T):
        return False, None
    problem = flex_problem(config, schedule, batch_size, T, dtype, device)
    return problem is None, problem and f'FlexAttention {problem}; masked passes take plain attention.'
