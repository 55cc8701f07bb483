"""Decoder-only transformers that carry a latent memory from token to token.

T2MLR (Cai, Zhu, Dong, He, Arora 2026) feeds a deep middle layer of token t-1 into an earlier middle layer of token t.
LRT (Huang et al. 2026, arXiv 2605.26797) feeds an upper-middle layer of token t-1 into every layer of token t.
Both are one computation: the model is a prelude, a span that reads and writes the memory, and a coda. A schedule is an
ordered list of passes over the span, each at a subset of the positions; decoding is one more pass, at one position.

Shapes: B sequences, T positions, n positions of one pass, D = n_embd, H query heads, G key/value heads, d = D / H.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from configurator import ConfigError, check_keys, key, within
from schedule import PARALLEL, SEQUENTIAL
from support.buffers import as_slice, scatter, scatter_kv, take
from support.convergence import Convergence
from support.dtypes import rounding, working_dtype
from support.loss import count_scored, scored_loss, summed_loss
from support.masks import Masks, attend
from support.scan import Scan, norm_memory, solve_direct_path


@dataclass
class GPTConfig:
    """What the model is. Two backbone families, four recurrences; layers are counted from 0."""

    architecture: str = key('gpt', 'gpt, or an LSTM language model of the same interface', ('gpt', 'lstm'), heading='Model')
    family: str = key('nanochat', 'backbone: QK-norm, ReLU^2, x0 skip; or RMSNorm weights, SwiGLU, tied', ('nanochat', 'llama'))
    vocab_size: int = key(0, 'token ids known to the model; 0 takes the number from the data', bounds=(0, 10**7))
    block_size: int = key(256, 'longest sequence, in tokens', bounds=(1, 10**7))
    n_layer: int = key(6, 'layers', bounds=(1, 1000))
    n_head: int = key(4, 'query heads', bounds=(1, 1000))
    n_kv_head: int = key(0, 'key/value heads, a divisor of n_head; 0 means n_head', bounds=(0, math.inf))
    n_embd: int = key(128, 'width D of the residual stream', bounds=(1, 10**7))
    n_hidden: int = key(
        0, 'width of the MLP; 0 means 4 D (nanochat) or 8/3 D rounded up to a multiple of 64 (llama)', bounds=(0, 10**7)
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
        'on', 'T2MLR: R_t = RMSNorm(y + R_{t-1}); R_{t-1} with gradient, without it, or left out', ('on', 'detached', 'off')
    )
    detach_memory: bool = key(False, 'T2MLR: no gradient flows through the memory wherever it is read')
    gamma_init: float = key(0.0, 'T2MLR: start of gamma_cur and gamma_rec; at 0 the model starts as the plain transformer')
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

    @property
    def has_direct_path(self):
        """Whether the memory read reaches the memory written through residual connections alone (support/scan.py)."""
        return (
            self.recurrence == 't2mlr' and self.cache_residual != 'off' or self.recurrence == 'lrt' and self.residual_injection
        )

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
                within(name, getattr(self, name), 0, self.n_layer - 1, f'it is no layer of n_layer={self.n_layer}')
            if self.l_start > self.l_end:
                raise ConfigError(f'l_start={self.l_start} is above l_end={self.l_end}; take l_start={self.l_end} or less.')
        if self.recurrence == 'lrt':
            why = f'it is no layer of n_layer={self.n_layer} (-1 is the final layer)'
            within('source_layer', self.source_layer, -1, self.n_layer - 1, why)
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
class State:
    """What decoding keeps between tokens, written in place: nothing moves while tokens come, as CUDA graphs need it.

    Rows of a batch end at the same slot; a shorter one starts later. To continue from here later, take a deep copy.
    """

    kv: list  # for each depth of the stack, keys and values: two (B, G, slots, d)
    memory: torch.Tensor  # (B, 1, D): the memory that the next token reads; of the LSTM (B, 2, layers, D): h and c
    position: torch.Tensor  # (1,): the slot of the next token
    start: torch.Tensor  # (B,): the slot of each row's first token; slots before it are padding
    first: torch.Tensor  # (B,): the first slot that attention may still see

    def __post_init__(self):
        for tensor in (*(t for kv in self.kv for t in kv), self.memory, self.position, self.first):
            torch._dynamo.mark_static_address(tensor, guard=False)

    def repeat_rows(self, rows):
        """A state of the rows numbered in `rows` (n,), each as often as it is named."""
        kv = [(k[rows], v[rows]) for k, v in self.kv]
        return replace(self, kv=kv, memory=self.memory[rows], start=self.start[rows], first=self.first[rows])


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
    reads: torch.Tensor | None  # (B, n, 1): recur_mask and no document start; elsewhere the memory read is 0

    def at(self, positions, make_mask):
        """This site cut down to `positions`, a range; make_mask(positions, slots, first) gives what they see."""
        if len(positions) == self.x0.size(1):
            return self
        at = as_slice(positions)
        if self.index is None:
            slots = torch.arange(positions.start, positions.stop, positions.step, device=self.x0.device)
        else:
            slots = self.index[at]
        first = take(self.first, positions)
        return Site(
            slots,
            take(self.x0, positions),
            [take(v, positions) for v in self.values],
            None if self.cos is None else self.cos[at],
            None if self.sin is None else self.sin[at],
            first,
            make_mask(positions, slots, first),
            take(self.recurs, positions),
            take(self.reads, positions),
        )


def rms_norm(config, width):
    """RMSNorm with weight and eps (llama) or without either (nanochat)."""
    if config.family == 'llama':
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.RMSNorm(width, elementwise_affine=False)


def rotate(x, cos, sin):
    """Rotary positions on x (..., d): (a, b) -> (a cos - b sin, b cos + a sin), where channel i pairs with i + d/2.

    The tables hold (cos, cos) and (-sin, sin), so that whole rows are multiplied.
    """
    return (x * cos + x.roll(x.size(-1) // 2, -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention whose keys and values may mix in the memory (LRT) and value embeddings."""

    recurrence_parts, adamw_parts = ('gate_memory',), ('gate_memory', 'gate_ve')

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
        y = attend(q, k, v, mask, self.gqa).transpose(1, 2).reshape(B, n, -1)
        return self.o(y), (k, v)


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

    recurrence_parts = ('gamma',)

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

    adamw_parts = ('f_cur', 'f_rec')

    def __init__(self, config):
        super().__init__()
        D = config.n_embd
        self.gamma_cur = nn.Parameter(torch.empty(()))
        self.gamma_rec = nn.Parameter(torch.empty(()))
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
    """LRT's projections of the memory into the keys and values of every layer, one pair shared or one pair per layer."""

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


