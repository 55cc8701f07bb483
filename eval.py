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
import copy
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
from itertools import pairwise
from pathlib import Path

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # read when torch is loaded: waiting threads leave their core to others

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from configurator import ConfigError, key, parse, reporting
from model import LOGITS_AT_ONCE, SEQUENTIAL, Schedule, count_flops, count_parameters
from prepare_data import encode
from sample import SampleConfig, complete, computing, find_checkpoint, load, prompt_recurs
from train import Dataset, TrainConfig, same_tokens, use_device, warn


@dataclass
class EvalConfig:
    ckpt: str = key('', 'checkpoint, or the folder of a ckpt.pt; several joined by commas; empty takes the newest under out/')
    data_dir: str = key('', 'dataset; empty takes the one it was trained on')
    split: str = key('', 'train, val or test; empty takes val for text and test for tasks')
    batch_size: int = key(64, 'sequences at a time', bounds=(1, 2**31))
    max_batches: int = key(0, 'batches at most; 0 takes the whole split', bounds=(0, 2**31))
    show: int = key(0, 'tasks made of text: print prompt, answer and target of so many examples', bounds=(0, 2**31))
    passes: bool = key(False, 'text: also bits per byte of each pass of the training schedule')
    exact: str = key(
        'auto',
        'exact decoding: token by token, or iterated; auto iterates texts above 256 tokens and prompts',
        ('auto', 'sequential', 'jacobi'),
    )
    chat: bool = key(True, 'lm_eval of hf:FOLDER: False goes on without a chat template that cannot be used')
    dtype: str = key(
        'auto',
        'of answers and lm_eval; auto is bfloat16 on CUDA; what is compared with exact decoding has float32 at least',
        ('auto', 'float32', 'bfloat16', 'float64'),
    )
    device: str = key('auto', 'cpu, cuda, mps; auto takes the first that is there, from the right')
    threads: int = key(0, 'CPU threads; 0 leaves the default', bounds=(0, 1024))
    results: str = key('', 'tasks: write the accuracies at the longest trained length to this JSON file')
    figure: str = key('', 'draw to this file: accuracy against position; a study of texts: bits per byte against operations')
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
        modes = [name for name in ('overview', 'curves', 'study', 'lm_eval', 'diagnose') if getattr(self, name)]
        if len(modes) > 1:
            raise ConfigError(f'{" and ".join(modes)} are measured or drawn apart; keep one.')
        if modes and self.results or self.figure and (self.lm_eval or self.overview):
            raise ConfigError(f'{"results" if self.results else "figure"} is not written with {modes[0]}; leave it out.')
        if modes and self.show:
            raise ConfigError(f'show={self.show} prints decoded answers, not with {modes[0]}; leave it out.')
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


def exactly(T, how='auto'):
    """The exact recurrence over T positions: one after the other, or Jacobi until nothing moves by more than float32 rounds, in
    far fewer passes than positions."""
    if how == 'sequential' or (how == 'auto' and T <= 256):
        return SEQUENTIAL
    return Schedule('jacobi', d_forward=T, d_backward=1, jacobi_tol=1e-5)


class Kept:
    """What the batches of an evaluation gave, in a file until all are measured: an interrupted one goes on where it stopped."""

    def __init__(self, path, identity):
        """path: that of the results, and `.part`. identity: all that they depend on, as JSON; its digest is in each line, as
        another evaluation may write to the same file meanwhile, and lines of another are passed over."""
        self.path, self.found = path, {}
        self.identity = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        text = Path(path).read_text(encoding='utf-8', errors='replace') if os.path.exists(path) else ''
        self.gap = '' if text[-1:] in ('', '\n') else '\n'  # behind a last line that was cut short
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError):
                whose, name, low, value = json.loads(line)
                if whose == self.identity:
                    self.found[name, low] = value

    def add(self, name, low, value):
        """Appends a batch to the file."""
        self.found[name, low] = value
        with open(self.path, 'a', encoding='utf-8') as f:
            f.write(f'{self.gap}{json.dumps([self.identity, name, low, value])}\n')
        self.gap = ''

    def batches(self, name, starts, measure):
        """measure(start), JSON, for each of the starts; `name` tells measurements apart."""
        for low in tqdm(starts, unit='batch', leave=False, disable=None):
            if (name, low) not in self.found:
                self.add(name, low, measure(low))
            yield self.found[name, low]

    def finish(self, results):
        """Writes the results, JSON, removes the file and returns them."""
        Path(self.path.removesuffix('.part')).write_text(json.dumps(results, indent=1), encoding='utf-8')
        Path(self.path).unlink(missing_ok=True)
        return results


def shares(hit, by):
    """{value of `by`, as a text: how often there is a hit}, by rising values."""
    return {str(value): float(hit[by == value].mean()) for value in np.unique(by)}


def score_task(model, data, split, schedule, config, kept):
    """{score: {'all', 'last', 'by_length': {steps: ..}, 'last_by_length': .., 'by_position': {step: ..}}} as fractions.

    Positions count the steps of an example from 1; 'last' is the last step of each example.
    """
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

    parts, found = list(kept.batches(str(schedule), range(0, total, config.batch_size), measure)), {}
    for name in data.meta['scores']:
        hit, step, length = np.concatenate([part[name] for part in parts], 1)
        last = step == length
        found[name] = {'all': float(hit.mean()), 'last': float(hit[last].mean()), 'by_length': shares(hit, length)}
        found[name] |= {'last_by_length': shares(hit[last], length[last]), 'by_position': shares(hit, step)}
    return found


def extract_answer(task, text):
    """The final answer (str) in the text of a response, or None.

    The first `####` decides: the answer is what follows on its line, without marks and further sentences (`bare_answer`). What
    has no letter and no digit is no answer. math500, which other models answer in their own way: without a `####`, the content
    of the last \\boxed{}.
    """
    marked = re.search(r'####([^\n]*)', text)
    boxed = unboxed(text) if task == 'math500' and '\\boxed' in text else ''
    answer = bare_answer(task, marked[1] if marked else boxed)
    return answer if re.search(r'[^\W_]', answer) else None


