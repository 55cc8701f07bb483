"""Measures checkpoints: `python eval.py` takes the newest one under out/, `--ckpt=A,B` compares several on one dataset.

Task data: accuracy of each score by position and by length. Text: bits per byte under the training schedule and under exact
decoding. Both run the model twice, as it was trained and with the exact sequential recurrence that decoding has. The numbers
also go to eval-DATASET-SPLIT.json beside the checkpoint. Under torchrun --nproc_per_node=N each process has a model and
measures a part of the batches; the numbers are those of one process.

    python eval.py --study=FOLDER              the table and figure of a study, made from such files
    python eval.py --diagnose                  gates, fixed-point residuals, and how far the memory carries
    python eval.py --lm_eval=hellaswag,piqa    suites of EleutherAI's harness, decoded exactly; core is the CORE set
    python eval.py --curves=out/a,out/b        loss against tokens, from log.jsonl
    python eval.py --overview=FILE             a drawing of the two recurrences and of the schedules
"""

import contextlib
import copy
import json
import math
import os
import sys
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

if 'OMP_WAIT_POLICY' not in os.environ:  # read when torch is loaded: a waiting thread soon leaves its core to others
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')

import numpy as np
import torch
import torch.nn.functional as F

from configurator import ConfigError, key, parse, reporting
from sample import SampleConfig, complete
from schedule import SEQUENTIAL, Schedule, exact_schedule
from support import figures
from support.answers import ends_answer, extract_answer, same_answer
from support.checkpoint import check_same_tokens
from support.data import Dataset
from support.harness import harness, run_harness
from support.loading import DTYPES, computing, find_checkpoint, load
from support.loss import score_tokens, token_nll
from support.overview import draw_overview
from support.processes import Process, reporting_to_torchrun
from support.prompts import is_aligned, prompt_recurs
from support.results import ResumableResults, provenance
from train import TrainConfig, saved_settings


@dataclass
class EvalConfig:
    ckpt: str = key('', 'checkpoint, or the folder of a ckpt.pt; several joined by commas; empty takes the newest under out/')
    data_dir: str = key('', 'dataset; empty takes the one it was trained on')
    split: str = key('', 'train, val or test; empty takes val for text and test for tasks')
    batch_size: int = key(64, 'sequences at a time', bounds=(1, 2**31))
    max_batches: int = key(0, 'batches at most; 0 takes the whole split', bounds=(0, 2**31))
    show: int = key(0, 'tasks made of text: print prompt, answer and target of so many examples', bounds=(0, 2**31))
    passes: bool = key(False, 'text: also bits per byte of each pass of the training schedule')
    exact: str = key('auto', 'exact decoding; auto: jacobi for prompts, or above 256 tokens', ('auto', 'sequential', 'jacobi'))
    chat: bool = key(True, 'lm_eval of hf:FOLDER: False ignores a chat template that does not work')
    dtype: str = key('auto', 'of decoding; auto is bfloat16 on CUDA; a schedule is scored in float32 or float64', DTYPES)
    device: str = key('auto', 'cpu, cuda or mps; auto takes a GPU where there is one')
    threads: int = key(0, 'CPU threads; 0 leaves the default', bounds=(0, 1024))
    results: str = key('', 'tasks: write the accuracies at the longest trained length to this JSON file')
    figure: str = key('', 'draw to this file: accuracy against position; a study of texts: bits per byte against FLOPs')
    study: str = key('', 'measure nothing; print the table of the results in this folder, NAME-SEED.json each')
    diagnose: bool = key(False, 'text: gates by layer, residuals by pass, and what a memory set to 0 does to later tokens')
    lm_eval: str = key('', 'tasks of the lm-eval harness, joined by commas; core is the CORE set with its centred average')
    lm_tasks: str = key('', 'lm_eval: folder with task files of your own')
    num_fewshot: int = key(-1, 'lm_eval: examples before the question; -1: as each task says')
    limit: int = key(0, 'lm_eval: examples of each task at most; 0 takes all')
    curves: str = key('', 'measure nothing; draw the losses in the log.jsonl of these folders, joined by commas, to figure')
    overview: str = key('', 'measure nothing; draw the recurrences and the schedules to this file')
    json: bool = key(False, 'also print one JSON object as the last line')

    def check(self):
        modes = [name for name in ('overview', 'curves', 'study', 'lm_eval', 'diagnose') if getattr(self, name)]
        if len(modes) > 1:
            raise ConfigError(f'{" and ".join(modes)} cannot be combined; keep one.')
        if modes and self.results or self.figure and (self.lm_eval or self.overview):
            raise ConfigError(f'{"results" if self.results else "figure"} is not written with {modes[0]}; leave it out.')
        if modes and self.show:
            raise ConfigError(f'show={self.show} prints answers to a task, and {modes[0]} gives none; leave it out.')
        if self.diagnose and self.figure and ',' in self.ckpt:
            raise ConfigError(f'figure={self.figure} shows the diagnosis of one checkpoint, and ckpt names several; keep one.')
        if self.curves and not self.figure:
            raise ConfigError(f'curves={self.curves} needs figure, the file to draw to.')
        for name in ('results', 'figure', 'overview'):
            path = getattr(self, name)
            if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or '.')):
                raise ConfigError(f'{name}={path} must be a file in a folder that exists.')
            if path and name != 'results' and not path.endswith(('.png', '.pdf', '.svg')):
                raise ConfigError(f'{name}={path} must end in .png, .pdf or .svg.')


