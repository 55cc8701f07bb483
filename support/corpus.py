"""A corpus too large for memory, tokenised into shards by processes that may be interrupted."""

import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import ConfigError, convert, explaining, key, read_config_file
from support import readers
from support.files import PACKED, ending
from support.folders import VAL_BOUNDS, announce, clear, is_ready, settings_of, source_names, write_json
from support.readers import LOSSY, KeptOut, list_corpus, read_corpus
from support.tokens import LossyError, encode_document, tokenizer_meta

VAL_OF_SINGLE_TEXT = 0.05  # the default of val_fraction is for web pages, and far too little of a single text


@dataclass
class FineWebEduConfig:
    subset: str = key('10BT', "the hub's sample of 10 or 100 billion tokens", ('10BT', '100BT'))
    source: str = key('', 'parquet, jsonl, json or txt files, folders or patterns joined by commas, instead of the hub')
    text_key: str = key('text', 'the field of a row, or parquet column, that holds the text')
    tokenizer: str = key('gpt2', 'bytes, a tiktoken encoding such as gpt2, or a tokenizer.json or its folder')
    workers: int = key(0, 'processes that tokenise; 0: one per core', bounds=(0, 1024))
    shard_tokens: int = key(100_000_000, 'tokens of a shard; the last has the rest', bounds=(1000, 2**33))
    limit_tokens: int = key(0, 'take documents while they fit into so many tokens; 0: all', bounds=(0, 2**62))
    val_fraction: float = key(
        0.001, 'share of the documents that goes to val; a single txt file is cut, at 5% by default', bounds=VAL_BOUNDS
    )
    max_lost: float = key(0.1, 'share of the documents that may be kept out because they cannot be read', bounds=(0, 1))
    config: str = key('', 'a config of train.py that the data are for; a tokenizer too large for its vocab_size is refused')
    out: str = key('data/fineweb_edu', 'the folder to write')
    overwrite: bool = key(False, 'replace what `out` holds, unfinished work too')

    def check(self):
        if not self.out:
            raise ConfigError("out='' names no folder; write it like out=data/fineweb_edu.")


def make_fineweb_edu(_, config):
    """Shards of a corpus, train-00000.bin and val-00000.bin and so on, in the order of the source; documents may cross shards.

    Until all is done, unfinished.json records what is safely written and the position in the source after it; the same command
    continues there. Workers and restarts do not change the bytes. Memory: some MB per process, and the largest document.

    Documents without a text, or that the tokenizer does not give back, are kept out and named at the end. Of a txt file in
    several pieces only the piece is, and what follows it is another document. More than max_lost of them end the work.
    """
    # 1. What is asked for, and how much of it is there.
    meta = tokenizer_meta(config.tokenizer)
    if config.config:
        check_vocabulary(config, meta['vocab_size'])
    source = source_names(config.source, f'HuggingFaceFW/fineweb-edu sample-{config.subset}')
    wanted = {'kind': 'text', 'source': source, 'settings': settings_of(config, 'workers', 'max_lost', 'config')} | meta
    path = os.path.join(config.out, 'unfinished.json')
    if not (state := resume(config, path, wanted)):
        return
    files = state['files']
    total = sum(shard['tokens'] for shards in state['shards'].values() for shard in shards)
    itemsize = np.dtype(meta['dtype']).itemsize
    check_space(config, files, itemsize, total * itemsize)

    # 2. The folder: without what an interrupted run has written beyond its record.
    os.makedirs(config.out, exist_ok=True)
    if total:
        print(f'{config.out} holds {total:,} tokens of this already; continuing from there.')
    else:
        clear(config.out)
    work = UnfinishedCorpus(config, path, state, meta, total)

    # 3. Tokenise batch after batch.
    workers, limit = config.workers or os.cpu_count() or 1, config.limit_tokens or math.inf
    tokenised = tokenise_all(batches(files, state['position'], config), workers, meta, config.val_fraction)
    with contextlib.closing(tokenised), tqdm(initial=total, unit=' tokens', unit_scale=True, disable=None) as progress:
        for position, share, pieces in tokenised:
            if not work.add(pieces, limit):
                position = [len(files), 0]
            work.kept_out.check(max(work.documents, 1000), config.max_lost)
            progress.total = max(work.total, min(int(work.total / max(share, 1e-9)), limit))
            progress.update(work.total - progress.n)
            ended = position[0] == len(files)
            if ended or work.total - work.written >= min(config.shard_tokens, 2**20):
                work.write(position)
            if ended:
                break

    # 4. Describe it.
    if work.kept_out.reasons:
        work.kept_out.check(work.documents, config.max_lost)
        print(f'kept out {work.kept_out}')
    splits = work.splits()
    write_json(f'{config.out}/meta.json', wanted | {'splits': splits})
    os.remove(path)
    announce(config.out, splits)