def bare_answer(task, text):
    """An answer without Markdown's marks, which are `**`, `__` and backticks anywhere, `*` and `_` at the ends. It ends before
    a full stop that a space follows, except in hotpotqa, whose names hold such stops."""
    text = re.sub(r'\*\*|__|`', '', text).strip('*_ \t\r\n')
    return text if task == 'hotpotqa' else re.split(r'\.\s', text)[0]


def ends_answer(text):
    """Whether the line of the first `####` is complete, so that the rest of a response cannot change its answer."""
    return '\n' in text.partition('####')[2]


def same_answer(task, a, b):
    """Whether two final answers (str; None is no answer, which nothing equals) mean the same in a task.

    Both are taken bare (`bare_answer`). Numbers by value: currency, thousands commas, trailing zeros, fractions and a unit may
    be written or left out, but two different units differ; other words beside a number make it another answer. math500: LaTeX
    besides, up to spacing and notation, not algebra. pathfinding: the nodes but for a full stop. prosqa: the sentence but for
    case and full stop. hotpotqa: but for case, punctuation and articles (SQuAD's rule).
    """
    if a is None or b is None:
        return False
    a, b = bare_answer(task, a), bare_answer(task, b)
    if task == 'pathfinding':
        a, b = (re.split(r'(?:\s|,|->|>|→)+', path.strip().rstrip('.')) for path in (a, b))
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
    """{'exact_match', 'by_depth': {depth: share}, 'answers': how many, 'cut': how many of them}.

    Greedy decoding of each prompt, exact and cached, up to the end of the line of the first `####`, the document token or
    stop_token. The answer (`extract_answer`) is compared as the task compares (`same_answer`). A response that reaches the
    end of the context before is cut: it has no answer, so it is no match. Whether the memory is read in the prompt is as in
    the training: recur_mask comes with the data. Raises ConfigError for a packed split.
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
        """[number, response, 'right', 'wrong' or 'cut'] of each example of the batch."""
        chosen = order[low : low + config.batch_size].tolist()
        prompts = [arrays['tokens'][i, : arrays['prompt_lengths'][i]].tolist() for i in chosen]
        rows, found = complete(model, meta, prompts, greedy, recurs=prompt_recurs(meta), done=ends_answer), []
        for i, row in zip(chosen, rows, strict=True):
            right = same_answer(task, extract_answer(task, row.text), examples[i]['answer'])
            found.append([i, row.text, 'cut' if row.finish != 'stop' else 'right' if right else 'wrong'])
        return found

    batches = kept.batches('responses', range(0, total, config.batch_size), measure)
    outcomes = {i: outcome for batch in batches for i, _, outcome in batch}
    hits, cut = (np.array([outcomes[i] == wanted for i in range(total)]) for wanted in ('right', 'cut'))
    by_depth = shares(hits, arrays['steps'][:total])
    return {'exact_match': float(hits.mean()), 'by_depth': by_depth, 'answers': total, 'cut': int(cut.sum())}


def read_examples(data, split):
    """The examples of a task made of text, {'prompt', 'response', 'answer', 'depth'} each."""
    with open(os.path.join(data.folder, f'{split}.jsonl'), encoding='utf-8') as f:
        return [json.loads(line) for line in f]


def show_answers(examples, kept, n):
    """Prints the first n of the examples that score_answers has decoded: prompt, answer and target."""
    decoded = sorted(found for (name, _), batch in kept.found.items() if name == 'responses' for found in batch)
    for i, text, outcome in decoded[:n]:
        example = examples[i]
        print(f'\n--- example {i + 1}, depth {example["depth"]}: {outcome}\nprompt: {example["prompt"].rstrip()}')
        print(f'answer: {text.rstrip()}\ntarget: {example["answer"]}')


def score_tokens(model, hidden, targets):
    """(-log p, whether it is the likeliest token) of each of the targets (..), from the top of the stack (.., n_embd) where
    they are predicted; float64 and bool, on the CPU. A target of -1 gives 0 and False.

    As in the training, logits are made a few positions at a time, so that memory does not grow with batch times vocabulary.
    """
    n, found = max(1, LOGITS_AT_ONCE // model.config.vocab_size), []
    for part, wanted in zip(hidden.flatten(0, -2).split(n), targets.flatten().split(n), strict=True):
        logits = model.logits(part)
        lost = F.cross_entropy(logits, wanted, ignore_index=-1, reduction='none')
        found.append(torch.stack([lost, (logits.argmax(-1) == wanted).to(lost.dtype)]))
    lost, hit = torch.cat(found, 1).cpu().double().view(2, *targets.shape)
    return lost, hit.bool()


def nats(model, x, y, schedule, state=None):
    """-log p of the targets y (B, T) under `schedule`, behind `state` if there is one, in float64 on the CPU."""
    return score_tokens(model, model(x, schedule=schedule, state=state, logits_from=None), y)[0]


def score_text(model, data, split, schedule, config, kept):
    """{'bits_per_byte', 'nats_per_token', 'tokens', 'by_position': {'first-last': bits per byte}, 'passes': {..} if asked}.

    Every token but the first is predicted once, in windows of block_size that do not overlap; the last window holds what is
    left, and may be shorter. max_batches takes whole windows alone, spread over the split. Tokens that stand for no bytes (the
    document token) are not scored, nor counted in 'tokens'. Position 0 has one token to look at.
    """
    stream = data.split(split)
    T = max(1, min(model.config.block_size, len(stream) - 1))
    sizes = torch.tensor(data.meta['token_bytes'])
    n_whole, rest = divmod(len(stream) - 1, T)
    starts = T * np.arange(n_whole)
    limit = config.max_batches * config.batch_size
    if 0 < limit < n_whole + (rest > 0):
        starts, rest = starts[np.linspace(0, n_whole - 1, min(limit, n_whole)).astype(int)], 0
    batches = [(starts[low : low + config.batch_size], T) for low in range(0, len(starts), config.batch_size)]
    batches += [([T * n_whole], rest)] if rest else []
    schedule = exactly(T, config.exact) if schedule == SEQUENTIAL else schedule
    passes = {}  # the schedule that ends with each pass over all positions, the initial one first
    if config.passes and model.config.recurrence != 'none' and schedule.schedule == 'jacobi':
        passes = {f'pass {k}': Schedule('jacobi', k, 1) for k in range(schedule.d_forward + 1)}
    elif config.passes and model.config.recurrence != 'none' and schedule.initial:
        passes = {'pass 0': Schedule(), 'all passes': schedule}

    def measure(i):
        """{'sums': of bytes, of tokens with bytes, of nats and of the nats of each pass, at every position; 'apart': ..}."""
        chosen, n = batches[i]
        x, y, _ = data.batch(split, chosen, n, model.embed.weight.device)
        size = sizes[y.cpu()]
        lost = [nats(model, x, y, one) * (size > 0) for one in (schedule, *passes.values())]
        found = {'sums': [F.pad(of.sum(0), (0, T - n)).tolist() for of in (size, size > 0, *lost)]}
        if schedule.jacobi_tol and i == 0:  # iterated to convergence: held against token by token, once
            apart = nats(model, x[:1], y[:1], schedule) - nats(model, x[:1], y[:1], SEQUENTIAL)
            found['apart'] = apart.abs().max().item()
        return found

    parts = list(kept.batches(f'windows {schedule}', range(len(batches)), measure))
    sums = torch.tensor([part['sums'] for part in parts], dtype=torch.float64).view(len(parts), 3 + len(passes), T).sum(0)
    (octets, _, lost), (n_octets, tokens, total, *by_pass) = sums[:3], sums.sum(1).tolist()
    if not n_octets:
        raise ConfigError(f'{data.folder}/{split}.bin has nothing to score: it holds {len(stream)} tokens.')
    unit = n_octets * math.log(2)
    edges = [0, *(2**i for i in range(T.bit_length()) if 2**i < T), T]
    filled = [(a, b) for a, b in pairwise(edges) if octets[a:b].sum()]
    by_position = {f'{a}-{b - 1}': (lost[a:b].sum() / octets[a:b].sum() / math.log(2)).item() for a, b in filled}
    found = {'bits_per_byte': total / unit, 'nats_per_token': total / tokens, 'tokens': int(tokens), 'by_position': by_position}
    if 'apart' in parts[0]:
        found['nats_from_sequential'] = parts[0]['apart']
    if passes:
        found['passes'] = {name: lost / unit for name, lost in zip(passes, by_pass, strict=True)}
    return found


def diagnose(model, data, split, config):
    """How a recurrence is used, on config.batch_size windows of a text.

    {'gammas': {parameter: value}, 'gates': {layer: {'loc', 'rec'}} (LRT) or {'cur', 'rec'} (T2MLR), mean over positions and
    channels, 'moved': |x - h| / |h| by Phi (T2MLR), 'residuals': largest relative change by Jacobi pass, 'carried':
    {k: nats that token t + k loses when the memory that token t reads is set to 0}}.
    """
    T = min(model.config.block_size, len(data.split(split)) - 1)
    starts = np.linspace(0, len(data.split(split)) - T - 1, config.batch_size).astype(int)
    x, y, _ = data.batch(split, starts, T, model.embed.weight.device)
    found = {'gammas': {n: p.mean().item() for n, p in model.named_parameters() if 'gamma' in n}}
    seen, changes, gates = {}, [], [block.attention.gate_memory for block in model.blocks]
    watched = [module for module in (model.fusion, *gates) if module is not None]
    hooks = [m.register_forward_hook(lambda module, given, out: seen.update({module: (*given, out)})) for m in watched]
    model(x, schedule=exactly(T, 'jacobi'), changes=changes)
    for hook in hooks:
        hook.remove()
    if model.fusion is not None:
        h, local, R, _, out = seen[model.fusion]
        halves = zip(('cur', 'rec'), local.chunk(2, -1), (model.fusion.f_cur, model.fusion.f_rec), strict=True)
        gates = {name: (a + F.linear(R, f.weight[:, h.size(-1) :])).sigmoid().mean().item() for name, a, f in halves}
        found |= {'gates': gates, 'moved': ((out - h).norm() / h.norm()).item()}
    else:
        means = {layer: (2 * seen[gate][-1].sigmoid()).chunk(2, -1) for layer, gate in enumerate(gates) if gate in seen}
        found['gates'] = {layer: {'loc': loc.mean().item(), 'rec': rec.mean().item()} for layer, (loc, rec) in means.items()}
    found['residuals'] = [change.item() for change in changes]
    effects = []
    for t in (T // 4, T // 2, 3 * T // 4):
        state = model.new_state(len(x))
        model(x[:, :t], schedule=SEQUENTIAL, state=state)
        without = copy.deepcopy(state)
        without.memory.zero_()
        lost, kept = (nats(model, x[:, t:], y[:, t:], SEQUENTIAL, behind) for behind in (without, state))
        effects.append((lost - kept).mean(0)[: T // 4])
    carried = torch.stack(effects).mean(0).tolist()
    found['carried'] = {k: lost for k, lost in enumerate(carried) if k & (k - 1) == 0}
    return found


def report_diagnosis(found, figure):
    print_table(['parameter', 'value'], list(found['gammas'].items()))
    gates, residuals, carried = found['gates'], found['residuals'], found['carried']
    if 'moved' in found:
        print(f'\nmean gates: cur {gates["cur"]:.4f}, rec {gates["rec"]:.4f}; Phi moves the stream by {found["moved"]:.4f}')
    else:
        print()
        print_table(['layer', 'gate_loc', 'gate_rec'], [[layer, *gate.values()] for layer, gate in gates.items()])
    print('\nlargest relative change of the span by pass: ' + ' '.join(f'{r:.1e}' for r in residuals))
    print('\nnats lost at token t + k without the memory that token t reads:')
    print_table(['k', 'nats'], list(carried.items()))
    if figure:
        with drawing(figure, 1, 3, figsize=(12, 3.4)) as (_, panels):
            if 'moved' in found:
                panels[0].bar(list(gates), list(gates.values()), color=COLOURS[:2])
            else:
                panels[0].plot(list(gates), [list(gate.values()) for gate in gates.values()], label=['loc', 'rec'])
                panels[0].legend()
            panels[0].set(title='gates', xlabel='gate' if 'moved' in found else 'layer', ylabel='mean')
            panels[1].plot(range(1, len(residuals) + 1), residuals)
            panels[1].set(title='fixed point', xlabel='pass', ylabel='largest relative change', yscale='log')
            panels[2].plot(list(carried), list(carried.values()))
            panels[2].set(title='memory at t set to 0', xlabel='tokens later', ylabel='nats lost', xscale='symlog')


COLOURS = [f'tab:{name}' for name in 'blue orange green purple brown gray olive'.split()]


@contextlib.contextmanager
def drawing(path, *shape, **given):
    """A figure and its panels (rows and columns in `shape`), written to the file `path` in the end."""
    import matplotlib  # slow to import, and most commands draw nothing

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    cycle = plt.cycler(color=COLOURS) + plt.cycler(marker='osD^v<>')
    with plt.rc_context({'axes.prop_cycle': cycle, 'lines.markersize': 4}):
        figure, panels = plt.subplots(*shape, layout='constrained', **given)
        yield figure, panels
        figure.savefig(path, dpi=150)
    print(f'wrote {path}', file=sys.stderr)


def draw_curves(folders, path):
    """Training loss, and validation loss as markers, against tokens, a line a folder."""
    with drawing(path, figsize=(7, 4)) as (_, panel):
        for folder in folders:
            try:
                lines = [json.loads(line) for line in Path(folder, 'log.jsonl').read_text(encoding='utf-8').splitlines()]
            except (OSError, ValueError) as e:
                raise ConfigError(f'curves={folder}: its log.jsonl cannot be read ({e}).') from None
            train, val = {}, {}
            for line in lines:  # where nothing was scored, a mean is missing
                scored = line.get('val_exact') or line.get('val') or {}
                for points, loss in ((train, line.get('loss')), (val, scored.get('loss'))):
                    if 'step' in line and loss is not None:
                        points[line['step']] = loss
            if not train and not val:
                raise ConfigError(f'curves={folder}: its log.jsonl holds no loss; train it first.')
            (drawn,) = panel.plot(list(val), list(val.values()), label=os.path.basename(folder))
            panel.plot(list(train), list(train.values()), alpha=0.4, linewidth=1, color=drawn.get_color(), marker='')
        panel.set(xlabel='update', ylabel='loss (nats a token): training faint, validation as decoded')
        panel.legend()


def draw_overview(path):
    """The two recurrences on a stack of layers over three tokens, and which positions each pass of each schedule touches."""
    layers, T, blue, orange = 6, 8, *COLOURS[:2]
    with drawing(path, 1, 2 + 4, figsize=(15, 4.2), width_ratios=[2.3, 2.3, 1, 1, 1, 1]) as (picture, panels):
        t2mlr, lrt, *rest = panels
        for panel, title, span, alpha in ((t2mlr, 'T2MLR', range(2, 4), 0.9), (lrt, 'LRT', range(layers), 0.45)):
            for layer in range(layers):
                face = dict(color=blue, alpha=alpha) if layer in span else dict(color='0.88', alpha=0.9)
                panel.bar(range(3), 0.7, 0.56, bottom=layer, edgecolor='0.3', **face)
            reads = [(2.1, 3.6, 1.8)] if panel is t2mlr else [(layer + 0.35, 4.35, 1.0) for layer in range(layers)]
            for t in range(2):  # where the memory arrives, where it comes from, width of the arrow
                for to, source, width in reads:
                    arrow = dict(arrowstyle='->', color=orange, linewidth=width)
                    panel.annotate('', (t + 0.72, to), (t + 0.28, source), arrowprops=arrow)
            panel.set(xlim=(-0.6, 2.6), ylim=(-0.1, layers + 0.1), title=title, ylabel='layer' if panel is t2mlr else '')
            panel.set_xticks(range(3), ['t - 1', 't', 't + 1'])
            panel.set_yticks([layer + 0.35 for layer in range(layers)], range(layers))
        shown = (Schedule('jacobi', 3, 2), Schedule('interleaved'), Schedule('chunked', chunk_size=3), SEQUENTIAL)
        for panel, schedule in zip(rest, shown, strict=True):
            passes = schedule.passes(T)
            for row, positions in enumerate(passes):
                colour = orange if row or not schedule.initial else '0.75'
                alpha = 1.0 if row >= len(passes) - schedule.n_graded(T) else 0.35
                panel.bar(positions, 0.8, 0.86, bottom=-row, align='edge', color=colour, alpha=alpha)
            about = f' {schedule.d_forward}, {schedule.d_backward}' if schedule.schedule == 'jacobi' else ''
            panel.set(xlim=(-0.2, T), ylim=(-T + 0.8, 1), title=schedule.schedule + about, xlabel='position')
            panel.set(xticks=[], yticks=[], ylabel='pass (first on top)' if panel is rest[0] else '')
        for panel in panels:
            panel.spines[:].set_visible(False)
            panel.tick_params(length=0)
        meanings = {'without memory': ('0.75', 1), 'reads the memory': (orange, 1), 'without gradient': (orange, 0.35)}
        handles = [rest[0].bar(0, 0, color=colour, alpha=alpha) for colour, alpha in meanings.values()]
        picture.legend(handles, meanings, loc='outside lower right', ncols=3)


# CORE (DCLM): examples before the question, metric, accuracy of guessing: the tasks of the harness with these. Jeopardy, the
# completion form of SQuAD and a second count of HellaSwag have no equal there, so the average is over the other 19 of the 22.
CORE = {
    (0, 'acc', 0.0): 'lambada_openai',
    (0, 'acc', 0.25): 'openbookqa',
    (0, 'acc', 0.5): 'copa winogrande wsc273',
    (0, 'em', 0.0): 'coqa',
    (3, 'acc', 0.25): 'agieval_lsat_ar',
    (10, 'acc', 0.2): 'commonsense_qa',
    (10, 'acc', 0.25): 'arc_easy arc_challenge bigbench_language_identification_multiple_choice',
    (10, 'acc', 0.5): 'boolq piqa',
    (10, 'acc_norm', 0.25): 'hellaswag',
    (10, 'exact_match', 0.0): 'bigbench_cs_algorithms_generate_until bigbench_dyck_languages_generate_until '
    'bigbench_operators_generate_until bigbench_qa_wikidata_generate_until bigbench_repeat_copy_logic_generate_until',
}
CORE = {task: about for about, tasks in CORE.items() for task in tasks.split()}


def score_continuations(model, pairs, batch_size):
    """(log-probability, whether greedy decoding would give it) of each continuation, for pairs (context ids, its ids).

    Exact decoding. A continuation of more than block_size tokens is scored in pieces of block_size; what comes before a piece
    is cut from the left where the two do not fit. An empty continuation scores 0. The order and the batch do not matter.
    """
    T, device = model.config.block_size, model.embed.weight.device
    pieces = []  # (number of the pair, tokens that are read and scored, how many of them are scored)
    for i, (context, continuation) in enumerate(pairs):
        for start in range(0, len(continuation), T):
            piece = continuation[start : start + T]
            pieces.append((i, (context + continuation[:start] + piece)[-T - 1 :], len(piece)))
    pieces.sort(key=lambda piece: -len(piece[1]))
    found = [(0.0, len(continuation) > 0) for _, continuation in pairs]
    for low in tqdm(range(0, len(pieces), batch_size), unit='batch', leave=False, disable=None):
        chosen = pieces[low : low + batch_size]
        longest = len(chosen[0][1]) - 1
        padded = [row[:-1] + [0] * (longest + 1 - len(row)) for _, row, _ in chosen]  # what follows changes nothing
        batch = model(torch.tensor(padded, device=device), schedule=exactly(longest), logits_from=None)
        for (i, row, n), hidden in zip(chosen, batch, strict=True):
            lost, hit = score_tokens(model, hidden[len(row) - 1 - n : len(row) - 1], torch.tensor(row[-n:], device=device))
            total, greedy = found[i]
            found[i] = total - lost.sum().item(), greedy and bool(hit.all())
    return found


def split_request(meta, context, continuation):
    """(ids of the context, ids of the continuation) of a request of the harness, as its own classes split.

    Spaces at the end of the context belong to the continuation, and the whole is encoded once. Where a token crosses the
    border, so that no token is left behind the context's, the last token of the whole is what is scored.
    """
    whole = encode(meta, context + continuation)
    n = min(len(encode(meta, context.rstrip())), max(len(whole) - 1, 0))
    return whole[:n], whole[n:]


def harness(model, meta, batch_size, kept, opens=True):
    """Our model as one of the lm-eval harness (optional: pip install lm-eval). `kept` (Kept) has what an interrupted run found.

    opens: the document token comes before every text, as in our training; else only where there is no context at all.
    """
    try:
        from lm_eval.api.model import LM
        from lm_eval.models.utils import Collator
    except ImportError:
        raise ConfigError('lm_eval needs the harness; install it with pip install lm-eval.') from None

    def kept_in_parts(measure):
        """A method of the harness, of a function from the arguments of some requests to their results."""

        def method(self, requests):
            asked = [request.args for request in requests]
            name = f'{measure.__name__} {hashlib.sha256(json.dumps(asked).encode()).hexdigest()}'
            size = 16 * batch_size  # so many are sorted by length
            parts = kept.batches(name, range(0, len(asked), size), lambda low: measure(asked[low : low + size]))
            return [tuple(result) if isinstance(result, list) else result for part in parts for result in part]

        return method

    def opening(context):
        return [meta['document_token']] if opens or not context else []

    class Harness(LM):
        @kept_in_parts
        def loglikelihood(asked):
            pairs = [split_request(meta, *request) for request in asked]
            if empty := sum(not continuation for _, continuation in pairs):
                warn(f'{empty} of the requests of the harness have no token to score and count as 0')
            return score_continuations(model, [(opening(context) + context, ids) for context, ids in pairs], batch_size)

        @kept_in_parts
        def loglikelihood_rolling(asked):
            pairs = [([meta['document_token']], encode(meta, text)) for (text,) in asked]
            return [total for total, _ in score_continuations(model, pairs, batch_size)]

        @kept_in_parts
        def generate_until(asked):
            texts, T = [], model.config.block_size
            batches = Collator(asked, sort_fn=lambda request: len(request[0]), group_by='gen_kwargs')  # of equal settings
            for batch in batches.get_batched(batch_size):
                given, stops = batch[0][1], batch[0][1].get('until') or []
                length = min(given.get('max_gen_toks', 256), T - 1)
                temperature = given.get('temperature', 1.0) if given.get('do_sample', False) else 0.0
                config = SampleConfig(max_tokens=length, temperature=temperature, jacobi_tol=1e-5)
                prompts = (encode(meta, context) for context, _ in batch)
                prompts = [[*opening(ids), *ids][-(T - length + 1) :] for ids in prompts]
                rows = complete(model, meta, prompts, config, [stops] if isinstance(stops, str) else stops)
                texts += [row.text for row in rows]
            return batches.get_original(texts)

    return Harness()


def run_harness(lm, config):
    """{task: {metric: value}} of the harness, and with CORE its centred average: the mean of (acc - guess) / (1 - guess)."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=config.lm_tasks or None)
    shared = dict(model=lm, task_manager=manager, limit=config.limit or None, bootstrap_iters=0)
    core, found = config.lm_eval == 'core', {}
    for name in CORE if core else config.lm_eval.split(','):
        shots = CORE[name][0] if core else config.num_fewshot
        try:
            scores = lm_eval.simple_evaluate(tasks=[name], num_fewshot=None if shots < 0 else shots, **shared)['results']
        except (ValueError, KeyError, OSError) as e:
            raise ConfigError(f'the task {name} could not be run ({type(e).__name__}: {str(e)[:200]}).') from None
        for task, values in scores.items():
            numbers = {k.partition(',')[0]: v for k, v in values.items() if isinstance(v, float) and 'stderr' not in k}
            found[task] = numbers
            print(f'{task:<50}' + '  '.join(f'{k} {v:.4f}' for k, v in numbers.items()))
    if core:
        centred = [(found[name][metric] - guess) / (1 - guess) for name, (_, metric, guess) in CORE.items()]
        found['CORE'] = {'centred': sum(centred) / len(centred)}
        print(f'{"CORE":<50}centred {found["CORE"]["centred"]:.4f}')
    return found


