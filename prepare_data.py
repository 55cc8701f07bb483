"""Datasets, made once and stored as files that training maps into memory.

    python prepare_data.py text                        text files; the Python standard library if no source is named
    python prepare_data.py fineweb_edu --source=PATH   a corpus of parquet, jsonl or txt files; the hub's if no source is named
    python prepare_data.py s5 --group=3                permutation state tracking with retrieval, made from a seed
    python prepare_data.py gsm8k --source=PATH         questions and answers of jsonl, json or parquet files, or of the hub
    python prepare_data.py text --help                 the keys of one dataset

A dataset is a folder whose meta.json, written last, describes the files beside it: train.bin and val.bin, one flat stream of
token ids, for text, or its shards train-00000.bin and so on; train.npz, val.npz and test.npz for a task, and if it is made of
text its raw examples in train.jsonl and so on. A folder without meta.json is not a dataset. Starting the same command again
re-uses what is there.
"""

import codecs
import contextlib
import datetime
import difflib
import functools
import glob
import gzip
import hashlib
import importlib
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
from collections import Counter, defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import jinja2.ext
import jinja2.sandbox
import numpy as np
from tqdm import tqdm

from configurator import ConfigError, explaining, fail, key, nearest, parse, reporting, within
from support.texts import as_text

DOCUMENT_TOKEN = 256  # the first id after the 256 bytes; it opens every document
DOCUMENT_NAMES = ('<|begin_of_text|>', '<|endoftext|>', '<s>', '<bos>', '</s>')  # of a tokenizer.json, in order of preference
DOCUMENT_WORDS = ('beginoftext', 'startoftext', 'beginofsentence', 'bos', 'endoftext', 'endofsentence', 'eos')  # then these
CHAT_DATE = '2024-07-26'  # of templates that ask for today's; Llama 3 has it where there is none
PIECES = re.compile(r'(train|val|test)(-\d{5,})?\.(bin|npz|jsonl)|(meta|unfinished)\.json(\.tmp)?')  # every file of a dataset
LOSSY, NULL, SURROGATE, EMPTY = (  # why a document is kept out
    'where the tokenizer loses a part of the text',
    'without a text (null)',
    'with half of a surrogate pair',
    'that are empty',
)
BREAK = '\ud800'  # half of a surrogate pair, which no text holds
PIECE_LENGTH = 2**20  # bytes of text handed to a process at once
ENCODED_AT_ONCE = 2**17  # characters; on longer runs of one kind tiktoken is slow, and at a million spaces it gives up
SHARE = 1e-12, 0.999999999999  # a split that takes a part, and leaves one
PACKED = ('.gz', '.zst')
CORPUS = ('.parquet', *(kind + packed for kind in ('.jsonl', '.txt') for packed in ('', *PACKED)))  # what folders are read for
STDLIB_LEAVES_OUT = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}  # installed packages and tests


# ---------------------------------------------------------------------------------------------------------------------------
# Tokens


def token_dtype(vocab_size):
    """The dtype of a token stream: 16 bits as long as the last id, vocab_size - 1, fits in them."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def extra(package):
    """The module of an optional package; ConfigError when it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        package = package.split('.')[0]
        raise ConfigError(f'this needs the package {package}; run `pip install -r requirements-data.txt`.') from None


def without_prefix(part):
    """An object in a tokenizer.json, changed to put no space before a text: decoding could not tell it from the text's own."""
    if part.get('type') == 'Prepend':
        return {'type': 'Sequence', 'normalizers': []}
    for name, value in (('add_prefix_space', False), ('prepend_scheme', 'never')):
        if name in part and isinstance(part.get('type'), str):  # else it is a vocabulary, which may hold such words too
            part[name] = value
    return part


@functools.lru_cache(maxsize=4)
def load_tokenizer(name, text=None):
    """(function from a text to its ids, bytes of each id, {name: id} of the special tokens) of 'bytes', of the tiktoken
    encoding `name`, or of `text`, the content of a tokenizer.json. Special tokens have no bytes, and no text is encoded to one.

    Raises ConfigError for what cannot be loaded. After the ids of a tokenizer.json comes one without bytes, for datasets that
    need a document token of their own.
    """
    if name == 'bytes':
        return str.encode, [*(bytes([b]) for b in range(DOCUMENT_TOKEN)), b''], {'<|endoftext|>': DOCUMENT_TOKEN}
    if text is None:
        tiktoken = extra('tiktoken')
        if name not in tiktoken.list_encoding_names():
            known = nearest(name, ['bytes', *tiktoken.list_encoding_names()])
            raise ConfigError(f'tokenizer={name} is neither known to tiktoken nor the path of a tokenizer.json; {known}')
        with explaining(f'tokenizer={name} could not be loaded', 'its first use needs the network'):
            encoding = tiktoken.get_encoding(name)
        pieces = [b''] * encoding.n_vocab  # of specials, and of the gaps that some vocabularies have
        for piece in encoding.token_byte_values():
            pieces[encoding.encode_single_token(piece)] = piece
        return encoding.encode_ordinary, pieces, {'<|endoftext|>': encoding.eot_token}

    with explaining(f'{name} is not a tokenizer.json that can be used', 'take another, or --tokenizer=bytes'):
        whole = json.loads(text, object_hook=without_prefix) | {'truncation': None, 'padding': None}
        tokenizer = extra('tokenizers').Tokenizer.from_str(json.dumps(whole))
        byte_level = '"ByteLevel"' in json.dumps(whole['decoder'])
    tokenizer.encode_special_tokens = True  # as ordinary text, that is
    # GPT-2 writes the visible bytes as themselves and the others as the characters from 256 on.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    of_char = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(sorted(set(range(256)) - set(visible)))}
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    pieces = [b''] * (max(vocabulary.values()) + 2)
    for token, i in vocabulary.items():
        if i in added:
            pieces[i] = b'' if added[i].special else token.encode()
        elif byte_level:
            pieces[i] = bytes(of_char.get(c, 0) for c in token)
        elif re.fullmatch('<0x[0-9A-F]{2}>', token):
            pieces[i] = bytes([int(token[3:5], 16)])
        else:
            pieces[i] = token.replace('\N{LOWER ONE EIGHTH BLOCK}', ' ').encode()
    specials = {token.content: i for i, token in added.items() if token.special}
    return lambda piece: tokenizer.encode(piece, add_special_tokens=False).ids, pieces, specials


def tokenizer_file(name):
    """The path of the tokenizer.json that a tokenizer setting names, itself or by its folder; None for another tokenizer."""
    path = Path(name).expanduser()
    inside = path / 'tokenizer.json'
    return inside if inside.is_file() else path if name.endswith('.json') else None


def read_beside(name, file):
    """The object in a JSON file beside the tokenizer.json that `name` names; {} where there is none."""
    path = tokenizer_file(name).parent / file
    with explaining(f'{path} cannot be read', 'repair or remove it'):
        return dict(json.loads(path.read_text('utf-8')).items()) if path.exists() else {}


def named_tokens(name, specials):
    """Ids of the tokens that the files beside a tokenizer.json name for the begin of a text, then those for its end. A token
    that its chat template writes more than once in a conversation is left out: it divides turns, not documents."""
    files = [read_beside(name, file) for file in ('tokenizer_config.json', 'config.json', 'generation_config.json')]
    template, text, of_id = read_template(name), '', {i: token for token, i in specials.items()}
    turns = [{'role': role, 'content': 'word'} for role in ('user', 'assistant') * 2]
    with contextlib.suppress(ConfigError):  # whoever uses the template will hear of it
        text = render(template, turns, False) if template else ''
    for which, about in itertools.product(('bos', 'eos'), files):
        for value in (about.get(f'{which}_token'), about.get(f'{which}_token_id')):
            value = value[0] if isinstance(value, list) and value else value
            token = value.get('content') if isinstance(value, dict) else of_id.get(value) if isinstance(value, int) else value
            if isinstance(token, str) and token in specials and text.count(token) < 2:
                yield specials[token]


def document_token(name, specials):
    """The id that opens documents: what the files beside a tokenizer.json name, or else the special token ({name: id}) that is
    called like one. None where there is none."""
    words = {re.sub('[^a-z]', '', token.lower()): i for token, i in reversed(specials.items())}
    called = [specials.get(token) for token in DOCUMENT_NAMES] + [words.get(word) for word in DOCUMENT_WORDS]
    named = named_tokens(name, specials) if tokenizer_file(name) else ()
    return next((i for i in (*named, *called) if i is not None), None)


