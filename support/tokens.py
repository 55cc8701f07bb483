"""Tokenizers: text to ids and back, and what a dataset's meta.json keeps of them."""

import contextlib
import difflib
import functools
import itertools
import json
import re

import numpy as np

from configurator import ConfigError, explaining
from support.optional import import_optional
from support.suggestions import nearest
from support.templates import read_beside, read_template, render, tokenizer_file

DOCUMENT_TOKEN = 256  # the first id after the 256 bytes; it opens every document
DOCUMENT_NAMES = ('<|begin_of_text|>', '<|endoftext|>', '<s>', '<bos>', '</s>')  # of a tokenizer.json, in order of preference
DOCUMENT_WORDS = ('beginoftext', 'startoftext', 'beginofsentence', 'bos', 'endoftext', 'endofsentence', 'eos')  # then these
ENCODED_AT_ONCE = 2**17  # characters; on longer runs of one kind tiktoken is slow, and at a million spaces it gives up


def token_dtype(vocab_size):
    """The dtype of a token stream: 16 bits as long as the last id, vocab_size - 1, fits in them."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def ids_without_token(meta, vocab_size):
    """The ids below `vocab_size` that stand for nothing under the tokenizer of a meta.json, rising: those above its last id,
    and gaps in it. Special tokens, which have no bytes either, are known: those of a tokenizer.json, and the data's own."""
    if 'tokenizer' not in meta:
        return []
    known = {meta.get('document_token'), meta.get('stop_token'), meta.get('pad_token'), *range(len(meta.get('names', ())))}
    known |= {i for i, size in enumerate(meta.get('token_bytes', ())) if size}
    known |= {token['id'] for token in json.loads(meta.get('tokenizer_json', '{}')).get('added_tokens', ())}
    return [i for i in range(vocab_size) if i not in known]


@functools.lru_cache(maxsize=4)
def load_tokenizer(name, text=None):
    """(function from a text to its ids, bytes of each id, {name: id} of the special tokens) of 'bytes', of the tiktoken
    encoding `name`, or of `text`, the content of a tokenizer.json. Special tokens have no bytes, and no text is encoded to one.

    Raises ConfigError for what cannot be loaded. After the ids of a tokenizer.json comes one
    without bytes, for datasets that need a document token of their own.
    """
    if name == 'bytes':
        return str.encode, [*(bytes([b]) for b in range(DOCUMENT_TOKEN)), b''], {'<|endoftext|>': DOCUMENT_TOKEN}
    return load_tiktoken(name) if text is None else load_tokenizer_json(name, text)


def load_tiktoken(name):
    """load_tokenizer() of a tiktoken encoding."""
    tiktoken = import_optional('tiktoken')
    if name not in tiktoken.list_encoding_names():
        known = nearest(name, ['bytes', *tiktoken.list_encoding_names()])
        raise ConfigError(f'tokenizer={name} is neither known to tiktoken nor the path of a tokenizer.json; {known}')
    with explaining(f'tokenizer={name} could not be loaded', 'its first use needs the network'):
        encoding = tiktoken.get_encoding(name)
    pieces = [b''] * encoding.n_vocab  # of specials, and of the gaps that some vocabularies have
    for piece in encoding.token_byte_values():
        pieces[encoding.encode_single_token(piece)] = piece
    return encoding.encode_ordinary, pieces, {'<|endoftext|>': encoding.eot_token}


def load_tokenizer_json(name, text):
    """load_tokenizer() of a tokenizer.json."""
    with explaining(f'{name} is not a tokenizer.json that can be used', 'take another, or --tokenizer=bytes'):
        whole = json.loads(text, object_hook=without_prefix) | {'truncation': None, 'padding': None}
        tokenizer = import_optional('tokenizers').Tokenizer.from_str(json.dumps(whole))
        byte_level = '"ByteLevel"' in json.dumps(whole['decoder'])
    tokenizer.encode_special_tokens = True  # as ordinary text, that is
    # GPT-2 writes the visible bytes as themselves and the others as the characters from 256 on.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in visible]
    byte_of = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    pieces = [b''] * (max(vocabulary.values()) + 2)
    for token, i in vocabulary.items():
        if i in added:
            pieces[i] = b'' if added[i].special else token.encode()
        elif byte_level:
            pieces[i] = bytes(byte_of.get(c, 0) for c in token)
        elif re.fullmatch('<0x[0-9A-F]{2}>', token):
            pieces[i] = bytes([int(token[3:5], 16)])
        else:
            pieces[i] = token.replace('\N{LOWER ONE EIGHTH BLOCK}', ' ').encode()
    specials = {token.content: i for i, token in added.items() if token.special}
    return lambda piece: tokenizer.encode(piece, add_special_tokens=False).ids, pieces, specials


