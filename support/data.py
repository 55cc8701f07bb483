"""Datasets as training reads them: token streams and tasks, batches that depend on (seed, step, sample) alone."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from configurator import ConfigError, explaining
from support.folders import shard_names
from support.processes import warn
from support.tokens import token_dtype

DOCUMENT = -2  # reset_token=document until the data are known
REMEDY = 'make the dataset again with prepare_data.py'


class Stream:
    """Token files, memory-mapped, read as one array. A slice within one file is a view."""

    def __init__(self, parts):
        self.parts, self.ends = parts, np.cumsum([len(part) for part in parts])

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, where):
        start, stop, _ = where.indices(len(self))
        first = min(np.searchsorted(self.ends, start, 'right'), len(self.parts) - 1)
        last = max(np.searchsorted(self.ends, stop, 'left'), first)
        begins = self.ends - [len(part) for part in self.parts]
        slices = [self.parts[i][max(start - begins[i], 0) : max(stop - begins[i], 0)] for i in range(first, last + 1)]
        return slices[0] if len(slices) == 1 else np.concatenate(slices)


class Dataset:
    """A dataset's folder. Batches are a pure function of (split, seed, step, sample)."""

    def __init__(self, folder, vocab_size=0):
        """Raises ConfigError when the folder holds no dataset; vocab_size: what a model wants, for the remedy."""
        self.folder = folder
        path = os.path.join(folder, 'meta.json')
        if not os.path.exists(path):
            how = 'make one with prepare_data.py (without arguments it lists them)'
            if vocab_size:
                how = f'for vocab_size={vocab_size} run `python prepare_data.py tokenizer --vocab_size={vocab_size}`, and then '
                how += f'`python prepare_data.py fineweb_edu --tokenizer=data/tokenizer --out={folder}`'
            raise ConfigError(f'data_dir={folder} holds no dataset; {how}.')
        with explaining(f'{path} cannot be read', REMEDY), open(path, 'rb') as f:
            self.meta = json.load(f)
            self.is_text = {'text': True, 'task': False}[self.meta['kind']]
            self.vocab_size = self.meta['vocab_size']
            if not isinstance(self.vocab_size, int) or not 0 < self.vocab_size < 2**31:
                raise ValueError(f'vocab_size={self.vocab_size}')
            self.scores = {name: (int(low), int(high)) for name, (low, high) in self.meta.get('scores', {}).items()}
            self.document_token = self.meta.get('document_token', -1)
            if not isinstance(self.document_token, int) or not -1 <= self.document_token < self.vocab_size:
                raise ValueError(f'document_token={self.document_token}')
            self.longest = {} if self.is_text else {name: int(n) for name, n in self.meta['longest'].items()}
            if self.is_text:
                self.expect(self.vocab_size, len(self.meta['token_bytes']), 'entries of token_bytes')
        self.splits, self.starts, self.document_rows = {}, {}, False

    def split(self, name):
        """Text: the token stream, a memory map or a Stream of them. Task: a dict of arrays. Raises
        ConfigError where a file differs from what meta.json says of it."""
        if name not in self.splits:
            path = os.path.join(self.folder, name + ('.bin' if self.is_text else '.npz'))
            with explaining(f'{path} cannot be read', REMEDY):
                if os.path.basename(name) != name:
                    raise ValueError(f'the name {name!r} leads out of the folder')
                self.splits[name] = self.read_stream(name) if self.is_text else self.read_examples(name, path)
        return self.splits[name]

    def read_stream(self, name):
        entry, parts = self.meta['splits'][name], []
        for file, shard in shard_names(name, entry):
            path = os.path.join(self.folder, file + '.bin')
            with explaining(f'{path} cannot be read', REMEDY):
                if not os.path.getsize(path):
                    raise ConfigError(f'{path} cannot be read (it is empty); {REMEDY}.')
                parts.append(np.memmap(path, dtype=token_dtype(self.vocab_size), mode='r'))
                self.expect(shard['tokens'], len(parts[-1]), 'tokens')
        stream = Stream(parts) if 'shards' in entry else parts[0]
        self.expect(self.meta['dtype'], parts[0].dtype.name, 'dtype')
        self.expect(entry['tokens'], len(stream), 'tokens')
        return stream

    def read_examples(self, name, path):
        with np.load(path) as file:
            arrays = dict(file)
        entry = self.meta['splits'][name]
        shape = entry.get('rows', entry['examples']), self.longest[name]  # several examples share a row of a packed split
        for array in ('tokens', 'targets', 'recur_mask'):
            self.expect(shape, arrays[array].shape, f'shape of {array}')
            self.expect(True, arrays[array].dtype.kind in 'iub', f'whole numbers in {array}')
        return arrays

    def expect(self, stated, actual, what):
        if stated != actual:
            raise ValueError(f'{what}: {stated} by meta.json, {actual} in the file')

    def document_starts(self, name):
        """Where the documents of a text begin, (documents,); reads its whole stream once."""
        if name not in self.starts:
            stream, size = self.split(name), 2**24
            blocks = ((i, stream[i : i + size]) for i in range(0, len(stream), size))
            self.starts[name] = np.concatenate([np.flatnonzero(b == self.document_token) + i for i, b in blocks])
        return self.starts[name]

    def complete(self, config):
        """Sets reset_token and vocab_size from the data; ConfigError for data that do not fit."""
        config.reset_token = self.reset_token(config)
        if config.vocab_size and config.vocab_size < self.vocab_size:
            why = f'vocab_size={config.vocab_size} is too small for {self.folder}, which has {self.vocab_size} tokens'
            raise ConfigError(f'{why}; take {self.vocab_size} or 0.')
        self.check_lengths(config.block_size)
        if not self.is_text:
            self.check_scored()
            self.check_packed(config)
        if config.document_rows:
            self.check_document_rows(config)
        self.document_rows = config.document_rows
        config.vocab_size = config.vocab_size or self.vocab_size

    def reset_token(self, config):
        """The id that the reset_token of the settings means in these data; ConfigError for one that opens no document."""
        if config.reset_token == DOCUMENT:
            used = config.architecture == 'gpt' and (self.is_text or config.document_attention)
            return self.document_token if used else -1
        reads = config.recurrence != 'none' or config.document_attention
        if reads and config.reset_token not in (-1, self.document_token):
            actual = f'where {self.document_token} does' if self.document_token >= 0 else 'which marks none'
            why = f'reset_token={config.reset_token} opens no document of {self.folder}, {actual}'
            raise ConfigError(f'{why}; take document or none.')
        return config.reset_token

    def check_lengths(self, T):
        for name in ('train', 'val') if self.is_text else ():
            if (tokens := len(self.split(name))) <= T:
                why = f'{self.folder}/{name}.bin has {tokens} tokens, too few for block_size={T}'
                raise ConfigError(f'{why}; take a smaller block_size or more data.')
        if self.longest and (longest := max(self.longest.values())) > T:  # eval.py reads the other splits
            split = max(self.longest, key=self.longest.get)
            why = f'{self.folder} has examples of {longest} tokens in {split}, above block_size={T}'
            raise ConfigError(f'{why}; take {longest}.')

    def check_scored(self):
        for name in ('train', 'val'):
            if not (self.split(name)['targets'] >= 0).any():
                what = f'no token of {name} in {self.folder} is scored'
                if name == 'train':
                    raise ConfigError(f'{what}, so there is nothing to learn; {REMEDY}.')
                warn(f'{what}: there is no validation loss.')

    def check_packed(self, config):
        apart = config.reset_token == self.document_token and config.document_attention
        if 'rows' in self.meta['splits']['train'] and not apart:
            given = f'reset_token={config.reset_token} and document_attention={config.document_attention}'
            why = f'{self.folder} has several examples in a row, which would read each other with {given}'
            raise ConfigError(f'{why}; take --reset_token=document --document_attention=True, or prepare it with pack=0.')

    def check_document_rows(self, config):
        if not self.is_text or config.reset_token != self.document_token or self.document_token < 0:
            what = 'reset_token=document, and a token that opens them' if self.is_text else 'a text, not a task'
            raise ConfigError(f'document_rows=True needs, with {self.folder}, {what}.')
        for name in ('train', 'val'):
            starts = self.document_starts(name)
            if not len(starts) or starts[0] >= len(self.split(name)) - config.block_size:
                why = f'{self.folder} has no document in {name} that block_size={config.block_size} tokens follow from'
                raise ConfigError(f'{why}; take a smaller block_size, or document_rows=False.')

    def share_never_read(self, T):
        """The share of the training tokens that document_rows leaves out: those after the first T of a document."""
        end = len(self.split('train'))
        return np.maximum(np.diff(self.document_starts('train'), append=end) - T, 0).sum() / end

    def rows(self, name, seed, step, batch_size, T):
        """Which samples make batch `step`: offsets into the stream (text) or numbers of examples (task), (batch_size,). The
        training split is drawn with replacement; the others are read in order. With document_rows a row begins at a document;
        what follows within T tokens, even of further documents, belongs to it."""
        split = self.split(name)
        choices = len(split) - T if self.is_text else len(split['tokens'])
        if self.document_rows:
            starts = self.document_starts(name)
            choices = np.searchsorted(starts, choices)
        if name == 'train':
            number = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step])).integers(choices, size=batch_size)
        else:
            number = np.arange(step * batch_size, (step + 1) * batch_size)
            number = number * (T if self.is_text and not self.document_rows else 1) % choices
        return starts[number] if self.document_rows else number

    def epochs(self, n_rows, T):
        """How often `n_rows` sequences go through the documents, tokens or examples of the training split."""
        split = self.split('train')
        if self.document_rows:
            return n_rows / len(self.document_starts('train'))
        return n_rows * T / len(split) if self.is_text else n_rows / len(split['tokens'])

    def batch(self, name, rows, T, device='cpu'):
        """tokens, targets (B, T) int64 and recur_mask (B, T) bool or None; targets are -1 where nothing is scored."""
        split = self.split(name)
        if self.is_text:
            window = np.stack([split[r : r + T + 1] for r in rows]).astype(np.int64)
            arrays = window[:, :-1], window[:, 1:]
        else:
            tokens, targets, mask = (split[array][rows] for array in ('tokens', 'targets', 'recur_mask'))
            arrays = tokens.astype(np.int64), targets.astype(np.int64), mask.astype(bool)
        lowest, highest = arrays[0].min(), max(arrays[0].max(), arrays[1].max())
        if lowest < 0 or highest >= self.vocab_size:
            token = f'the token {highest if lowest >= 0 else lowest} in {name}, outside its vocabulary of {self.vocab_size}'
            raise ConfigError(f'{self.folder} holds {token}; {REMEDY}.')
        tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        return to_device((*tensors, *([None] if self.is_text else [])), device)

    def training_batches(self, config, process, start):
        """Yields for each step from `start` on, read one step ahead: how many sequences of the
        batch score each position, (T,), and the micro-batches of this process, on the host."""
        T = self.length('train', config.block_size)

        def read(step):
            rows = self.rows('train', config.seed, step, config.batch_size, T)
            parts = rows.reshape(process.world, config.accumulation, -1)[process.rank]
            return self.scored('train', rows, T), [self.batch('train', part, T) for part in parts]

        return read_ahead(read, range(start, config.max_steps))

    def length(self, name, block_size):
        """Positions in a batch of this split."""
        return block_size if self.is_text else self.split(name)['tokens'].shape[1]

    def scored(self, name, rows, T):
        """How many samples of a batch score each position, (T,)."""
        return np.full(T, len(rows)) if self.is_text else (self.split(name)['targets'][rows] >= 0).sum(0)


def to_device(tensors, device):
    """Copies on `device` of tensors of the host, or None; the host does not wait for copies to a GPU."""
    if str(device).startswith('cuda'):
        return tuple(t if t is None else t.pin_memory().to(device, non_blocking=True) for t in tensors)
    return tuple(t if t is None else t.to(device) for t in tensors)


def read_ahead(read, numbers):
    """Yields read(n) for each of `numbers`, in order, from a thread that is one ahead. What `read` raises is raised here, at
    its number; the thread ends with the generator, which `close()` ends early."""
    with ThreadPoolExecutor(1) as reader:
        following = None
        for n in numbers:
            current, following = following, reader.submit(read, n)
            if current is not None:
                yield current.result()
        if following is not None:
            yield following.result()
