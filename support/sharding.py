"""How a run is spread over its processes: equal shares of the batch; averaged gradients, or shards of all that is trained."""

import contextlib
import math
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from configurator import ConfigError


def check_batch(batch_size, device_batch_size, processes):
    """Raises ConfigError where processes, or their micro-batches of `device_batch_size` (0: no limit), cannot be equal."""
    share, rest = divmod(batch_size, processes)
    if rest or not share:
        near = f'{batch_size - rest} or {batch_size - rest + processes}' if share else f'{processes}'
        raise ConfigError(f'batch_size={batch_size} does not divide over {processes} processes; take {near}.')
    if 0 < device_batch_size < share and share % device_batch_size:
        below = max(d for d in divisors(share) if d < device_batch_size)
        above = min(d for d in divisors(share) if d > device_batch_size)
        raise ConfigError(
            f'device_batch_size={device_batch_size} does not divide {share} sequences, which each of {processes} processes '
            f'has of batch_size={batch_size}; take {below} or {above}.'
        )


def divisors(n):
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return {*small, *(n // d for d in small)}


def shard(model, process):
    """Leaves to each process its rows of every tensor of `model`, by PyTorch's FSDP2: a block at a time, the root for the rest.

    A step gathers them once for all its passes and micro-batches, until `end_backward`. The gradients of a micro-batch are
    summed straight into shards. Scalars, which cannot be cut, stay whole.
    """
    warnings.filterwarnings('ignore', 'FSDP2-wrapped module', UserWarning)  # keys and values are views that nothing writes to
    whole = {p for p in model.parameters() if not p.dim()}
    rest = MixedPrecisionPolicy()
    if process.dtype == torch.bfloat16:  # what autocast would make of the matrices, made before they travel
        blocks = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    else:
        blocks = rest
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False, mp_policy=blocks, ignored_params=whole)
    fully_shard(model, reshard_after_forward=False, mp_policy=rest, ignored_params=whole)
    model.set_reshard_after_backward(False)


def distribute(model, schedule, process, T):
    """`model`, or around it what averages gradients over the processes. schedule: that of the first step."""
    if process.world == 1 or isinstance(model, FSDPModule):
        return model
    # Only a schedule without a pass that reads the memory leaves parameters without gradient, and growth begins with it.
    fewest = schedule.with_passes(schedule.numbers[0]).passes(T)
    unused = model.config.recurrence != 'none' and schedule.initial and len(fewest) == 1
    ids = [torch.device(process.device).index] if process.kind == 'cuda' else None
    return DistributedDataParallel(model, device_ids=ids, find_unused_parameters=unused, gradient_as_bucket_view=True)


def without_sync(model):
    """Around the backward of a micro-batch that is not the last: its gradients wait in this process, unless they are shards."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def end_backward(model):
    """After the last backward of a step: a sharded model is in shards again, and the gradients of its scalars are averaged."""
    if not isinstance(model, FSDPModule):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    if scalars := [p.grad for p in model.parameters() if not p.dim() and p.grad is not None]:
        together = torch.stack(scalars) / dist.get_world_size()
        dist.all_reduce(together)
        torch._foreach_copy_(scalars, list(together.unbind()))


def clip_gradients(model, limit):
    """Scales all gradients together to a norm of at most `limit`; returns the norm that they had."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    shards = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    if not shards:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    whole = [g for g in gradients if not isinstance(g, DTensor)]
    squares = torch.nn.utils.get_total_norm(shards).double().square()
    dist.all_reduce(squares)
    norm = (squares + (torch.nn.utils.get_total_norm(whole).double().square() if whole else 0)).sqrt()
    torch._foreach_mul_([*shards, *whole], (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def local(tensor):
    """What this process holds of a tensor: its rows, or all of it where nothing is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(value):
    """`value` with all shards in it gathered, in the memory of the host; every process takes part. Nested dicts and lists."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {k: full(v) for k, v in value.items()}
    return [full(v) for v in value] if isinstance(value, list) else value


def shard_like(tensor, parameter):
    """A full `tensor` as `parameter` is: sharded where that is, and the tensor has its shape."""
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor
