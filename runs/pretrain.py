"""What runs/pretrain.sh needs besides the stages: `python -m runs.pretrain COMMAND`, in the project's folder.

scale CONFIG NAME     writes out/NAME/CONFIG, the config at the size of a CPU with its data in data/NAME, and prints its path
text FOLDER           the Python standard library's source, as `prepare_data.py text` finds it, as a jsonl file in a new folder
plan CONFIG           prints what the script asks of a config (see `plan`)
report CONFIG         writes out_dir/report.md and prints the table of all configs that were run
"""

import contextlib
import json
import math
import os
import sys
from dataclasses import fields
from pathlib import Path

import torch

from configurator import ConfigError, explaining, fail, parse, reporting
from support.figures import decoding_scores, draw_curves, markdown_table
from support.files import find_files
from support.folders import work_folder
from support.suggestions import nearest
from train import TrainConfig

WINDOWS = 1024  # of block_size, that bits per byte are measured on; fewer where that is more than a tenth of the training
SHARED = 20_000_000_000  # tokens, to a multiple of which a run's are rounded up, so that configs share one dataset
PUBLISHED = {  # bits per byte and CORE, of the LRT paper; None where it has no number
    'transformer_20L': (0.767, 0.271),
    'lrt_20L': (0.752, 0.274),
    'lrt_layerwise_20L': (None, 0.277),
    'lrt_multirefine_20L': (0.749, None),
    'loop_20L': (0.753, None),
    'transformer_24L': (0.699, None),
    'lrt_24L': (0.695, None),
    'lrt_layerwise_24L': (0.693, None),
}
NOTE = (
    'Published: the numbers of the LRT paper, at its size and on its text, 20 layers at ten tokens per parameter (bits per '
    "byte) and at its 'compute 80' (CORE), 24 layers at 'compute 80'. Runs of another size or text do not compare with them."
)


def read_config(path):
    """The settings of a config file; SystemExit after one sentence where it cannot be trained."""
    return parse(TrainConfig, [path], 'python -m runs.pretrain COMMAND config/NAME.py')


# The size of a CPU


