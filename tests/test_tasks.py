"""Laws of the text tasks: independent solvers, disjoint splits, aligned arrays, answers told apart, bad files refused."""

import contextlib
import io
import json
import random
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_prepare_data import load, make, refuse, snapshot

import eval as evaluation
import train
from configurator import ConfigError
from model import build
from support.answers import extract_answer, quantity, same_answer
from support.data import Dataset
from support.folders import file_sha256
from support.questions import question_example
from support.text_tasks import pack_rows
from support.tokens import decode, encode
from train import TrainConfig

SHARED = Path(__file__).resolve().parents[2] / 'shared/data'
SMALL = {'n_train': 60, 'n_val': 20, 'n_test': 20}


def real(name):
    """The folder of a real dataset; skips the test where it is missing."""
    if not (SHARED / name).is_dir():
        pytest.skip(f'the files of {name} are not in ../shared/data/{name}')
    return SHARED / name


def examples_of(out, split):
    return [json.loads(line) for line in (out / f'{split}.jsonl').read_text('utf-8').splitlines()]


def check_arrays(out):
    """Every row of every split against its raw example, position by position. Returns (meta, {split: raw examples})."""
    meta, splits = load(out)
    found = {}
    assert meta['kind'] == 'task' and meta['aligned'] is False and meta['scores'] == {}
    end, settings = meta['document_token'], meta['settings']
    for name, s in splits.items():
        found[name] = examples_of(out, name)
        assert len(found[name]) == len(s['tokens']) == meta['splits'][name]['examples']
        assert s['tokens'].shape == s['targets'].shape == s['recur_mask'].shape == (len(s['tokens']), meta['longest'][name])
        assert s['lengths'].max() == meta['longest'][name] and s['tokens'].max() < meta['vocab_size']
        assert file_sha256(out / f'{name}.npz') == meta['splits'][name]['sha256']
        assert file_sha256(out / f'{name}.jsonl') == meta['jsonl_sha256'][name]
        for i, e in enumerate(found[name]):
            prompt, response = [end, *encode(meta, e['prompt'])], [*encode(meta, e['response']), end]
            tokens, targets, mask = (s[k][i].tolist() for k in ('tokens', 'targets', 'recur_mask'))
            length, p = len(prompt + response), len(prompt)
            assert tokens == prompt + response + [meta['pad_token']] * (len(tokens) - length)
            assert (length, p, e['depth']) == (s['lengths'][i], s['prompt_lengths'][i], s['steps'][i])
            first = 0 if settings['score_prompt'] else p - 1
            for at, (target, read) in enumerate(zip(targets, mask, strict=True)):
                assert target == (tokens[at + 1] if first <= at < length - 1 else -1)
                assert read == ((settings['recur_on_prompt'] or at >= p) and at < length)
            assert decode(meta, tokens).decode() == e['prompt'] + e['response']
            assert e['response'].splitlines()[-1] == f'#### {e["answer"]}'
            assert extract_answer(meta['task'], e['response']) == e['answer']
    prompts = {name: {e['prompt'] for e in of} for name, of in found.items()}
    assert len(set().union(*prompts.values())) == sum(map(len, prompts.values())), 'two splits share an example'
    return meta, found


def short_run(out, tmp_path, **changes):
    """Trains on the dataset for three updates; its log must hold finite losses."""
    meta = json.loads((out / 'meta.json').read_text())
    longest = max(meta['longest'].values())
    settings = {'n_layer': 2, 'n_head': 2, 'n_embd': 16, 'l_start': 0, 'l_end': 1, 'recurrence': 't2mlr', 'schedule': 'jacobi'}
    settings |= {'d_forward': 2, 'd_backward': 1}
    settings |= {'block_size': longest, 'batch_size': 2, 'max_steps': 3, 'warmup_steps': 1, 'eval_interval': 3}
    settings |= {'eval_batches': 1, 'eval_exact_batches': 0, 'reset_token': meta['document_token'], 'device': 'cpu'}
    config = TrainConfig(**(settings | {'data_dir': str(out), 'out_dir': str(tmp_path / 'run'), 'threads': 1} | changes))
    config.check()
    with contextlib.redirect_stdout(io.StringIO()):
        train.train(config)
    log = [json.loads(line) for line in (tmp_path / 'run/log.jsonl').read_text().splitlines()]
    assert any('val' in line for line in log) and 'NaN' not in json.dumps(log)


# Generated tasks: every answer against a solver that reads the prompt alone


def solve_assignment(form, prompt):
    """(number asked for, aliases followed) by following the names backwards; a program is also run."""
    if form == 'words':
        *said, question = prompt.strip().split('. ')
        given = {}
        for sentence in said:
            name, _, *what = sentence.split()
            given[name] = what[-1] if what[0] == 'as' else what[0]
        asked = question.split()[4]
    else:
        *said, question = [line for line in prompt.replace('; ', '\n').split('\n') if line]
        given = dict(line.replace(' ', '').split('=') for line in said)
        asked = question.removeprefix('print(').strip('?)')
    if form == 'code':
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(prompt, {})
        answer = printed.getvalue().strip()
    depth, what = 0, given[asked]
    while not what.isdigit():
        depth, what = depth + 1, given[what]
    assert form != 'code' or answer == what
    return what, depth, len(given)


