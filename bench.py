"""Measures what the recurrences cost, as ratios to the plain transformer in one run: `python bench.py train --json=True`.

    python bench.py train      a training step under each schedule, beside the ratio of FLOPs, which is the floor; with
                               --compile also how much longer the first step takes
    python bench.py scaling    a training step at twice the length, and with twice the passes, beside its FLOPs
    python bench.py memory     the peak memory of each such step, beside what train.py --dry_run predicts
    python bench.py decode     a decoded token of each architecture, after a prompt
    python bench.py prefill    reading a prompt token by token, and by parallel fixed-point passes
    python bench.py data       the loader alone, against what the small text models consume
    python bench.py configs    parameters and FLOPs of every config, as a table in Markdown; measures nothing

Rounds are interleaved (every variant once, then all again), so that a machine whose speed drifts slows all of them alike.
"""

import concurrent.futures
import functools
import json
import math
import multiprocessing
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if 'OMP_WAIT_POLICY' not in os.environ:  # read when torch is loaded: a waiting thread soon leaves its core to others
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from configurator import ConfigError, fail, key, parse, reporting
from model import GPTConfig, build
from sample import SampleConfig, prefill
from schedule import SEQUENTIAL
from support.accounting import count_flops, count_memory, count_parameters
from support.data import Dataset
from support.figures import print_markdown, print_table
from support.loading import find_checkpoint, load_model
from support.optimizers import make_optimizers
from support.processes import use_device
from support.suggestions import nearest
from support.timing import measure, speed
from train import TrainConfig


@dataclass
class Bench:
    """The settings that every benchmark has."""

    json: bool = key(False, 'also print one JSON object as the last line')

    def check(self):
        pass


@dataclass
class TimedBench(Bench):
    rounds: int = key(15, 'rounds; the medians are reported', bounds=(1, 10**6))
    device: str = key('auto', 'cpu, cuda or mps; auto takes a GPU where there is one')
    threads: int = key(0, 'CPU threads; 0 leaves the default', bounds=(0, 1024))

    def model_config(self, config_class=GPTConfig, **variant):
        """The config_class of these settings, where those of a variant come first."""
        shape = {name: value for name, value in asdict(self).items() if name in config_class.__dataclass_fields__}
        return config_class(**shape | variant)


@dataclass
class TrainBench(TimedBench):
    n_layer: int = key(10, 'layers')
    n_embd: int = key(256, 'width')
    n_head: int = key(4, 'heads')
    vocab_size: int = key(257, 'tokens in the vocabulary', bounds=(1, 10**7))
    block_size: int = key(256, 'tokens in a sequence')
    batch_size: int = key(4, 'sequences in a step')
    l_start: int = key(4, 'T2MLR: first layer of the span')
    l_end: int = key(5, 'T2MLR: last layer of the span')
    source_layer: int = key(6, 'LRT: layer whose output is the memory')
    only: str = key('', 'variants to measure, joined by commas; empty is all')
    profile: bool = key(False, 'also print where the time of each variant goes')
    compile: bool = key(False, 'compile the repeated block, and report how much longer the first step takes')
    dtype: str = key('float32', 'of the computation', ('float32', 'bfloat16'))
    threads: int = key(1, 'CPU threads; 0 leaves the default', bounds=(0, 1024))

    def check(self):
        for name in chosen_variants(self):
            if name not in VARIANTS:
                raise ConfigError(f'only={name} is not known; {nearest(name, VARIANTS)}')
            training_config(self, name)


def jacobi(d_forward, d_backward):
    return {'schedule': 'jacobi', 'd_forward': d_forward, 'd_backward': d_backward}


VARIANTS = {
    'plain': {},
    'textbook': {},
    't2mlr_16_4': {'recurrence': 't2mlr'} | jacobi(16, 4),
    't2mlr_4_4': {'recurrence': 't2mlr'} | jacobi(4, 4),
    't2mlr_4_4_scan': {'recurrence': 't2mlr', 'scan': True} | jacobi(4, 4),
    't2mlr_2_2': {'recurrence': 't2mlr'} | jacobi(2, 2),
    'lrt_interleaved_2': {'recurrence': 'lrt', 'schedule': 'interleaved', 'n_subsets': 2},
    'lrt_interleaved_2_scan': {'recurrence': 'lrt', 'schedule': 'interleaved', 'n_subsets': 2, 'scan': True},
    'lrt_refine_1': {'recurrence': 'lrt'} | jacobi(1, 2),
}


