"""What a model holds and what it costs: parameters by part, floating-point operations (FLOPs) per token."""

import contextlib
import functools
import json
import math
import os
import sys
import weakref
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from configurator import ConfigError
from model import build, listed_parameters, recurrence_parameters
from support.data import DOCUMENT, Dataset
from support.masks import attend
from support.optimizers import freeze_base, make_optimizers
from support.pretrained import take_pretrained_settings
from support.processes import warn
from support.scan import linear_recurrence


def count_parameters(model):
    """Parameters by part; a tied head counts once, with the embedding."""
    parts = dict.fromkeys(
        ('embedding', 'value embeddings', 'attention', 'MLP', 'LSTM', 'norms, scalars', 'head', 'recurrence'), 0
    )
    prefixes = {'embed.': 'embedding', 'value_embeds.': 'value embeddings', 'lstm.': 'LSTM', 'head.': 'head'}
    added = recurrence_parameters(model)
    for name, p in model.named_parameters():
        part = next((part for prefix, part in prefixes.items() if name.startswith(prefix)), 'norms, scalars')
        part = 'attention' if '.attention.' in name else 'MLP' if '.mlp.' in name else part
        parts['recurrence' if name in added else part] += p.numel()
    return {part: n for part, n in parts.items() if n}


def count_call(call, *shapes, like):
    """FLOPs of the matrix products in `call` on zeros of these shapes, of the type and device of `like`."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(*(torch.zeros(shape, dtype=like.dtype, device=like.device) for shape in shapes))
    return counter.get_total_flops()


def count_flops(model, schedule, T):
    """FLOPs per token of sequences of T: 'forward' under the schedule, 'step' (forward and backward), 'decode' (one token at a
    full context); and 'plain_forward', 'plain_step', those of the same model without recurrence.

    A multiply-add counts as 2; matrix products only, each counted by running its module at one position, so that a module of
    another kind is counted too; attention counts every key it is given, causal or not. A backward costs twice its forward.
    Weights may be on the meta device. Where the schedule draws its number of passes, all are means over the numbers.
    """
    if schedule.min_passes >= 0:
        costs = [count_flops(model, schedule.with_passes(n), T) for n in schedule.numbers]
        return {name: sum(cost[name] for cost in costs) / len(costs) for name in costs[0]}
    c, like = model.config, model.embed.weight
    D, head = c.n_embd, count_call(model.logits, (1, 1, c.n_embd), like=like)
    if c.architecture == 'lstm':
        forward = head + 2 * sum(p.numel() for n, p in model.named_parameters() if n.startswith('lstm.weight'))
        return {'forward': forward, 'step': 3 * forward, 'decode': forward, 'plain_forward': forward, 'plain_step': 3 * forward}
    token, value = (1, 1, D), (1, 1, c.kv_dim)
    kv = (1, c.kv_dim // c.head_dim, 1, c.head_dim)
    query, gqa = (1, c.n_head, 1, c.head_dim), c.kv_dim != D
    one_key = count_call(lambda q, k, v: attend(q, k, v, None, gqa), query, kv, kv, like=like)
    added, with_gates, plain = listed_parameters(model, 'recurrence_parts'), [], []  # of each layer, without attention
    for number, block in enumerate(model.blocks):

        def run(x, v, block=block):
            block(x, x, None, None, v, None, None, None, None, None)

        with_gates.append(count_call(run, token, value, like=like) - one_key)
        gates = (p for name, p in block.named_parameters() if f'blocks.{number}.{name}' in added and p.dim() == 2)
        plain.append(with_gates[-1] - 2 * sum(p.numel() for p in gates))
    attention, span = 4 * T * D, c.span
    inside = sum(with_gates[layer] for layer in c.stack[span.start : span.stop])
    outside = sum(plain[layer] for layer in (*c.stack[: span.start], *c.stack[span.stop :]))
    local = reading = 0
    if model.fusion is not None:
        local = count_call(model.fusion.local, token, like=like)
        reading = count_call(lambda h, R: model.fusion(h, model.fusion.local(h), R, None), token, token, like=like) - local
    if model.memory is not None:
        reading = count_call(model.memory, token, like=like)
    passes = schedule.passes(T) if span else []
    count_scan = functools.cache(lambda n: count_call(linear_recurrence, (1, n, D), (1, n), like=like))
    forward = step = 0.0
    for number, p in enumerate(passes):
        cost = len(p.positions) * (inside + reading * p.reads_memory + len(span) * attention)
        forward += cost
        step += 3 * cost if p.with_grad else cost
        if schedule.scan and c.has_direct_path:
            scan = count_scan(T - p.positions.start)
            forward += scan
            step += 2 * scan if p.with_grad and number < len(passes) - 1 else scan  # nothing reads what the last pass writes
        if p.with_grad and number and not passes[number - 1].with_grad:  # the memory that it reads has no gradient
            step -= len(p.positions) * reading
    scored = sum(len(p) for p in model.scored_passes(schedule, T))
    fixed = outside + local * any(p.reads_memory for p in passes) + (len(c.stack) - len(span)) * attention
    return {
        'forward': (forward + scored * head) / T + fixed,
        'step': (step + 3 * scored * head) / T + 3 * fixed,
        'decode': inside + outside + len(c.stack) * attention + local + reading + head,
        'plain_forward': sum(plain) + c.n_layer * attention + head,
        'plain_step': 3 * (sum(plain) + c.n_layer * attention + head),
    }


def check_memory(config, T):
    """ConfigError when weights, gradients and one moment of the trainable ones, and what the layers of one pass keep at least
    for the backward, do not fit into the memory that is free: the kernel would end the process without a word."""
    with torch.device('meta'):
        model = build(config)
    if config.freeze_base:
        freeze_base(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = config.micro_batch
    whole = config.architecture == 'gpt' and not config.activation_checkpointing
    kept = 3 * config.n_embd + 2 * config.kv_dim + config.mlp_dim if whole else config.n_embd  # of each layer and position
    kept *= 0 if config.freeze_base else rows * T * config.n_layer / (2 if config.dtype == 'bfloat16' else 1)
    need = (sum(p.numel() for p in model.parameters()) + 2 * trained + kept) * (8 if config.dtype == 'float64' else 4)
    if need > (free := free_memory()):
        raise ConfigError(
            f'a step needs at least {need / 2**30:,.1f} GiB for weights, gradients, moments and {rows} sequences, and '
            f'{free / 2**30:,.1f} GiB are free; take a smaller n_layer={config.n_layer}, n_embd={config.n_embd} or '
            f'device_batch_size={rows}, and see --dry_run=True.'
        )


def free_memory():
    """Bytes that a process can still take on this machine; infinite where it does not say."""
    with contextlib.suppress(OSError, StopIteration), open('/proc/meminfo', encoding='ascii') as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith('MemAvailable'))
    return math.inf


class Allocations(TorchDispatchMode):
    """Follows what tensors hold, in bytes: `now`, and the largest so far, `peak`."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in self.known:
                self.known.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, id(storage), storage.nbytes())
        return out

    def free(self, number, size):
        self.known.remove(number)
        self.now -= size