@pytest.mark.parametrize('form', ['plain', 'words', 'code'])
def test_assignments_agree_with_an_independent_solver(tmp_path, form):
    settings = {'n_train': 1_500, 'n_val': 100, 'n_test': 300, 'form': form, 'depth': '0-3', 'test_depth': '2-11'}
    make('variable_assignment', out=tmp_path / 'd', variables=12, values='5-40', **settings)
    _, found = check_arrays(tmp_path / 'd')
    for name, of in found.items():
        assert Counter(e['depth'] for e in of).keys() == set(range(2, 12) if name == 'test' else range(4))
        for e in of:
            assert solve_assignment(form, e['prompt']) == (e['answer'], e['depth'], 12)
            assert 5 <= int(e['answer']) <= 40
    numbers = Counter(int(e['answer']) for e in found['train'])
    assert set(numbers) == set(range(5, 41)) and max(numbers.values()) < 90, 'the answers are even'


def every_way(edges, start, goal):
    """All paths (lists of nodes) without repetition from start to goal, of an edge list."""
    ways, open_ways = [], [[start]]
    while open_ways:
        way = open_ways.pop()
        if way[-1] == goal:
            ways.append(way)
        else:
            open_ways += [[*way, b] for a, b in edges if a == way[-1] and b not in way]
    return ways


@pytest.mark.parametrize('width', [2, 3, 4])
def test_paths_are_the_unique_shortest_ones(tmp_path, width):
    settings = {'n_train': 700, 'n_val': 100, 'n_test': 200, 'depth': '2-4', 'test_depth': '3-6'}
    make('pathfinding', out=tmp_path / 'd', width=width, seed=width, **settings)
    _, found = check_arrays(tmp_path / 'd')
    longer = 0
    for of in found.values():
        for e in of:
            line, question = e['prompt'].splitlines()
            edges = [tuple(edge.split('>')) for edge in line.split()]
            start, goal = question.strip('?').split(' to ')
            ways = sorted(every_way(edges, start, goal), key=len)
            assert ' '.join(ways[0]) == e['answer'] and len(ways[0]) == e['depth'] + 1
            assert len(ways) == 1 or len(ways[1]) > len(ways[0])
            longer += len(ways) > 1
            leaves = {b for _, b in edges} - {a for a, _ in edges}
            assert leaves - {goal}, 'a dead end'
            assert len(set(edges)) == len(edges)
    assert longer > 100


@pytest.mark.parametrize('task', ['variable_assignment', 'pathfinding'])
def test_a_seed_decides_everything(tmp_path, task):
    for name, more in (('a', {}), ('b', {}), ('c', {'seed': 1}), ('d', {'n_train': 90})):
        make(task, out=tmp_path / name, **(SMALL | more))
    a, b, c, d = (snapshot(tmp_path / name) for name in 'abcd')
    assert a == b
    assert all(a[f] != c[f] for f in a)
    assert all(a[f] == d[f] for f in ('test.npz', 'test.jsonl', 'val.npz', 'val.jsonl'))


@pytest.mark.parametrize(('score', 'recur'), [(True, False), (False, True), (True, True)])
def test_prompts_are_scored_and_recurred_on_when_asked(tmp_path, score, recur):
    make('pathfinding', out=tmp_path / 'd', score_prompt=score, recur_on_prompt=recur, **SMALL)
    check_arrays(tmp_path / 'd')


@pytest.mark.parametrize(
    ('task', 'named', 'settings'),
    [
        ('variable_assignment', 'variables=4', {'depth': '1-4', 'variables': 4}),
        ('variable_assignment', 'variables=8', {'test_depth': '9'}),
        ('variable_assignment', 'variables=27', {'variables': 27}),
        ('pathfinding', 'depth=0', {'depth': '0'}),
        ('variable_assignment', 'depth=3-2', {'depth': '3-2'}),
        ('variable_assignment', 'test_depth=26', {'test_depth': '26'}),
        ('variable_assignment', 'values=a', {'values': 'a'}),
        ('variable_assignment', 'form=prose', {'form': 'prose'}),
        ('variable_assignment', 'seed=-1', {'seed': -1}),
        ('variable_assignment', 'n_train=0', {'n_train': 0}),
        ('variable_assignment', 'n_train=100000', {'n_train': 100_000, 'depth': 1, 'variables': 2, 'values': '1-2'}),
        ('pathfinding', 'width=1', {'width': 1}),
        ('pathfinding', 'width=400', {'width': 400}),
        ('pathfinding', 'depth=301', {'depth': 301}),
        ('pathfinding', 'tokenizer=gtp2', {'tokenizer': 'gtp2'}),
    ],
)
def test_an_impossible_task_is_one_sentence(tmp_path, capsys, task, named, settings):
    refuse(capsys, tmp_path, task, named, out=tmp_path / 'd', **(SMALL | settings))