def without_prefix(part):
    """An object in a tokenizer.json, changed to put no space before a text: decoding could not tell it from the text's own."""
    if part.get('type') == 'Prepend':
        return {'type': 'Sequence', 'normalizers': []}
    for name, value in (('add_prefix_space', False), ('prepend_scheme', 'never')):
        if name in part and isinstance(part.get('type'), str):  # else it is a vocabulary, which may hold such words too
            part[name] = value
    return part


def tokenizer_meta(name):
    """What meta.json says of a tokenizer: 'bytes', a tiktoken name, or a tokenizer.json or its folder, whose content it keeps.
    'token_bytes' are the bytes of each id, 0 for specials. 'document_token' is one of the special tokens, or where none fits
    one id more. Raises ConfigError for what cannot be loaded."""
    meta = {'tokenizer': name}
    if name != 'bytes' and (path := tokenizer_file(name)):
        with explaining(f'tokenizer={name} cannot be read', 'name a tokenizer.json or its folder'):
            meta = {'tokenizer': 'tokenizer.json', 'tokenizer_json': path.read_text('utf-8')}
    _, pieces, specials = load_tokenizer(meta['tokenizer'], meta.get('tokenizer_json'))
    if (document := document_token(name, specials)) is None:
        document = len(pieces) - 1
    elif 'tokenizer_json' in meta:
        pieces = pieces[:-1]
    sizes = {'vocab_size': len(pieces), 'document_token': document, 'token_bytes': [len(p) for p in pieces]}
    return meta | sizes | {'dtype': token_dtype(len(pieces)).name}


def document_token(name, specials):
    """The id that opens documents: what the files beside a tokenizer.json name, or else the special
    token ({name: id}) whose name says so. None where there is none."""
    words = {re.sub('[^a-z]', '', token.lower()): i for token, i in reversed(specials.items())}
    called = [specials.get(token) for token in DOCUMENT_NAMES] + [words.get(word) for word in DOCUMENT_WORDS]
    named = named_tokens(name, specials) if tokenizer_file(name) else ()
    return next((i for i in (*named, *called) if i is not None), None)


def named_tokens(name, specials):
    """Ids of the tokens that the files beside a tokenizer.json name for the start of a text, then those for its end. A token
    that its chat template writes more than once in a conversation is left out: it divides turns, not documents."""
    configs = [read_beside(name, file) for file in ('tokenizer_config.json', 'config.json', 'generation_config.json')]
    template, text, names = read_template(name), '', {i: token for token, i in specials.items()}
    turns = [{'role': role, 'content': 'word'} for role in ('user', 'assistant') * 2]
    with contextlib.suppress(ConfigError):  # whoever uses the template will be told
        text = render(template, turns, False) if template else ''
    for kind, config in itertools.product(('bos', 'eos'), configs):
        for value in (config.get(f'{kind}_token'), config.get(f'{kind}_token_id')):
            value = value[0] if isinstance(value, list) and value else value
            token = value.get('content') if isinstance(value, dict) else names.get(value) if isinstance(value, int) else value
            if isinstance(token, str) and token in specials and text.count(token) < 2:
                yield specials[token]


def encode(meta, text):
    """Token ids (list of int) of `text` under the tokenizer of a dataset's meta.json. 'bytes': its UTF-8 bytes, whatever they
    spell, so never the document token; no other tokenizer makes a special token of a text either. 'names': whitespace-separated
    names; ConfigError for a name that the vocabulary lacks."""
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


def encode_document(meta, content, opens=True):
    """Tokens of a document (bytes of UTF-8), the document token first, or of a later piece of one,
    without it. Raises LossyError when decoding them does not give `content` back."""
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