def compare(seconds, base):
    """{name: {'ms': milliseconds, 'ratio': to those of `base`}}."""
    return {name: {'ms': round(s * 1e3, 3), 'ratio': round(s / seconds[base], 3)} for name, s in seconds.items()}


def show(results, **columns):
    """Prints {variant: {column: number}} as a table. columns: the format of each; one that no row has is left out."""
    columns = {name: form for name, form in columns.items() if any(name in row for row in results.values())}
    rows = [[variant, *(format(row[name], form) for name, form in columns.items())] for variant, row in results.items()]
    print_table(['variant', *columns], rows)


class TextbookLayer(nn.Module):
    def __init__(self, D, H):
        super().__init__()
        self.d = D // H
        self.alpha, self.beta = nn.Parameter(torch.ones(())), nn.Parameter(torch.full((), 0.1))
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in 'qkvo')
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x, x0, cos, sin):
        def norm(x):
            return F.rms_norm(x, (x.size(-1),))

        def rotated(x):
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        B, T, D = x.shape
        x = self.alpha * x + self.beta * x0
        q, k, v = (f(norm(x)).view(B, T, -1, self.d).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(norm(rotated(q)), norm(rotated(k)), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.relu(self.up(norm(x))).square())


class Textbook(nn.Module):
    """The plain transformer of the nanochat family, a yardstick for ours: it computes the same."""

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(TextbookLayer(config.n_embd, config.n_head) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        d = config.head_dim
        angle = torch.arange(config.block_size)[:, None] * config.rope_base ** (-torch.arange(0, d, 2) / d)
        self.register_buffer('cos', angle.cos())
        self.register_buffer('sin', angle.sin())

    def forward(self, tokens, targets, *_):
        """tokens, targets (B, T) -> the loss and the logits (B, T, vocab_size)."""
        T = tokens.size(1)
        x = x0 = F.rms_norm(self.embed(tokens), (self.embed.embedding_dim,))
        for block in self.blocks:
            x = block(x, x0, self.cos[:T], self.sin[:T])
        logits = 15 * torch.tanh(self.head(F.rms_norm(x, (x.size(-1),))).float() / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits

    def compile(self):
        for block in self.blocks:
            block.compile(dynamic=False)


def chosen_variants(bench):
    return list(dict.fromkeys(['plain', *([name for name in bench.only.split(',') if name] or VARIANTS)]))


def training_config(bench, variant):
    config = bench.model_config(TrainConfig, **(VARIANTS[variant] if isinstance(variant, str) else variant))
    config.check()
    return config


def take_step(model, optimizers, config, x, y, recur_mask=None):
    """One step of training on the batch x, y (B, T) and recur_mask (B, T) or None, without the checks of train.py."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=config.dtype == 'bfloat16'):
        loss, _ = model(x, y, config, recur_mask)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def training_step(bench, variant, device):
    """(function that takes a step of `variant`; its FLOPs relative to the plain transformer's; its FLOPs)."""
    config = training_config(bench, variant)
    torch.manual_seed(0)
    model = (Textbook if variant == 'textbook' else build)(config).to(device)
    if bench.compile:
        model.compile()
    optimizers = make_optimizers(model, config, device)
    x, y = torch.randint(config.vocab_size, (2, bench.batch_size, config.block_size), device=device).unbind()

    def step():
        take_step(model, optimizers, config, x, y)

    with torch.device('meta'):
        flops = count_flops(build(config), config, config.block_size)
    return step, flops['step'] / flops['plain_step'], flops['step'] * bench.batch_size * config.block_size


def in_new_process(call, *args):
    """The result of call(*args) in a new process."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        return pool.submit(call, *args).result()


def first_step(bench, variant):
    """Seconds of the first step, which compiles, without torch's caches. To be called in a new process."""
    torch._inductor.config.force_disable_caches = True
    warnings.filterwarnings('ignore', 'dynamo_pgo force disabled')  # it says what the line above asks for
    device = use_device(bench)
    step, *_ = training_step(bench, variant, device)
    return measure({variant: step}, 1, device, warm_up=0)[variant]


def bench_train(bench):
    """Milliseconds of a step, its ratio, that of its FLOPs, and its speed; compiled, also how much longer the first takes."""
    device, names, first = use_device(bench), chosen_variants(bench), {}
    for name in tqdm(names, desc='first steps', leave=False, disable=None) if bench.compile else ():
        first[name] = in_new_process(first_step, bench, name)
    steps = {name: training_step(bench, name, device) for name in names}
    seconds = measure({name: step for name, (step, *_) in steps.items()}, bench.rounds, device)
    results = compare(seconds, 'plain')
    for name, row in results.items():
        _, floor, flops = steps[name]
        row |= {'floor': round(floor, 3)} | speed(bench.batch_size * bench.block_size, flops, seconds[name], device)
        if bench.compile:
            row['start_s'] = round(first[name] - row['ms'] / 1e3, 1)
    show(results, ms='.1f', ratio='.2f', floor='.2f', tokens_s=',', mfu='.1%', start_s='.1f')
    for name, (step, *_) in steps.items() if bench.profile else ():
        with torch.profiler.profile() as profile:
            step()
        table = profile.key_averages().table(sort_by='self_cpu_time_total', row_limit=15, max_name_column_width=40)
        print(f'\n{name}\n{table}')
    return results


def bench_scaling(bench):
    """How the time of a step grows beside its FLOPs: from T to 2 T and 4 T at equal tokens, and from 4 to 8 and 16 passes."""
    if bench.batch_size % 4:
        raise ConfigError(f'batch_size={bench.batch_size} must be divisible by 4, for four times the length.')
    device, cells = use_device(bench), {}  # settings, variant, and the cell to compare with
    for name in chosen_variants(bench):
        for factor in (1, 2, 4) if name != 'textbook' else ():
            longer = replace(bench, block_size=factor * bench.block_size, batch_size=bench.batch_size // factor)
            cells[f'{name}, T={longer.block_size}'] = longer, VARIANTS[name], f'{name}, T={bench.block_size}'
    for d_forward in (4, 8, 16) if not bench.only else ():
        cells[f'd_forward={d_forward}'] = bench, {'recurrence': 't2mlr'} | jacobi(d_forward, 4), 'd_forward=4'
    steps = {name: training_step(sized, variant, device) for name, (sized, variant, _) in cells.items()}
    seconds, results = measure({name: step for name, (step, *_) in steps.items()}, bench.rounds, device), {}
    for name, (_, _, base) in cells.items():
        grows, count = seconds[name] / seconds[base], steps[name][2] / steps[base][2]
        row = {'ms': seconds[name] * 1e3, 'grows': grows, 'count': count, 'of_count': grows / count}
        results[name] = {column: round(number, 3) for column, number in row.items()}
    show(results, ms='.1f', grows='.2f', count='.2f', of_count='.2f')
    return results


def peak_memory(bench, variant):
    """The most bytes of two steps; on CPU, how much this process grew. To be called in a new process."""
    device, peaks = use_device(bench), []
    for size in (replace(bench, n_embd=2 * bench.n_head, vocab_size=2, block_size=2, batch_size=1), bench):
        step, *_ = training_step(size, variant, device)  # the small one loads the libraries
        step()
        step()  # the first makes the state of the optimizers
        with open('/proc/self/status') as f:
            peaks.append(next(int(line.split()[1]) * 1024 for line in f if line.startswith('VmHWM')))
    return torch.cuda.max_memory_allocated() if device.startswith('cuda') else peaks[1] - peaks[0]


def bench_memory(bench):
    """Peak memory of each variant, each in a new process."""
    if not os.path.exists('/proc/self/status'):
        raise ConfigError(f'the memory of a process is read from /proc, which {sys.platform} lacks; take Linux.')
    os.environ['MALLOC_MMAP_THRESHOLD_'] = '65536'  # else glibc keeps freed memory, and the peak shows its fragments
    results, rows = {}, []
    for name in tqdm(chosen_variants(bench), desc='variants', leave=False, disable=None):
        row = results[name] = {'measured': in_new_process(peak_memory, bench, name)}
        row['ratio'] = round(row['measured'] / results['plain']['measured'], 3)
        if name != 'textbook':
            row['predicted'] = count_memory(training_config(bench, name))['peak']
        mib = [f'{row[key] / 2**20:,.0f}' if key in row else '' for key in ('measured', 'predicted')]
        rows.append([name, *mib, f'{row["ratio"]:.2f}'])
    print_table(['variant', 'measured, MiB', 'predicted', 'ratio'], rows)
    return results


@dataclass
class DecodeBench(TimedBench):
    n_layer: int = key(20, 'layers')
    n_embd: int = key(512, 'width')
    n_head: int = key(8, 'heads')
    vocab_size: int = key(32768, 'tokens in the vocabulary, as in the LRT paper', bounds=(1, 10**7))
    block_size: int = key(256, 'slots of the state')
    batch_size: int = key(1, 'sequences decoded together', bounds=(1, 10**6))
    prompt: int = key(32, 'tokens before the first that is measured', bounds=(1, math.inf))
    tokens: int = key(8, 'tokens in a round', bounds=(1, math.inf))
    compile: bool = key(False, 'compile the repeated block')

    def check(self):
        if self.prompt + self.tokens > self.block_size:
            raise ConfigError(f'prompt={self.prompt} and tokens={self.tokens} do not fit block_size={self.block_size}.')
        self.model_config().check()


def decoding_variants(n_layer):
    """The architectures of one size: a T2MLR span of a fifth of the layers in the middle, LRT's source at 0.6 of the depth."""
    l_start, span, source = round(0.4 * n_layer), max(1, n_layer // 5), min(round(0.6 * n_layer), n_layer - 1)
    return {
        'plain': {},
        't2mlr': {'recurrence': 't2mlr', 'l_start': l_start, 'l_end': l_start + span - 1, 'gamma_init': 0.1},
        'lrt_shared': {'recurrence': 'lrt', 'source_layer': source},
        'lrt_layerwise': {'recurrence': 'lrt', 'source_layer': source, 'memory_projection': 'layerwise'},
    }


@torch.inference_mode()
def bench_decode(bench):
    """Milliseconds per token, and three ratios to the plain transformer: of time, of FLOPs (the
    floor), and of the weights that a token reads, which bind a single sequence."""
    device = use_device(bench)
    token = torch.zeros(bench.batch_size, 1, dtype=torch.long, device=device)
    calls, floors, weights = {}, {}, {}
    for name, variant in decoding_variants(bench.n_layer).items():
        model = build(bench.model_config(**variant)).to(device).eval()
        if bench.compile:
            model.compile_token()
        state = model.new_state(bench.batch_size)
        flops = count_flops(model, SEQUENTIAL, bench.block_size)
        floors[name] = flops['decode'] / flops['plain_forward']
        weights[name] = sum(count_parameters(model).values()) - model.embed.weight.numel()

        def call(model=model, state=state):
            state.position.fill_(bench.prompt)  # the same slots in every round
            for _ in range(bench.tokens):
                model.token(token, state)

        calls[name] = call
    results = compare(measure(calls, bench.rounds, device), 'plain')
    for name, row in results.items():
        row |= {'ms': round(row['ms'] / bench.tokens, 3), 'floor': round(floors[name], 3)}
        row['weights'] = round(weights[name] / weights['plain'], 3)
    show(results, ms='.2f', ratio='.3f', floor='.3f', weights='.3f')
    return results


@dataclass
class PrefillBench(TimedBench):
    ckpt: str = key('', 'checkpoint of a recurrent text model; empty measures fresh models, which converge sooner')
    n_layer: int = key(12, 'layers of a fresh model')
    n_embd: int = key(256, 'width of a fresh model')
    n_head: int = key(4, 'heads of a fresh model')
    prompt: int = key(256, 'tokens of the prompt', bounds=(1, 10**7))
    jacobi_tol: float = key(1e-4, 'passes end when their output changes by less than this share', bounds=(0, math.inf))
    rounds: int = key(3, 'rounds; the medians are reported', bounds=(1, 10**6))

    def check(self):
        self.model_config(block_size=self.prompt).check()


@torch.inference_mode()
def bench_prefill(bench):
    """Milliseconds for a prompt, token by token and in parallel; the passes; and the largest difference of the logits."""
    device, results = use_device(bench), {}
    tokens = torch.randint(256, (1, bench.prompt), generator=torch.Generator().manual_seed(0))
    if bench.ckpt:
        model, checkpoint = load_model(find_checkpoint(bench.ckpt), device)
        name = model.config.recurrence
        if name == 'none' or checkpoint['meta']['kind'] != 'text' or bench.prompt > model.config.block_size:
            has = f'it has recurrence={name} and a context of {model.config.block_size}'
            raise ConfigError(f'ckpt={bench.ckpt} must be a recurrent text model that fits prompt={bench.prompt}; {has}.')
        tokens = torch.from_numpy(Dataset(checkpoint['config']['data_dir']).split('val')[: bench.prompt].astype('int64'))[None]
        models = {name: model}
    else:
        shape, variants = {'vocab_size': 257, 'block_size': bench.prompt}, decoding_variants(bench.n_layer)
        models = {name: build(bench.model_config(**shape | v)).to(device).eval() for name, v in variants.items() if v}
    tokens = tokens.to(device)
    for name, model in models.items():

        def read(method, model=model):
            settings = SampleConfig(prefill=method, prefill_chunk=bench.prompt, jacobi_tol=bench.jacobi_tol)
            return prefill(model, model.new_state(1), tokens, settings)

        calls = {method: functools.partial(read, method) for method in ('exact', 'jacobi')}
        row = compare(measure(calls, bench.rounds, device), 'jacobi')
        results[name] = {'exact_ms': row['exact']['ms'], 'jacobi_ms': row['jacobi']['ms'], 'speed_up': row['exact']['ratio']}
        (exact, _), (parallel, passes) = (call() for call in calls.values())
        results[name] |= {'passes': passes, 'difference': (exact - parallel).abs().max().item()}
    show(results, exact_ms='.1f', jacobi_ms='.1f', speed_up='.1f', passes='d', difference='.1e')
    return results


@dataclass
class DataBench(Bench):
    data_dir: str = key('data/stdlib', 'dataset')
    config: str = key('', 'config file of the run that is timed; empty takes config/text_transformer.py')
    batches: int = key(200, 'batches to draw', bounds=(1, 10**7))
    rounds: int = key(5, 'training steps to time; the median counts', bounds=(1, 10**6))


def bench_data(bench):
    """Tokens per second of the loader in one process, and of training on the same batches."""
    file = bench.config or str(Path(__file__).with_name('config') / 'text_transformer.py')
    config = parse(TrainConfig, [file, f'--data_dir={bench.data_dir}'], 'python bench.py data')
    data, device = Dataset(bench.data_dir), use_device(config)
    data.complete(config)
    T = data.length('train', config.block_size)
    begin = time.perf_counter()
    for step in range(bench.batches):
        batch = data.batch('train', data.rows('train', config.seed, step, config.batch_size, T), T)
    tokens = batch[0].numel()
    loader = bench.batches * tokens / (time.perf_counter() - begin)
    model = build(config).to(device)
    optimizers = make_optimizers(model, config, device)

    def step():
        take_step(model, optimizers, config, *(None if t is None else t.to(device) for t in batch))

    training = tokens / measure({'step': step}, bench.rounds, device)['step']
    ratio = round(loader / training, 1)
    print(f'loader {loader:,.0f} tokens/s, training {training:,.0f} tokens/s: {ratio} times')
    return {'loader_tokens_per_s': round(loader), 'training_tokens_per_s': round(training), 'ratio': ratio}


def bench_configs(bench):
    """One row per config: parameters, the recurrence's share, FLOPs as multiples of the plain
    transformer's. Where the data decide the vocabulary, the row has that of bytes, in brackets."""
    results, rows = {}, []
    for path in sorted(Path(__file__).parent.glob('config/*.py')):
        config = parse(TrainConfig, [str(path), '--dry_run=True'], 'python bench.py configs')
        stated, config.vocab_size = config.vocab_size, config.vocab_size or 257
        with torch.device('meta'):
            model = build(config)
        parts, flops = count_parameters(model), count_flops(model, config, config.block_size)
        total = sum(parts.values())
        share = parts.get('recurrence', 0) / total
        step, decode = flops['step'] / flops['plain_step'], flops['decode'] / flops['plain_forward']
        results[path.stem] = {'vocab_size': config.vocab_size, 'total_parameters': total, 'recurrence_share': share}
        results[path.stem] |= {'step_flops_ratio': step, 'decode_ratio': decode}
        vocabulary = f'{stated:,}' if stated else f'({config.vocab_size})'
        rows.append([f'`{path.stem}`', vocabulary, f'{total:,}', f'{share:.2%}', f'{step:.2f}', f'{decode:.3f}'])
    print_markdown(['config', 'vocabulary', 'parameters', 'recurrence', 'training step', 'decoded token'], rows)
    return results


BENCHES = {
    'train': (TrainBench, bench_train),
    'scaling': (TrainBench, bench_scaling),
    'memory': (TrainBench, bench_memory),
    'decode': (DecodeBench, bench_decode),
    'prefill': (PrefillBench, bench_prefill),
    'data': (DataBench, bench_data),
    'configs': (Bench, bench_configs),
}


def main(argv):
    if argv in ([], ['--help'], ['-h']):
        with reporting():
            print(__doc__)
        raise SystemExit(0)
    if argv[0] not in BENCHES:
        raise fail(f'{argv[0]} is not a benchmark; {nearest(argv[0], BENCHES)}')
    config_class, run = BENCHES[argv[0]]
    config = parse(config_class, argv[1:], f'python bench.py {argv[0]} [--key=value ...]')
    with reporting():
        results = run(config)
        if config.json:
            print(json.dumps(results))


if __name__ == '__main__':
    main(sys.argv[1:])
