"""What each position of a pass may attend to, as a mask that is added to the scores or as FlexAttention's block mask."""

import functools
import math

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

MOST_MASKS = 64  # that a model keeps: more are made only for sequences of many lengths, as in an evaluation


def attention_mask(slots, first, n_keys, dtype, flex):
    """What positions at `slots` (n,) see of n_keys slots: those up to their own, from `first` (B, n) on unless that is None.

    A BlockMask if `flex`. Otherwise, in the `dtype` of attention, what is added to the scores, (n, n_keys) or
    (B, 1, n, n_keys): made once for all layers, because attention would convert a mask of bool in each of them.
    """
    if first is not None:
        first = torch.minimum(first, slots)  # a padding slot sees itself: no query is without a key

    def visible(b, h, q, k):
        return k <= slots[q] if first is None else (k <= slots[q]) & (k >= first[b, q])

    if flex:
        return create_block_mask(visible, None if first is None else len(first), None, len(slots), n_keys, device=slots.device)
    keys = torch.arange(n_keys, device=slots.device)
    mask = keys <= slots[:, None]
    if first is not None:
        mask = (mask & (keys >= first.unsqueeze(-1))).unsqueeze(1)
    return torch.zeros(mask.shape, dtype=dtype, device=slots.device).masked_fill(~mask, -math.inf)


class Masks(dict):
    """Makes the masks of a model; those that depend on shapes alone it makes once and keeps."""

    def get_mask(self, positions, slots, first, n_keys, dtype, flex):
        """`attention_mask` of a pass over `positions`, a range. A single position takes no block mask: making it would
        cost the host more than the attention of one row."""
        flex = flex and len(positions) > 1
        if first is not None or len(positions) == 1:
            return attention_mask(slots, first, n_keys, dtype, flex)
        name = positions, n_keys, dtype, flex
        if name not in self:
            if len(self) == MOST_MASKS:
                self.clear()
            with torch.inference_mode(False):  # a later pass may need the mask in its backward
                self[name] = attention_mask(slots, first, n_keys, dtype, flex)
        return self[name]


@functools.cache
def compiled_flex():
    """FlexAttention as one kernel, where no compiled block is around it."""
    return torch.compile(flex_attention, dynamic=False)


def attend(q, k, v, mask, gqa):
    """Attention of q (B, H, n, d) over k, v (B, G, slots, d) -> (B, H, n, d). mask: as `attention_mask` makes it; None: causal.
    gqa: whether several query heads share a key/value head."""
    if isinstance(mask, BlockMask):
        flex = compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        return flex(q, k, v, block_mask=mask, enable_gqa=gqa)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
