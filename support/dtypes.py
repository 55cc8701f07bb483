"""The types that a model computes in."""

import torch


def working_dtype(x):
    """The type of keys and values: that of x, or that of autocast on its device."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rounding(x):
    """The relative change that rounding alone makes in repeated computations from x; a smaller tolerance is never reached."""
    if x.is_cuda and working_dtype(x) == torch.float32 and torch.get_float32_matmul_precision() != 'highest':
        return 2**-10  # of TF32
    return max(torch.finfo(working_dtype(x)).eps, 4 * torch.finfo(x.dtype).eps)
