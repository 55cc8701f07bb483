"""Optimisers: their groups, steps that may be skipped, and Muon, shared over the processes of a run."""

import functools
import math
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from configurator import fail
from model import listed_parameters, recurrence_parameters
from support.processes import warn
from support.sharding import local


class Muon(torch.optim.Muon):
    """torch's Muon with rates on the scale of AdamW's: the same state, the same numbers, fewer launches.

    Matrices of one shape are stacked, so a step is a few large kernels. On CPU a launch costs little and a batched product
    rounds differently, so Newton-Schulz takes them one by one: there the numbers are torch's to the last bit.

    Each process of a run orthogonalises its share of the matrices, and one collective call exchanges the results. The momentum
    follows from the averaged gradient alone. Every process holds all of it, so a checkpoint does not depend on their number.

    A step is skipped where the tensor `found_inf` is not 0, as in the fused AdamW; the host never reads it.
    """

    _step_supports_amp_scaling = True  # torch's mark of an optimiser that reads found_inf
    found_inf = None

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, adjust_lr_fn='match_rms_adamw')

    @torch.no_grad()
    def step(self):
        matrices = [p for group in self.param_groups for p in with_gradient(group)]
        if not matrices:
            return
        for p in matrices:
            if 'momentum_buffer' not in self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
        skip = torch.zeros((), device=matrices[0].device) if self.found_inf is None else self.found_inf
        skip = skip.bool()  # selected by torch.where: a product with 0 would let NaN through
        for batch in by_shape(matrices):
            moments = self.moments(batch)
            before = torch.stack(moments)
            after = before.lerp(torch.stack([local(p.grad) for p in batch]), 1 - self.defaults['momentum'])
            torch._foreach_copy_(moments, torch.where(skip, before, after).unbind())
        directions = self.directions(matrices)
        for group in self.param_groups:
            lr, weight_decay = group['lr'], group['weight_decay']
            for batch in by_shape(with_gradient(group)):
                weights = [local(p) for p in batch]
                before = torch.stack(weights)
                scale = 0.2 * math.sqrt(max(batch[0].shape))  # an orthogonal matrix times this has entries as large as AdamW's
                after = before * (1 - lr * weight_decay)
                after.add_(torch.stack([directions[p] for p in batch]), alpha=-(lr * scale))
                torch._foreach_copy_(weights, torch.where(skip, before, after).unbind())

    def moments(self, matrices):
        return [local(self.state[p]['momentum_buffer']) for p in matrices]

    def nesterov(self, batch):
        """(n, rows, columns): the Nesterov momentum of n matrices of one shape, or this process's rows of it."""
        return torch.stack([local(p.grad) for p in batch]).lerp_(torch.stack(self.moments(batch)), self.defaults['momentum'])

    def directions(self, matrices):
        """{matrix: its orthogonalised Nesterov momentum in bfloat16}, each computed by one of the processes; of a sharded
        matrix this process's rows."""
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        owners = assign(tuple(p.shape for p in matrices), world)
        shares = [[p for p, owner in zip(matrices, owners, strict=True) if owner == r] for r in range(world)]
        if isinstance(matrices[0], DTensor):
            rows = {p: n for batch in by_shape(matrices) for p, n in zip(batch, self.nesterov(batch).bfloat16(), strict=True)}
            whole = gather_rows(rows, shares, rank, matrices[0].device)
            owned = [(batch, torch.stack([whole[p] for p in batch])) for batch in by_shape(shares[rank])]
        else:
            owned = [(batch, self.nesterov(batch)) for batch in by_shape(shares[rank])]
        directions = {}
        for batch, nesterov in owned:
            settings = {name: self.defaults[name] for name in ('ns_coefficients', 'ns_steps', 'eps')}
            if nesterov.device.type == 'cpu':
                directions.update(zip(batch, [orthogonalize(x, **settings) for x in nesterov], strict=True))
            else:
                directions.update(zip(batch, orthogonalize(nesterov, **settings), strict=True))
        if world == 1:
            return directions
        if isinstance(matrices[0], DTensor):
            return scatter_rows(directions, shares, rank, matrices[0].device)
        sizes = [[p.numel() for p in share] for share in shares]
        longest = max(map(sum, sizes))
        padding = torch.empty(longest - sum(sizes[rank]), dtype=torch.bfloat16, device=matrices[0].device)
        sent = torch.cat([*(directions[p].flatten() for p in shares[rank]), padding])
        received = sent.new_empty(world * longest)
        dist.all_gather_single(received, sent)
        for share, lengths, part in zip(shares, sizes, received.split(longest), strict=True):
            for p, values in zip(share, part[: sum(lengths)].split(lengths), strict=True):
                directions[p] = values.view_as(p)
        return directions


def gather_rows(rows, shares, rank, device):
    """{matrix: this process's rows} of all matrices -> {matrix: all rows} of those in shares[rank], which this process owns."""
    sent = [[rows[p] for p in share] for share in shares]
    shapes = [[(row_counts(p)[r], p.size(1)) for p in shares[rank]] for r in range(len(shares))]
    parts = exchange(sent, shapes, device)
    return {p: torch.cat([part[i] for part in parts]) for i, p in enumerate(shares[rank])}