def print_markdown(head, rows):
    """A table for the README: texts, the first column to the left."""
    for row in (head, ['---', *['---:'] * (len(head) - 1)], *rows):
        print('|' + ''.join(f' {cell} |' if cell else ' |' for cell in row))


def print_table(head, rows):
    """Aligned columns; numbers below 1000 with as many decimals as mean something, and - for None, what was not measured."""
    cells = [['-' if c is None else f'{c:.4f}' if isinstance(c, float) else str(c) for c in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print('  '.join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))


def prepare(path, config):
    """What an evaluation works on: the model, the checkpoint without its weights, the dataset (None for lm_eval) and its split.
    Raises ConfigError for what cannot be measured or, as results or figure, summarised."""
    if path.startswith('hf:') and not config.lm_eval:
        raise ConfigError(f'ckpt={path} is a pretrained folder, which lm_eval measures; data is for checkpoints of train.py.')
    torch.set_float32_matmul_precision('high')
    model, checkpoint = load(path, use_device(config), config.dtype, config.chat)
    if config.lm_eval:
        if checkpoint['meta']['kind'] == 'task' and checkpoint['meta'].get('aligned', True):
            raise ConfigError(f'lm_eval={config.lm_eval} needs a text model, and {path} was trained on an aligned task.')
        return model, checkpoint, None, ''
    data = Dataset(config.data_dir or checkpoint['config']['data_dir'])
    split = config.split or ('val' if data.is_text else 'test')
    if split not in data.meta['splits']:
        raise ConfigError(f'split={split} is not in {data.folder}; choose from {", ".join(data.meta["splits"])}.')
    same_tokens(checkpoint, data)
    n, size = data.longest.get(split, 0), model.config.block_size
    if n > size:
        raise ConfigError(f'{split} of {data.folder} has {n} tokens a row, and {path} a context of {size}; train a longer one.')
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
def evaluate(path, config):
    """Measures one checkpoint: {'checkpoint', 'update', 'data', 'split'} and, for each schedule, what score_* returns."""
    model, checkpoint, data, split = prepare(path, config)
    folder, pretrained = os.path.dirname(path), path.startswith('hf:')
    if config.diagnose:
        return {'checkpoint': path, **diagnose(model, data, split, config)}
    identity = {'checkpoint': path if pretrained else os.stat(path).st_mtime_ns, 'batch_size': config.batch_size}
    identity |= {'dtype': config.dtype, 'device': model.embed.weight.device.type}
    if config.lm_eval:
        kept = Kept(os.path.join('.' if pretrained else folder, 'eval-lm_eval.json.part'), identity)
        lm = harness(model, checkpoint['meta'], config.batch_size, kept, not pretrained)
        with computing(model, config.dtype):
            return kept.finish({'checkpoint': path, 'lm_eval': run_harness(lm, config)})
    about = {'checkpoint': path, 'update': checkpoint['step'], 'data': data.folder, 'split': split}
    about |= provenance(path, model, checkpoint, data)
    answers = data.meta.get('aligned', True) is False
    trained = {} if data.is_text else checkpoint['meta'].get('settings', {})  # of the training's dataset, not of this one
    if lengths := trained.get('depth' if answers else 'steps'):  # questions of a file have none to choose
        about['trained_length'] = max(int(n) for n in lengths.split('-'))
    identity |= {name: getattr(config, name) for name in ('max_batches', 'passes', 'exact')}
    identity['data'] = data.meta['splits'][split]
    kept = Kept(os.path.join(folder, f'eval-{os.path.basename(os.path.normpath(data.folder))}-{split}.json.part'), identity)
    if answers:
        with computing(model, config.dtype):
            decoded = score_answers(model, data, split, config, kept)
        if config.show:
            show_answers(read_examples(data, split), kept, config.show)
        return kept.finish(about | {'decoded': decoded})
    score = score_text if data.is_text else score_task
    measured = schedules(checkpoint['config']).items()
    return kept.finish(about | {how: score(model, data, split, schedule, config, kept) for how, schedule in measured})


def provenance(path, model, checkpoint, data):
    """What produced a checkpoint: its settings, its cost in operations and seconds, the code, the data and the machine."""
    config = TrainConfig(**checkpoint['config'])
    T = config.block_size if data.is_text else checkpoint['meta']['longest']['train']
    flops, tokens = count_flops(model, config, T), config.batch_size * T
    seconds, last, revision = 0.0, 0, ''
    log = os.path.join(os.path.dirname(path), 'log.jsonl')
    with contextlib.suppress(FileNotFoundError), open(log, encoding='utf-8', errors='replace') as f:
        for line in f:
            with contextlib.suppress(ValueError, LookupError, TypeError, ZeroDivisionError):
                values = json.loads(line)
                seconds, last = seconds + (values['step'] - last) * tokens / values['tokens_per_s'], values['step']
    with contextlib.suppress(FileNotFoundError):  # a machine without git
        git = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=Path(__file__).parent, capture_output=True, text=True)
        revision = git.stdout.strip()
    return {
        'settings': {k: v for k, v in asdict(config).items() if v != getattr(TrainConfig, k)},
        'parameters': sum(count_parameters(model).values()),
        'training_flops': flops['step'] * tokens * checkpoint['step'],
        'step_flops_ratio': flops['step'] / flops['plain_step'],
        'training_seconds': round(seconds, 3),
        'revision': revision or None,
        'data_sha256': {name: of['sha256'] for name, of in data.meta['splits'].items()},
        'machine': f'{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}',
    }