def tokenizer_meta(name):
    """What meta.json says of a tokenizer: 'bytes', a tiktoken name, or a tokenizer.json or its folder, whose content it keeps.

    'token_bytes' are the bytes of each id, 0 for specials. 'document_token' is one of the special tokens, or where none fits
    one id more. Raises ConfigError for what cannot be loaded.
    """
    about = {'tokenizer': name}
    if name != 'bytes' and (path := tokenizer_file(name)):
        with explaining(f'tokenizer={name} cannot be read', 'name a tokenizer.json or its folder'):
            about = {'tokenizer': 'tokenizer.json', 'tokenizer_json': path.read_text('utf-8')}
    _, pieces, specials = load_tokenizer(about['tokenizer'], about.get('tokenizer_json'))
    document = document_token(name, specials)
    if document is None:
        document = len(pieces) - 1
    elif 'tokenizer_json' in about:
        pieces = pieces[:-1]
    sizes = {'vocab_size': len(pieces), 'document_token': document, 'token_bytes': [len(p) for p in pieces]}
    return about | sizes | {'dtype': token_dtype(len(pieces)).name}


def encode(meta, text):
    """Token ids (list of int) of `text` under the tokenizer of a dataset's meta.json.

    'bytes': its UTF-8 bytes, whatever they spell, so never the document token; nor does another tokenizer make a special
    token of a text. 'names': whitespace-separated names; ConfigError for a name that the vocabulary lacks.
    """
    if meta['tokenizer'] == 'names':
        ids = {name: i for i, name in enumerate(meta['names'])}
        for word in text.split():
            if word not in ids:
                close = difflib.get_close_matches(word, ids, n=1, cutoff=0)[0]
                raise ConfigError(f'there is no token named {word!r} in this vocabulary; the nearest is {close!r}.')
        return [ids[word] for word in text.split()]
    content = text.encode('utf-8', 'surrogateescape')  # a command line keeps undecodable bytes as surrogates
    if meta['tokenizer'] == 'bytes':
        return list(content)
    encode_piece, text = load_tokenizer(meta['tokenizer'], meta.get('tokenizer_json'))[0], content.decode('utf-8', 'replace')
    starts = range(0, len(text), ENCODED_AT_ONCE)
    return [i for start in starts for i in encode_piece(text[start : start + ENCODED_AT_ONCE])]


def decode(meta, ids):
    """Bytes of token ids. Special tokens are b'' and a name ends in a space, so pieces decoded apart can be joined."""
    if meta['tokenizer'] == 'names':
        return ''.join(meta['names'][i] + ' ' for i in ids).encode()
    pieces = load_tokenizer(meta['tokenizer'], meta.get('tokenizer_json'))[1]
    return b''.join([pieces[i] for i in ids])


class LossyError(ConfigError):
    """A tokenizer does not give a text back."""


def tokens_of(meta, content, opens=True):
    """Tokens of a document (bytes of UTF-8), the document token first, or of a later piece of one, without it.

    Raises LossyError when decoding them does not give `content` back.
    """
    parts = [np.array([meta['document_token']] * opens, meta['dtype'])]
    if meta['tokenizer'] == 'bytes':
        return np.concatenate([*parts, np.frombuffer(content, np.uint8)], dtype=meta['dtype'])
    text = content.decode()
    for start in range(0, len(text), ENCODED_AT_ONCE):
        piece = text[start : start + ENCODED_AT_ONCE]
        ids = encode(meta, piece)
        if decode(meta, ids) != piece.encode():
            raise LossyError(f'the tokenizer loses a part of the text {piece[:40]!r}; take one of bytes, such as gpt2.')
        parts.append(np.array(ids, meta['dtype']))
    return np.concatenate(parts)


# ---------------------------------------------------------------------------------------------------------------------------
# Conversations


class Generation(jinja2.ext.Extension):
    """The tag by which some templates mark what the assistant says; here it changes nothing."""

    tags = {'generation'}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(['name:endgeneration'], drop_needle=True)


@functools.lru_cache(maxsize=4)
def compile_template(template):
    """A chat template, which gets what those of Hugging Face models expect."""
    extensions = [Generation, 'jinja2.ext.loopcontrols']
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def raise_exception(said):
        raise ValueError(said)

    return sandbox.from_string(template, {'raise_exception': raise_exception, 'tools': None, 'documents': None})


def render(meta, messages, add_generation_prompt=True):
    """The text of a conversation by the chat template in `meta`; ConfigError for one that the template refuses. Today is
    'chat_date', CHAT_DATE where meta has none, for the same ids every day."""
    today = datetime.datetime.fromisoformat(meta.get('chat_date', CHAT_DATE))
    given = {'messages': messages, 'add_generation_prompt': add_generation_prompt, 'strftime_now': today.strftime}
    given |= meta['template_tokens']
    with explaining('the chat template fails', 'take another, or --chat=False'):
        return compile_template(meta['chat_template']).render(given)


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer_json):
    """({text: id} of the special tokens of a tokenizer.json, pattern that finds them with the spaces that belong to them)."""
    special = [t for t in json.loads(tokenizer_json).get('added_tokens', []) if t['special']]
    special.sort(key=lambda t: -len(t['content']))  # the longest counts where several begin
    parts = (r'\s*' * t.get('lstrip', 0) + re.escape(t['content']) + r'\s*' * t.get('rstrip', 0) for t in special)
    return {t['content']: t['id'] for t in special}, re.compile('|'.join(parts) or '(?!)')


def read_template(name):
    """'chat_template' and 'template_tokens', the texts such as bos_token that it may write, of the chat template beside the
    tokenizer.json that `name` names; {} where there is none."""
    path, about = tokenizer_file(name).parent / 'chat_template.jinja', read_beside(name, 'tokenizer_config.json')
    with explaining(f'the chat template in {path.parent} cannot be read', 'repair or remove it'):
        template = path.read_text('utf-8') if path.exists() else about.get('chat_template')
        if isinstance(template, list):  # several, by name
            template = next((t['template'] for t in template if t['name'] == 'default'), None)
    tokens = {k: v.get('content') if isinstance(v, dict) else v for k, v in about.items() if k.endswith('_token')}
    tokens = {k: v for k, v in tokens.items() if isinstance(v, str)}
    return {'chat_template': template, 'template_tokens': tokens} if template else {}


def chat_meta(name, tokenizer_json, date=CHAT_DATE):
    """What meta.json keeps of the chat template beside the tokenizer.json that `name` names, {} where there is none.

    'chat_template'; 'template_tokens'; 'chat_date', where it is not CHAT_DATE; 'stop_token', the id that ends a turn of the
    assistant: the special token that the template puts there, or else eos_token. Raises ConfigError for files that cannot be
    used.
    """
    if not (meta := read_template(name)):
        return {}
    if date != CHAT_DATE:
        meta['chat_date'] = date
    ids, pattern = special_tokens(tokenizer_json)
    turns = [{'role': role, 'content': f'word{i}'} for i, role in enumerate(('user', 'assistant'))]
    end = pattern.search(render(meta, turns, False).rpartition('word1')[2])
    end = end[0].strip() if end else meta['template_tokens'].get('eos_token')
    if end not in ids:
        why = f'the chat template of {name} ends no turn, and eos_token={end} is no token'
        raise ConfigError(f'{why}; take --chat=False.')
    return meta | {'stop_token': ids[end]}


def chat_tokens(meta, messages):
    """Ids (list of int) of a conversation [{'role', 'content'}, ..] under the chat template of a dataset's meta.json, up to
    where the assistant is to speak. The document token opens it, once, whether the template writes it or not.

    No content becomes a special token: BREAK, which no text holds, goes between the characters of whatever spells one before
    the template runs. What is found afterwards is the template's, the text between is encoded as ordinary text without BREAK.
    Raises ConfigError for a conversation that the template refuses.
    """
    ids, pattern = special_tokens(meta['tokenizer_json'])
    said = [m | {'content': pattern.sub(lambda found: BREAK.join([*found[0], '']), m['content'])} for m in messages]
    text, tokens, start = render(meta, said), [], 0
    for found in pattern.finditer(text):
        tokens += [*encode(meta, text[start : found.start()].replace(BREAK, '')), ids[found[0].strip()]]
        start = found.end()
    tokens += encode(meta, text[start:].replace(BREAK, ''))
    return tokens if tokens[:1] == [meta['document_token']] else [meta['document_token'], *tokens]


# ---------------------------------------------------------------------------------------------------------------------------
# Folders


def ending(path):
    """The ending of a file's name, like .txt; of a packed file both, like .txt.gz."""
    name, last = os.path.splitext(path)
    return os.path.splitext(name)[1] + last if last in PACKED else last


