"""Datasets, made once and stored as files that training maps into memory.

    python prepare_data.py text                        text files; the Python standard library if no source is named
    python prepare_data.py fineweb_edu --source=PATH   a corpus of parquet, jsonl or txt files; the hub's if no source is named
    python prepare_data.py tokenizer --source=PATH     no dataset but a tokenizer, trained on what fineweb_edu reads
    python prepare_data.py s5 --group=3                permutation state tracking with retrieval, made from a seed
    python prepare_data.py gsm8k --source=PATH         questions and answers of jsonl, json or parquet files, or of the hub
    python prepare_data.py text --help                 the keys of one dataset

A dataset is a folder whose meta.json, written last, describes the files beside it: train.bin and val.bin, one flat stream of
token ids, for text, or its shards train-00000.bin and so on; train.npz, val.npz and test.npz for a task, and if it is made of
text its raw examples in train.jsonl and so on. A folder without meta.json is not a dataset. Starting the same command again
re-uses what is there.
"""

import functools
import hashlib
import itertools
import math
import os
import platform
import random
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import ConfigError, fail, key, parse, reporting, within
from support import folders
from support.bpe import TokenizerConfig, make_tokenizer
from support.corpus import FineWebEduConfig, make_fineweb_edu
from support.files import find_files
from support.questions import QuestionConfig, make_questions
from support.readers import LOSSY, KeptOut, character_start, train_bytes
from support.suggestions import nearest
from support.text_tasks import TextTaskConfig, make_text_task
from support.tokens import LossyError, encode_document, tokenizer_meta

# ---- Text ----


@dataclass
class TextConfig:
    source: str = key('', "files, folders or patterns joined by commas; empty: the Python standard library's source")
    extensions: str = key('', 'of the files taken from folders, joined by commas; empty: all (of the standard library .py)')
    tokenizer: str = key('bytes', 'bytes, a tiktoken encoding such as gpt2, or a tokenizer.json or its folder')
    val_fraction: float = key(
        0.05, 'share of the documents that goes to val; of a single one its end', bounds=folders.VAL_BOUNDS
    )
    max_lost: float = key(0.1, 'share of the documents that may be kept out because they cannot be read', bounds=(0, 1))
    out: str = key('data/stdlib', 'the folder to write')
    overwrite: bool = key(False, 'replace what `out` holds')

    def check(self):
        if not self.out:
            raise ConfigError("out='' names no folder; write it like out=data/stdlib.")


def make_text(_, config):
    """Tokens of files, one document per file, each opened by the document token, in train.bin and val.bin.

    The documents whose content has the smallest sha256 go to val: val_fraction of the distinct ones, at least one. So the split
    depends on the set of documents alone, and copies of a document are never on both sides. Where all are copies of one, its
    last val_fraction goes to val. A document that the tokenizer does not give back is kept out. Memory: the largest file.
    """
    source = folders.source_names(config.source, f'Python standard library {platform.python_version()}')
    wanted = {'kind': 'text', 'source': source, 'settings': folders.settings_of(config, 'max_lost')}
    wanted |= tokenizer_meta(config.tokenizer)
    if folders.is_ready(config.out, config.overwrite, wanted):
        return

    # 1. Which documents there are, and which part of them is val.
    files = find_files(config.source, config.extensions, config.out)
    documents = hash_documents(files)
    single, cut = len(set(documents.values())) == 1, 0
    if single:
        content = Path(next(iter(documents))).read_bytes()
        cut = character_start(content, train_bytes(len(content), config.val_fraction))
    if not documents or single and not 0 < cut < len(content):
        where = f'source={config.source or source}, extensions={config.extensions or "all"} (files found: {len(files)})'
        raise ConfigError(f'{where} holds no text that has a part for train and one for val; name more.')
    in_val = folders.choose_val(documents.values(), config.val_fraction)

    # 2. Their tokens.
    splits = {name: {'tokens': 0, 'documents': 0} for name in ('train', 'val')}
    kept_out = KeptOut({})
    with folders.work_folder(config.out) as work:
        for path, digest in tqdm(documents.items(), desc='writing', unit='file', disable=None):
            content = Path(path).read_bytes()
            if hashlib.sha256(content).digest() != digest:
                raise ConfigError(f'{path} changed while it was being read; start again when nothing writes to it.')
            parts = {'val' if digest in in_val else 'train': content}
            if single:
                parts = {'train': content[:cut], 'val': content[cut:]}
            for name, part in parts.items():
                try:
                    tokens = encode_document(wanted, part)
                except LossyError:
                    kept_out.add(LOSSY, path, 0)
                    continue
                with open(f'{work}/{name}.bin', 'ab') as f:
                    f.write(tokens)
                splits[name]['tokens'] += len(tokens)
                splits[name]['documents'] += 1

        # 3. What was written.
        if kept_out.reasons:
            kept_out.check(len(documents), config.max_lost)
            print(f'kept out {kept_out}')
        for name, split in splits.items():
            if not split['documents']:
                raise ConfigError(f'no document is left for {name}; name more, or take another val_fraction.')
            split['sha256'] = folders.file_sha256(f'{work}/{name}.bin')
        folders.publish(work, config.out, wanted | {'splits': splits})


