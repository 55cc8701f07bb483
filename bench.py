"""Measures what the recurrences cost, as ratios to the plain transformer in one run: `python bench.py train --json=True`.

    python bench.py train      a training step under each schedule, beside the ratio of operations, which is the floor
    python bench.py scaling    a training step at twice the length, and with twice the passes, against the count of operations
    python bench.py memory     what the tensors of each such step hold at most, beside what train.py --dry_run predicts
    python bench.py decode     a decoded token of each architecture, behind a prompt
    python bench.py prefill    reading a prompt token by token, and by parallel fixed-point passes
    python bench.py data       the loader alone, against what the small text models consume
    python bench.py configs    parameters and operations of every config, as a table in Markdown; measures nothing

Rounds are interleaved (every variant once, then all again), so that a machine whose speed drifts slows all of them alike.
"""

import concurrent.futures
import functools
import glob
import json
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from configurator import ConfigError, fail, key, parse, read_file, reporting
from model import SEQUENTIAL, GPTConfig, build, count_flops, count_parameters
from sample import SampleConfig, find_checkpoint, load_model, prefill
from train import Dataset, TrainConfig, count_memory, make_optimizers, pick_device


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
        for name in chosen_variants(self):
            if name not in VARIANTS:
                raise ConfigError(f'only={name} is not known; choose from {", ".join(VARIANTS)}.')
            training_config(self, name)


def jacobi(d_forward, d_backward):
    return {'schedule': 'jacobi', 'd_forward': d_forward, 'd_backward': d_backward}


VARIANTS = {
    'plain': {},
    'textbook': {},
    't2mlr_16_4': {'recurrence': 't2mlr'} | jacobi(16, 4),
    't2mlr_4_4': {'recurrence': 't2mlr'} | jacobi(4, 4),
    't2mlr_2_2': {'recurrence': 't2mlr'} | jacobi(2, 2),
    'lrt_interleaved_2': {'recurrence': 'lrt', 'schedule': 'interleaved', 'n_subsets': 2},
    'lrt_refine_1': {'recurrence': 'lrt'} | jacobi(1, 2),
}


def synchronize(device):
    if device.startswith('cuda'):
        torch.cuda.synchronize()


def measure(calls, rounds, device):
    """{name: seconds of each of `rounds` rounds} of the functions in `calls`, all of them in every round; two warm up."""
    times = {name: [] for name in calls}
    for number in tqdm(range(-2, rounds), desc='rounds', leave=False, disable=None):
        for name, call in calls.items():
            synchronize(device)
            begin = time.perf_counter()
            call()
            synchronize(device)
            if number >= 0:
                times[name].append(time.perf_counter() - begin)
    return times


