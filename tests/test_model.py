"""Laws of the model, over random cases in float64: a token-by-token oracle written from the equations, the exact prefix,
causality, documents, decoding, identity at initialisation, gradients, the loss, numerics, and what a config refuses."""

import copy
import itertools
import math
import random
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from configurator import ConfigError
from model import GPTConfig, build, recurrence_parameters
from schedule import SEQUENTIAL, Pass, Schedule
from support.accounting import count_flops, count_parameters
from support.loss import count_scored

torch.set_num_threads(1)

FAMILIES = ('nanochat', 'llama')
RECURRENCES = ('none', 't2mlr', 'lrt')
SCHEDULES = ('parallel', 'jacobi', 'interleaved', 'chunked', 'sequential')
VOCAB, BLOCK, RESET = 7, 32, 2

each_family = pytest.mark.parametrize('family', FAMILIES)
each_recurrence = pytest.mark.parametrize('recurrence', RECURRENCES)
each_memory = pytest.mark.parametrize('recurrence', RECURRENCES[1:])
each_schedule = pytest.mark.parametrize('name', SCHEDULES)


def seeds(n):
    return pytest.mark.parametrize('seed', range(n))


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Random cases


def draw_config(rng, **fixed):
    n_layer = fixed.get('n_layer') or rng.randint(1, 4)
    n_head = rng.choice((1, 2, 4))
    l_start = rng.randrange(n_layer)
    projection = rng.choice(('shared', 'layerwise', 'none'))
    reset = fixed.get('reset_token', rng.choice((-1, RESET)))
    drawn = {
        'family': rng.choice(FAMILIES),
        'vocab_size': VOCAB,
        'block_size': BLOCK,
        'n_layer': n_layer,
        'n_head': n_head,
        'n_kv_head': rng.choice([0] + [g for g in (1, 2, 4) if n_head % g == 0]),
        'n_embd': n_head * rng.choice((2, 4, 6)),
        'n_hidden': rng.choice((0, 5, 12)),
        'positional': rng.choice(('rope', 'rope', 'none')),
        'rope_base': rng.choice((100.0, 10000.0, 100000.0)),
        'norm_eps': rng.choice((1e-5, 1e-2)),
        'value_embeddings': rng.choice(('none', 'alternate', 'all')),
        'l_start': l_start,
        'l_end': rng.randrange(l_start, n_layer),
        'cache_residual': rng.choice(('on', 'on', 'detached', 'off')),
        'n_loop': rng.choice((1, 1, 2, 3)),
        'detach_memory': rng.random() < 0.2,
        'source_layer': rng.randrange(-1, n_layer),
        'memory_projection': projection,
        'residual_injection': projection == 'none' or rng.random() < 0.7,
        'identity_init': rng.random() < 0.2,
        'reset_token': reset,
        'document_attention': reset >= 0 and rng.random() < 0.5,
    }
    return GPTConfig(**drawn | fixed)


@torch.no_grad()
def draw_model(seed, **fixed):
    """A model in float64 of a random config, with no parameter at a special value such as 0."""
    torch.manual_seed(seed)
    model = build(draw_config(random.Random(seed), **fixed)).double()
    for name, p in model.named_parameters():
        about_one = 'norm' in name or name.endswith('alpha')
        p.normal_(1.0 if about_one else 0.0, 0.3 if about_one else 0.7 if p.dim() < 2 else 1.2 / math.sqrt(p.size(1)))
        if name == 'head.weight':
            p.mul_(6)  # far enough for the softcap to matter
    return model


def draw_batch(seed, T=None, B=None):
    """tokens (B, T) with document starts, targets (B, T) with some -1, and recur_mask (B, T) of random runs, or None."""
    rng = random.Random(seed + 1000)
    torch.manual_seed(seed + 1000)
    B, T = B or rng.randint(1, 3), T or rng.randint(1, 11)
    tokens = torch.randint(VOCAB, (B, T))
    targets = torch.where(torch.rand(B, T) < 0.3, -1, torch.randint(VOCAB, (B, T)))
    if rng.random() < 0.3:
        return tokens, targets, None
    flips = (torch.rand(B, T) < 0.3).cumsum(1) + torch.randint(2, (B, 1))
    recur_mask = flips % 2 == 0
    if rng.random() < 0.5:
        recur_mask[:, : rng.randint(0, T)] = False
    return tokens, targets, recur_mask


def draw_schedule(seed, T, name):
    rng = random.Random(seed + 2000)
    d_forward, n_subsets = rng.randint(0, 4), rng.randint(1, T + 2)
    d_backward = rng.randint(1, d_forward + 1)
    n_sweeps = rng.choice((1, 1, 2, 3))
    scored = {'jacobi': d_backward, 'interleaved': n_subsets * n_sweeps + 1}.get(name, 1)
    weights = tuple(rng.choice((0.5, 1.0, 3.0)) for _ in range(scored)) if scored > 1 and rng.random() < 0.5 else ()
    chunk_size, scan = rng.randint(1, T + 1), name in ('jacobi', 'interleaved') and rng.random() < 0.5
    return Schedule(name, d_forward, d_backward, n_subsets, n_sweeps, scan, chunk_size=chunk_size, pass_weights=weights)


def gradients(model, loss):
    """{name: gradient}, zeros where the loss does not depend on a parameter."""
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    return dict(zip(names, grads, strict=True))


def close_gradients(actual, expected, tolerance=1e-9):
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f'{name}: {m}'
        )


# The oracle: every equation again, one sequence, pass, token, layer and head at a time