def listed_parameters(model, attribute):
    """Names of the parameters in what the modules of `model` list under `attribute`: `recurrence_parts`, which exist only
    because of the memory, or `adamw_parts`, whose matrices take neither Muon nor weight decay."""
    listed = []
    for path, module in model.named_modules():
        listed += [f'{path}.{part}'.lstrip('.') for part in getattr(module, attribute, ())]
    return {name for name, _ in model.named_parameters() if any(f'{name}.'.startswith(f'{part}.') for part in listed)}


def recurrence_parameters(model):
    """Names of the parameters that exist only because of T2MLR or LRT: what a retrofit adds to its base model."""
    return listed_parameters(model, 'recurrence_parts')


class LanguageModel(nn.Module):
    """What GPT and the LSTM share: from the top of the stack, which `hidden` makes, to logits or a loss."""

    scores_every_pass, softcap, summed_loss = False, None, summed_loss

    def __init__(self, config):
        super().__init__()
        config.check()
        self.config = config
        # Set by decoding and evaluation: ids (k,) that stand for no token; their logits are -inf.
        self.register_buffer('unknown_ids', None, persistent=False)

    def logits(self, y):
        """y (.., D), the top of the stack -> (.., vocab_size), in float32 or better."""
        logits = self.head(self.norm(y))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.unknown_ids is None else logits.index_fill(-1, self.unknown_ids, -math.inf)

    def token(self, tokens, state):
        """One token per row, tokens (B, 1), after what `state` holds: logits (B, 1, vocab_size)."""
        return self(tokens, schedule=SEQUENTIAL, state=state)

    def scored_passes(self, schedule, T):
        """The positions of each pass whose output is scored: all with gradient (LRT), or the merged result (T2MLR, plain)."""
        return [p.positions for p in schedule.passes(T) if p.with_grad] if self.scores_every_pass else [range(T)]

    def forward(
        self, tokens, targets=None, schedule=PARALLEL, recur_mask=None, counts=None, state=None, changes=None, logits_from=0
    ):
        """Runs `tokens` (B, T) under `schedule`, after what `state` holds if there is one (then without gradient).

        Without targets: logits (B, T, vocab_size) of the newest output at every position, or at those from logits_from on; with
        logits_from=None that output itself, (B, T, n_embd), from which `logits` makes them.
        With targets (B, T), -1 where nothing is scored: the loss, and the mean of each scored pass, (passes,). counts
        (passes,), on the host or not: scored positions of each pass in the whole step, when this batch is a part of it.
        recur_mask (B, T), bool: where False a token reads no memory. changes: a list that receives, for each pass of `jacobi`
        and `interleaved` after the initial one, the largest relative change of the span's output. Raises ValueError for T above
        block_size.
        """
        T = tokens.size(1)
        if T > self.config.block_size:
            raise ValueError(f'{T} tokens do not fit block_size={self.config.block_size}.')
        with torch.set_grad_enabled(torch.is_grad_enabled() and state is None):
            y, outputs = self.hidden(tokens, schedule, recur_mask, state, changes, targets is not None)
            if targets is None:
                return y if logits_from is None else self.logits(y[:, logits_from:])
            passes = self.scored_passes(schedule, T)
            outputs = outputs if self.scores_every_pass else [y]
            counts = count_scored(targets, passes) if counts is None else counts
            weights = schedule.weights(T) if self.scores_every_pass else (1.0,)
            return scored_loss(self, outputs, [targets[:, as_slice(p)] for p in passes], counts, weights)