def compare(times, base):
    """{name: {'ms': median, 'ratio': of the medians}}; the ratio is to `base`."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {name: {'ms': round(m * 1e3, 3), 'ratio': round(m / medians[base], 3)} for name, m in medians.items()}


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
    """The plain transformer of the nanochat family as one would write it without a thought of a memory: the yardstick of ours,
    which computes the same."""

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


def chosen_variants(bench):
    return list(dict.fromkeys(['plain', *([name for name in bench.only.split(',') if name] or VARIANTS)]))


def training_config(bench, variant):
    shape = {k: v for k, v in asdict(bench).items() if k in TrainConfig.__dataclass_fields__}
    config = TrainConfig(**shape | (VARIANTS[variant] if isinstance(variant, str) else variant))
    config.check()
    return config


def training_step(bench, variant, device):
    """(a function that makes one update of `variant`, a name or settings; its operations as a multiple of the plain
    transformer's; its operations)."""
    config = training_config(bench, variant)
    torch.manual_seed(0)
    model = (Textbook if variant == 'textbook' else build)(config).to(device)
    if bench.compile and variant == 'textbook':
        for block in model.blocks:
            block.compile(dynamic=False)
    elif bench.compile:
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

    with torch.device('meta'):
        flops = count_flops(build(config), config, config.block_size)
    return step, flops['step'] / flops['plain_step'], flops['step'] * bench.batch_size * config.block_size


def bench_train(bench):
    torch.set_num_threads(bench.threads)
    device = pick_device(bench.device)
    steps = {name: training_step(bench, name, device) for name in chosen_variants(bench)}
    found = compare(measure({name: step for name, (step, *_) in steps.items()}, bench.rounds, device), 'plain')
    print(f'{"variant":<20}{"ms":>9}{"ratio":>8}{"floor":>8}')
    for name, (_, floor, _) in steps.items():
        found[name]['floor'] = round(floor, 3)
        print(f'{name:<20}{found[name]["ms"]:>9.1f}{found[name]["ratio"]:>8.2f}{floor:>8.2f}')
    if bench.profile:
        for name, (step, *_) in steps.items():
            with torch.profiler.profile() as profile:
                step()
            print(f'\n{name}')
            print(profile.key_averages().table(sort_by='self_cpu_time_total', row_limit=15, max_name_column_width=40))
    return found


def bench_scaling(bench):
    """How the time of a step grows beside the count of operations: from T to 2 T and 4 T at the same number of tokens, and
    from 4 to 8 and 16 passes."""
    if bench.batch_size % 4:
        raise ConfigError(f'batch_size={bench.batch_size} must be divisible by 4, for four times the length.')
    torch.set_num_threads(bench.threads)
    device = pick_device(bench.device)
    cells = {}
    for name in chosen_variants(bench):
        if name != 'textbook':
            for factor in (1, 2, 4):
                longer = replace(bench, block_size=factor * bench.block_size, batch_size=bench.batch_size // factor)
                cells[f'{name}, T={longer.block_size}'] = (longer, VARIANTS[name], f'{name}, T={bench.block_size}')
    for d_forward in (4, 8, 16) if not bench.only else ():
        variant = {'recurrence': 't2mlr'} | jacobi(d_forward, 4)
        cells[f'd_forward={d_forward}'] = (bench, variant, 'd_forward=4')
    steps = {name: training_step(sized, variant, device) for name, (sized, variant, _) in cells.items()}
    times = measure({name: step for name, (step, _, _) in steps.items()}, bench.rounds, device)
    medians, found = {name: statistics.median(seconds) for name, seconds in times.items()}, {}
    print(f'{"step":<30}{"ms":>9}{"grows by":>10}{"count":>8}{"of it":>8}')
    for name, (_, _, base) in cells.items():
        grows, count = medians[name] / medians[base], steps[name][2] / steps[base][2]
        found[name] = {'ms': round(medians[name] * 1e3, 1), 'grows': round(grows, 3), 'count': round(count, 3)}
        print(f'{name:<30}{found[name]["ms"]:>9.1f}{grows:>10.2f}{count:>8.2f}{grows / count:>8.2f}')
    return found


def peak_memory(bench, variant):
    """Bytes that three updates need at most; on CPU those by which this process grew, which should be a fresh one."""
    device, peaks = pick_device(bench.device), []
    torch.set_num_threads(bench.threads)
    for size in (replace(bench, n_embd=2 * bench.n_head, vocab_size=2, block_size=2, batch_size=1), bench):
        step, *_ = training_step(size, variant, device)  # the small one loads what every step needs
        for _ in range(3):
            step()
        with open('/proc/self/status') as f:
            peaks.append(next(int(line.split()[1]) * 1024 for line in f if line.startswith('VmHWM')))
    return torch.cuda.max_memory_allocated() if device.startswith('cuda') else peaks[1] - peaks[0]


def bench_memory(bench):
    """Peak of each variant in a process of its own, which gives back what it frees: glibc alone would keep it, in pieces."""
    if not os.path.exists('/proc/self/status'):
        raise ConfigError(f'the memory of a process is read from /proc, which {sys.platform} lacks; take Linux.')
    os.environ['MALLOC_MMAP_THRESHOLD_'] = '65536'
    found, context = {}, multiprocessing.get_context('spawn')
    print(f'{"variant":<20}{"measured, MiB":>15}{"predicted":>11}{"ratio":>8}')
    with concurrent.futures.ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        for name in chosen_variants(bench):
            measured = pool.submit(peak_memory, bench, name).result()
            row = {'measured': measured, 'ratio': round(measured / found.get('plain', {'measured': measured})['measured'], 3)}
            if name != 'textbook':
                row['predicted'] = count_memory(training_config(bench, name))['peak']
            found[name] = row
            predicted = f'{row["predicted"] / 2**20:,.0f}' if 'predicted' in row else ''
            print(f'{name:<20}{measured / 2**20:>15,.0f}{predicted:>11}{row["ratio"]:>8.2f}')
    return found


@dataclass
class DecodeBench:
    n_layer: int = key(20, 'layers')
    n_embd: int = key(512, 'width')
    n_head: int = key(8, 'heads')
    vocab_size: int = key(32768, 'tokens in the vocabulary, as in the LRT paper')
    block_size: int = key(256, 'slots of the state')
    batch_size: int = key(1, 'sequences decoded together')
    prompt: int = key(32, 'tokens before the first that is measured')
    tokens: int = key(8, 'tokens in a round')
    rounds: int = key(15, 'rounds; the medians are reported')
    compile: bool = key(False, 'compile the repeated block')
    device: str = key('auto', 'cpu, cuda, mps; auto takes the first that is there, from the right')
    threads: int = key(0, 'CPU threads; 0 leaves the default')
    json: bool = key(False, 'also print one JSON object as the last line')

    def check(self):
        for name in ('rounds', 'batch_size', 'vocab_size', 'prompt', 'tokens'):
            if getattr(self, name) < 1:
                raise ConfigError(f'{name}={getattr(self, name)} must be at least 1.')
        if self.prompt + self.tokens > self.block_size:
            raise ConfigError(f'prompt={self.prompt} and tokens={self.tokens} do not fit block_size={self.block_size}.')
        GPTConfig(**{k: v for k, v in asdict(self).items() if k in GPTConfig.__dataclass_fields__}).check()


def decoding_variants(n_layer):
    """The architectures of one size: a T2MLR span of a fifth of the layers in the middle, LRT's source at 0.6 of the depth."""
    start, span, source = round(0.4 * n_layer), max(1, n_layer // 5), round(0.6 * n_layer)
    return {
        'plain': {},
        't2mlr': {'recurrence': 't2mlr', 'l_start': start, 'l_end': start + span - 1, 'gamma_init': 0.1},
        'lrt_shared': {'recurrence': 'lrt', 'source_layer': source},
        'lrt_layerwise': {'recurrence': 'lrt', 'source_layer': source, 'memory_projection': 'layerwise'},
    }


@torch.inference_mode()
def bench_decode(bench):
    """Milliseconds a token, one forward each. The floors: the operations, and the weights that a token reads, which bind a
    single sequence; both as ratios to the plain transformer's."""
    if bench.threads:
        torch.set_num_threads(bench.threads)
    device = pick_device(bench.device)
    token = torch.zeros(bench.batch_size, 1, dtype=torch.long, device=device)
    calls, floors, weights = {}, {}, {}
    for name, variant in decoding_variants(bench.n_layer).items():
        shape = {k: v for k, v in asdict(bench).items() if k in GPTConfig.__dataclass_fields__}
        model = build(GPTConfig(**shape | variant)).to(device).eval()
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
    found = compare(measure(calls, bench.rounds, device), 'plain')
    print(f'{"variant":<16}{"ms/token":>10}{"ratio":>8}{"operations":>12}{"weights":>9}')
    for name, row in found.items():
        row['ms'] = round(row['ms'] / bench.tokens, 3)
        row['floor'], row['weights'] = round(floors[name], 3), round(weights[name] / weights['plain'], 3)
        print(f'{name:<16}{row["ms"]:>10.2f}{row["ratio"]:>8.3f}{row["floor"]:>12.3f}{row["weights"]:>9.3f}')
    return found


@dataclass
class PrefillBench:
    ckpt: str = key('', 'checkpoint of a recurrent text model; empty measures fresh models, which converge sooner')
    n_layer: int = key(12, 'layers of a fresh model')
    n_embd: int = key(256, 'width of a fresh model')
    n_head: int = key(4, 'heads of a fresh model')
    prompt: int = key(256, 'tokens of the prompt')
    jacobi_tol: float = key(1e-4, 'passes end when the span moves by less than this share')
    rounds: int = key(3, 'rounds; the medians are reported')
    device: str = key('auto', 'cpu, cuda, mps; auto takes the first that is there, from the right')
    threads: int = key(0, 'CPU threads; 0 leaves the default')
    json: bool = key(False, 'also print one JSON object as the last line')

    def check(self):
        for name in ('n_layer', 'n_embd', 'n_head', 'prompt', 'rounds'):
            if getattr(self, name) < 1:
                raise ConfigError(f'{name}={getattr(self, name)} must be at least 1.')
        SampleConfig(jacobi_tol=self.jacobi_tol, threads=self.threads).check()


@torch.inference_mode()
def bench_prefill(bench):
    """Milliseconds for a prompt, token by token and in parallel; the passes; and how far the logits after it lie apart."""
    if bench.threads:
        torch.set_num_threads(bench.threads)
    device = pick_device(bench.device)
    models, tokens = {}, torch.randint(256, (1, bench.prompt), generator=torch.Generator().manual_seed(0))
    if bench.ckpt:
        model, checkpoint = load_model(find_checkpoint(bench.ckpt), device)
        name = model.config.recurrence
        if name == 'none' or checkpoint['meta']['kind'] != 'text' or bench.prompt > model.config.block_size:
            raise ConfigError(
                f'ckpt={bench.ckpt} must be a recurrent text model with a context of {bench.prompt} tokens or more; it has '
                f'recurrence={name} and a context of {model.config.block_size}.'
            )
        tokens = torch.from_numpy(Dataset(checkpoint['config']['data_dir']).split('val')[: bench.prompt].astype('int64'))[None]
        models[name] = model
    else:
        shape = dict(vocab_size=257, block_size=bench.prompt, n_layer=bench.n_layer, n_embd=bench.n_embd, n_head=bench.n_head)
        variants = decoding_variants(bench.n_layer)
        models = {n: build(GPTConfig(**shape | v)).to(device).eval() for n, v in variants.items() if v}
    tokens, found = tokens.to(device), {}
    print(f'{"variant":<16}{"exact, ms":>11}{"jacobi, ms":>12}{"speed-up":>10}{"passes":>8}{"difference":>12}')
    for name, model in models.items():
        ways = {
            how: SampleConfig(prefill=how, prefill_chunk=bench.prompt, jacobi_tol=bench.jacobi_tol)
            for how in ('exact', 'jacobi')
        }
        last = {}

        def read(how, model=model, ways=ways, last=last):
            last[how] = prefill(model, model.new_state(1), tokens, ways[how])

        rows = compare(measure({how: functools.partial(read, how) for how in ways}, bench.rounds, device), 'jacobi')
        difference = (last['exact'][0] - last['jacobi'][0]).abs().max().item()
        row = {'exact_ms': rows['exact']['ms'], 'jacobi_ms': rows['jacobi']['ms'], 'speed_up': rows['exact']['ratio']}
        found[name] = row | {'passes': last['jacobi'][1], 'difference': difference}
        print(
            f'{name:<16}{row["exact_ms"]:>11.1f}{row["jacobi_ms"]:>12.1f}{row["speed_up"]:>10.1f}{last["jacobi"][1]:>8}'
            f'{difference:>12.1e}'
        )
    return found


@dataclass
class DataBench:
    data_dir: str = key('data/stdlib', 'dataset')
    config: str = key('config/text_transformer.py', 'run whose batches are drawn and whose training step is timed')
    batches: int = key(200, 'batches to draw')
    rounds: int = key(5, 'training steps to time; the median counts')
    json: bool = key(False, 'also print one JSON object as the last line')

    def check(self):
        for name in ('batches', 'rounds'):
            if getattr(self, name) < 1:
                raise ConfigError(f'{name}={getattr(self, name)} must be at least 1.')


def bench_data(bench):
    """Tokens a second of the loader in one process, and of a training step on the same batches."""
    given = {k: v for k, v in read_file(bench.config).items() if k in TrainConfig.__dataclass_fields__}
    config = TrainConfig(**given | {'data_dir': bench.data_dir})
    if config.threads:
        torch.set_num_threads(config.threads)
    data = Dataset(bench.data_dir)
    config.vocab_size = data.fit(config)
    T = data.length('train', config.block_size)
    begin = time.perf_counter()
    for step in range(bench.batches):
        x, y, mask = data.batch('train', data.rows('train', config.seed, step, config.batch_size, T), T)
    loader = bench.batches * x.numel() / (time.perf_counter() - begin)
    device = pick_device(config.device)
    model = build(config).to(device)
    optimizers = make_optimizers(model, config, device)

    def step():
        model(x.to(device), y.to(device), config, None if mask is None else mask.to(device))[0].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    seconds = statistics.median(measure({'step': step}, bench.rounds, device)['step'])
    found = {'loader_tokens_per_s': round(loader), 'training_tokens_per_s': round(x.numel() / seconds)}
    found['ratio'] = round(loader * seconds / x.numel(), 1)
    print(f'loader {loader:,.0f} tokens/s, training {x.numel() / seconds:,.0f} tokens/s: {found["ratio"]} times')
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
        given = {k: v for k, v in read_file(path).items() if k in TrainConfig.__dataclass_fields__}
        config = TrainConfig(**given, dry_run=True)
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


BENCHES = {
    'train': (TrainBench, bench_train),
    'scaling': (TrainBench, bench_scaling),
    'memory': (TrainBench, bench_memory),
    'decode': (DecodeBench, bench_decode),
    'prefill': (PrefillBench, bench_prefill),
    'data': (DataBench, bench_data),
    'configs': (ConfigsBench, bench_configs),
}


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