def read_study(folder):
    """{cell: [what evaluate returned, a seed each]} of the files NAME-SEED.json in `folder`; raises ConfigError for none."""
    cells = {}
    for path in sorted(Path(folder).glob('*-*.json')):
        try:
            found = json.loads(path.read_text(encoding='utf-8'))
            missing = {'training_flops', 'training_seconds', 'parameters'} - found.keys()
            if missing or not {'training', 'decoded'} & found.keys():
                raise ValueError('it is no measurement of a checkpoint')
        except (ValueError, AttributeError) as e:
            raise ConfigError(f'{path} cannot be read ({e}); delete it and measure again.') from None
        cells.setdefault(path.name.rpartition('-')[0], []).append(found)
    if not cells:
        raise ConfigError(f'study={folder} holds no results; files there are called NAME-SEED.json.')
    if len({tuple(summary(run)) for runs in cells.values() for run in runs}) > 1:
        raise ConfigError(f'study={folder} holds results of different tasks; give each a folder.')
    return cells


def study_row(runs):
    """(what it is ranked by, rising; {score: mean over seeds}; {column: its text}) of a cell. Texts: bits per byte. Tasks:
    accuracies, by depth, or at the longest trained step and twice and four times as far."""
    first, seconds = runs[0], {}

    def accuracies(run):
        if 'decoded' in run:
            return summary(run)
        steps = [str(run['trained_length'] * far) for far in (1, 2, 4)]
        return {f'{name}, step {n}': of[n] for name, of in curves(run).items() for n in steps if n in of}

    if summary(first):
        found = [accuracies(run) for run in runs]
        means = {name: np.mean([of[name] for of in found]) for name in found[0]}
        rank, shown = -sum(means.values()), {name: f'{mean:.1%}' for name, mean in means.items()}
    else:
        exact = [decoding(run)['bits_per_byte'] for run in runs]
        trained = np.mean([run['training']['bits_per_byte'] for run in runs])
        rank, means = np.mean(exact), {'bits_per_byte': np.mean(exact), 'training_schedule': trained}
        shown = {'training schedule': f'{trained:.4f}', 'exact decoding': f'{rank:.4f}'}
        shown['spread of seeds'] = f'{max(exact) - min(exact):.4f}' if len(runs) > 1 else '-'
        seconds = {'seconds': f'{np.mean([run["training_seconds"] for run in runs]):.0f}'}
    shown |= {'operations, 1e12': f'{first["training_flops"] / 1e12:,.0f}', **seconds, 'parameters': f'{first["parameters"]:,}'}
    return rank, means, shown | {'seeds': str(len(runs))}


