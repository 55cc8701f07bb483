"""Faults of sources: nothing vanishes, a single text is cut, what cannot be kept is kept out and named, special tokens are the
tokenizer's own, and datasets made before stay what is asked for."""

import gzip
import json
import os
import random
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_chat import TEMPLATES, write_instruct
from test_corpora import documents_of, interrupted, make, random_text, refuse, shard_bytes, write_tokenizer
from test_tasks import SMALL, rows_of, write_rows

import bench
from configurator import ConfigError
from support import loading, readers
from support.chat import chat_meta, chat_tokens, special_tokens
from support.data import Dataset
from support.files import find_files
from support.tokens import decode, encode, tokenizer_meta

CORPUS = {'tokenizer': 'bytes', 'workers': 1, 'val_fraction': 0.3}


def both(out):
    return sorted(documents_of(out, 'train') + documents_of(out, 'val'))


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def zstd(content):
    pyarrow = pytest.importorskip('pyarrow', reason='pyarrow is an optional extra, in requirements-data.txt')
    with pyarrow.BufferOutputStream() as packed:
        with pyarrow.CompressedOutputStream(packed, 'zstd') as f:
            f.write(content)
        return packed.getvalue().to_pybytes()


def jsonl(texts, name='text'):
    return '\n'.join(json.dumps({name: text}) for text in texts).encode()


# Nothing vanishes


@pytest.mark.parametrize('dataset', ['text', 'fineweb_edu'])
def test_linked_folders_are_searched_once_each(tmp_path, dataset, capsys):
    write(tmp_path, {'s/real/a.txt': b'one', 's/real/deep/b.txt': b'two', 'o/c.txt': b'three', 'o/d.txt': b'four'})
    (tmp_path / 's/again').symlink_to('real')  # sorted before it, and yet its files are found under their own name
    (tmp_path / 's/linked').symlink_to('../o')
    (tmp_path / 's/real/up').symlink_to('..')
    (tmp_path / 'o/back').symlink_to('../s')
    (tmp_path / 'o/copy.txt').symlink_to('c.txt')
    settings = CORPUS if dataset == 'fineweb_edu' else {'val_fraction': 0.3}
    for i, source in enumerate((tmp_path / 's', tmp_path / 's/**/*.txt', f'{tmp_path}/o,{tmp_path}/s,{tmp_path}/s/again')):
        make(dataset, source=source, out=tmp_path / f'd{i}', **settings)
        assert both(tmp_path / f'd{i}') == sorted([b'one', b'two', b'three', b'four', b'three'])
    found = find_files(str(tmp_path / 's'))
    assert f'{tmp_path}/s/real/a.txt' in found
    (tmp_path / 'o/lost').symlink_to('nowhere')
    refuse(capsys, 'o/lost is a link that leads nowhere', dataset, source=tmp_path / 'o', out=tmp_path / 'e', **settings)
    (tmp_path / 'o/lost').unlink()
    (tmp_path / 'o/lost').symlink_to('lost')
    refuse(capsys, 'o/lost is a link that leads nowhere', dataset, source=tmp_path / 'o', out=tmp_path / 'e', **settings)


def test_what_is_passed_over_is_counted(tmp_path, capsys):
    files = {
        'a.txt': b'one',
        'b.jsonl': jsonl(map(str, range(20))),
        'c.json': b'{}',
        'd/e.json': b'{}',
        'f.csv': b'x',
        'README': b'',
    }
    write(tmp_path / 's', files | {'.hidden': b'', '.git/a.txt': b'x', 'g.jsonl.bz2': b'x'})
    make('fineweb_edu', source=tmp_path / 's', out=tmp_path / 'd', **CORPUS)
    said = next(line for line in capsys.readouterr().out.splitlines() if 'passed over' in line)
    for counted in ('2 .json', '1 .csv', '1 without an ending', '1 hidden files', '1 hidden folders', '1 .bz2'):
        assert counted in said
    assert both(tmp_path / 'd') == sorted([b'one', *(b'%d' % i for i in range(20))])
    make('text', source=tmp_path / 's', extensions='txt,jsonl', out=tmp_path / 't')
    assert '2 .json' in capsys.readouterr().out
    write(tmp_path / 'x', {f'{i}.txt': b'%d' % i for i in range(20)})
    make('fineweb_edu', source=tmp_path / 'x', out=tmp_path / 'y', **CORPUS)
    assert 'passed over' not in capsys.readouterr().out