def test_a_second_start_reuses_and_a_damaged_example_is_noticed(tmp_path, capsys):
    settings = {'out': tmp_path / 'd'} | SMALL
    make('pathfinding', **settings)
    make('pathfinding', **settings)
    assert 'already holds this dataset' in capsys.readouterr().out
    refuse(capsys, tmp_path, 'pathfinding', 'other settings', **(settings | {'seed': 3}))
    refuse(capsys, tmp_path, 'pathfinding', 'other settings', **(settings | {'recur_on_prompt': True}))
    (tmp_path / 'd/val.jsonl').write_text('')
    refuse(capsys, tmp_path, 'pathfinding', 'damaged', **settings)
    make('s5', out=tmp_path / 'd', group=3, overwrite=True, steps='2-6', **SMALL)
    assert not list((tmp_path / 'd').glob('*.jsonl')), 'nothing of the old dataset stays'


def test_a_generated_task_trains(tmp_path):
    make('variable_assignment', out=tmp_path / 'd', **SMALL)
    short_run(tmp_path / 'd', tmp_path)


def test_other_tokenizers_give_the_same_examples(tmp_path):
    tokenizers = pytest.importorskip('tokenizers')
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(['#### 1 2 3 4 to'] * 9, vocab_size=300, min_frequency=1, special_tokens=['<|endoftext|>'])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    for name in ('bytes', str(tmp_path / 'tokenizer.json')):
        make('pathfinding', out=tmp_path / f'd{len(name)}', tokenizer=name, **SMALL)
    bpe, meta = f'd{len(name)}', check_arrays(tmp_path / f'd{len(name)}')[0]
    assert meta['vocab_size'] > 257 and meta['longest']['test'] < load(tmp_path / 'd5')[0]['longest']['test']
    assert examples_of(tmp_path / bpe, 'train') == examples_of(tmp_path / 'd5', 'train')
    short_run(tmp_path / bpe, tmp_path)


# Questions and answers


ROWS = {
    'gsm8k': {'question': 'How many?', 'answer': 'Two and 3*4 = <<3*4=12>>12.\n\nSo 14.\n#### 1,014'},
    'gsm8k_aug': {'question': 'How many?', 'steps': ['<<3*4=12>>', '<<12+2=14>>'], 'answer': '14'},
    'prosqa': {'question': 'Is Tom a lempus?', 'steps': ['Tom is a terpus.'], 'answer': 'Tom is a lempus.', 'edges': [[0, 1]]},
    'hotpotqa': {
        'question': 'Who?',
        'answer': 'Ada',
        'context': {'title': ['A', 'B'], 'sentences': [['One. ', 'Two.'], ['Three.']]},
        'supporting_facts': {'title': ['A', 'B', 'B'], 'sent_id': [1, 0, 7]},
    },
    'math500': {'problem': 'Half of 1?', 'solution': 'It is\n\\[x.\\]', 'answer': '\\frac{1}{2}', 'level': 3, 'subject': 'A'},
}
RESPONSES = {
    'gsm8k': ('How many?\n', 'Two and 3*4 = 12.\nSo 14.\n#### 1,014', 2),
    'gsm8k_aug': ('How many?\n', '<<3*4=12>>\n<<12+2=14>>\n#### 14', 2),
    'prosqa': ('Is Tom a lempus?\n', 'Tom is a terpus.\n#### Tom is a lempus.', 1),
    'hotpotqa': ('A: One. Two.\nB: Three.\nWho?\n', 'Two.\nThree.\n#### Ada', 2),
    'math500': ('Half of 1?\n', 'It is\n\\[x.\\]\n#### \\frac{1}{2}', 3),
}


def rows_of(task, n, start=0):
    """n different rows of a task's form."""
    question = 'problem' if task == 'math500' else 'question'
    return [ROWS[task] | {question: f'{i}. {ROWS[task][question]}'} for i in range(start, start + n)]


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == '.parquet':
        pa = pytest.importorskip('pyarrow')
        pytest.importorskip('pyarrow.parquet').write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == '.json':
        path.write_text(json.dumps(rows), 'utf-8')
    else:
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows), 'utf-8')
    return path


@pytest.mark.parametrize('ending', ['jsonl', 'json', 'parquet'])
@pytest.mark.parametrize('task', ROWS)
def test_a_row_becomes_prompt_reasoning_and_answer(tmp_path, task, ending):
    for i, name in enumerate(('train-00', 'train-01', 'valid', 'test')):
        write_rows(tmp_path / f's/{name}.{ending}', rows_of(task, 4, 4 * i))
    make(task, source=tmp_path / 's', out=tmp_path / 'd')
    meta, found = check_arrays(tmp_path / 'd')
    assert {name: len(of) for name, of in found.items()} == {'train': 8, 'val': 4, 'test': 4} and meta['task'] == task
    prompt, response, depth = RESPONSES[task]
    question = prompt.splitlines()[-1]
    for i, e in enumerate(found['train'] + found['val'] + found['test']):
        assert e['prompt'] == prompt.replace(question, f'{i}. {question}')
        assert (e['response'], e['depth']) == (response, depth)