def oracle_passes(schedule, T):
    """Each pass as (reads memory, positions, carries gradient)."""
    S, C, everywhere = schedule.n_subsets, schedule.chunk_size, list(range(T))
    if schedule.schedule == 'sequential':
        return [(True, [t], True) for t in everywhere]
    if schedule.schedule == 'chunked':
        chunks = [[t for t in everywhere if t // C == i] for i in range(T)]
        return [(True, chunk, True) for chunk in chunks if chunk]
    if schedule.schedule == 'interleaved':
        subsets = [[t for t in everywhere if t % S == i] for i in range(S)]
        return [(False, everywhere, True)] + [(True, subset, True) for subset in subsets if subset] * schedule.n_sweeps
    if schedule.schedule == 'jacobi':
        last = schedule.d_forward - schedule.d_backward
        return [(k > 0, everywhere, k > last) for k in range(schedule.d_forward + 1)]
    return [(False, everywhere, True)]


def oracle_row(c, W, tokens, recurs, schedule):
    """tokens, recurs: lists of T. -> [(positions, logits of each)] of the scored passes, logits (T, V), the last memory."""
    nanochat, lrt, t2mlr = c.family == 'nanochat', c.recurrence == 'lrt', c.recurrence == 't2mlr'
    T, D, H, G, L = len(tokens), c.n_embd, c.n_head, c.n_kv_head or c.n_head, c.n_layer
    d = D // H
    eps = torch.finfo(torch.float64).eps if nanochat else c.norm_eps
    opens = [c.reset_token >= 0 and token == c.reset_token for token in tokens]
    zero = torch.zeros(D, dtype=torch.float64)
    looped = list(range(c.l_start, c.l_end + 1)) * c.n_loop
    stack = [*range(c.l_start), *looped, *range(c.l_end + 1, L)]
    keys, values = [[None] * T for _ in stack], [[None] * T for _ in stack]

    def norm(x, weight=None):
        x = x / ((x * x).sum() / x.numel() + eps).sqrt()
        return x if nanochat or weight is None else W[weight] * x

    def turn(t):
        matrix = torch.eye(d, dtype=torch.float64)
        for i in range(d // 2 if c.positional == 'rope' else 0):
            angle = t * c.rope_base ** (-2 * i / d)
            matrix[i, i] = matrix[i + d // 2, i + d // 2] = math.cos(angle)
            matrix[i, i + d // 2], matrix[i + d // 2, i] = -math.sin(angle), math.sin(angle)
        return matrix

    def layer(depth, t, x, m):
        i = stack[depth]
        b = f'blocks.{i}.'
        if nanochat:
            x = W[b + 'alpha'] * x + W[b + 'beta'] * x0[t]
        if lrt and c.residual_injection:
            x = x + W[b + 'gamma'] * m
        a = norm(x, b + 'norm_attention.weight')
        q, k, v = ((W[f'{b}attention.{n}.weight'] @ a).view(-1, d) for n in 'qkv')
        if lrt and c.memory_projection != 'none':
            pair = i if c.memory_projection == 'layerwise' else 0
            gates = 2 * torch.sigmoid(W[b + 'attention.gate_memory.weight'] @ a)
            loc, rec = gates[:G, None], gates[G:, None]
            k = loc * k + rec * (W[f'memory.w_k.{pair}.weight'] @ m).view(G, d)
            v = loc * v + rec * (W[f'memory.w_v.{pair}.weight'] @ m).view(G, d)
        if c.value_embeddings == 'all' or (c.value_embeddings == 'alternate' and i % 2 == (L - 1) % 2):
            gate = 2 * torch.sigmoid(W[b + 'attention.gate_ve.weight'] @ a)
            v = v + gate[:, None] * W[f'value_embeds.{i}.weight'][tokens[t]].view(G, d)
        q, k = [turns[t] @ head for head in q], [turns[t] @ head for head in k]
        if nanochat:
            q, k = [norm(head) for head in q], [norm(head) for head in k]
        keys[depth][t], values[depth][t] = k, v
        oldest = max([s for s in range(t + 1) if opens[s]], default=0) if c.document_attention else 0
        seen, heads = range(oldest, t + 1), []
        for h in range(H):
            g = h // (H // G)
            scores = torch.stack([(q[h] * keys[depth][s][g]).sum() for s in seen]) / math.sqrt(d)
            shares = scores.exp() / scores.exp().sum()
            heads.append(sum(share * values[depth][s][g] for share, s in zip(shares, seen, strict=True)))
        x = x + W[b + 'attention.o.weight'] @ torch.cat(heads)
        a = norm(x, b + 'norm_mlp.weight')
        up = W[b + 'mlp.up.weight'] @ a
        if nanochat:
            hidden = torch.clamp(up, min=0) ** 2
        else:
            gate = W[b + 'mlp.gate.weight'] @ a
            hidden = gate * torch.sigmoid(gate) * up
        return x + W[b + 'mlp.down.weight'] @ hidden

    def phi(h, R):
        both = torch.cat((h, R))
        cur = torch.sigmoid(W['fusion.f_cur.weight'] @ both + W['fusion.f_cur.bias'])
        rec = torch.sigmoid(W['fusion.f_rec.weight'] @ both + W['fusion.f_rec.bias'])
        fused = torch.tanh(W['fusion.gamma_rec']) * rec * (W['fusion.w_rec.weight'] @ R)
        return h + torch.tanh(W['fusion.gamma_cur']) * cur * h + fused

    def logits(x):
        x = (W['head.weight'] if nanochat else W['embed.weight']) @ norm(x, 'norm.weight')
        return 15 * torch.tanh(x / 15) if nanochat else x

    turns = [turn(t) for t in range(T)]
    x0 = [W['embed.weight'][token] for token in tokens]
    x0 = [norm(x) for x in x0] if nanochat else x0
    source = [depth for depth, i in enumerate(stack) if i == (L - 1 if c.source_layer < 0 else c.source_layer)][-1]
    first, last = {'t2mlr': (c.l_start, c.l_start + len(looped) - 1), 'lrt': (0, len(stack) - 1), 'none': (0, -1)}[c.recurrence]
    h = []
    for t in range(T):
        h.append(x0[t])
        for i in range(first):
            h[t] = layer(i, t, h[t], None)

    newest, memory, scored = list(h), [None] * T, []
    sources, have_read = [None] * T, [zero] * T
    scans = schedule.scan and (c.residual_injection if lrt else c.cache_residual != 'off')
    share = 1.0
    if scans and lrt:
        injected = stack[: source + 1]
        share = sum(
            W[f'blocks.{i}.gamma'] * math.prod([W[f'blocks.{j}.alpha'] for j in injected[depth + 1 :]] if nanochat else [])
            for depth, i in enumerate(injected)
        )

    def solve_direct_path(start):
        """The memories from `start` on, once more: each token adds to what it has read what it should have read since."""
        known = zero if start == 0 or memory[start - 1] is None else memory[start - 1]
        late = known - have_read[start]
        for t in range(start, T):
            keeps = recurs[t] and not opens[t] and t > 0
            change = late.detach() if t2mlr and (c.detach_memory or c.cache_residual == 'detached') else late
            memory[t] = norm(sources[t] + share * change) if keeps else norm(sources[t])
            if t + 1 < T:
                size = ((sources[t] ** 2).sum() / D + eps).sqrt()
                kept = torch.clamp(share / size, -1.0, 1.0) if keeps else 0.0
                late = norm(sources[t]) - have_read[t + 1] + kept * late

    for reads, positions, graded in oracle_passes(schedule, T) if lrt or t2mlr else []:
        before = list(memory)  # a pass reads what stood when it began
        with torch.set_grad_enabled(graded):
            for t in positions:
                m = zero if t == 0 or opens[t] or before[t - 1] is None else before[t - 1]
                m = m.detach() if t2mlr and c.detach_memory else m
                reading = reads and recurs[t]
                x = phi(h[t], m) if t2mlr and reading else h[t]
                written = None
                for i in range(first, last + 1):
                    x = layer(i, t, x, m if reading else zero)
                    written = x if i == (source if lrt else last) else written
                if t2mlr and reading and c.cache_residual != 'off':
                    written = written + (m.detach() if c.cache_residual == 'detached' else m)
                newest[t], memory[t], sources[t] = x, norm(written), written
                have_read[t] = m if reading else zero
            if scans:
                solve_direct_path(positions[0])
        if lrt and graded:
            scored.append((positions, torch.stack([logits(newest[t]) for t in positions])))
    if not lrt:
        for t in range(T):
            for i in range(last + 1, len(stack)):
                newest[t] = layer(i, t, newest[t], None)
    final = torch.stack([logits(x) for x in newest])
    return scored if lrt else [(list(range(T)), final)], final, memory[-1]


def oracle(model, tokens, recur_mask, schedule):
    W = dict(model.named_parameters())
    recurs = torch.ones_like(tokens) if recur_mask is None else recur_mask
    rows = [oracle_row(model.config, W, *pair, schedule) for pair in zip(tokens.tolist(), recurs.tolist(), strict=True)]
    passes, final, memory = zip(*rows, strict=True)
    scored = [(group[0][0], torch.stack([logits for _, logits in group])) for group in zip(*passes, strict=True)]
    return scored, torch.stack(final), memory


def oracle_loss(scored, targets, schedule):
    """The weighted mean over passes of the mean over their scored positions, and those means (0 where there are none).
    schedule: whose pass_weights count, or None. A weight belongs to its sweep and subset, whichever other subsets are empty."""
    means, total, norm = [], 0.0 * scored[0][1].sum(), 0.0
    weights, seen = schedule.pass_weights if schedule else (), []
    for number, (positions, logits) in enumerate(scored):
        losses = [
            -logits[b, j].log_softmax(-1)[targets[b, t]]
            for b in range(targets.size(0))
            for j, t in enumerate(positions)
            if targets[b, t] >= 0
        ]
        means.append(float(torch.stack(losses).detach().mean()) if losses else 0.0)
        if schedule and schedule.schedule == 'interleaved' and number:
            number = 1 + seen.count(positions) * schedule.n_subsets + positions[0]
            seen.append(positions)
        if losses:
            weight = weights[number] if weights else 1.0
            total, norm = total + weight * sum(losses) / len(losses), norm + weight
    return total / (norm or 1.0), means


@each_schedule
@each_recurrence
@each_family
@seeds(3)
def test_model_equals_the_oracle(seed, family, recurrence, name):
    """Logits, loss, the loss of each pass and the gradient of every parameter, under every schedule."""
    seed = 1000 * seed + 100 * SCHEDULES.index(name) + 10 * RECURRENCES.index(recurrence) + FAMILIES.index(family)
    model = draw_model(seed, family=family, recurrence=recurrence)
    tokens, targets, recur_mask = draw_batch(seed)
    schedule = draw_schedule(seed, tokens.size(1), name)
    scored, logits, memory = oracle(model, tokens, recur_mask, schedule)
    close(model(tokens, schedule=schedule, recur_mask=recur_mask), logits)
    loss, means = model(tokens, targets, schedule, recur_mask)
    expected, expected_means = oracle_loss(scored, targets, schedule if recurrence == 'lrt' else None)
    close(loss, expected)
    close(means, torch.tensor(expected_means, dtype=torch.float64))
    close_gradients(gradients(model, loss), gradients(model, expected))
    if recurrence != 'none':
        state = model.new_state(tokens.size(0))
        close(model(tokens, schedule=schedule, recur_mask=recur_mask, state=state), logits.detach())
        close(state.memory[:, 0], torch.stack(memory).detach())


# Exact prefix


@each_memory
@each_family
@seeds(5)
@torch.no_grad()
def test_exact_prefix(seed, family, recurrence):
    model = draw_model(seed, family=family, recurrence=recurrence)
    rng = random.Random(seed)
    T = rng.choice((rng.randint(2, 7), rng.randint(8, 20)))
    tokens, _, recur_mask = draw_batch(seed, T)
    exact = model(tokens, schedule=SEQUENTIAL, recur_mask=recur_mask)
    for k in {0, 1, 2, T // 2, T - 1}:
        for d_backward, scan in itertools.product({1, 1 + k // 2, k + 1}, (False, True)):
            logits = model(tokens, schedule=Schedule('jacobi', k, d_backward, scan=scan), recur_mask=recur_mask)
            prefix = k + (recurrence == 'lrt')
            close(logits[:, :prefix], exact[:, :prefix])
    everywhere = [Schedule('jacobi', T + extra, d_backward) for extra in (0, 3) for d_backward in (1, 2, T + 1)]
    everywhere += [Schedule('interleaved', n_subsets=T), Schedule('interleaved', n_subsets=T + 3)]
    everywhere += [replace(schedule, scan=True) for schedule in everywhere]
    for schedule in everywhere + [Schedule('chunked', chunk_size=1)]:
        close(model(tokens, schedule=schedule, recur_mask=recur_mask), exact)


@each_memory
@seeds(8)
def test_passes_left_out_change_nothing(seed, recurrence, monkeypatch):
    """Where the first columns read no memory, jacobi recomputes only what still moves: equal to recomputing all of it."""
    model = draw_model(seed, recurrence=recurrence)
    rng = random.Random(seed)
    T = rng.choice((rng.randint(2, 7), rng.randint(8, 15), rng.randint(16, BLOCK)))
    tokens, targets, _ = draw_batch(seed, T)
    recur_mask = torch.rand(tokens.shape) < 0.7
    recur_mask[:, : rng.randint(0, T)] = False
    k = rng.randint(1, T)
    schedule = Schedule('jacobi', k, rng.randint(1, k + 1), scan=seed % 2 > 0)
    loss, _ = model(tokens, targets, schedule, recur_mask)
    fewer = gradients(model, loss)
    first = k + 1 - schedule.d_backward
    passes = [Pass(range(T), number > 0, number >= first) for number in range(k + 1)]
    monkeypatch.setattr(Schedule, 'passes', lambda self, T, reads_from=0: passes)
    full, _ = model(tokens, targets, schedule, recur_mask)
    close(loss, full)
    close_gradients(fewer, gradients(model, full))


# Causality and documents


@each_schedule
@each_recurrence
@seeds(4)
@torch.no_grad()
def test_causality(seed, recurrence, name):
    """Tokens after t never change outputs up to t, not by a bit."""
    model = draw_model(seed, recurrence=recurrence)
    tokens, _, recur_mask = draw_batch(seed, T=random.Random(seed).randint(2, 18))
    schedule = draw_schedule(seed, tokens.size(1), name)
    logits = model(tokens, schedule=schedule, recur_mask=recur_mask)
    for t in {0, tokens.size(1) // 2, tokens.size(1) - 2}:
        changed = tokens.clone()
        changed[:, t + 1 :] = (tokens[:, t + 1 :] + torch.randint(1, VOCAB, tokens[:, t + 1 :].shape)) % VOCAB
        again = model(changed, schedule=schedule, recur_mask=recur_mask)
        assert torch.equal(again[:, : t + 1], logits[:, : t + 1])
        assert not torch.equal(again, logits)


@pytest.mark.parametrize('document_attention', (True, False))
@each_schedule
@each_recurrence
@seeds(3)
@torch.no_grad()
def test_documents_share_nothing(seed, recurrence, name, document_attention):
    """What stands before a document changes none of its bits; attention, where it is not cut, is silenced by its weights."""
    fixed = {'recurrence': recurrence, 'reset_token': RESET, 'document_attention': document_attention}
    model = draw_model(seed, **fixed)
    tokens, _, recur_mask = draw_batch(seed, T=random.Random(seed).randint(3, 18))
    schedule = draw_schedule(seed, tokens.size(1), name)
    if not document_attention:
        for block in model.blocks:
            block.attention.o.weight.zero_()
    for start in {1, tokens.size(1) // 2, tokens.size(1) - 1}:
        tokens[:, start] = RESET
        other = tokens.clone()
        other[:, :start] = torch.randint(VOCAB, (tokens.size(0), start))
        logits, again = (model(x, schedule=schedule, recur_mask=recur_mask) for x in (tokens, other))
        assert torch.equal(logits[:, start:], again[:, start:])


@each_schedule
@each_memory
@seeds(3)
@torch.no_grad()
def test_a_masked_token_stays_masked_at_a_document_start(seed, recurrence, name):
    """With every document start masked, naming the reset token makes no difference."""
    model = draw_model(seed, recurrence=recurrence, reset_token=RESET, document_attention=False)
    plain = build(replace(model.config, reset_token=-1)).double()
    plain.load_state_dict(model.state_dict())
    tokens, _, recur_mask = draw_batch(seed, T=9)
    recur_mask = tokens != RESET if recur_mask is None else recur_mask & (tokens != RESET)
    schedule = draw_schedule(seed, 9, name)
    logits, again = (m(tokens, schedule=schedule, recur_mask=recur_mask) for m in (model, plain))
    assert torch.equal(logits, again)


# Decoding


def exact_schedules(n):
    """Schedules that find the sequential result over n new tokens."""
    return [
        SEQUENTIAL,
        Schedule('jacobi', n, 1),
        Schedule('jacobi', n + 1, n),
        Schedule('jacobi', n, 1, scan=True),
        Schedule('interleaved', n_subsets=n),
        Schedule('interleaved', n_subsets=n, scan=True),
        Schedule('chunked', chunk_size=1),
    ]


def decode(model, tokens, recur_mask, state, rng, longest):
    """Logits of `tokens` in pieces of random length, each under a random exact schedule."""
    pieces, t = [], 0
    while t < tokens.size(1):
        n = rng.randint(1, min(longest, tokens.size(1) - t))
        mask = None if recur_mask is None else recur_mask[:, t : t + n]
        pieces.append(model(tokens[:, t : t + n], schedule=rng.choice(exact_schedules(n)), recur_mask=mask, state=state))
        t += n
    return torch.cat(pieces, 1)


def draw_decoder(seed, recurrence):
    if recurrence == 'lstm':
        return draw_model(seed, architecture='lstm', recurrence='none', reset_token=-1, n_loop=1, document_attention=False)
    return draw_model(seed, recurrence=recurrence)


@pytest.mark.parametrize('recurrence', (*RECURRENCES, 'lstm'))
@seeds(8)
def test_decoding_equals_the_sequential_schedule(seed, recurrence):
    model, rng = draw_decoder(seed, recurrence), random.Random(seed)
    tokens, _, recur_mask = draw_batch(seed, T=rng.randint(2, 14))
    B, T = tokens.shape
    exact = model(tokens, schedule=SEQUENTIAL, recur_mask=recur_mask).detach()
    whole = model.new_state(B)
    logits = model(tokens, schedule=SEQUENTIAL, recur_mask=recur_mask, state=whole)
    assert not logits.requires_grad
    close(logits, exact)
    for longest in (1, 5):
        state = model.new_state(B)
        cut = rng.randint(1, T - 1)
        masks = (None, None) if recur_mask is None else (recur_mask[:, :cut], recur_mask[:, cut:])
        close(decode(model, tokens[:, :cut], masks[0], state, rng, longest), exact[:, :cut])
        saved = copy.deepcopy(state)
        model(torch.randint(VOCAB, (B, 3)), state=state)  # leaves the copy as it is
        close(decode(model, tokens[:, cut:], masks[1], saved, rng, longest), exact[:, cut:])
        close(saved.memory, whole.memory)


@pytest.mark.parametrize('recurrence', (*RECURRENCES, 'lstm'))
@seeds(8)
def test_rows_of_unequal_prompts_equal_each_row_alone(seed, recurrence):
    """Left padding of any tokens, an empty prompt among them, then further tokens: logits and memories."""
    model, rng = draw_decoder(seed, recurrence), random.Random(seed)
    lengths = [0, 1, 3, 7]
    rng.shuffle(lengths)
    new = 5
    tokens, _, recur_mask = draw_batch(seed, T=7 + new, B=len(lengths))
    start = torch.tensor([7 - n for n in lengths])
    for longest in (1, 7):
        state = model.new_state(len(lengths), start)
        logits = decode(model, tokens, recur_mask, state, rng, longest)
        for row, s in enumerate(start.tolist()):
            mask = None if recur_mask is None else recur_mask[row : row + 1, s:]
            alone = model.new_state(1)
            expected = model(tokens[row : row + 1, s:], schedule=SEQUENTIAL, recur_mask=mask, state=alone)
            close(logits[row : row + 1, s:], expected)
            at = slice(row, row + 1)
            close(state.memory[at], alone.memory)


@each_recurrence
@torch.no_grad()
def test_one_forward_of_each_layer_for_each_decoded_token(recurrence):
    model = draw_model(0, recurrence=recurrence, n_layer=3)
    calls = []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, i=i: calls.append(i))
    state = model.new_state(2)
    model(torch.randint(VOCAB, (2, 4)), schedule=SEQUENTIAL, state=state)
    for _ in range(5):
        calls.clear()
        model(torch.randint(VOCAB, (2, 1)), schedule=SEQUENTIAL, state=state)
        assert calls == [0, 1, 2]


# Identity at initialisation


@each_schedule
@each_memory
@each_family
@seeds(2)
@torch.no_grad()
def test_a_retrofit_starts_as_its_base_model(seed, family, recurrence, name):
    """T2MLR with gammas at 0 and LRT with identity_init are the plain transformer, under every schedule and in decoding."""
    seed = 10 * seed + SCHEDULES.index(name)
    config = draw_config(random.Random(seed), family=family, recurrence=recurrence, identity_init=True)
    plain = draw_model(seed, **vars(replace(config, recurrence='none')))
    model = build(config).double()
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and missing and set(missing) <= recurrence_parameters(model)
    tokens, targets, recur_mask = draw_batch(seed)
    schedule = draw_schedule(seed, tokens.size(1), name)
    expected = plain(tokens)
    close(model(tokens, schedule=schedule, recur_mask=recur_mask), expected, 1e-12)
    state = model.new_state(tokens.size(0))
    close(decode(model, tokens, recur_mask, state, random.Random(seed), 3), expected, 1e-12)
    if recurrence == 't2mlr':  # the gates' own weights do not matter then
        for p in (model.fusion.f_cur.weight, model.fusion.f_rec.bias, model.fusion.w_rec.weight):
            p.normal_()
        close(model(tokens, schedule=schedule, recur_mask=recur_mask), expected, 1e-12)


@each_family
@each_recurrence
def test_initial_values(family, recurrence):
    model = build(draw_config(random.Random(3), family=family, recurrence=recurrence, identity_init=False, gamma_init=0.25))
    c = model.config
    for name, p in model.named_parameters():
        value = {'gate_memory': 0, 'gate_ve': 0, 'alpha': 1, 'beta': 0.1, 'gamma': 0.1, 'gamma_cur': 0.25, 'gamma_rec': 0.25}
        part = name.removesuffix('.weight').split('.')[-1]
        if part in value:
            assert torch.equal(p, torch.full_like(p, value[part])), name
        elif 'norm' in name:
            assert torch.equal(p, torch.ones_like(p)), name
        elif name == 'fusion.w_rec.weight':
            assert torch.equal(p, torch.eye(c.n_embd))


# Gradients


@each_memory
@seeds(6)
def test_gradients_equal_backpropagation_through_time(seed, recurrence):
    """With every position scored, and for LRT no weight on the initial pass and, under jacobi, all of it on the last."""
    T = random.Random(seed).randint(2, 12)
    model = draw_model(seed, recurrence=recurrence)
    tokens, _, recur_mask = draw_batch(seed, T)
    targets = torch.randint(VOCAB, tokens.shape)

    def gradient(schedule):
        return gradients(model, model(tokens, targets, schedule, recur_mask)[0])

    exact = gradient(SEQUENTIAL)
    schedules = [Schedule('chunked', chunk_size=1)]
    if recurrence == 't2mlr':
        schedules += [Schedule('jacobi', T, T), Schedule('jacobi', T + 2, T + 1), Schedule('interleaved', n_subsets=T)]
    else:
        schedules += [Schedule('jacobi', T, T + 1, pass_weights=(0.0,) * T + (1.0,))]
        schedules += [Schedule('interleaved', n_subsets=T, pass_weights=(0.0,) + (1.0,) * T)]
    schedules += [replace(schedule, scan=True) for schedule in schedules[1:]]
    for schedule in schedules:
        close_gradients(gradient(schedule), exact)


def furthest(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@seeds(4)
def test_truncation_truncates(seed):
    """One pass with gradient is the last pass on a memory without gradient; each further one, up to T, adds to it."""
    fixed = {'cache_residual': 'on', 'detach_memory': False, 'reset_token': -1, 'document_attention': False}
    model = draw_model(seed, recurrence='t2mlr', **fixed)
    tokens, targets, _ = draw_batch(seed, T=8)

    def gradient(schedule):
        return gradients(model, model(tokens, targets, schedule)[0])

    one, two, all_passes = (gradient(Schedule('jacobi', 8, d_backward)) for d_backward in (1, 2, 9))
    model.config = replace(model.config, detach_memory=True)
    for d_backward in (1, 4, 9):
        close_gradients(gradient(Schedule('jacobi', 8, d_backward)), one)
    assert min(furthest(one, two), furthest(one, all_passes), furthest(two, all_passes)) > 1e-6


@each_memory
def test_passes_without_gradient_keep_nothing_for_it(recurrence):
    model = draw_model(5, recurrence=recurrence)
    tokens, targets, recur_mask = draw_batch(5, T=12)

    def kept(d_forward, d_backward):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.numel()) or t, lambda t: t):
            model(tokens, targets, Schedule('jacobi', d_forward, d_backward), recur_mask)
        return len(shapes), sum(shapes)

    assert kept(2, 2) == kept(5, 2) == kept(12, 2)
    assert kept(5, 1) < kept(5, 2) < kept(5, 6)


@seeds(3)
@each_schedule
@each_recurrence
def test_activation_checkpointing_changes_no_gradient(seed, recurrence, name):
    """Each layer that ran with gradient runs once more in the backward, on what it read then; no other does."""
    model = draw_model(seed, recurrence=recurrence)
    tokens, targets, recur_mask = draw_batch(seed)
    schedule = draw_schedule(seed, tokens.size(1), name)
    loss, means = model(tokens, targets, schedule, recur_mask)
    expected = gradients(model, loss)
    model.activation_checkpointing = True
    graded = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: graded.append(torch.is_grad_enabled()))
    again, again_means = model(tokens, targets, schedule, recur_mask)
    forward = len(graded)
    close(again, loss, 1e-12)
    close(again_means, means, 1e-12)
    close_gradients(gradients(model, again), expected, 1e-12)
    # A layer that the loss does not depend on, like those above the source in a pass that only writes memory, stays away.
    assert 0 < len(graded) - forward <= sum(graded[:forward]) and all(graded[forward:])
    with torch.no_grad():
        close(model(tokens, targets, schedule, recur_mask)[0], loss, 1e-12)


@each_memory
@each_family
def test_gradients_equal_finite_differences(family, recurrence):
    fixed = {'n_layer': 2, 'cache_residual': 'on', 'detach_memory': False, 'recurrence': recurrence, 'family': family}
    model = draw_model(7, residual_injection=True, **fixed)
    tokens, targets, recur_mask = draw_batch(7, T=6, B=2)
    schedules = [SEQUENTIAL, Schedule('jacobi', 3, 4), Schedule('interleaved', n_subsets=2), Schedule('chunked', chunk_size=2)]
    schedules += [replace(schedule, scan=True) for schedule in schedules[1:3]]
    for schedule in schedules:
        grads = gradients(model, model(tokens, targets, schedule, recur_mask)[0])
        step = {name: torch.randn_like(g) for name, g in grads.items()}
        losses = []
        for sign in (1, -2, 1):
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.add_(sign * 1e-6 * step[name])
                losses.append(model(tokens, targets, schedule, recur_mask)[0])
        slope = sum((g * step[name]).sum() for name, g in grads.items())
        torch.testing.assert_close((losses[0] - losses[1]) / 2e-6, slope, rtol=1e-5, atol=1e-7)


# Every variant that the config accepts

GRIDS = {
    'none': {},
    't2mlr': {
        'span': [(1, 1), (1, 2), (0, 2)],
        'cache_residual': ['on', 'detached', 'off'],
        'detach_memory': [False, True],
    },
    'lrt': {
        'source_layer': [0, 1, -1],
        'memory_projection': ['shared', 'layerwise', 'none'],
        'residual_injection': [True, False],
        'identity_init': [False, True],
    },
}
COMMON = {'n_loop': [1, 2], 'value_embeddings': ['none', 'alternate', 'all'], 'document_attention': [False, True]}


@each_family
@each_recurrence
def test_the_laws_hold_for_every_variant(recurrence, family):
    """The grid of all options: every schedule that is exact equals the sequential one, which equals decoding; under none does
    an output depend on a later token. What has no meaning is refused."""
    T, seed, refused = 5, 0, 0
    options = GRIDS[recurrence] | COMMON
    for values in itertools.product(*options.values()):
        variant = dict(zip(options, values, strict=True))
        variant['l_start'], variant['l_end'] = variant.pop('span', (1, 2))
        if variant.get('memory_projection') == 'none' and not variant['residual_injection']:
            with pytest.raises(ConfigError):
                GPTConfig(vocab_size=VOCAB, n_layer=3, recurrence='lrt', **variant).check()
            refused += 1
            continue
        fixed = {'family': family, 'recurrence': recurrence, 'n_layer': 3, 'n_embd': 8, 'n_head': 2, 'n_kv_head': 1}
        seed += 1
        model = draw_model(seed, **fixed | variant | {'reset_token': RESET, 'positional': 'rope'})
        tokens, _, recur_mask = draw_batch(seed, T, 2)
        later = tokens.clone()
        later[:, 3:] = (later[:, 3:] + 1) % VOCAB
        with torch.no_grad():
            exact = model(tokens, schedule=SEQUENTIAL, recur_mask=recur_mask)
            close(decode(model, tokens, recur_mask, model.new_state(2), random.Random(seed), 2), exact)
            for schedule in (
                Schedule('jacobi', T, 2),
                Schedule('interleaved', n_subsets=T),
                Schedule('interleaved', n_subsets=2, n_sweeps=T),
                Schedule('interleaved', n_subsets=2, n_sweeps=T, scan=True),
                Schedule('chunked', chunk_size=1),
            ):
                close(model(tokens, schedule=schedule, recur_mask=recur_mask), exact)
            for schedule in (
                Schedule('parallel'),
                Schedule('jacobi', 2, 1),
                Schedule('jacobi', 2, 1, scan=True),
                Schedule('interleaved', n_subsets=2),
                Schedule('interleaved', n_subsets=2, n_sweeps=2),
                Schedule('chunked', chunk_size=2),
            ):
                a, b = (model(x, schedule=schedule, recur_mask=recur_mask)[:, :3] for x in (tokens, later))
                assert torch.equal(a, b)
    assert refused == {'lrt': 72}.get(recurrence, 0)


# Fixed-point iterations that watch themselves


@each_memory
@each_family
@torch.no_grad()
def test_changes_are_those_of_the_span(family, recurrence):
    """The logged change of a pass is the largest relative move of the span's output at the positions that it recomputes."""
    for seed in range(6):
        model = draw_model(seed, family=family, recurrence=recurrence)
        tokens, _, recur_mask = draw_batch(seed, T=9, B=2)
        recorded, span = [], model.span

        def record(*given, span=span, recorded=recorded):
            y, written = span(*given)
            recorded.append(y.clone())  # later passes may write over it
            return y, written

        model.span = record
        schedules = [Schedule('jacobi', 5, d_backward) for d_backward in (1, 3, 6)]
        schedules += [Schedule('interleaved', n_subsets=S, n_sweeps=n) for S, n in ((2, 1), (3, 2), (20, 1))]
        schedules += [replace(schedules[seed], scan=True)]
        for schedule in schedules:
            recorded.clear()
            changes = []
            model(tokens, schedule=schedule, recur_mask=recur_mask, changes=changes)
            newest, expected = recorded[0].clone(), []
            passes = schedule.passes(9, int(recur_mask.any(0).int().argmax()))
            for (positions, *_), new in zip(passes[1:], recorded[1:], strict=True):
                old = newest[:, list(positions)]
                expected.append(((new - old).norm(dim=-1) / new.norm(dim=-1)).max())
                newest[:, list(positions)] = new
            assert len(changes) == len(expected)
            close(torch.stack(changes), torch.stack(expected))


@each_memory
@each_family
@torch.no_grad()
def test_sweeps_extend_the_exact_prefix_by_the_subsets(family, recurrence):
    """After k sweeps over S strided subsets the first k S positions equal sequential, whatever comes behind them; sweeps that
    settle within a tolerance of 0 reach all positions; a loose one leaves passes out only once all have moved less."""
    for seed in range(6):
        T, S = 11, 1 + seed
        model = draw_model(seed, family=family, recurrence=recurrence, gamma_init=0.5)
        tokens, _, recur_mask = draw_batch(seed, T, 2)
        exact = model(tokens, schedule=SEQUENTIAL, recur_mask=recur_mask)
        for k in range(1, -(-T // S) + 1):
            for scan in (False, True):
                schedule = Schedule('interleaved', n_subsets=S, n_sweeps=k, scan=scan)
                logits = model(tokens, schedule=schedule, recur_mask=recur_mask)
                close(logits[:, : k * S], exact[:, : k * S])
        changes = []
        schedule = Schedule('interleaved', n_subsets=S, n_sweeps=100, jacobi_tol=1e-3)
        model(tokens, schedule=schedule, recur_mask=recur_mask, changes=changes)
        below = [max(changes[i - S : i]) < 1e-3 for i in range(S, len(changes) + 1)]
        assert not any(below[:-1]) and (below[-1] or len(changes) == 100 * S)


@each_memory
@each_family
@torch.no_grad()
def test_scores_of_earlier_passes_outlive_later_ones(family, recurrence):
    """Without gradient buffers are written in place; every pass is scored as it was all the same."""
    schedules = [Schedule('interleaved', n_subsets=3), Schedule('interleaved', n_sweeps=3), Schedule('jacobi', 4, 3)]
    for seed, schedule in enumerate([*schedules, SEQUENTIAL, *(replace(schedule, scan=True) for schedule in schedules)]):
        model = draw_model(seed, family=family, recurrence=recurrence, gamma_init=0.5)
        tokens, targets, recur_mask = draw_batch(seed, 9, 2)
        with torch.enable_grad():
            expected = model(tokens, targets, schedule, recur_mask)
        for actual, wanted in zip(model(tokens, targets, schedule, recur_mask), expected, strict=True):
            close(actual, wanted.detach())


@each_memory
@torch.no_grad()
def test_a_tolerance_ends_the_passes_without_gradient(recurrence):
    """It leaves out passes only once they move less than it; with gradient all d_backward passes run; and what it saves costs
    no more than the tolerance promises. Where nothing has a gradient, no pass has to run."""
    for seed in range(8):
        model = draw_model(seed, recurrence=recurrence, cache_residual='off', gamma_init=0.0)
        tokens, targets, _ = draw_batch(seed, T=12, B=2)
        for p in model.parameters():
            p.mul_(0.5)  # so that the iteration contracts
        full, early, none = [], [], []
        a = model(tokens, schedule=Schedule('jacobi', 12, 2), changes=full)
        b = model(tokens, schedule=Schedule('jacobi', 12, 2, jacobi_tol=1e-3), changes=early)
        c = model(tokens, schedule=Schedule('jacobi', 12, 2, jacobi_tol=1e-300), changes=none)
        assert all(change >= 1e-3 for change in early[:-1]) and (early[-1] < 1e-3 or len(early) == len(full) == 12)
        close(early, full[: len(early)], 1e-3)  # what settled first is left as it is
        close(a, c)
        close(a, b, 0.1)
        with torch.enable_grad():
            graded = []
            model(tokens, targets, Schedule('jacobi', 12, 2, jacobi_tol=1e-3), changes=graded)
            assert len(graded) == min(len(early) + 2, 12)
        loss, means = model(tokens, targets, Schedule('jacobi', 12, 4, jacobi_tol=1e9))
        assert len(means) == (4 if recurrence == 'lrt' else 1) and loss.isfinite()


# FlexAttention


@pytest.mark.parametrize('T', (1, 127, 129, 137))
@pytest.mark.parametrize('document_attention', (False, True))
@pytest.mark.parametrize('name', ('interleaved', 'chunked'))
@each_memory
@pytest.mark.fault('lengths that are no multiple of a block', 'FlexAttention equals attention (CPU, forward)')
def test_flex_attention_is_attention(recurrence, name, document_attention, T):
    """Under its block masks, at lengths that are no multiple of a block, after a longer batch and before a shorter one: the
    logits of sdpa, documents and rows without a memory included. On CPU it has no backward."""
    fixed = dict(block_size=200, reset_token=RESET, document_attention=document_attention, n_layer=2)
    model = draw_model(T, recurrence=recurrence, **fixed)
    schedule = Schedule(name, n_subsets=3, chunk_size=50)
    for length in (T + 20, T, 1):
        tokens, _, recur_mask = draw_batch(T, T=length, B=2)
        tokens[0, -1] = RESET
        logits = []
        with torch.no_grad():
            for model.flex in (False, True):
                logits.append(model(tokens, schedule=schedule, recur_mask=recur_mask))
        close(*logits)


def test_flex_attention_over_many_blocks():
    """More than a thousand positions, and decoding, which keeps to sdpa."""
    model = draw_model(5, recurrence='lrt', block_size=1100, reset_token=RESET, document_attention=True, n_layer=2)
    tokens, _, _ = draw_batch(5, T=1025, B=1)
    schedule, logits = Schedule('interleaved', n_subsets=2), []
    with torch.no_grad():
        for model.flex in (False, True):
            logits.append(model(tokens, schedule=schedule))
            logits.append(model(tokens[:, :9], schedule=SEQUENTIAL, state=model.new_state(1)))
    close(logits[2], logits[0])
    assert torch.equal(logits[3], logits[1])


# Loss


@each_schedule
@each_recurrence
@seeds(2)
def test_parts_of_a_batch_add_up(seed, recurrence, name):
    """With `counts` of the whole batch, losses, means of passes and gradients of its parts sum to those of the whole."""
    model = draw_model(seed, recurrence=recurrence)
    tokens, targets, recur_mask = draw_batch(seed, T=9, B=5)
    schedule = draw_schedule(seed, 9, name)
    counts = count_scored(targets, model.scored_passes(schedule, 9))
    loss, means = model(tokens, targets, schedule, recur_mask)
    parts = []
    for rows in (slice(0, 1), slice(1, 3), slice(3, 5)):
        mask = None if recur_mask is None else recur_mask[rows]
        parts.append(model(tokens[rows], targets[rows], schedule, mask, counts))
    total = sum(part for part, _ in parts)
    close(total, loss)
    close(sum(m for _, m in parts), means)
    close_gradients(gradients(model, total), gradients(model, loss))


@each_schedule
@pytest.mark.parametrize('family', ('nanochat', 'llama'))
@pytest.mark.parametrize('recurrence', (*RECURRENCES, 'lstm'))
def test_loss_in_pieces_is_that_of_all_logits(recurrence, family, name, monkeypatch):
    """Logits of two positions at a time: the loss and gradients that plain autograd has from the logits of every pass."""
    model = draw_decoder(3, recurrence) if recurrence == 'lstm' else draw_model(3, recurrence=recurrence, family=family)
    tokens, targets, recur_mask = draw_batch(3, T=9)
    schedule = draw_schedule(3, 9, name)

    def loss_of_all(model, outputs, targets, counts, weights):
        means = [
            F.cross_entropy(model.logits(y).flatten(0, 1), t.flatten(), ignore_index=-1, reduction='sum') / n.clamp(min=1)
            for y, t, n in zip(outputs, targets, counts, strict=True)
        ]
        weights = torch.tensor(weights, dtype=torch.float64) * (counts > 0)
        return (torch.stack(means) * weights).sum() / weights.sum(), torch.stack(means)

    monkeypatch.setattr('support.loss.LOGITS_AT_ONCE', 2 * model.config.vocab_size)
    loss, means = model(tokens, targets, schedule, recur_mask)
    mine = gradients(model, 3 * loss)  # the gradient from above counts too
    with torch.no_grad():
        close(model(tokens, targets, schedule, recur_mask)[0], loss)
    monkeypatch.setattr('model.scored_loss', loss_of_all)
    plain, plain_means = model(tokens, targets, schedule, recur_mask)
    close(loss, plain)
    close(means, plain_means)
    close_gradients(mine, gradients(model, 3 * plain))


@each_recurrence
def test_no_logits_are_kept_for_the_backward(recurrence):
    """However many passes are scored, nothing that the backward needs is as large as the logits of one of them."""
    model, kept = draw_model(4, recurrence=recurrence, vocab_size=500), []
    tokens, targets, _ = draw_batch(4, T=12, B=6)
    schedule = Schedule('interleaved', n_subsets=3) if recurrence != 'none' else Schedule()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t):
        kept.append(weakref.ref(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss, _ = model(tokens, targets, schedule)
    alive = [*loss.grad_fn.gradients, *(t for r in kept if (t := r()) is not None)]
    sizes = [t.numel() for t in alive if t.untyped_storage().data_ptr() not in weights and t.shape != model.head.weight.shape]
    assert 0 < max(sizes) < 6 * 4 * 500


@each_schedule
@pytest.mark.parametrize('recurrence', (*RECURRENCES, 'lstm'))
def test_nothing_scored_is_no_loss(recurrence, name):
    model = draw_decoder(1, recurrence)
    tokens, targets, recur_mask = draw_batch(1, T=9)
    loss, means = model(tokens, torch.full_like(targets, -1), draw_schedule(1, 9, name), recur_mask)
    assert float(loss.detach()) == 0.0 and not means.any()
    assert all(not g.any() for g in gradients(model, loss).values())


@seeds(3)
def test_weights_of_passes(seed):
    """Weights count relative to each other, empty subsets take none, and an unscored pass gives its share to the others."""
    model = draw_model(seed, recurrence='lrt')
    T = 6
    tokens, targets, recur_mask = draw_batch(seed, T)
    targets[:, 1::2] = -1
    targets[:, 0] = 1

    def loss(n_subsets, weights):
        return model(tokens, targets, Schedule('interleaved', n_subsets=n_subsets, pass_weights=weights), recur_mask)

    value, means = loss(2, (1.0, 2.0, 5.0))
    assert means[2] == 0
    close(value, (means[0] + 2 * means[1]) / 3)
    close(loss(2, (10.0, 20.0, 50.0))[0], value)
    close(loss(3, ())[0], loss(3, (2.0,) * 4)[0])
    weights = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    close(loss(T, weights)[0], loss(T + 2, weights + (8.0, 9.0))[0])
    swept = Schedule('interleaved', n_subsets=T, n_sweeps=2, pass_weights=weights + weights[1:])
    wider = Schedule('interleaved', n_subsets=T + 1, n_sweeps=2, pass_weights=weights + (8.0,) + weights[1:] + (9.0,))
    close(*(model(tokens, targets, schedule, recur_mask)[0] for schedule in (swept, wider)))


@seeds(5)
def test_weights_on_empty_subsets_alone_are_refused(seed):
    """Where all weight lies on subsets beyond the end of a short sequence: a sentence, not a loss of 0."""
    rng = random.Random(seed)
    T, n_sweeps = rng.randint(1, 6), rng.randint(1, 3)
    S = T + rng.randint(1, 3)
    weights = [0.0, *([0.0] * T + [1.0] * (S - T)) * n_sweeps]
    model, (tokens, targets, recur_mask) = draw_model(seed, recurrence='lrt'), draw_batch(seed, T)
    schedule = Schedule('interleaved', n_subsets=S, n_sweeps=n_sweeps, pass_weights=tuple(weights))
    schedule.check()
    with pytest.raises(ConfigError, match=f'sequence of {T} tokens.* n_subsets={T} or less'):
        model(tokens, targets, schedule, recur_mask)
    weights[rng.randrange(n_sweeps) * S + T] = 2.0  # the last subset that has a position
    loss, means = model(tokens, torch.zeros_like(tokens), replace(schedule, pass_weights=tuple(weights)), recur_mask)
    assert torch.isclose(means[1:], loss, rtol=0, atol=1e-12).any()


# Numerics


@pytest.mark.parametrize('document_attention', (True, False))
@each_schedule
@each_recurrence
@each_family
@pytest.mark.fault('empty rows, all masked, a document at the last position', 'finite values and gradients')
def test_extreme_batches_stay_finite(family, recurrence, name, document_attention):
    """Nothing recurs, a document opens at the last position, a row of nothing but padding."""
    fixed = {'reset_token': RESET, 'document_attention': document_attention}
    model = draw_model(11, family=family, recurrence=recurrence, **fixed).float()
    tokens, targets, _ = draw_batch(11, T=6, B=3)
    tokens[0], tokens[1, -1], tokens[2] = RESET, RESET, 0
    targets[0] = -1
    schedule = draw_schedule(11, 6, name)
    for recur_mask in (None, torch.zeros(3, 6, dtype=torch.bool)):
        loss, means = model(tokens, targets, schedule, recur_mask)
        assert loss.isfinite() and means.isfinite().all()
        assert all(g.isfinite().all() for g in gradients(model, loss).values())
        state = model.new_state(3, torch.tensor([6, 5, 0]))
        assert model(tokens, schedule=schedule, recur_mask=recur_mask, state=state).isfinite().all()
        assert state.memory.isfinite().all()
    with pytest.raises(ValueError, match=f'block_size={BLOCK}'):
        model(torch.zeros(1, BLOCK + 1, dtype=torch.long))


@each_schedule
@each_recurrence
@each_family
def test_bfloat16_autocast(family, recurrence, name):
    model = draw_model(5, family=family, recurrence=recurrence, n_layer=3, n_loop=1).float()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.7 if p.dim() == 2 else 1.0)
    tokens, targets, recur_mask = draw_batch(5, T=9, B=3)
    schedule = draw_schedule(5, 9, name)
    exact, _ = model(tokens, targets, schedule, recur_mask)
    with torch.autocast('cpu', torch.bfloat16):
        loss, _ = model(tokens, targets, schedule, recur_mask)
        state = model.new_state(3)
        logits = model(tokens, schedule=schedule, recur_mask=recur_mask, state=state)
    assert loss.dtype == logits.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.05)
    torch.testing.assert_close(logits, model(tokens, schedule=schedule, recur_mask=recur_mask).detach(), rtol=0.2, atol=0.5)
    a, b = (torch.cat([g.flatten() for g in gradients(model, x).values()]) for x in (loss, exact))
    assert a.isfinite().all() and F.cosine_similarity(a, b, 0) > 0.95


@pytest.mark.fault('rotary tables cast to a low precision', 'they keep float32 or better')
def test_rope_tables_keep_their_precision():
    """Angles in float64; tables in float32, in float64 only where the model is, never in less."""
    config = GPTConfig(vocab_size=VOCAB, block_size=4096, n_layer=1, n_head=2, n_embd=16, rope_base=100000.0)
    model = build(config)
    angles = [[t * 100000.0 ** (-2 * i / 8) for i in (0, 1, 2, 3, 0, 1, 2, 3)] for t in range(8192)]
    cos = torch.tensor([[math.cos(a) for a in row] for row in angles], dtype=torch.float64)
    sin = torch.tensor([[math.sin(a) for a in row] for row in angles], dtype=torch.float64)
    sin[:, :4] *= -1
    for kind, dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = model.to(kind)
        assert model.cos.dtype == model.sin.dtype == dtype
        torch.testing.assert_close(model.cos, cos.to(dtype), rtol=0, atol=1e-12 if dtype == torch.float64 else 6e-8)
        torch.testing.assert_close(model.sin, sin.to(dtype), rtol=0, atol=1e-12 if dtype == torch.float64 else 6e-8)
    assert not any('cos' in name or 'sin' in name for name in model.state_dict())


@each_recurrence
def test_a_bfloat16_model_decodes(recurrence):
    model = draw_model(2, recurrence=recurrence).bfloat16()
    tokens, _, recur_mask = draw_batch(2, T=6)
    for schedule in (SEQUENTIAL, Schedule('jacobi', 2, 1)):
        state = model.new_state(tokens.size(0))
        logits = model(tokens, schedule=schedule, recur_mask=recur_mask, state=state)
        assert logits.dtype == torch.float32 and logits.isfinite().all() and state.memory.dtype == torch.bfloat16


# Config


IMPOSSIBLE = [
    ({'block_size': 0}, 'block_size=0'),
    ({'n_layer': 0}, 'n_layer=0'),
    ({'n_head': -1}, 'n_head=-1'),
    ({'n_embd': 0}, 'n_embd=0'),
    ({'vocab_size': -1}, 'vocab_size=-1'),
    ({'n_kv_head': -2}, 'n_kv_head=-2'),
    ({'n_hidden': -3}, 'n_hidden=-3'),
    ({'rope_base': 0.0}, 'rope_base=0.0'),
    ({'norm_eps': -1.0}, 'norm_eps=-1.0'),
    ({'n_embd': 130}, 'n_embd=130'),
    ({'n_kv_head': 3}, 'n_kv_head=3'),
    ({'n_kv_head': 8}, 'n_kv_head=8'),
    ({'n_embd': 12}, 'n_embd=12'),
    ({'recurrence': 't2mlr', 'l_start': -1}, 'l_start=-1'),
    ({'recurrence': 't2mlr', 'l_start': 6}, 'l_start=6'),
    ({'recurrence': 't2mlr', 'l_end': 6}, 'l_end=6'),
    ({'recurrence': 't2mlr', 'l_end': -1}, 'l_end=-1'),
    ({'recurrence': 't2mlr', 'l_start': 4, 'l_end': 3}, 'l_start=4'),
    ({'recurrence': 'lrt', 'source_layer': 6}, 'source_layer=6'),
    ({'recurrence': 'lrt', 'source_layer': -2}, 'source_layer=-2'),
    ({'recurrence': 'lrt', 'memory_projection': 'none', 'residual_injection': False}, 'residual_injection=False'),
    ({'architecture': 'lstm', 'recurrence': 't2mlr'}, 'recurrence=t2mlr'),
    ({'architecture': 'lstm', 'reset_token': 2}, 'reset_token=2'),
    ({'reset_token': -2}, 'reset_token=-2'),
    ({'reset_token': 99}, 'reset_token=99'),
    ({'document_attention': True}, 'document_attention=True'),
]


@pytest.mark.parametrize(('settings', 'named'), IMPOSSIBLE, ids=[named for _, named in IMPOSSIBLE])
def test_impossible_models_are_refused(settings, named):
    config = GPTConfig(**{'vocab_size': 50} | settings)
    for refuse in (config.check, lambda: build(config)):
        with pytest.raises(ConfigError) as stop:
            refuse()
        assert named in str(stop.value) and '\n' not in str(stop.value)


IMPOSSIBLE_SCHEDULES = [
    ({'d_forward': -1, 'd_backward': 1}, 'd_forward=-1'),
    ({'d_backward': 0}, 'd_backward=0'),
    ({'n_subsets': 0}, 'n_subsets=0'),
    ({'chunk_size': 0}, 'chunk_size=0'),
    ({'schedule': 'jacobi', 'd_forward': 3, 'd_backward': 5}, 'd_backward=5'),
    ({'schedule': 'interleaved', 'n_subsets': 2, 'pass_weights': (1.0, 1.0)}, 'pass_weights=(1.0, 1.0)'),
    ({'schedule': 'jacobi', 'd_forward': 3, 'd_backward': 2, 'pass_weights': (1.0,) * 4}, 'pass_weights='),
    ({'schedule': 'interleaved', 'n_subsets': 1, 'pass_weights': (1.0, -1.0)}, 'pass_weights=(1.0, -1.0)'),
    ({'schedule': 'interleaved', 'n_subsets': 1, 'pass_weights': (0.0, 0.0)}, 'pass_weights=(0.0, 0.0)'),
    ({'schedule': 'parallel', 'pass_weights': (1.0, 1.0)}, 'pass_weights=(1.0, 1.0)'),
]


@pytest.mark.parametrize(('settings', 'named'), IMPOSSIBLE_SCHEDULES)
def test_impossible_schedules_are_refused(settings, named):
    with pytest.raises(ConfigError) as stop:
        Schedule(**settings).check()
    assert named in str(stop.value) and '\n' not in str(stop.value)


@seeds(20)
def test_possible_configs_are_accepted(seed):
    """What the other tests draw passes its own check, and count_parameters misses and repeats nothing."""
    recurrence = RECURRENCES[seed % 3]
    model = draw_model(seed, recurrence=recurrence)
    draw_schedule(seed, 9, SCHEDULES[seed % len(SCHEDULES)]).check()
    counts = count_parameters(model)
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert ('recurrence' in counts) == (recurrence != 'none')
    plain = build(replace(model.config, recurrence='none'))
    assert sum(counts.values()) - counts.get('recurrence', 0) == sum(p.numel() for p in plain.parameters())


def total(**settings):
    with torch.device('meta'):
        model = build(GPTConfig(**settings))
    counts = count_parameters(model)
    return sum(counts.values()), counts.get('recurrence', 0)


SCHEDULES_COUNTED = [
    Schedule('parallel'),
    Schedule('jacobi', 16, 4),
    Schedule('jacobi', 3, 4),
    Schedule('jacobi', 3, 2, scan=True),
    Schedule('interleaved', n_subsets=3),
    Schedule('interleaved', n_subsets=3, scan=True),
    Schedule('chunked', chunk_size=16),
    Schedule('sequential'),
]


class FlopCounter(TorchDispatchMode):
    """What torch's own formulas count; FlopCounterMode sums the same, for each module too, at many times the cost."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if count := flop_registry.get(func._overloadpacket):
            self.total += count(*args, **kwargs or {}, out_val=out)
        return out


@pytest.mark.parametrize(
    'variant',
    [
        {},
        {'n_loop': 3, 'l_start': 1, 'l_end': 2},
        {'recurrence': 't2mlr', 'l_start': 1, 'l_end': 2},
        {'recurrence': 't2mlr', 'l_start': 0, 'l_end': 3, 'n_loop': 2},
        {'recurrence': 'lrt', 'source_layer': 2, 'value_embeddings': 'alternate'},
        {'recurrence': 'lrt', 'source_layer': 2, 'memory_projection': 'layerwise', 'n_kv_head': 2},
        {'recurrence': 'lrt', 'source_layer': 2, 'memory_projection': 'none', 'value_embeddings': 'all'},
    ],
    ids=lambda v: '-'.join(map(str, v.values())) or 'plain',
)
@each_family
def test_operations_are_those_that_torch_counts(family, variant):
    """Within 1%, forward, training step and decoded token, under every schedule."""
    config = GPTConfig(family=family, vocab_size=300, block_size=48, n_layer=4, n_head=4, n_embd=64, **variant)
    torch.manual_seed(0)
    model = build(config)
    tokens, targets = torch.randint(300, (2, 2, 48))

    def counted(call):
        # The attention that the counter knows on CPU is the one made of matrix products.
        with sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter:
            call()
        return counter.total / 2

    decode = counted(lambda: model(tokens[:, :1], schedule=SEQUENTIAL, state=model.new_state(2)))
    for schedule in SCHEDULES_COUNTED if config.recurrence != 'none' else SCHEDULES_COUNTED[:1]:
        expected = count_flops(model, schedule, 48)
        with torch.no_grad():
            forward = counted(lambda s=schedule: model(tokens, targets, s)) / 48
        step = counted(lambda s=schedule: model(tokens, targets, s)[0].backward()) / 48
        assert forward == pytest.approx(expected['forward'], rel=0.01), schedule
        assert step == pytest.approx(expected['step'], rel=0.01), schedule
        assert decode == pytest.approx(expected['decode'], rel=0.01)
    plain = build(replace(config, recurrence='none', n_loop=1))
    assert expected['plain_step'] == count_flops(plain, Schedule(), 48)['step']


def test_published_sizes():
    nanochat = {'vocab_size': 32768, 'block_size': 2048, 'value_embeddings': 'all'}
    medium = nanochat | {'n_layer': 20, 'n_embd': 1280, 'n_head': 10}
    large = nanochat | {'n_layer': 24, 'n_embd': 1536, 'n_head': 12}
    lrt = {'recurrence': 'lrt', 'source_layer': 12}
    plain, _ = total(**medium)
    assert plain == pytest.approx(1.316e9, rel=5e-3)
    shared, added = total(**medium, **lrt)
    assert shared == plain + added and 0.0025 < added / plain < 0.0035
    assert total(**large)[0] == pytest.approx(1.99e9, rel=5e-3)
    assert total(**large, **lrt, memory_projection='layerwise')[0] == pytest.approx(2.10e9, rel=5e-3)
    smol = {'family': 'llama', 'n_layer': 30, 'n_embd': 576, 'n_head': 9, 'n_kv_head': 3, 'n_hidden': 1536}
    assert total(**smol, vocab_size=49152, rope_base=100000.0)[0] == 134_515_008


# Compilation


def test_a_compiled_model_equals_the_eager_one():
    eager = draw_model(3, family='nanochat', recurrence='t2mlr', n_layer=1, value_embeddings='none', positional='rope').float()
    compiled = build(eager.config)
    keys = list(eager.state_dict())
    compiled.load_state_dict(eager.state_dict())
    compiled.compile()
    assert list(compiled.state_dict()) == keys
    tokens, targets, recur_mask = draw_batch(3, T=8, B=2)
    schedule = Schedule('jacobi', 2, 2, scan=True)
    for compiled.activation_checkpointing in (False, True):
        losses = [model(tokens, targets, schedule, recur_mask)[0] for model in (eager, compiled)]
        close(losses[1], losses[0], 1e-5)
        close_gradients(gradients(compiled, losses[1]), gradients(eager, losses[0]), 1e-5)
    assert list(compiled.state_dict()) == keys


@pytest.mark.fault('many shapes of passes, compiled', 'no recompilation between steps')
def test_compiled_passes_of_many_shapes_are_compiled_once(monkeypatch):
    """More shapes than torch allows by default, and a second round of them compiles nothing. What counts is how often torch
    traces the passes: the graphs are not made into C++."""
    torch._dynamo.reset()
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda self, **given: real(self, backend='aot_eager', **given))
    fixed = {
        'n_layer': 1,
        'n_loop': 1,
        'value_embeddings': 'none',
        'n_embd': 8,
        'document_attention': False,
        'n_head': 2,
        'n_kv_head': 0,
    }
    eager = draw_model(5, family='llama', recurrence='t2mlr', **fixed).float()
    compiled = build(eager.config)
    compiled.load_state_dict(eager.state_dict())
    compiled.compile()
    tokens, _, _ = draw_batch(5, T=20, B=1)
    graphs = []
    with torch.no_grad():
        for _ in range(2):
            for T in range(8, 18):
                logits = (model(tokens[:, :T], schedule=Schedule('jacobi', 1, 1)) for model in (eager, compiled))
                close(*logits, 1e-4)
            graphs.append(torch._dynamo.utils.counters['stats']['unique_graphs'])
    assert graphs[0] == graphs[1] >= 20  # ten of the block, ten of the fusion


def test_compiled_flex_attention_is_compiled_once():
    """New masks at every call: the logits of sdpa, no new graph and no break."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fixed = dict(n_layer=2, n_head=2, n_kv_head=1, n_embd=32, block_size=150, reset_token=RESET, document_attention=True)
    eager = draw_model(1, recurrence='lrt', **fixed).float()
    compiled = build(eager.config)
    compiled.load_state_dict(eager.state_dict())
    compiled.flex = True
    compiled.compile()
    graphs = []
    with torch.no_grad():
        for seed in range(3):
            tokens, _, _ = draw_batch(seed, T=140, B=2)
            logits = [model(tokens, schedule=Schedule('interleaved', n_subsets=2)) for model in (eager, compiled)]
            close(logits[1], logits[0], 1e-3)
            graphs.append(torch._dynamo.utils.counters['stats']['unique_graphs'])
    assert graphs[0] == graphs[1] == graphs[2] and not torch._dynamo.utils.counters['graph_break']