def test_packed_and_json_files_are_the_same_corpus(tmp_path, capsys, monkeypatch):
    """Also over restarts, and in pieces."""
    rng = random.Random(1)
    texts = [random_text(rng) for _ in range(120)]
    long = ''.join(random_text(rng) for _ in range(300)).encode()
    lines = jsonl(texts)
    as_list = json.dumps([{'text': text} for text in texts], indent=1).encode()
    monkeypatch.setattr(readers, 'PIECE_LENGTH', 3000)
    forms = {'plain': ('a.jsonl', 'b.txt', lines), 'list': ('a.json', 'b.txt', as_list), 'lines': ('a.json', 'b.txt', lines)}
    forms |= {
        'gz': ('a.jsonl.gz', 'b.txt.gz', lines),
        'zst': ('a.jsonl.zst', 'b.txt.zst', lines),
        'mark': ('a.jsonl', 'b.txt', b''),
    }
    forms |= {'listgz': ('a.json.gz', 'b.txt.gz', as_list)}
    for name, (rows, txt, content) in forms.items():
        pack = {'.gz': gzip.compress, '.zst': zstd}
        of = {rows: content or '\ufeff'.encode() + lines, txt: long}
        write(tmp_path / name, {file: pack.get(file[file.rfind('.') :], bytes)(content) for file, content in of.items()})
        settings = CORPUS | {'source': f'{tmp_path}/{name}/*', 'shard_tokens': 2000}
        make('fineweb_edu', out=tmp_path / f'd{name}', **settings)
        assert shard_bytes(tmp_path / f'd{name}') == shard_bytes(tmp_path / 'dplain')
        interrupted(monkeypatch, 5, out=tmp_path / f'r{name}', **settings)
        make('fineweb_edu', out=tmp_path / f'r{name}', **settings)
        assert shard_bytes(tmp_path / f'r{name}') == shard_bytes(tmp_path / 'dplain')
    assert sorted([*(t.encode() for t in texts), long]) == both(tmp_path / 'dplain')
    for file, content in (
        ('cut.jsonl.gz', gzip.compress(lines)[:-9]),
        ('cut.txt.zst', zstd(long)[:-9]),
        ('no.jsonl.gz', lines),
    ):
        write(tmp_path, {file: content})
        refuse(capsys, f'{file} cannot be read', source=tmp_path / file, out=tmp_path / 'e', **CORPUS, overwrite=True)
    for file in ('a.jsonl.bz2', 'a.parquet.gz', 'a.gz'):
        write(tmp_path, {file: b'x'})
        refuse(capsys, 'packed by gzip or zstd', source=tmp_path / file, out=tmp_path / 'f', **CORPUS)


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, capsys, monkeypatch):
    write(tmp_path / 's', {'a.txt': b'one', 'b.txt': b'two', 'closed/c.txt': b'three'})
    real = os.scandir

    def scandir(path):
        if str(path).endswith('closed'):
            raise PermissionError(13, 'Permission denied', str(path))
        return real(path)

    monkeypatch.setattr(os, 'scandir', scandir)
    refuse(capsys, 'closed could not be read', 'text', source=tmp_path / 's', out=tmp_path / 'd')