def report_study(cells, config):
    """The table of a study in Markdown, and its figure: of tasks the steps or depths of the first seed, of texts the costs."""
    rows = sorted(((cell, *study_row(runs)) for cell, runs in cells.items()), key=lambda row: row[1])
    print_markdown(['cell', *rows[0][-1]], [[cell, *shown.values()] for cell, *_, shown in rows])
    if config.json:
        print(json.dumps({cell: means for cell, _, means, _ in rows}))
    firsts = {cell: runs[0] for cell, runs in cells.items()}
    if config.figure and summary(firsts[rows[0][0]]):
        draw(firsts, config.figure)
    elif config.figure:
        draw_costs({cell: (firsts[cell]['training_flops'] / 1e12, bits) for cell, bits, *_ in rows}, config.figure)


def draw_costs(points, path):
    """Bits per byte against the operations (1e12) of the training, of {cell: (operations, bits)}, a colour a family."""
    families = sorted({cell.split('-')[0] for cell in points})
    with drawing(path, figsize=(8, 4.6)) as (picture, panel):
        for i, (cell, (flops, bits)) in enumerate(points.items()):
            colour = COLOURS[families.index(cell.split('-')[0]) % 7]
            style = dict(marker='osD^v<>pP*Xhd'[i % 13], markersize=6, color=colour, markeredgecolor='0.2', linestyle='')
            panel.plot(flops, bits, label=f'{bits:.3f}  {cell}', **style)
        plain = sorted(point for cell, point in points.items() if cell.split('-')[0] == 'plain')
        if plain:  # the transformer itself, at several costs
            panel.plot(*zip(*plain, strict=True), color='0.5', linewidth=1, marker='', zorder=0)
        panel.set(xscale='log', xlabel='operations of the training (1e12)', ylabel='bits per byte, exact decoding')
        picture.legend(loc='outside right upper', fontsize=8)


