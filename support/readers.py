"""Reads the documents of a corpus from parquet, jsonl, json and txt files."""

import codecs
import hashlib
import itertools
import json
import os
from typing import NamedTuple

import numpy as np

from configurator import ConfigError, explaining
from support.files import JSON, JSONL, TXT, ending, find_files, refuse_scripts, unpacked
from support.optional import import_optional

# Why a document is kept out.
LOSSY, NULL = 'where the tokenizer loses a part of the text', 'without a text (null)'
SURROGATE, EMPTY = 'with half of a surrogate pair', 'that are empty'
PIECE_LENGTH = 2**20  # bytes of text handed to a process at once
CORPUS = ('.parquet', *JSONL, *TXT)  # endings of the files that are taken from folders


class KeptOut:
    """Documents that a dataset leaves out. `reasons`: {why: {'count', 'first': [[file, entry], ..]}}, the first NAMED."""

    NAMED = 20

    def __init__(self, reasons):
        self.reasons = reasons

    def add(self, why, file, entry):
        record = self.reasons.setdefault(why, {'count': 0, 'first': []})
        record['count'] += 1
        if len(record['first']) < self.NAMED:
            record['first'].append([os.path.basename(file), entry])

    @property
    def lost(self):
        """How many have a text that cannot be kept."""
        return sum(record['count'] for why, record in self.reasons.items() if why != EMPTY)

    def __str__(self):
        def places(record):
            named = [f'{file}, entry {entry}' for file, entry in record['first']]
            return '; '.join(named + ['...'] * (record['count'] > len(named)))

        return ', '.join(f'{record["count"]:,} {why} ({places(record)})' for why, record in self.reasons.items())

    def check(self, documents, max_lost):
        """ConfigError where more than the share `max_lost` of all `documents` is lost."""
        if self.lost > max_lost * documents:
            why = f'{self.lost:,} of {documents:,} documents cannot be kept, above max_lost={max_lost:g}: {self}'
            raise ConfigError(f'{why}; repair them, take a tokenizer of bytes such as gpt2, or raise --max_lost.')


def train_bytes(size, val_fraction):
    """How many of the `size` bytes of a single document come before its last `val_fraction`."""
    return size - min(max(round(val_fraction * size), 1), size - 1)


def character_start(content, position):
    """The last position up to `position` in UTF-8 bytes where a character begins."""
    position = min(position, len(content))
    while position < len(content) and content[position] & 0xC0 == 0x80:
        position -= 1
    return position


def list_corpus(config):
    """[[path, size]] of the files of the corpus in order: the size in bytes, or 1 for each file of the hub. Raises
    ConfigError for a file that is missing, empty or of another kind, and for a folder that would need its own code."""
    if not config.source:
        with explaining('the hub could not be reached', '--source=FILES takes files on this disk'):
            builder = import_optional('datasets').load_dataset_builder('HuggingFaceFW/fineweb-edu', f'sample-{config.subset}')
            return [[str(path), 1] for path in builder.config.data_files['train']]  # each names its revision
    files = find_files(config.source, ','.join([*CORPUS, 'py']), config.out)
    refuse_scripts(files, CORPUS)
    for path in files:
        if ending(path) not in (*CORPUS, *JSON):
            raise ConfigError(f'{path} is no parquet, jsonl or txt file, nor json, nor one packed by gzip or zstd; convert it.')
        if not os.path.getsize(path):
            raise ConfigError(f'{path} is empty; complete or remove it.')
    if not files:
        why = f'source={config.source} holds no parquet, jsonl or txt file'
        raise ConfigError(f'{why}; name a folder or pattern that does, of json files a pattern.')
    return [[path, os.path.getsize(path)] for path in files]


class Entry(NamedTuple):
    """A document of a corpus, or a piece of one."""

    number: int  # of the entry in its file
    digest: bytes  # sha256 of the document
    opens: bool  # whether the document begins here
    content: bytes  # UTF-8
    why: str  # why it is kept out, if it is