def check_vocabulary(config, size):
    """ConfigError where a tokenizer of `size` ids is too large for the vocab_size that the config of train.py states."""
    stated = convert('vocab_size', read_config_file(config.config).get('vocab_size', 0), 0)
    if 0 < stated < size:
        why = f'tokenizer={config.tokenizer} has {size} ids, above vocab_size={stated} of {config.config}'
        how = f'`python prepare_data.py tokenizer --vocab_size={stated}` makes one that fits'
        raise ConfigError(f'{why}; {how}, and --tokenizer=data/tokenizer takes it.')


def resume(config, path, wanted):
    """What unfinished.json at `path` records, or an empty record where it is missing; None where
    the dataset is finished. ConfigError unless the work can be continued."""
    identity = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
    if os.path.exists(path) and os.path.exists(os.path.join(config.out, 'meta.json')):  # killed at its very last step
        os.remove(path)
    nothing_lost = {'kept_out': {}, 'gap': None}
    if config.overwrite or not os.path.exists(path):
        if is_ready(config.out, config.overwrite, wanted):
            return None
        empty = {'position': [0, 0], 'documents': {'train': 0, 'val': 0}, 'shards': {'train': [], 'val': []}}
        return {'identity': identity, 'files': list_corpus(config)} | empty | nothing_lost
    with explaining(f'{path} cannot be read', '--overwrite=True starts over'):
        state = json.loads(Path(path).read_text('utf-8'))
        if state['identity'] != identity:
            raise ConfigError(f'out={config.out} holds unfinished work with other settings; name another, or --overwrite=True.')
        if config.source and state['files'] != list_corpus(config):
            raise ConfigError(f'source={config.source} has changed since this work began; --overwrite=True starts over.')
    return nothing_lost | state  # an older record does not say what was lost


def check_space(config, files, itemsize, written):
    """ConfigError unless the disk has room for all tokens of a corpus, `written` bytes of which it holds already."""
    if config.source:  # at 3 bytes of text per token, and 3 per packed byte: more tokens than there will be
        text = sum(size * (3 if path.endswith(('.parquet', *PACKED)) else 1) for path, size in files)
        tokens = text if config.tokenizer == 'bytes' else text / 3
    else:
        tokens = {'10BT': 10e9, '100BT': 100e9}[config.subset] * (4 if config.tokenizer == 'bytes' else 1)
    need = min(tokens, config.limit_tokens or math.inf) * itemsize - written
    folder = Path(config.out).absolute()
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    if free < need:
        why = f'out={config.out} needs about {need / 1e9:.3g} GB and its disk has {free / 1e9:.3g} GB free'
        raise ConfigError(f'{why}; choose another disk, or --limit_tokens={int((free + written) / itemsize * 0.9)}.')


def batches(files, position, config):
    """Yields (position after it, share of the corpus read, [(number of the file, Entry)]) of each
    batch after `position`, which is [number of the file, entries of it read]."""
    (begin, skip), entries, filled = position, [], 0
    before, total = sum(size for _, size in files[:begin]), sum(size for _, size in files)
    single = len(files) == 1 and '.txt' in ending(files[0][0])
    is_default = config.val_fraction == FineWebEduConfig.val_fraction
    cut = single and (VAL_OF_SINGLE_TEXT if is_default else config.val_fraction)  # its end, which goes to val
    for number, (path, size) in enumerate(files[begin:], begin):
        for share, entry in read_corpus(path, skip, config.text_key, cut):
            entries.append((number, entry))
            filled, skip = filled + len(entry.content), skip + 1
            if filled >= readers.PIECE_LENGTH or len(entries) >= 2**14:
                yield [number, skip], (before + share * size) / total, entries
                entries, filled = [], 0
        before, skip = before + size, 0
    yield [len(files), 0], 1.0, entries


WORKER = {}  # in a process that tokenises: the settings that all batches share


def start_worker(meta, val_fraction):
    WORKER.update(meta=meta, val_fraction=val_fraction)
    if parent := multiprocessing.parent_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def tokenise(entries):
    """[(number of the file, Entry without content, tokens, split, why it is kept out)] of what is not blank."""
    pieces, below = [], WORKER['val_fraction'] * 2**64
    for file, entry in entries:
        if not entry.content and not entry.why:
            continue
        split = 'val' if int.from_bytes(entry.digest[:8], 'big') < below else 'train'
        try:
            tokens, why = encode_document(WORKER['meta'], entry.content, entry.opens), entry.why
        except LossyError:
            tokens, why = (), LOSSY
        pieces.append((file, entry._replace(content=b''), tokens, split, why))
    return pieces