def scaled(config):
    """{key: value} of `config` at the size of a CPU, by one rule: a quarter of the depth, an eighth of the width (half the
    heads, a quarter of their width), a sixteenth of the context and of the vocabulary, a thirty-second of the batch, an
    eightieth of the steps. Layers that a recurrence names stay as deep in proportion."""
    n_layer, n_head = max(2, round(config.n_layer / 4)), max(1, round(config.n_head / 2))
    n_embd = n_head * max(2, config.n_embd // config.n_head // 8 * 2)
    depth = n_layer / config.n_layer
    l_start = min(round(config.l_start * depth), n_layer - 1)
    steps = max(1, config.max_steps // 80)
    return {
        'n_layer': n_layer,
        'n_head': n_head,
        'n_kv_head': max((n for n in range(1, min(config.n_kv_head, n_head) + 1) if n_head % n == 0), default=0),
        'n_embd': n_embd,
        'n_hidden': config.n_hidden * n_embd // config.n_embd,
        'l_start': l_start,
        'l_end': max(l_start, min(round((config.l_end + 1) * depth), n_layer) - 1),
        'source_layer': round(config.source_layer * depth) if config.source_layer >= 0 else -1,
        'block_size': max(2, config.block_size // 16),
        'chunk_size': max(1, config.chunk_size // 16),
        'vocab_size': config.vocab_size // 16,
        'batch_size': max(1, config.batch_size // 32),
        'device_batch_size': 0,
        'max_steps': steps,
        'warmup_steps': config.warmup_steps // 80,
        'eval_interval': max(1, steps // 4),
        'eval_batches': 2,
        'compile': False,
    }


def scale(path, name):
    """Writes out/NAME/CONFIG, a config with every setting that is not the default, and prints its path."""
    config, stem = read_config(path), Path(path).stem
    values = {f.name: getattr(config, f.name) for f in fields(config)} | scaled(config)
    values |= {'data_dir': f'data/{name}/fineweb_edu', 'out_dir': f'out/{name}/{stem}'}
    lines = [f'{f.name} = {values[f.name]!r}' for f in fields(config) if values[f.name] != f.default]
    out = Path('out', name, Path(path).name)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f'# {path} at the size of a CPU, by runs/pretrain.py.\n' + '\n'.join(lines) + '\n', encoding='utf-8')
    print(out)


def write_text(folder):
    """Puts the folder there, whole or not at all, unless it exists: the files that are UTF-8 and not blank."""
    if os.path.exists(folder):
        return print(f'{folder} exists already.')
    with work_folder(folder) as work:
        new = Path(work, 'new')
        new.mkdir()
        with open(new / 'stdlib.jsonl', 'w', encoding='utf-8') as f:
            for path in find_files(''):
                with contextlib.suppress(UnicodeDecodeError):
                    text = Path(path).read_bytes().decode()
                    if text.strip():
                        f.write(json.dumps({'text': text}) + '\n')
        new.rename(folder)
    print(f'wrote {folder}')


# The script


def plan(path):
    """Prints, on one line: the folders of the data and of the run; vocab_size; the hub's sample of FineWeb-Edu that has the
    tokens of the run, and how many to take of it (0: all); the share of the documents that val gets; sequences at a time of an
    evaluation, and batches of them; GPUs. Raises ConfigError for a config that leaves the vocabulary to the data."""
    config = read_config(path)
    if not config.vocab_size:
        raise ConfigError(f'{path} states no vocab_size, which the tokenizer is trained for; set vocab_size in it.')
    sequences = config.max_steps * config.batch_size
    tokens, windows = sequences * config.block_size, min(WINDOWS, max(1, sequences // 10))
    val_fraction = min(max(4 * windows / sequences, 0.001), 0.05)
    subset, limit = '10BT', 0
    if tokens > 9e9:
        subset, limit = '100BT', math.ceil(tokens / (1 - val_fraction) / SHARED) * SHARED
    batch = config.device_batch_size or 64
    numbers = config.vocab_size, subset, limit, f'{val_fraction:g}', batch, math.ceil(windows / batch)
    print(config.data_dir, config.out_dir, *numbers, torch.cuda.device_count())


# The report


def read_result(path):
    """The JSON object in a file, or None where there is no file; raises ConfigError for a damaged one."""
    with explaining(f'{path} cannot be read', 'delete it and start again'):
        return json.loads(Path(path).read_text(encoding='utf-8')) if os.path.exists(path) else None


def without_core(folder):
    """Why CORE was not measured, in the words of eval.py."""
    log = Path(folder, 'core.log')
    lines = log.read_text(encoding='utf-8', errors='replace').splitlines() if log.exists() else []
    errors = [line.removeprefix('error: ') for line in lines if line.startswith('error: ')]
    return errors[0] if errors else f'it did not end; see {log}.'


def measured_runs(config):
    """{name: (result of the bits per byte, of CORE or None)} of the runs beside out_dir on the same dataset, its own included.
    Raises ConfigError where it has no result."""
    out, name = Path(config.out_dir), f'eval-{Path(config.data_dir).name}-val.json'
    found = {p.parent.name: (read_result(p), read_result(p.parent / 'core.json')) for p in sorted(out.parent.glob(f'*/{name}'))}
    if out.name not in found:
        raise ConfigError(f'{out} holds no {name}; `python eval.py --ckpt={out}` writes it.')
    return found


def runs_table(found):
    """The Markdown table of the runs that `measured_runs` finds: bits per byte under the training schedule, and as decoded."""

    def cell(number):
        return '-' if number is None else f'{number:.3f}'

    head = ['run', 'parameters', 'tokens, 1e6', 'FLOPs, 1e12', 'minutes', 'bits per byte', 'decoded', 'published', 'CORE']
    head += ['published']
    rows = []
    for name, (bits, core) in found.items():
        published = PUBLISHED.get(name, (None, None))
        size = f'{bits["parameters"]:,}', f'{tokens_of(bits) / 1e6:,.1f}', f'{bits["training_flops"] / 1e12:,.0f}'
        scores = bits['training']['bits_per_byte'], decoding_scores(bits)['bits_per_byte'], published[0]
        scores += core and core['lm_eval']['CORE']['centred'], published[1]
        rows.append([f'`{name}`', *size, f'{bits["training_seconds"] / 60:,.1f}', *map(cell, scores)])
    return markdown_table(head, rows)


def tokens_of(result):
    settings = {f.name: f.default for f in fields(TrainConfig)} | result['settings']
    return result['update'] * settings['batch_size'] * settings['block_size']


def report(path):
    """Writes out_dir/report.md and out_dir/loss.png, the curves of all runs, and prints the table of all runs."""
    config = read_config(path)
    found, out = measured_runs(config), Path(config.out_dir)
    bits, core = found[out.name]
    draw_curves([str(out.parent / name) for name in found], str(out / 'loss.png'))
    table = runs_table(found)
    if core:
        of_core = core['lm_eval']['CORE']
        core_text = f'CORE is the average of {of_core["tasks"]} tasks; left out: {", ".join(of_core["left_out"])}.'
    else:
        core_text = f'CORE is left out: {without_core(out)}'
    settings = markdown_table(['key', 'value'], [[k, f'`{v}`'] for k, v in bits['settings'].items()])
    sample = (out / 'sample.txt').read_text(encoding='utf-8', errors='replace') if (out / 'sample.txt').exists() else ''
    gpus = ', '.join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}))
    parts = [
        f'# {out.name}',
        f'{bits["update"]:,} steps, {tokens_of(bits):,} tokens, {bits["training_seconds"] / 60:,.1f} minutes of training on '
        f'{torch.cuda.device_count() or "no"} GPUs{f" ({gpus})" if gpus else ""}; {bits["machine"]}. '
        f'{bits["step_flops_ratio"]:.2f} times the FLOPs of the plain transformer.',
        f'## Scores\n\n{table}',
        NOTE,
        core_text,
        '## Loss\n\n![loss against steps](loss.png)',
        f'## Settings\n\n{settings}',
        f'## Sample\n\n~~~\n{sample.strip()}\n~~~',
    ]
    (out / 'report.md').write_text('\n\n'.join(parts) + '\n', encoding='utf-8')
    print(f'{table}\n\n{core_text}\nwrote {out}/report.md')


COMMANDS = {'scale': (scale, 'CONFIG NAME'), 'text': (write_text, 'FOLDER'), 'plan': (plan, 'CONFIG')}
COMMANDS |= {'report': (report, 'CONFIG')}


def main(argv):
    if argv in ([], ['--help'], ['-h']):
        with reporting():
            return print(__doc__)
    name, *rest = argv
    if name not in COMMANDS:
        raise fail(f'{name} is no command; {nearest(name, COMMANDS)}')
    command, takes = COMMANDS[name]
    if len(rest) != len(takes.split()):
        raise fail(f'{name} takes {takes}: python -m runs.pretrain {name} {takes}')
    with reporting():
        command(*rest)


if __name__ == '__main__':
    main(sys.argv[1:])