def unpacked(path, f):
    """The file object `f` of the file at `path`, or one that unpacks it if the name ends in .gz or .zst."""
    if path.endswith('.gz'):
        return gzip.open(f)
    return io.BufferedReader(extra('pyarrow').CompressedInputStream(f, 'zstd')) if path.endswith('.zst') else f


def file_sha256(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def settings_of(config, *left_out):
    """The settings that decide what a dataset holds, for its meta.json. A key that datasets made before lack is left out at
    its default, so that they stay what is asked for."""
    later = {'text_key': 'text', 'chat_date': CHAT_DATE}
    left_out += ('out', 'overwrite', *(name for name, default in later.items() if getattr(config, name, default) == default))
    return {name: value for name, value in asdict(config).items() if name not in left_out}


def source_names(source, default):
    """What meta.json says of the sources: names without the folders of one machine; `default` where none is named."""
    return ', '.join(os.path.basename(os.path.normpath(s.strip())) for s in source.split(',') if s.strip()) or default


def smallest(digests, fraction):
    """The digests that make val: the smallest `fraction` of the distinct ones, at least one, and one at least stays out."""
    distinct = sorted(set(digests))
    return set(distinct[: min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)])


def is_ready(out, overwrite, wanted):
    """True if the folder `out` holds the dataset described by `wanted` (part of its meta.json), False if it may be written.

    Raises ConfigError when something else is there and `overwrite` is off.
    """
    if os.path.exists(out) and not os.path.isdir(out):
        raise ConfigError(f'out={out} is a file; name a folder.')
    names = os.listdir(out) if os.path.isdir(out) else []
    foreign = [name for name in names if not PIECES.fullmatch(name)]
    if foreign and not {'meta.json', 'unfinished.json'} & {*names}:
        raise ConfigError(f'out={out} holds no dataset but other files, like {foreign[0]}; name a folder of its own.')
    if overwrite or all(PIECES.fullmatch(name) and not name.endswith('.json') for name in names):  # a killed run's
        return False
    with explaining(f'out={out} holds an unfinished or damaged dataset', 'choose another out, or --overwrite=True'):
        meta = json.loads(Path(out, 'meta.json').read_text('utf-8'))
        if any(meta.get(k) != v for k, v in wanted.items()):
            raise ConfigError(f'out={out} holds a dataset made with other settings; choose another out, or --overwrite=True.')
        ending = 'bin' if meta['kind'] == 'text' else 'npz'
        files = {f'{name}.jsonl': digest for name, digest in meta.get('jsonl_sha256', {}).items()}
        for split, about in meta['splits'].items():
            files |= {f'{name}.{ending}': part['sha256'] for name, part in shard_names(split, about)}
        if damaged := [name for name, digest in files.items() if file_sha256(os.path.join(out, name)) != digest]:
            raise ValueError(f'{damaged[0]} has changed')
    print(f'{out} already holds this dataset; --overwrite=True makes it again.')
    return True


def save_split(work, meta, name, arrays, counts):
    """Writes the arrays of a task's split into the folder `work`, and into meta what there is: `counts`, the checksum, and
    waste, the share of its tokens that is padding."""
    np.savez(f'{work}/{name}.npz', **arrays)
    waste = 1 - int(arrays['lengths'].sum()) / arrays['tokens'].size
    meta['longest'][name] = arrays['tokens'].shape[1]
    meta['splits'][name] = counts | {'waste': round(waste, 4), 'sha256': file_sha256(f'{work}/{name}.npz')}


def write_json(path, value):
    """Writes a file that is whole at any moment."""
    with open(path + '.tmp', 'w', encoding='utf-8') as f:
        json.dump(value, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + '.tmp', path)


def publish(work, out, meta):
    """Moves the finished files of the folder `work` to `out`; killed at any moment, it leaves no meta.json or a true one."""
    os.makedirs(out, exist_ok=True)
    clear(out)  # meta.json goes first ...
    for name in os.listdir(work):
        os.replace(os.path.join(work, name), os.path.join(out, name))
    write_json(os.path.join(out, 'meta.json'), meta)  # ... and comes last
    announce(out, meta)


def clear(out):
    """Removes the dataset in `out`, meta.json first, and leaves other files."""
    for name in sorted(os.listdir(out), key=lambda name: name != 'meta.json'):
        if PIECES.fullmatch(name):
            os.remove(os.path.join(out, name))


def announce(out, meta):
    for name, split in meta['splits'].items():
        waste = f'  {split["waste"]:>6.1%} padding' if 'waste' in split else ''
        print(f'{name:<5}  ' + '  '.join(f'{v:>11,} {k}' for k, v in split.items() if isinstance(v, int)) + waste)
    print(f'wrote {out}')


def shard_names(split, about):
    """[(file name without its ending, entry)] of the files of a split, by its entry in meta.json; names are never read."""
    return [(f'{split}-{i:05}', shard) for i, shard in enumerate(about['shards'])] if 'shards' in about else [(split, about)]


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
    tokenizer: str = key('bytes', 'bytes, a tiktoken encoding such as gpt2, or a tokenizer.json or its folder')
    val_fraction: float = key(0.05, 'share of the documents that goes to val; of a single one its end', bounds=SHARE)
    max_lost: float = key(0.1, 'share of the documents that may be kept out because they cannot be read', bounds=(0, 1))
    out: str = key('data/stdlib', 'the folder to write')
    overwrite: bool = key(False, 'replace what `out` holds')

    def check(self):
        if not self.out:
            raise ConfigError("out='' names no folder; write it like out=data/stdlib.")


def folders_below(root, enters):
    """Yields (folder, names of its files) of `root` and of what is below it, the folders of links last, each folder once.
    `enters` says of a path whether to go there."""
    waiting, seen = deque([root]), set()

    def stop(error):
        raise error

    while waiting:
        for folder, below, names in os.walk(waiting.popleft(), onerror=stop):
            if (real := os.path.realpath(folder)) in seen:
                below.clear()
                continue
            seen.add(real)
            below[:] = sorted(b for b in below if enters(os.path.join(folder, b)))
            waiting.extend(os.path.join(folder, b) for b in below if os.path.islink(os.path.join(folder, b)))
            yield folder, names


def paths_like(pattern):
    """Sorted paths that match a pattern; its ** is any number of folders, each entered once, where glob takes 2^40
    ways through two links to a folder above."""
    start, *rest = re.split(r'(?:^|(?<=/))\*\*(?:/|$)', pattern, maxsplit=1)
    if rest in ([], ['']):
        return sorted(glob.glob(start or '.') if rest else glob.glob(pattern))
    roots = [root for root in glob.glob(start or '.') if os.path.isdir(root)]
    folders = (folder for root in roots for folder, _ in folders_below(root, lambda f: os.path.basename(f)[0] != '.'))
    return sorted(path for folder in folders for path in paths_like(os.path.join(glob.escape(folder), *rest)))


def find_files(config):
    """Paths of the documents, sorted by their path below the source that holds them.

    Folders are searched to the bottom, those of links too, apart from hidden files and `out` itself. Without a source: the
    running interpreter's own library, except STDLIB_LEAVES_OUT, what is a link to a folder, and the build record
    _sysconfigdata*, which names folders of one machine. What is passed over is counted in a line.
    Raises ConfigError for a source that is not there, and for a link that leads nowhere.
    """
    stdlib, out, passed = not config.source, os.path.realpath(config.out), Counter()
    endings = tuple('.' + e.strip().lstrip('.') for e in (config.extensions or '.py' * stdlib).split(',') if e.strip())
    found = {}  # (real folder, name) -> (what to sort by, path); a file reached twice is one document

    def add(path, name):
        found.setdefault((os.path.realpath(os.path.dirname(path)), os.path.basename(path)), (name, os.path.abspath(path)))

    def enters(folder):
        name = os.path.basename(folder)
        if stdlib:
            return name[0] != '.' and name not in STDLIB_LEAVES_OUT and not os.path.islink(folder)
        passed['hidden folders'] += name[0] == '.'
        return name[0] != '.' and os.path.realpath(folder) != out

    for source in [sysconfig.get_path('stdlib')] if stdlib else filter(None, map(str.strip, config.source.split(','))):
        source = os.path.expanduser(source)
        matches = [source] if os.path.exists(source) else paths_like(source)
        if not matches:
            path = Path(source)
            close = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob('*')], n=1)
            hint = f'did you mean {path.parent / close[0]}?' if close else 'name a file, a folder or a pattern.'
            raise ConfigError(f'source={source} matches no file; {hint}')
        for root in matches:
            if os.path.isfile(root):
                add(root, os.path.basename(root))
            for folder, names in folders_below(root, enters) if os.path.isdir(root) else ():
                for path in (os.path.join(folder, name) for name in names):
                    name = os.path.basename(path)
                    if name[0] == '.' or stdlib and name.startswith('_sysconfigdata'):
                        passed['hidden files'] += 1
                    elif not os.path.exists(path) and not stdlib:
                        raise ConfigError(f'{path} is a link that leads nowhere; mend or remove it.')
                    elif not name.endswith(endings or '') or not os.path.isfile(path):
                        passed[ending(name) or 'without an ending'] += 1
                    else:
                        add(path, os.path.relpath(path, root))
    if passed.total() and not stdlib:
        kinds = ', '.join(f'{n:,} {kind}' for kind, n in passed.most_common() if n)
        print(f'source={config.source}: passed over {kinds}')
    return [path for _, path in sorted(found.values(), key=lambda at: at[0])]