def scatter_rows(matrices, shares, rank, device):
    """The way back: {matrix: all rows} of those that this process owns -> {matrix: this process's rows} of all."""
    cuts = [matrices[p].split(row_counts(p)) for p in shares[rank]]
    sent = [[cut[r] for cut in cuts] for r in range(len(shares))]
    parts = exchange(sent, [[local(p).shape for p in share] for share in shares], device)
    return {p: rows for share, part in zip(shares, parts, strict=True) for p, rows in zip(share, part, strict=True)}


def row_counts(matrix):
    """How many rows of a sharded matrix each process has: equal parts, rounded up, while there are any."""
    rows, world = matrix.size(0), matrix.device_mesh.size()
    part = math.ceil(rows / world)
    return [min(max(rows - rank * part, 0), part) for rank in range(world)]


def exchange(sent, shapes, device):
    """Sends sent[r], a list of tensors in bfloat16, to each process r; returns what each sent here, of shapes[r]."""
    sizes = [[math.prod(shape) for shape in part] for part in shapes]
    into, out_of = [sum(part) for part in sizes], [sum(t.numel() for t in part) for part in sent]
    received = torch.empty(sum(into), dtype=torch.bfloat16, device=device)
    dist.all_to_all_single(received, torch.cat([received[:0], *(t.flatten() for part in sent for t in part)]), into, out_of)
    parts = zip(received.split(into), sizes, shapes, strict=True)
    return [[t.view(shape) for t, shape in zip(part.split(n), s, strict=True)] for part, n, s in parts]


def with_gradient(group):
    return [p for p in group['params'] if p.grad is not None]


def by_shape(matrices):
    """The matrices as lists of one shape each."""
    batches = {}
    for p in matrices:
        batches.setdefault(p.shape, []).append(p)
    return batches.values()


@functools.cache
def assign(shapes, world):
    """The rank that orthogonalises each matrix: the costliest first, each to the rank with the least work so far."""
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]  # of one iteration, up to a factor
    owners, work = [0] * len(shapes), [0] * world
    for i in sorted(range(len(shapes)), key=costs.__getitem__, reverse=True):
        owners[i] = work.index(min(work))
        work[owners[i]] += costs[i]
    return owners


def orthogonalize(matrices, ns_coefficients, ns_steps, eps):
    """(rows, columns) or (n, rows, columns) -> the same in bfloat16, singular values near 1, by Newton-Schulz iterations."""
    a, b, c = ns_coefficients
    multiply_add = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    x = matrices.bfloat16()
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def freeze_base(model):
    """Leaves gradients to the parameters that the recurrence adds."""
    added = recurrence_parameters(model)
    for name, p in model.named_parameters():
        p.requires_grad_(name in added)


def make_optimizers(model, config, device):
    """One optimiser or two; every trainable parameter is in exactly one group, whose 'scale' multiplies the rate."""
    groups, added, adamw = {}, recurrence_parameters(model), listed_parameters(model, 'adamw_parts')
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups.setdefault((p.dim() == 2 and name not in adamw, name in added), []).append(p)

    def settings(kinds):
        return [
            {
                'params': params,
                'weight_decay': config.weight_decay if matrix else 0.0,
                'scale': config.recurrence_lr_scale if added else 1.0,
            }
            for (matrix, added), params in groups.items()
            if matrix in kinds
        ]

    betas, fused, optimizers = (config.beta1, config.beta2), device in ('cuda', 'cpu'), []
    muon = config.optimizer == 'muon'
    if adamw_groups := settings((False,) if muon else (False, True)):
        optimizers.append(torch.optim.AdamW(adamw_groups, lr=config.learning_rate, betas=betas, fused=fused))
    if muon and (matrices := settings((True,))):
        optimizers.append(Muon(matrices, lr=config.learning_rate))
    return optimizers


def step_optimizers(optimizers, skip):
    """Steps the optimisers, unless `skip`, a bool tensor on the device: then weights, moments and counters stay as they are.

    Muon and the fused AdamW read the flag on the device, so the host runs ahead; for AdamW on MPS, whose kernel does not read
    it, the host waits.
    """
    for optimizer in optimizers:
        if getattr(optimizer, '_step_supports_amp_scaling', False):
            optimizer.found_inf = skip.float()
            optimizer.step()
        elif not skip.item():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class SkippedSteps:
    """Counts the steps that were skipped: `total`, those `in_a_row` up to the last, and the `longest` row of them. What `add`
    takes stays on the device until `count`, because reading it would make the host wait."""

    def __init__(self, total=0, in_a_row=0):
        self.total, self.in_a_row, self.longest, self.flags = total, in_a_row, 0, []

    def add(self, flag):
        self.flags.append(flag)

    def count(self, step):
        before = self.total
        for skipped in torch.stack(self.flags).tolist():
            self.total, self.in_a_row = self.total + skipped, self.in_a_row + 1 if skipped else 0
            self.longest = max(self.longest, self.in_a_row)
        self.flags.clear()
        if self.total > before:
            what = 'they score nothing, or their loss or gradient is not finite'
            warn(f'up to step {step}, {self.total - before} were skipped: {what}.')

    def give_up(self, step, learning_rate, path):
        """Ends the run with exit code 3. path: where its checkpoint would be."""
        kept = f'{path} holds an earlier step' if os.path.exists(path) else 'there is no checkpoint yet'
        what = f'{self.longest} steps in a row, up to step {step}, score nothing, or their loss or gradient is not finite'
        raise fail(f'{what}; {kept}. Lower learning_rate={learning_rate}, or see --debug_nan=True.', 3)
