"""Decoder-only transformers that carry a latent memory from token to token.

T2MLR (Cai, Zhu, Dong, He, Arora 2026) feeds a deep middle layer of token t-1 into an earlier middle layer of token t.
LRT (Huang et al. 2026, arXiv 2605.26797) feeds an upper-middle layer of token t-1 into every layer of token t.
Both are one computation: the model is a prelude, a span that reads and writes the memory, and a coda. A schedule is an
ordered list of passes over the span, each at a subset of the positions; decoding is one more pass, at one position.

Shapes: B sequences, T positions, n positions of one pass, D = n_embd, H query heads, G key/value heads, d = D / H.
"""

import functools
import glob
import json
import math
import os
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from configurator import ConfigError, check_keys, explaining, key


@dataclass
class GPTConfig:
    """What the model is. Two backbone families, four recurrences; layers are counted from 0."""

    architecture: str = key('gpt', 'gpt, or an LSTM language model of the same interface', ('gpt', 'lstm'))
    family: str = key('nanochat', 'backbone: QK-norm, ReLU^2, x0 skip; or RMSNorm weights, SwiGLU, tied', ('nanochat', 'llama'))
    vocab_size: int = key(0, 'token ids known to the model; 0 takes the number from the data', bounds=(0, 10**7))
    block_size: int = key(256, 'longest sequence, in tokens', bounds=(1, 10**7))
    n_layer: int = key(6, 'layers', bounds=(1, 1000))
    n_head: int = key(4, 'query heads', bounds=(1, 1000))
    n_kv_head: int = key(0, 'key/value heads, a divisor of n_head; 0 means n_head', bounds=(0, math.inf))
    n_embd: int = key(128, 'width D of the residual stream', bounds=(1, 10**7))
    n_hidden: int = key(
        0, 'width inside the MLP; 0 means 4 D (nanochat) or 8/3 D rounded up to a multiple of 64 (llama)', bounds=(0, 10**7)
    )
    positional: str = key('rope', 'position information in attention', ('rope', 'none'))
    rope_base: float = key(10000.0, 'base of the rotary frequencies', bounds=(1e-6, 1e30))
    rope_scaling: tuple = key((), 'of Llama 3: factor, low_freq_factor, high_freq_factor, original length; empty is none')
    norm_eps: float = key(1e-5, 'epsilon of the norms of the llama family; nanochat has that of F.rms_norm', bounds=(1e-30, 1))
    value_embeddings: str = key('none', 'token-indexed embeddings added to the values', ('none', 'alternate', 'all'))
    recurrence: str = key('none', 'the latent memory', ('none', 't2mlr', 'lrt'))
    l_start: int = key(2, 'T2MLR: first layer of the span, which reads the memory')
    l_end: int = key(3, 'T2MLR: last layer of the span (inclusive), which writes the memory')
    n_loop: int = key(1, 'times the layers l_start..l_end run in depth; above 1 a looped transformer', bounds=(1, 1000))
    cache_residual: str = key(
        'on', 'T2MLR: R_t = RMSNorm(y + R_{t-1}); or without gradient, or without R', ('on', 'detached', 'off')
    )
    detach_memory: bool = key(False, 'T2MLR: no gradient flows through the memory wherever it is read')
    gamma_init: float = key(0.0, 'T2MLR: start of gamma_cur and gamma_rec; at 0 the model starts as the plain transformer')
    gamma_per_channel: bool = key(False, 'T2MLR: a gamma_cur and a gamma_rec for each channel instead of one each')
    source_layer: int = key(3, 'LRT: layer whose output is the memory; -1 is the final layer')
    memory_projection: str = key(
        'shared', 'LRT: W_K, W_V for all layers, for each layer, or none', ('shared', 'layerwise', 'none')
    )
    residual_injection: bool = key(True, 'LRT: add gamma_l m to the input of every layer')
    identity_init: bool = key(False, 'LRT: start as the model without memory (gamma, W_K, W_V at 0), for retrofits')
    reset_token: int = key(-1, 'token that opens a document: there the memory read is 0', bounds=(0, 10**7), names={'none': -1})
    document_attention: bool = key(False, 'cut attention at reset_token too')

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def kv_dim(self):
        return (self.n_kv_head or self.n_head) * self.head_dim

    @property
    def mlp_dim(self):
        default = 4 * self.n_embd if self.family == 'nanochat' else 64 * math.ceil(8 * self.n_embd / 3 / 64)
        return self.n_hidden or default

    @property
    def stack(self):
        """The layers in the order in which they run. Loops aside, depth i of the stack is layer i."""
        layers, start, stop = list(range(self.n_layer)), self.l_start, self.l_end + 1
        return layers if self.n_loop == 1 else layers[:start] + layers[start:stop] * self.n_loop + layers[stop:]

    @property
    def span(self):
        """Depths of the stack that a pass recomputes, as a range."""
        depth = len(self.stack)
        if self.recurrence == 't2mlr':
            return range(self.l_start, self.l_start + (self.l_end + 1 - self.l_start) * self.n_loop)
        return range(depth) if self.recurrence == 'lrt' else range(depth, depth)

    @property
    def source(self):
        """The depth whose output is the memory: the end of T2MLR's span; LRT's source layer, the last time that it runs."""
        if self.recurrence == 'lrt':
            return max(depth for depth, layer in enumerate(self.stack) if layer == self.source_layer % self.n_layer)
        return self.span.stop - 1

    def check(self):
        """Raises ConfigError, one sentence, for what cannot be built."""
        check_keys(self)
        if self.rope_scaling and (len(self.rope_scaling) != 4 or min(self.rope_scaling) <= 0):
            raise ConfigError(
                f'rope_scaling={self.rope_scaling} must be 4 numbers above 0: factor, low_freq_factor, high_freq_factor, '
                f'original length; or empty.'
            )
        if self.n_embd % self.n_head:
            unit = self.n_head * (2 if self.positional == 'rope' else 1)  # rotary positions pair the channels of a head
            nearest = max(1, round(self.n_embd / unit)) * unit
            raise ConfigError(f'n_embd={self.n_embd} is not divisible by n_head={self.n_head}; the nearest width is {nearest}.')
        if self.n_kv_head and self.n_head % self.n_kv_head:
            divisors = [i for i in range(1, self.n_head + 1) if self.n_head % i == 0]
            raise ConfigError(f'n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}; choose from {divisors}.')
        if self.positional == 'rope' and self.head_dim % 2:
            raise ConfigError(
                f'n_embd={self.n_embd} over n_head={self.n_head} gives heads of {self.head_dim} channels, an odd number that '
                f'rotary positions cannot pair; take n_embd={(self.head_dim + 1) * self.n_head} or positional=none.'
            )
        if self.recurrence == 't2mlr' or self.n_loop > 1:
            for name in ('l_start', 'l_end'):
                if not 0 <= getattr(self, name) < self.n_layer:
                    raise ConfigError(
                        f'{name}={getattr(self, name)} is no layer of n_layer={self.n_layer}; '
                        f'the nearest is {min(max(getattr(self, name), 0), self.n_layer - 1)}.'
                    )
            if self.l_start > self.l_end:
                raise ConfigError(f'l_start={self.l_start} is above l_end={self.l_end}; take l_start={self.l_end} or less.')
        if self.recurrence == 'lrt':
            if not -1 <= self.source_layer < self.n_layer:
                raise ConfigError(
                    f'source_layer={self.source_layer} is no layer of n_layer={self.n_layer}; '
                    f'the nearest is {min(max(self.source_layer, -1), self.n_layer - 1)} (-1 is the final layer).'
                )
            if self.memory_projection == 'none' and not self.residual_injection:
                raise ConfigError(
                    'memory_projection=none with residual_injection=False leaves LRT no way to read its memory; '
                    'switch one on or take recurrence=none.'
                )
        if self.architecture == 'lstm' and (self.recurrence != 'none' or self.reset_token >= 0 or self.n_loop > 1):
            raise ConfigError(
                f'architecture=lstm has its own memory and takes recurrence=none, reset_token=none and n_loop=1, '
                f'not recurrence={self.recurrence}, reset_token={max(self.reset_token, -1)}, n_loop={self.n_loop}.'
            )
        if self.vocab_size and self.reset_token >= self.vocab_size:
            raise ConfigError(
                f'reset_token={self.reset_token} is outside the vocabulary of {self.vocab_size} tokens; take document or none.'
            )
        if self.document_attention and self.reset_token == -1:
            raise ConfigError('document_attention=True needs the token that opens a document, and reset_token=none.')