def test_questions_pass_nothing_over(tmp_path, capsys):
    rows = rows_of('gsm8k', 30)
    source = write_rows(tmp_path / 's/train.jsonl', rows)
    make('gsm8k', source=source, out=tmp_path / 'plain')
    for name, pack in (('gz', gzip.compress), ('zst', zstd)):
        write(tmp_path / name, {f'train.jsonl.{name}': pack(source.read_bytes())})
        make('gsm8k', source=tmp_path / name, out=tmp_path / f'd{name}')
        assert (tmp_path / f'd{name}/train.npz').read_bytes() == (tmp_path / 'plain/train.npz').read_bytes()
    write(tmp_path / 's', {'notes.md': b'x', 'sub/train.jsonl': b'x'})
    capsys.readouterr()
    make('gsm8k', source=tmp_path / 's', out=tmp_path / 'd')
    assert 'passed over notes.md, sub' in capsys.readouterr().out
    write(tmp_path / 's', {'gsm8k.py': b'x'})
    refuse(capsys, f'name its data, like --source={tmp_path}/s/*.jsonl.', 'gsm8k', source=tmp_path / 's', out=tmp_path / 'e')
    make('gsm8k', source=tmp_path / 's/*.jsonl', out=tmp_path / 'e')
    assert (tmp_path / 'e/train.npz').read_bytes() == (tmp_path / 'plain/train.npz').read_bytes()
    (tmp_path / 's/gsm8k.py').unlink()
    (tmp_path / 's/test.jsonl').symlink_to('nowhere')
    refuse(capsys, 'test.jsonl is a link that leads nowhere', 'gsm8k', source=tmp_path / 's', out=tmp_path / 'f')


@pytest.mark.parametrize('name', ['a.jsonl', 'a.txt', 'a.jsonl.gz', 'data/a.jsonl'])
def test_a_script_is_offered_the_right_pattern(tmp_path, capsys, name):
    write(tmp_path, {name: jsonl(['a']), 'loader.py': b'x'})
    pattern = tmp_path / os.path.dirname(name) / ('*' + name[name.index('.') :])
    refuse(capsys, f'like --source={pattern}.', source=tmp_path, out=tmp_path / 'd', **CORPUS)


# A single text


@pytest.mark.parametrize('fraction', [0.05, 0.5, 0.9])
def test_the_end_of_a_single_text_is_val(tmp_path, monkeypatch, fraction):
    rng = random.Random(2)
    content = ''.join(random_text(rng) for _ in range(80)).encode()
    write(tmp_path, {'one.txt': content, 'one.txt.gz': gzip.compress(content)})
    make('text', source=tmp_path / 'one.txt', val_fraction=fraction, out=tmp_path / 'd')
    (train,), (val,) = (documents_of(tmp_path / 'd', split) for split in ('train', 'val'))
    assert train + val == content and 0 <= len(val) - round(fraction * len(content)) < 4 and val.decode()
    shutil.copytree(tmp_path / 'd', tmp_path / 'copies')
    write(tmp_path / 's', {'a.txt': content, 'b.txt': content})
    make('text', source=tmp_path / 's', val_fraction=fraction, out=tmp_path / 'copies', overwrite=True)
    assert documents_of(tmp_path / 'copies', 'train') == [train] * 2 and documents_of(tmp_path / 'copies', 'val') == [val] * 2
    settings = CORPUS | {'val_fraction': fraction, 'shard_tokens': 2000}
    for size in (700, 4096, 2**20):
        monkeypatch.setattr(readers, 'PIECE_LENGTH', size)
        for name in ('one.txt', 'one.txt.gz'):
            out = tmp_path / f'{size}-{name}'
            make('fineweb_edu', source=tmp_path / name, out=out, **settings)
            assert documents_of(out, 'train') == [train] and documents_of(out, 'val') == [val]
    monkeypatch.setattr(readers, 'PIECE_LENGTH', 700)
    for after in (1, 2, 4):
        interrupted(monkeypatch, after, source=tmp_path / 'one.txt', out=tmp_path / f'r{after}', **settings)
        make('fineweb_edu', source=tmp_path / 'one.txt', out=tmp_path / f'r{after}', **settings)
        assert shard_bytes(tmp_path / f'r{after}') == shard_bytes(out := tmp_path / '700-one.txt'), out