def test_the_original_files_of_hotpotqa_are_read_too(tmp_path):
    row = ROWS['hotpotqa'] | {
        'context': [['A', ['One. ', 'Two.']], ['B', ['Three.']]],
        'supporting_facts': [['A', 1], ['B', 0]],
    }
    example = question_example('hotpotqa', row)
    assert (example['prompt'], example['response'], example['depth']) == RESPONSES['hotpotqa']


def test_what_a_later_split_holds_is_left_out_and_a_missing_one_is_made(tmp_path, capsys):
    write_rows(tmp_path / 's/train.jsonl', rows_of('prosqa', 40) + rows_of('prosqa', 5))
    write_rows(tmp_path / 's/test.jsonl', rows_of('prosqa', 10, 35))
    write_rows(tmp_path / 's/notes.txt', [])
    make('prosqa', source=tmp_path / 's', out=tmp_path / 'd', val_fraction=0.2)
    _, found = check_arrays(tmp_path / 'd')
    assert 'examples that another split holds' in capsys.readouterr().out
    assert len({e['prompt'] for e in found['train'] + found['val']}) == 35 and 4 <= len(found['val']) <= 11
    write_rows(tmp_path / 'v/valid.json', rows_of('prosqa', 10))
    make('prosqa', source=tmp_path / 'v/valid.json', out=tmp_path / 'dv')
    assert {name: len(of) for name, of in check_arrays(tmp_path / 'dv')[1].items()} == {'train': 9, 'val': 1}
    write_rows(tmp_path / 't/latest.jsonl', rows_of('prosqa', 10))  # no word for a split
    make('prosqa', source=tmp_path / 't', out=tmp_path / 'dt')
    assert set(check_arrays(tmp_path / 'dt')[1]) == {'train', 'val'}
    make('math500', source=write_rows(tmp_path / 'm/test.jsonl', rows_of('math500', 3)), out=tmp_path / 'dm')
    assert set(check_arrays(tmp_path / 'dm')[1]) == {'test'}


def test_longer_examples_are_refused_or_left_out(tmp_path, capsys):
    rows = rows_of('gsm8k', 20)
    rows[7] |= {'question': 'long ' * 100 + rows[7]['question']}
    source = write_rows(tmp_path / 'train.jsonl', rows)
    settings = {'source': source, 'out': tmp_path / 'd', 'longest': 200}
    refuse(capsys, tmp_path, 'gsm8k', 'longest=200', **settings)
    refuse(capsys, tmp_path, 'gsm8k', 'longest=5', **(settings | {'longest': 5, 'drop_longer': True}))
    refuse(capsys, tmp_path, 'gsm8k', 'drop_longer=True', source=source, out=tmp_path / 'd', drop_longer=True)
    make('gsm8k', **settings, drop_longer=True)
    assert sum(len(of) for of in check_arrays(tmp_path / 'd')[1].values()) == 19


def test_the_hub_is_asked_by_name_and_its_failure_is_one_sentence(tmp_path, capsys, monkeypatch):
    asked = []

    def load_dataset(path, **options):
        asked.append((path, options))
        return {'train': rows_of('gsm8k', 6), 'test': rows_of('gsm8k', 3, 6)}

    monkeypatch.setitem(sys.modules, 'datasets', SimpleNamespace(load_dataset=load_dataset))
    make('gsm8k', out=tmp_path / 'd')
    meta, found = check_arrays(tmp_path / 'd')
    assert asked == [('openai/gsm8k', {'name': 'main'})] and meta['source'] == 'openai/gsm8k'
    assert {name: len(of) for name, of in found.items()} == {'train': 5, 'val': 1, 'test': 3}

    def unreachable(path, **options):
        raise ConnectionError('no route\nto the hub')

    monkeypatch.setitem(sys.modules, 'datasets', SimpleNamespace(load_dataset=unreachable))
    for task in ROWS:
        refuse(capsys, tmp_path, task, 'ConnectionError: no route to the hub', out=tmp_path / 'e')
    monkeypatch.setitem(sys.modules, 'datasets', None)  # not installed
    refuse(capsys, tmp_path, 'gsm8k', 'datasets', out=tmp_path / 'e')