def report(found):
    """Prints the tables of one checkpoint."""
    print(f'\n{found["checkpoint"]}, update {found["update"]}, {found["data"]}/{found["split"]}')
    if 'decoded' in found:
        answers = found['decoded']
        rows = [['all', answers['exact_match']], *([f'depth {d}', share] for d, share in answers['by_depth'].items())]
        return print_table([f'{answers["answers"]} answers, {answers["cut"]} cut', 'exact match'], rows)
    measured = {name: found[name] for name in ('training', 'exact') if name in found}
    if not summary(found):
        rows = [[name, of['bits_per_byte'], of['nats_per_token'], of['tokens']] for name, of in measured.items()]
        rows += [[name, bits, '', ''] for name, bits in found['training'].get('passes', {}).items()]
        print_table(['schedule', 'bits per byte', 'nats per token', 'tokens'], rows)
        print()
        buckets = found['training']['by_position']
        rows = [[bucket, *(of['by_position'][bucket] for of in measured.values())] for bucket in buckets]
        return print_table(['position', *(f'bits per byte ({name})' for name in measured)], rows)
    columns = {f'{score} ({schedule})': of for schedule, scores in measured.items() for score, of in scores.items()}
    for by, label in (('by_position', 'step'), ('by_length', 'length'), ('last_by_length', 'length, last step')):
        lengths = next(iter(columns.values()))[by]
        print_table([label, *columns], [[n, *(of[by].get(n) for of in columns.values())] for n in lengths])
        print()
    print_table(['all lengths', *columns], [['', *(of['all'] for of in columns.values())]])


