"""Laws of trained tokenizers: every text comes back, transformers has the same ids, the same text gives the same bytes."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import types
import unicodedata
from pathlib import Path

import pytest
import torch
from conftest import trial
from test_corpora import ROOT, local_gpt2, random_text, read_losses, small_config  # noqa: F401, a fixture
from test_prepare_data import load, make, refuse, snapshot

import train
from configurator import ConfigError
from support import bpe
from support.chat import chat_meta, chat_tokens
from support.data import Dataset
from support.readers import list_corpus, read_corpus
from support.tokens import decode, encode, tokenizer_meta
from train import TrainConfig

tokenizers = pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
LETTERS = re.compile(r'[^\W\d_]')
UNSPACED = re.compile('[\u3040-\u30ff\u3400-\u9fff]')


def some_texts(rng, n):
    """Code, Chinese and Japanese, accents and marks, emoji, numbers, spaces, and any of them in one text."""
    words = "the cat don't I'LL we’ve l'eau naïve e\u0301te\u0301 हिन्दी 한국어 θάλασσα".split()
    numbers = ['7', '42', '1234567', '3.14159', '²', '٣٤', '0x1F', '1,000,000']
    code = ['def f(x):\n    return x\n', 'if (a == b) {\r\n\t\tc++;\r\n}', '"""doc"""', '# ----------', '->', '://']
    unspaced = ['漢字、', '世界', 'ひらがな', 'カタカナー', '，。', 'hello世界', '々〇']
    others = ['🙂', '👩\u200d👩\u200d👧', '🇫🇷', ' ', '  ', '\t', '\n', '\n\n', '\r\n', '\u3000', '\xa0', '\x00', '\ufeff']
    kinds = [words, numbers, code, unspaced, others]
    texts = []
    for _ in range(n):
        pieces = [piece for kind in rng.sample(kinds, rng.randint(1, 5)) for piece in kind]
        between = rng.choice(['', ' ', '\n'])
        texts.append(between.join(rng.choice(pieces) for _ in range(rng.randint(1, 40))))
    return texts


def write_lines(path, texts):
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts), encoding='utf-8')
    return path


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """A jsonl file of a few hundred documents, 300 KB."""
    library = Path(sysconfig.get_path('stdlib'))
    code = [(library / name).read_text('utf-8') for name in ('ast.py', 'argparse.py', 'random.py')]
    code = [text[i : i + 2000] for text in code for i in range(0, len(text), 2000)]
    return write_lines(tmp_path_factory.mktemp('corpus') / 'corpus.jsonl', code + some_texts(random.Random(0), 600))


@pytest.fixture(scope='module')
def folder(corpus, tmp_path_factory):
    """A tokenizer of 1,000 ids."""
    out = tmp_path_factory.mktemp('trained') / 'tokenizer'
    make('tokenizer', source=corpus, vocab_size=1000, out=out)
    return out


# What a tokenizer is


def test_ids_are_those_of_transformers(folder):
    transformers = pytest.importorskip('transformers', reason='transformers is an optional extra')
    theirs, meta, rng = transformers.AutoTokenizer.from_pretrained(folder), tokenizer_meta(str(folder)), random.Random(1)
    texts = some_texts(rng, 700) + [text for text in (random_text(rng) for _ in range(300)) if '<|' not in text]
    for text in texts:
        ids = encode(meta, text)
        assert ids == theirs(text)['input_ids'] and theirs.decode(ids) == text
    assert len(theirs) == 1000 and theirs.bos_token_id == theirs.eos_token_id == meta['document_token']
    spelled = '<|endoftext|> and <|im_end|>'
    assert theirs(spelled, split_special_tokens=True)['input_ids'] == encode(meta, spelled)
    plain = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert all(plain(text)['input_ids'] == encode(meta, text) for text in texts[:100])


def test_every_text_comes_back(folder):
    meta, rng = tokenizer_meta(str(folder)), random.Random(2)
    for text in some_texts(rng, 300) + [random_text(rng) for _ in range(300)] + list(bpe.SPECIALS):
        ids = encode(meta, text)
        assert decode(meta, ids) == text.encode()
        assert all(meta['token_bytes'][i] for i in ids), 'no text is encoded to a special token'


def test_the_vocabulary_is_specials_bytes_and_merges_within_borders(folder):
    meta = tokenizer_meta(str(folder))
    assert meta['vocab_size'] == 1000 and meta['document_token'] == 0
    pieces = [decode(meta, [i]) for i in range(1000)]
    assert pieces[:3] == [b''] * 3 and sorted(pieces[3:259]) == [bytes([b]) for b in range(256)]
    texts = [''.join(c for c in piece.decode('utf-8', 'ignore') if unicodedata.category(c)[0] != 'M') for piece in pieces]
    assert max(sum(c.isdigit() for c in text) for text in texts) == 2
    for text in texts:
        words, unspaced = LETTERS.findall(UNSPACED.sub('', text)), UNSPACED.findall(text)
        assert not (words and re.search(r'\d', text)), 'digits stay apart from letters'
        assert not (words and unspaced), 'scripts without spaces stay apart from those with them'
        assert not (words and re.search(r'\w\W', text)), 'nothing follows a word'
    assert {b' self', b"'t", b'    ', '世界'.encode()} <= set(pieces)


@pytest.mark.parametrize(
    ('text', 'parts'),
    [
        ("don't 'tis", ['don', "'t", " '", 'tis']),
        ("we’ve I'LL", ['we', '’ve', ' I', "'LL"]),
        ('12345 67', ['12', '34', '5', ' ', '67']),
        ('hello世界ok', ['hello', '世界', 'ok']),
        ('f(x)\n\n    y', ['f', '(x', ')\n\n', '   ', ' y']),
        ('हिन्दी', ['हिन्दी']),
    ],
)
def test_where_the_borders_are(text, parts):
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(bpe.PATTERN), 'isolated')
    assert [part for part, _ in split.pre_tokenize_str(text)] == parts


def test_a_chat_has_the_ids_of_transformers(folder):
    transformers = pytest.importorskip('transformers', reason='transformers is an optional extra')
    theirs, meta, rng = transformers.AutoTokenizer.from_pretrained(folder), tokenizer_meta(str(folder)), random.Random(3)
    meta |= chat_meta(str(folder), meta['tokenizer_json'])
    specials = json.loads(meta['tokenizer_json'])['added_tokens']
    assert [token['content'] for token in specials if token['id'] == meta['stop_token']] == [bpe.TURN_END]
    for _ in range(100):
        roles = ['system'] * rng.randint(0, 1) + ['user', 'assistant'] * rng.randint(0, 3) + ['user']
        said = [{'role': role, 'content': text} for role, text in zip(roles, some_texts(rng, len(roles)), strict=True)]
        trial()
        ids = theirs.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert chat_tokens(meta, said) == ids and ids.count(meta['document_token']) == 1


def test_the_harness_classes_find_what_opens_a_text(folder):
    """lm-eval puts bos_token, or else eos_token, before a text without context, and pads by what the tokenizer has."""
    about = json.loads((folder / 'tokenizer_config.json').read_text())
    ids = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json')).get_vocab()
    assert ids[about['bos_token']] == ids[about['eos_token']] == tokenizer_meta(str(folder))['document_token']


# How it is made


@pytest.mark.fault('a tokenizer is trained twice, on other threads', 'byte-identical files')
def test_two_trainings_are_byte_identical(corpus, folder, tmp_path):
    for threads in (1, 2, 3):
        out = tmp_path / str(threads) / 'tokenizer'
        argv = [sys.executable, 'prepare_data.py', 'tokenizer', f'--source={corpus}', '--vocab_size=1000', f'--out={out}']
        env = os.environ | {'RAYON_NUM_THREADS': str(threads), 'PYTHONHASHSEED': str(threads)}
        subprocess.run(argv, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
        assert snapshot(out) == snapshot(folder)
        trial()


def test_the_first_merges_are_the_most_frequent_pairs(tmp_path):
    write_lines(tmp_path / 's.jsonl', ['abab cdcd abab xyz'] * 3)
    make('tokenizer', source=tmp_path / 's.jsonl', vocab_size=261, out=tmp_path / 't')
    meta = tokenizer_meta(str(tmp_path / 't'))
    assert [decode(meta, [i]) for i in (259, 260)] == [b'ab', b'cd']


def test_the_limit_is_spread_over_the_files_and_val_is_held_out(tmp_path):
    rng = random.Random(4)
    for name, n in (('a', 300), ('b', 600), ('c', 300)):
        write_lines(tmp_path / f'{name}.jsonl', [name * rng.randint(50, 150) for _ in range(n)])
    config = bpe.TokenizerConfig(source=str(tmp_path), max_chars=20_000)
    read = bpe.read_texts(list_corpus(config), config)
    counts = [sum(text.count(name) for part in read for text in part) for name in 'abc']
    assert sum(counts) == 20_000 and counts == pytest.approx([5000, 10_000, 5000], rel=0.1)
    config.max_chars = 10**9
    texts, held_out = bpe.read_texts(list_corpus(config), config)
    documents = [entry for path, _ in list_corpus(config) for _, entry in read_corpus(path, 0, 'text', 0)]
    val = [e.content.decode() for e in documents if int.from_bytes(e.digest[:8], 'big') < 0.001 * 2**64]
    assert sorted(texts + held_out) == sorted(e.content.decode() for e in documents)
    assert 0 < len(held_out) < 30 and set(val) <= set(held_out)


def test_a_single_text_and_a_long_one(tmp_path, monkeypatch):
    monkeypatch.setattr(bpe, 'ENCODED_AT_ONCE', 100)
    (tmp_path / 'one.txt').write_text('é the cat\n' * 1000)
    config = bpe.TokenizerConfig(source=str(tmp_path / 'one.txt'))
    texts, held_out = bpe.read_texts(list_corpus(config), config)
    assert ''.join(texts + held_out) == 'é the cat\n' * 1000 and sum(map(len, held_out)) == 500
    assert max(map(len, texts)) == 100


def test_the_hub_is_read_a_part_of_each_file(tmp_path, corpus, monkeypatch):
    datasets = pytest.importorskip('datasets', reason='datasets is an optional extra, in requirements-data.txt')
    memory, paths = pytest.importorskip('fsspec').filesystem('memory'), ['memory://one.jsonl', 'memory://two.jsonl']
    for path in paths:
        memory.pipe(path.removeprefix('memory://'), corpus.read_bytes())
    files = types.SimpleNamespace(config=types.SimpleNamespace(data_files={'train': paths}))
    monkeypatch.setattr(datasets, 'load_dataset_builder', lambda *names: files)
    make('tokenizer', vocab_size=400, max_chars=100_000, out=tmp_path / 't')
    training = json.loads((tmp_path / 't/training.json').read_text())
    assert training['source'] == 'HuggingFaceFW/fineweb-edu sample-10BT' and 95_000 < training['characters'] <= 100_000


def test_bytes_per_token_stand_beside_those_of_gpt2(corpus, tmp_path, capsys, request, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tiktoken', None)
    bpe.load_tokenizer.cache_clear()
    make('tokenizer', source=corpus, vocab_size=500, out=tmp_path / 'a')
    said = capsys.readouterr().out
    measured = json.loads((tmp_path / 'a/training.json').read_text())['bytes_per_token']
    assert f'held-out text: {measured:.3f} (gpt2 is not at hand)' in said and measured > 1.3
    monkeypatch.undo()
    request.getfixturevalue('local_gpt2')
    make('tokenizer', source=corpus, vocab_size=500, out=tmp_path / 'b')
    theirs = float(re.search(r'\(gpt2: (.*)\)', capsys.readouterr().out)[1])
    assert 1 < theirs < measured, 'it has six merges'
    write_lines(tmp_path / 'short.jsonl', ['abababab'])
    make('tokenizer', source=tmp_path / 'short.jsonl', vocab_size=260, out=tmp_path / 'c')
    assert 'the text itself' in capsys.readouterr().out


# What can go wrong


def test_wrong_input_is_one_sentence(tmp_path, corpus, capsys, monkeypatch):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'empty.txt').write_text('')
    write_lines(tmp_path / 'blank.jsonl', ['', ''])
    write_lines(tmp_path / 'null.jsonl', [None])
    write_lines(tmp_path / 'brief.jsonl', ['abab abab'])
    out = {'out': tmp_path / 'x'}

    def refused(named, **settings):
        refuse(capsys, tmp_path, 'tokenizer', named, **out | settings)
        trial()

    refused('holds no parquet, jsonl or txt file', source=tmp_path / 'empty')
    refused('is empty; complete or remove it', source=tmp_path / 'empty.txt')
    refused('holds no text to train on', source=tmp_path / 'blank.jsonl')
    refused('holds no text to train on', source=tmp_path / 'null.jsonl')
    refused('--text_key names another field', source=corpus, text_key='body')
    refused('matches no file', source=tmp_path / 'nowhere')
    refused('the nearest is vocab_size=260', source=corpus, vocab_size=259)
    refused('the nearest is max_chars=2000000000', source=corpus, max_chars=3 * 10**9)
    refused('the 9 characters of', source=tmp_path / 'brief.jsonl', vocab_size=1000)
    refused('give only 261 ids, fewer than vocab_size=1000', source=tmp_path / 'brief.jsonl', vocab_size=1000)
    refused('names no folder', source=corpus, out='')
    refused('is a file; name a folder', source=corpus, out=corpus)
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    refused('needs the package tokenizers', source=corpus)


def test_the_size_that_a_refusal_names_can_be_had(tmp_path, capsys):
    source = write_lines(tmp_path / 's.jsonl', some_texts(random.Random(5), 20))
    with pytest.raises(SystemExit):
        make('tokenizer', source=source, vocab_size=32768, out=tmp_path / 't')
    size = re.search(r'--vocab_size=(\d+)\.', capsys.readouterr().err)[1]
    make('tokenizer', source=source, vocab_size=size, out=tmp_path / 't')
    assert tokenizer_meta(str(tmp_path / 't'))['vocab_size'] == int(size)


@pytest.mark.fault('a folder holds a tokenizer already', 'kept unless told')
def test_no_folder_is_overwritten_untold(corpus, folder, tmp_path, capsys):
    def refused(named, **settings):
        refuse(capsys, tmp_path, 'tokenizer', named, source=corpus, **{'vocab_size': 300, 'out': out} | settings)
        trial()

    out = tmp_path / 'tokenizer'
    out.mkdir()
    for name, content in snapshot(folder).items():
        (out / name).write_bytes(content)
    refused('made with other settings')
    make('tokenizer', source=corpus, vocab_size=1000, out=out)
    assert 'already holds this tokenizer' in capsys.readouterr().out and snapshot(out) == snapshot(folder)
    (out / 'tokenizer.json').write_text('{}')
    refused('tokenizer.json has changed', vocab_size=1000)
    (out / 'training.json').unlink()
    refused('a tokenizer from elsewhere')
    (out / 'notes.txt').write_text('mine')
    refused('like notes.txt', overwrite=True)
    (out / 'notes.txt').unlink()
    make('tokenizer', source=corpus, vocab_size=1000, out=out, overwrite=True)
    assert snapshot(out) == snapshot(folder) and [p.name for p in tmp_path.iterdir()] == ['tokenizer']


@pytest.mark.fault('training a tokenizer is interrupted', 'code 130 at once, nothing left')
@pytest.mark.parametrize('at', ['read_texts', 'train_bpe', 'measure', 'os.rename'])
def test_an_interrupt_leaves_nothing(corpus, tmp_path, capsys, monkeypatch, at):
    out = tmp_path / 'tokenizer'

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bpe if '.' not in at else os, at.removeprefix('os.'), stop)
    with pytest.raises(SystemExit) as end:
        make('tokenizer', source=corpus, vocab_size=300, out=out)
    assert end.value.code == 130 and not [*tmp_path.iterdir()]


def test_an_interrupt_is_heard_while_the_library_works(tmp_path):
    """It works in a thread: here one that would go on for a minute."""
    code = 'import time; from configurator import reporting; from support.bpe import interruptible\n'
    code += 'with reporting():\n    interruptible(lambda: (print("begun", flush=True), time.sleep(60)))'
    process = subprocess.Popen(
        [sys.executable, '-c', code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what a shell runs in the background ignores it
    )
    assert process.stdout.readline() == b'begun\n'
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == b'error: interrupted\n' and process.returncode == 130


def test_what_fails_in_the_thread_fails_outside():
    with pytest.raises(ZeroDivisionError):
        bpe.interruptible(lambda: 1 / 0)


# What is made with it


def test_a_dataset_made_with_it_trains(corpus, folder, tmp_path):
    make('fineweb_edu', source=corpus, tokenizer=folder, workers=1, val_fraction=0.1, out=tmp_path / 'd')
    data, config = Dataset(str(tmp_path / 'd')), small_config(tmp_path / 'd', tmp_path / 'out', block_size=16)
    train.train(config)
    saved = torch.load(tmp_path / 'out/ckpt.pt', weights_only=True)['config']
    assert (saved['vocab_size'], saved['reset_token']) == (1000, data.document_token) == (1000, 0)
    assert read_losses(tmp_path / 'out')
    rows = [{'question': f'{i} + {i}?', 'answer': f'It is {2 * i}\n#### {2 * i}'} for i in range(40)]
    (tmp_path / 'train.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    make('gsm8k', source=tmp_path / 'train.jsonl', tokenizer=folder, out=tmp_path / 'chat')
    meta, _ = load(tmp_path / 'chat')
    assert meta['chat_template'] == bpe.CHAT_TEMPLATE and meta['stop_token'] == 2


def test_a_tokenizer_too_large_for_the_config_is_refused(corpus, folder, tmp_path, capsys):
    (tmp_path / 'of_999_ids.py').write_text('vocab_size = 999\n')
    (tmp_path / 'small.py').write_text('from of_999_ids import *\n\nn_layer = 2\n')
    (tmp_path / 'large.py').write_text('vocab_size = 1000\n')
    settings = {'source': corpus, 'tokenizer': folder, 'workers': 1, 'val_fraction': 0.1}
    named = f'has 1000 ids, above vocab_size=999 of {tmp_path}/small.py; `python prepare_data.py tokenizer --vocab_size=999`'
    refuse(capsys, tmp_path, 'fineweb_edu', named, config=tmp_path / 'small.py', out=tmp_path / 'd', **settings)
    refuse(capsys, tmp_path, 'fineweb_edu', 'there is no config', config=tmp_path / 'no.py', out=tmp_path / 'd', **settings)
    make('fineweb_edu', config=tmp_path / 'large.py', out=tmp_path / 'd', **settings)
    make('fineweb_edu', out=tmp_path / 'd', **settings)
    assert 'already holds this dataset' in capsys.readouterr().out, 'the config does not change what is made'


def test_training_names_the_commands_that_make_its_data(tmp_path):
    config = TrainConfig(data_dir=f'{tmp_path}/d', out_dir=f'{tmp_path}/out', vocab_size=32768)
    tokenizer, data = '`python prepare_data.py tokenizer --vocab_size=32768`', f'--tokenizer=data/tokenizer --out={tmp_path}/d`'
    with pytest.raises(ConfigError, match=f'{tokenizer}, and then `python prepare_data.py fineweb_edu {data}'):
        train.train(config)
    assert not [*tmp_path.iterdir()]