@dataclass
class Schedule:
    """How training runs a recurrence: which positions each pass over the span recomputes."""

    schedule: str = key(
        'parallel',
        'passes over the span: one without memory; fixed-point; strided subsets; chunks; one position at a time',
        ('parallel', 'jacobi', 'interleaved', 'chunked', 'sequential'),
    )
    d_forward: int = key(16, 'jacobi: passes over all positions after the initial one', bounds=(0, 10**7))
    d_backward: int = key(4, 'jacobi: how many of the d_forward + 1 passes, from the last, carry gradient', bounds=(1, 10**7))
    n_subsets: int = key(2, 'interleaved: S, pass i recomputes the positions p with p mod S = i', bounds=(1, 10**7))
    n_sweeps: int = key(1, 'interleaved: times that the S subsets are gone through', bounds=(1, 10**7))
    jacobi_tol: float = key(
        0.0,
        'passes or sweeps without gradient end when the span moves by less than this share, or by what rounding moves; 0 never',
        bounds=(0, math.inf),
    )
    chunk_size: int = key(64, 'chunked: positions in a chunk', bounds=(1, 10**7))
    pass_weights: tuple = key((), 'LRT: weight of the loss of each scored pass, the initial one first; empty means equal')

    def check(self):
        """Raises ConfigError, one sentence, for a schedule that cannot run."""
        check_keys(self)
        if self.jacobi_tol and self.schedule not in ('jacobi', 'interleaved'):
            raise ConfigError(f'jacobi_tol={self.jacobi_tol} needs schedule=jacobi or interleaved, not {self.schedule}.')
        if self.schedule == 'jacobi' and self.d_backward > self.d_forward + 1:
            raise ConfigError(
                f'd_backward={self.d_backward} is more than the d_forward + 1 = {self.d_forward + 1} passes there are; '
                f'take d_backward={self.d_forward + 1} or less.'
            )
        if self.pass_weights:
            scored = {'interleaved': self.n_subsets * self.n_sweeps + 1, 'jacobi': self.d_backward}.get(self.schedule)
            if scored is None:
                raise ConfigError(
                    f'pass_weights={self.pass_weights} fits no schedule={self.schedule}, which has no fixed number of passes.'
                )
            if len(self.pass_weights) != scored or min(self.pass_weights) < 0 or sum(self.pass_weights) <= 0:
                raise ConfigError(
                    f'pass_weights={self.pass_weights} must be {scored} numbers, one for each scored pass of '
                    f'schedule={self.schedule}, none negative and not all 0.'
                )

    @property
    def initial(self):
        """Whether the first pass runs over all positions without memory."""
        return self.schedule in ('parallel', 'jacobi', 'interleaved')

    def passes(self, T, reads_from=0):
        """The positions of each pass over a sequence of T, as ranges, the initial pass included.

        reads_from: no position before it reads memory. By the exact-prefix law pass k of `jacobi` finds the positions before
        reads_from + k - 1 as they will stay; where no gradient flows, they are not computed again.
        """
        if self.schedule == 'sequential':
            return [range(t, t + 1) for t in range(T)]
        if self.schedule == 'chunked':
            return [range(t, min(t + self.chunk_size, T)) for t in range(0, T, self.chunk_size)]
        if self.schedule == 'jacobi':
            free = [after(range(T), reads_from + k - 1 if k else 0) for k in range(self.d_forward + 1 - self.d_backward)]
            return [positions for positions in free if positions] + [range(T)] * self.d_backward
        subsets = [range(i, T, self.n_subsets) for i in range(min(self.n_subsets, T))]
        return [range(T), *subsets * (self.n_sweeps if self.schedule == 'interleaved' else 0)]

    def n_graded(self, T):
        """How many of the passes, from the last, carry gradient (T2MLR's truncated backpropagation)."""
        return self.d_backward if self.schedule == 'jacobi' else len(self.passes(T))

    def weights(self, T):
        """The weight of each pass with gradient in the loss. Raises ConfigError where all weight is on empty subsets."""
        if not self.pass_weights:
            return (1.0,) * self.n_graded(T)
        weights, S = self.pass_weights, self.n_subsets
        if self.schedule == 'interleaved' and S > T:  # the last subsets of each sweep are empty
            weights = weights[:1] + tuple(w for i, w in enumerate(weights[1:]) if i % S < T)
            if not any(weights):
                raise ConfigError(
                    f'pass_weights={self.pass_weights} scores nothing in a sequence of {T} tokens, which has only {T} of the '
                    f'n_subsets={S} subsets; take n_subsets={T} or less, or weigh an earlier pass.'
                )
        return weights


PARALLEL, SEQUENTIAL = Schedule(), Schedule(schedule='sequential')


@dataclass
class State:
    """What decoding keeps between tokens, written in place: nothing moves while tokens come, as CUDA graphs need it.

    Rows of a batch end at the same slot; a shorter one starts later. A copy to go on from later is a deep copy.
    """

    kv: list  # for each depth of the stack, keys and values: two (B, G, slots, d)
    memory: torch.Tensor  # (B, 1, D): the memory that the next token reads; the LSTM keeps (h, c)
    position: torch.Tensor  # (1,): the slot of the next token
    start: torch.Tensor  # (B,): the slot of each row's first token; slots before it are padding
    first: torch.Tensor  # (B,): the first slot that attention may still see

    def __post_init__(self):
        memory = self.memory if isinstance(self.memory, tuple) else (self.memory,)
        for tensor in (*(t for kv in self.kv for t in kv), *memory, self.position, self.first):
            torch._dynamo.mark_static_address(tensor, guard=False)