class GPT(LanguageModel):
    """Prelude (layers below the span), span (layers that read or write the memory), coda (layers above it)."""

    recurrence_parts, adamw_parts = ('fusion', 'memory'), ('embed', 'value_embeds', 'head')
    solve_direct_path = staticmethod(solve_direct_path)

    def __init__(self, config):
        """Weights are allocated on the current default device and initialised, unless that is 'meta'."""
        super().__init__(config)
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
        self.softcap = 15.0 if config.family == 'nanochat' else None
        self.eps = config.norm_eps if config.family == 'llama' else None
        self.stack, self.source, self.memory_dim = config.stack, config.source, config.n_embd
        self.scores_every_pass = config.recurrence == 'lrt'
        # Set by training: a layer keeps its input and runs again in the backward; a masked pass takes FlexAttention.
        self.activation_checkpointing = self.flex = False
        self.masks = Masks()
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
        """Compiles the repeated block, the fusion, the scan and the loss, once each; parameter names stay as they are."""
        # One graph for each shape of pass, with and without gradient: a few more than the eight at which torch gives up.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for module in (*self.blocks, *([self.fusion] if self.fusion is not None else [])):
            module.compile(dynamic=False)
        self.solve_direct_path = torch.compile(solve_direct_path, dynamic=False)
        self.summed_loss = torch.compile(self.summed_loss, dynamic=False)

    def compile_token(self):
        """Compiles `token` into one graph of the whole model, on CUDA one CUDA graph; prompts are not compiled."""
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
            torch.zeros(B, 1, self.memory_dim, dtype=weight.dtype, device=weight.device),
            torch.zeros(1, dtype=torch.long, device=weight.device),
            start,
            start.clone(),
        )

    def site(self, tokens, recur_mask, state):
        """All positions of `tokens` (B, T), after what `state` holds."""
        c = self.config
        T = tokens.size(1)
        slots = torch.arange(T, device=tokens.device)
        reads = recurs = None if recur_mask is None else recur_mask.unsqueeze(-1)
        first = mask = None
        opens = tokens == c.reset_token if c.reset_token >= 0 else None
        if opens is not None:
            reads = ~opens.unsqueeze(-1) if reads is None else reads & ~opens.unsqueeze(-1)
        if state is not None:
            slots = state.position + slots
            begun = (slots > state.start[:, None]).unsqueeze(-1)
            reads = begun if reads is None else reads & begun
            first = state.first[:, None].expand(-1, T)
        if c.document_attention:
            first = torch.where(opens, slots, torch.zeros_like(tokens) if first is None else first).cummax(1).values
        if first is not None:
            mask = self.mask_maker(T, state)(range(T), slots, first)
        x0 = self.norm_embed(self.embed(tokens))
        values = [self.value_embeds[str(i)](tokens) if str(i) in self.value_embeds else None for i in range(c.n_layer)]
        cos, sin = (None if t is None else t[slots].unsqueeze(-2) for t in (self.cos, self.sin))
        return Site(None if state is None else slots, x0, values, cos, sin, first, mask, recurs, reads)

    def mask_maker(self, T, state):
        """The function that gives a pass its mask, from its positions, their slots and the oldest slots that they see."""
        n_keys, flex = (T, self.flex) if state is None else (state.kv[0][0].size(2), False)
        return functools.partial(self.masks.get_mask, n_keys=n_keys, dtype=working_dtype(self.embed.weight), flex=flex)

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
        """One pass over the span at `site`: h (B, n, D) from the prelude, m (B, n, D) the memory of the tokens before, 0 where
        nothing is read; None in the initial pass. Returns the span's output and the source of the memory written, (B, n, D)."""
        if self.fusion is None:
            y, source = self.run(self.config.span, h, site, kv, m)
        else:
            if m is not None:
                m = m.detach() if self.config.detach_memory else m
                h = self.fusion(h, local, m, site.recurs)
            y, source = self.run(self.config.span, h, site, kv)
            if m is not None and self.config.cache_residual != 'off':
                source = source + (m.detach() if self.config.cache_residual == 'detached' else m)
        return y, source

    def scan(self, site):
        """What solves the direct path of the memory over the positions of `site`; None where the memory has no such path."""
        if not self.config.has_direct_path:
            return None
        c, detached = 1.0, self.config.detach_memory or self.config.cache_residual == 'detached'
        if self.fusion is None:  # what the injections leave in the stream at the source, layer by layer
            c, detached = 0.0, False
            for block in (self.blocks[layer] for layer in self.stack[: self.source + 1]):
                c = (c if block.alpha is None else block.alpha * c) + block.gamma
        return Scan(c, site.reads, detached, self.eps, self.solve_direct_path)

    def hidden(self, tokens, schedule, recur_mask=None, state=None, changes=None, scored=False):
        """Prelude, passes, coda: the top of the stack at every position, (B, T, D), and if they are `scored` the outputs of the
        passes with gradient. Arguments as in `forward`."""
        c, T = self.config, tokens.size(1)
        site = self.site(tokens, recur_mask, state)
        kv = [None] * len(self.stack) if state is None else state.kv
        y, outputs = self.run(range(c.span.start), site.x0, site, kv)[0], []
        if c.recurrence != 'none':
            reads_from = 0
            if recur_mask is not None and recur_mask.device.type == 'cpu':  # on a GPU the host would have to wait
                reads_from = int(recur_mask.any(0).int().argmax())
            convergence = Convergence(schedule, T, changes is not None, rounding(y))
            passes, scan = schedule.passes(T, reads_from), self.scan(site) if schedule.scan else None
            y, memory, outputs = self.solve(y, site, passes, kv, state, convergence, scan, scored)
            if state is not None:
                state.memory.copy_(memory[:, -1:])
            if changes is not None:
                changes += convergence.changes
        y, _ = self.run(range(c.span.stop, len(self.stack)), y, site, kv)
        if state is not None:
            state.position += T
            # A document token in the padding opens no document.
            state.first.copy_(torch.maximum(site.first[:, -1], state.start))
        return y, outputs

    def solve(self, h, site, passes, kv, state, convergence, scan, scored):
        """Runs `passes` over the span: h (B, T, D) -> the newest output of every position (B, T, D), the memory (B, T + 1, D)
        shifted, so that slot p is what position p reads, and if they are `scored` the outputs of the passes with gradient."""
        B, T, _ = h.shape
        before = h.new_zeros(B, 1, self.memory_dim) if state is None else state.memory
        memory, newest, outputs = F.pad(before, (0, 0, 0, T)), None, []  # what is not yet written reads as 0
        if passes[0].reads_memory:
            newest = torch.zeros_like(h)
            if state is None:
                kv[:] = self.new_kv(B, T)
        make_mask = self.mask_maker(T, state)
        local = self.fusion.local(h) if self.fusion is not None and passes[-1].reads_memory else None
        for p in passes:
            todo = convergence.moving(p)
            with torch.set_grad_enabled(torch.is_grad_enabled() and p.with_grad):
                if todo:
                    x, part_local, part = take(h, todo), take(local, todo), site.at(todo, make_mask)
                    m = memory[:, as_slice(todo)] if p.reads_memory else None
                    if m is not None and part.reads is not None:
                        m = torch.where(part.reads, m, 0.0)
                    y, source = self.span(x, part_local, part, kv, m)
                convergence.add(todo, take(newest, todo), y)
                if todo:
                    in_place = not (torch.is_grad_enabled() or outputs)  # a scored output stays as it is
                    written, at = scan(todo, source, m, memory) if scan else (norm_memory(source, self.eps), todo)
                    newest = y if len(todo) == T else scatter(newest, todo, y, in_place)
                    shifted = range(at.start + 1, at.stop + 1, at.step)
                    memory = torch.cat((before, written), 1) if len(at) == T else scatter(memory, shifted, written, in_place)
                if p.with_grad and scored:
                    outputs.append(y if todo == p.positions else take(newest, p.positions))
        return newest, memory, outputs


