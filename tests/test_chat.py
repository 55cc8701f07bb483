"""Laws of chat templates: the ids of a conversation are transformers' own, with one document token before them; no content can
spell a special token; training and chatting have the same ids."""

import itertools
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import trial
from test_prepare_data import load, make, refuse, snapshot
from test_tasks import SMALL, examples_of, rows_of, short_run, write_rows

import eval as evaluation
from configurator import ConfigError
from sample import Text
from support.chat import chat_meta, chat_tokens
from support.data import Dataset
from support.results import ResumableResults
from support.tokens import decode, encode, tokenizer_meta

tokenizers = pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
SPECIALS = ['<|endoftext|>', '<s>', '</s>', '<|from|>', '<|said|>', '<|over|>', '>x']
TEMPLATES = {
    'plain': '{% for m in messages %}<|from|>{{ m.role }}\n{{ m["content"] }}<|over|>\n{% endfor %}'
    '{% if add_generation_prompt %}<|from|>assistant\n{% endif %}',
    'start': '{{ bos_token }}{% for m in messages %}{% if m.role == "assistant" %} {{ m.content | trim }}{{ eos_token }}'
    '{% else %}[{{ m.role }}] {{ m.content | trim }} [/{{ m.role }}]{% endif %}{% endfor %}',
    'system': '{%- if messages[0].role != "system" %}\n{{- "<|from|>system\nBe kind.<|over|>" }}\n{%- endif %}\n'
    '{%- for m in messages %}\n    {%- if m.role == "user" and tools is not none %}{% continue %}{% endif %}\n'
    '    {{- "<|from|>" + m.role + "<|said|>" }}\n    {%- generation %}{{ m.content }}<|over|>{% endgeneration %}\n'
    '{%- endfor %}\n{%- if add_generation_prompt %}{{ "<|from|>assistant<|said|>" }}{% endif %}',
    'eos': '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:',
}
ENDS = {'plain': '<|over|>', 'start': '</s>', 'system': '<|over|>', 'eos': '</s>'}


def write_instruct(folder, template, beside='chat_template.jinja', **changed):
    """The tokenizer of an instruct model, whose post-processor writes a start token too; returns the folder."""
    folder.mkdir(parents=True)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    special = [tokenizers.AddedToken(s, special=True, normalized=False, rstrip=s == '<|said|>') for s in SPECIALS]
    tokenizer.train_from_iterator(['user\nassistant\n#### 12 the cat'] * 9, vocab_size=320, min_frequency=1)
    tokenizer.add_special_tokens(special)
    start = tokenizer.token_to_id('<s>')
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing('<s> $A', special_tokens=[('<s>', start)])
    tokenizer.save(str(folder / 'tokenizer.json'))
    about = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': '<s>', 'eos_token': '</s>', 'add_bos_token': True}
    if beside == 'tokenizer_config.json':
        about['chat_template'] = template
    elif beside == 'named':
        about['chat_template'] = [{'name': 'tool_use', 'template': 'x'}, {'name': 'default', 'template': template}]
    else:
        (folder / beside).write_text(template)
    (folder / 'tokenizer_config.json').write_text(json.dumps(about | changed))
    return folder


@pytest.fixture(params=TEMPLATES)
def instruct(request, tmp_path):
    """(name of a template, folder, meta) of each template."""
    folder = write_instruct(tmp_path / 'instruct', TEMPLATES[request.param])
    meta = tokenizer_meta(str(folder))
    return request.param, folder, meta | chat_meta(str(folder), meta['tokenizer_json'])


def conversation(rng, pieces):
    """Turns of random content, the user's last, none of them empty."""
    roles = ['system'] * (rng.random() < 0.3) + ['user', 'assistant'] * rng.randint(0, 3) + ['user']
    texts = (''.join(rng.choice(pieces) for _ in range(rng.randint(1, 12))) for _ in roles)
    return [{'role': role, 'content': text} for role, text in zip(roles, texts, strict=True)]


@pytest.mark.fault('chat templates', 'the ids of transformers, one start token')
def test_ids_are_those_of_transformers_behind_one_document_token(instruct):
    transformers = pytest.importorskip('transformers', reason='transformers is an optional extra')
    _, folder, meta = instruct
    theirs, rng = transformers.AutoTokenizer.from_pretrained(folder), random.Random(1)
    for _ in range(150):
        said = conversation(rng, ['a', ' ', '\n', 'the cat', 'é漢🙂', '<|', 'over|', '#### 12', '[user]', '{{ 1 }}', '\u2028'])
        trial()
        ids = theirs.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=False)
        document = [meta['document_token']]
        assert chat_tokens(meta, said) == (ids if ids[:1] == document else document + ids)