def test_five_percent_of_a_single_text_are_val_by_default(tmp_path):
    write(tmp_path, {'one.txt': b'a text' * 500})
    make('text', source=tmp_path / 'one.txt', out=tmp_path / 'text')
    make('fineweb_edu', source=tmp_path / 'one.txt', tokenizer='bytes', workers=1, out=tmp_path / 'corpus')
    for name in ('text', 'corpus'):
        assert [len(d) for split in ('train', 'val') for d in documents_of(tmp_path / name, split)] == [2850, 150]


def test_a_text_of_one_character_cannot_be_cut(tmp_path, capsys):
    for content in ('a', '漢'):
        write(tmp_path, {'one.txt': content.encode()})
        refuse(capsys, 'one.txt', 'text', source=tmp_path / 'one.txt', out=tmp_path / 'd')


# What cannot be kept


def composing_tokenizer(tmp_path):
    """A tokenizer that does not give 'e' and a combining accent back."""
    pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
    return write_tokenizer(tmp_path / 'nfc.json', 2000, normalizer={'type': 'NFC'})


LOSSY = 'caf' + 'e\u0301'


def test_documents_that_cannot_be_kept_are_kept_out_and_named(tmp_path, monkeypatch, capsys):
    pyarrow = pytest.importorskip('pyarrow', reason='pyarrow is an optional extra, in requirements-data.txt')
    from pyarrow import parquet

    rng, good = random.Random(3), []

    def some(n):
        good.extend(f'{rng.random()} text' for _ in range(n))
        return good[-n:]

    (tmp_path / 's').mkdir()
    rows = [*some(40), None, *some(20), LOSSY, *some(5), '']
    parquet.write_table(pyarrow.table({'text': rows}), tmp_path / 's/a.parquet', row_group_size=16)
    lines = jsonl([*some(30), None, '\ud800', *some(9), LOSSY * 3]) + b'\n\n'
    write(tmp_path / 's', {'b.jsonl': lines, 'c.txt': LOSSY.encode(), 'd.txt': some(1)[0].encode()})
    monkeypatch.setattr(readers, 'PIECE_LENGTH', 300)
    settings = {'source': tmp_path / 's', 'tokenizer': composing_tokenizer(tmp_path), 'val_fraction': 0.3, 'shard_tokens': 1000}
    make('fineweb_edu', out=tmp_path / 'd', workers=1, **settings)
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith('kept out'))
    assert both(tmp_path / 'd') == sorted(text.encode() for text in good)
    for named in (
        '2 without a text (null) (a.parquet, entry 40; b.jsonl, entry 30)',
        '1 with half of a surrogate pair (b.jsonl, entry 31)',
        '3 where the tokenizer loses a part of the text (a.parquet, entry 61; b.jsonl, entry 41; c.txt, entry 0)',
        '1 that are empty (a.parquet, entry 67)',
    ):
        assert named in said
    for after in range(1, 4):
        out = tmp_path / f'r{after}'
        interrupted(monkeypatch, after, out=out, workers=1, **settings)
        capsys.readouterr()
        make('fineweb_edu', out=out, workers=1 + (after == 2), **settings)
        assert said in capsys.readouterr().out.splitlines() and shard_bytes(out) == shard_bytes(tmp_path / 'd')
    refuse(capsys, 'above max_lost=0.01', out=tmp_path / 'e', max_lost=0.01, workers=1, **settings)
    make('fineweb_edu', out=tmp_path / 'e', workers=1, **settings)  # goes on from there
    assert shard_bytes(tmp_path / 'e') == shard_bytes(tmp_path / 'd')
    make('fineweb_edu', out=tmp_path / 'e', workers=1, max_lost=0, **settings)
    assert 'already holds this dataset' in capsys.readouterr().out