@pytest.mark.parametrize(
    ('task', 'named', 'content'),
    [
        ('gsm8k', 'x.jsonl is empty', b''),
        ('gsm8k', 'x.jsonl is empty', b'\n\n'),
        ('gsm8k', 'x.json is empty', b'[]'),
        ('gsm8k', 'x.json is empty', b''),
        ('gsm8k', 'x.json cannot', b'{"question": "a"}'),
        ('gsm8k', 'x.json cannot', b'[' * 100_000),
        ('gsm8k', 'line 2', b'{"question": "a", "answer": "#### 1"}\n{"question"'),
        ('gsm8k', 'cannot be read', b'\xff\xfe'),
        ('gsm8k', 'x.parquet cannot', b'PAR1'),
        ('gsm8k', 'example 1', b'[1]\n'),
        ('gsm8k', "no field 'answer'", b'{"question": "a"}\n'),
        ('gsm8k', "no '####'", b'{"question": "a", "answer": "1"}\n'),
        ('gsm8k', 'empty', b'{"question": " ", "answer": "#### 1"}\n'),
        ('gsm8k', 'empty', b'{"question": "a", "answer": "####"}\n'),
        ('gsm8k', 'should be texts', b'{"question": "a", "answer": 1}\n'),
        ('gsm8k', 'example 1', b'{"question": "\\ud800", "answer": "#### 1"}\n'),
        ('gsm8k', 'no example for', b'{"question": "a", "answer": "#### 1"}\n'),
        ('prosqa', 'steps should be a list', b'{"question": "a", "answer": "b", "steps": "c"}\n'),
        ('prosqa', 'example 1', b'{"question": "a", "answer": "b", "steps": [1]}\n'),
        ('gsm8k_aug', "no field 'steps'", b'{"question": "a", "answer": "b"}\n'),
        ('math500', "no field 'problem'", b'{"question": "a", "answer": "b"}\n'),
        ('math500', 'example 1', b'{"problem": "a", "answer": "b", "solution": "c", "level": "hard"}\n'),
        ('hotpotqa', 'example 1', b'{"question": "a", "answer": "b", "context": [["T"]], "supporting_facts": []}\n'),
        (
            'hotpotqa',
            "no field 'U'",
            b'{"question": "a", "answer": "b", "context": [["T", ["s"]]], "supporting_facts": [["U", 0]]}\n',
        ),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, capsys, task, named, content):
    ending = 'parquet' if b'PAR1' in content else 'json' if named.startswith('x.json ') else 'jsonl'
    (tmp_path / f's/x.{ending}').parent.mkdir()
    (tmp_path / f's/x.{ending}').write_bytes(content)
    refuse(capsys, tmp_path, task, named, source=tmp_path / 's', out=tmp_path / 'd')
    refuse(capsys, tmp_path, task, named, source=tmp_path / f's/x.{ending}', out=tmp_path / 'd')


def test_a_missing_source_is_one_sentence(tmp_path, capsys):
    (tmp_path / 'void').mkdir()
    (tmp_path / 'x.csv').write_text('question,answer\n')
    for name in ('missing', 'void', 'x.csv'):
        refuse(capsys, tmp_path, 'gsm8k', f'source={tmp_path / name}', source=tmp_path / name, out=tmp_path / 'd')
    for fraction in (0, 1, -1):
        refuse(capsys, tmp_path, 'gsm8k', 'val_fraction=', val_fraction=fraction, source=tmp_path / 'void', out=tmp_path / 'd')


def test_the_real_gsm8k_prepares_and_trains(tmp_path):
    make('gsm8k', source=real('gsm8k'), out=tmp_path / 'd')
    meta = json.loads((tmp_path / 'd/meta.json').read_text())
    assert sum(s['examples'] for s in meta['splits'].values()) == 7_473 + 1_319 and meta['splits']['test']['examples'] == 1_319
    short_run(tmp_path / 'd', tmp_path)


def test_the_real_prosqa_prepares_and_trains(tmp_path):
    make('prosqa', source=real('prosqa'), out=tmp_path / 'd')
    _, found = check_arrays(tmp_path / 'd')
    assert {name: len(of) for name, of in found.items()} == {'train': 285, 'val': 15, 'test': 500}
    assert {e['depth'] for e in found['test']} <= set(range(3, 7))
    short_run(tmp_path / 'd', tmp_path)


# Answers


def test_all_gold_answers_of_gsm8k_are_extracted_and_near_misses_rejected(tmp_path):
    rows = [json.loads(line) for line in (real('gsm8k') / 'test.jsonl').read_text('utf-8').splitlines()]
    assert len(rows) == 1_319
    for row in rows:
        gold = row['answer'].rpartition('####')[2].strip()
        example = question_example('gsm8k', row)
        assert extract_answer('gsm8k', row['answer']) == extract_answer('gsm8k', example['response']) == gold
        number = int(gold.replace(',', ''))
        same = [
            gold,
            f'{number}',
            f'{number:,}',
            f'${number:,}',
            f'{number}.00',
            f'{number:,}.0',
            f'{number} dollars',
            f' {number}.',
        ]
        same += [f'{2 * number}/2', f'{number}%', f'+{number}' if number >= 0 else f'\N{MINUS SIGN}{-number}']
        for answer in same:
            assert same_answer('gsm8k', answer, gold) and same_answer('gsm8k', gold, answer), answer
        digits = str(abs(number))
        misses = [
            number + 1,
            number - 1,
            number * 10,
            f'{number}.5',
            f'{number}0',
            f'1{digits}',
            f'{number} dozen',
            f'{number}k',
        ]
        misses += [f'{number} {number}', f'{number} of 7', 'about', f'{number}/3', '', 'none', f'{number},00', f'{number}e2']
        misses += [-number] if number else []
        misses += [digits[1:], digits[:-1]] if len(digits) > 1 and int(digits[1:]) != abs(number) else []
        misses = [str(m) for m in misses if number or str(m) not in ('00', '0 dozen', '0k', '0/3', '0')]
        for answer in misses:
            assert not same_answer('gsm8k', answer, gold) and not same_answer('gsm8k', gold, answer), (answer, gold)
    for row in [json.loads(line) for line in (real('gsm8k') / 'train.jsonl').read_text('utf-8').splitlines()]:
        assert quantity(extract_answer('gsm8k', row['answer'])), 'a gold answer that is no number'


def test_random_numbers_equal_what_they_equal():
    rng = random.Random(3)
    for _ in range(3_000):
        a, b = (Fraction(rng.randint(-2_000, 2_000), rng.choice([1, 1, 2, 4, 5, 100])) for _ in range(2))

        def spelled(x):
            sign, size = '-' if x < 0 else '', abs(x)
            ways = [f'{sign}{size.numerator}/{size.denominator}', f'{sign}{float(size):,.2f}', f'{sign}${float(size):.3f}']
            ways += [f'${sign}{float(size):,.2f}', f'{sign}{float(size):.2f} apples', f'{sign}{float(size):.2f}%']
            return rng.choice(ways)

        for task in ('gsm8k', 'gsm8k_aug', 'variable_assignment', 'math500'):
            assert same_answer(task, spelled(a), f'{float(a):.2f}'), (task, a)
            assert same_answer(task, spelled(a), f'{float(b):.2f}') == (a == b), (task, a, b)


def test_units_may_be_left_out_but_not_exchanged():
    for same in (
        ('5 hours', '5'),
        ('$5', '5 dollars'),
        ('5 dozen', '60'),
        ('$3k', '3,000'),
        ('5 eggs', '5 egg'),
        ('50%', '50 percent'),
    ):
        assert same_answer('gsm8k', *same), same
    for other in (('5 hours', '5 minutes'), ('$5', '5 cents'), ('5 dozen', '5'), ('5 hours', '6 hours'), ('5%', '5 dollars')):
        assert not same_answer('gsm8k', *other), other
    for strange in (
        '5/0',
        '1' * 5_000,
        '1' + ',000' * 5_000,
        '--5',
        '-$-5',
        '.',
        '',
        '$',
        '1,00',
        '1,0000',
        '5 6',
        '5 is not the answer at all',
    ):
        assert quantity(strange) is None, strange


def test_the_first_marked_line_is_the_answer():
    for task in ('gsm8k', 'prosqa', 'pathfinding'):
        assert extract_answer(task, 'x\n####  6 7 \ny\n#### 5\n') == '6 7'
        assert extract_answer(task, '####8') == '8'
        for text in ('', '5', 'the answer is 5', '####', '#### \n5', '### 5', '\\boxed{5}'):
            assert extract_answer(task, text) is None and not same_answer(task, extract_answer(task, text), '5')
    assert extract_answer('math500', 'so \\boxed{1} and \\boxed{\\frac{1}{2}}.') == '\\frac{1}{2}'
    assert extract_answer('math500', '\\boxed{1}\n#### 2') == '2'
    assert not same_answer('gsm8k', None, None)


@pytest.mark.parametrize(
    ('task', 'same', 'other'),
    [
        (
            'prosqa',
            ['Tom is a lempus.', 'tom is  a lempus'],
            ['Tom is a scrompus.', 'Sally is a lempus.', 'Tom is not a lempus.'],
        ),
        ('hotpotqa', ['The Beatles', 'beatles', 'Beatles!'], ['Beatle', 'The Beatles band', '']),
        (
            'pathfinding',
            ['1 23 4', '1 -> 23 -> 4', '1>23>4', ' 1, 23, 4'],
            ['1 23', '1 2 34', '123 4', '4 23 1', '1 23 4 5', ''],
        ),
        ('variable_assignment', ['7', '07', '7.0', '7 marbles'], ['8', '-7', '70', 'x']),
        (
            'math500',
            ['\\frac{1}{2}', '0.5', '$\\dfrac12$', '\\boxed{\\tfrac{1}{2}}', 'x = \\frac{2}{4}', '.5'],
            ['2', '-\\frac12'],
        ),
        (
            'math500',
            ['10,080', '10080', '10{,}080', '\\$10,080.00'],
            ['10081', '1008', '(10,080)', '10080x'],
        ),
        (
            'math500',
            ['\\left( 3, \\frac{\\pi}{2} \\right)', '(3,\\frac{\\pi}{2})'],
            ['(3,\\frac{\\pi}{3})', '(\\frac{\\pi}{2},3)', '3'],
        ),
        ('math500', ['2x+1', '2x + 1', '$2x+1$'], ['2x-1', '2y+1', 'x+1', '2X+1']),
        ('math500', ['2x', '2 x', '\\(2x\\)'], ['2', '2y', 'x']),
        ('math500', ['90^\\circ', '90', '90^{\\circ}', '90\\text{ degrees}'], ['91', '-90', '90\\pi']),
        ('math500', ['\\text{Evelyn}', 'Evelyn', '\\textbf{Evelyn}'], ['Eve', '\\text{Carla}']),
        ('math500', ['3\\sqrt{13}', '3\\sqrt{13}.', '3 \\sqrt{13}'], ['\\sqrt{13}', '13\\sqrt{3}', '3\\sqrt{12}']),
        ('math500', ['[-2,7]', 'x \\in [-2,7]', '[-2.0, 7]'], ['(-2,7]', '[-2,7)', '[2,7]', '[-2,8]']),
        ('math500', ['6\\%', '6', '6\\text{ percent}'], ['0.06', '60']),
        ('math500', ['1\\frac{1}{2}', '1.5', '1 \\frac12', '\\frac 32'], ['11/2', '5.5', '1/2', '-1\\frac12']),
        ('math500', ['52_8', '52_{8}'], ['52', '52_9', '42']),
        ('math500', ['x^2\\frac{1}{2}', 'x^{2}\\frac12'], ['x^21/2', 'x^2']),
        ('math500', ['10080\\text{ cm}', '10080 \\mbox{ cm}'], ['10080\\text{ m}', '1008\\text{ cm}']),
    ],
)
def test_each_task_tells_its_answers_apart(task, same, other):
    for a in same:
        for b in same:
            assert same_answer(task, a, b), (a, b)
        for b in other:
            assert not same_answer(task, a, b) and not same_answer(task, b, a), (a, b)


def test_strange_answers_never_raise():
    rng = random.Random(4)
    pieces = [
        '\\frac',
        '\\boxed{',
        '{',
        '}',
        '1',
        '/',
        '0',
        ',',
        '.',
        '$',
        '-',
        '\\text{',
        'x',
        '=',
        '%',
        ' ',
        '\n',
        '####',
        '漢',
        '\\sqrt',
    ]
    for _ in range(3_000):
        a, b = (''.join(rng.choice(pieces) for _ in range(rng.randint(0, 12))) for _ in range(2))
        for task in (*ROWS, 'pathfinding', 'variable_assignment'):
            assert same_answer(task, a, b) == same_answer(task, b, a)
            assert same_answer(task, a, a)
            assert extract_answer(task, a) is None or '\n' not in extract_answer(task, a) or task == 'math500'


# Rows that examples share


def first_fit(lengths, size):
    """The rows of first fit decreasing, by trying them all."""
    rows = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row in rows if sum(lengths[k] for k in row) + lengths[i] <= size), None)
        if row is None:
            rows.append(row := [])
        row.append(i)
    return rows