def tokenise_all(work, workers, *shared):
    """Yields (position, share, what tokenise() makes) of the batches `work` in their order, from `workers` processes."""
    if workers == 1:
        start_worker(*shared)
        yield from ((position, share, tokenise(entries)) for position, share, entries in work)
        return
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context('spawn'), start_worker, shared) as pool:
            begun = ((position, share, pool.submit(tokenise, entries)) for position, share, entries in work)
            waiting = deque(itertools.islice(begun, 3 * workers))  # one long document does not hold up the others
            while waiting:
                position, share, future = waiting.popleft()
                yield position, share, future.result()
                waiting.extend(itertools.islice(begun, 1))
    except BrokenProcessPool:
        raise ConfigError('a process was killed, perhaps for its memory; start again with fewer --workers.') from None


class Shards:
    """The files of one split, NAME-00000.bin and so on, of `size` tokens each; `entries` [{'tokens', 'sha256'}] says what they
    hold, also after append(). What an interrupted run wrote beyond that is cut off; ConfigError where they are damaged."""

    def __init__(self, folder, name, size, dtype, entries):
        self.folder, self.name, self.size, self.entries, self.digest = Path(folder), name, size, entries, None
        for i, shard in enumerate(entries):
            with explaining(f'{self.path(i)}, part of unfinished work, is missing or damaged', '--overwrite=True starts over'):
                os.truncate(self.path(i), shard['tokens'] * dtype.itemsize)
                with open(self.path(i), 'rb') as f:
                    self.digest = hashlib.file_digest(f, 'sha256')
                if self.digest.hexdigest() != shard['sha256']:
                    raise ValueError('its bytes have changed')
        for path in {*self.folder.glob(f'{name}-*.bin')} - {*map(self.path, range(len(entries)))}:
            path.unlink()

    def path(self, i):
        return self.folder / f'{self.name}-{i:05}.bin'

    def append(self, tokens):
        """Writes `tokens` to the disk, and describes them in the entries."""
        while len(tokens):
            if not self.entries or self.entries[-1]['tokens'] == self.size:
                self.entries.append({'tokens': 0})
                self.digest = hashlib.sha256()
            part, tokens = np.split(tokens, [self.size - self.entries[-1]['tokens']])
            with open(self.path(len(self.entries) - 1), 'ab') as f:
                f.write(part)
                f.flush()
                os.fsync(f.fileno())
            self.digest.update(part)
            self.entries[-1] = {'tokens': self.entries[-1]['tokens'] + len(part), 'sha256': self.digest.hexdigest()}


class UnfinishedCorpus:
    """The shards of a corpus so far, and the record of them in unfinished.json at `path`. `total`
    counts the tokens added, `written` those among them that the record knows."""

    def __init__(self, config, path, state, meta, total):
        self.folder, self.path, self.state, self.dtype = config.out, path, state, np.dtype(meta['dtype'])
        self.document_token = np.array([meta['document_token']], self.dtype)
        self.kept_out = KeptOut(state['kept_out'])
        shards = state['shards'].items()
        self.shards = {name: Shards(config.out, name, config.shard_tokens, self.dtype, entries) for name, entries in shards}
        self.unwritten, self.total, self.written = {name: [] for name in self.shards}, total, total

    @property
    def documents(self):
        """How many documents were read, including those that were lost."""
        return sum(self.state['documents'].values()) + self.kept_out.lost

    def add(self, pieces, limit):
        """Adds what tokenise() makes, up to `limit` tokens; returns whether all was taken."""
        for file, entry, tokens, split, why in pieces:
            if why:
                self.kept_out.add(why, self.state['files'][file][0], entry.number)
                self.state['gap'] = [file, entry.number + 1]
                continue
            opens = entry.opens
            if not opens and self.state['gap'] == [file, entry.number]:  # what follows a lost piece is another document
                opens, tokens = True, np.concatenate([self.document_token, tokens])
            if self.total + len(tokens) > limit:
                return False
            self.unwritten[split].append(tokens)
            self.state['documents'][split] += opens
            self.total += len(tokens)
        return True

    def write(self, position):
        """Writes what was added, then the record of it, and of the `position` after it."""
        for name, parts in self.unwritten.items():
            self.shards[name].append(np.concatenate([np.empty(0, self.dtype), *parts]))
            parts.clear()
        self.state['position'] = position
        write_json(self.path, self.state)
        self.written = self.total

    def splits(self):
        """The entries of the splits in meta.json. Where one is empty, nothing is left of the dataset: ConfigError."""
        splits = {}
        for name, entries in self.state['shards'].items():
            if not entries:
                clear(self.folder)
                why = f'none of the {self.total:,} tokens fell into {name}'
                raise ConfigError(f'{why}; take more text or another val_fraction.')
            digest = hashlib.sha256(''.join(shard['sha256'] for shard in entries).encode()).hexdigest()
            tokens = sum(shard['tokens'] for shard in entries)
            splits[name] = {'tokens': tokens, 'documents': self.state['documents'][name], 'sha256': digest, 'shards': entries}
        return splits