def test_a_corpus_of_losses_ends_early(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(readers, 'PIECE_LENGTH', 1000)
    write(tmp_path, {'a.jsonl': jsonl([LOSSY] * 5000) + b'\nnever read'})
    said = 'cannot be kept, above max_lost=0.1: '
    refuse(capsys, said, source=tmp_path / 'a.jsonl', tokenizer=composing_tokenizer(tmp_path), workers=1, out=tmp_path / 'd')


def test_what_follows_a_lost_piece_is_another_document(tmp_path, monkeypatch):
    """Also where a restart begins after the lost piece."""
    monkeypatch.setattr(readers, 'PIECE_LENGTH', 2000)
    rng = random.Random(4)
    rows = [''.join(rng.choices('bcdfghjk', k=45)) for _ in range(40)]  # they and the first piece of the text are one batch
    pieces = [''.join(rng.choices('bcdfghjk', k=2000)) for _ in range(12)]
    for lost in (0, 7, 8):
        pieces[lost] = LOSSY.ljust(1999)
    write(tmp_path / 's', {'a.jsonl': jsonl(rows), 'b.txt': ''.join(pieces).encode()})
    settings = {'source': tmp_path / 's', 'tokenizer': composing_tokenizer(tmp_path), 'workers': 1, 'val_fraction': 0.3}
    settings |= {'shard_tokens': 1000}
    make('fineweb_edu', out=tmp_path / 'd', **settings)
    expected = [''.join(pieces[1:7]), ''.join(pieces[9:]), *rows]
    assert both(tmp_path / 'd') == sorted(text.encode() for text in expected)
    gaps = []
    for after in range(1, 10):
        out = tmp_path / f'r{after}'
        interrupted(monkeypatch, after, out=out, **settings)
        state = json.loads((out / 'unfinished.json').read_text())
        gaps.append(state['gap'] == state['position'])
        make('fineweb_edu', out=out, **settings)
        assert shard_bytes(out) == shard_bytes(tmp_path / 'd')
    assert any(gaps)


def test_text_files_that_a_tokenizer_loses_are_kept_out(tmp_path, capsys):
    files = {f'{i}.txt': f'text {i}'.encode() for i in range(30)}
    write(tmp_path / 's', files | {'lost.txt': LOSSY.encode()})
    settings = {'source': tmp_path / 's', 'tokenizer': composing_tokenizer(tmp_path), 'out': tmp_path / 'd'}
    make('text', **settings)
    assert 'kept out 1 where the tokenizer loses a part of the text (lost.txt, entry 0)' in capsys.readouterr().out
    assert both(tmp_path / 'd') == sorted(files.values())
    refuse(capsys, '1 of 31 documents cannot be kept, above max_lost=0', 'text', **settings, max_lost=0, overwrite=True)
    assert both(tmp_path / 'd') == sorted(files.values())


def test_another_text_key(tmp_path, capsys):
    pyarrow = pytest.importorskip('pyarrow', reason='pyarrow is an optional extra, in requirements-data.txt')
    from pyarrow import parquet

    texts = [f'text {i}' for i in range(40)]
    write(tmp_path / 's', {'a.jsonl': jsonl(texts[:20], 'content')})
    parquet.write_table(pyarrow.table({'content': texts[20:]}), tmp_path / 's/b.parquet')
    make('fineweb_edu', source=tmp_path / 's', text_key='content', out=tmp_path / 'd', **CORPUS)
    assert both(tmp_path / 'd') == sorted(text.encode() for text in texts)
    assert json.loads((tmp_path / 'd/meta.json').read_text())['settings']['text_key'] == 'content'
    for file in ('a.jsonl', 'b.parquet'):
        refuse(capsys, '--text_key names another field', source=tmp_path / 's' / file, out=tmp_path / 'e', **CORPUS)


# Special tokens


def special(i, content, **changed):
    flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False) | {'special': True}
    return {'id': i, 'content': content} | flags | changed


