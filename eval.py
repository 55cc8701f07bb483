"""Measures checkpoints: `python eval.py` takes the newest one under out/, `--ckpt=A,B` compares several on one dataset.

Task data: accuracy of each score by position and by length. Text: bits per byte under the training schedule and under exact
decoding. Both run the model twice, as it was trained and with the exact sequential recurrence that decoding has. The numbers
also go to eval-DATASET-SPLIT.json beside the checkpoint.

    python eval.py --study=FOLDER              the table and figure of a study, made from such files
    python eval.py --diagnose                  gates, fixed-point residuals, and how far the memory carries
    python eval.py --lm_eval=hellaswag,piqa    suites of EleutherAI's harness, decoded exactly; core is the CORE set
    python eval.py --curves=out/a,out/b        loss against tokens, from log.jsonl
    python eval.py --overview=FILE             a drawing of the two recurrences and of the schedules
"""

import contextlib
import functools
import glob
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from itertools import groupby, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from configurator import ConfigError, key, parse, reporting
from model import SEQUENTIAL, Schedule, count_flops, count_parameters
from prepare_data import decode, encode
from sample import Decoder, SampleConfig, Text, find_checkpoint, generate, load_folder, load_model, prompt_recurs
from train import Dataset, TrainConfig, pick_device, same_tokens


@dataclass
class EvalConfig:
    ckpt: str = key(
        '', 'checkpoint, or the folder that holds ckpt.pt; several joined by commas; empty takes the newest under out/'
    )
    data_dir: str = key('', 'dataset; empty takes the one it was trained on')
    split: str = key('', 'train, val or test; empty takes val for text and test for tasks')
    batch_size: int = key(64, 'sequences at a time')
    max_batches: int = key(0, 'batches at most; 0 takes the whole split')
    passes: bool = key(False, 'text: also bits per byte of each pass of the training schedule')
    exact: str = key(
        'auto',
        'exact decoding: token by token, or iterated; auto iterates texts above 256 tokens and prompts',
        ('auto', 'sequential', 'jacobi'),
    )
    device: str = key('auto', 'cpu, cuda, mps; auto takes the first that is there, from the right')
    threads: int = key(0, 'CPU threads; 0 leaves the default')
    results: str = key('', 'tasks: write the accuracies at the longest trained length to this JSON file')
    figure: str = key(
        '', 'tasks: draw accuracy against position to this PNG file; with study, bits per byte against operations'
    )
    study: str = key('', 'measure nothing; print the table of the results in this folder, NAME-SEED.json each')
    diagnose: bool = key(False, 'text: gates by layer, residuals by pass, and what a memory set to 0 does to later tokens')
    lm_eval: str = key('', 'tasks of the lm-eval harness, joined by commas; core is the CORE set with its centred average')
    lm_tasks: str = key('', 'lm_eval: folder with task files of your own')
    num_fewshot: int = key(-1, 'lm_eval: examples before the question; -1 takes what each task says')
    limit: int = key(0, 'lm_eval: examples of each task at most; 0 takes all')
    curves: str = key('', 'measure nothing; draw the losses in the log.jsonl of these folders, joined by commas, to figure')
    overview: str = key('', 'measure nothing; draw the recurrences and the schedules to this file')
    json: bool = key(False, 'also print one JSON object as the last line')

    def check(self):
        for name, low, high in (('batch_size', 1, 2**31), ('max_batches', 0, 2**31), ('threads', 0, 1024)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f'{name}={getattr(self, name)} must be at least {low} and at most {high}.')
        if self.curves and not self.figure:
            raise ConfigError(f'curves={self.curves} needs figure, the file to draw to.')
        for name, path in (('results', self.results), ('figure', self.figure), ('overview', self.overview)):
            if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or '.')):
                raise ConfigError(f'{name}={path} must be a file in a folder that exists.')
            if path and name != 'results' and not path.endswith(('.png', '.pdf', '.svg')):
                raise ConfigError(f'{name}={path} must end in .png, .pdf or .svg.')


def schedules(saved, exact=SEQUENTIAL):
    """The schedules to measure, by name: that of the training, and exact decoding where the model has a recurrence."""
    names = [f.name for f in fields(Schedule) if f.name != 'pass_weights']
    return {'training': Schedule(**{k: saved[k] for k in names})} | ({'exact': exact} if saved['recurrence'] != 'none' else {})


def converged(T):
    """Jacobi until nothing moves by more than float32 rounds: exact, in far fewer passes than positions."""
    return Schedule('jacobi', d_forward=T, d_backward=1, jacobi_tol=1e-5)


class Kept:
    """What the batches of an evaluation gave, in a file until all are measured: an interrupted one goes on where it stopped."""

    def __init__(self, path, identity):
        """identity: all that the results depend on, as JSON; its digest is in each line, because another evaluation may have
        written to the same file meanwhile, and lines of another are passed over."""
        self.path, self.found, self.begun = path, {}, False
        self.identity = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        with contextlib.suppress(OSError, ValueError, TypeError), open(path, encoding='utf-8') as f:
            for line in f:  # the last may have been cut short
                whose, name, low, value = json.loads(line)
                if whose == self.identity:
                    self.found[name, low] = value

    def add(self, name, low, value):
        """Appends a batch to the file; the first one makes it anew, of all that is known."""
        self.found[name, low] = value
        known = [[self.identity, *where, value] for where, value in self.found.items()]
        with open(self.path, 'a' if self.begun else 'w', encoding='utf-8') as f:
            f.writelines(json.dumps(line) + '\n' for line in (known[-1:] if self.begun else known))
        self.begun = True

    def batches(self, name, starts, measure):
        """measure(start), JSON, for each of the starts; `name` tells measurements apart."""
        for low in tqdm(starts, unit='batch', leave=False, disable=None):
            if (name, low) not in self.found:
                self.add(name, low, measure(low))
            yield self.found[name, low]

    def remove(self):
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path)


