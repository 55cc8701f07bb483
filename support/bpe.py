"""Trains a byte-level BPE tokenizer of one's own, as the transformers library reads it."""

import json
import math
import os
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from configurator import ConfigError, explaining, key
from support.corpus import VAL_OF_SINGLE_TEXT
from support.files import ending
from support.folders import file_sha256, settings_of, source_names, work_folder, write_json
from support.optional import import_optional
from support.readers import list_corpus, read_corpus
from support.tokens import ENCODED_AT_ONCE, load_tokenizer

DOCUMENT, TURN, TURN_END = SPECIALS = '<|endoftext|>', '<|im_start|>', '<|im_end|>'
CHAT_TEMPLATE = (
    '{{ bos_token }}{% for message in messages %}'
    f"{{{{ '{TURN}' + message['role'] + '\\n' + message['content'] + '{TURN_END}\\n' }}}}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{TURN}assistant\\n' }}}}{{% endif %}}"
)
UNSPACED = r'\p{Han}\p{Hiragana}\p{Katakana}ーｰ'  # scripts that put no spaces between words
PATTERN = '|'.join(  # no token crosses a border of what this finds; together the parts match any text
    (
        r"['’](?i:[sdmt]|ll|re|ve)(?![\p{L}\p{M}])",  # the end of a contraction
        rf'[{UNSPACED}]+',
        rf'[^\r\n\p{{L}}\p{{M}}\p{{N}}]?[\p{{L}}\p{{M}}&&[^{UNSPACED}]]+',  # a word, and a space or sign before it
        r'\p{N}{1,2}',
        r' ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*',
        r'\s*[\r\n]+',
        r'\s+(?!\S)',  # all spaces but the last, which belongs to the word
        r'\s+',
    )
)
HELD_OUT = 0.01  # share of the documents that only the bytes per token are measured on
MEASURED = 2**22  # characters of them
FILES = {'tokenizer.json', 'tokenizer_config.json', 'training.json'}


@dataclass
class TokenizerConfig:
    vocab_size: int = key(
        32_768,
        f'ids: of {len(SPECIALS)} special tokens, the 256 bytes, and one merge or more',
        bounds=(len(SPECIALS) + 257, 2**20),
    )
    max_chars: int = key(
        1_000_000_000,
        'characters to read, all in memory, from each file by its size',
        bounds=(1, 2_000_000_000),  # the library counts in 32 bits
    )
    subset: str = key('10BT', "the hub's sample of FineWeb-Edu of 10 or 100 billion tokens", ('10BT', '100BT'))
    source: str = key('', 'parquet, jsonl, json or txt files, folders or patterns joined by commas, instead of the hub')
    text_key: str = key('text', 'the field of a row, or column of a parquet file, that holds the text')
    out: str = key('data/tokenizer', 'the folder to write')
    overwrite: bool = key(False, 'replace the tokenizer that `out` holds')

    def check(self):
        if not self.out:
            raise ConfigError("out='' names no folder; write it like out=data/tokenizer.")


def make_tokenizer(_, config):
    """tokenizer.json, tokenizer_config.json with a chat template, and training.json, which says what was read and with which
    settings. The same text gives the same bytes. The folder is written whole or not at all. Memory: the text, and its words.

    Documents of the smallest sha256, among them all that `fineweb_edu` gives to val by default, are held out. Raises
    ConfigError for a source without text, one that gives fewer ids than vocab_size, and a folder that holds something else.
    """
    import_optional('tokenizers')  # what is missing is said before the work
    names = source_names(config.source, f'HuggingFaceFW/fineweb-edu sample-{config.subset}')
    wanted = {'source': names, 'settings': settings_of(config)}
    if is_trained(config, wanted):
        return
    texts, held_out = read_texts(list_corpus(config), config)
    if not texts:
        raise ConfigError(f'source={config.source or names} holds no text to train on; name more.')
    tokenizer = train_bpe(texts, config.vocab_size)
    if (size := tokenizer.get_vocab_size()) < config.vocab_size:
        why = f'the {sum(map(len, texts)):,} characters of source={config.source or names} give only {size:,} ids'
        raise ConfigError(f'{why}, fewer than vocab_size={config.vocab_size}; name more text, or --vocab_size={size}.')
    wanted['characters'] = sum(map(len, texts))
    wanted['bytes_per_token'] = measure(tokenizer, texts, held_out)
    write_tokenizer(tokenizer, config.out, wanted)