class KeptOut:
    """Documents that a dataset leaves out: `found` is {why: {'count', 'first': [[file, entry], ..]}}, NAMED at most."""

    NAMED = 20

    def __init__(self, found):
        self.found = found

    def add(self, why, file, entry):
        about = self.found.setdefault(why, {'count': 0, 'first': []})
        about['count'] += 1
        about['first'] += [[os.path.basename(file), entry]] * (len(about['first']) < self.NAMED)

    @property
    def lost(self):
        """How many have a text that cannot be kept."""
        return sum(about['count'] for why, about in self.found.items() if why != EMPTY)

    def __str__(self):
        def places(about):
            named = [f'{file}, entry {entry}' for file, entry in about['first']]
            return '; '.join(named + ['...'] * (about['count'] > len(named)))

        return ', '.join(f'{about["count"]:,} {why} ({places(about)})' for why, about in self.found.items())

    def check(self, documents, most):
        """ConfigError where more than the share `most` of so many documents, these among them, is lost."""
        if self.lost > most * documents:
            why = f'{self.lost:,} of {documents:,} documents cannot be kept, above max_lost={most:g}: {self}'
            raise ConfigError(f'{why}; repair them, take a tokenizer of bytes such as gpt2, or raise --max_lost.')


def cut_of(size, fraction):
    """Bytes of the part for train of a single document of `size` bytes, before its last `fraction`."""
    return size - min(max(round(fraction * size), 1), size - 1)


def characters_up_to(content, position):
    """The last position up to `position` in UTF-8 bytes where a character begins."""
    position = min(position, len(content))
    while position < len(content) and content[position] & 0xC0 == 0x80:
        position -= 1
    return position


def make_text(_, config):
    """Tokens of files, one document per file, each opened by the document token, in train.bin and val.bin.

    The documents whose content has the smallest sha256 go to val: val_fraction of the distinct ones, at least one. So a split
    depends on the set of documents alone, and copies of one document never end up on both sides. Where all are copies of one,
    its last val_fraction goes to val. A document that the tokenizer does not give back is kept out. Memory: the largest file.
    """
    about = source_names(config.source, f'Python standard library {platform.python_version()}')
    settings = settings_of(config, 'max_lost')
    wanted = {'kind': 'text', 'source': about, 'settings': settings} | tokenizer_meta(config.tokenizer)
    if is_ready(config.out, config.overwrite, wanted):
        return

    documents, empty, binary, files = {}, 0, [], find_files(config)  # path -> sha256 of its content
    for path in tqdm(files, desc='reading', unit='file', disable=None):
        content = Path(path).read_bytes()
        try:
            content.decode('utf-8')
        except UnicodeDecodeError:
            binary.append(path)
            continue
        empty += not content
        if content:
            documents[path] = hashlib.sha256(content).digest()
    if binary or empty:
        names = ', '.join(os.path.basename(p) for p in binary[:3]) + (', ...' if len(binary) > 3 else '')
        print(f'skipped {len(binary)} files that are not UTF-8 text{names and f" ({names})"} and {empty} empty files')
    single, cut, kept_out = len(set(documents.values())) == 1, 0, KeptOut({})
    if single:
        content = Path(next(iter(documents))).read_bytes()
        cut = characters_up_to(content, cut_of(len(content), config.val_fraction))
    if not documents or single and not 0 < cut < len(content):
        found = f'source={config.source or about}, extensions={config.extensions or "all"} (files found: {len(files)})'
        raise ConfigError(f'{found} holds no text that has a part for train and one for val; name more.')
    in_val = smallest(documents.values(), config.val_fraction)

    splits = {name: {'tokens': 0, 'documents': 0} for name in ('train', 'val')}
    with work_folder(config.out) as work:
        for path, digest in tqdm(documents.items(), desc='writing', unit='file', disable=None):
            content = Path(path).read_bytes()
            if hashlib.sha256(content).digest() != digest:
                raise ConfigError(f'{path} changed while it was being read; start again when it is at rest.')
            one = {'val' if digest in in_val else 'train': content}
            for name, part in ({'train': content[:cut], 'val': content[cut:]} if single else one).items():
                try:
                    tokens = tokens_of(wanted, part)
                except LossyError:
                    kept_out.add(LOSSY, path, 0)
                    continue
                with open(f'{work}/{name}.bin', 'ab') as f:
                    f.write(tokens)
                splits[name]['tokens'] += len(tokens)
                splits[name]['documents'] += 1
        if kept_out.found:
            kept_out.check(len(documents), config.max_lost)
            print(f'kept out {kept_out}')
        for name, split in splits.items():
            if not split['documents']:
                raise ConfigError(f'no document is left for {name}; name more, or take another val_fraction.')
            split['sha256'] = file_sha256(f'{work}/{name}.bin')
        publish(work, config.out, wanted | {'splits': splits})


# ---------------------------------------------------------------------------------------------------------------------------
# FineWeb-Edu, or any corpus of parquet, jsonl and txt files


@dataclass
class FineWebEduConfig:
    subset: str = key('10BT', "the hub's sample of 10 or 100 billion tokens", ('10BT', '100BT'))
    source: str = key('', 'parquet, jsonl, json or txt files, folders or patterns joined by commas, instead of the hub')
    text_key: str = key('text', 'the field of a row, or column of a parquet file, that holds the text')
    tokenizer: str = key('gpt2', 'bytes, a tiktoken encoding such as gpt2, or a tokenizer.json or its folder')
    workers: int = key(0, 'processes that tokenise; 0: one a core', bounds=(0, 1024))
    shard_tokens: int = key(100_000_000, 'tokens of a shard; the last has the rest', bounds=(1000, 2**33))
    limit_tokens: int = key(0, 'take documents as long as they fit into so many tokens; 0: all', bounds=(0, 2**62))
    val_fraction: float = key(
        0.001, 'share of the documents that goes to val; a single txt file is cut, at 5% by default', bounds=SHARE
    )
    max_lost: float = key(0.1, 'share of the documents that may be kept out because they cannot be read', bounds=(0, 1))
    out: str = key('data/fineweb_edu', 'the folder to write')
    overwrite: bool = key(False, 'replace what `out` holds, unfinished work too')

    check = TextConfig.check


def list_corpus(config):
    """[[path, size]] of the files of the corpus in their order: local ones in bytes, those of the hub as 1 each.

    Raises ConfigError for a missing, an empty or another kind of file, and for a folder that would need its own code.
    """
    if not config.source:
        with explaining('the hub could not be reached', '--source=FILES takes files on this disk'):
            builder = extra('datasets').load_dataset_builder('HuggingFaceFW/fineweb-edu', f'sample-{config.subset}')
            return [[str(path), 1] for path in builder.config.data_files['train']]  # each names its revision
    files = find_files(TextConfig(source=config.source, extensions=','.join([*CORPUS, 'py']), out=config.out))
    refuse_scripts(files, CORPUS)
    for path in files:
        if ending(path) not in (*CORPUS, '.json', '.json.gz', '.json.zst'):
            raise ConfigError(f'{path} is no parquet, jsonl or txt file, nor json, nor one packed by gzip or zstd; convert it.')
        if not os.path.getsize(path):
            raise ConfigError(f'{path} is empty; complete or remove it.')
    if not files:
        why = f'source={config.source} holds no parquet, jsonl or txt file'
        raise ConfigError(f'{why}; name a folder or pattern that does, of json files a pattern.')
    return [[path, os.path.getsize(path)] for path in files]