class LSTM(LanguageModel):
    """The recurrent baseline: embedding, n_layer LSTM layers of width n_embd, head. Its layers are recurrent
    themselves, so it ignores schedules and recur_mask."""

    adamw_parts = ('embed', 'head')

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.lstm = nn.LSTM(config.n_embd, config.n_embd, config.n_layer, batch_first=True)
        self.norm = nn.Identity()
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def compile(self):
        """Nothing to compile: the layers are one fused call already."""

    compile_token = compile

    def new_state(self, B, start=None, slots=0):
        weight = self.embed.weight
        start = torch.zeros(B, dtype=torch.long, device=weight.device) if start is None else start.to(weight.device)
        memory = torch.zeros(B, 2, self.config.n_layer, self.config.n_embd, dtype=weight.dtype, device=weight.device)
        return State([], memory, torch.zeros(1, dtype=torch.long, device=weight.device), start, start)

    def hidden(self, tokens, schedule, recur_mask=None, state=None, changes=None, scored=False):
        """The top of the stack, (B, T, D), and no outputs of passes."""
        if state is None:
            return self.lstm(self.embed(tokens))[0], []
        steps = []
        for t in range(tokens.size(1)):
            begun = state.position + t > state.start  # padding before a row's first token leaves nothing
            memory = torch.where(begun[:, None, None, None], state.memory, 0.0).permute(1, 2, 0, 3).contiguous()
            y, memory = self.lstm(self.embed(tokens[:, t : t + 1]), memory.unbind())
            state.memory.copy_(torch.stack(memory).permute(2, 0, 1, 3))
            steps.append(y)
        state.position += tokens.size(1)
        return torch.cat(steps, 1), []


def build(config):
    """The model that a GPTConfig describes."""
    return LSTM(config) if config.architecture == 'lstm' else GPT(config)