def test_rows_are_filled_by_first_fit_decreasing():
    rng = random.Random(5)
    for _ in range(300):
        size = rng.randint(1, 40)
        lengths = [rng.randint(1, rng.randint(1, size)) for _ in range(rng.randint(1, 60))]
        assert pack_rows(np.array(lengths), size) == first_fit(lengths, size)


@pytest.fixture(scope='module')
def packed(tmp_path_factory):
    """{pack: folder} of the same examples, alone and three or so in a row."""
    root = tmp_path_factory.mktemp('packed')
    rows = write_rows(root / 'train.jsonl', rows_of('gsm8k', 60))
    drawn = {'n_train': 80, 'n_val': 20, 'n_test': 20, 'depth': '1-3', 'variables': 6, 'recur_on_prompt': True}
    for pack in (0, 150, 400):
        make('variable_assignment', pack=pack, out=root / f'v{pack}', **drawn)
        make('gsm8k', source=rows, pack=pack, out=root / f'g{pack}', score_prompt=True)
    return root


@pytest.mark.parametrize('name', 'vg')
@pytest.mark.parametrize('pack', [150, 400])
def test_packed_rows_hold_every_example_as_it_is_alone(packed, name, pack):
    (_, one), (meta, many) = load(packed / f'{name}0'), load(packed / f'{name}{pack}')
    for split in set(one) - {'train'}:
        assert all(np.array_equal(one[split][k], many[split][k]) for k in one[split])
    alone, together = one['train'], many['train']
    assert together['tokens'].shape == (meta['splits']['train']['rows'], pack) and meta['longest']['train'] == pack
    assert meta['splits']['train']['examples'] == len(alone['tokens']) == len(examples_of(packed / f'{name}{pack}', 'train'))
    assert len(together['tokens']) < len(alone['tokens']) / 2
    rows = first_fit(alone['lengths'].tolist(), pack)
    for key, filler in (('tokens', meta['pad_token']), ('targets', -1), ('recur_mask', False)):
        for row, members in enumerate(rows):
            expected = np.concatenate([alone[key][i, : alone['lengths'][i]] for i in members])
            assert np.array_equal(together[key][row, : len(expected)], expected) and together['lengths'][row] == len(expected)
            assert (together[key][row, len(expected) :] == filler).all()