class Site(NamedTuple):
    """The positions that a pass works at: what every layer there needs besides the stream. None: not needed."""

    index: torch.Tensor | None  # (n,): slots in the buffers of keys and values; None: all positions, nothing buffered
    x0: torch.Tensor  # (B, n, D): the normed embedding
    values: list  # per layer: value embeddings (B, n, G d) or None
    cos: torch.Tensor | None  # (n, 1, d): only differences of positions matter, so padding may shift them
    sin: torch.Tensor | None
    first: torch.Tensor | None  # (B, n): the oldest slot that each position sees; None: slot 0
    mask: object  # what `attention_mask` makes of the two; None: causal
    recurs: torch.Tensor | None  # (B, n, 1): recur_mask
    keep: torch.Tensor | None  # (B, n, 1): recur_mask and no document start: the memory is read as it is

    def at(self, positions, make_mask):
        """This site cut down to `positions`, a range; make_mask(positions, slots, first) gives what they see.

        The cuts are slices: the backward of an index would sort it.
        """
        at = sliced(positions)
        if self.index is None:
            slots = torch.arange(positions.start, positions.stop, positions.step, device=self.x0.device)
        else:
            slots = self.index[at]
        first = None if self.first is None else self.first[:, at]
        return Site(
            slots,
            self.x0[:, at],
            [None if v is None else v[:, at] for v in self.values],
            None if self.cos is None else self.cos[at],
            None if self.sin is None else self.sin[at],
            first,
            make_mask(positions, slots, first),
            None if self.recurs is None else self.recurs[:, at],
            None if self.keep is None else self.keep[:, at],
        )


def working_dtype(x):
    """The type of keys and values: that of x, or what autocast computes with on its device."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rounding(x):
    """The relative change that rounding alone makes in what is computed from x, again and again: smaller ones never end."""
    if x.is_cuda and working_dtype(x) == torch.float32 and torch.get_float32_matmul_precision() != 'highest':
        return 2**-10  # of TF32
    return max(torch.finfo(working_dtype(x)).eps, 4 * torch.finfo(x.dtype).eps)


def attention_mask(slots, first, n_keys, dtype, flex):
    """What positions at `slots` (n,) see of n_keys slots: those up to their own, from `first` (B, n) on unless that is None.

    A BlockMask if `flex`. Otherwise, in the `dtype` of attention, what is added to the scores, (n, n_keys) or
    (B, 1, n, n_keys): made once for all layers, because attention would convert a mask of bool in each of them.
    """
    if first is not None:
        first = torch.minimum(first, slots)  # a padding slot sees itself: no query is without a key

    def seen(b, h, q, k):
        return k <= slots[q] if first is None else (k <= slots[q]) & (k >= first[b, q])

    if flex:
        return create_block_mask(seen, None if first is None else len(first), None, len(slots), n_keys, device=slots.device)
    keys = torch.arange(n_keys, device=slots.device)
    mask = keys <= slots[:, None]
    if first is not None:
        mask = (mask & (keys >= first.unsqueeze(-1))).unsqueeze(1)
    return torch.zeros(mask.shape, dtype=dtype, device=slots.device).masked_fill(~mask, -math.inf)


@functools.cache
def compiled_flex():
    """FlexAttention as one kernel, where no compiled block is around it."""
    return torch.compile(flex_attention, dynamic=False)


def scatter_kv(buffer, slots, new):
    """`buffer` (B, G, slots, d) with `new` (B, G, n, d) at `slots` (n,): in place when nothing is to be differentiated,
    otherwise a copy, because the backward of earlier passes still needs what they read."""
    if torch.is_grad_enabled():
        return buffer.index_copy(2, slots, new)
    return buffer.index_copy_(2, slots, new)


def scatter(buffer, positions, new):
    """`buffer` (B, T, D) with `new` (B, n, D) at `positions`, a range: in place or a copy, as in `scatter_kv`."""
    if torch.is_grad_enabled():
        return buffer.slice_scatter(new, 1, positions.start, positions.stop, positions.step)
    buffer[:, sliced(positions)] = new
    return buffer


@torch.no_grad()
def relative_change(old, new):
    """|new - old| / |new| of each position, the largest over the rows: two outputs (B, n, D) -> (n,)."""
    return ((new - old).norm(dim=-1) / new.norm(dim=-1).clamp(min=torch.finfo(new.dtype).tiny)).amax(0)


def after(positions, settled):
    """The `positions`, a range, from `settled` on: what comes before depends on nothing that still moves. Whole eighths are
    left out, so that there are few shapes to compile."""
    unit = max(1, len(positions) // 8)
    skipped = len(range(positions.start, min(settled, positions.stop), positions.step))
    return positions[skipped if skipped == len(positions) else skipped // unit * unit :]


def rms_norm(config, width):
    """RMSNorm with weight and eps (llama) or without either (nanochat)."""
    if config.family == 'llama':
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.RMSNorm(width, elementwise_affine=False)


def mask_unknown(logits, unknown_ids):
    """logits (.., vocab_size) with -inf at `unknown_ids` (k,), which stand for no token; None: all ids are tokens."""
    return logits if unknown_ids is None else logits.index_fill(-1, unknown_ids, -math.inf)


def rotate(x, cos, sin):
    """Rotary positions on x (..., d): (a, b) -> (a cos - b sin, b cos + a sin), where channel i pairs with i + d/2.

    The tables hold (cos, cos) and (-sin, sin), so that whole rows are multiplied.
    """
    return (x * cos + x.roll(x.size(-1) // 2, -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention whose keys and values may mix in the memory (LRT) and value embeddings."""

    def __init__(self, config, layer):
        super().__init__()
        self.head_dim = config.head_dim
        D, kv = config.n_embd, config.kv_dim
        heads = kv // config.head_dim
        self.gqa = kv != D
        self.q = nn.Linear(D, D, bias=False)
        self.k = nn.Linear(D, kv, bias=False)
        self.v = nn.Linear(D, kv, bias=False)
        self.o = nn.Linear(D, D, bias=False)
        reads = config.recurrence == 'lrt' and config.memory_projection != 'none'
        self.gate_memory = nn.Linear(D, 2 * heads, bias=False) if reads else None  # gate_loc, then gate_rec
        embeds = has_value_embedding(config, layer)
        self.gate_ve = nn.Linear(D, heads, bias=False) if embeds else None
        qk_norm = config.family == 'nanochat'
        self.qk_norm = nn.RMSNorm(config.head_dim, elementwise_affine=False) if qk_norm else nn.Identity()

    def forward(self, x, memory, value, cos, sin, index, mask, buffers):
        """x (B, n, D) -> (B, n, D) and this layer's keys and values, two (B, G, slots, d).

        memory: (W_K m, W_V m), two (B, n, G d), or None. value (B, n, G d): value embeddings or None.
        index (n,): slots of x in `buffers`, which hold the newest keys and values of all slots; None: x is all there is.
        """
        B, n, _ = x.shape
        heads = (B, n, -1, self.head_dim)
        q, k, v = self.q(x).view(heads), self.k(x).view(heads), self.v(x).view(heads)
        dtype = q.dtype  # under autocast that of matrix products; norms and embeddings would make it float32
        if self.gate_memory is not None:
            gate_loc, gate_rec = (2 * self.gate_memory(x).sigmoid()).unsqueeze(-1).chunk(2, 2)
            k, v = gate_loc * k, gate_loc * v
            if memory is not None:
                k, v = (torch.addcmul(a, gate_rec, m.view(heads)) for a, m in zip((k, v), memory, strict=True))
        if self.gate_ve is not None:
            v = v + 2 * self.gate_ve(x).sigmoid().unsqueeze(-1) * value.view(heads)
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.to(dtype).transpose(1, 2) for t in (self.qk_norm(q), self.qk_norm(k), v))
        if index is not None:
            k, v = scatter_kv(buffers[0], index, k), scatter_kv(buffers[1], index, v)
        if isinstance(mask, BlockMask):
            flex = compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
            y = flex(q, k, v, block_mask=mask, enable_gqa=self.gqa)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.gqa)
        return self.o(y.transpose(1, 2).reshape(B, n, -1)), (k, v)


