"""Datasets, made once and stored as files that training maps into memory.

    python prepare_data.py text                        bytes of text files; the Python standard library if no source is named
    python prepare_data.py s5 --group=3                permutation state tracking with retrieval, made from a seed
    python prepare_data.py text --help                 the keys of one dataset

A dataset is a folder whose meta.json, written last, describes the files beside it: train.bin and val.bin, one flat stream of
token ids, for text; train.npz, val.npz and test.npz for a task. A folder without meta.json is not a dataset. Starting the
same command again re-uses what is there.
"""

import difflib
import functools
import glob
import hashlib
import itertools
import json
import math
import os
import platform
import re
import sys
import sysconfig
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import ConfigError, fail, key, nearest, parse, reporting

DOCUMENT_TOKEN = 256  # the first id after the 256 bytes; it opens every document
PIECES = ('train.bin', 'val.bin', 'train.npz', 'val.npz', 'test.npz', 'meta.json')  # every file that a dataset may consist of
STDLIB_LEAVES_OUT = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}  # installed packages and tests


# ---------------------------------------------------------------------------------------------------------------------------
# Tokens


def token_dtype(vocab_size):
    """The dtype of a token stream: 16 bits as long as the last id, vocab_size - 1, fits in them."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def encode(meta, text):
    """Token ids (list of int) of `text` under the tokenizer of a dataset's meta.json.

    'bytes': its UTF-8 bytes, whatever they spell, so never the document token. 'names': whitespace-separated names;
    ConfigError for a name that the vocabulary lacks.
    """
    if meta['tokenizer'] == 'bytes':
        return list(text.encode('utf-8', 'surrogateescape'))  # a command line keeps undecodable bytes as surrogates
    ids = {name: i for i, name in enumerate(meta['names'])}
    for word in text.split():
        if word not in ids:
            close = difflib.get_close_matches(word, ids, n=1, cutoff=0)[0]
            raise ConfigError(f'there is no token named {word!r} in this vocabulary; the nearest is {close!r}.')
    return [ids[word] for word in text.split()]


def decode(meta, ids):
    """Bytes of token ids. The document token is b'' and a name ends in a space, so pieces decoded apart can be joined."""
    if meta['tokenizer'] == 'bytes':
        return bytes(int(i) for i in ids if i != meta['document_token'])
    return ''.join(meta['names'][i] + ' ' for i in ids).encode()


# ---------------------------------------------------------------------------------------------------------------------------
# Folders


def within(name, value, low, high, why):
    """ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f'{name}={value} is not possible: {why}; the nearest is {name}={min(max(value, low), high)}.')