def refuse_scripts(files, kinds):
    """ConfigError for the first of the files that is Python code, with a pattern for what of the kinds is beside it."""
    for path in files:
        if path.endswith('.py'):
            folder = os.path.dirname(path)
            data = next((f for f in files if f.startswith(folder + os.sep) and ending(f) in kinds), f'{folder}/x{kinds[0]}')
            pattern = f'{os.path.dirname(data)}/*{ending(data)}'
            raise ConfigError(f'{path} is a script, and no code of a dataset is run; name its data, like --source={pattern}.')


def read_parquet(table, text_key, skip):
    """As read_json(), of the rows of a parquet file."""
    starts = np.cumsum([0, *(table.metadata.row_group(i).num_rows for i in range(table.num_row_groups))])
    group = np.searchsorted(starts, skip, 'right') - 1  # where to begin
    contents = (  # of one group at a time; asked for together, all would stay in memory
        row.as_py()
        for i in range(group, table.num_row_groups)
        for batch in table.iter_batches(256, [i], [text_key])
        for row in batch[text_key].cast('large_binary')
    )
    for content in itertools.islice(contents, skip - starts[group], None):
        yield (b'', NULL) if content is None else (content, '' if content else EMPTY)


def read_json(f, text_key, skip):
    """Yields (text in bytes, why it is kept out, if it is) from entry `skip` on of a file of JSON objects, one a line (a blank
    one is an entry without a text), or of one list of them."""
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


def read_txt(path, f, fraction):
    """Yields (sha256, whether it opens here, piece in bytes, '') of a document in pieces. With a fraction that share at its end
    is a document of its own, with digests that put it into val and what is before into train."""
    sha, size, decoder, done = hashlib.sha256(), 0, codecs.getincrementaldecoder('utf-8')(), 0
    with open(path, 'rb') as packed:
        whole = unpacked(path, packed)
        while block := whole.read(PIECE_LENGTH):
            sha.update(block)
            size += len(block)
    cut, opens = cut_of(size, fraction) if fraction else size, [True, True]
    digests = (b'\xff' * 32, bytes(32)) if fraction else (sha.digest(), sha.digest())
    while block := f.read(PIECE_LENGTH):
        content = decoder.decode(block).encode()
        at = characters_up_to(content, max(cut - done, 0))
        for i, part in enumerate((content[:at], content[at:])):
            if part:
                yield digests[i], opens[i], part, ''
                opens[i] = False
        done += len(content)
    decoder.decode(b'', final=True)


def read_corpus(path, skip, text_key, fraction):
    """Yields (share of the file read, [number, digest, opens, content, why]) from entry `skip` on: number of the entry, sha256
    of its document, whether it opens that, content in bytes, and why it is kept out, if it is.

    An entry is a document: a row of a parquet file, a line of a jsonl file, an object of a json file, or a whole txt file,
    which comes in pieces, an entry each. Raises ConfigError where the file cannot be read or is not UTF-8.
    """
    number, remote, kind = skip, '://' in path, ending(path).removesuffix('.gz').removesuffix('.zst')
    try:
        with (extra('datasets.utils.file_utils').xopen if remote else open)(path, 'rb') as packed:  # xopen tries again
            size = packed.seek(0, os.SEEK_END)
            packed.seek(0)
            f = unpacked(path, packed)
            if kind == '.txt':
                entries = itertools.islice(read_txt(path, f, fraction), skip, None)
            else:
                if kind == '.parquet':
                    table = extra('pyarrow.parquet').ParquetFile(f)
                    size = table.metadata.num_rows
                    rows = read_parquet(table, text_key, skip)
                else:
                    rows = read_json(f, text_key, skip)
                entries = ((hashlib.sha256(content).digest(), True, content, why) for content, why in rows)
            for digest, opens, content, why in entries:
                content.decode()
                yield (number if kind == '.parquet' else packed.tell()) / size, [number, digest, opens, content, why]
                number += 1
    except (ConfigError, MemoryError):
        raise
    except Exception as e:  # of a damaged file, or of the network
        hint = '; --text_key names another field' * isinstance(e, KeyError)
        raise ConfigError(f'{path} cannot be read at its entry {number} ({type(e).__name__}: {e}){hint}.') from None


def batches(files, position, config):
    """Yields (position after it, share of the corpus read, entries) of each batch behind `position`, which is
    [number of the file, entries of it read]. An entry is (number of its file, *entry as read_corpus has it)."""
    (begin, skip), entries, filled = position, [], 0
    before, total = sum(size for _, size in files[:begin]), sum(size for _, size in files)
    default = FineWebEduConfig.val_fraction  # of web pages; far too little of a single text
    fraction = TextConfig.val_fraction if config.val_fraction == default else config.val_fraction
    single = len(files) == 1 and '.txt' in ending(files[0][0])
    for number, (path, size) in enumerate(files[begin:], begin):
        for share, entry in read_corpus(path, skip, config.text_key, fraction * single):
            entries.append((number, *entry))
            filled, skip = filled + len(entry[3]), skip + 1
            if filled >= PIECE_LENGTH or len(entries) >= 2**14:
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
    """[((number of the file, of the entry), tokens, whether they open a document, its split, why it is kept out, if it is)] of
    the entries that are not blank; a text that is kept out has no tokens."""
    found, below = [], WORKER['val_fraction'] * 2**64
    for file, number, digest, opens, content, why in entries:
        if not content and not why:
            continue
        try:
            tokens = tokens_of(WORKER['meta'], content, opens)
        except LossyError:
            tokens, why = (), LOSSY
        found.append(((file, number), tokens, opens, 'val' if int.from_bytes(digest[:8], 'big') < below else 'train', why))
    return found


def tokenise_all(work, workers, *shared):
    """Yields (position, share, what tokenise() makes) of the batches `work` in their order, from `workers` processes."""
    if workers == 1:
        start_worker(*shared)
        yield from ((position, share, tokenise(entries)) for position, share, entries in work)
        return
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context('spawn'), start_worker, shared) as pool:
            begun = ((position, share, pool.submit(tokenise, entries)) for position, share, entries in work)
            waiting = deque(itertools.islice(begun, 3 * workers))  # that one long document does not hold up the others
            while waiting:
                position, share, future = waiting.popleft()
                yield position, share, future.result()
                waiting.extend(itertools.islice(begun, 1))
    except BrokenProcessPool:
        raise ConfigError('a process was killed, perhaps for its memory; start again with fewer --workers.') from None


class Shards:
    """The files of one split, NAME-00000.bin and so on, of `size` tokens each; `entries` [{'tokens', 'sha256'}] says what they
    hold, also after append(). What an interrupted run has written beyond is cut off; ConfigError where they are damaged."""

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
        """`tokens` are on the disk, and among the entries, from now on."""
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


def check_space(config, files, itemsize, there):
    """ConfigError unless the disk has room for all tokens of a corpus, `there` bytes of which it holds already."""
    if config.source:  # 3 bytes of text a token and 3 of text a packed byte: more tokens than there will be
        text = sum(size * (3 if path.endswith(('.parquet', *PACKED)) else 1) for path, size in files)
        tokens = text if config.tokenizer == 'bytes' else text / 3
    else:
        tokens = {'10BT': 10e9, '100BT': 100e9}[config.subset] * (4 if config.tokenizer == 'bytes' else 1)
    need = min(tokens, config.limit_tokens or math.inf) * itemsize - there
    folder = Path(config.out).absolute()
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    if free < need:
        why = f'out={config.out} needs about {need / 1e9:.3g} GB and its disk has {free / 1e9:.3g} GB free'
        raise ConfigError(f'{why}; choose another disk, or --limit_tokens={int((free + there) / itemsize * 0.9)}.')


def resume(config, path, wanted):
    """What unfinished.json at `path` records, or the same of no work; None where the dataset is finished. ConfigError unless
    the work can go on from there."""
    identity = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
    if os.path.exists(path) and os.path.exists(os.path.join(config.out, 'meta.json')):  # killed at its very last step
        os.remove(path)
    if config.overwrite or not os.path.exists(path):
        if is_ready(config.out, config.overwrite, wanted):
            return None
        nothing = {'documents': {'train': 0, 'val': 0}, 'shards': {'train': [], 'val': []}}
        return (
            {'identity': identity, 'files': list_corpus(config), 'position': [0, 0]} | nothing | {'kept_out': {}, 'gap': None}
        )
    with explaining(f'{path} cannot be read', '--overwrite=True starts over'):
        state = json.loads(Path(path).read_text('utf-8'))
        if state['identity'] != identity:
            raise ConfigError(f'out={config.out} holds unfinished work with other settings; name another, or --overwrite=True.')
        if config.source and state['files'] != list_corpus(config):
            raise ConfigError(f'source={config.source} has changed since this work began; --overwrite=True starts over.')
    return {'kept_out': {}, 'gap': None} | state


