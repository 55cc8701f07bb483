"""Scan passes: the path on which the memory reaches its own source through residual connections alone, solved in every pass.

The source of the memory holds the memory that its token read, times one scalar c (T2MLR: the residual of the cache; LRT: what
the injections leave in the stream). A plain pass moves that share by one token; a scan pass solves it for all tokens at once.
The parameters and the solution stay the same: where a pass changes nothing, a scan changes nothing either.

This is a quasi-Newton step on the fixed point M = F(M), as in quasi-DEER (Gonzalez et al. 2024), with a scalar of each token
in place of the diagonal of the Jacobian.
"""

import torch
import torch.nn.functional as F

from support.buffers import scatter, take

BLOCK = 64  # positions of one triangular product


class Scan:
    """The direct path over the T positions of one forward, after each pass.

    c: the coefficient of the path, a number or a scalar tensor. reads (B, T, 1), bool: where memory is read; None: everywhere.
    detached: no gradient flows along the path. eps: that of the memory's norm. solve: `solve_direct_path`, or that compiled.
    """

    def __init__(self, c, reads, detached, eps, solve):
        self.c, self.reads, self.detached, self.eps, self.solve = c, reads, detached, eps, solve
        self.sources = self.read = None  # the newest of all positions

    def __call__(self, positions, source, read, memory):
        """After a pass at `positions`, a range: the memories (B, T - start, D) of all positions from its first one on, and
        these positions, a range.

        source (B, n, D): the sources that the pass made, before their norm. read (B, n, D): the memories that it read there;
        None: none. memory (B, T + 1, D): those known before, shifted, so that slot p is what position p reads.
        """
        T = memory.size(1) - 1
        read = torch.zeros_like(source) if read is None else read
        if len(positions) == T:
            self.sources, self.read = source, read
        else:
            self.sources = scatter(self.sources, positions, source, in_place=False)
            self.read = scatter(self.read, positions, read, in_place=False)
        tail = range(positions.start, T)
        before, reads = memory[:, tail.start : tail.start + 1], take(self.reads, tail)
        source, read = take(self.sources, tail), take(self.read, tail)
        return self.solve(source, read, before, reads, self.c, self.detached, self.eps), tail


def solve_direct_path(source, read, before, reads, c, detached, eps):
    """source, read (B, n, D), before (B, 1, D), reads (B, n, 1) or None -> memories (B, n, D). In float32 or better.

    With s_t = 1 / rms(source_t), a change of the memory travels as q_t = change_t + c s_{t-1} q_{t-1}, where change_t is what
    this pass adds to what position t has read. c s is held within [-1, 1]: it may exceed that for a while, and its powers would
    overflow where the norm keeps the memory itself bounded.
    """
    dtype = source.dtype
    with torch.autocast(source.device.type, enabled=False):
        source, read, before = (x if x.dtype == torch.float64 else x.float() for x in (source, read, before))
        c = c if reads is None else c * reads
        change = torch.cat((before, norm_memory(source, eps)[:, :-1]), 1) - read
        added = torch.finfo(source.dtype).eps if eps is None else eps
        share = (c * (source.square().mean(-1, keepdim=True) + added).rsqrt()).clamp(-1, 1)
        q = LinearRecurrence.apply(change, F.pad(share[:, :-1, 0], (1, 0)))
        q = q.detach() if detached else q
        return norm_memory(source + c * q, eps).to(dtype)


def norm_memory(source, eps):
    """The memory of a source (.., D): its RMSNorm, without a weight."""
    return F.rms_norm(source, (source.size(-1),), eps=eps)


class LinearRecurrence(torch.autograd.Function):
    """q with q_t = x_t + a_t q_{t-1} and q_{-1} = 0: x (B, n, D), a (B, n) -> (B, n, D)."""

    @staticmethod
    def forward(ctx, x, a):
        q = linear_recurrence(x, a)
        ctx.save_for_backward(a, q)
        return q

    @staticmethod
    def backward(ctx, gradient):
        a, q = ctx.saved_tensors
        of_x = linear_recurrence(gradient.flip(1), F.pad(a[:, 1:].flip(1), (1, 0))).flip(1)  # the same, from the end
        return of_x, F.pad((of_x[:, 1:] * q[:, :-1]).sum(-1), (1, 0))


def linear_recurrence(x, a):
    """As LinearRecurrence, without gradient: a triangular product in each block, then the same for what blocks hand on."""
    B, n, D = x.shape
    if n <= BLOCK:
        return products(a) @ x
    padding = -n % BLOCK
    a = F.pad(a, (0, padding)).unflatten(1, (-1, BLOCK))
    inside = products(a) @ F.pad(x, (0, 0, 0, padding)).unflatten(1, (-1, BLOCK))
    through = a.cumprod(-1)
    ends = linear_recurrence(inside[:, :, -1], through[:, :, -1])
    handed = F.pad(ends[:, :-1], (0, 0, 1, 0)).unsqueeze(2)
    return (inside + through.unsqueeze(-1) * handed).flatten(1, 2)[:, :n]


def products(a):
    """a (.., n) -> the lower triangle (.., n, n) that holds a_{j+1} ... a_t in row t and column j."""
    n = a.size(-1)
    below = torch.ones(n, n, dtype=torch.bool, device=a.device).tril(-1)
    return torch.where(below, a.unsqueeze(-1), 1.0).cumprod(-2).tril()
