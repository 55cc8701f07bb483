"""Measures what the recurrences cost, as ratios to the plain transformer in one run: `python bench.py train --json=True`.

    python bench.py train      a training step under each schedule, beside the ratio of operations, which is the floor
    python bench.py configs    parameters and operations of every config, as a table in Markdown; measures nothing

Rounds are interleaved (every variant once, then all again), so that a machine whose speed drifts slows all of them alike.
"""

import glob
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
from tqdm import tqdm

from configurator import ConfigError, fail, key, parse, read_file, reporting
from model import GPTConfig, build, count_flops, count_parameters
from train import TrainConfig, make_optimizers, pick_device


@dataclass
class TrainBench:
    n_layer: int = key(10, 'layers')
    n_embd: int = key(256, 'width')
    n_head: int = key(4, 'heads')
    vocab_size: int = key(257, 'tokens in the vocabulary')
    block_size: int = key(256, 'tokens in a sequence')
    batch_size: int = key(4, 'sequences in a step')
    l_start: int = key(4, 'T2MLR: first layer of the span')
    l_end: int = key(5, 'T2MLR: last layer of the span')
    source_layer: int = key(6, 'LRT: layer whose output is the memory')
    rounds: int = key(15, 'rounds; the medians are reported')
    only: str = key('', 'variants to measure, joined by commas; empty is all')
    profile: bool = key(False, 'also print where the time of each variant goes')
    compile: bool = key(False, 'compile the repeated block')
    device: str = key('auto', 'cpu, cuda, mps; auto takes the first that is there, from the right')
    dtype: str = key('float32', 'of the computation', ('float32', 'bfloat16'))
    threads: int = key(1, 'CPU threads')
    json: bool = key(False, 'also print one JSON object as the last line')

    def check(self):
        for name in ('rounds', 'threads', 'batch_size', 'vocab_size'):
            if getattr(self, name) < 1:
                raise ConfigError(f'{name}={getattr(self, name)} must be at least 1.')
        chosen = [name for name in self.only.split(',') if name]
        for name in chosen:
            if name not in VARIANTS:
                raise ConfigError(f'only={name} is not known; choose from {", ".join(VARIANTS)}.')
        GPTConfig(**{k: v for k, v in asdict(self).items() if k in GPTConfig.__dataclass_fields__}).check()


def jacobi(d_forward, d_backward):
    return {'schedule': 'jacobi', 'd_forward': d_forward, 'd_backward': d_backward}


VARIANTS = {
    'plain': {},
    't2mlr_16_4': {'recurrence': 't2mlr'} | jacobi(16, 4),
    't2mlr_4_4': {'recurrence': 't2mlr'} | jacobi(4, 4),
    't2mlr_2_2': {'recurrence': 't2mlr'} | jacobi(2, 2),
    'lrt_interleaved_2': {'recurrence': 'lrt', 'schedule': 'interleaved', 'n_subsets': 2},
    'lrt_refine_1': {'recurrence': 'lrt'} | jacobi(1, 2),
}


def synchronize(device):
    if device.startswith('cuda'):
        torch.cuda.synchronize()


def training_step(bench, variant, device):
    """(a function that makes one update of `variant`, the operations of it as a multiple of the plain transformer's)."""
    shape = {k: v for k, v in asdict(bench).items() if k in TrainConfig.__dataclass_fields__}
    config = TrainConfig(**shape | VARIANTS[variant])
    config.check()
    torch.manual_seed(0)
    model = build(config).to(device)
    if bench.compile:
        model.compile()
    optimizers = make_optimizers(model, config, device)
    x = torch.randint(config.vocab_size, (bench.batch_size, config.block_size), device=device)
    y = torch.randint(config.vocab_size, (bench.batch_size, config.block_size), device=device)

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=bench.dtype == 'bfloat16'):
            loss, _ = model(x, y, config)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    flops = count_flops(model, config, config.block_size)
    return step, flops['step'] / flops['plain_step']


def bench_train(bench):
    torch.set_num_threads(bench.threads)
    device = pick_device(bench.device)
    chosen = [name for name in bench.only.split(',') if name] or list(VARIANTS)
    steps = {name: training_step(bench, name, device) for name in dict.fromkeys(['plain', *chosen])}
    times = {name: [] for name in steps}
    for round_ in tqdm(range(-2, bench.rounds), desc='rounds', leave=False, disable=None):
        for name, (step, _) in steps.items():
            synchronize(device)
            begin = time.perf_counter()
            step()
            synchronize(device)
            if round_ >= 0:  # the first two warm up
                times[name].append(time.perf_counter() - begin)
    plain = statistics.median(times['plain'])
    print(f'{"variant":<20}{"ms":>9}{"ratio":>8}{"floor":>8}')
    found = {}
    for name, (_, floor) in steps.items():
        median = statistics.median(times[name])
        found[name] = {'ms': round(median * 1e3, 2), 'ratio': round(median / plain, 3), 'floor': round(floor, 3)}
        print(f'{name:<20}{median * 1e3:>9.1f}{median / plain:>8.2f}{floor:>8.2f}')
    if bench.profile:
        for name, (step, _) in steps.items():
            with torch.profiler.profile() as profile:
                step()
            print(f'\n{name}')
            print(profile.key_averages().table(sort_by='self_cpu_time_total', row_limit=15, max_name_column_width=40))
    return found


@dataclass
class ConfigsBench:
    json: bool = key(False, 'also print one JSON object as the last line')

    def check(self):
        pass


def bench_configs(bench):
    """One row a config: parameters, the recurrence's share, operations as multiples of the plain transformer's."""
    found = {}
    print('| config | parameters | recurrence | training step | decoded token |')
    print('| --- | ---: | ---: | ---: | ---: |')
    for path in sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'config', '*.py'))):
        config = TrainConfig(**{k: v for k, v in read_file(path).items() if k in TrainConfig.__dataclass_fields__})
        if not config.vocab_size:  # its data decides
            continue
        with torch.device('meta'):
            model = build(config)
        parts, flops = count_parameters(model), count_flops(model, config, config.block_size)
        total, name = sum(parts.values()), os.path.basename(path)[: -len('.py')]
        share = parts.get('recurrence', 0) / total
        step, decode = flops['step'] / flops['plain_step'], flops['decode'] / flops['plain_forward']
        found[name] = {'total_parameters': total, 'recurrence_share': share, 'step_flops_ratio': step, 'decode_ratio': decode}
        print(f'| `{name}` | {total:,} | {share:.2%} | {step:.2f} | {decode:.3f} |')
    return found


BENCHES = {'train': (TrainBench, bench_train), 'configs': (ConfigsBench, bench_configs)}


def main(argv):
    if not argv or argv[0] not in BENCHES:
        if argv in ([], ['--help'], ['-h']):
            print(__doc__)
            raise SystemExit(0)
        raise fail(f'{argv[0]} is not a benchmark; choose from {", ".join(BENCHES)}.')
    config_class, run = BENCHES[argv[0]]
    config = parse(config_class, argv[1:], f'python bench.py {argv[0]} [--key=value ...]')
    with reporting():
        found = run(config)
        if config.json:
            print(json.dumps(found))


if __name__ == '__main__':
    main(sys.argv[1:])