def make_fineweb_edu(_, config):
    """Shards of a corpus, train-00000.bin and val-00000.bin and so on, in the order of the source; documents may cross shards.

    Until all is done, unfinished.json records what is safely written and the position in the source behind it, and the same
    command goes on from there: with any number of workers and restarts it writes the same bytes. Memory: some MB a process,
    and the largest document.

    Documents without a text, or that the tokenizer does not give back, are kept out and named at the end; of a txt file in
    several pieces the piece, and what follows it is another document. More than max_lost of them end the work.
    """
    meta = tokenizer_meta(config.tokenizer)
    about = source_names(config.source, f'HuggingFaceFW/fineweb-edu sample-{config.subset}')
    wanted = {'kind': 'text', 'source': about, 'settings': settings_of(config, 'workers', 'max_lost')} | meta
    path = os.path.join(config.out, 'unfinished.json')
    if not (state := resume(config, path, wanted)):
        return
    files, documents, dtype = state['files'], state['documents'], np.dtype(meta['dtype'])
    kept_out, bound = KeptOut(state['kept_out']), np.array([meta['document_token']], dtype)
    total = sum(shard['tokens'] for entries in state['shards'].values() for shard in entries)
    check_space(config, files, dtype.itemsize, total * dtype.itemsize)
    os.makedirs(config.out, exist_ok=True)
    if total:
        print(f'{config.out} holds {total:,} tokens of this already; going on from there.')
    else:
        clear(config.out)
    shards = {name: Shards(config.out, name, config.shard_tokens, dtype, of) for name, of in state['shards'].items()}
    unwritten, written, limit = {name: [] for name in shards}, total, config.limit_tokens or math.inf
    workers = config.workers or os.cpu_count() or 1
    work = tokenise_all(batches(files, state['position'], config), workers, meta, config.val_fraction)
    with contextlib.closing(work), tqdm(initial=total, unit=' tokens', unit_scale=True, disable=None) as progress:
        for position, share, found in work:
            for where, tokens, opens, name, why in found:
                if why:
                    kept_out.add(why, files[where[0]][0], where[1])
                    state['gap'] = [where[0], where[1] + 1]
                    continue
                if not opens and state['gap'] == [*where]:
                    opens, tokens = True, np.concatenate([bound, tokens])
                if total + len(tokens) > limit:
                    position = [len(files), 0]
                    break
                unwritten[name].append(tokens)
                documents[name] += opens
                total += len(tokens)
            kept_out.check(max(sum(documents.values()) + kept_out.lost, 1000), config.max_lost)
            progress.total = max(total, min(int(total / max(share, 1e-9)), limit))
            progress.update(total - progress.n)
            ended = position[0] == len(files)
            if ended or total - written >= min(config.shard_tokens, 2**20):
                for name, parts in unwritten.items():
                    shards[name].append(np.concatenate([np.empty(0, dtype), *parts]))
                    parts.clear()
                write_json(path, state | {'position': position})
                written = total
            if ended:
                break
    splits = {}
    if kept_out.found:
        kept_out.check(sum(documents.values()) + kept_out.lost, config.max_lost)
        print(f'kept out {kept_out}')
    for name, entries in state['shards'].items():
        if not entries:
            clear(config.out)
            raise ConfigError(f'none of the {total:,} tokens fell into {name}; take more text or another val_fraction.')
        digest = hashlib.sha256(''.join(shard['sha256'] for shard in entries).encode()).hexdigest()
        tokens = sum(shard['tokens'] for shard in entries)
        splits[name] = {'tokens': tokens, 'documents': documents[name], 'sha256': digest, 'shards': entries}
    write_json(f'{config.out}/meta.json', wanted | {'splits': splits})
    os.remove(path)
    announce(config.out, {'splits': splits})


# ---------------------------------------------------------------------------------------------------------------------------
# S5 (T2MLR's S5-retrieval task)