def is_trained(config, wanted):
    """True if the folder `out` holds the tokenizer described by `wanted` (part of its training.json), False if it may be
    written. ConfigError when something else is there and `overwrite` is off, or files of another kind."""
    out = config.out
    if os.path.exists(out) and not os.path.isdir(out):
        raise ConfigError(f'out={out} is a file; name a folder.')
    present = set(os.listdir(out)) if os.path.isdir(out) else set()
    if foreign := sorted(present - FILES):
        raise ConfigError(f'out={out} holds other files, like {foreign[0]}; name a folder of its own.')
    if not present or config.overwrite:
        return False
    with explaining(f'out={out} holds a tokenizer from elsewhere', 'choose another out, or --overwrite=True'):
        training = json.loads(Path(out, 'training.json').read_text('utf-8'))
        if any(training.get(k) != v for k, v in wanted.items()):
            why = f'out={out} holds a tokenizer made with other settings'
            raise ConfigError(f'{why}; choose another out, or --overwrite=True.')
        if file_sha256(f'{out}/tokenizer.json') != training['sha256']:
            raise ValueError('tokenizer.json has changed')
    print(f'{out} already holds this tokenizer; --overwrite=True makes it again.')
    return True


def read_texts(files, config):
    """(texts to train on, texts held out) of the files [[path, size]]: each at most ENCODED_AT_ONCE characters, all of them
    max_chars, of which a file gives the share that it has of the sizes left."""
    single = len(files) == 1 and '.txt' in ending(files[0][0])
    total = unread = sum(size for _, size in files)
    texts, held_out, left = [], [], config.max_chars
    with tqdm(desc='reading', unit=' characters', unit_scale=True, disable=None) as progress:
        for path, size in files:
            quota = math.ceil(left * size / unread)
            for share, entry in read_corpus(path, 0, config.text_key, single and VAL_OF_SINGLE_TEXT):
                text = entry.content.decode()[:quota]
                part = held_out if int.from_bytes(entry.digest[:8], 'big') < HELD_OUT * 2**64 else texts
                part += (text[i : i + ENCODED_AT_ONCE] for i in range(0, len(text), ENCODED_AT_ONCE))
                quota, left = quota - len(text), left - len(text)
                done = (total - unread + share * size) / total
                progress.total = min(int((config.max_chars - left) / max(done, 1e-9)), config.max_chars)
                progress.update(len(text))
                if not quota:
                    break
            unread -= size
    return texts, held_out


def train_bpe(texts, vocab_size):
    """A trained tokenizers.Tokenizer: special tokens first, then the bytes, then merges of pairs that occur twice or more, the
    most frequent first and among equals that of the lowest ids. It has at most vocab_size ids. Progress is the library's."""
    tokenizers = import_optional('tokenizers')
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), 'isolated')
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=bool(sys.stderr and sys.stderr.isatty()),
    )
    interruptible(lambda: tokenizer.train_from_iterator(texts, trainer, len(texts)))
    return tokenizer


def interruptible(work):
    """Runs work() in a thread that ends with the process: within a long call of a library no Ctrl-C would be heard."""
    future = Future()

    def run():
        try:
            future.set_result(work())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future.result()


def measure(tokenizer, texts, held_out):
    """Bytes per token on the text held out, or where there is none on the other; printed beside those of gpt2."""
    kept, left, name = [], MEASURED, 'held-out text' if held_out else 'the text itself (too few documents to hold one out)'
    for text in held_out or texts:
        kept.append(text[:left])
        left -= len(kept[-1])
        if not left:
            break
    size = sum(len(text.encode()) for text in kept)
    ours = size / sum(len(tokenizer.encode(text).ids) for text in tqdm(kept, desc='measuring', leave=False, disable=None))
    try:
        encode = load_tokenizer('gpt2')[0]
        beside = f'gpt2: {size / sum(len(encode(text)) for text in kept):.3f}'
    except ConfigError:
        beside = 'gpt2 is not at hand'
    print(f'bytes per token on {size:,} bytes of {name}: {ours:.3f} ({beside})')
    return round(ours, 4)


def write_tokenizer(tokenizer, out, training):
    """Puts the folder `out` there whole, in the place of an earlier one; `training` is what training.json says."""
    about = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': DOCUMENT, 'eos_token': DOCUMENT}
    about |= {'clean_up_tokenization_spaces': False, 'chat_template': CHAT_TEMPLATE}
    place = os.path.realpath(out)
    with work_folder(place) as work:
        new = os.path.join(work, 'new')
        os.mkdir(new)
        write_json(f'{new}/tokenizer.json', json.loads(tokenizer.to_str()))
        write_json(f'{new}/tokenizer_config.json', about)
        write_json(f'{new}/training.json', training | {'sha256': file_sha256(f'{new}/tokenizer.json')})
        if os.path.exists(place):
            os.rename(place, os.path.join(work, 'old'))
        os.rename(new, place)
    print(f'wrote {out}, {tokenizer.get_vocab_size():,} ids; other commands take it as --tokenizer={out}')