def read_corpus(path, skip, text_key, val_fraction):
    """Yields (share of the file read, Entry) from entry `skip` on. An entry is a document: a row of a parquet file, a line of a
    jsonl file or an object of a json file. A txt file is one document in pieces, of which each is an entry. Raises ConfigError
    where the file cannot be read or is not UTF-8."""
    number, kind = skip, ending(path).split('.')[1]
    try:
        retrying = '://' in path and import_optional('datasets.utils.file_utils').xopen
        with (retrying or open)(path, 'rb') as packed:
            size = packed.seek(0, os.SEEK_END)
            packed.seek(0)
            f = unpacked(path, packed)
            if kind == 'txt':
                entries = itertools.islice(read_txt(path, f, val_fraction), skip, None)
            elif kind == 'parquet':
                table = import_optional('pyarrow.parquet').ParquetFile(f)
                size = table.metadata.num_rows
                entries = whole_documents(read_parquet(table, text_key, skip))
            else:
                entries = whole_documents(read_json(f, text_key, skip))
            for digest, opens, content, why in entries:
                content.decode()
                yield (number if kind == 'parquet' else packed.tell()) / size, Entry(number, digest, opens, content, why)
                number += 1
    except (ConfigError, MemoryError):
        raise
    except Exception as e:  # of a damaged file, or of the network
        hint = '; --text_key names another field' * isinstance(e, KeyError)
        raise ConfigError(f'{path} cannot be read at its entry {number} ({type(e).__name__}: {e}){hint}.') from None


def whole_documents(rows):
    return ((hashlib.sha256(content).digest(), True, content, why) for content, why in rows)


def read_parquet(table, text_key, skip):
    """As read_json(), but of the rows of a parquet file."""
    starts = np.cumsum([0, *(table.metadata.row_group(i).num_rows for i in range(table.num_row_groups))])
    group = np.searchsorted(starts, skip, 'right') - 1  # where to begin
    contents = (  # of one group at a time: requested together, all would stay in memory
        row.as_py()
        for i in range(group, table.num_row_groups)
        for batch in table.iter_batches(256, [i], [text_key])
        for row in batch[text_key].cast('large_binary')
    )
    for content in itertools.islice(contents, skip - starts[group], None):
        yield (b'', NULL) if content is None else (content, '' if content else EMPTY)


def read_json(f, text_key, skip):
    """Yields (text in bytes, why it is kept out, if it is) from entry `skip` on, of a file of JSON
    objects, one per line (a blank line is an entry without a text), or of one list of them."""
    first = f.readline().removeprefix(codecs.BOM_UTF8)
    is_list = first.lstrip()[:1] == b'['
    rows = json.loads(first + f.read()) if is_list else itertools.chain([first], f)
    for row in itertools.islice(rows, skip, None):
        if not is_list and not row.strip():
            yield b'', ''
            continue
        text = (row if is_list else json.loads(row))[text_key]
        try:
            yield (b'', NULL) if text is None else (text.encode(), '' if text else EMPTY)
        except UnicodeEncodeError:
            yield b'', SURROGATE


def read_txt(path, f, val_fraction):
    """Yields (sha256, whether it begins the document, piece in bytes, '') of the document in a txt file. With a val_fraction
    the end is a document of its own: its digest puts it into val, and the digest of the rest puts that into train."""
    sha, size, decoder, done = hashlib.sha256(), 0, codecs.getincrementaldecoder('utf-8')(), 0
    with open(path, 'rb') as packed:
        whole = unpacked(path, packed)
        while block := whole.read(PIECE_LENGTH):
            sha.update(block)
            size += len(block)
    cut, opens = train_bytes(size, val_fraction) if val_fraction else size, [True, True]
    digests = (b'\xff' * 32, bytes(32)) if val_fraction else (sha.digest(), sha.digest())
    while block := f.read(PIECE_LENGTH):
        content = decoder.decode(block).encode()
        at = character_start(content, max(cut - done, 0))
        for i, part in enumerate((content[:at], content[at:])):
            if part:
                yield digests[i], opens[i], part, ''
                opens[i] = False
        done += len(content)
    decoder.decode(b'', final=True)
