"""Finds the first module whose output, or the first parameter whose gradient, is not finite."""

import os
import sys

import torch

from configurator import fail


def install_nan_hooks(model):
    """From now on the run ends with exit code 3 at the first module whose input or output is not finite, and names it and its
    pass. Passes count from 0, the one without memory; what precedes them belongs to 0, what follows them to the last."""
    number = 0

    def check_finite(what, value):
        value = value[0] if isinstance(value, tuple) else value
        if isinstance(value, torch.Tensor) and not value.isfinite().all():
            rank = f'in process {os.environ["RANK"]}, ' if 'RANK' in os.environ else ''
            sentence = f'error: {rank}{what} in pass {max(number, 0)} is not finite.'
            print(sentence, file=sys.stderr)  # whichever process it is
            error = SystemExit(3)
            error.add_note(sentence)
            raise error

    def begin(*_):
        nonlocal number
        number = -1

    def counted_span(*args):
        nonlocal number
        number += 1
        return span(*args)

    if span := getattr(model, 'span', None):  # the LSTM has no passes
        model.span = counted_span
    model.register_forward_pre_hook(begin)
    for name, module in model.named_modules():
        name = name or 'the model'
        module.register_forward_pre_hook(lambda _, args, name=name: check_finite(f'the input of {name}', args))
        module.register_forward_hook(lambda _, args, out, name=name: check_finite(f'the output of {name}', out))


def check_gradients(model, step):
    """Ends the run with exit code 3 at the first parameter whose gradient is not finite, and names it."""
    for name, p in model.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all():
            raise fail(f'the gradient of {name} in step {step} is not finite, though every output is.', 3)