def schedules(saved):
    """The schedules to measure, by name: that of the training, and exact decoding where the model has a recurrence."""
    trained = Schedule(**{f.name: saved[f.name] for f in fields(Schedule)})
    return {'training': trained} | ({'exact': SEQUENTIAL} if saved['recurrence'] != 'none' else {})


def accuracy_by(hit, values):
    """{str(value): share of hits where `values` equals it}, in rising order."""
    return {str(value): float(hit[values == value].mean()) for value in np.unique(values)}


def score_task(model, data, split, schedule, config, results):
    """{score: {'all', 'last', 'by_length': {steps: ..}, 'last_by_length': .., 'by_position': {step: ..}}} as fractions.
    Positions count the steps of an example from 1; 'last' is the last step of each example."""
    arrays = data.split(split)
    total = min(len(arrays['tokens']), (config.max_batches or math.inf) * config.batch_size)

    def measure(low):
        """{score: [whether it is right, its step, the steps of its example] of each scored position, as columns}."""
        rows = np.arange(low, min(low + config.batch_size, total))
        T = int(arrays['lengths'][rows].max())
        x, y, mask = (t[:, :T] for t in data.batch(split, rows, None, model.embed.weight.device))
        _, hit = score_tokens(model, model(x, schedule=schedule, recur_mask=mask, logits_from=None), y)
        hit, y = hit.numpy(), y.cpu().numpy()
        columns = {}
        for name, (first, end) in data.meta['scores'].items():
            row, column = np.nonzero((y >= first) & (y < end))
            slots = 1 if name == 'state' else data.meta['settings']['value_len']
            order = np.arange(len(row)) - np.searchsorted(row, row)  # how many of this kind came before, in its row
            columns[name] = np.stack([hit[row, column], 1 + order // slots, arrays['steps'][rows][row]]).tolist()
        return columns

    batches, scores = list(results.batches(str(schedule), range(0, total, config.batch_size), measure)), {}
    for name in data.meta['scores']:
        hit, step, length = np.concatenate([batch[name] for batch in batches], 1)
        last = step == length
        scores[name] = {
            'all': float(hit.mean()),
            'last': float(hit[last].mean()),
            'by_length': accuracy_by(hit, length),
            'last_by_length': accuracy_by(hit[last], length[last]),
            'by_position': accuracy_by(hit, step),
        }
    return scores


def guessing(arrays, scores):
    """{score: accuracy of a guess}: of any state, all alike; of the value that an example's dictionary shows most often."""
    accuracies = {}
    for name, (first, end) in scores.items():
        accuracies[name] = 1 / (end - first)
        if name != 'state':
            shown = [np.bincount(row[(row >= first) & (row < end)]).argmax() for row in arrays['tokens'].astype(int)]
            targets = arrays['targets']
            hit = (targets == np.array(shown)[:, None])[(targets >= first) & (targets < end)]
            accuracies[name] = float(hit.mean())
    return accuracies


@torch.inference_mode()
def score_answers(model, data, split, config, results):
    """{'exact_match', 'by_depth': {depth: share}, 'answers': how many, 'cut': how many of them}.

    Greedy decoding of each prompt, exact and cached, up to the end of the line of the first `####`, the document token or
    stop_token. The answer (`extract_answer`) is compared as the task compares (`same_answer`). A response that the context ends
    first is cut and counts as no match. Prompts read the memory if they did in the training. ConfigError for a packed split.
    """
    arrays, meta, task = data.split(split), data.meta, data.meta['task']
    if 'prompt_lengths' not in arrays:
        raise ConfigError(f'split={split} of {data.folder} has several examples in a row; take another split.')
    examples = read_examples(data, split)
    total = min(len(examples), (config.max_batches or math.inf) * config.batch_size)
    order = np.argsort(arrays['prompt_lengths'][:total], kind='stable')  # little padding
    prefill = 'exact' if config.exact == 'sequential' else 'jacobi'
    greedy = SampleConfig(temperature=0, max_tokens=model.config.block_size, prefill=prefill, jacobi_tol=1e-5)

    def measure(low):
        """[number, response, outcome: 'right', 'wrong' or 'cut'] of each example of the batch."""
        numbers = order[low : low + config.batch_size].tolist()
        prompts = [arrays['tokens'][i, : arrays['prompt_lengths'][i]].tolist() for i in numbers]
        responses = complete(model, meta, prompts, greedy, recurs=prompt_recurs(meta), done=ends_answer)
        batch = []
        for i, response in zip(numbers, responses, strict=True):
            right = same_answer(task, extract_answer(task, response.text), examples[i]['answer'])
            batch.append([i, response.text, 'cut' if response.finish != 'stop' else 'right' if right else 'wrong'])
        return batch

    batches = results.batches('responses', range(0, total, config.batch_size), measure)
    outcomes = {i: outcome for batch in batches for i, _, outcome in batch}
    hits, cut = (np.array([outcomes[i] == wanted for i in range(total)]) for wanted in ('right', 'cut'))
    by_depth = accuracy_by(hits, arrays['steps'][:total])
    return {'exact_match': float(hits.mean()), 'by_depth': by_depth, 'answers': total, 'cut': int(cut.sum())}


def read_examples(data, split):
    """The examples of a task made of text, {'prompt', 'response', 'answer', 'depth'} each."""
    with open(os.path.join(data.folder, f'{split}.jsonl'), encoding='utf-8') as f:
        return [json.loads(line) for line in f]


def show_answers(examples, results, n):
    """Prints the first n examples that score_answers has decoded: prompt, answer and target."""
    decoded = sorted(row for (name, _), batch in results.measured.items() if name == 'responses' for row in batch)
    for i, text, outcome in decoded[:n]:
        example = examples[i]
        print(f'\n--- example {i + 1}, depth {example["depth"]}: {outcome}\nprompt: {example["prompt"].rstrip()}')
        print(f'answer: {text.rstrip()}\ntarget: {example["answer"]}')


def score_text(model, data, split, schedule, config, results):
    """{'bits_per_byte', 'nats_per_token', 'tokens', 'by_position': {'first-last': bits per byte}, 'passes': {..} if asked}.

    Every token but the first is predicted once, in windows of block_size that do not overlap; the last window holds what is
    left, and may be shorter. max_batches takes only whole windows, spread over the split. Tokens without bytes (the document
    token) are neither scored nor counted in 'tokens'. Position 0 has one token to look at.
    """
    # 1. The windows, and the schedules to measure: the whole one and those of its passes.
    n_tokens, token_bytes = len(data.split(split)), torch.tensor(data.meta['token_bytes'])
    T = max(1, min(model.config.block_size, n_tokens - 1))
    batches = batch_windows(n_tokens, T, config)
    schedule = exact_schedule(T, config.exact) if schedule == SEQUENTIAL else schedule
    passes = pass_schedules(schedule) if config.passes and model.config.recurrence != 'none' else {}

    # 2. Sums over the windows of each batch, at each position.
    def measure(i):
        """{'sums': of bytes, of tokens with bytes, of nats and of the nats of each pass, at every position; 'apart': ..}."""
        starts, n = batches[i]
        x, y, _ = data.batch(split, starts, n, model.embed.weight.device)
        size = token_bytes[y.cpu()]
        nats = [token_nll(model, x, y, each) * (size > 0) for each in (schedule, *passes.values())]
        measured = {'sums': [F.pad(values.sum(0), (0, T - n)).tolist() for values in (size, size > 0, *nats)]}
        if schedule.jacobi_tol and i == 0:  # iterated to convergence: compared with decoding token by token, once
            apart = token_nll(model, x[:1], y[:1], schedule) - token_nll(model, x[:1], y[:1], SEQUENTIAL)
            measured['apart'] = apart.abs().max().item()
        return measured

    parts = list(results.batches(f'windows {schedule}', range(len(batches)), measure))
    sums = torch.tensor([part['sums'] for part in parts], dtype=torch.float64).view(len(parts), 3 + len(passes), T).sum(0)

    # 3. Bits per byte of the whole, of each pass, and of positions in buckets that double.
    n_bytes, tokens, nats, *nats_by_pass = sums.sum(1).tolist()
    if not n_bytes:
        raise ConfigError(f'{data.folder}/{split}.bin has nothing to score: it holds {n_tokens} tokens.')
    unit = n_bytes * math.log(2)
    edges = [0, *(2**i for i in range(T.bit_length()) if 2**i < T), T]
    buckets = {f'{a}-{b - 1}': sums[:, a:b].sum(1) for a, b in pairwise(edges)}
    scores = {
        'bits_per_byte': nats / unit,
        'nats_per_token': nats / tokens,
        'tokens': int(tokens),
        'by_position': {name: (s[2] / s[0] / math.log(2)).item() for name, s in buckets.items() if s[0]},
    }
    if 'apart' in parts[0]:
        scores['nats_from_sequential'] = parts[0]['apart']
    if passes:
        scores['passes'] = {name: nats / unit for name, nats in zip(passes, nats_by_pass, strict=True)}
    return scores


def batch_windows(n_tokens, T, config):
    """[(starts, length)] of the batches of windows over a stream of n_tokens, each token but the first predicted once."""
    n_whole, rest = divmod(n_tokens - 1, T)
    starts, limit = T * np.arange(n_whole), config.max_batches * config.batch_size
    if 0 < limit < n_whole + (rest > 0):
        starts, rest = starts[np.linspace(0, n_whole - 1, min(limit, n_whole)).astype(int)], 0
    batches = [(starts[low : low + config.batch_size], T) for low in range(0, len(starts), config.batch_size)]
    return batches + ([([T * n_whole], rest)] if rest else [])


def pass_schedules(schedule):
    """{name: schedule that ends with this pass over all positions}, the initial pass first; {} where there is none."""
    if schedule.schedule == 'jacobi':
        return {f'pass {k}': Schedule('jacobi', k, 1, scan=schedule.scan) for k in range(schedule.d_forward + 1)}
    return {'pass 0': Schedule(), 'all passes': schedule} if schedule.initial else {}


def diagnose(model, data, split, config):
    """How a recurrence is used, on config.batch_size windows of a text.

    {'gammas': {parameter: value}, 'gates': {layer: {'loc', 'rec'}} (LRT) or {'cur', 'rec'} (T2MLR), the means over positions
    and channels, 'moved': |Phi(h, R) - h| / |h| (T2MLR), 'residuals': largest relative change in each Jacobi pass, 'carried':
    {k: nats that token t + k loses when the memory that token t reads is set to 0}}.
    """
    # 1. Windows, spread over the split.
    T = min(model.config.block_size, len(data.split(split)) - 1)
    starts = np.linspace(0, len(data.split(split)) - T - 1, config.batch_size).astype(int)
    x, y, _ = data.batch(split, starts, T, model.embed.weight.device)

    # 2. The gates at the fixed point, and how far each pass on the way changes the output.
    seen, changes, gates = {}, [], [block.attention.gate_memory for block in model.blocks]
    watched = [module for module in (model.fusion, *gates) if module is not None]
    hooks = [m.register_forward_hook(lambda module, inputs, out: seen.update({module: (*inputs, out)})) for m in watched]
    model(x, schedule=exact_schedule(T, 'jacobi'), changes=changes)
    for hook in hooks:
        hook.remove()
    diagnosis = {'gammas': {name: p.mean().item() for name, p in model.named_parameters() if 'gamma' in name}}
    if model.fusion is not None:
        h, local, R, _, out = seen[model.fusion]
        halves = zip(('cur', 'rec'), local.chunk(2, -1), (model.fusion.f_cur, model.fusion.f_rec), strict=True)
        gates = {name: (a + F.linear(R, f.weight[:, h.size(-1) :])).sigmoid().mean().item() for name, a, f in halves}
        diagnosis |= {'gates': gates, 'moved': ((out - h).norm() / h.norm()).item()}
    else:
        means = {layer: (2 * seen[gate][-1].sigmoid()).chunk(2, -1) for layer, gate in enumerate(gates) if gate in seen}
        diagnosis['gates'] = {i: {'loc': loc.mean().item(), 'rec': rec.mean().item()} for i, (loc, rec) in means.items()}
    diagnosis['residuals'] = [change.item() for change in changes]

    # 3. How far the memory at t carries: the tokens from t on, with it and without it.
    effects = []
    for t in (T // 4, T // 2, 3 * T // 4):
        state = model.new_state(len(x))
        model(x[:, :t], schedule=SEQUENTIAL, state=state)
        without = copy.deepcopy(state)
        without.memory.zero_()
        lost, kept = (token_nll(model, x[:, t:], y[:, t:], SEQUENTIAL, after) for after in (without, state))
        effects.append((lost - kept).mean(0)[: T // 4])
    carried = torch.stack(effects).mean(0).tolist()
    return diagnosis | {'carried': {k: nats for k, nats in enumerate(carried) if k & (k - 1) == 0}}


def prepare(path, config, process):
    """What an evaluation works on: the model, the checkpoint without its weights, the dataset (None for lm_eval), its split.
    Raises ConfigError for what cannot be measured, or cannot be summarised as results or figure."""
    if path.startswith('hf:') and not config.lm_eval:
        raise ConfigError(f'ckpt={path} is a pretrained folder, which lm_eval measures; here name a checkpoint of train.py.')
    torch.set_float32_matmul_precision('high')
    model, checkpoint = load(path, process.device, config.dtype, config.chat)
    if config.lm_eval:
        if is_aligned(checkpoint['meta']):
            raise ConfigError(f'lm_eval={config.lm_eval} needs a text model, and {path} was trained on an aligned task.')
        return model, checkpoint, None, ''
    data = Dataset(config.data_dir or checkpoint['config']['data_dir'])
    split = config.split or ('val' if data.is_text else 'test')
    if split not in data.meta['splits']:
        raise ConfigError(f'split={split} is not in {data.folder}; choose from {", ".join(data.meta["splits"])}.')
    check_same_tokens(checkpoint, data)
    n, size = data.longest.get(split, 0), model.config.block_size
    if n > size:
        raise ConfigError(f'{split} of {data.folder} has rows of {n} tokens, {path} a context of {size}; train a longer one.')
    if config.passes and not data.is_text:
        raise ConfigError(f'passes=True measures texts, and {data.folder} is a task; leave it out.')
    if config.show and data.meta.get('aligned', True):
        raise ConfigError(f'show={config.show} prints decoded answers, and {data.folder} has none; leave it out.')
    if config.diagnose and not data.is_text:
        raise ConfigError(f'diagnose=True reads texts, and {data.folder} is a task.')
    if config.diagnose and model.config.recurrence == 'none':
        raise ConfigError(f'diagnose=True looks at a recurrence, and {path} has none.')
    if data.is_text and not config.diagnose and (config.results or config.figure):
        raise ConfigError(f'results and figure summarise a task, and {path} is a text model; leave them out.')
    return model, checkpoint, data, split


@torch.no_grad()
def evaluate(path, config, process):
    """Measures one checkpoint: {'checkpoint', 'update': its step, 'data', 'split', ..} and what score_* returns."""
    model, checkpoint, data, split = prepare(path, config, process)
    if config.diagnose:
        return {'checkpoint': path, **diagnose(model, data, split, config)}

    # 1. What the results depend on.
    pretrained = path.startswith('hf:')
    identity = {'checkpoint': path if pretrained else os.stat(path).st_mtime_ns, 'batch_size': config.batch_size}
    identity |= {'dtype': config.dtype, 'device': model.embed.weight.device.type}
    if config.lm_eval:
        folder = '.' if pretrained else os.path.dirname(path)
        results = ResumableResults(os.path.join(folder, 'eval-lm_eval.json.part'), identity, process)
        lm = harness(model, checkpoint['meta'], config.batch_size, results, continue_prompts, not pretrained)
        with computing(model, config.dtype):
            return results.finish({'checkpoint': path, 'lm_eval': run_harness(lm, config)})
    identity |= {name: getattr(config, name) for name in ('max_batches', 'passes', 'exact')}
    identity['data'] = data.meta['splits'][split]
    name = f'eval-{os.path.basename(os.path.normpath(data.folder))}-{split}.json.part'
    results = ResumableResults(os.path.join(os.path.dirname(path), name), identity, process)

    # 2. What was measured, and what produced it.
    result = {'checkpoint': path, 'update': checkpoint['step'], 'data': data.folder, 'split': split}
    result |= provenance(path, model, checkpoint, data, TrainConfig(**saved_settings(checkpoint)))
    answers = not data.meta.get('aligned', True)
    trained = {} if data.is_text else checkpoint['meta'].get('settings', {})  # the training's dataset may be another
    if lengths := trained.get('depth' if answers else 'steps'):  # a dataset made from a file has no such setting
        result['trained_length'] = max(int(n) for n in lengths.split('-'))

    # 3. The measurement.
    if answers:
        with computing(model, config.dtype):
            result['decoded'] = score_answers(model, data, split, config, results)
        if config.show:
            show_answers(read_examples(data, split), results, config.show)
    else:
        if not data.is_text:
            arrays = data.split(split)
            result |= {'chance': guessing(arrays, data.meta['scores']), 'examples': len(arrays['tokens'])}
        score = score_text if data.is_text else score_task
        for name, schedule in schedules(checkpoint['config']).items():
            result[name] = score(model, data, split, schedule, config, results)
    return results.finish(result)


def continue_prompts(model, meta, prompts, max_tokens, temperature, stops):
    """The texts that are decoded after prompts (ids), for the harness."""
    settings = SampleConfig(max_tokens=max_tokens, temperature=temperature, jacobi_tol=1e-5)
    return [text.text for text in complete(model, meta, prompts, settings, stops)]


def compare(results, config):
    """Prints the table and writes the file and the figure of checkpoints measured on one task."""
    summaries = {name: figures.summarise(result) for name, result in results.items()}
    if len(results) > 1:
        first = next(iter(results.values()))
        where = '' if 'decoded' in first else f' at the longest trained length, {first["trained_length"]} steps'
        print(f'\nexact decoding{where}')
        columns = list(dict.fromkeys(column for summary in summaries.values() for column in summary))
        rows = [[name, *(summary.get(column) for column in columns)] for name, summary in summaries.items()]
        figures.print_table(['model', *columns], rows)
    if config.results:
        Path(config.results).write_text(json.dumps(summaries, indent=2), encoding='utf-8')
    if config.figure:
        figures.draw_accuracies({name: [result] for name, result in results.items()}, config.figure)


def measure(config, process):
    """Measures and reports every checkpoint that the settings name; the first process alone reports."""
    # 1. The checkpoints. A mistake in the last is refused before hours go into the first.
    paths, tasks = [find_checkpoint(part.strip()) for part in config.ckpt.split(',')], set()
    for path in paths if len(paths) > 1 else ():
        _, _, data, _ = prepare(path, config, process)
        tasks.add((data.is_text, *data.scores) if data else None)
    if len(tasks) > 1 and (config.results or config.figure):
        raise ConfigError('results and figure summarise one task, and these checkpoints are of several; leave them out.')
    names = [os.path.basename(os.path.dirname(os.path.abspath(path))) for path in paths]
    names = names if len(set(names)) == len(names) else paths

    # 2. Measure and report each.
    results = {}
    for path, name in zip(paths, names, strict=True):
        results[name] = result = evaluate(path, config, process)
        if not process.first:
            continue
        if config.diagnose:
            figures.print_diagnosis(result)
            if config.figure:
                figures.draw_diagnosis(result, config.figure)
        elif not config.lm_eval:
            figures.print_result(result)

    # 3. Report all side by side.
    if not process.first:
        return
    if not config.diagnose and not config.lm_eval and len(tasks) < 2 and figures.summarise(result):
        compare(results, config)
    if config.json:
        print(json.dumps(results if len(results) > 1 else result))


def main(argv):
    config = parse(EvalConfig, argv, 'python eval.py [--key=value ...]')
    with reporting():
        if config.overview:
            return draw_overview(config.overview)
        if config.curves:
            return figures.draw_curves(config.curves.split(','), config.figure)
        if config.study:
            return figures.report_study(figures.read_study(config.study), config)
        with contextlib.closing(Process(config)) as process:
            process.connect()
            measure(config, process)


if __name__ == '__main__':
    with reporting_to_torchrun():
        main(sys.argv[1:])