def decoding(found):
    """The scores of exact decoding; a model without recurrence decodes as it was trained."""
    return found.get('exact', found['training'])


def curves(found):
    """{score: {step, or depth of an answer: accuracy of decoding}} of a task."""
    if 'decoded' in found:
        return {'exact match': found['decoded']['by_depth']}
    return {name: of['by_position'] for name, of in decoding(found).items()}


def summary(found):
    """{'state', 'state_last', 'retrieval'}: accuracies of decoding at the longest trained length, where it is measured; of a
    task of answers {'exact match', 'depth 1', ..}; of a text {}."""
    if 'decoded' in found:
        by_depth = found['decoded']['by_depth'].items()
        return {'exact match': found['decoded']['exact_match']} | {f'depth {d}': share for d, share in by_depth}
    if 'trained_length' not in found:
        return {}
    scores, n = decoding(found), str(found['trained_length'])
    state = {'state': scores['state']['by_length'].get(n), 'state_last': scores['state']['last_by_length'].get(n)}
    return state | {name: of['by_length'].get(n) for name, of in scores.items() if name != 'state'}


def draw(results, path):
    """Accuracy of decoding against the step, one panel a score, one line a checkpoint; of answers against their depth."""
    names = list(curves(next(iter(results.values()))))
    shared = dict(figsize=(4.5 * len(names), 3.4), sharey=True, squeeze=False)
    with drawing(path, 1, len(names), **shared) as (figure, panels):
        for panel, name in zip(panels[0], names, strict=True):
            for label, found in results.items():
                points = curves(found)[name]
                panel.plot([int(step) for step in points], list(points.values()), label=label)
            if 'trained_length' in found:
                panel.axvline(found['trained_length'] + 0.5, color='0.6', linestyle=':', linewidth=1)
            panel.set(xlabel='depth' if 'decoded' in found else 'step of the example', title=name, ylim=(-0.03, 1.03))
        panels[0][0].set_ylabel('accuracy (fraction)')
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc='outside upper center', ncols=min(len(results), 4))