class ReLU2(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.mlp_dim, bias=False)
        self.up = nn.Linear(config.n_embd, config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: the mix of streams at its input, attention, MLP. All that depends on the config is decided here, once."""

    def __init__(self, config, layer):
        super().__init__()
        nanochat = config.family == 'nanochat'
        injects = config.recurrence == 'lrt' and config.residual_injection
        self.alpha = nn.Parameter(torch.empty(())) if nanochat else None
        self.beta = nn.Parameter(torch.empty(())) if nanochat else None
        self.gamma = nn.Parameter(torch.empty(())) if injects else None
        self.norm_attention = rms_norm(config, config.n_embd)
        self.attention = Attention(config, layer)
        self.norm_mlp = rms_norm(config, config.n_embd)
        self.mlp = ReLU2(config) if nanochat else SwiGLU(config)

    def forward(self, x, x0, m, memory, value, cos, sin, index, mask, buffers):
        """x, x0, m (B, n, D) -> this layer's output (B, n, D) and its keys and values; m is None when nothing is read."""
        if self.alpha is not None:
            x = self.alpha * x + self.beta * x0
        if self.gamma is not None and m is not None:
            x = x + self.gamma * m
        y, kv = self.attention(self.norm_attention(x), memory, value, cos, sin, index, mask, buffers)
        x = x + y
        return x + self.mlp(self.norm_mlp(x)), kv


class TemporalFusion(nn.Module):
    """T2MLR's Phi: the memory R of token t-1 enters the stream h of token t through per-channel gates.

    Phi(h, R) = h + tanh(gamma_cur) sigmoid(f_cur([h, R])) h + tanh(gamma_rec) sigmoid(f_rec([h, R])) (W_rec R)
    The half of f_cur and f_rec that acts on h is the same in every pass, so it is computed once, by `local`.
    """

    def __init__(self, config):
        super().__init__()
        D = config.n_embd
        self.gamma_cur = nn.Parameter(torch.empty(D if config.gamma_per_channel else ()))
        self.gamma_rec = nn.Parameter(torch.empty(D if config.gamma_per_channel else ()))
        self.f_cur = nn.Linear(2 * D, D)
        self.f_rec = nn.Linear(2 * D, D)
        self.w_rec = nn.Linear(D, D, bias=False)

    def local(self, h):
        """h (B, T, D) -> what h contributes to the two gates, (B, T, 2 D)."""
        D = h.size(-1)
        return torch.cat([F.linear(h, f.weight[:, :D], f.bias) for f in (self.f_cur, self.f_rec)], -1)

    def forward(self, h, local, R, recurs):
        """h, R (B, n, D), local (B, n, 2 D) -> (B, n, D). Where `recurs` (B, n, 1) is False, h comes back as it is."""
        D = h.size(-1)
        cur, rec = local.chunk(2, -1)
        cur = torch.sigmoid(cur + F.linear(R, self.f_cur.weight[:, D:]))
        rec = torch.sigmoid(rec + F.linear(R, self.f_rec.weight[:, D:]))
        x = h + self.gamma_cur.tanh() * cur * h + self.gamma_rec.tanh() * rec * self.w_rec(R)
        return x if recurs is None else torch.where(recurs, x, h)


class LatentMemory(nn.Module):
    """LRT's projections of the memory into the keys and values of every layer, one pair shared or one pair a layer."""

    def __init__(self, config):
        super().__init__()
        pairs = {'shared': 1, 'layerwise': config.n_layer, 'none': 0}[config.memory_projection]
        self.w_k = nn.ModuleList(nn.Linear(config.n_embd, config.kv_dim, bias=False) for _ in range(pairs))
        self.w_v = nn.ModuleList(nn.Linear(config.n_embd, config.kv_dim, bias=False) for _ in range(pairs))
        self.n_layer = config.n_layer

    def forward(self, m):
        """m (B, n, D) -> for each layer (W_K m, W_V m), two (B, n, G d), or None where nothing is read."""
        if m is None or not self.w_k:
            return [None] * self.n_layer
        pairs = [(w_k(m), w_v(m)) for w_k, w_v in zip(self.w_k, self.w_v, strict=True)]
        return pairs * (self.n_layer // len(pairs))


def has_value_embedding(config, layer):
    """'alternate' means every second layer, the last one included."""
    last = config.n_layer - 1
    return config.value_embeddings == 'all' or (config.value_embeddings == 'alternate' and (last - layer) % 2 == 0)


def sliced(positions):
    """The positions of a pass, a range, as the slice that picks them."""
    return slice(positions.start, positions.stop, positions.step)


def count_scored(targets, passes):
    """Scored positions (targets != -1) of each pass, (len(passes),); targets (B, T), passes as ranges."""
    scored = (targets >= 0).sum(0)
    return torch.stack([scored[sliced(p)].sum() for p in passes])


class ScoredLoss(torch.autograd.Function):
    """The weighted sum of the summed cross-entropies of several passes. Logits are made, scored and differentiated a few
    positions at a time, all in the forward: what is kept for the backward is as large as the outputs and the head, whatever the
    number of passes and the vocabulary."""

    @staticmethod
    def forward(ctx, model, targets, weights, *tensors):
        """targets [(B, n)] and weights [scalar tensor] of each pass; tensors: its outputs [(B, n, D)], then the parameters of
        model.logits with gradient. Returns the loss, and the sum of each pass (passes,), which has no gradient."""
        rows, graded = max(1, LOGITS_AT_ONCE // model.config.vocab_size), any(ctx.needs_input_grad)
        outputs, parameters = tensors[: len(targets)], tensors[len(targets) :]
        # Contiguous, whatever the outputs are, as those of nn.LSTM are not: they are written through a view.
        gradients = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors] if graded else outputs
        sums = []
        for y, target, weight, gradient in zip(outputs, targets, weights, gradients, strict=False):
            sums.append(torch.zeros((), dtype=torch.promote_types(y.dtype, torch.float32), device=y.device))
            for part, wanted, kept in zip(*(t.flatten(0, 1).split(rows) for t in (y, target, gradient)), strict=True):
                with torch.set_grad_enabled(graded):
                    part = part.detach().requires_grad_(graded)
                    loss = model.summed_loss(part.view_as(part), wanted)  # hooks of modules, as counters set, want no leaf
                    found = torch.autograd.grad(loss * weight, (part, *parameters)) if graded else ()
                for old, new in zip((kept, *gradients[len(targets) :]), found, strict=graded):
                    old += new
                sums[-1] += loss.detach()
        ctx.gradients, sums = gradients, torch.stack(sums)
        ctx.mark_non_differentiable(sums)
        return sum(s * w for s, w in zip(sums, weights, strict=True)), sums

    @staticmethod
    def backward(ctx, upstream, _):
        return None, None, None, *(upstream * g for g in ctx.gradients)


def summed_loss(model, y, targets):
    """Summed cross-entropy of y (n, D), the top of the stack, at targets (n,), -1 where nothing is scored."""
    return F.cross_entropy(model.logits(y), targets, ignore_index=-1, reduction='sum')


LOGITS_AT_ONCE = 2**25  # elements: enough for full speed, and little beside a model with so large a vocabulary


def scored_loss(model, outputs, targets, counts, weights):
    """The mean over passes of each pass's own mean, weighted; passes with nothing to score are left out.

    outputs [(B, n, D)], targets [(B, n)], counts (passes,) on the host or the device of the outputs, weights: numbers. Returns
    the loss (a scalar, 0 when nothing at all is scored) and each pass's mean (passes,).
    """
    dtype = torch.promote_types(outputs[0].dtype, torch.float32)
    weights = torch.tensor(weights, dtype=dtype, device=counts.device) * (counts > 0)
    weights = weights / (weights.sum().clamp(min=torch.finfo(weights.dtype).tiny) * counts.clamp(min=1))
    tensors = [y.detach() for y in outputs]
    if torch.is_grad_enabled():
        tensors = [*outputs, *(p for part in (model.norm, model.head) for p in part.parameters() if p.requires_grad)]
    loss, sums = ScoredLoss.apply(model, targets, weights.unbind(), *tensors)
    return loss, torch.stack([s / n for s, n in zip(sums, counts.clamp(min=1), strict=True)])


class GPT(nn.Module):
    """Prelude (layers below the span), span (layers that read or write the memory), coda (layers above it)."""

    def __init__(self, config):
        """Weights are allocated on the current default device and initialised, unless that is 'meta'."""
        super().__init__()
        config.check()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.norm_embed = rms_norm(config, config.n_embd) if config.family == 'nanochat' else nn.Identity()
        self.value_embeds = nn.ModuleDict(
            {
                str(layer): nn.Embedding(config.vocab_size, config.kv_dim)
                for layer in range(config.n_layer)
                if has_value_embedding(config, layer)
            }
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.fusion = TemporalFusion(config) if config.recurrence == 't2mlr' else None
        self.memory = LatentMemory(config) if config.recurrence == 'lrt' else None
        self.norm = rms_norm(config, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.family == 'llama':
            self.head.weight = self.embed.weight
        self.register_buffer('unknown_ids', None, persistent=False)  # set by who decodes or evaluates; see mask_unknown
        self.softcap = 15.0 if config.family == 'nanochat' else None
        self.eps = config.norm_eps if config.family == 'llama' else None
        self.stack, self.source = config.stack, config.source
        self.scores_every_pass = config.recurrence == 'lrt'
        # Set by who trains: a layer keeps its input and runs again in the backward; where there is a mask, FlexAttention.
        self.activation_checkpointing = self.flex = False
        self.masks = {}
        if self.embed.weight.device.type != 'meta':
            self.init_weights()
        self.build_rope()

    @torch.no_grad()
    def init_weights(self):
        """Every tensor of the model, in the order of its definition."""
        c, D = self.config, self.config.n_embd
        nanochat = c.family == 'nanochat'
        uniform, normal = math.sqrt(3 / D), 0.02
        matrix = (lambda w: w.uniform_(-uniform, uniform)) if nanochat else (lambda w: w.normal_(0, normal))
        output = (lambda w: w.zero_()) if nanochat else (lambda w: w.normal_(0, normal / math.sqrt(2 * c.n_layer)))
        self.embed.weight.normal_(0, 1.0 if nanochat else normal)
        for table in self.value_embeds.values():
            matrix(table.weight)
        for block in self.blocks:
            if nanochat:
                block.alpha.fill_(1.0)
                block.beta.fill_(0.1)
            if block.gamma is not None:
                block.gamma.fill_(0.0 if c.identity_init else 0.1)
            for linear in (block.attention.q, block.attention.k, block.attention.v):
                matrix(linear.weight)
            output(block.attention.o.weight)
            for gate in (block.attention.gate_memory, block.attention.gate_ve):
                if gate is not None:
                    gate.weight.zero_()
            for name, linear in block.mlp.named_children():
                (output if name == 'down' else matrix)(linear.weight)
        if self.fusion is not None:
            self.fusion.gamma_cur.fill_(c.gamma_init)
            self.fusion.gamma_rec.fill_(c.gamma_init)
            for f in (self.fusion.f_cur, self.fusion.f_rec):
                matrix(f.weight)
                f.bias.zero_()
            nn.init.eye_(self.fusion.w_rec.weight)
        if self.memory is not None:
            for linear in (*self.memory.w_k, *self.memory.w_v):
                linear.weight.zero_() if c.identity_init else matrix(linear.weight)
        if nanochat:
            self.head.weight.normal_(0, 0.001)
        for norm in (m for m in self.modules() if isinstance(m, nn.RMSNorm) and m.weight is not None):
            norm.weight.fill_(1.0)

    def build_rope(self):
        """Tables (2 block_size, d), from angles in float64, kept in float32 (float64 in a float64 model), never less.

        Twice the context, because padding before a short row of a batch takes slots too.
        """
        if self.config.positional == 'none':
            self.cos = self.sin = None
            return
        weight, d = self.embed.weight, self.config.head_dim
        frequency = self.config.rope_base ** (-torch.arange(0, d, 2, dtype=torch.float64, device='cpu') / d)
        if self.config.rope_scaling:  # Llama 3: long wavelengths are stretched by the factor, those between in proportion
            factor, low, high, length = self.config.rope_scaling
            turns = length * frequency / (2 * math.pi)
            kept = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= high).double()
            frequency = kept * frequency + (1 - kept) * frequency / factor
        angle = torch.arange(2 * self.config.block_size, dtype=torch.float64, device='cpu')[:, None] * frequency
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
        self.cos, self.sin = cos.to(dtype).to(weight.device), sin.to(dtype).to(weight.device)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)  # .to(), .double(), .cuda(): the tables are no parameters and follow by being rebuilt
        self.masks.clear()
        self.build_rope()
        return self

    def compile(self):
        """Compiles the repeated block, the fusion and the loss, once each; parameter names stay as they are."""
        # One graph for each shape of pass, with and without gradient: a few more than the eight at which torch gives up.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for module in (*self.blocks, *([self.fusion] if self.fusion is not None else [])):
            module.compile(dynamic=False)
        self.summed_loss = torch.compile(self.summed_loss, dynamic=False)

    def token(self, tokens, state):
        """One token a row, tokens (B, 1), behind `state`: logits (B, 1, vocab_size)."""
        return self(tokens, schedule=SEQUENTIAL, state=state)

    def compile_token(self):
        """Compiles `token` into one graph of the whole model, on CUDA replayed as one CUDA graph: prompts stay as they are."""
        # One graph for each number of rows and of slots, which changes whenever rows of different lengths slide.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        self.token = torch.compile(self.token, mode='reduce-overhead', fullgraph=True, dynamic=False)

    def new_kv(self, B, slots):
        """Empty buffers: for each depth of the stack, two (B, G, slots, d) in the type that keys and values have here."""
        weight, c = self.embed.weight, self.config
        shape, like = (B, c.kv_dim // c.head_dim, slots, c.head_dim), dict(dtype=working_dtype(weight), device=weight.device)
        return [tuple(torch.zeros(shape, **like) for _ in 'kv') for _ in self.stack]

    def new_state(self, B, start=None, slots=0):
        """The state before the first token, for B rows. start (B,): slots of padding before each row's first token.
        slots: how many the buffers have, at most 2 block_size; 0 means block_size."""
        weight = self.embed.weight
        start = torch.zeros(B, dtype=torch.long, device=weight.device) if start is None else start.to(weight.device)
        return State(
            self.new_kv(B, slots or self.config.block_size),
            torch.zeros(B, 1, self.config.n_embd, dtype=weight.dtype, device=weight.device),
            torch.zeros(1, dtype=torch.long, device=weight.device),
            start,
            start.clone(),
        )

    def site(self, tokens, recur_mask, state):
        """All positions of `tokens` (B, T), behind what `state` holds."""
        c = self.config
        T = tokens.size(1)
        slots = torch.arange(T, device=tokens.device)
        keep = recurs = None if recur_mask is None else recur_mask.unsqueeze(-1)
        first = mask = None
        opens = tokens == c.reset_token if c.reset_token >= 0 else None
        if opens is not None:
            keep = ~opens.unsqueeze(-1) if keep is None else keep & ~opens.unsqueeze(-1)
        if state is not None:
            slots = state.position + slots
            begun = (slots > state.start[:, None]).unsqueeze(-1)
            keep = begun if keep is None else keep & begun
            first = state.first[:, None].expand(-1, T)
        if c.document_attention:
            first = torch.where(opens, slots, torch.zeros_like(tokens) if first is None else first).cummax(1).values
        if first is not None:
            n_keys = T if state is None else state.kv[0][0].size(2)
            mask = self.mask(range(T), slots, first, n_keys, self.flex and state is None)
        x0 = self.norm_embed(self.embed(tokens))
        values = [self.value_embeds[str(i)](tokens) if str(i) in self.value_embeds else None for i in range(c.n_layer)]
        cos, sin = (None if t is None else t[slots].unsqueeze(-2) for t in (self.cos, self.sin))
        return Site(None if state is None else slots, x0, values, cos, sin, first, mask, recurs, keep)

    def mask(self, positions, slots, first, n_keys, flex):
        """`attention_mask` of a pass over `positions`, a range. One that depends on shapes alone is kept for later passes."""
        flex = flex and len(positions) > 1  # a block mask is 128 wide, and takes the host milliseconds
        args = slots, first, n_keys, working_dtype(self.embed.weight), flex
        if first is not None or len(positions) == 1:
            return attention_mask(*args)
        name = positions, *args[2:]
        if name not in self.masks:
            if len(self.masks) == 64:  # sequences of many lengths, as in an evaluation
                self.masks.clear()
            with torch.inference_mode(False):  # a later pass may need the mask in its backward
                self.masks[name] = attention_mask(*args)
        return self.masks[name]

    def run(self, depths, x, site, kv, m=None):
        """The stack at `depths` (a range) and `site`: x (B, n, D) -> output (B, n, D), output of the source or None.

        m (B, n, D): memory for the LRT pathways. kv: newest keys and values of every depth, replaced in the list.
        """
        source = None
        projections = self.memory(m) if self.memory is not None else [None] * self.config.n_layer
        for depth in depths:
            layer = self.stack[depth]
            buffers, block = None if site.index is None else kv[depth], self.blocks[layer]
            if self.activation_checkpointing and torch.is_grad_enabled():
                block = functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
            x, kv[depth] = block(
                x, site.x0, m, projections[layer], site.values[layer], site.cos, site.sin, site.index, site.mask, buffers
            )
            if depth == self.source:
                source = x
        return x, source

    def span(self, h, local, site, kv, m):
        """One pass over the span at `site`: h (B, n, D) from the prelude, m (B, n, D) the memory of the tokens before.

        m is None in the initial pass, which reads no memory. Returns the span's output and the memory written, (B, n, D).
        """
        if m is not None and site.keep is not None:
            m = torch.where(site.keep, m, 0.0)
        if self.fusion is None:
            y, source = self.run(self.config.span, h, site, kv, m)
        else:
            if m is not None:
                m = m.detach() if self.config.detach_memory else m
                h = self.fusion(h, local, m, site.recurs)
            y, source = self.run(self.config.span, h, site, kv)
            if m is not None and self.config.cache_residual != 'off':
                source = source + (m.detach() if self.config.cache_residual == 'detached' else m)
        return y, F.rms_norm(source, (source.size(-1),), eps=self.eps)

    summed_loss = summed_loss

    def logits(self, y):
        """y (.., D), the top of the stack -> (.., vocab_size), in float32 or better."""
        logits = self.head(self.norm(y))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return mask_unknown(logits, self.unknown_ids)

    def scored_passes(self, schedule, T):
        """The positions of each pass whose output is scored: all with gradient (LRT), or the merged result (T2MLR, plain)."""
        return schedule.passes(T)[-schedule.n_graded(T) :] if self.scores_every_pass else [range(T)]

    def forward(
        self, tokens, targets=None, schedule=PARALLEL, recur_mask=None, counts=None, state=None, changes=None, logits_from=0
    ):
        """Runs `tokens` (B, T) under `schedule`, after what `state` holds if there is one (then without gradient).

        Without targets: logits (B, T, vocab_size) of the newest output at every position, or at those from logits_from on; with
        logits_from=None that output itself, (B, T, n_embd), from which `logits` makes them.
        With targets (B, T), -1 where nothing is scored: the loss, and the mean of each scored pass, (passes,). counts
        (passes,), on the host or not: scored positions of each pass in the whole update, when this batch is a part of it.
        recur_mask (B, T), bool: where False a token reads no memory. changes: a list that receives, for each pass of `jacobi`
        and `interleaved` after the initial one, the largest relative change of the span's output. Raises ValueError for T above
        block_size.
        """
        B, T = tokens.shape
        c = self.config
        if T > c.block_size:
            raise ValueError(f'{T} tokens do not fit block_size={c.block_size}.')
        grad = torch.is_grad_enabled() and state is None
        with torch.set_grad_enabled(grad):
            site = self.site(tokens, recur_mask, state)
            kv = [None] * len(self.stack) if state is None else state.kv
            h, _ = self.run(range(c.span.start), site.x0, site, kv)
            outputs, y = [], h
            if c.recurrence != 'none':
                reads_from = 0
                if recur_mask is not None and recur_mask.device.type == 'cpu':  # elsewhere the question would cost a wait
                    reads_from = int(recur_mask.any(0).int().argmax())
                outputs, y, memory = self.solve(h, site, schedule, reads_from, kv, state, changes, targets is not None)
                if state is not None:
                    state.memory.copy_(memory[:, -1:])
            y, _ = self.run(range(c.span.stop, len(self.stack)), y, site, kv)
            if state is not None:
                state.position += T
                # A document token in the padding opens nothing.
                state.first.copy_(torch.maximum(site.first[:, -1], state.start))
            if targets is None:
                return y if logits_from is None else self.logits(y[:, logits_from:])
            passes = self.scored_passes(schedule, T)
            outputs = outputs if self.scores_every_pass else [y]
            wanted = [targets[:, sliced(p)] for p in passes]
            counts = count_scored(targets, passes) if counts is None else counts
            weights = schedule.weights(T) if self.scores_every_pass else (1.0,)
            return scored_loss(self, outputs, wanted, counts, weights)

    def solve(self, h, site, schedule, reads_from, kv, state, changes, scored):
        """The passes of a schedule over the span: h (B, T, D) -> outputs of the passes with gradient if they are `scored`, the
        newest output of every position (B, T, D), and the memory (B, T + 1, D), shifted: slot p is what position p reads."""
        B, T, D = h.shape
        before = h.new_zeros(B, 1, D) if state is None else state.memory
        memory = newest = None
        if not schedule.initial:
            memory, newest = F.pad(before, (0, 0, 0, T)), torch.zeros_like(h)  # what is not yet written reads as 0
            if state is None:
                kv[:] = self.new_kv(B, T)
        passes = schedule.passes(T, reads_from)
        local = self.fusion.local(h) if self.fusion is not None and len(passes) > schedule.initial else None
        sweep = min(schedule.n_subsets, T) if schedule.schedule == 'interleaved' else 1
        tolerance = schedule.jacobi_tol and max(schedule.jacobi_tol, rounding(h))
        measured = schedule.initial and (changes is not None or tolerance)
        outputs, moved, unsettled = [], [], []
        n_keys, flex = (T, self.flex) if state is None else (kv[0][0].size(2), False)
        make_mask = functools.partial(self.mask, n_keys=n_keys, flex=flex)
        ungraded = len(passes) - schedule.n_graded(T)
        for number, positions in enumerate(passes):
            graded = number >= ungraded
            todo = positions
            if len(unsettled) >= sweep and not (graded and torch.is_grad_enabled()):
                todo = after(positions, min(unsettled[-sweep:]))
            with torch.set_grad_enabled(torch.is_grad_enabled() and graded):
                at = sliced(todo)
                if len(todo) == T:
                    y, written = self.span(h, local, site, kv, None if memory is None else memory[:, :-1])
                    memory = torch.cat((before, written), 1)
                elif todo:
                    part = None if local is None else local[:, at]
                    y, written = self.span(h[:, at], part, site.at(todo, make_mask), kv, memory[:, at])
                    memory = scatter(memory, range(todo.start + 1, todo.stop + 1, todo.step), written)
                if todo and number and measured:
                    moved.append(relative_change(newest[:, at], y))
                if len(todo) == T:
                    newest = y
                elif todo:
                    if outputs and newest is outputs[-1]:  # it is scored as it is
                        newest = newest.clone()
                    newest = scatter(newest, todo, y)
                if graded and scored:
                    whole = len(todo) == len(positions)
                    outputs.append(y if whole else newest[:, sliced(positions)].clone())
            if tolerance and number:
                still = (~(moved[-1] < tolerance)).nonzero() if todo else ()
                unsettled.append(todo[int(still[0])] if len(still) else T)
        if changes is not None:
            changes += [change.max() for change in moved]
        return outputs, newest, memory


class LSTM(nn.Module):
    """The recurrent baseline with the interface of GPT: embedding, n_layer LSTM layers of width n_embd, head."""

    scores_every_pass = False
    summed_loss = summed_loss

    def __init__(self, config):
        super().__init__()
        config.check()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.lstm = nn.LSTM(config.n_embd, config.n_embd, config.n_layer, batch_first=True)
        self.norm = nn.Identity()
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.register_buffer('unknown_ids', None, persistent=False)  # set by who decodes or evaluates; see mask_unknown

    def logits(self, y):
        """y (.., D) -> (.., vocab_size), in float32 or better."""
        logits = self.head(y)
        return mask_unknown(logits if logits.dtype == torch.float64 else logits.float(), self.unknown_ids)

    def compile(self):
        """Nothing to compile: the layers are one fused call already."""

    compile_token = compile

    def token(self, tokens, state):
        return self(tokens, state=state)

    def scored_passes(self, schedule, T):
        return [range(T)]

    def new_state(self, B, start=None, slots=0):
        weight = self.embed.weight
        start = torch.zeros(B, dtype=torch.long, device=weight.device) if start is None else start.to(weight.device)
        zero = torch.zeros(self.config.n_layer, B, self.config.n_embd, dtype=weight.dtype, device=weight.device)
        return State([], (zero, zero.clone()), torch.zeros(1, dtype=torch.long, device=weight.device), start, start)

    def forward(
        self, tokens, targets=None, schedule=PARALLEL, recur_mask=None, counts=None, state=None, changes=None, logits_from=0
    ):
        """As GPT.forward; the schedule and recur_mask have no meaning here, since the layers recur by themselves."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and state is None):
            if state is None:
                y, _ = self.lstm(self.embed(tokens))
            else:
                steps = []
                for t in range(tokens.size(1)):
                    begun = (state.position + t > state.start)[:, None]  # padding before a row's first token leaves nothing
                    hidden = tuple(torch.where(begun, s, 0.0) for s in state.memory)
                    y, hidden = self.lstm(self.embed(tokens[:, t : t + 1]), hidden)
                    for kept, new in zip(state.memory, hidden, strict=True):
                        kept.copy_(new)
                    steps.append(y)
                y = torch.cat(steps, 1)
                state.position += tokens.size(1)
            if targets is None:
                return y if logits_from is None else self.logits(y[:, logits_from:])
            counts = count_scored(targets, [range(tokens.size(1))]) if counts is None else counts
            return scored_loss(self, [y], [targets], counts, (1.0,))


def build(config):
    """The model that a GPTConfig describes."""
    return LSTM(config) if config.architecture == 'lstm' else GPT(config)


def pretrained_folder(name):
    """The folder of a Llama-family checkpoint in the format of the transformers library: `name` itself, or that of the hub."""
    if os.path.isdir(name):
        return name
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(f'{name} is no folder, and the hub needs an extra; pip install huggingface_hub.') from None
    with explaining(f'{name} is neither a folder nor a model that the hub gives', 'name a folder of the transformers library'):
        return snapshot_download(name, allow_patterns=['*.json', '*.jinja', '*.safetensors'])


OURS = 'latent-memory'  # model_type of a folder that only this code loads
ROPE_SCALING = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')


def pretrained_config(name, block_size):
    """The settings of a model that equals a pretrained checkpoint, as a dict; its context is at most block_size.

    Raises ConfigError for what the Llama family here cannot express, by name; nothing that the config.json states is assumed.
    """
    folder = pretrained_folder(name)
    path = os.path.join(folder, 'config.json')
    with explaining(f'{path} cannot be read', 'take a folder of the transformers library'), open(path, encoding='utf-8') as f:
        c = json.load(f)
        if c['model_type'] == OURS:
            own = asdict(GPTConfig(**c['settings']))
            return own | {'block_size': min(block_size, own['block_size']), 'rope_scaling': tuple(own['rope_scaling'])}
        rope = (c.get('rope_parameters') or c.get('rope_scaling') or {}) | {}
        kind = rope.get('rope_type', rope.get('type', 'default'))
        scaling = ()
        if kind == 'llama3':
            scaling = tuple(float(rope[k]) for k in ROPE_SCALING)
        refused = {
            'model_type': c['model_type'] != 'llama',
            'hidden_act': c.get('hidden_act', 'silu') != 'silu',
            'attention_bias': c.get('attention_bias', False),
            'mlp_bias': c.get('mlp_bias', False),
            'tie_word_embeddings': not c.get('tie_word_embeddings', False),
            'rope_type': kind not in ('default', 'llama3'),
            'head_dim': c.get('head_dim') not in (None, c['hidden_size'] // c['num_attention_heads']),
        }
        for what, wrong in refused.items():
            if wrong:
                value = kind if what == 'rope_type' else c.get(what)
                raise ConfigError(
                    f'{folder} has {what}={value}, which is not supported here; Llama-family models with tied embeddings are.'
                )
        return {
            'family': 'llama',
            'vocab_size': c['vocab_size'],
            'block_size': min(block_size, c['max_position_embeddings']),
            'n_layer': c['num_hidden_layers'],
            'n_head': c['num_attention_heads'],
            'n_kv_head': c.get('num_key_value_heads') or c['num_attention_heads'],
            'n_embd': c['hidden_size'],
            'n_hidden': c['intermediate_size'],
            'rope_base': float(rope.get('rope_theta', c.get('rope_theta', 10000.0))),
            'rope_scaling': scaling,
            'norm_eps': float(c['rms_norm_eps']),
            'value_embeddings': 'none',
            'positional': 'rope',
        }


def hub_config(c):
    """The config.json, as a dict, with which the transformers library builds the model of a GPTConfig; None: it has none."""
    known = {'architecture': 'gpt', 'family': 'llama', 'positional': 'rope'}
    known |= {'recurrence': 'none', 'value_embeddings': 'none', 'n_loop': 1}
    if any(getattr(c, name) != value for name, value in known.items()):
        return None
    about = {
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'vocab_size': c.vocab_size,
        'hidden_size': c.n_embd,
        'intermediate_size': c.mlp_dim,
        'num_hidden_layers': c.n_layer,
        'num_attention_heads': c.n_head,
        'num_key_value_heads': c.n_kv_head or c.n_head,
        'max_position_embeddings': c.block_size,
        'rope_theta': c.rope_base,
        'rms_norm_eps': c.norm_eps,
        'hidden_act': 'silu',
        'tie_word_embeddings': True,
    }
    if c.rope_scaling:
        *factors, length = c.rope_scaling
        about['rope_scaling'] = {'rope_type': 'llama3'} | dict(zip(ROPE_SCALING, (*factors, int(length)), strict=True))
    return about


def hub_names(names):
    """{parameter of a llama-family GPT: its name on the hub}; what a recurrence adds has none and is left out."""
    theirs = {
        'embed': 'embed_tokens',
        'norm': 'norm',
        'norm_attention': 'input_layernorm',
        'norm_mlp': 'post_attention_layernorm',
    }
    theirs |= {part: f'self_attn.{part}_proj' for part in 'qkvo'} | {
        part: f'mlp.{part}_proj' for part in ('gate', 'up', 'down')
    }
    found = {}
    for name in names:
        if not is_recurrence(name):
            *_, part, _ = name.split('.')
            layer = f'layers.{name.split(".")[1]}.' if name.startswith('blocks.') else ''
            found[name] = f'model.{layer}{theirs[part]}.weight'
    return found


@torch.no_grad()
def load_pretrained(model, name):
    """Copies the weights of a checkpoint in safetensors files into `model`, one tensor at a time; what the recurrence adds
    keeps its initial values, unless the checkpoint is one of ours. Raises ConfigError for a file that is missing or cut, and
    for a tensor of another shape."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ConfigError('a pretrained checkpoint needs an extra; pip install safetensors.') from None
    folder, wanted = pretrained_folder(name), dict(model.named_parameters())
    with explaining(f'the weights in {folder} cannot be read', 'fetch them again'):
        with open(os.path.join(folder, 'config.json'), encoding='utf-8') as f:
            if json.load(f)['model_type'] != OURS:
                wanted = {theirs: wanted[ours] for ours, theirs in hub_names(wanted).items()}
        files = sorted(glob.glob(os.path.join(glob.escape(folder), '*.safetensors')))
        index = os.path.join(folder, 'model.safetensors.index.json')
        if os.path.exists(index):
            with open(index, encoding='utf-8') as f:
                files = sorted({os.path.join(folder, os.path.basename(n)) for n in json.load(f)['weight_map'].values()})
        for file in files:
            with safe_open(file, framework='pt') as tensors:
                for key_ in set(tensors.keys()) & set(wanted):
                    tensor, p = tensors.get_tensor(key_), wanted.pop(key_)
                    if tensor.shape != p.shape:
                        raise ConfigError(f'{file} holds {key_} of shape {tuple(tensor.shape)}, not {tuple(p.shape)}.')
                    p.copy_(tensor)
    if wanted:
        raise ConfigError(
            f'{folder} lacks {len(wanted)} tensors, the first of them {sorted(wanted)[0]}; a file may be missing.'
        )


def is_recurrence(name):
    """Whether the parameter `name` exists only because of T2MLR or LRT: what a retrofit adds to its base model."""
    return name.startswith(('fusion.', 'memory.')) or name.endswith(('.gamma', '.gate_memory.weight'))


def count_parameters(model):
    """Parameters by part; a tied head counts once, with the embedding."""
    parts = dict.fromkeys(
        ('embedding', 'value embeddings', 'attention', 'MLP', 'LSTM', 'norms, scalars', 'head', 'recurrence'), 0
    )
    prefixes = {'embed.': 'embedding', 'value_embeds.': 'value embeddings', 'lstm.': 'LSTM', 'head.': 'head'}
    for name, p in model.named_parameters():
        part = next((part for prefix, part in prefixes.items() if name.startswith(prefix)), 'norms, scalars')
        part = 'attention' if '.attention.' in name else 'MLP' if '.mlp.' in name else part
        parts['recurrence' if is_recurrence(name) else part] += p.numel()
    return {part: n for part, n in parts.items() if n}


def count_flops(model, schedule, T):
    """Floating-point operations per token of sequences of T: 'forward' under the schedule, 'step' (forward and backward),
    'decode' (one token at a full context); and 'plain_forward', 'plain_step', those of the same model without recurrence.

    A multiply-add counts as 2; matrix products only; attention counts every key it is given, causal or not. A backward costs
    twice its forward. Weights may be on the meta device.
    """
    c = model.config
    D, head = c.n_embd, 2 * c.n_embd * c.vocab_size
    if c.architecture == 'lstm':
        forward = head + 2 * sum(p.numel() for n, p in model.named_parameters() if n.startswith('lstm.weight'))
        return {'forward': forward, 'step': 3 * forward, 'decode': forward, 'plain_forward': forward, 'plain_step': 3 * forward}
    plain, gates = [], []  # of each layer's matrices; the gates are those of the memory
    for block in model.blocks:
        weights = [(is_recurrence(name), 2 * p.numel()) for name, p in block.named_parameters() if p.dim() == 2]
        plain.append(sum(n for added, n in weights if not added))
        gates.append(sum(n for added, n in weights if added))
    attention, span = 4 * T * D, c.span
    inside = sum(plain[layer] + gates[layer] for layer in c.stack[span.start : span.stop])
    outside = sum(plain[layer] for layer in c.stack) - sum(plain[layer] for layer in c.stack[span.start : span.stop])
    passes = schedule.passes(T) if span else []
    local = 4 * D * D if model.fusion is not None else 0
    reading = 6 * D * D if model.fusion is not None else 0
    if model.memory is not None:
        reading = 2 * sum(p.numel() for p in model.memory.parameters())
    cost = {'forward': 0.0, 'step': 0.0}
    first = len(passes) - schedule.n_graded(T)
    for number, positions in enumerate(passes):
        linear = inside + reading * (number > 0 or not schedule.initial)
        cost['forward'] += len(positions) * (linear + len(span) * attention)
        if number < first:
            cost['step'] += len(positions) * (linear + len(span) * attention)
        else:  # the memory that the first pass with gradient reads has none
            cost['step'] += len(positions) * (linear * 3 - reading * (number == first > 0) + len(span) * attention * 3)
    scored = sum(len(p) for p in model.scored_passes(schedule, T))
    fixed = outside + local * (len(passes) > schedule.initial)
    beyond = (len(c.stack) - len(span)) * attention
    return {
        'forward': (cost['forward'] + scored * head) / T + fixed + beyond,
        'step': (cost['step'] + scored * head * 3) / T + fixed * 3 + beyond * 3,
        'decode': inside + outside + len(c.stack) * attention + local + reading + head,
        'plain_forward': sum(plain) + c.n_layer * attention + head,
        'plain_step': sum(plain) * 3 + c.n_layer * attention * 3 + head * 3,
    }