def write_specials(folder, names, **files):
    """A tokenizer of 2,000 ids and one for each of the names, with files beside it."""
    pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
    folder.mkdir(parents=True)
    whole = json.loads(write_tokenizer(folder / 'tokenizer.json', 2000, document='<filler>').read_text())
    whole['added_tokens'] = [special(256, '<filler>'), *(special(2000 + i, name) for i, name in enumerate(names))]
    (folder / 'tokenizer.json').write_text(json.dumps(whole))
    for name, about in files.items():
        (folder / f'{name}.json').write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(
    'name',
    ['<|bos|>', '<|end_of_text|>', '[EOS]', '<eos>', '<｜begin▁of▁sentence｜>', '[BOS]', '<|startoftext|>', '</s>', '<s>'],
)
def test_a_special_token_called_like_one_is_the_document_token(tmp_path, name):
    meta = tokenizer_meta(str(write_specials(tmp_path / 'a', ['<unk>', '<pad>', name, '<|user|>'])))
    assert meta['document_token'] == 2002 and meta['vocab_size'] == len(meta['token_bytes']) == 2004
    assert decode(meta, [2002, *encode(meta, 'a b')]) == b'a b'


def test_the_document_token_is_what_the_files_beside_name(tmp_path):
    names = ['<one>', '<two>', '<s>', '</s>', '<|im_start|>']
    cases = [
        (2000, {'tokenizer_config': {'bos_token': '<one>', 'eos_token': '<two>'}}),
        (2000, {'tokenizer_config': {'bos_token': {'content': '<one>', 'special': True}, 'eos_token': '<two>'}}),
        (2001, {'tokenizer_config': {'bos_token': None, 'eos_token': '<two>'}}),
        (2000, {'tokenizer_config': {'eos_token': '<two>'}, 'config': {'bos_token_id': 2000}}),
        (2000, {'config': {'bos_token_id': 2000, 'eos_token_id': 2001}, 'generation_config': {'bos_token_id': 2001}}),
        (2001, {'generation_config': {'eos_token_id': [2001, 2000]}}),
        (2001, {'config': {'bos_token_id': 10**6, 'eos_token_id': 2001}}),
        (2002, {'config': {'bos_token_id': 97, 'eos_token_id': None}}),  # no special token
        (2002, {'tokenizer_config': {'bos_token': '<lost>', 'eos_token': '<lost>'}}),
        (2002, {}),
    ]
    for i, (token, files) in enumerate(cases):
        folder = write_specials(tmp_path / str(i), names, **files)
        for path in (folder, folder / 'tokenizer.json'):
            meta = tokenizer_meta(str(path))
            assert meta['document_token'] == token and meta['vocab_size'] == 2005, files
    for broken in ('{', '[]', '5'):
        (folder / 'config.json').write_text(broken)
        with pytest.raises(ConfigError, match='config.json cannot be read'):
            tokenizer_meta(str(folder))


def test_a_token_that_divides_turns_is_no_document_token(tmp_path):
    folder = write_instruct(tmp_path / 'a', TEMPLATES['plain'], bos_token='<|from|>', eos_token='<|over|>')
    meta = tokenizer_meta(str(folder))
    meta |= chat_meta(str(folder), meta['tokenizer_json'])
    ids = special_tokens(meta['tokenizer_json'])[0]
    assert meta['document_token'] == ids['<|endoftext|>'] and meta['stop_token'] == ids['<|over|>']


def test_an_invented_document_token_of_an_older_dataset_still_decodes(tmp_path):
    meta = tokenizer_meta(str(write_specials(tmp_path / 'a', ['<|end_of_text|>'])))
    before = meta | {'document_token': 2001, 'vocab_size': 2002}
    assert decode(before, [2001, *encode(before, 'a b'), 2000]) == b'a b'


# Chat templates that ask for the date

DATED = '{{ strftime_now("%d %b %Y") }}' + TEMPLATES['plain']