def hash_documents(files):
    """{path: sha256} of the files that hold UTF-8 text; prints how many do not, or are empty."""
    documents, empty, binary = {}, 0, []
    for path in tqdm(files, desc='reading', unit='file', disable=None):
        content = Path(path).read_bytes()
        try:
            content.decode('utf-8')
        except UnicodeDecodeError:
            binary.append(path)
            continue
        if content:
            documents[path] = hashlib.sha256(content).digest()
        else:
            empty += 1
    if binary or empty:
        names = ', '.join(os.path.basename(p) for p in binary[:3]) + (', ...' if len(binary) > 3 else '')
        print(f'skipped {len(binary)} files that are not UTF-8 text{names and f" ({names})"} and {empty} empty files')
    return documents


# ---- S5 (T2MLR's S5-retrieval task) ----


@dataclass
class S5Config:
    group: int = key(5, 'n of the permutation group S_n', bounds=(2, 5))
    actions: str = key('all', 'all elements, or generators: adjacent transpositions and the n-cycle', ('all', 'generators'))
    steps: str = key('1-8', 'actions per example of train and val: a number or a range')
    test_steps: str = key('', 'actions per example of test, which may be more; empty: as in training')
    length_bias: float = key(0.0, 'a length of s steps is drawn with weight s^-length_bias; 0: evenly', bounds=(0, 10))
    retrieval: bool = key(True, 'a dictionary comes first, and every action asks for values in it')
    retrieve_by: str = key('action', 'looked up: the action, or the state after it (then all are keys)', ('action', 'state'))
    dictionary_size: int = key(0, "keys that an example's actions are drawn from; 0: all actions")
    distractors: int = key(0, 'further keys in the dictionary that never act')
    value_len: int = key(1, 'value tokens per key', bounds=(1, 100))
    n_values: int = key(8, 'different value tokens', bounds=(1, 10_000))
    recur_on_prompt: bool = key(False, 'read memory on the dictionary too')
    seed: int = key(0, 'of all draws', bounds=(0, math.inf))
    n_train: int = key(100_000, 'examples of train', bounds=(1, 10**9))
    n_val: int = key(2_000, 'examples of val', bounds=(1, 10**9))
    n_test: int = key(2_000, 'examples of test', bounds=(1, 10**9))
    out: str = key('', 'the folder to write; empty: data/s and the group')
    overwrite: bool = key(False, 'replace what `out` holds')

    def check(self):
        for name in ('dictionary_size', 'distractors'):
            if (value := getattr(self, name)) and (not self.retrieval or self.retrieve_by == 'state'):
                raise ConfigError(f'{name}={value} needs retrieval=True and retrieve_by=action; set them so, or {name}=0.')
        if self.retrieve_by == 'state' and not self.retrieval:
            raise ConfigError('retrieve_by=state needs a dictionary; set retrieval=True or retrieve_by=action.')
        elements, actions = math.factorial(self.group), len(self.action_ids)
        within('dictionary_size', self.dictionary_size, 0, actions, f'there are {actions} actions, and 0 means all')
        most = elements - self.n_keys
        within('distractors', self.distractors, 0, most, f'{self.n_keys} of the {elements} elements are keys already')
        plan_splits(self)

    @functools.cached_property
    def action_ids(self):
        """Sorted ids of the elements that may act."""
        n, elements = self.group, list(itertools.permutations(range(self.group)))
        swaps = [(*range(i), i + 1, i, *range(i + 2, n)) for i in range(n - 1)]
        return sorted(map(elements.index, elements if self.actions == 'all' else {*swaps, (*range(1, n), 0)}))

    @property
    def n_keys(self):
        """How many elements the actions of one example are drawn from."""
        return self.dictionary_size or len(self.action_ids)

    @property
    def keys_per_dictionary(self):
        return math.factorial(self.group) if self.retrieve_by == 'state' else self.n_keys + self.distractors