def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def is_ready(out, overwrite, wanted):
    """True if the folder `out` holds the dataset described by `wanted` (part of its meta.json), False if it may be written.

    Raises ConfigError when something else is there and `overwrite` is off.
    """
    if os.path.exists(out) and not os.path.isdir(out):
        raise ConfigError(f'out={out} is a file; name a folder.')
    if overwrite or not os.path.isdir(out) or set(os.listdir(out)) <= set(PIECES[:-1]):  # pieces alone: a killed run's
        return False
    try:
        with open(os.path.join(out, 'meta.json'), encoding='utf-8') as f:
            meta = json.load(f)
        if any(meta.get(k) != v for k, v in wanted.items()):
            raise ConfigError(f'out={out} holds a dataset made with other settings; choose another out, or --overwrite=True.')
        suffix = 'bin' if meta['kind'] == 'text' else 'npz'
        whole = all(file_sha256(os.path.join(out, f'{name}.{suffix}')) == s['sha256'] for name, s in meta['splits'].items())
    except (OSError, ValueError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise ConfigError(f'out={out} holds other files, or a damaged dataset; choose another out, or --overwrite=True.')
    print(f'{out} already holds this dataset; --overwrite=True makes it again.')
    return True


def publish(work, out, meta):
    """Moves the finished files of the folder `work` to `out`; killed at any moment, it leaves no meta.json or a true one."""
    with open(os.path.join(work, 'meta.json'), 'w', encoding='utf-8') as f:
        json.dump(meta, f, indent=1)
    os.makedirs(out, exist_ok=True)
    for name in reversed(PIECES):  # meta.json goes first ...
        if os.path.exists(path := os.path.join(out, name)):
            os.remove(path)
    for name in PIECES:  # ... and comes last
        if os.path.exists(path := os.path.join(work, name)):
            os.replace(path, os.path.join(out, name))
    for name, split in meta['splits'].items():
        print(f'{name:<5}  ' + '  '.join(f'{v:>11,} {k}' for k, v in split.items() if k != 'sha256'))
    print(f'wrote {out}')


def work_folder(out):
    """A temporary folder beside `out`, on the same disk, so that moving a file from one to the other is a rename."""
    out = os.path.abspath(out)
    os.makedirs(os.path.dirname(out), exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=os.path.basename(out) + '.partial-', dir=os.path.dirname(out))


# ---------------------------------------------------------------------------------------------------------------------------
# Text


@dataclass
class TextConfig:
    source: str = key('', "files, folders or patterns joined by commas; empty: the Python standard library's source")
    extensions: str = key('', 'of the files taken from folders, joined by commas; empty: all (of the standard library .py)')
    val_fraction: float = key(0.05, 'share of the documents that goes to val')
    out: str = key('data/stdlib', 'the folder to write')
    overwrite: bool = key(False, 'replace what `out` holds')

    def check(self):
        if not 0 < self.val_fraction < 1:
            raise ConfigError(f'val_fraction={self.val_fraction:g} is not between 0 and 1; write it like val_fraction=0.05.')
        if not self.out:
            raise ConfigError("out='' names no folder; write it like out=data/stdlib.")


def find_files(config):
    """Paths of the documents, sorted by their path below the source that holds them.

    Folders are searched to the bottom, apart from hidden files and `out` itself. Without a source: the running interpreter's
    own library, except STDLIB_LEAVES_OUT and the build record _sysconfigdata*, which names folders of one machine.
    Raises ConfigError for a source that is not there.
    """
    stdlib, out = not config.source, os.path.abspath(config.out)
    endings = tuple('.' + e.strip().lstrip('.') for e in (config.extensions or '.py' * stdlib).split(',') if e.strip())
    found = {}  # absolute path -> what to sort by; a file reached twice is one document
    for source in [sysconfig.get_path('stdlib')] if stdlib else config.source.split(','):
        source = os.path.expanduser(source.strip())
        if not source:  # a comma too many
            continue
        matches = [source] if os.path.exists(source) else sorted(glob.glob(source, recursive=True))
        if not matches:
            folder, name = os.path.split(source)
            close = difflib.get_close_matches(name, os.listdir(folder or '.') if os.path.isdir(folder or '.') else [], n=1)
            hint = f'did you mean {os.path.join(folder, close[0])}?' if close else 'name a file, a folder or a pattern.'
            raise ConfigError(f'source={source} matches no file; {hint}')
        for root in matches:
            if os.path.isfile(root):
                found.setdefault(os.path.abspath(root), os.path.basename(root))
            for folder, below, names in os.walk(root):
                below[:] = [b for b in below if b[0] != '.' and os.path.abspath(os.path.join(folder, b)) != out]
                if stdlib:
                    below[:] = set(below) - STDLIB_LEAVES_OUT
                    names = [name for name in names if not name.startswith('_sysconfigdata')]
                for path in (os.path.join(folder, name) for name in names if name[0] != '.' and name.endswith(endings or '')):
                    if os.path.isfile(path):
                        found.setdefault(os.path.abspath(path), os.path.relpath(path, root))
    return sorted(found, key=found.get)  # a stable sort: equal names stay in the order of the sources


def make_text(config):
    """Bytes of files, one document per file, each opened by the document token, in train.bin and val.bin.

    The documents whose content has the smallest sha256 go to val: val_fraction of the distinct ones, at least one. So a split
    depends on the set of documents alone, and copies of one document never end up on both sides. Memory: the largest file.
    """
    about = f'Python standard library {platform.python_version()}'
    if config.source:
        about = ', '.join(os.path.basename(os.path.normpath(s.strip())) for s in config.source.split(',') if s.strip())
    settings = {k: v for k, v in asdict(config).items() if k not in ('out', 'overwrite')}
    wanted = {'kind': 'text', 'source': about, 'settings': settings}
    if is_ready(config.out, config.overwrite, wanted):
        return

    documents, empty, binary = {}, 0, []  # path -> sha256 of its content
    for path in tqdm(find_files(config), desc='reading', unit='file', disable=None):
        content = Path(path).read_bytes()
        try:
            content.decode('utf-8')
        except UnicodeDecodeError:
            binary.append(path)
            continue
        if content:
            documents[path] = hashlib.sha256(content).digest()
        empty += not content
    if binary or empty:
        names = ', '.join(os.path.basename(p) for p in binary[:3]) + (', ...' if len(binary) > 3 else '')
        print(f'skipped {len(binary)} files that are not UTF-8 text{names and f" ({names})"} and {empty} empty files')
    distinct = sorted(set(documents.values()))
    if len(distinct) < 2:
        raise ConfigError(
            f'source={config.source or about} holds {len(distinct)} different text files, and train and val need one each; '
            'name more files, or split one.'
        )
    in_val = set(distinct[: min(max(round(config.val_fraction * len(distinct)), 1), len(distinct) - 1)])

    vocab_size = DOCUMENT_TOKEN + 1
    splits = {name: {'tokens': 0, 'documents': 0} for name in ('train', 'val')}
    with work_folder(config.out) as work:
        with open(f'{work}/train.bin', 'wb') as train, open(f'{work}/val.bin', 'wb') as val:
            for path, digest in tqdm(documents.items(), desc='writing', unit='file', disable=None):
                content = Path(path).read_bytes()
                if hashlib.sha256(content).digest() != digest:
                    raise ConfigError(f'{path} changed while it was being read; start again when it is at rest.')
                tokens = np.empty(len(content) + 1, token_dtype(vocab_size))
                tokens[0] = DOCUMENT_TOKEN
                tokens[1:] = np.frombuffer(content, np.uint8)
                tokens.tofile(val if digest in in_val else train)
                split = splits['val' if digest in in_val else 'train']
                split['tokens'] += len(tokens)
                split['documents'] += 1
        for name, split in splits.items():
            split['sha256'] = file_sha256(f'{work}/{name}.bin')
        tokenizer = {'tokenizer': 'bytes', 'vocab_size': vocab_size, 'document_token': DOCUMENT_TOKEN}
        lengths = {'token_bytes': [1] * 256 + [0], 'dtype': token_dtype(vocab_size).name}
        publish(work, config.out, wanted | tokenizer | lengths | {'splits': splits})


# ---------------------------------------------------------------------------------------------------------------------------
# S5 (T2MLR's S5-retrieval task)


@dataclass
class S5Config:
    group: int = key(5, 'n of the permutation group S_n, 2 to 5')
    actions: str = key('all', 'all elements, or generators: adjacent transpositions and the n-cycle', ('all', 'generators'))
    steps: str = key('1-8', 'actions per example of train and val: a number or a range')
    test_steps: str = key('', 'actions per example of test, which may be more; empty: as in training')
    length_bias: float = key(0.0, 'prefers short examples: a length of s steps is drawn with weight s^-length_bias; 0: evenly')
    retrieval: bool = key(True, 'a dictionary comes first, and every action asks for values in it')
    retrieve_by: str = key('action', 'what is looked up: the action, or the state after it (all are keys)', ('action', 'state'))
    dictionary_size: int = key(0, "keys that an example's actions are drawn from; 0: all actions")
    distractors: int = key(0, 'further keys in the dictionary that never act')
    value_len: int = key(1, 'value tokens per key')
    n_values: int = key(8, 'different value tokens')
    recur_on_prompt: bool = key(False, 'read memory on the dictionary too')
    seed: int = key(0, 'of all draws')
    n_train: int = key(100_000, 'examples of train')
    n_val: int = key(2_000, 'examples of val')
    n_test: int = key(2_000, 'examples of test')
    out: str = key('', 'the folder to write; empty: data/s and the group')
    overwrite: bool = key(False, 'replace what `out` holds')

    def check(self):
        within('group', self.group, 2, 5, 'groups S_2 to S_5 are made')
        for name in ('steps', 'test_steps'):
            self.length_range(name)
        within('length_bias', self.length_bias, 0, 10, 'a weight is s^0 to s^-10')
        for name in ('dictionary_size', 'distractors'):
            if not self.retrieval and getattr(self, name):
                raise ConfigError(f'{name}={getattr(self, name)} needs a dictionary; set retrieval=True or {name}=0.')
            if self.retrieve_by == 'state' and getattr(self, name):
                raise ConfigError(
                    f'{name}={getattr(self, name)} is not possible with retrieve_by=state, where every element '
                    f'is a key; set {name}=0.'
                )
        if self.retrieve_by == 'state' and not self.retrieval:
            raise ConfigError('retrieve_by=state needs a dictionary; set retrieval=True or retrieve_by=action.')
        elements, actions = math.factorial(self.group), len(self.action_ids)
        within('dictionary_size', self.dictionary_size, 0, actions, f'there are {actions} actions, and 0 means all')
        most = elements - self.n_keys
        within('distractors', self.distractors, 0, most, f'{self.n_keys} of the {elements} elements are keys already')
        within('value_len', self.value_len, 1, 100, 'a key has 1 to 100 value tokens')
        within('n_values', self.n_values, 1, 10_000, 'there are 1 to 10000 different value tokens')
        within('seed', self.seed, 0, math.inf, 'a seed is not negative')
        for name in ('n_train', 'n_val', 'n_test'):
            within(name, getattr(self, name), 1, 10**9, 'a split has 1 to 10^9 examples')
        plan(self)

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

    def length_range(self, name):
        """The numbers of steps that `steps` or `test_steps` allows, as a range; the bound keeps the counting quick."""
        return number_range(name, getattr(self, name) or self.steps, 1, 1_000, 'an example has 1 to 1000 steps')


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


def plan(config):
    """{split: {steps: examples}}: every split spreads its examples over its lengths in proportion to steps^-length_bias (0:
    evenly), as far as their supply allows.

    No example is in two splits or twice in one, and short ones run out (without retrieval S_3 has six of one step). So test
    and val take at most a quarter each of the examples that exist of a training length, and train may have all the rest.
    Raises ConfigError when a split asks for more than that.
    """
    train, test = config.length_range('steps'), config.length_range('test_steps')
    supply = {s: count_examples(config, s) for s in {*train, *test}}
    quarter = {s: (supply[s] + 1) // 4 if s in train else supply[s] for s in supply}
    shares = {}
    test_name = 'test_steps' if config.test_steps else 'steps'
    for split, name, lengths in (('test', test_name, test), ('val', 'steps', train), ('train', 'steps', train)):
        taken = {s: sum(share.get(s, 0) for share in shares.values()) for s in lengths}
        left = {s: supply[s] - taken[s] if split == 'train' else quarter[s] for s in lengths}
        wanted, most = getattr(config, f'n_{split}'), sum(left.values())
        if wanted > most:
            raise ConfigError(
                f'n_{split}={wanted} is not possible: of the {sum(supply[s] for s in lengths)} different examples with '
                f'{name}={getattr(config, name)} there are {most} for {split}; lower n_{split} or allow more steps.'
            )
        weight = {s: Fraction(s**-config.length_bias) for s in lengths}
        shares[split], total = {}, sum(weight.values())
        for s in sorted(lengths, key=lambda s: left[s] / weight[s]):  # the scarcest first: what it lacks goes to the others
            shares[split][s] = min(left[s], wanted * weight[s] // total)
            wanted, total = wanted - shares[split][s], total - weight[s]
    return shares


def row_length(config, steps):
    """(tokens of the dictionary, tokens of the whole example)."""
    prefix = config.keys_per_dictionary * (1 + config.value_len) if config.retrieval else 0
    return prefix, prefix + 1 + steps * (1 + config.value_len * config.retrieval)


def draw_examples(config, rng, count, steps):
    """`count` random examples of one length T: tokens (count, T) and targets (count, T), aligned and not shifted.

    With retrieval: key value.. key value.. | action slot.. action slot.., without: | action action ..
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
    n, pad = sum(share.values()), math.factorial(config.group) + config.n_values + 2
    steps = np.repeat(list(share), list(share.values()))
    np.random.default_rng([config.seed, index]).shuffle(steps)
    longest = row_length(config, max(steps))[1]
    tokens = np.full((n, longest), pad, dtype=np.min_scalar_type(pad))
    targets = np.full((n, longest), -1, dtype=np.int16)
    recur_mask = np.zeros((n, longest), dtype=bool)
    for s, wanted in share.items():
        prefix, length = row_length(config, s)
        rng = np.random.default_rng([config.seed, index, s])
        places, kept, fresh_rate = np.flatnonzero(steps == s), 0, 1.0
        recur_mask[places, 0 if config.recur_on_prompt else prefix : length] = True
        while kept < wanted:
            # Few of the examples drawn are new when a length nears its end; a block bounds the memory.
            count = min(math.ceil((wanted - kept) / fresh_rate), max(1, 2**20 // longest))
            rows, answers = draw_examples(config, rng, count, s)
            rows = rows.astype(tokens.dtype)
            fresh = []
            for i, row in enumerate(rows):
                if kept + len(fresh) < wanted and (text := row.tobytes()) not in seen[s]:
                    seen[s].add(text)
                    fresh.append(i)
            here = places[kept : kept + len(fresh)]
            tokens[here, :length], targets[here, :length] = rows[fresh], answers[fresh]
            kept += len(fresh)
            fresh_rate = max(len(fresh), 1) / count
            progress.update(len(fresh))
    lengths = np.sum(tokens != pad, axis=1)
    return {'tokens': tokens, 'targets': targets, 'recur_mask': recur_mask, 'lengths': lengths, 'steps': steps}


def make_s5(config):
    """Track a permutation while looking up values: train.npz, val.npz and test.npz of arrays

    tokens (N, T) padded, targets (N, T) with -1 where nothing is scored, recur_mask (N, T) True where memory is read,
    lengths (N,) in tokens and steps (N,) in actions; T is the longest example of the split.
    Vocabulary: n! elements, then n_values values, delimiter, slot, pad; it is the same with and without retrieval.
    """
    out = config.out or f'data/s{config.group}'
    settings = {k: v for k, v in asdict(config).items() if k not in ('out', 'overwrite')}
    wanted = {'kind': 'task', 'task': 's5', 'settings': settings}
    if is_ready(out, config.overwrite, wanted):
        return
    names = ['p' + ''.join(map(str, p)) for p in itertools.permutations(range(config.group))]
    elements = len(names)
    names += [f'v{i}' for i in range(config.n_values)] + ['|', '_', '.']
    scores = {'state': [0, elements]} | ({'retrieval': [elements, elements + config.n_values]} if config.retrieval else {})
    vocabulary = {'tokenizer': 'names', 'names': names, 'vocab_size': len(names), 'pad_token': len(names) - 1}
    seen, shares = defaultdict(set), plan(config)
    longest, splits = ({name: None for name in ('train', 'val', 'test')} for _ in range(2))
    total = sum(sum(share.values()) for share in shares.values())
    with work_folder(out) as work, tqdm(total=total, desc='drawing', unit=' examples', disable=None) as progress:
        for index, (name, share) in enumerate(shares.items()):  # test and val first: they stay the same for any n_train
            arrays = draw_split(config, index, {s: k for s, k in share.items() if k}, seen, progress)
            np.savez(f'{work}/{name}.npz', **arrays)
            longest[name] = arrays['tokens'].shape[1]
            splits[name] = {'examples': len(arrays['steps']), 'sha256': file_sha256(f'{work}/{name}.npz')}
        progress.close()
        publish(work, out, wanted | vocabulary | {'longest': longest, 'scores': scores, 'splits': splits})


# ---------------------------------------------------------------------------------------------------------------------------

DATASETS = {
    'text': (TextConfig, make_text, 'bytes of your files, or of the Python standard library: for language modelling'),
    's5': (S5Config, make_s5, 'permutations to compose and values to look up: state tracking with retrieval'),
}


def main(argv):
    if not argv or argv[0] in ('--help', '-h', '--list'):
        print('usage: python prepare_data.py DATASET [--key=value ...]\n\nDatasets (DATASET --help lists the keys of one):')
        for name, (_, _, line) in DATASETS.items():
            print(f'  {name:<5} {line}')
        return
    if argv[0] not in DATASETS:
        raise fail(f'the first argument names the dataset, and {argv[0]!r} is none; {nearest(argv[0], DATASETS)}')
    config_class, make, _ = DATASETS[argv[0]]
    config = parse(config_class, argv[1:], f'python prepare_data.py {argv[0]} [config.py] [--key=value ...]')
    with reporting():
        make(config)


if __name__ == '__main__':
    main(sys.argv[1:])