def test_a_template_gets_a_fixed_date(tmp_path, capsys):
    folder, said = write_instruct(tmp_path / 'a', DATED), [{'role': 'user', 'content': 'the cat'}]
    for i, settings in enumerate(({}, {'chat_date': '2030-01-02'})):
        make('pathfinding', tokenizer=folder, out=tmp_path / f'd{i}', **SMALL, **settings)
        meta = json.loads((tmp_path / f'd{i}/meta.json').read_text())
        opening = decode(meta, chat_tokens(meta, said)).decode()
        assert opening.startswith(('26 Jul 2024', '02 Jan 2030')[i])
        assert meta.get('chat_date') == meta['settings'].get('chat_date') == (None, '2030-01-02')[i]
    refuse(capsys, 'made with other settings', 'pathfinding', tokenizer=folder, out=tmp_path / 'd1', **SMALL)
    refuse(capsys, 'chat_date=today is no date', 'pathfinding', chat_date='today', out=tmp_path / 'd2')


def test_without_chat_a_template_that_cannot_be_used_is_no_hindrance(tmp_path, monkeypatch):
    folder = write_instruct(tmp_path / 'a', '{{ raise_exception("no") }}')
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(vocab_size=0)
    monkeypatch.setattr(loading, 'build', lambda config: model)
    monkeypatch.setattr(loading, 'GPTConfig', lambda **settings: None)
    monkeypatch.setattr(loading, 'pretrained_config', lambda folder, most: {})
    monkeypatch.setattr(loading, 'load_pretrained', lambda model, folder: None)
    monkeypatch.setattr(loading, 'pretrained_folder', lambda name: name)
    with pytest.raises(ConfigError, match='--chat=False'):
        loading.load(f'hf:{folder}')
    meta = loading.load(f'hf:{folder}', chat=False)[1]['meta']
    assert 'chat_template' not in meta and encode(meta, 'the cat')


# Datasets made before


def test_datasets_made_before_are_accepted(tmp_path, capsys):
    """Their settings lack the keys that came later, which at their defaults mean the same."""
    write(tmp_path / 's', {f'{i}.txt': b'text %d' % i for i in range(30)})
    folder = write_instruct(tmp_path / 'a', TEMPLATES['plain'])
    cases = [
        ('text', {'source': tmp_path / 's'}, {'source', 'extensions', 'tokenizer', 'val_fraction'}),
        ('fineweb_edu', {'source': tmp_path / 's'} | CORPUS, {'subset', 'source', 'tokenizer', 'shard_tokens', 'limit_tokens',
                                                              'val_fraction'}),
        ('pathfinding', {'tokenizer': folder} | SMALL, {'tokenizer', 'chat', 'longest', 'drop_longer', 'pack', 'score_prompt',
            'recur_on_prompt', 'test_depth', 'seed', 'n_train', 'n_val', 'n_test', 'depth', 'width'}),
    ]  # fmt: skip
    for dataset, settings, keys in cases:
        make(dataset, out=tmp_path / dataset, **settings)
        assert set(json.loads((tmp_path / dataset / 'meta.json').read_text())['settings']) == keys
        capsys.readouterr()
        make(dataset, out=tmp_path / dataset, **settings)
        assert 'already holds this dataset' in capsys.readouterr().out


# Loading


@pytest.mark.parametrize('shards', [False, True])
def test_an_empty_file_is_called_so(tmp_path, shards):
    write(tmp_path / 's', {f'{i}.txt': b'text %d' % i for i in range(30)})
    make('fineweb_edu' if shards else 'text', source=tmp_path / 's', out=tmp_path / 'd', **CORPUS if shards else {})
    name = 'train-00000.bin' if shards else 'train.bin'
    (tmp_path / 'd' / name).write_bytes(b'')
    with pytest.raises(ConfigError, match=f'{name} cannot be read \\(it is empty\\)'):
        Dataset(str(tmp_path / 'd')).split('train')


def test_the_loader_is_measured_from_any_folder(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    write(tmp_path / 's', {f'{i}.txt': bytes(rng.integers(97, 123, 2000).astype(np.uint8)) for i in range(4)})
    make('text', source=tmp_path / 's', val_fraction=0.3, out=tmp_path / 'd')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['bench.py'])
    monkeypatch.setattr(bench, 'measure', lambda calls, rounds, device: {'step': 1.0})
    bench.main(['data', '--data_dir=d', '--batches=1', '--rounds=1'])
    assert 'times' in capsys.readouterr().out