def count_memory(config):
    """Bytes of tensors in a step of one process: {'weights', 'optimiser', 'peak'}, the last with those and all that the
    passes keep for the backward. A step runs on tensors that have shapes and no content; the shards of weights, gradients and
    moments are added to it, beside the weights and gradients that a sharded model holds whole for as long as a step runs."""
    shards = config.processes if config.shard else 1
    config = replace(config, jacobi_tol=0.0)  # what no content can decide: all passes run
    with FakeTensorMode(), Allocations() as allocations:
        torch.set_default_dtype(torch.float64 if config.dtype == 'float64' else torch.float32)
        model = build(config)
        torch.set_default_dtype(torch.float32)
        model.activation_checkpointing = config.activation_checkpointing
        if config.freeze_base:
            freeze_base(model)
        weights, optimizers = allocations.now, make_optimizers(model, config, 'cpu')

        def step():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        def make_gradients():
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None

        make_gradients()
        step()  # from now on there are moments
        optimiser = allocations.now - weights
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        if shards > 1:
            optimizers.clear()
            for module in model.blocks.modules() if config.dtype == 'bfloat16' else ():  # as they are gathered
                for name, p in list(module.named_parameters(recurse=False)):
                    setattr(module, name, torch.nn.Parameter(p.detach().bfloat16(), p.requires_grad) if p.dim() else p)
            allocations.peak = allocations.now
        elif config.processes > 1 or config.accumulation > 1:  # micro-batches add to them; DDP keeps its buckets as well
            make_gradients()
        tokens = torch.zeros(config.micro_batch, config.block_size, dtype=torch.long)
        counts = torch.ones(len(model.scored_passes(config, config.block_size)))
        with torch.autocast('cpu', torch.bfloat16, enabled=config.dtype == 'bfloat16'):
            model(tokens, tokens, config, None, counts)[0].backward()
        step()
        peak = allocations.peak + ((weights + trained + optimiser) // shards if shards > 1 else 0)
        return {'weights': weights // shards, 'optimiser': optimiser // shards, 'peak': peak}


def dry_run(config):
    """Prints what the model holds and costs; as the first process. Needs no data where the vocabulary is given, and fetches no
    weights."""
    if config.init_from.startswith('hf:'):
        if os.path.isdir(config.init_from[3:]):
            take_pretrained_settings(config)
        else:
            config.check_model()
            print(f'{config.init_from[3:]} is no folder here: this is the shape that the settings state.', file=sys.stderr)
    if not config.vocab_size and os.path.exists(os.path.join(config.data_dir, 'meta.json')):
        Dataset(config.data_dir).complete(config)
    if not config.vocab_size:
        raise ConfigError(f'vocab_size=0 needs a dataset, and data_dir={config.data_dir} holds none; give a number.')
    if config.reset_token == DOCUMENT:  # without data; whichever token it is, the cost is the same
        config.reset_token = 0 if config.architecture == 'gpt' else -1
    if os.environ.get('RANK', '0') == '0':
        print_costs(config)


def print_costs(config):
    """Parameters by part, the recurrence's share, FLOPs per token and memory, from weights that hold none."""
    with torch.device('meta'):
        model = build(config)
    parts, flops = count_parameters(model), count_flops(model, config, config.block_size)
    total, ratio = sum(parts.values()), flops['step'] / flops['plain_step']
    share = parts.get('recurrence', 0) / total
    for part, n in [*parts.items(), ('total', total)]:
        print(f'{part:<18}{n:>16,}{n / total:>9.2%}')
    drawn = f', mean from min_passes={config.min_passes} on' if config.min_passes >= 0 else ''
    print(f'\nFLOPs per token, schedule={config.schedule}{drawn}, {config.block_size} tokens    x plain transformer')
    for name, label, plain in (
        ('forward', 'forward', 'plain_forward'),
        ('step', 'training step', 'plain_step'),
        ('decode', 'decoded token', 'plain_forward'),
    ):
        print(f'{label:<18}{flops[name]:>16.4g}{flops[name] / flops[plain]:>9.2f}')
    if config.dtype == 'auto':  # which device the run will have, only its settings can say
        config.dtype = 'float32' if config.device in ('cpu', 'mps') else 'bfloat16'
    memory, limit = count_memory(config), config.device_memory * 1e9
    who = f'one of {config.processes} processes, {config.accumulation} x {config.micro_batch} sequences, {config.dtype}'
    print(f'\nmemory of tensors, {who}, as on CPU without compile')
    for part, size in memory.items():
        print(f'{part:<18}{size / 2**20:>16,.0f} MiB')
    share_of_limit = f'{memory["peak"] / limit:>8.0%} of device_memory={config.device_memory:g} GB'
    print(f'{"limit":<18}{limit / 2**20:>16,.0f} MiB{share_of_limit}')
    if memory['peak'] > limit:
        smaller = f'a device_batch_size below {config.micro_batch}, ' if config.micro_batch > 1 else ''
        warn(f'a step does not fit; take {smaller}--activation_checkpointing=True or --shard=True.')
    if config.json:
        report = {'parameters': parts, 'total_parameters': total, 'recurrence_share': share}
        report |= {f'{k}_flops_per_token': v for k, v in flops.items()}
        report |= {'step_flops_ratio': ratio, 'memory': memory, 'memory_limit': limit}
        print(json.dumps(report))
