"""How long functions take, and how much of a GPU a step uses."""

import statistics
import time

import torch
from tqdm import tqdm

PEAK = {  # dense bfloat16 FLOPs per second of a GPU, from its data sheet, by what its name contains
    'B200': 2250e12,
    'H200': 989e12,
    'H100 PCIe': 756e12,
    'H100': 989e12,
    'A100': 312e12,
    'L40S': 362e12,
    'RTX 4090': 165e12,
}


def speed(tokens, flops, seconds, device):
    """Tokens per second of a step, and on a GPU of PEAK the share of its FLOPs per second that the step uses (MFU)."""
    name = torch.cuda.get_device_name(device) if device.startswith('cuda') else ''
    peak = next((peak for part, peak in PEAK.items() if part in name), None)
    return {'tokens_s': round(tokens / seconds)} | ({'mfu': round(flops / seconds / peak, 4)} if peak else {})


def synchronize(device):
    if device.startswith('cuda'):
        torch.cuda.synchronize()


def measure(calls, rounds, device, warm_up=2):
    """{name: median seconds} of the functions in `calls`. Each round runs all; the first warm_up rounds do not count."""
    times = {name: [] for name in calls}
    for i in tqdm(range(-warm_up, rounds), desc='rounds', leave=False, disable=None):
        for name, call in calls.items():
            synchronize(device)
            begin = time.perf_counter()
            call()
            synchronize(device)
            if i >= 0:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