def score_task(model, data, split, schedule, config, kept):
    """{score: {'all', 'last', 'by_length': {steps: ..}, 'last_by_length': .., 'by_position': {step: ..}}} as fractions.

    Positions count the steps of an example from 1; 'last' is the last step of each example.
    """
    arrays = data.split(split)
    total = min(len(arrays['tokens']), (config.max_batches or math.inf) * config.batch_size)
    device = model.embed.weight.device

    def measure(low):
        """{score: [whether it is right, its step, the steps of its example] of each scored position, as columns}."""
        rows = np.arange(low, min(low + config.batch_size, total))
        T = int(arrays['lengths'][rows].max())
        x, y, mask = (t[:, :T] for t in data.batch(split, rows, None, device))
        hit = (model(x, schedule=schedule, recur_mask=mask).argmax(-1) == y).cpu().numpy()
        y = y.cpu().numpy()
        columns = {}
        for name, (first, end) in data.meta['scores'].items():
            row, column = np.nonzero((y >= first) & (y < end))
            slots = 1 if name == 'state' else data.meta['settings']['value_len']
            order = np.arange(len(row)) - np.searchsorted(row, row)  # how many of this kind came before, in its row
            columns[name] = np.stack([hit[row, column], 1 + order // slots, arrays['steps'][rows][row]]).tolist()
        return columns

    parts, found = list(kept.batches(str(schedule), range(0, total, config.batch_size), measure)), {}
    for name in data.meta['scores']:
        hit, step, length = np.concatenate([part[name] for part in parts], 1)
        last = step == length

        def table(by, chosen, hit=hit):
            return {int(v): float(hit[chosen & (by == v)].mean()) for v in np.unique(by[chosen])}

        every = np.ones_like(last)
        found[name] = {
            'all': float(hit.mean()),
            'last': float(hit[last].mean()),
            'by_length': table(length, every),
            'last_by_length': table(length, last),
            'by_position': table(step, every),
        }
    return found


def extract_answer(task, text):
    """The final answer (str) in the text of a response, or None: what follows the last `####` on its line; in math500, which
    other models answer in their own way, else the content of the last \\boxed{}."""
    marked = re.findall(r'####([^\n]*)', text)
    if not marked and task == 'math500' and '\\boxed' in text:
        marked = [unboxed(text)]
    return marked[-1].strip() or None if marked else None


def same_answer(task, a, b):
    """Whether two final answers (str; None is no answer, which nothing equals) mean the same in a task.

    Numbers by value: currency, thousands commas, trailing zeros, fractions and a unit may be written or left out, but two
    different units differ. math500: LaTeX besides, up to spacing and notation, not algebra. pathfinding: the nodes.
    prosqa: the sentence but for case and full stop. hotpotqa: but for case, punctuation and articles (SQuAD's rule).
    """
    if a is None or b is None:
        return False
    if task == 'pathfinding':
        a, b = (re.split(r'(?:\s|,|->|>|→)+', path.strip()) for path in (a, b))
        return a == b
    if task == 'prosqa':
        a, b = (' '.join(text.lower().split()).rstrip('. ') for text in (a, b))
        return a == b
    if task == 'hotpotqa':
        a, b = (re.sub(r'[^\w\s]', '', text.lower()).split() for text in (a, b))
        return [w for w in a if w not in ('a', 'an', 'the')] == [w for w in b if w not in ('a', 'an', 'the')]
    if task == 'math500':
        a, b = plain_latex(a), plain_latex(b)
        if same_quantity(a, b):
            return True
        a, b = (re.split(r'([,()\[\]{}])', ''.join(text.split())) for text in (a, b))  # tuples, intervals, arguments
        return len(a) == len(b) and all(x == y or same_quantity(x, y) for x, y in zip(a, b, strict=True))
    return same_quantity(a, b) or ' '.join(a.split()) == ' '.join(b.split())


CURRENCIES = {'$': 'dollar', '€': 'euro', '£': 'pound', '¥': 'yen'}
SCALES = {'k': 10**3, 'dozen': 12, 'hundred': 100, 'thousand': 10**3, 'million': 10**6, 'billion': 10**9}


def quantity(text):
    """(value, unit) of a text that is one number (a Fraction) with at most a unit of three words, None of any other text."""
    match = re.fullmatch(
        r'([+-]?)([$€£¥]?)([+-]?)(\d{1,3}(?:,\d{3}){1,300}(?!\d)|\d{1,1000})?(\.\d{1,1000})?(?:/(\d{1,1000}))?'
        r'\s*(%|°|(?:[a-z]+(?:[ /-][a-z]+){0,2})?)\.?',
        text.strip().replace('−', '-').lower(),
        re.ASCII,
    )
    if not match or not (match[4] or match[5]) or (match[1] and match[3]) or not int(match[6] or 1):
        return None
    value = Fraction((match[1] or match[3]) + (match[4] or '0').replace(',', '') + (match[5] or '')) / int(match[6] or 1)
    words = [w if w.endswith('ss') else w.removesuffix('s') for w in re.split(r'[ /-]+', match[7]) if w]
    if words and words[0] in SCALES:
        value *= SCALES[words.pop(0)]
    unit = ' '.join({'%': 'percent', '°': 'degree'}.get(w, w) for w in words)
    return value, unit or CURRENCIES.get(match[2], '')


def same_quantity(a, b):
    a, b = quantity(a), quantity(b)
    return bool(a and b) and a[0] == b[0] and (a[1] == b[1] or not (a[1] and b[1]))


def unboxed(text):
    """The content of the last \\boxed{..} in a text, braces balanced; the text itself if there is none or it never closes."""
    start = text.rfind('\\boxed{')
    depth = 0
    for i in range(start + 6, len(text)) if start >= 0 else ():
        depth += {'{': 1, '}': -1}.get(text[i], 0)
        if not depth:
            return text[start + 7 : i]
    return text


def plain_latex(text):
    """A final answer with one spelling for what LaTeX can spell in several: fractions, roots, spacing, text, units, `x =`."""
    text = unboxed(text).strip().removesuffix('.')
    text = re.sub(r'\\[()\[\]]|(?<!\\)\$|\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\\ |~', '', text)
    text = re.sub(r'\^\{?\\circ\}?', '°', text)
    text = re.sub(r'\\([%$])', r'\1', text).replace('\\cdot', '*').replace('{,}', ',')
    text = re.sub(r'\\[dt]frac', r'\\frac', text)
    text = re.sub(r'(?<=\d)\s+([a-zA-Z]{3}[a-zA-Z ]*)$', r'\\text{\1}', text)  # a unit; fewer letters are variables
    parts = re.split(r'\\(?:text|mbox|textbf|textrm|mathrm)\s*\{([^{}]*)\}', text)  # every second part is words
    text = ''.join(' ' + part.strip() if i % 2 else ''.join(part.split()) for i, part in enumerate(parts)).strip()
    text = re.sub(r'\\frac(\d)(\d)', r'\\frac{\1}{\2}', text)
    text = re.sub(r'\\frac(\d)\{', r'\\frac{\1}{', text)
    text = re.sub(r'\\frac\{([^{}]+)\}(\d)', r'\\frac{\1}{\2}', text)
    mixed = r'(?<![\w.}^])(\d{1,100})\\frac\{(\d{1,100})\}\{(\d{1,100})\}'
    text = re.sub(mixed, lambda m: f'{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}', text)
    text = re.sub(r'(?<![\w.}])\\frac\{(\d+)\}\{(\d+)\}', r'\1/\2', text)
    text = re.sub(r'([\^_])\{(\w)\}', r'\1\2', text)
    text = re.sub(r'\\sqrt(\w)', r'\\sqrt{\1}', text)
    text = re.sub(r'^[a-zA-Z](?:=|\\in(?![a-z]))', '', text)
    return re.sub(r'(?<=[\d}])(?=[a-zA-Z])', '*', text)  # 2x is a product, not two of the unit x


@torch.inference_mode()
def score_answers(model, data, split, config, kept):
    """{'exact_match', 'by_depth': {depth: share}, 'answers': how many}: greedy decoding of each prompt, exact and cached, up to
    the document token or stop_token; what follows the last #### is compared with the answer as the task compares.

    Whether the memory is read in the prompt is as in the training: recur_mask comes with the data. Raises ConfigError for a
    packed split.
    """
    arrays, meta, task = data.split(split), data.meta, data.meta['task']
    if 'prompt_lengths' not in arrays:
        raise ConfigError(f'split={split} of {data.folder} has several examples in a row; take another split.')
    ends = [meta['document_token'], meta.get('stop_token')]
    with open(os.path.join(data.folder, f'{split}.jsonl'), encoding='utf-8') as f:
        examples = [json.loads(line) for line in f]
    total = min(len(examples), (config.max_batches or math.inf) * config.batch_size)
    order = np.argsort(arrays['prompt_lengths'][:total], kind='stable')  # little padding
    prefill = 'exact' if config.exact == 'sequential' else 'jacobi'
    greedy = SampleConfig(temperature=0, max_tokens=model.config.block_size, prefill=prefill, jacobi_tol=1e-5)

    def measure(low):
        """Whether each example of the batch is answered."""
        rows = order[low : low + config.batch_size].tolist()
        decoder, answers = Decoder(model, greedy), [[] for _ in rows]
        decoder.read([arrays['tokens'][i, : arrays['prompt_lengths'][i]].tolist() for i in rows], prompt_recurs(meta))
        generate(decoder, greedy, lambda i, token, _: answers[i].append(token) or token in ends)
        texts = [decode(meta, [t for t in ids if t not in ends]).decode('utf-8', 'replace') for ids in answers]
        found = [extract_answer(task, text) for text in texts]
        return [bool(same_answer(task, answer, examples[i]['answer'])) for answer, i in zip(found, rows, strict=True)]

    hits = np.zeros(total)
    hits[order] = [hit for batch in kept.batches('answers', range(0, total, config.batch_size), measure) for hit in batch]
    depth = arrays['steps'][:total]
    by_depth = {int(d): float(hits[depth == d].mean()) for d in np.unique(depth)}
    return {'exact_match': float(hits.mean()), 'by_depth': by_depth, 'answers': total}


def nats(model, x, y, schedule):
    """-log p of the targets y (B, T) under `schedule`, in float64 on the CPU."""
    logits = model(x, schedule=schedule)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction='none').double().cpu().view(y.shape)


def pass_schedules(model, schedule):
    """{pass: the schedule that ends with it} of the passes over all positions, the initial one first."""
    if model.config.recurrence == 'none' or not schedule.initial:
        return {}
    if schedule.schedule == 'jacobi':
        return {f'pass {k}': Schedule('jacobi', k, 1) for k in range(schedule.d_forward + 1)}
    return {'pass 0': Schedule(), 'all passes': schedule}


def score_text(model, data, split, schedule, config, kept):
    """{'bits_per_byte', 'nats_per_token', 'tokens', 'by_position': {'first-last': bits per byte}, 'passes': {..} if asked}.

    Every token but the first is predicted once, windows do not overlap; tokens that stand for no bytes (the document token) are
    left out. Position 0 has one token to look at.
    """
    stream, T = data.split(split), model.config.block_size
    nothing = ConfigError(f'{data.folder}/{split}.bin has nothing to score: it holds {len(stream)} tokens.')
    if len(stream) < 2:
        raise nothing
    T = min(T, len(stream) - 1)
    sizes = torch.tensor(data.meta['token_bytes'])
    starts = np.arange(0, len(stream) - T, T)
    if config.max_batches:  # spread over the split
        starts = starts[np.linspace(0, len(starts) - 1, min(len(starts), config.max_batches * config.batch_size)).astype(int)]
    if schedule == SEQUENTIAL and (config.exact == 'jacobi' or (config.exact == 'auto' and T > 256)):
        schedule = converged(T)
    passes = pass_schedules(model, schedule) if config.passes else {}
    device = model.embed.weight.device

    def measure(low):
        """{'lost': nats of each position, 'octets': their bytes, 'tokens', 'passes': nats of each, 'apart': ..}."""
        x, y, _ = data.batch(split, starts[low : low + config.batch_size], T, device)
        size = sizes[y.cpu()]
        lost = (nats(model, x, y, schedule) * (size > 0)).sum(0)
        found = {'lost': lost.tolist(), 'octets': size.sum(0).tolist(), 'tokens': (size > 0).sum().item()}
        found['passes'] = {name: (nats(model, x, y, one) * (size > 0)).sum().item() for name, one in passes.items()}
        if schedule.jacobi_tol and not low:  # iterated to convergence: held against token by token, once
            apart = nats(model, x[:1], y[:1], schedule) - nats(model, x[:1], y[:1], SEQUENTIAL)
            found['apart'] = apart.abs().max().item()
        return found

    parts = list(kept.batches(str(schedule), range(0, len(starts), config.batch_size), measure))
    lost, octets = (torch.tensor([part[name] for part in parts], dtype=torch.float64).sum(0) for name in ('lost', 'octets'))
    total, unit = lost.sum().item(), octets.sum().item() * math.log(2)
    if not unit:
        raise nothing
    edges = [0, *(2**i for i in range(T.bit_length()) if 2**i < T), T]
    by_position = {f'{a}-{b - 1}': (lost[a:b].sum() / octets[a:b].sum() / math.log(2)).item() for a, b in pairwise(edges)}
    tokens = sum(part['tokens'] for part in parts)
    found = {'bits_per_byte': total / unit, 'nats_per_token': total / tokens, 'tokens': tokens, 'by_position': by_position}
    found |= {'nats_from_sequential': parts[0]['apart']} if 'apart' in parts[0] else {}
    return found | ({'passes': {name: sum(part['passes'][name] for part in parts) / unit for name in passes}} if passes else {})


def diagnose(model, data, split, config):
    """How a recurrence is used, on config.batch_size windows of a text.

    {'gammas': {parameter: value}, 'gates': {layer: {'loc', 'rec'}} (LRT) or {'cur', 'rec'} (T2MLR), mean over positions and
    channels, 'moved': |x - h| / |h| by Phi (T2MLR), 'residuals': largest relative change by Jacobi pass, 'carried':
    {k: nats that token t + k loses when the memory that token t reads is set to 0}}.
    """
    if model.config.recurrence == 'none':
        raise ConfigError('diagnose=True looks at a recurrence, and this checkpoint has none.')
    T = min(model.config.block_size, len(data.split(split)) - 1)
    starts = np.linspace(0, len(data.split(split)) - T - 1, config.batch_size).astype(int)
    x, y, _ = data.batch(split, starts, T, model.embed.weight.device)
    found = {'gammas': {n: p.mean().item() for n, p in model.named_parameters() if 'gamma' in n}}
    seen, hooks = {}, []
    for layer, block in enumerate(model.blocks):
        if block.attention.gate_memory is not None:
            keep = functools.partial(lambda layer, module, given, out: seen.update({layer: out}), layer)
            hooks.append(block.attention.gate_memory.register_forward_hook(keep))
    if model.fusion is not None:
        hooks.append(model.fusion.register_forward_hook(lambda module, given, out: seen.update(fusion=(*given, out))))
    changes = []
    model(x, schedule=converged(T), changes=changes)
    for hook in hooks:
        hook.remove()
    if model.fusion is not None:
        h, local, R, _, out = seen.pop('fusion')
        D = h.size(-1)
        halves = zip(('cur', 'rec'), local.chunk(2, -1), (model.fusion.f_cur, model.fusion.f_rec), strict=True)
        found['gates'] = {name: torch.sigmoid(a + F.linear(R, f.weight[:, D:])).mean().item() for name, a, f in halves}
        found['moved'] = ((out - h).norm() / h.norm()).item()
    else:
        means = {layer: (2 * out.sigmoid()).chunk(2, -1) for layer, out in seen.items()}
        found['gates'] = {layer: {'loc': loc.mean().item(), 'rec': rec.mean().item()} for layer, (loc, rec) in means.items()}
    found['residuals'] = [change.item() for change in changes]
    carried = torch.zeros(0)
    for t in (T // 4, T // 2, 3 * T // 4):
        losses = []
        for scale in (1.0, 0.0):
            state = model.new_state(len(x))
            model(x[:, :t], schedule=SEQUENTIAL, state=state)
            state.memory = state.memory * scale
            logits = model(x[:, t:], schedule=SEQUENTIAL, state=state)
            losses.append(F.cross_entropy(logits.flatten(0, 1), y[:, t:].flatten(), reduction='none').view(len(x), -1).mean(0))
        effect = (losses[1] - losses[0])[: T // 4].cpu()
        carried = carried + effect / 3 if len(carried) else effect / 3
    found['carried'] = {k: carried[k].item() for k in range(len(carried)) if k == 0 or k & (k - 1) == 0}
    return found


def report_diagnosis(found, figure):
    print_table(['parameter', 'value'], list(found['gammas'].items()))
    gates = found['gates']
    if 'moved' in found:
        print(f'\nmean gates: cur {gates["cur"]:.4f}, rec {gates["rec"]:.4f}; Phi moves the stream by {found["moved"]:.4f}')
    else:
        print()
        print_table(['layer', 'gate_loc', 'gate_rec'], [[layer, *gate.values()] for layer, gate in gates.items()])
    print('\nlargest relative change of the span by pass: ' + ' '.join(f'{r:.1e}' for r in found['residuals']))
    print('\nnats lost at token t + k without the memory that token t reads:')
    print_table(['k', 'nats'], list(found['carried'].items()))
    if figure:
        picture, panels = pyplot().subplots(1, 3, figsize=(12, 3.4), layout='constrained')
        if 'moved' not in found:
            for i, name in enumerate(('loc', 'rec')):
                panels[0].plot(
                    list(gates), [gate[name] for gate in gates.values()], 'os'[i] + '-', color=COLOURS[i], label=name
                )
            panels[0].legend()
        else:
            panels[0].bar(['cur', 'rec'], [gates['cur'], gates['rec']], color=COLOURS[:2])
        panels[0].set(title='gates', xlabel='layer' if 'moved' not in found else 'gate', ylabel='mean')
        panels[1].plot(range(1, len(found['residuals']) + 1), found['residuals'], 'o-', color=COLOURS[0])
        panels[1].set(title='fixed point', xlabel='pass', ylabel='largest relative change', yscale='log')
        panels[2].plot(list(found['carried']), list(found['carried'].values()), 'o-', color=COLOURS[0])
        panels[2].set(title='memory at t set to 0', xlabel='tokens later', ylabel='nats lost', xscale='symlog')
        picture.savefig(figure, dpi=150)


def draw_curves(folders, path):
    """Training loss, and validation loss as markers, against tokens, a line a folder."""
    picture, panel = pyplot().subplots(figsize=(7, 4), layout='constrained')
    for i, folder in enumerate(folders):
        try:
            with open(os.path.join(folder, 'log.jsonl'), encoding='utf-8') as f:
                lines = [json.loads(line) for line in f]
        except (OSError, ValueError) as e:
            raise ConfigError(f'curves={folder}: its log.jsonl cannot be read ({e}).') from None
        style = dict(color=COLOURS[i % 7])
        train = [(line['step'], line['loss']) for line in lines if 'loss' in line]
        val = [(line['step'], (line['val_exact'] or line['val'])['loss']) for line in lines if 'val' in line]
        panel.plot(*zip(*train, strict=True), alpha=0.4, linewidth=1, **style)
        panel.plot(*zip(*val, strict=True), 'osD^v<>'[i % 7] + '-', markersize=4, label=os.path.basename(folder), **style)
    panel.set(xlabel='update', ylabel='loss (nats a token): training faint, validation as decoded')
    panel.legend()
    picture.savefig(path, dpi=150)


def draw_overview(path):
    """The two recurrences on a stack of layers over three tokens, and which positions each pass of each schedule touches."""
    plt = pyplot()
    layers, T = 6, 8
    picture, panels = plt.subplots(1, 2 + 4, figsize=(15, 4.2), layout='constrained', width_ratios=[2.3, 2.3, 1, 1, 1, 1])
    for panel, title, span in ((panels[0], 'T2MLR', range(2, 4)), (panels[1], 'LRT', range(layers))):
        for t in range(3):
            for layer in range(layers):
                inside = layer in span
                box = plt.Rectangle((t - 0.28, layer), 0.56, 0.7, facecolor=COLOURS[0] if inside else '0.88', edgecolor='0.3')
                box.set_alpha(0.45 if inside and title == 'LRT' else 0.9)
                panel.add_patch(box)
            panel.text(t, -0.5, ('t - 1', 't', 't + 1')[t], ha='center')
        arrow = dict(arrowstyle='->', color=COLOURS[1], linewidth=1.8)
        for t in range(2):
            if title == 'T2MLR':
                panel.annotate('', (t + 0.72, 2.1), (t + 0.28, 3.6), arrowprops=arrow)
            else:
                for layer in range(layers):
                    panel.annotate('', (t + 0.72, layer + 0.35), (t + 0.28, 4.35), arrowprops=arrow | {'linewidth': 1.0})
        panel.set(xlim=(-0.6, 2.6), ylim=(-0.8, layers + 0.1), title=title, xticks=[], yticks=[i + 0.35 for i in range(layers)])
        panel.set_yticklabels([str(i) for i in range(layers)])
        panel.set_ylabel('layer' if title == 'T2MLR' else '')
        panel.spines[:].set_visible(False)
    shown = (Schedule('jacobi', 3, 2), Schedule('interleaved'), Schedule('chunked', chunk_size=3), SEQUENTIAL)
    for panel, schedule in zip(panels[2:], shown, strict=True):
        passes = schedule.passes(T)
        for row, positions in enumerate(passes):
            reads = row > 0 or not schedule.initial
            graded = row >= len(passes) - schedule.n_graded(T)
            for p in positions:
                colour = COLOURS[1] if reads else '0.75'
                panel.add_patch(plt.Rectangle((p, -row), 0.86, 0.8, facecolor=colour, alpha=1.0 if graded else 0.35))
        about = f' {schedule.d_forward}, {schedule.d_backward}' if schedule.schedule == 'jacobi' else ''
        panel.set(xlim=(-0.2, T), ylim=(-T + 0.8, 1), title=schedule.schedule + about, xlabel='position', xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
    panels[2].set_ylabel('pass (first on top)')
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=c, alpha=a) for c, a in (('0.75', 1), (COLOURS[1], 1), (COLOURS[1], 0.35))]
    picture.legend(handles, ['without memory', 'reads the memory', 'without gradient'], loc='outside lower right', ncols=3)
    picture.savefig(path, dpi=150)


# CORE (DCLM): task of the harness, examples before the question, metric, accuracy of guessing. Jeopardy, the completion form of
# SQuAD and a second count of HellaSwag have no equal there, so the average is over the other 19 of the 22.
CORE = {
    'agieval_lsat_ar': (3, 'acc', 0.25),
    'arc_easy': (10, 'acc', 0.25),
    'arc_challenge': (10, 'acc', 0.25),
    'bigbench_cs_algorithms_generate_until': (10, 'exact_match', 0.0),
    'bigbench_dyck_languages_generate_until': (10, 'exact_match', 0.0),
    'bigbench_language_identification_multiple_choice': (10, 'acc', 0.25),
    'bigbench_operators_generate_until': (10, 'exact_match', 0.0),
    'bigbench_qa_wikidata_generate_until': (10, 'exact_match', 0.0),
    'bigbench_repeat_copy_logic_generate_until': (10, 'exact_match', 0.0),
    'boolq': (10, 'acc', 0.5),
    'commonsense_qa': (10, 'acc', 0.2),
    'copa': (0, 'acc', 0.5),
    'coqa': (0, 'em', 0.0),
    'hellaswag': (10, 'acc_norm', 0.25),
    'lambada_openai': (0, 'acc', 0.0),
    'openbookqa': (0, 'acc', 0.25),
    'piqa': (10, 'acc', 0.5),
    'winogrande': (0, 'acc', 0.5),
    'wsc273': (0, 'acc', 0.5),
}


def score_continuations(model, pairs, batch_size):
    """(log-probability, whether greedy decoding would give it) of each continuation, for pairs (context ids, its ids).

    Exact decoding, with the context cut from the left where the two do not fit. The order and the batch do not matter.
    Raises ConfigError for a continuation longer than the context of the model.
    """
    T, device = model.config.block_size, model.embed.weight.device
    found = [None] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    for low in tqdm(range(0, len(pairs), batch_size), unit='batch', leave=False, disable=None):
        chosen = order[low : low + batch_size]
        rows = []
        for i in chosen:
            context, continuation = pairs[i]
            if len(continuation) > T:
                raise ConfigError(f'a continuation of {len(continuation)} tokens does not fit the context of {T}.')
            rows.append((context + continuation)[-T - 1 :])
        longest = max(map(len, rows)) - 1
        x = torch.tensor(
            [row[:-1] + [0] * (longest + 1 - len(row)) for row in rows], device=device
        )  # what follows changes nothing
        p = model(x, schedule=SEQUENTIAL if longest <= 256 else converged(longest)).double().log_softmax(-1)
        for i, row, logp in zip(chosen, rows, p, strict=True):
            n = len(pairs[i][1])
            target = torch.tensor(row[-n:], device=device)[:, None]
            logp = logp[len(row) - 1 - n : len(row) - 1]
            found[i] = logp.gather(-1, target).sum().item(), bool((logp.argmax(-1, keepdim=True) == target).all())
    return found


def harness(model, meta, batch_size, kept, opens=True):
    """Our model as one of the lm-eval harness (optional: pip install lm-eval). `kept` (Kept) has what an interrupted run found.

    opens: the document token comes before every text, as in our training; else only where there is no context at all.
    """
    try:
        from lm_eval.api.model import LM
        from lm_eval.utils import get_rolling_token_windows
    except ImportError:
        raise ConfigError('lm_eval needs the harness; install it with pip install lm-eval.') from None

    def in_batches(kind, requests, measure):
        asked = [request.args for request in requests]
        name = f'{kind} {hashlib.sha256(json.dumps(asked).encode()).hexdigest()}'
        size = 16 * batch_size  # so many are sorted by length
        parts = kept.batches(name, range(0, len(asked), size), lambda low: measure(asked[low : low + size]))
        return [result for part in parts for result in part]

    def opening(context):
        return [meta['document_token']] if opens or not context else []

    def score(asked):
        pairs = []
        for context, continuation in asked:
            spaces = len(context) - len(context.rstrip())  # a token may begin with them, so they go with what follows
            context, continuation = context[: len(context) - spaces], context[len(context) - spaces :] + continuation
            n = len(encode(meta, context))
            ids = encode(meta, context + continuation)
            pairs.append(([*opening(ids[:n]), *ids[:n]], ids[n:]))
        return score_continuations(model, pairs, batch_size)

    def score_whole(asked):
        pairs, owner, total = [], [], [0.0] * len(asked)
        for number, (text,) in enumerate(asked):
            windows = get_rolling_token_windows(encode(meta, text), meta['document_token'], model.config.block_size, 1)
            for context, predicted in windows:
                pairs.append((context[: len(context) - len(predicted) + 1], predicted))
                owner.append(number)
        for number, (logp, _) in zip(owner, score_continuations(model, pairs, batch_size), strict=True):
            total[number] += logp
        return total

    def complete(asked):
        texts, order = [''] * len(asked), sorted(range(len(asked)), key=lambda i: (str(asked[i][1]), len(asked[i][0])))
        for _, same in groupby(order, key=lambda i: asked[i][1]):  # what is decoded together has the same settings
            same = list(same)
            for low in range(0, len(same), batch_size):
                chosen = same[low : low + batch_size]
                given = asked[chosen[0]][1]
                length = min(given.get('max_gen_toks', 256), model.config.block_size - 1)
                temperature = given.get('temperature', 1.0) if given.get('do_sample', False) else 0.0
                config = SampleConfig(max_tokens=length, temperature=temperature, jacobi_tol=1e-5)
                stops = given.get('until') or []
                rows = [Text(meta, [stops] if isinstance(stops, str) else stops) for _ in chosen]
                prompts = [encode(meta, asked[i][0]) for i in chosen]
                decoder = Decoder(model, config)
                decoder.read([[*opening(ids), *ids][-(model.config.block_size - length + 1) :] for ids in prompts])
                generators = [torch.Generator().manual_seed(config.seed) for _ in chosen]
                generate(decoder, config, lambda i, token, likelihood, rows=rows: rows[i].push(token, likelihood), generators)
                for i, row in zip(chosen, rows, strict=True):
                    row.close('length')
                    texts[i] = row.text
        return texts

    class Harness(LM):
        def loglikelihood(self, requests):
            return [tuple(pair) for pair in in_batches('loglikelihood', requests, score)]

        def loglikelihood_rolling(self, requests):
            return in_batches('loglikelihood_rolling', requests, score_whole)

        def generate_until(self, requests):
            return in_batches('generate_until', requests, complete)

    return Harness()


def run_harness(lm, config):
    """{task: {metric: value}} of the harness, and with CORE its centred average: the mean of (acc - guess) / (1 - guess)."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=config.lm_tasks or None)
    shared = dict(model=lm, task_manager=manager, limit=config.limit or None, bootstrap_iters=0)
    found = {}
    names = list(CORE) if config.lm_eval == 'core' else config.lm_eval.split(',')
    for name in names:
        shots = CORE[name][0] if config.lm_eval == 'core' else config.num_fewshot
        try:
            scores = lm_eval.simple_evaluate(tasks=[name], num_fewshot=None if shots < 0 else shots, **shared)['results']
        except (ValueError, KeyError, OSError) as e:
            raise ConfigError(f'the task {name} could not be run ({type(e).__name__}: {str(e)[:200]}).') from None
        for task, values in scores.items():
            numbers = {k.partition(',')[0]: v for k, v in values.items() if isinstance(v, float) and 'stderr' not in k}
            found[task] = numbers
            print(f'{task:<50}' + '  '.join(f'{k} {v:.4f}' for k, v in numbers.items()))
    if config.lm_eval == 'core':
        centred = [(found[name][metric] - guess) / (1 - guess) for name, (_, metric, guess) in CORE.items()]
        found['CORE'] = {'centred': sum(centred) / len(centred)}
        print(f'{"CORE":<50}centred {found["CORE"]["centred"]:.4f}')
    return found


def print_table(head, rows):
    """Aligned columns; numbers below 1000 with as many decimals as mean something."""
    cells = [[str(c) if isinstance(c, str | int) else f'{c:.4f}' for c in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print('  '.join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))


@torch.no_grad()
def evaluate(path, config):
    """Measures one checkpoint: {'checkpoint', 'update', 'data', 'split'} and, for each schedule, what score_* returns."""
    folder = path.removeprefix('hf:')
    load = load_model if folder == path else load_folder
    model, checkpoint = load(folder, pick_device(config.device))
    if config.lm_eval:
        if checkpoint['meta']['kind'] == 'task' and checkpoint['meta'].get('aligned', True):
            raise ConfigError(f'lm_eval={config.lm_eval} needs a text model, and {path} was trained on an aligned task.')
        name = os.path.join(os.path.dirname(path) if folder == path else '.', 'eval-lm_eval.json')
        stamp = os.stat(path).st_mtime_ns if folder == path else path
        kept = Kept(name + '.part', {'checkpoint': stamp, 'batch_size': config.batch_size})
        lm = harness(model, checkpoint['meta'], config.batch_size, kept, folder == path)
        found = {'checkpoint': path, 'lm_eval': run_harness(lm, config)}
        with open(name, 'w', encoding='utf-8') as f:
            json.dump(found, f, indent=1)
        kept.remove()
        return found
    if folder != path:
        raise ConfigError(f'ckpt={path} is a pretrained folder, which lm_eval measures; data is for checkpoints of train.py.')
    saved = checkpoint['config']
    data = Dataset(config.data_dir or saved['data_dir'])
    split = config.split or ('val' if data.is_text else 'test')
    if split not in data.meta['splits']:
        raise ConfigError(f'split={split} is not in {data.folder}; choose from {", ".join(data.meta["splits"])}.')
    same_tokens(checkpoint, data)
    if not data.is_text and data.longest[split] > model.config.block_size:
        raise ConfigError(
            f'{data.folder} holds examples of {data.longest[split]} tokens in {split}, more than the context of '
            f'{model.config.block_size} that {path} was built for; train with a larger block_size.'
        )
    if config.diagnose:
        if not data.is_text:
            raise ConfigError(f'diagnose=True reads texts, and {data.folder} is a task.')
        return {'checkpoint': path, **diagnose(model, data, split, config)}
    answers = data.meta.get('aligned', True) is False
    score = score_text if data.is_text else score_task
    name = os.path.join(os.path.dirname(path), f'eval-{os.path.basename(os.path.normpath(data.folder))}-{split}.json')
    settings = {key: getattr(config, key) for key in ('batch_size', 'max_batches', 'passes', 'exact')}
    kept = Kept(name + '.part', settings | {'checkpoint': os.stat(path).st_mtime_ns, 'data': data.meta['splits'][split]})
    found = {'decoded': score_answers(model, data, split, config, kept)} if answers else {}
    found = found or {how: score(model, data, split, schedule, config, kept) for how, schedule in schedules(saved).items()}
    about = {'checkpoint': path, 'update': checkpoint['step'], 'data': data.folder, 'split': split}
    about |= provenance(path, model, checkpoint, data)
    trained = {} if data.is_text else checkpoint['meta'].get('settings', {})  # of the training's dataset, not of this one
    if lengths := trained.get('depth' if answers else 'steps'):  # questions of a file have none to choose
        about['trained_length'] = max(int(n) for n in lengths.split('-'))
    with open(name, 'w', encoding='utf-8') as f:
        json.dump(about | found, f, indent=1)
    kept.remove()
    return about | found


def provenance(path, model, checkpoint, data):
    """What produced a checkpoint: its settings, its cost in operations and seconds, the code, the data and the machine."""
    config = TrainConfig(**checkpoint['config'])
    defaults = asdict(TrainConfig())
    flops = count_flops(model, config, config.block_size)
    tokens = config.batch_size * config.block_size
    seconds, last = 0.0, 0
    log = os.path.join(os.path.dirname(path), 'log.jsonl')
    if os.path.isfile(log):
        with open(log, encoding='utf-8', errors='replace') as f:
            for line in f:
                with contextlib.suppress(ValueError, LookupError, TypeError, ZeroDivisionError):
                    values = json.loads(line)
                    seconds, last = seconds + (values['step'] - last) * tokens / values['tokens_per_s'], values['step']
    revision = subprocess.run(
        ['git', '-C', os.path.dirname(os.path.abspath(__file__)), 'rev-parse', 'HEAD'], capture_output=True, text=True
    )
    return {
        'settings': {k: v for k, v in asdict(config).items() if v != defaults[k]},
        'parameters': sum(count_parameters(model).values()),
        'training_flops': flops['step'] * tokens * checkpoint['step'],
        'step_flops_ratio': flops['step'] / flops['plain_step'],
        'training_seconds': round(seconds, 3),
        'revision': revision.stdout.strip() or None,
        'data_sha256': {name: of['sha256'] for name, of in data.meta['splits'].items()},
        'machine': f'{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}',
    }


def read_study(folder):
    """{cell: [what evaluate returned, a seed each]} of the files NAME-SEED.json in `folder`; raises ConfigError for none."""
    cells = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), '*-*.json'))):
        try:
            with open(path, encoding='utf-8') as f:
                found = json.load(f)
            missing = {'training_flops', 'training_seconds', 'parameters'} - found.keys()
            if missing or not {'training', 'decoded'} & found.keys():
                raise ValueError('it is no measurement of a checkpoint')
        except (ValueError, AttributeError) as e:
            raise ConfigError(f'{path} cannot be read ({e}); delete it and measure again.') from None
        cells.setdefault(os.path.basename(path).rpartition('-')[0], []).append(found)
    if not cells:
        raise ConfigError(f'study={folder} holds no results; files there are called NAME-SEED.json.')
    return cells


def report_tasks(cells, config):
    """A table in Markdown of accuracies, mean over seeds: by depth, or at the longest trained step and twice and four times as
    far; and all steps or depths as a figure, of the first seed."""

    def accuracies(run):
        if 'decoded' in run:
            return summary(run)
        n, scores = run['trained_length'], run.get('exact', run['training'])
        return {
            f'{name}, step {k}': of['by_position'][str(k)]
            for name, of in scores.items()
            for k in (n, 2 * n, 4 * n)
            if str(k) in of['by_position']
        }

    table = {cell: [accuracies(run) for run in runs] for cell, runs in cells.items()}
    names = list(next(iter(table.values()))[0])
    rows = [(cell, *(np.mean([found[name] for found in runs]) for name in names)) for cell, runs in table.items()]
    print(f'| cell | {" | ".join(names)} | operations, 1e12 | parameters | seeds |')
    print(f'| --- |{" ---: |" * (len(names) + 3)}')
    for cell, *means in sorted(rows, key=lambda row: -sum(row[1:])):
        first = cells[cell][0]
        shares = ' | '.join(f'{100 * mean:.1f}%' for mean in means)
        print(f'| {cell} | {shares} | {first["training_flops"] / 1e12:,.0f} | {first["parameters"]:,} | {len(cells[cell])} |')
    if config.json:
        print(json.dumps({cell: dict(zip(names, means, strict=True)) for cell, *means in rows}))
    if config.figure:
        draw({cell: runs[0] for cell, runs in cells.items()}, config.figure)


def report_study(cells, config):
    """A table in Markdown of bits per byte (mean over seeds) against cost; and the same as a figure."""
    rows = []
    for cell, runs in cells.items():
        exact = [run.get('exact', run['training'])['bits_per_byte'] for run in runs]
        trained = [run['training']['bits_per_byte'] for run in runs]
        cost = runs[0]['training_flops'], np.mean([run['training_seconds'] for run in runs])
        rows.append((cell, np.mean(trained), np.mean(exact), max(exact) - min(exact), *cost, runs[0]['parameters'], len(runs)))
    rows.sort(key=lambda row: row[2])
    print('| cell | training schedule | exact decoding | spread of seeds | operations, 1e12 | seconds | parameters | seeds |')
    print('| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |')
    for cell, trained, exact, spread, flops, seconds, parameters, seeds in rows:
        apart = f'{spread:.4f}' if seeds > 1 else '-'
        costs = f'{flops / 1e12:,.0f} | {seconds:.0f} | {parameters:,} | {seeds}'
        print(f'| {cell} | {trained:.4f} | {exact:.4f} | {apart} | {costs} |')
    if config.json:
        print(json.dumps({cell: {'bits_per_byte': exact, 'training_schedule': trained} for cell, trained, exact, *_ in rows}))
    if config.figure:
        picture, panel = pyplot().subplots(figsize=(8, 4.6), layout='constrained')
        families = sorted({row[0].split('-')[0] for row in rows})
        for i, (cell, _, exact, _, flops, *_) in enumerate(rows):
            colour = COLOURS[families.index(cell.split('-')[0]) % 7]
            style = dict(marker='osD^v<>pP*Xhd'[i % 13], color=colour, markeredgecolor='0.2', linestyle='')
            panel.plot(flops / 1e12, exact, label=f'{exact:.3f}  {cell}', **style)
        plain = sorted((row[4] / 1e12, row[2]) for row in rows if row[0].split('-')[0] == 'plain')
        if plain:  # the transformer itself, at several costs
            panel.plot(*zip(*plain, strict=True), color='0.5', linewidth=1, zorder=0)
        panel.set(xscale='log', xlabel='operations of the training (1e12)', ylabel='bits per byte, exact decoding')
        picture.legend(loc='outside right upper', fontsize=8)
        picture.savefig(config.figure, dpi=150)


def report(found):
    """Prints the tables of one checkpoint."""
    print(f'\n{found["checkpoint"]}, update {found["update"]}, {found["data"]}/{found["split"]}')
    if 'decoded' in found:
        answers = found['decoded']
        rows = [['all', answers['exact_match']], *([f'depth {d}', share] for d, share in answers['by_depth'].items())]
        return print_table([f'{answers["answers"]} answers', 'exact match'], rows)
    measured = {name: found[name] for name in ('training', 'exact') if name in found}
    if not summary(found):
        rows = [[name, f['bits_per_byte'], f['nats_per_token'], f['tokens']] for name, f in measured.items()]
        rows += [[name, bits, '', ''] for name, bits in found['training'].get('passes', {}).items()]
        print_table(['schedule', 'bits per byte', 'nats per token', 'tokens'], rows)
        print()
        buckets = found['training']['by_position']
        rows = [[bucket, *(f['by_position'][bucket] for f in measured.values())] for bucket in buckets]
        return print_table(['position', *(f'bits per byte ({name})' for name in measured)], rows)
    columns = [(schedule, score) for schedule, scores in measured.items() for score in scores]
    for by, label in (('by_position', 'step'), ('by_length', 'length'), ('last_by_length', 'length, last step')):
        lengths = measured[columns[0][0]][columns[0][1]][by]
        rows = [[n, *(measured[s][k][by].get(n, math.nan) for s, k in columns)] for n in lengths]
        print_table([label, *(f'{k} ({s})' for s, k in columns)], rows)
        print()
    print_table(['all lengths', *(f'{k} ({s})' for s, k in columns)], [['', *(measured[s][k]['all'] for s, k in columns)]])


def summary(found):
    """{'state', 'state_last', 'retrieval'}: accuracies of decoding at the longest trained length, where it is measured; of a
    task of answers {'exact match', 'depth 1', ..}; of a text {}."""
    if 'decoded' in found:
        by_depth = found['decoded']['by_depth'].items()
        return {'exact match': found['decoded']['exact_match']} | {f'depth {d}': share for d, share in by_depth}
    if 'trained_length' not in found:
        return {}
    scores, n = found.get('exact', found['training']), found['trained_length']
    n = n if n in scores['state']['by_length'] else str(n)  # the keys of a file are texts
    state = {'state': scores['state']['by_length'].get(n), 'state_last': scores['state']['last_by_length'].get(n)}
    return state | {name: f['by_length'].get(n) for name, f in scores.items() if name != 'state'}


COLOURS = 'C0 C1 C2 C4 C5 C7 C8'.split()


def pyplot():
    """matplotlib.pyplot, drawing to files; raises ConfigError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('figure needs matplotlib; install it with pip install matplotlib.') from None
    matplotlib.use('Agg')
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(results, path):
    """Accuracy of decoding against the step, one panel a score, one line a checkpoint; of answers against their depth."""
    plt = pyplot()

    def curves(found):
        if 'decoded' in found:
            return {'exact match': found['decoded']['by_depth']}
        return {name: scores['by_position'] for name, scores in found.get('exact', found['training']).items()}

    names = list(curves(next(iter(results.values()))))
    figure, panels = plt.subplots(
        1, len(names), figsize=(4.5 * len(names), 3.4), sharey=True, squeeze=False, layout='constrained'
    )
    for panel, name in zip(panels[0], names, strict=True):
        for i, (label, found) in enumerate(results.items()):
            points = curves(found)[name]
            style = dict(marker='osD^v<>'[i % 7], color=COLOURS[i % 7], markersize=4)
            panel.plot([int(step) for step in points], list(points.values()), label=label, **style)
        if 'trained_length' in found:
            panel.axvline(found['trained_length'] + 0.5, color='0.6', linestyle=':', linewidth=1)
        panel.set(xlabel='depth' if 'decoded' in found else 'step of the example', title=name, ylim=(-0.03, 1.03))
    panels[0][0].set_ylabel('accuracy (fraction)')
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc='outside upper center', ncols=min(len(results), 4))
    figure.savefig(path, dpi=150)


def main(argv):
    config = parse(EvalConfig, argv, 'python eval.py [--key=value ...]')
    if config.threads:
        torch.set_num_threads(config.threads)
    with reporting():
        if config.overview:
            return draw_overview(config.overview)
        if config.curves:
            return draw_curves(config.curves.split(','), config.figure)
        if config.study:
            cells = read_study(config.study)
            kinds = {tuple(summary(run)) for runs in cells.values() for run in runs}
            if len(kinds) > 1:
                raise ConfigError(f'study={config.study} holds results of different tasks; give each a folder.')
            return (report_study if kinds == {()} else report_tasks)(cells, config)
        results = {}
        paths = [find_checkpoint(part.strip()) for part in config.ckpt.split(',')]
        names = [os.path.basename(os.path.dirname(os.path.abspath(path))) for path in paths]
        for path, name in zip(paths, names if len(set(names)) == len(names) else paths, strict=True):
            results[name] = found = evaluate(path, config)
            if config.diagnose:
                report_diagnosis(found, config.figure)
            elif not config.lm_eval:
                report(found)
        if config.diagnose or config.lm_eval:
            if config.json:
                print(json.dumps(results if len(results) > 1 else found))
            return
        scores = {tuple(summary(found)) for found in results.values()}
        task = len(scores) == 1 and () not in scores
        if (config.results or config.figure) and not task:
            raise ConfigError(
                'results and figure summarise one task, and there is a text model among the checkpoints, or another task.'
            )
        if task and len(results) > 1:
            rows = [[name, *summary(found).values()] for name, found in results.items()]
            where = '' if 'decoded' in found else f' at the longest trained length, {found["trained_length"]} steps'
            print(f'\nexact decoding{where}')
            print_table(['model', *summary(found)], rows)
        if config.results:
            with open(config.results, 'w', encoding='utf-8') as f:
                json.dump({name: summary(found) for name, found in results.items()}, f, indent=2)
        if config.figure:
            draw(results, config.figure)
        if config.json:
            print(json.dumps(results if len(results) > 1 else found))


if __name__ == '__main__':
    main(sys.argv[1:])
