"""A task is added from outside in a few lines: it is listed, prepared by the command line and trained on as the others are."""

import inspect
import json
import math
from dataclasses import dataclass

import pytest
from test_prepare_data import load

import prepare_data
import train
from configurator import key
from prepare_data import DATASETS, DrawnConfig, make_drawn
from support.answers import extract_answer
from support.text_tasks import TextTaskConfig, make_text_task
from support.tokens import decode

SMALL = ['--n_train=40', '--n_val=8', '--n_test=8']
TINY = ['--n_layer=2', '--n_embd=32', '--n_head=2', '--batch_size=4', '--max_steps=2', '--eval_interval=2', '--eval_batches=1']


def add_reverse(datasets):
    """A task drawn from a seed: a word is spelled backwards."""

    @dataclass
    class ReverseConfig(DrawnConfig):
        depth: str = key('2-4', 'letters of the word: a number or a range')
        letters: str = key('abcdef', 'that words are made of')

        def draw(self, rng, depth):
            word = ''.join(rng.choices(self.letters, k=depth))
            return f'{word} backwards?\n', word[::-1]

    datasets['reverse'] = (ReverseConfig, make_drawn, 'words to spell backwards')


def add_squares(datasets):
    """A task whose examples a function lists: the squares of numbers, worked out."""

    @dataclass
    class SquaresConfig(TextTaskConfig):
        most: int = key(60, 'the largest number', bounds=(20, 10**6))

    def square(n):
        return {'prompt': f'{n}^2?\n', 'response': f'{n}*{n}\n#### {n * n}', 'answer': str(n * n), 'depth': len(str(n))}

    def make_squares(task, config):
        rows = [square(n) for n in range(config.most + 1)]
        make_text_task(task, config, lambda: {'train': rows[:-10], 'val': rows[-10:-5], 'test': rows[-5:]})

    datasets['squares'] = (SquaresConfig, make_squares, 'numbers to square')


FORKS = {'reverse': (add_reverse, SMALL), 'squares': (add_squares, ['--most=50'])}


@pytest.fixture(params=FORKS)
def fork(request, monkeypatch):
    """(name of a task that the table has got, its small settings)."""
    add, settings = FORKS[request.param]
    table = dict(DATASETS)
    add(table)
    monkeypatch.setattr(prepare_data, 'DATASETS', table)
    assert len(inspect.getsource(add).splitlines()) < 25
    return request.param, settings


def expected_answer(name, prompt):
    word = prompt.split()[0]
    return word[::-1] if name == 'reverse' else str(int(word.removesuffix('^2?')) ** 2)


def test_a_new_task_is_prepared_and_trained_on(fork, tmp_path, capsys):
    name, settings = fork
    prepare_data.main(['--help'])
    assert f'\n  {name} ' in capsys.readouterr().out
    out = tmp_path / 'data'
    prepare_data.main([name, *settings, f'--out={out}'])

    meta, splits = load(out)
    prompts = []
    for split, arrays in splits.items():
        examples = [json.loads(line) for line in (out / f'{split}.jsonl').read_text().splitlines()]
        assert len(examples) == len(arrays['tokens']) == meta['splits'][split]['examples']
        rows = zip(examples, arrays['tokens'], arrays['targets'], arrays['lengths'], strict=True)
        for example, tokens, targets, length in rows:
            answer = expected_answer(name, example['prompt'])
            assert example['answer'] == answer == extract_answer(name, example['response'])
            assert decode(meta, tokens[:length]).decode() == example['prompt'] + example['response']
            assert decode(meta, targets[targets >= 0]).decode() == example['response']
        prompts += [example['prompt'] for example in examples]
    assert len(set(prompts)) == len(prompts), 'no prompt occurs twice'

    block_size = max(meta['longest'].values())
    train.main([f'--data_dir={out}', f'--out_dir={tmp_path / "run"}', f'--block_size={block_size}', *TINY])
    lines = [json.loads(line) for line in (tmp_path / 'run/log.jsonl').read_text().splitlines()]
    losses = [line['loss'] for line in lines if 'loss' in line]
    assert losses and all(map(math.isfinite, losses)) and max(line['step'] for line in lines if 'step' in line) == 2


def test_a_new_task_has_the_settings_and_the_errors_of_the_others(fork, tmp_path, capsys):
    name, settings = fork
    out = f'--out={tmp_path / "data"}'
    prepare_data.main([name, *settings, out, '--pack=200'])
    meta, splits = load(tmp_path / 'data')
    assert splits['train']['tokens'].shape == (meta['splits']['train']['rows'], 200)
    before = {path.name: path.read_bytes() for path in (tmp_path / 'data').iterdir()}
    capsys.readouterr()
    prepare_data.main([name, *settings, out, '--pack=200'])
    assert 'already holds this dataset' in capsys.readouterr().out
    refused = {'made with other settings': [], "did you mean 'pack'": ['--pakc=3'], 'longest=5': ['--overwrite', '--longest=5']}
    for said, argv in refused.items():
        with pytest.raises(SystemExit) as stop:
            prepare_data.main([name, *settings, out, *argv])
        assert stop.value.code == 2 and said in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in (tmp_path / 'data').iterdir()}