@dataclass
class S5Config:
    group: int = key(5, 'n of the permutation group S_n', bounds=(2, 5))
    actions: str = key('all', 'all elements, or generators: adjacent transpositions and the n-cycle', ('all', 'generators'))
    steps: str = key('1-8', 'actions per example of train and val: a number or a range')
    test_steps: str = key('', 'actions per example of test, which may be more; empty: as in training')
    length_bias: float = key(0.0, 'a length of s steps is drawn with weight s^-length_bias; 0: evenly', bounds=(0, 10))
    retrieval: bool = key(True, 'a dictionary comes first, and every action asks for values in it')
    retrieve_by: str = key('action', 'what is looked up: the action, or the state after it (all are keys)', ('action', 'state'))
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
    why = 'an example has 1 to 1000 steps'  # more take long to count
    train = number_range('steps', config.steps, 1, 1_000, why)
    test = number_range('test_steps', config.test_steps, 1, 1_000, why) if config.test_steps else train
    supply, taken, shares = {s: count_examples(config, s) for s in {*train, *test}}, Counter(), {}
    for split, lengths in (('test', test), ('val', train), ('train', train)):
        left = {s: (supply[s] + 1) // 4 if s in train and split != 'train' else supply[s] - taken[s] for s in lengths}
        wanted, most = getattr(config, f'n_{split}'), min(sum(left.values()), 10**9)  # no n_ is larger, and digits are limited
        why = f'with {lengths[0]} to {lengths[-1]} steps there are {most} different examples for {split}, with more more'
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
            # Few of the examples drawn are new when a length nears its end; a block bounds the memory.
            count = min(math.ceil(len(places) / fresh_rate), max(1, 2**20 // longest))
            rows, answers = draw_examples(config, rng, count, s)
            rows = rows.astype(tokens.dtype)
            fresh = {text: i for i, row in enumerate(rows) if (text := row.tobytes()) not in seen[s]}
            fresh = dict(itertools.islice(fresh.items(), len(places)))
            seen[s].update(fresh)
            here, places = np.split(places, [len(fresh)])
            length, chosen = rows.shape[1], [*fresh.values()]
            tokens[here, :length], targets[here, :length] = rows[chosen], answers[chosen]
            fresh_rate = max(len(fresh), 1) / count
            progress.update(len(fresh))
    there = tokens != pad
    recur_mask = there & (np.logical_or.accumulate(tokens == bar, axis=1) | config.recur_on_prompt)
    return {'tokens': tokens, 'targets': targets, 'recur_mask': recur_mask, 'lengths': there.sum(axis=1), 'steps': steps}


def make_s5(task, config):
    """Track a permutation while looking up values: train.npz, val.npz and test.npz of arrays

    tokens (N, T) padded, targets (N, T) with -1 where nothing is scored, recur_mask (N, T) True where memory is read,
    lengths (N,) in tokens and steps (N,) in actions; T is the longest example of the split.
    Vocabulary: n! elements, then n_values values, delimiter, slot, pad; it is the same with and without retrieval.
    """
    out = config.out or f'data/s{config.group}'
    wanted = {'kind': 'task', 'task': task, 'settings': settings_of(config)}
    if is_ready(out, config.overwrite, wanted):
        return
    names = ['p' + ''.join(map(str, p)) for p in itertools.permutations(range(config.group))]
    elements = len(names)
    names += [f'v{i}' for i in range(config.n_values)] + ['|', '_', '.']
    scores = {'state': [0, elements]} | ({'retrieval': [elements, elements + config.n_values]} if config.retrieval else {})
    vocabulary = {'tokenizer': 'names', 'names': names, 'vocab_size': len(names), 'pad_token': len(names) - 1}
    seen, shares = defaultdict(set), plan(config)
    longest, splits = (dict.fromkeys(('train', 'val', 'test')) for _ in range(2))
    meta = wanted | vocabulary | {'aligned': True, 'longest': longest, 'scores': scores, 'splits': splits}
    total = config.n_train + config.n_val + config.n_test
    with work_folder(out) as work, tqdm(total=total, desc='drawing', unit=' examples', disable=None) as progress:
        for index, (name, share) in enumerate(shares.items()):  # test and val first: they stay the same for any n_train
            arrays = draw_split(config, index, {s: k for s, k in share.items() if k}, seen, progress)
            save_split(work, meta, name, arrays, {'examples': len(arrays['steps'])})
        progress.close()
        publish(work, out, meta)


# ---------------------------------------------------------------------------------------------------------------------------
# Tasks made of text: a prompt, then a response that ends in `#### answer`


@dataclass
class TextTaskConfig:
    """The settings that every task made of text has."""

    tokenizer: str = key('bytes', 'bytes, a tiktoken encoding such as gpt2, or a tokenizer.json or its folder')
    chat: bool = key(True, "ask in the chat template of the tokenizer's folder, where there is one")
    chat_date: str = key(CHAT_DATE, 'what a chat template that asks for the date takes for today')
    longest: int = key(0, 'tokens that an example may have; 0: as many as it needs', bounds=(0, 10**6))
    drop_longer: bool = key(False, 'leave out longer examples instead of refusing them')
    pack: int = key(0, 'tokens of a row of train, which several examples share; 0: a row each', bounds=(0, 10**6))
    score_prompt: bool = key(False, 'train on the prompt too')
    recur_on_prompt: bool = key(False, 'read memory on the prompt too')
    out: str = key('', 'the folder to write; empty: data/ and the name of the dataset')
    overwrite: bool = key(False, 'replace what `out` holds')

    def check(self):
        if self.drop_longer and not self.longest:
            raise ConfigError('drop_longer=True needs a limit; write it with longest=2048, or leave it out.')
        try:
            datetime.date.fromisoformat(self.chat_date)
        except ValueError:
            raise ConfigError(f'chat_date={self.chat_date} is no date; write it like chat_date={CHAT_DATE}.') from None


def make_task(task, config):
    """A task made of text: its examples, drawn from a seed or read, as write_task() writes them."""
    out, settings = config.out or f'data/{task}', settings_of(config, 'source')
    wanted = {'kind': 'task', 'task': task, 'settings': settings}
    if isinstance(config, QuestionConfig):
        wanted['source'] = source_names(config.source, HUB[task][0])
    wanted |= tokenizer_meta(config.tokenizer)
    if config.chat and 'tokenizer_json' in wanted:
        wanted |= chat_meta(config.tokenizer, wanted['tokenizer_json'], config.chat_date)
    if not is_ready(out, config.overwrite, wanted):
        examples = read_questions(task, config) if isinstance(config, QuestionConfig) else draw_task(config)
        write_task(config, out, wanted, examples)


def encode_example(meta, example):
    """(tokens of an example as an array, how many are its prompt): the document token and the prompt, or the conversation that
    asks it; then the response and the token that ends it."""
    question, end = example['prompt'], meta.get('stop_token', meta['document_token'])
    if 'chat_template' in meta:
        prompt = np.array(chat_tokens(meta, [{'role': 'user', 'content': question.strip()}]), meta['dtype'])
        if question.strip().encode() not in decode(meta, prompt):
            raise ConfigError(f'the chat template or its tokenizer changes the text {question[:40]!r}...; take --chat=False.')
    else:
        prompt = tokens_of(meta, question.encode())
    response = tokens_of(meta, example['response'].encode(), opens=False)
    return np.concatenate([prompt, response, np.array([end], meta['dtype'])]), len(prompt)


def pack_rows(lengths, size):
    """The examples (numbers) of each row of `size` tokens, by first fit decreasing: the longest first, each into the first row
    that has room for it; of equals the earlier first."""
    rows, room = [], np.full(len(lengths), size, np.int32)
    for i in np.argsort(-lengths, kind='stable').tolist():
        row = int(np.argmax(room[: len(rows) + 1] >= lengths[i]))  # behind the last row there is an empty one
        rows += [[]] if row == len(rows) else []
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def write_task(config, out, meta, examples):
    """Writes {split: [{'prompt', 'response', 'answer', 'depth'}]} as SPLIT.npz and, as it is, SPLIT.jsonl, one a line.

    A row of tokens (N, T) is: document token, prompt, response, document token, padding; with a chat template the conversation,
    response, stop_token, padding. Targets (N, T) are those of the next token (meta: aligned False; s5 has True): target i is
    token i + 1 if that is one of the response or the token that ends it, else -1; with score_prompt the prompt's count too.
    recur_mask (N, T) is True on the response, with recur_on_prompt on the prompt. lengths (N,) in tokens without padding;
    prompt_lengths (N,) up to the first token of the response, which is what to decode from; steps (N,) is the depth. Examples
    above `longest` tokens are left out with drop_longer; otherwise they are a ConfigError, before anything is written.

    With `pack` a row of train holds several examples, each as it would stand alone, and T is `pack`. Then N counts rows, meta
    says how many, and prompt_lengths and steps, which belong to one example, are left out.
    """
    bound, encoded = meta['document_token'], {}
    meta = meta | {'pad_token': bound, 'aligned': False, 'scores': {}, 'longest': {}, 'splits': {}, 'jsonl_sha256': {}}
    for name, of in examples.items():
        all_of = [(example, *encode_example(meta, example)) for example in of]
        lengths = np.array([len(ids) for _, ids, _ in all_of])
        fits = lengths <= (config.longest or math.inf)
        encoded[name] = list(itertools.compress(all_of, fits))
        if longer := len(of) - len(encoded[name]):
            if not config.drop_longer or longer == len(of):
                why = f'{longer} of the {len(of)} examples of {name} are above longest={config.longest} tokens'
                raise ConfigError(f'{why}; take longest={max(lengths)}, the longest, or drop_longer=True where some fit.')
            print(f'{name}: left out {longer} examples above {config.longest} tokens')
        if name == 'train' and 0 < config.pack < (most := max(lengths[fits])):
            raise ConfigError(f'pack={config.pack} is too short for an example of {most} tokens; take pack={most} or more.')
    with work_folder(out) as work:
        for name, of in encoded.items():
            lengths, packed = np.array([len(ids) for _, ids, _ in of]), config.pack and name == 'train'
            rows = pack_rows(lengths, config.pack) if packed else [[i] for i in range(len(of))]
            shape = len(rows), config.pack if packed else max(lengths)
            tokens, recur_mask = np.full(shape, bound, meta['dtype']), np.zeros(shape, dtype=bool)
            targets = np.full(shape, -1, dtype=np.int16 if meta['vocab_size'] <= 2**15 else np.int32)
            for row, members in enumerate(rows):
                start = 0
                for _, ids, prompt in (of[i] for i in members):
                    end, scored = start + len(ids), 0 if config.score_prompt else prompt - 1
                    tokens[row, start:end] = ids
                    targets[row, start + scored : end - 1] = ids[scored + 1 :]
                    recur_mask[row, start + (0 if config.recur_on_prompt else prompt) : end] = True
                    start = end
            arrays = {'tokens': tokens, 'targets': targets, 'recur_mask': recur_mask}
            arrays['lengths'] = np.array([lengths[members].sum() for members in rows])
            if not packed:
                arrays['prompt_lengths'] = np.array([prompt for _, _, prompt in of])
                arrays['steps'] = np.array([example['depth'] for example, _, _ in of])
            with open(f'{work}/{name}.jsonl', 'w', encoding='utf-8') as f:
                f.writelines(json.dumps(example, ensure_ascii=False) + '\n' for example, _, _ in of)
            save_split(work, meta, name, arrays, {'examples': len(of)} | ({'rows': len(rows)} if packed else {}))
            meta['jsonl_sha256'][name] = file_sha256(f'{work}/{name}.jsonl')
        publish(work, out, meta)


# ---------------------------------------------------------------------------------------------------------------------------
# Variable assignment and pathfinding, made from a seed


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

    test_depth: str = key('', 'the same in test, which may be more; empty: as in training')
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
    variables: int = key(8, 'in every example; those outside the chain are distractors, up to 26')
    values: str = key('0-99', 'the numbers that variables are given, a range')
    form: str = key('plain', 'how it is written: assignments, a word problem, or a Python program', ASSIGNMENTS)

    least = 0  # the variable asked for has a number of its own

    def check(self):
        super().check()
        least = self.deepest + 1
        within('variables', self.variables, least, 26, f'a chain of {least - 1} aliases has {least} of the 26 variables')
        number_range('values', self.values, 0, 10**8, 'numbers are 0 to 10^8')

    def draw(self, rng, depth):
        """Every statement gives a variable a number or an earlier variable; the last one of the chain is asked for.
        Distractors may be aliases of the chain's variables."""
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


def draw_task(config):
    """{split: examples} of a task made from a seed: every split spreads its examples evenly over its depths, and no prompt
    occurs twice. ConfigError when a thousand draws of a depth bring nothing new."""
    examples, seen = {'train': [], 'val': [], 'test': []}, set()
    total = config.n_train + config.n_val + config.n_test
    with tqdm(total=total, desc='drawing', unit=' examples', disable=None) as progress:
        for split in ('test', 'val', 'train'):  # test and val first: they stay the same for any n_train
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


# ---------------------------------------------------------------------------------------------------------------------------
# Questions and answers, from the hub or from files


COCONUT = 'https://raw.githubusercontent.com/facebookresearch/coconut/main/data/prosqa_'
HUB = {  # what `datasets` loads: plain files, no code of theirs
    'prosqa': ('json', {'data_files': {name: f'{COCONUT}{name}.json' for name in ('train', 'valid', 'test')}}),
    'gsm8k': ('openai/gsm8k', {'name': 'main'}),
    'gsm8k_aug': ('whyNLP/gsm8k-aug', {}),
    'hotpotqa': ('hotpotqa/hotpot_qa', {'name': 'distractor'}),
    'math500': ('HuggingFaceH4/MATH-500', {}),
}


@dataclass
class QuestionConfig(TextTaskConfig):
    source: str = key('', 'a jsonl, json or parquet file of the same format, a folder or pattern of them; empty: the hub')
    val_fraction: float = key(0.05, 'share of the examples that makes val, where only train or val is there', bounds=SHARE)


def read_rows(path):
    """The rows of a jsonl, json (a list) or parquet file, the first two perhaps packed; ConfigError for what is none."""
    remedy, kind = 'it should hold one JSON object a row', os.path.splitext(path.removesuffix('.gz').removesuffix('.zst'))[1]
    with explaining(f'{path} cannot be read', remedy):
        if kind == '.parquet':
            return extra('pyarrow.parquet').read_table(path).to_pylist()
        with open(path, 'rb') as packed:
            text = as_text(unpacked(path, packed).read())
        rows = json.loads(text or '[]') if kind == '.json' else []
        if not isinstance(rows, list):
            raise ValueError('it is not a list of objects')
    for number, line in enumerate(text.split('\n') if kind == '.jsonl' else (), start=1):
        with explaining(f'{path} cannot be read at line {number}', remedy):
            rows += [json.loads(line)] if line.strip() else []
    return rows


def read_splits(task, source):
    """{'train' | 'val' | 'test': [(where, row)]} of files, or of the hub, told apart by the words in their names; one without
    such a word is train."""
    if source:
        source = os.path.expanduser(source)
        found = [os.path.join(source, name) for name in os.listdir(source)] if os.path.isdir(source) else glob.glob(source)
        found = sorted([source] if os.path.isfile(source) else found)
        kinds = ('.parquet', *(kind + packed for kind in ('.jsonl', '.json') for packed in ('', *PACKED)))
        refuse_scripts(found, kinds)
        if missing := [path for path in found if not os.path.exists(path)]:
            raise ConfigError(f'{missing[0]} is a link that leads nowhere; mend or remove it.')
        names = {path: os.path.basename(path) for path in found}
        paths = [path for path in found if ending(path) in kinds and names[path][0] != '.' and os.path.isfile(path)]
        if not paths:
            raise ConfigError(f'source={source} is not there, or holds no jsonl, json or parquet file; name one that does.')
        if len(paths) < len(found):
            print(f'source={source}: passed over {", ".join(names[path] for path in found if path not in paths)}')
        parts = {path: read_rows(path) for path in paths}
    else:
        path, options = HUB[task]
        with explaining(f'{task} could not be loaded from the hub', 'try again with a network, or name local files by source'):
            parts = {f'{task}, {name}': rows for name, rows in extra('datasets').load_dataset(path, **options).items()}
    splits = {}
    for name, rows in parts.items():
        if not len(rows):
            raise ConfigError(f'{name} is empty; leave it out of the source.')
        words = {*re.split(r'[^a-z]+', os.path.basename(name).lower())}
        split = 'test' if 'test' in words else 'val' if words & {'val', 'valid', 'validation', 'dev'} else 'train'
        splits.setdefault(split, []).extend((f'{name}, example {i}', row) for i, row in enumerate(rows, start=1))
    return splits


def question_example(task, row):
    """A row of a question-answer dataset as an example; KeyError, TypeError or ValueError for a row of another form.

    Reasoning: gsm8k's lines without their <<calculator notes>>; the steps of gsm8k_aug and prosqa; hotpotqa's supporting
    sentences, after a prompt of all its paragraphs; math500's solution. depth: how many lines; math500: its level, 1 to 5.
    """
    question, answer = row['problem' if task == 'math500' else 'question'], row['answer']
    if not isinstance(question, str) or not isinstance(answer, str):
        raise TypeError('its question and answer should be texts')
    if task == 'gsm8k':
        reasoning, mark, answer = answer.rpartition('####')
        if not mark:
            raise ValueError("its answer has no '####'")
        lines = re.sub(r'<<[^<>]*>>', '', reasoning).split('\n')
    elif task == 'math500':
        lines = row['solution'].split('\n')
    elif task == 'hotpotqa':
        context, facts = row['context'], row['supporting_facts']  # the hub has columns where the original files have pairs
        context = list(zip(context['title'], context['sentences'], strict=True)) if isinstance(context, dict) else context
        facts = list(zip(facts['title'], facts['sent_id'], strict=True)) if isinstance(facts, dict) else facts
        paragraphs = dict(context)
        question = ''.join(f'{title}: {"".join(sentences).strip()}\n' for title, sentences in context) + question
        lines = [paragraphs[title][i] for title, i in facts if i < len(paragraphs[title])]  # some name one too many
    else:
        lines = row['steps']
        if not isinstance(lines, list):
            raise TypeError('its steps should be a list')
    question, answer, lines = question.strip(), answer.strip(), [' '.join(line.split()) for line in lines if line.strip()]
    if not question or not answer or '\n' in answer:
        raise ValueError('its question or answer is empty, or its answer has several lines')
    response = '\n'.join([*lines, f'#### {answer}'])
    (question + response).encode()  # half of a surrogate pair is no character
    depth = int(row['level']) if task == 'math500' else len(lines)
    return {'prompt': question + '\n', 'response': response, 'answer': answer, 'depth': depth}


def read_questions(task, config):
    """{split: examples} of a question-answer dataset as its source has them; test alone is for evaluation alone.

    Where only one of train and val is there, the prompts with the smallest sha256 make val. What a later split holds is left
    out of an earlier one, in the order train, val, test.
    """
    examples = {}
    for split, rows in read_splits(task, config.source).items():
        examples[split] = []
        for where, row in rows:
            with explaining(f'{where} is not of the form of {task}', 'name a source that is'):
                examples[split].append(question_example(task, row))
    if ('train' in examples) != ('val' in examples):
        pool = [(hashlib.sha256(e['prompt'].encode()).digest(), e) for e in examples.get('train') or examples['val']]
        in_val = smallest([digest for digest, _ in pool], config.val_fraction)
        for name in ('train', 'val'):
            examples[name] = [e for digest, e in pool if (digest in in_val) == (name == 'val')]
    examples, later = {name: examples[name] for name in ('train', 'val', 'test') if name in examples}, set()
    for name in reversed(examples):
        of = [e for e in examples[name] if e['prompt'] not in later]
        if copies := len(examples[name]) - len(of):
            print(f'{name}: left out {copies} examples that another split holds')
        if not of:
            raise ConfigError(f'the source of {task} has no example for {name} alone; train and val need different ones.')
        examples[name] = of
        later.update(e['prompt'] for e in of)
    return examples


# ---------------------------------------------------------------------------------------------------------------------------

SEEDED, QUESTIONS = 'any number of examples, no network', 'network, or local files'
DATASETS = {  # name: its settings, what makes it, and its line in the list
    'text': (TextConfig, make_text, 'your text files, or the Python standard library: 12 MB, no network'),
    'fineweb_edu': (FineWebEduConfig, make_fineweb_edu, 'web pages: 20 or 200 GB, network; or parquet, jsonl, txt files'),
    's5': (S5Config, make_s5, f'permutations to compose and values to look up: {SEEDED}'),
    'variable_assignment': (AssignmentConfig, make_task, f'chains of aliases among distractors: {SEEDED}'),
    'pathfinding': (PathConfig, make_task, f'the unique shortest path through a layered graph: {SEEDED}'),
    'prosqa': (QuestionConfig, make_task, f'18,686 logical questions about a graph: {QUESTIONS}'),
    'gsm8k': (QuestionConfig, make_task, f'8,792 word problems with reasoning: {QUESTIONS}'),
    'gsm8k_aug': (QuestionConfig, make_task, f'386,000 word problems with equations as reasoning: {QUESTIONS}'),
    'hotpotqa': (QuestionConfig, make_task, f'97,852 questions over ten paragraphs, without test: {QUESTIONS}'),
    'math500': (QuestionConfig, make_task, f'500 competition problems, test alone, for evaluation: {QUESTIONS}'),
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
