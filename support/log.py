"""What a line of a log may hold."""

import math


def finite(value):
    """`value` as JSON can hold it: in a dict what is no finite number is left out, in a list it is None."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items() if not isinstance(v, float) or math.isfinite(v)}
    return [v if math.isfinite(v) else None for v in value] if isinstance(value, list) else value


def one_number_each(values):
    """{'pass/0': a, 'pass/1': b, 'val/loss': c} for {'passes': [a, b], 'val': {'loss': c}}; what is None is left out."""
    single = {}
    for name, value in values.items():
        if isinstance(value, list):
            name, value = {'passes': 'pass', 'changes': 'change'}[name], dict(enumerate(value))
        if isinstance(value, dict):
            single |= {f'{name}/{part}': number for part, number in value.items()}
        else:
            single[name] = value
    return {name: number for name, number in single.items() if number is not None}