@pytest.mark.fault('a message spells a special token', 'ordinary text')
def test_no_content_becomes_a_special_token(instruct):
    _, _, meta = instruct
    rng = random.Random(2)
    special = {i for i in range(meta['vocab_size']) if not meta['token_bytes'][i]}
    for _ in range(300):
        said = conversation(rng, [*SPECIALS, '<', '|', '>', 's>', 'x', 'the cat', '\n', '<|from|>assistant\n', '漢'])
        ids = chat_tokens(meta, said)
        plain = chat_tokens(meta, [m | {'content': 'word'} for m in said])
        assert [i for i in ids if i in special] == [i for i in plain if i in special], said
        text = decode(meta, ids).decode()
        for m in said:
            assert m['content'].strip() in text
        assert ids[0] == meta['document_token'] and ids.count(ids[0]) == 1
    assert chat_tokens(meta, [{'role': 'user', 'content': 'undecodable \udcff'}])


def test_start_and_end_of_turn_are_the_templates_own(instruct):
    name, folder, meta = instruct
    names = {i: t for t, i in tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json')).get_vocab().items()}
    assert names[meta['stop_token']] == ENDS[name]
    assert names[meta['document_token']] == '<s>', 'what tokenizer_config.json names'
    assert json.loads(json.dumps(meta)) == meta


@pytest.mark.parametrize('recur', [False, True])
def test_training_rows_are_the_ids_of_the_chat(tmp_path, instruct, recur):
    _, folder, _ = instruct
    rows = rows_of('gsm8k', 30)
    rows[3] |= {'question': 'Say <|over|> and <|endoftext|>.'}
    source = write_rows(tmp_path / 'train.jsonl', rows)
    make('gsm8k', source=source, tokenizer=folder, recur_on_prompt=recur, out=tmp_path / 'd')
    meta, splits = load(tmp_path / 'd')
    assert meta['pad_token'] == meta['document_token']
    for name, s in splits.items():
        for i, e in enumerate(examples_of(tmp_path / 'd', name)):
            prompt = chat_tokens(meta, [{'role': 'user', 'content': e['prompt'].strip()}])
            row = [*prompt, *encode(meta, e['response']), meta['stop_token']]
            n, p = s['lengths'][i], s['prompt_lengths'][i]
            assert s['tokens'][i, :n].tolist() == row and p == len(prompt) and (s['tokens'][i, n:] == meta['pad_token']).all()
            assert s['targets'][i, p - 1 : n - 1].tolist() == row[p:] and (s['targets'][i, n - 1 :] == -1).all()
            assert (s['targets'][i, : p - 1] == -1).all()
            assert s['recur_mask'][i].tolist() == [recur] * p + [True] * (n - p) + [False] * (len(s['tokens'][i]) - n)
    short_run(tmp_path / 'd', tmp_path)
    make('pathfinding', tokenizer=folder / 'tokenizer.json', out=tmp_path / 'p', **SMALL)
    assert load(tmp_path / 'p')[0]['stop_token'] == meta['stop_token']


def test_a_template_may_be_beside_or_inside_and_be_switched_off(tmp_path):
    found = []
    for beside in ('chat_template.jinja', 'tokenizer_config.json', 'named'):
        folder = write_instruct(tmp_path / beside, TEMPLATES['plain'], beside, eos_token={'content': '</s>', 'special': True})
        make('pathfinding', tokenizer=folder, out=tmp_path / f'd-{beside}', **SMALL)
        found.append({name: text for name, text in snapshot(tmp_path / f'd-{beside}').items() if name != 'meta.json'})
    assert found[0] == found[1] == found[2]
    make('pathfinding', tokenizer=folder, chat=False, out=tmp_path / 'off', **SMALL)
    meta, splits = load(tmp_path / 'off')
    assert 'stop_token' not in meta and 'chat_template' not in meta
    for row, n, e in zip(splits['val']['tokens'], splits['val']['lengths'], examples_of(tmp_path / 'off', 'val'), strict=True):
        end = meta['document_token']
        assert row[:n].tolist() == [end, *encode(meta, e['prompt']), *encode(meta, e['response']), end]
    (tmp_path / 'none').mkdir()
    (folder / 'tokenizer.json').rename(tmp_path / 'none/tokenizer.json')
    make('pathfinding', tokenizer=tmp_path / 'none', out=tmp_path / 'no-template', **SMALL)
    assert 'stop_token' not in load(tmp_path / 'no-template')[0]


@pytest.mark.parametrize(
    ('says', 'template', 'changed'),
    [
        ('TemplateSyntaxError', '{% for %}', {}),
        ('ValueError: only one turn', '{{ raise_exception("only one turn") }}', {}),
        ('SecurityError', '{{ messages.append(1) }}', {}),
        ('SecurityError', '{{ "".__class__.__mro__ }}', {}),
        ('UndefinedError', '{{ now() }}', {}),
        ('ends no turn', '{% for m in messages %}{{ m.content }}{% endfor %}', {'eos_token': None}),
        ('ends no turn', '{% for m in messages %}{{ m.content }}{% endfor %}', {'eos_token': '<|lost|>'}),
        ('changes the text', '{% for m in messages %}{{ m.content | upper }}<|over|>{% endfor %}', {}),
    ],
)
def test_a_template_that_cannot_be_used_is_one_sentence(tmp_path, capsys, says, template, changed):
    folder = write_instruct(tmp_path / 'instruct', template, **changed)
    refuse(capsys, tmp_path, 'variable_assignment', says, tokenizer=folder, out=tmp_path / 'd', **SMALL)
    for broken in (b'{', b'[]', b'\xff'):
        (folder / 'tokenizer_config.json').write_bytes(broken)
        refuse(capsys, tmp_path, 'pathfinding', 'cannot be read', tokenizer=folder, out=tmp_path / 'd')


def test_an_answer_ends_where_the_turn_does(tmp_path, instruct):
    """Exact match of a model that answers rightly, ends its turn or the line, and goes on with another answer."""
    _, folder, meta = instruct
    make('pathfinding', tokenizer=folder, out=tmp_path / 'd', **SMALL)
    data = Dataset(str(tmp_path / 'd'))
    examples, arrays = examples_of(tmp_path / 'd', 'test'), data.split('test')
    newline, space = encode(meta, '\n')[0], encode(meta, ' ')[0]
    for end, right in ((meta['stop_token'], 1.0), (meta['document_token'], 1.0), (newline, 1.0), (space, 0.0)):
        script = {}
        for i, e in enumerate(examples):
            prompt = tuple(arrays['tokens'][i, : arrays['prompt_lengths'][i]].tolist())
            said = [*encode(meta, e['response']), end, *encode(meta, '#### 7')]
            script[prompt] = itertools.chain(said, itertools.repeat(meta['document_token']))

        class Model:
            config = SimpleNamespace(block_size=512, recurrence='none')
            embed = SimpleNamespace(weight=torch.zeros(1))

            def new_state(self, n, start, slots):
                return start.tolist()

            def __call__(self, tokens, state, logits_from, script=script):
                state[:] = [script[tuple(ids[padding:])] for ids, padding in zip(tokens.tolist(), state, strict=True)]
                return self.token(tokens, state)

            def token(self, tokens, state):
                logits = torch.zeros(len(tokens), 1, meta['vocab_size'])
                for row, told in enumerate(state):
                    logits[row, -1, next(told)] = 1
                return logits

        settings = SimpleNamespace(max_batches=0, batch_size=8, exact='auto')
        found = evaluation.score_answers(Model(), data, 'test', settings, ResumableResults(str(tmp_path / f'{end}.part'), {}))
        assert found['exact_match'] == right and found['answers'] == len(examples)
    row = Text(meta, [])
    assert (
        not row.push(encode(meta, 'a')[0], 0.0)
        and row.push(meta['stop_token'], 0.0)
        and row.finish == 'stop'
        and row.text == 'a'
    )


def test_a_bytes_dataset_has_no_template(tmp_path):
    make('pathfinding', out=tmp_path / 'd', **SMALL)
    meta = load(tmp_path / 'd')[0]
    assert 'chat_template' not in meta and 'stop_token' not in meta
    assert np.array_equal(encode(meta, 'a'), [97])
    with pytest.raises(ConfigError, match='none.json cannot be read'):
        tokenizer_meta(str(tmp_path / 'none.json'))