def test_the_waste_is_the_share_of_padding(packed, tmp_path, capsys):
    make('s5', group=3, steps='2-9', out=tmp_path / 's5', **SMALL)
    said = capsys.readouterr().out
    for out in (packed / 'v0', packed / 'v400', packed / 'g150', tmp_path / 's5'):
        meta, splits = load(out)
        for name, s in splits.items():
            unused = np.arange(s['tokens'].shape[1]) >= s['lengths'][:, None]
            assert meta['splits'][name]['waste'] == round(float(unused.mean()), 4) and (s['targets'][unused] == -1).all()
            assert out.parent == packed or f'{unused.mean():.1%} padding' in said
    assert load(packed / 'v400')[0]['splits']['train']['waste'] < load(packed / 'v150')[0]['splits']['train']['waste']


RECURRENT = {'t2mlr': {'l_start': 0, 'l_end': 1}, 'lrt': {'source_layer': 1, 'pass_weights': (1.0, 2.0, 3.0)}}


@pytest.mark.parametrize('schedule', ['sequential', 'jacobi'])
@pytest.mark.parametrize('recurrence', RECURRENT)
@pytest.mark.parametrize('name', 'vg')
def test_the_loss_of_a_packed_row_is_that_of_its_examples(packed, name, recurrence, schedule):
    data = Dataset(str(packed / f'{name}150'))
    _, splits = load(packed / f'{name}0')
    alone, members = splits['train'], first_fit(splits['train']['lengths'].tolist(), 150)
    passes = {'d_forward': 2, 'd_backward': 3 if recurrence == 'lrt' else 1}
    settings = RECURRENT[recurrence] if schedule == 'jacobi' else RECURRENT[recurrence] | {'pass_weights': ()}
    config = TrainConfig(n_layer=2, n_head=2, n_embd=16, block_size=150, recurrence=recurrence, schedule=schedule,
                         reset_token=256, document_attention=True, dtype='float64', **passes, **settings)  # fmt: skip
    data.complete(config)
    config.check()
    torch.manual_seed(0)
    model = build(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    shared = [row for row, of in enumerate(members) if len(of) > 1]
    for row in (shared[0], shared[len(shared) // 2], shared[-1]):
        x, y, mask = data.batch('train', np.array([row]), 150)
        loss, means = model(x, y, config, mask)
        total, parts = 0, 0
        for i in members[row]:
            n = alone['lengths'][i]
            x, y, mask = (torch.from_numpy(alone[key][i : i + 1, :n]) for key in ('tokens', 'targets', 'recur_mask'))
            scored = (y >= 0).sum()
            one, of_passes = model(x.long(), y.long(), config, mask)
            total += scored * one
            parts += scored * of_passes if schedule == 'jacobi' else 0
        scored = (data.split('train')['targets'][row] >= 0).sum()
        torch.testing.assert_close(loss, total / scored, rtol=0, atol=1e-9)
        if schedule == 'jacobi':  # else a pass is a position
            torch.testing.assert_close(means, parts / scored, rtol=0, atol=1e-9)


def test_packed_data_trains_where_its_documents_are_kept_apart(packed, tmp_path):
    changes = {'block_size': 400, 'document_attention': True}
    short_run(packed / 'v400', tmp_path, **changes)
    for wrong, says in (
        ({'document_attention': False}, '--reset_token=document --document_attention=True'),
        ({'document_attention': False, 'reset_token': -1}, '--reset_token=document --document_attention=True'),
        ({'reset_token': 32}, 'reset_token=32 opens no document'),
    ):
        with pytest.raises(ConfigError, match=says):
            short_run(packed / 'v400', tmp_path / 'none', **(changes | wrong))
    with pytest.raises(ConfigError, match='block_size=300; take 400'):
        short_run(packed / 'v400', tmp_path / 'none', **(changes | {'block_size': 300}))
    with pytest.raises(ConfigError, match='several examples in a row'):
        evaluation.score_answers(None, Dataset(str(packed / 'v400')), 'train', None, None)


def test_a_row_too_short_for_an_example_is_one_sentence(packed, tmp_path, capsys):
    for pack in (1, 30, -1):
        refuse(capsys, tmp_path, 'pathfinding', f'pack={pack}', pack=pack, out=tmp_path / 'd', **SMALL)
    make('pathfinding', pack=70, longest=70, drop_longer=True, out=tmp_path / 'd', **SMALL)  # what is left out need not fit
    meta, splits = load(tmp_path / 'd')
    assert meta['longest']['train'] == 70 and splits['train']['lengths'].max() <= 70
    assert 0 < meta['splits']['train']['examples'] < SMALL['n_train']
