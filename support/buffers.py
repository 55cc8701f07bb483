"""Buffers of all positions that a pass reads at some of them and writes back."""

import torch


def as_slice(positions):
    """The positions of a pass, a range, as the slice that picks them. Slices, and no index: the backward of an index sorts."""
    return slice(positions.start, positions.stop, positions.step)


def take(x, positions):
    """x (B, T, ..) at `positions`, a range; None stays None."""
    return x if x is None or len(positions) == x.size(1) else x[:, as_slice(positions)]


def scatter(buffer, positions, new, in_place):
    """`buffer` (B, T, D) with `new` (B, n, D) at `positions`, a range: in place, or a copy."""
    at = as_slice(positions)
    if in_place:
        buffer[:, at] = new
        return buffer
    return buffer.slice_scatter(new, 1, at.start, at.stop, at.step)


def scatter_kv(buffer, slots, new):
    """`buffer` (B, G, slots, d) with `new` (B, G, n, d) at `slots` (n,): in place when nothing is to be differentiated,
    otherwise a copy, because the backward of earlier passes still needs what they read."""
    if torch.is_grad_enabled():
        return buffer.index_copy(2, slots, new)
    return buffer.index_copy_(2, slots, new)
