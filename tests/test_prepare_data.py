"""Laws of the datasets: an independent solver, disjoint splits, exact round trips, and nothing half-written."""

import hashlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import prepare_data
from configurator import ConfigError
from prepare_data import S5Config, count_examples, draw_examples, plan_splits
from support.files import find_files
from support.tokens import decode, encode, token_dtype

SMALL = {'n_train': 60, 'n_val': 20, 'n_test': 20}


def make(dataset, **settings):
    prepare_data.main([dataset, *(f'--{k}={v}' for k, v in settings.items())])


def load(out):
    meta = json.loads((out / 'meta.json').read_text())
    return meta, {name: dict(np.load(out / f'{name}.npz')) for name in meta['splits']}


def snapshot(folder):
    """{path: content} of every file below `folder`."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def refuse(capsys, folder, dataset, named, **settings):
    """The command ends with code 2 and one line that says `named`, and leaves the folder as it was."""
    before, paths = snapshot(folder), sorted(folder.rglob('*'))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        make(dataset, **settings)
    said = capsys.readouterr()
    assert stop.value.code == 2
    lines = said.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: ') and named in lines[0], said.err
    assert snapshot(folder) == before and sorted(folder.rglob('*')) == paths


# S5: every target against a solver that reads an example token by token, from the names alone


def check_example(meta, tokens, targets, recur_mask):
    """Solves one unpadded example with plain tuples and dicts, and compares. Returns its number of actions."""
    settings, names = meta['settings'], meta['names']
    words = [names[i] for i in tokens]
    bar, width = words.index('|'), settings['value_len'] if settings['retrieval'] else 0
    dictionary = {}
    for start in range(0, bar, 1 + width):
        name, *values = words[start : start + 1 + width]
        assert name[0] == 'p' and name not in dictionary and all(v[0] == 'v' for v in values)
        dictionary[name] = values
    assert all(target == -1 for target in targets[: bar + 1])
    assert all(read == settings['recur_on_prompt'] for read in recur_mask[:bar]) and all(recur_mask[bar:])

    n = settings['group']
    state, acted = tuple(range(n)), set()
    rest = words[bar + 1 :]
    assert len(rest) % (1 + width) == 0
    for start in range(0, len(rest), 1 + width):
        action, *slots = rest[start : start + 1 + width]
        assert slots == ['_'] * width
        after = [int(digit) for digit in action[1:]]
        state = tuple(after[state[i]] for i in range(n))
        after = 'p' + ''.join(map(str, state))
        answers = [after, *(dictionary[after if settings['retrieve_by'] == 'state' else action] if width else ())]
        here = targets[bar + 1 + start : bar + 1 + start + 1 + width]
        assert [names[i] for i in here] == answers
        for target, score in zip(here, ['state'] + ['retrieval'] * width, strict=True):
            low, high = meta['scores'][score]
            assert low <= target < high
        acted.add(action)
    if settings['actions'] == 'generators':
        swaps = {tuple(i + 1 if k == i else i if k == i + 1 else k for k in range(n)) for i in range(n - 1)}
        allowed = {'p' + ''.join(map(str, p)) for p in swaps | {tuple((k + 1) % n for k in range(n))}}
        assert acted <= allowed
    if width and settings['retrieve_by'] == 'state':
        assert len(dictionary) == len(list(itertools.permutations(range(n))))
    elif width:
        size = settings['dictionary_size'] or len(acting_names(settings))
        assert acted <= set(dictionary) and len(acted) <= size and len(dictionary) == size + settings['distractors']
    return len(rest) // (1 + width)


def acting_names(settings):
    return S5Config(group=settings['group'], actions=settings['actions']).action_ids


def random_settings(rng):
    group = rng.choice([2, 3, 3, 4, 5])
    elements = [0, 0, 2, 6, 24, 120][group]
    actions = rng.choice(['all', 'generators'])
    able = len(acting_names({'group': group, 'actions': actions}))
    settings = {'group': group, 'actions': actions, 'seed': rng.randrange(100), 'retrieval': rng.random() < 0.75}
    low = rng.randint(1, 4)
    settings |= {'steps': f'{low}-{low + rng.randint(3, 8)}', 'recur_on_prompt': rng.random() < 0.3}
    settings |= {'value_len': rng.randint(1, 3), 'n_values': rng.choice([1, 2, 8, 300])}
    if rng.random() < 0.5:
        settings['test_steps'] = str(rng.randint(1, 24))
    if rng.random() < 0.3:
        settings['length_bias'] = rng.uniform(0, 10)
    if settings['retrieval'] and rng.random() < 0.3:
        settings['retrieve_by'] = 'state'
    elif settings['retrieval']:
        size = rng.choice([0, rng.randint(1, able)])
        settings |= {'dictionary_size': size, 'distractors': rng.randint(0, min(6, elements - (size or able)))}
    return settings


def test_every_target_agrees_with_an_independent_solver(tmp_path):
    rng, checked, made = random.Random(1), 0, 0
    while made < 40:
        settings = random_settings(rng) | SMALL
        try:
            S5Config(**settings).check()
        except ConfigError:  # a space too small, which other tests look at
            continue
        make('s5', out=tmp_path / str(made), **settings)
        meta, splits = load(tmp_path / str(made))
        made += 1
        assert meta['vocab_size'] == len(meta['names']) == len(set(meta['names'])) and meta['names'][-1] == '.'
        seen = set()
        for name, s in splits.items():
            assert len(s['tokens']) == settings[f'n_{name}'] == meta['splits'][name]['examples']
            assert s['tokens'].shape == s['targets'].shape == s['recur_mask'].shape
            assert s['tokens'].shape[1] == s['lengths'].max() == meta['longest'][name]
            digest = hashlib.sha256((tmp_path / str(made - 1) / f'{name}.npz').read_bytes()).hexdigest()
            assert digest == meta['splits'][name]['sha256']
            low, _, high = ((settings.get('test_steps') if name == 'test' else '') or settings['steps']).partition('-')
            assert s['steps'].min() >= int(low) and s['steps'].max() <= int(high or low)
            for tokens, targets, mask, length, steps in zip(*s.values(), strict=True):
                assert all(tokens[length:] == meta['pad_token']) and all(targets[length:] == -1) and not any(mask[length:])
                found = check_example(meta, tokens[:length].tolist(), targets[:length].tolist(), mask[:length].tolist())
                assert found == steps
                seen.add(tuple(tokens[:length].tolist()))
                checked += 1
        assert len(seen) == sum(SMALL.values()), 'an example occurs twice'
    assert checked == 40 * sum(SMALL.values())


def test_a_distractor_never_acts_and_every_key_may(tmp_path):
    make('s5', out=tmp_path / 'd', group=3, dictionary_size=2, distractors=3, steps=12, **SMALL)
    _, splits = load(tmp_path / 'd')
    tokens = splits['train']['tokens'].astype(int)
    keys, actions = tokens[:, :10:2], tokens[:, 11::2]
    acted = [len(set(a)) for a in actions]
    assert max(acted) == 2 and np.mean(np.equal(acted, 2)) > 0.9
    assert all(len(set(k)) == 5 for k in keys)
    positions = [list(k).index(a[0]) for k, a in zip(keys, actions, strict=True)]
    assert set(positions) == set(range(5)), 'where a key stands must not say whether it acts'


def test_draws_are_uniform_and_independent_of_each_other():
    config = S5Config(group=3, dictionary_size=4, distractors=1, n_values=4)
    tokens, targets = draw_examples(config, np.random.default_rng(0), 24_000, 6)
    for column, expected in [(0, 6), (11, 6), (13, 6)]:  # a key, two actions
        counts = np.bincount(tokens[:, column], minlength=6)[:expected]
        assert np.all(np.abs(counts - 4_000) < 300)
    assert np.all(np.abs(np.bincount(tokens[:, 3] - 6) - 6_000) < 350)  # a value
    assert np.all(np.abs(np.bincount(targets[:, 21]) - 4_000) < 1_200)  # the last state


def every_example(config, steps):
    """The set of all token rows of a tiny setting, enumerated one choice at a time."""
    rows = set()
    for acting in itertools.combinations(config.action_ids, config.n_keys):
        rest = [e for e in range([0, 0, 2, 6][config.group]) if e not in acting]
        for extra in itertools.combinations(rest, config.distractors):
            for keys in itertools.permutations(acting + extra):
                for values in itertools.product(range(config.n_values), repeat=len(keys) * config.value_len):
                    rows.update((keys, values, actions) for actions in itertools.product(acting, repeat=steps))
    return rows


@pytest.mark.parametrize('steps', [1, 2, 3])
def test_the_count_of_examples_is_exact(steps):
    for group, actions in itertools.product([2, 3], ['all', 'generators']):
        plain = S5Config(group=group, actions=actions, retrieval=False)
        assert count_examples(plain, steps) == len(plain.action_ids) ** steps
        for size, distractors in [(0, 0), (1, 0), (1, 1), (2, 1), (1, 2)]:
            config = S5Config(group=group, actions=actions, dictionary_size=size, distractors=distractors, n_values=1)
            if size <= len(config.action_ids) and config.n_keys + distractors <= [0, 0, 2, 6][group]:
                assert count_examples(config, steps) == len(every_example(config, steps)), config
    by_state = S5Config(group=3, actions='generators', n_values=2, retrieve_by='state')
    assert count_examples(by_state, steps) == math.factorial(6) * 2**6 * 3**steps


def test_a_whole_space_can_be_used_up_and_not_one_more(tmp_path, capsys):
    whole = {'group': 3, 'retrieval': False, 'steps': '1-3', 'n_val': 3, 'n_test': 3, 'out': tmp_path / 'd'}
    refuse(capsys, tmp_path, 's5', 'n_train=253', n_train=253, **whole)  # 6 + 36 + 216 - 6 = 252
    make('s5', n_train=252, **whole)
    _, splits = load(tmp_path / 'd')
    for name in ('val', 'test'):
        assert sorted(splits[name]['steps']) == [1, 2, 3]
    assert np.bincount(splits['train']['steps']).tolist() == [0, 4, 34, 214]


def test_lengths_are_even_where_supply_allows():
    shares = plan_splits(S5Config(group=3, retrieval=False, steps='1-8', n_train=10_000))
    for split, wanted in (('train', 10_000), ('val', 2_000), ('test', 2_000)):
        assert sum(shares[split].values()) == wanted and min(shares[split].values()) > 0
        rich = [shares[split][s] for s in range(6, 9)]
        assert max(rich) - min(rich) <= 1 and max(shares[split].values()) == max(rich)
    longer = plan_splits(S5Config(group=3, retrieval=False, steps='4-6', test_steps='1-12', n_train=1_000, n_val=9, n_test=500))
    assert longer['test'][1] == 6, 'nothing of a length that only test has is kept back'


def test_a_length_bias_favours_short_examples_where_supply_allows():
    settings = {'group': 3, 'steps': '3-10', 'n_train': 10_000}
    for bias in (0.5, 1.0, 3.0):
        share = plan_splits(S5Config(length_bias=bias, **settings))['train']
        expected = {s: s**-bias for s in range(3, 11)}
        assert sum(share.values()) == 10_000
        for s in share:
            assert abs(share[s] - 10_000 * expected[s] / sum(expected.values())) < 2
    scarce = plan_splits(S5Config(length_bias=2.0, group=3, retrieval=False, steps='1-8', n_train=10_000))
    for split, wanted in (('train', 10_000), ('val', 2_000), ('test', 2_000)):
        assert sum(scarce[split].values()) == wanted and scarce[split][1] < scarce[split][5] > scarce[split][8]


def test_a_seed_decides_everything_and_the_test_set_does_not_know_n_train(tmp_path):
    for name, more in (('a', {}), ('b', {}), ('c', {'seed': 1}), ('d', {'n_train': 90})):
        make('s5', out=tmp_path / name, **({'group': 3, 'steps': '2-6'} | SMALL | more))
    a, b, c, d = (snapshot(tmp_path / name) for name in 'abcd')
    assert a == b
    assert all(a[f] != c[f] for f in a)
    assert a['test.npz'] == d['test.npz'] and a['val.npz'] == d['val.npz']


@pytest.mark.parametrize(
    ('named', 'settings'),
    [
        ('group=6', {'group': 6}),
        ('group=1', {'group': 1}),
        ('actions=some', {'actions': 'some'}),
        ('steps=1-x', {'steps': '1-x'}),
        ('steps=0', {'steps': 0}),
        ('steps=3-8', {'steps': '8-3'}),
        ('steps=-3', {'steps': -3}),
        ('test_steps=1-5000', {'test_steps': '1-5000'}),
        ('dictionary_size=7', {'group': 3, 'dictionary_size': 7}),
        ('dictionary_size=-1', {'dictionary_size': -1}),
        ('distractors=1', {'group': 3, 'distractors': 1}),
        ('distractors=2', {'retrieval': False, 'distractors': 2}),
        ('dictionary_size=2', {'retrieval': False, 'dictionary_size': 2}),
        ('distractors=2', {'retrieve_by': 'state', 'distractors': 2}),
        ('dictionary_size=2', {'retrieve_by': 'state', 'dictionary_size': 2}),
        ('retrieve_by=state', {'retrieve_by': 'state', 'retrieval': False}),
        ('retrieve_by=value', {'retrieve_by': 'value'}),
        ('length_bias=-1', {'length_bias': -1}),
        ('length_bias=11', {'length_bias': 11}),
        ('value_len=0', {'value_len': 0}),
        ('n_values=0', {'n_values': 0}),
        ('seed=-1', {'seed': -1}),
        ('n_val=0', {'n_val': 0}),
        ('n_train=1000000000000', {'n_train': '1e12'}),
        ('n_test=2000', {'group': 3, 'retrieval': False, 'steps': '1-2'}),
        ('n_train=50', {'group': 3, 'retrieval': False, 'steps': '2', 'n_train': 50, 'n_val': 1, 'n_test': 1}),
        ("'n_vale'", {'n_vale': 3}),
    ],
)
def test_an_impossible_task_is_one_sentence(tmp_path, capsys, named, settings):
    refuse(capsys, tmp_path, 's5', named, out=tmp_path / 'd', **settings)


# Text


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def documents_of(out, split):
    """The documents (bytes) of one split, cut where the document token stands."""
    meta = json.loads((out / 'meta.json').read_text())
    tokens = np.fromfile(out / f'{split}.bin', meta['dtype'])
    starts = np.flatnonzero(tokens == meta['document_token'])
    assert len(tokens) == meta['splits'][split]['tokens'] and len(starts) == meta['splits'][split]['documents']
    assert starts[0] == 0, 'the first document is opened too'
    assert hashlib.sha256((out / f'{split}.bin').read_bytes()).hexdigest() == meta['splits'][split]['sha256']
    assert sum(meta['token_bytes'][t] for t in tokens) == len(decode(meta, tokens))
    return [decode(meta, part) for part in np.split(tokens, starts[1:])]


def random_text(rng):
    return ''.join(rng.choice('ab \n\x00é漢🙂') for _ in range(rng.randint(1, 300)))


def test_every_document_comes_back_from_one_of_the_two_splits(tmp_path):
    rng = random.Random(2)
    for case in range(15):
        files = {f'{rng.randrange(5)}/{i}.txt': random_text(rng) for i in range(rng.randint(2, 40))}
        files['copy.txt'] = rng.choice(list(files.values()))
        source = write(tmp_path / f's{case}', files)
        fraction = rng.uniform(0.01, 0.9)
        make('text', source=source, val_fraction=fraction, out=tmp_path / f'd{case}')
        train, val = (documents_of(tmp_path / f'd{case}', split) for split in ('train', 'val'))
        in_order = [files[name].encode() for name in sorted(files)]
        assert sorted(train + val) == sorted(in_order)
        assert not set(train) & set(val), 'copies of a document are on both sides'
        for split in (train, val):  # each split keeps the order of the files
            assert split == [d for d in in_order if d in set(split)]
        distinct = len(set(in_order))
        assert len(set(val)) == min(max(round(fraction * distinct), 1), distinct - 1)


def test_a_split_depends_on_the_documents_alone(tmp_path):
    files = {f'{i}.txt': f'document {i}' for i in range(30)}
    write(tmp_path / 'a', files)
    write(tmp_path / 'b', {f'z/{29 - i}/{name}': content for i, (name, content) in enumerate(files.items())})
    for name in 'ab':
        make('text', source=tmp_path / name, out=tmp_path / f'd{name}', val_fraction=0.3)
    assert sorted(documents_of(tmp_path / 'da', 'val')) == sorted(documents_of(tmp_path / 'db', 'val'))


def test_a_special_token_in_the_text_is_plain_bytes(tmp_path):
    text = 'before <|endoftext|> after\n<|bos|>'
    make('text', source=write(tmp_path / 's', {'a': text, 'b': 'other', 'c': text * 3}), out=tmp_path / 'd')
    meta = json.loads((tmp_path / 'd/meta.json').read_text())
    assert sorted(documents_of(tmp_path / 'd', 'train') + documents_of(tmp_path / 'd', 'val')) == sorted(
        [text.encode(), b'other', text.encode() * 3]
    )
    assert encode(meta, text) == list(text.encode()) and decode(meta, encode(meta, text)) == text.encode()
    assert decode(meta, [256, 97, 256]) == b'a' and meta['vocab_size'] == 257


def test_empty_binary_and_hidden_files_are_left_out_and_counted(tmp_path, capsys):
    files = {'a.txt': 'a', 'b.txt': 'b', 'empty.txt': '', 'picture.png': b'\x89\xff', '.hidden': 'h', '.git/config': 'g'}
    make('text', source=write(tmp_path / 's', files), out=tmp_path / 's/d')
    assert 'skipped 1 files that are not UTF-8 text (picture.png) and 1 empty files' in capsys.readouterr().out
    assert sorted(documents_of(tmp_path / 's/d', 'train') + documents_of(tmp_path / 's/d', 'val')) == [b'a', b'b']
    before = snapshot(tmp_path / 's/d')
    make('text', source=tmp_path / 's', out=tmp_path / 's/d', overwrite=True)  # the dataset itself lies in the source
    assert snapshot(tmp_path / 's/d') == before


def test_sources_may_be_files_folders_and_patterns_and_overlap(tmp_path):
    s = write(tmp_path / 's', {'a/1.txt': '1', 'a/2.md': '2', 'b/3.txt': '3', 'b/4.txt': '4', '5.rst': '5'})
    source = f'{s}/a,{s}/a/1.txt, {s}/b/*.txt,{s}/5.rst,'
    make('text', source=source, extensions='txt,.rst', out=tmp_path / 'd')
    assert sorted(documents_of(tmp_path / 'd', 'train') + documents_of(tmp_path / 'd', 'val')) == [b'1', b'3', b'4', b'5']
    meta = (tmp_path / 'd/meta.json').read_text()
    assert json.loads(meta)['source'] == 'a, 1.txt, *.txt, 5.rst'


def test_text_that_cannot_be_prepared_is_one_sentence(tmp_path, capsys):
    write(
        tmp_path,
        {'one.txt': 'one', 'same/a': 'x', 'same/b': 'x', 'nothing/e': '', 'binary/b': b'\xff', 'two/a': 'a', 'two/b': 'b'},
    )
    (tmp_path / 'void').mkdir()
    out = tmp_path / 'd'
    for source in ('same', 'nothing', 'binary', 'void'):
        refuse(capsys, tmp_path, 'text', f'source={tmp_path / source}', source=tmp_path / source, out=out)
    refuse(capsys, tmp_path, 'text', f'did you mean {tmp_path / "same"}?', source=tmp_path / 'sane', out=out)
    refuse(capsys, tmp_path, 'text', 'source=', source=tmp_path / 'missing/*.txt', out=out)
    refuse(capsys, tmp_path, 'text', 'source=,', source=',', out=out)
    for fraction in ('0', '1', '-0.1', 'nan'):
        refuse(capsys, tmp_path, 'text', 'val_fraction=', source=tmp_path / 'two', val_fraction=fraction, out=out)
    refuse(capsys, tmp_path, 'text', 'out=', source=tmp_path / 'two', out='')
    refuse(capsys, tmp_path, 'text', f'out={tmp_path / "one.txt"}', source=tmp_path / 'two', out=tmp_path / 'one.txt')
    refuse(capsys, tmp_path, 'text', str(tmp_path / 'one.txt'), source=tmp_path / 'two', out=tmp_path / 'one.txt/below')
    for dataset in ('txet', 'S5', '--out=x'):
        refuse(capsys, tmp_path, dataset, repr(dataset))


def test_the_standard_library_is_several_megabytes_without_tests_or_machine_paths(tmp_path, capsys):
    make('text', out=tmp_path / 'd')
    meta = json.loads((tmp_path / 'd/meta.json').read_text())
    assert meta['splits']['train']['tokens'] > 4e6 and meta['splits']['val']['tokens'] > 1e5
    assert meta['source'].startswith('Python standard library 3.')
    assert sys.prefix not in (tmp_path / 'd/meta.json').read_text()
    assert not any('test' in p.split(os.sep)[-2:-1] for p in find_files(''))


# Tokens


@pytest.mark.parametrize(('vocab_size', 'bits'), [(2, 16), (257, 16), (65_535, 16), (65_536, 16), (65_537, 32), (100_000, 32)])
@pytest.mark.fault('ids around 65,536', 'stored whole, decoded exactly')
def test_the_last_id_of_any_vocabulary_survives(vocab_size, bits):
    dtype = token_dtype(vocab_size)
    assert dtype.itemsize * 8 == bits
    assert np.array([vocab_size - 1]).astype(dtype)[0] == vocab_size - 1


def test_names_round_trip_and_an_unknown_one_is_named(tmp_path):
    make('s5', out=tmp_path / 'd', group=3, steps='2-6', **SMALL)
    meta, splits = load(tmp_path / 'd')
    for row in splits['val']['tokens']:
        text = decode(meta, row).decode()
        assert encode(meta, text) == row.tolist()
        assert decode(meta, row[:5]) + decode(meta, row[5:]) == text.encode()
    with pytest.raises(ConfigError, match=r"'p011'.*nearest is 'p\d{3}'"):
        encode(meta, 'p012 p011')


# Folders


def test_a_second_start_reuses_and_other_settings_are_refused(tmp_path, capsys):
    source = write(tmp_path / 's', {'a': 'a', 'b': 'b'})
    cases = [
        ('s5', {'group': 3, 'steps': '2-6'} | SMALL, {'seed': 1}),
        ('text', {'source': source}, {'val_fraction': 0.5}),
    ]
    for dataset, settings, other in cases:
        out = tmp_path / dataset
        make(dataset, out=out, **settings)
        times = {p: p.stat().st_mtime_ns for p in out.iterdir()}
        capsys.readouterr()
        make(dataset, out=f'{out}/', **settings)
        assert 'already holds this dataset' in capsys.readouterr().out
        assert times == {p: p.stat().st_mtime_ns for p in out.iterdir()}
        refuse(capsys, tmp_path, dataset, f'out={out}', out=out, **(settings | other))
        piece = sorted(out.glob('train.*'))[0]
        piece.write_bytes(piece.read_bytes()[:-1])  # damaged
        refuse(capsys, tmp_path, dataset, f'out={out}', out=out, **settings)
        make(dataset, out=out, overwrite=True, **(settings | other))
        make(dataset, out=out, **(settings | other))
        assert 'already holds this dataset' in capsys.readouterr().out
    make('text', source=source, out=tmp_path / 's5', overwrite=True)  # of another kind
    assert sorted(p.name for p in (tmp_path / 's5').iterdir()) == ['meta.json', 'train.bin', 'val.bin']
    for text in ('', '[]', '{}', '{"kind": "text"}', 'null'):
        (tmp_path / 's5/meta.json').write_text(text)
        refuse(capsys, tmp_path, 'text', 'out=', source=source, out=tmp_path / 's5')
    (tmp_path / 'letters').mkdir()
    (tmp_path / 'letters/mine.txt').write_text('mine')
    for overwrite in (False, True):
        refuse(capsys, tmp_path, 's5', 'like mine.txt', out=tmp_path / 'letters', overwrite=overwrite, **SMALL)


@pytest.mark.parametrize('moves', range(4))
def test_an_interrupted_run_leaves_no_dataset_and_the_next_one_completes(tmp_path, monkeypatch, moves):
    """The run dies at its (moves + 1)-th rename, first on an empty place and then over an older dataset."""
    out, settings = tmp_path / 'd', {'group': 3, 'steps': '2-6'} | SMALL
    make('s5', out=tmp_path / 'whole', **settings)
    for overwrite in (False, True):
        calls, real = [], os.replace

        def dying(a, b, calls=calls, real=real):
            calls.append(a)
            if len(calls) > moves:
                raise KeyboardInterrupt
            real(a, b)

        with monkeypatch.context() as patch:
            patch.setattr(os, 'replace', dying)
            with pytest.raises(SystemExit) as stop:
                make('s5', out=out, overwrite=overwrite, **settings)
            assert stop.value.code == 130
        assert not (out / 'meta.json').exists()
        assert sorted(p.name for p in tmp_path.iterdir()) == ['d', 'whole'], 'the working folder is gone'
        make('s5', out=out, **settings)
        assert snapshot(out) == snapshot(tmp_path / 'whole')


@pytest.mark.fault('preparing a task is killed', 'no dataset is left')
def test_a_killed_run_leaves_no_dataset(tmp_path):
    here = os.path.dirname(os.path.abspath(prepare_data.__file__))
    command = [
        sys.executable,
        os.path.join(here, 'prepare_data.py'),
        's5',
        f'--out={tmp_path}/d',
        '--group=3',
        '--n_train=1000000',
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not list(tmp_path.glob('d.partial-*/test.npz')):
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / 'd').exists()


def test_help_names_every_dataset_and_every_key(capsys):
    for argv in ([], ['--help'], ['--list']):
        prepare_data.main(argv)
        said = capsys.readouterr().out
        assert all(f'\n  {name} ' in said for name in prepare_data.DATASETS)
    for name, (config_class, _, _) in prepare_data.DATASETS.items():
        with pytest.raises(SystemExit) as stop:
            prepare_data.main([name, '--help'])
        said = capsys.readouterr().out
        assert stop.value.code == 0 and all(f'--{field}=' in said for field in config_class.__dataclass_fields__)


def test_preparing_needs_no_torch():
    here = os.path.dirname(os.path.abspath(prepare_data.__file__))
    code = 'import sys, prepare_data; sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=here).returncode == 0