def number_range(name, text, least, most, why):
    """The whole numbers that a setting such as '8' or '1-8' allows, as a range; ConfigError unless all are least to most."""
    match = re.fullmatch(r'(\d{1,9})(?:-(\d{1,9}))?', text, re.ASCII)
    if not match:
        raise ConfigError(f'{name}={text} is not a whole number or a range; write it like {name}=8 or {name}=1-8.')
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high:
        raise ConfigError(f'{name}={text} runs backwards; write {name}={high}-{low}.')
    if low < least or high > most:
        near = '-'.join(str(min(max(int(n), least), most)) for n in text.split('-'))
        raise ConfigError(f'{name}={text} is not possible: {why}; the nearest is {name}={near}.')
    return range(low, high + 1)


@functools.cache
def composition_table(n):
    """(n!, n!) ids: row a, column b is "a after b", i -> a(b(i)). An id counts in the order of itertools.permutations."""
    elements = np.array(list(itertools.permutations(range(n))))
    place = n ** np.arange(n)[::-1]  # read as digits, the elements are increasing numbers
    return np.searchsorted(elements @ place, elements[:, elements] @ place)


def count_examples(config, steps):
    """How many different examples (token rows) of `steps` actions there are."""
    actions, drawn_from = len(config.action_ids), config.n_keys
    if not config.retrieval:
        return actions**steps
    others, keys = math.factorial(config.group) - actions, config.keys_per_dictionary
    total = actions**steps if config.retrieve_by == 'state' else 0
    # By the number of keys that could act; the rows do not tell which of them are distractors.
    for among in range(drawn_from, min(keys, actions) + 1) if config.retrieve_by == 'action' else ():
        sequences = [1] + [0] * drawn_from  # by the number of different actions in them, which is at most drawn_from
        for _ in range(steps if among > drawn_from else 0):
            sequences = [0] + [sequences[j] * j + sequences[j - 1] * (among - j + 1) for j in range(1, drawn_from + 1)]
        possible = sum(sequences) if among > drawn_from else among**steps
        total += math.comb(actions, among) * math.comb(others, keys - among) * possible
    return total * math.factorial(keys) * config.n_values ** (config.value_len * keys)