def compare(results, config):
    """The table, the file and the figure of checkpoints that were measured on tasks of the same scores."""
    summaries = {name: summary(found) for name, found in results.items()}
    if len(results) > 1:
        found = next(iter(results.values()))
        where = '' if 'decoded' in found else f' at the longest trained length, {found["trained_length"]} steps'
        print(f'\nexact decoding{where}')
        columns = list(dict.fromkeys(column for of in summaries.values() for column in of))
        rows = [[name, *(of.get(column) for column in columns)] for name, of in summaries.items()]
        print_table(['model', *columns], rows)
    if config.results:
        Path(config.results).write_text(json.dumps(summaries, indent=2), encoding='utf-8')
    if config.figure:
        draw(results, config.figure)


def main(argv):
    config = parse(EvalConfig, argv, 'python eval.py [--key=value ...]')
    with reporting():
        if config.overview:
            return draw_overview(config.overview)
        if config.curves:
            return draw_curves(config.curves.split(','), config.figure)
        if config.study:
            return report_study(read_study(config.study), config)
        paths, results, tasks = [find_checkpoint(part.strip()) for part in config.ckpt.split(',')], {}, set()
        for path in paths if len(paths) > 1 else ():  # what cannot be is refused before hours go into the first
            _, _, data, _ = prepare(path, config)
            tasks.add((data.is_text, *data.scores) if data else None)
        if len(tasks) > 1 and (config.results or config.figure):
            raise ConfigError('results and figure summarise one task, and these checkpoints are of several; leave them out.')
        names = [os.path.basename(os.path.dirname(os.path.abspath(path))) for path in paths]
        for path, name in zip(paths, names if len(set(names)) == len(names) else paths, strict=True):
            results[name] = found = evaluate(path, config)
            if config.diagnose:
                report_diagnosis(found, config.figure)
            elif not config.lm_eval:
                report(found)
        if not config.diagnose and not config.lm_eval and len(tasks) < 2 and summary(found):
            compare(results, config)
        if config.json:
            print(json.dumps(results if len(results) > 1 else found))


if __name__ == '__main__':
    main(sys.argv[1:])