def plan_splits(config):
    """{split: {steps: examples}}: every split spreads its examples over its lengths in proportion
    to steps^-length_bias (0: evenly), as far as their supply allows.

    No example is in two splits or twice in one, and short ones run out (without retrieval S_3 has six of one step). So test
    and val take at most a quarter each of the examples that exist of a training length, and train may have all the rest.
    Raises ConfigError when a split asks for more than that.
    """
    why = 'an example has 1 to 1000 steps'  # more take long to count
    train = number_range('steps', config.steps, 1, 1_000, why)
    test = number_range('test_steps', config.test_steps, 1, 1_000, why) if config.test_steps else train
    supply, taken, shares = {s: count_examples(config, s) for s in {*train, *test}}, Counter(), {}
    for split, lengths in (('test', test), ('val', train), ('train', train)):
        left = {s: (supply[s] + 1) // 4 if s in train and split != 'train' else supply[s] - taken[s] for s in lengths}
        wanted, most = getattr(config, f'n_{split}'), min(sum(left.values()), 10**9)  # no n_ is larger, and digits are limited
        why = f'with {lengths[0]} to {lengths[-1]} steps there are {most} different examples for {split}, more with more steps'
        within(f'n_{split}', wanted, 0, most, why)
        weight = {s: Fraction(s**-config.length_bias) for s in lengths}
        shares[split], total = {}, sum(weight.values())
        for s in sorted(lengths, key=lambda s: left[s] / weight[s]):  # the scarcest first: what it lacks goes to the others
            shares[split][s] = min(left[s], wanted * weight[s] // total)
            wanted, total = wanted - shares[split][s], total - weight[s]
        taken.update(shares[split])
    return shares


def draw_examples(config, rng, count, steps):
    """`count` random examples of one length T: tokens (count, T) and targets (count, T), aligned and not shifted.

    With retrieval: key value.. key value.. | action slot.. action slot..; else: | action action ..
    At an action the target is the state after it, state_t = action_t after state_{t-1} from the identity; at an action's
    slots it is the values in the dictionary of that action, or with retrieve_by=state of that state; everywhere else it is -1.
    """
    compose = composition_table(config.group)
    elements, allowed = len(compose), np.array(config.action_ids)
    delimiter, slot = elements + config.n_values, elements + config.n_values + 1

    acting = np.broadcast_to(allowed, (count, len(allowed)))
    if config.retrieval:
        # Random order, elements that may act before the others: the head is the keys in use, any of the tail may distract.
        cannot_act = ~np.isin(np.arange(elements), allowed)
        order = np.argsort(rng.random((count, elements)) + cannot_act, axis=1)
        acting, rest = np.split(order, [config.n_keys], axis=1)
        distract = rng.permuted(rest, axis=1)[:, : config.keys_per_dictionary - config.n_keys]
        keys = rng.permuted(np.concatenate([acting, distract], axis=1), axis=1)  # (count, keys)
        values = elements + rng.integers(config.n_values, size=(*keys.shape, config.value_len))
    actions = np.take_along_axis(acting, rng.integers(config.n_keys, size=(count, steps)), axis=1)

    states = np.zeros_like(actions)
    state = np.zeros(count, dtype=np.int64)  # id 0 is the identity
    for t in range(steps):
        states[:, t] = state = compose[actions[:, t], state]

    bar = np.full((count, 1), delimiter)
    if not config.retrieval:
        return np.hstack([bar, actions]), np.hstack([np.full_like(bar, -1), states])
    position = np.empty((count, elements), dtype=np.int64)  # of a key in its dictionary
    np.put_along_axis(position, keys, np.arange(keys.shape[1])[None], axis=1)
    looked_up = np.take_along_axis(position, states if config.retrieve_by == 'state' else actions, axis=1)
    answers = values[np.arange(count)[:, None], looked_up]  # (count, steps, value_len)
    dictionary = np.dstack([keys, values]).reshape(count, -1)
    tokens = np.hstack([dictionary, bar, np.dstack([actions, np.full_like(answers, slot)]).reshape(count, -1)])
    unscored = np.full((count, dictionary.shape[1] + 1), -1)
    return tokens, np.hstack([unscored, np.dstack([states, answers]).reshape(count, -1)])


def draw_split(config, index, share, seen, progress):
    """The arrays of one split: its `share` {steps: examples}, padded to its longest and shuffled. `seen` gains its examples."""
    n, bar = sum(share.values()), math.factorial(config.group) + config.n_values
    pad, width = bar + 2, 1 + config.value_len * config.retrieval  # of a key and its values, or an action and its slots
    steps = np.repeat(list(share), list(share.values()))
    np.random.default_rng([config.seed, index]).shuffle(steps)
    longest = 1 + width * (max(steps) + config.retrieval * config.keys_per_dictionary)
    tokens = np.full((n, longest), pad, dtype=np.min_scalar_type(pad))
    targets = np.full((n, longest), -1, dtype=np.int16)
    for s in share:
        rng = np.random.default_rng([config.seed, index, s])
        places, fresh_rate = np.flatnonzero(steps == s), 1.0
        while len(places):
            # Few of those drawn are new when a length nears its end; a block bounds the memory.
            count = min(math.ceil(len(places) / fresh_rate), max(1, 2**20 // longest))
            rows, answers = draw_examples(config, rng, count, s)
            rows = rows.astype(tokens.dtype)
            fresh = {text: i for i, row in enumerate(rows) if (text := row.tobytes()) not in seen[s]}
            fresh = dict(itertools.islice(fresh.items(), len(places)))
            seen[s].update(fresh)
            filled, places = np.split(places, [len(fresh)])
            length, chosen = rows.shape[1], [*fresh.values()]
            tokens[filled, :length], targets[filled, :length] = rows[chosen], answers[chosen]
            fresh_rate = max(len(fresh), 1) / count
            progress.update(len(fresh))
    used = tokens != pad
    recur_mask = used & (np.logical_or.accumulate(tokens == bar, axis=1) | config.recur_on_prompt)
    arrays = {'tokens': tokens, 'targets': targets, 'recur_mask': recur_mask}
    return arrays | {'lengths': used.sum(axis=1), 'steps': steps}


def make_s5(task, config):
    """Track a permutation while looking up values: train.npz, val.npz and test.npz of arrays

    tokens (N, T) padded, targets (N, T) with -1 where nothing is scored, recur_mask (N, T) True where memory is read,
    lengths (N,) in tokens and steps (N,) in actions; T is the longest example of the split.
    Vocabulary: n! elements, then n_values values, delimiter, slot, pad; it is the same with and without retrieval.
    """
    out = config.out or f'data/s{config.group}'
    wanted = {'kind': 'task', 'task': task, 'settings': folders.settings_of(config)}
    if folders.is_ready(out, config.overwrite, wanted):
        return
    names = ['p' + ''.join(map(str, p)) for p in itertools.permutations(range(config.group))]
    elements = len(names)
    names += [f'v{i}' for i in range(config.n_values)] + ['|', '_', '.']
    scores = {'state': [0, elements]} | ({'retrieval': [elements, elements + config.n_values]} if config.retrieval else {})
    vocabulary = {'tokenizer': 'names', 'names': names, 'vocab_size': len(names), 'pad_token': len(names) - 1}
    seen, shares = defaultdict(set), plan_splits(config)
    in_order = dict.fromkeys(('train', 'val', 'test'))
    meta = wanted | vocabulary | {'aligned': True, 'longest': in_order, 'scores': scores, 'splits': {**in_order}}
    total = config.n_train + config.n_val + config.n_test
    with folders.work_folder(out) as work, tqdm(total=total, desc='drawing', unit=' examples', disable=None) as progress:
        for index, (name, share) in enumerate(shares.items()):  # test and val first: they stay the same for any n_train
            arrays = draw_split(config, index, {s: k for s, k in share.items() if k}, seen, progress)
            folders.save_split(work, meta, name, arrays, {'examples': len(arrays['steps'])})
        progress.close()
        folders.publish(work, out, meta)


# ---- Variable assignment and pathfinding, made from a seed ----

LETTERS = 'abcdefghijklmnopqrstuvwxyz'
PEOPLE = 'Ann Ben Cal Dan Eva Fay Gus Hal Ida Jon Kim Leo Mia Ned Ora Pat Quin Ron Sue Tom Una Val Wes Xena Yan Zoe'.split()
ASSIGNMENTS = {  # form: a variable of a known number, one that has another's, and the question
    'plain': ('{}={}; ', '{}={}; ', '{}?\n'),
    'words': ('{} has {} marbles. ', '{} has as many marbles as {}. ', 'How many marbles does {} have?\n'),
    'code': ('{} = {}\n', '{} = {}\n', 'print({})\n'),
}


@dataclass
class DrawnConfig(TextTaskConfig):
    """The settings of a task made from a seed. A subclass has its own `depth`, and draw(rng, depth) -> (prompt, answer)."""

    test_depth: str = key('', 'the same for test, where it may be more; empty: as in training')
    seed: int = key(0, 'of all draws', bounds=(0, math.inf))
    n_train: int = key(100_000, 'examples of train', bounds=(1, 10**7))
    n_val: int = key(2_000, 'examples of val', bounds=(1, 10**7))
    n_test: int = key(2_000, 'examples of test', bounds=(1, 10**7))

    least, most = 1, 25  # the depths that can be asked for

    def depths(self, split):
        """The depths of a split, as a range."""
        name = 'test_depth' if split == 'test' and self.test_depth else 'depth'
        return number_range(name, getattr(self, name), self.least, self.most, f'a depth is {self.least} to {self.most}')

    @property
    def deepest(self):
        return max(self.depths(split)[-1] for split in ('train', 'test'))


@dataclass
class AssignmentConfig(DrawnConfig):
    depth: str = key('1-4', 'aliases between the variable asked for and its number, in train and val: a number or a range')
    variables: int = key(8, 'in every example, up to 26; those outside the chain are distractors')
    values: str = key('0-99', 'the numbers that variables are given, a range')
    form: str = key('plain', 'how it is written: assignments, a word problem, or a Python program', ASSIGNMENTS)

    least = 0  # the variable asked for has a number of its own

    def check(self):
        super().check()
        least = self.deepest + 1
        within('variables', self.variables, least, 26, f'a chain of {least - 1} aliases has {least} of the 26 variables')
        number_range('values', self.values, 0, 10**8, 'numbers are 0 to 10^8')

    def draw(self, rng, depth):
        """Every statement gives a variable a number or an earlier variable; the last one of the
        chain is asked for. Distractors may be aliases of the chain's variables."""
        number, other, question = ASSIGNMENTS[self.form]
        names = rng.sample(PEOPLE if self.form == 'words' else LETTERS, self.variables)
        chain = sorted(rng.sample(range(self.variables), depth + 1))
        previous = dict(zip(chain, [None, *chain], strict=False))
        values = number_range('values', self.values, 0, 10**8, '')
        prompt, value = '', []
        for i, name in enumerate(names):
            alias = previous[i] if i in previous else rng.choice([None, rng.randrange(i)]) if i else None
            value.append(rng.choice(values) if alias is None else value[alias])
            prompt += number.format(name, value[i]) if alias is None else other.format(name, names[alias])
        return prompt + question.format(names[chain[-1]]), str(value[chain[-1]])


@dataclass
class PathConfig(DrawnConfig):
    depth: str = key('2-5', 'edges of the path in train and val: a number or a range')
    width: int = key(3, 'nodes of a layer: one on the path, the others lead astray')

    most = 300

    def check(self):
        super().check()
        within('width', self.width, 2, 999 // self.deepest, f'{self.deepest} layers of two or more, 1000 nodes at most')

    def draw(self, rng, depth):
        """The edges of a layered graph in random order, then start and goal; the answer is the nodes of the shortest path.

        A path node has one edge into it from the layer before, from the path. The other nodes of a layer are reached from one
        or two nodes of the layer before, and some lead sideways to the path's node of their layer: longer ways. Those of the
        goal's layer lead nowhere. So exactly one path has `depth` edges, and no path has fewer.
        """
        width = self.width
        labels = rng.sample(range(100 if 1 + self.deepest * width <= 100 else 1000), 1 + depth * width)
        layers = [labels[:1]] + [labels[1 + i * width :][:width] for i in range(depth)]  # the path's node first
        edges = []
        for i, (before, layer) in enumerate(itertools.pairwise(layers), start=1):
            edges.append((before[0], layer[0]))
            for node in layer[1:]:
                edges += [(b, node) for b in rng.sample(before, rng.randint(1, min(2, len(before))))]
                if i < depth and rng.random() < 0.25:
                    edges.append((node, layer[0]))
        rng.shuffle(edges)
        prompt = ' '.join(f'{a}>{b}' for a, b in edges) + f'\n{layers[0][0]} to {layers[-1][0]}?\n'
        return prompt, ' '.join(str(layer[0]) for layer in layers)


def make_drawn(task, config):
    make_text_task(task, config, lambda: draw_task(config))


def draw_task(config):
    """{split: examples} of a task made from a seed: every split spreads its examples evenly over its depths, and no prompt
    occurs twice. ConfigError when a thousand draws of a depth bring nothing new."""
    examples, seen = {'train': [], 'val': [], 'test': []}, set()
    total = config.n_train + config.n_val + config.n_test
    with tqdm(total=total, desc='drawing', unit=' examples', disable=None) as progress:
        for split in ('test', 'val', 'train'):  # n_train changes neither test nor val
            depths, rng, wanted = config.depths(split), random.Random(f'{config.seed} {split}'), getattr(config, f'n_{split}')
            for i in range(wanted):
                depth = depths[i % len(depths)]
                fresh = (example for _ in range(1_000) if (example := config.draw(rng, depth))[0] not in seen)
                prompt, answer = next(fresh, (None, None))
                if prompt is None:
                    why = f'examples of depth {depth} run out after {i}'
                    raise ConfigError(f'n_{split}={wanted} is not possible: {why}; lower it, or allow larger examples.')
                seen.add(prompt)
                examples[split].append({'prompt': prompt, 'response': f'#### {answer}', 'answer': answer, 'depth': depth})
                progress.update()
    return examples


# ---- The table of datasets ----

SEEDED, QUESTIONS = 'any number of examples, no network', 'network, or local files'
DATASETS = {  # name: its settings, the function that makes it from the name and the settings, its line in the list
    'text': (TextConfig, make_text, 'your text files, or the Python standard library: 12 MB, no network'),
    'fineweb_edu': (FineWebEduConfig, make_fineweb_edu, 'web pages: 20 or 200 GB, network; or parquet, jsonl, txt files'),
    'tokenizer': (TokenizerConfig, make_tokenizer, f'no dataset: a tokenizer, trained on what fineweb_edu reads: {QUESTIONS}'),
    's5': (S5Config, make_s5, f'permutations to compose and values to look up: {SEEDED}'),
    'variable_assignment': (AssignmentConfig, make_drawn, f'chains of aliases among distractors: {SEEDED}'),
    'pathfinding': (PathConfig, make_drawn, f'the unique shortest path through a layered graph: {SEEDED}'),
    'prosqa': (QuestionConfig, make_questions, f'18,686 logical questions about a graph: {QUESTIONS}'),
    'gsm8k': (QuestionConfig, make_questions, f'8,792 word problems with reasoning: {QUESTIONS}'),
    'gsm8k_aug': (QuestionConfig, make_questions, f'386,000 word problems with equations as reasoning: {QUESTIONS}'),
    'hotpotqa': (QuestionConfig, make_questions, f'97,852 questions over ten paragraphs, without test: {QUESTIONS}'),
    'math500': (QuestionConfig, make_questions, f'500 competition problems, test alone, for evaluation: {QUESTIONS}'),
}


def main(argv):
    if not argv or argv[0] in ('--help', '-h', '--list'):
        with reporting():
            print('usage: python prepare_data.py DATASET [--key=value ...]\n\nDatasets (DATASET --help lists the keys of one):')
            for name, (_, _, line) in DATASETS.items():
                print(f'  {name:<{max(map(len, DATASETS))}} {line}')
        return
    name = argv[0]
    if name not in DATASETS:
        raise fail(f'the first argument names the dataset, and {name!r} is none; {nearest(name, DATASETS)}')
    config_class, make, _ = DATASETS[name]
    config = parse(config_class, argv[1:], f'python prepare_data.py {name} [config.py] [--key=value ...]')
    with reporting():
        make(name, config)


if __name__ == '__main__':
    main(sys.argv[1:])
