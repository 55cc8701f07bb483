"""Faults of evaluations: ends of texts, answers that are cut or go on, requests of the harness without a token, curves."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import trial

import eval as evaluation
import prepare_data
from model import GPTConfig, build
from schedule import SEQUENTIAL, Schedule
from support import loss
from support.answers import extract_answer, same_answer
from support.data import Dataset
from support.figures import print_result
from support.harness import harness, score_continuations, split_request
from support.loss import score_tokens, token_nll
from support.results import ResumableResults
from support.tokens import encode, tokenizer_meta
from train import TrainConfig, train

MODELS = {
    'transformer': {},
    't2mlr': dict(recurrence='t2mlr', l_start=1, l_end=1, gamma_init=0.5),
    'lrt': dict(recurrence='lrt', source_layer=1),
}
TRAINED = {'transformer': Schedule(), 't2mlr': Schedule('jacobi', 2, 2), 'lrt': Schedule('interleaved')}


def small_model(name, block_size=16):
    torch.manual_seed(5)
    sizes = dict(vocab_size=257, n_layer=2, n_head=2, n_embd=16, block_size=block_size)
    return build(GPTConfig(**sizes, **MODELS[name])).eval().requires_grad_(False)


def text_of(folder, tokens):
    """A dataset of bytes whose val split is `tokens`."""
    folder.mkdir()
    tokens = np.array(tokens, np.uint16)
    tokens.tofile(folder / 'val.bin')
    meta = {'kind': 'text', 'tokenizer': 'bytes', 'vocab_size': 257, 'document_token': 256, 'dtype': 'uint16'}
    meta |= {'token_bytes': [1] * 256 + [0], 'splits': {'val': {'tokens': len(tokens), 'sha256': ''}}}
    (folder / 'meta.json').write_text(json.dumps(meta))
    return Dataset(str(folder))


# Texts


@pytest.mark.parametrize('exact', ['sequential', 'jacobi'])
@pytest.mark.parametrize('name', MODELS)
@pytest.mark.fault('a text ends within a window', 'every token but the first is scored')
def test_the_end_of_a_text_is_scored(tmp_path, name, exact):
    """What is left behind the last whole window is a shorter one; the batch does not matter, nor an interruption."""
    model = small_model(name)
    for n in (2, 3, 16, 17, 18, 33, 46):
        tokens = np.random.default_rng(n).integers(257, size=n)
        data = text_of(tmp_path / f'{n}', tokens)
        for which, schedule in enumerate((TRAINED[name], SEQUENTIAL)):
            trial()
            lost, scored = 0.0, sum(t != 256 for t in tokens[1:].tolist())
            for start in range(0, n - 1, 16):
                window = torch.from_numpy(tokens[start : start + 17])
                nats = F.cross_entropy(model(window[None, :-1], schedule=schedule)[0], window[1:], reduction='none')
                lost += nats[window[1:] != 256].sum().item()
            for batch_size in (1, 2, 64):
                config = SimpleNamespace(batch_size=batch_size, max_batches=0, passes=True, exact=exact)
                path = tmp_path / f'{n}-{which}-{batch_size}.part'

                def measure(config=config, data=data, schedule=schedule, path=path):
                    return evaluation.score_text(model, data, 'val', schedule, config, ResumableResults(str(path), {}))

                found = measure()
                assert found['tokens'] == scored
                assert found['bits_per_byte'] == pytest.approx(lost / scored / math.log(2), rel=1e-4)
                if 'passes' in found:
                    assert list(found['passes'].values())[-1] == pytest.approx(found['bits_per_byte'], rel=1e-4)
                lines = path.read_text().splitlines(keepends=True)
                path.write_text(''.join(lines[: len(lines) // 2]))  # interrupted half way
                assert measure() == found


def test_a_limit_takes_whole_windows(tmp_path):
    model, data = small_model('transformer'), text_of(tmp_path / 'text', np.arange(16 * 5 + 9) % 256)
    for max_batches, expected in ((1, 32), (2, 64), (3, 88), (9, 88), (0, 88)):  # of two windows each
        config = SimpleNamespace(batch_size=2, max_batches=max_batches, passes=False, exact='auto')
        kept = ResumableResults(str(tmp_path / f'{max_batches}.part'), {})
        assert evaluation.score_text(model, data, 'val', Schedule(), config, kept)['tokens'] == expected


def test_positions_with_nothing_to_score_are_left_out(tmp_path):
    """Instead of a quotient of zeros, which is no JSON."""
    model, data = small_model('transformer'), text_of(tmp_path / 'text', [65, 66, 256, 67, 68])
    config = SimpleNamespace(batch_size=2, max_batches=0, passes=False, exact='auto')
    found = evaluation.score_text(model, data, 'val', Schedule(), config, ResumableResults(str(tmp_path / 'part'), {}))
    assert list(found['by_position']) == ['0-0', '2-3'] and all(map(math.isfinite, found['by_position'].values()))


@pytest.mark.parametrize('name', MODELS)
def test_logits_are_made_a_few_positions_at_a_time(name, monkeypatch):
    """However large the batch: the same numbers, and never more logits at once than the limit."""
    model, made = small_model(name), []
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(256, (2, 7, 16), generator=generator)
    y[0, :5] = -1
    logits = model(x, schedule=SEQUENTIAL)
    expected = F.cross_entropy(logits.transpose(1, 2), y, ignore_index=-1, reduction='none').double()
    whole = model.logits
    monkeypatch.setattr(model, 'logits', lambda hidden: made.append(whole(hidden)) or made[-1])
    for limit in (1, 257 * 3, 257 * 50, 2**25):
        monkeypatch.setattr(loss, 'LOGITS_AT_ONCE', limit)
        made.clear()
        lost, hit = score_tokens(model, model(x, schedule=SEQUENTIAL, logits_from=None), y)
        assert torch.equal(hit, logits.argmax(-1) == y)
        torch.testing.assert_close(lost, expected, rtol=1e-5, atol=1e-6)
        assert max(part.numel() for part in made) <= max(limit, 257) and sum(len(part) for part in made) == y.numel()
        torch.testing.assert_close(token_nll(model, x, y, SEQUENTIAL), lost, rtol=1e-6, atol=1e-6)


# Answers


@pytest.mark.parametrize(
    'text', ['#### 12', '#### **12**', '#### 12. Next', '**#### 12**', '####`12`', 'So\n#### *12*\n#### 7', '#### __12.__ So 7']
)
def test_numbers_are_found_beside_marks_and_sentences(text):
    for task in ('gsm8k', 'gsm8k_aug', 'variable_assignment', 'math500'):
        answer = extract_answer(task, text)
        assert same_answer(task, answer, '12') and not same_answer(task, answer, '7'), (task, answer)


def test_the_rule_of_answers():
    for text in ('#### ,', '#### **', '####', '#### .', '#### \n#### 12', '12', '### 12'):
        for task in ('gsm8k', 'hotpotqa', 'pathfinding'):
            assert extract_answer(task, text) is None, text
    assert same_answer('gsm8k', '12. Next', '12') and same_answer('gsm8k', '12', '**12**')
    assert not same_answer('gsm8k', extract_answer('gsm8k', '#### 12 or 7'), '12')
    assert not same_answer('gsm8k', extract_answer('gsm8k', '#### 12.5'), '12')
    assert extract_answer('hotpotqa', '#### St. Louis') == 'St. Louis'
    assert same_answer('pathfinding', extract_answer('pathfinding', '#### 1 -> 2. Done'), '1 2')
    assert same_answer('pathfinding', extract_answer('pathfinding', '#### 1 2.'), '1 2')
    assert same_answer('prosqa', extract_answer('prosqa', '#### Tom is a lempus. Sure.'), 'Tom is a lempus.')
    assert extract_answer('math500', '#### x_{1}*2') == 'x_{1}*2'


class Told:
    """A model that says, behind each of the prompts, a text of bytes, and counts what is asked of it."""

    config = SimpleNamespace(block_size=60, recurrence='none')
    embed = SimpleNamespace(weight=torch.zeros(1))

    def __init__(self, texts):
        self.texts, self.asked = texts, 0

    def new_state(self, n, start, slots):
        return start.tolist()

    def __call__(self, tokens, state, logits_from):
        state[:] = [iter(self.texts[tuple(ids[padding:])]) for ids, padding in zip(tokens.tolist(), state, strict=True)]
        return self.token(tokens, state)

    def token(self, tokens, state):
        self.asked += 1
        return F.one_hot(torch.tensor([next(told, ord('z')) for told in state]), 257)[:, None].float()


@pytest.fixture
def asked(tmp_path):
    """(dataset of 12 questions, the ids of each prompt, its answer)."""
    sizes = ['--n_train=20', '--n_val=4', '--n_test=12', '--depth=1-2', '--variables=3', '--values=0-9']
    prepare_data.main(['variable_assignment', *sizes, f'--out={tmp_path}/data'])
    data = Dataset(f'{tmp_path}/data')
    arrays, examples = data.split('test'), evaluation.read_examples(data, 'test')
    prompts = [tuple(arrays['tokens'][i, : arrays['prompt_lengths'][i]].tolist()) for i in range(12)]
    return data, prompts, [example['answer'] for example in examples]


@pytest.mark.fault('answers go on, or are cut', 'the first decides; those cut are counted')
def test_answers_that_go_on_and_answers_that_are_cut(asked, tmp_path, capsys):
    """Right and ended; right, ended by its line, then an invented question; never ended; a right number, never ended."""
    data, prompts, answers = asked
    forms = ['#### {}\x00', '#### **{}**\nNext: 1 + 6\n#### 77\x00', 'so so', '#### {}']
    texts = {}
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        texts[prompt] = [256 if byte == 0 else byte for byte in forms[i % 4].format(answer).encode()]
    config = SimpleNamespace(batch_size=5, max_batches=0, exact='auto')
    for half in (False, True):  # measured whole, and continued half way without asking again what is kept
        kept, model = ResumableResults(str(tmp_path / 'part'), {}), Told(texts)
        found = evaluation.score_answers(model, data, 'test', config, kept)
        assert found['exact_match'] == 0.5 and found['answers'] == 12 and found['cut'] == 6
        if not half:
            lines, whole = (tmp_path / 'part').read_text().splitlines(keepends=True), model.asked
            (tmp_path / 'part').write_text(''.join(lines[:2]))
    assert 0 < model.asked < whole
    capsys.readouterr()
    evaluation.show_answers(evaluation.read_examples(data, 'test'), kept, 3)
    out = capsys.readouterr().out
    assert [out.count(f': {outcome}\n') for outcome in ('right', 'cut', 'wrong')] == [2, 1, 0] and 'example 4' not in out
    for i in range(3):
        prompt, target = bytes(prompts[i][1:]).decode().rstrip(), answers[i]
        assert f'prompt: {prompt}\nanswer: ' in out and f'\ntarget: {target}\n' in out
    assert '77' not in out.partition('example 2')[2].partition('target')[0]  # it was never generated
    print_result({'checkpoint': '', 'update': 1, 'data': '', 'split': 'test', 'decoded': found})
    assert '12 answers, 6 cut' in capsys.readouterr().out


def test_a_response_ends_behind_the_line_of_its_answer(asked, tmp_path):
    data, prompts, answers = asked
    texts = {p: f'#### {a}\n and so on'.encode() for p, a in zip(prompts, answers, strict=True)}
    model, config = Told(texts), SimpleNamespace(batch_size=12, max_batches=0, exact='auto')
    found = evaluation.score_answers(model, data, 'test', config, ResumableResults(str(tmp_path / 'part'), {}))
    assert found['exact_match'] == 1 and found['cut'] == 0
    assert model.asked == max(len(f'#### {a}\n') for a in answers)


def test_show_prints_examples_and_changes_no_number(asked, tmp_path, capsys):
    data, _, answers = asked
    settings = dict(n_layer=1, n_head=2, n_embd=16, block_size=64, max_steps=1, warmup_steps=0, batch_size=2, eval_batches=1)
    train(TrainConfig(**settings, device='cpu', threads=1, data_dir=data.folder, out_dir=f'{tmp_path}/run'))
    found = []
    for show in (0, 2, 99):
        capsys.readouterr()
        evaluation.main([f'--ckpt={tmp_path}/run', '--device=cpu', '--batch_size=5', '--json=True', f'--show={show}'])
        out = capsys.readouterr().out
        found.append(json.loads(out.splitlines()[-1]))
        shown = [line.removeprefix('target: ') for line in out.splitlines() if line.startswith('target: ')]
        assert shown == answers[:show] and out.count('\nprompt: ') == len(shown)
    assert found[0] == found[1] == found[2]


# The harness


def merging_tokenizer(tmp_path):
    """A tokenizer for which `Sun` and ` Sunday` are a token each; its meta."""
    tokenizers = pytest.importorskip('tokenizers', reason='tokenizers is an optional extra, in requirements-data.txt')
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(['A rainy Sunday', ' Sunday Sun rainy', 'Sun'] * 9, vocab_size=400, min_frequency=2)
    tokenizer.add_special_tokens(['<|endoftext|>'])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    meta = {'kind': 'text'} | tokenizer_meta(str(tmp_path / 'tokenizer.json'))
    assert len(encode(meta, ' Sunday')) == 1
    return meta


REQUESTS = [
    ('A rainy Sun', 'day'),
    ('A rainy', ''),
    ('A rainy ', ''),
    ('', 'A rainy'),
    ('A rainy', ' Sunday'),
    ('A ', 'rainy'),
    (' ', 'x'),
]


@pytest.mark.fault('a token crosses the border of a request', 'at least one token is scored')
def test_every_request_has_a_token_to_score(tmp_path):
    """The whole text is what is read, and its split is that behind the tokens of the context where any are left."""
    for meta in (merging_tokenizer(tmp_path), {'tokenizer': 'bytes'}):
        for context, continuation in REQUESTS:
            before, scored = split_request(meta, context, continuation)
            assert before + scored == encode(meta, context + continuation) and scored
            n = len(encode(meta, context.rstrip()))
            if n < len(before + scored):
                assert len(before) == n
            else:
                assert len(scored) == 1
        assert split_request(meta, '', '') == ([], [])


@pytest.mark.parametrize('name', MODELS)
def test_continuations_longer_than_the_context_and_empty_ones(name):
    """In pieces of block_size, each behind what comes before; an empty one is 0 and no hit, and disturbs no other."""
    model = small_model(name)
    ids = torch.randint(256, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [([256], ids), (ids[:20], ids[20:]), ([256], []), (ids[:3], ids[3:5])]
    for batch_size in (1, 3):
        found = score_continuations(model, pairs, batch_size)
        for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
            row, expected, hit = context + continuation, 0.0, bool(continuation)
            for start in range(len(context), len(row), 16):
                end = min(start + 16, len(row))
                read = torch.tensor([row[:end][-17:]])
                logp = model(read[:, :-1], schedule=SEQUENTIAL)[0, start - end :].log_softmax(-1)
                target = read[0, start - end :, None]
                expected += logp.gather(-1, target).sum().item()
                hit = hit and bool((logp.argmax(-1, keepdim=True) == target).all())
            assert total == pytest.approx(expected, rel=1e-4) and greedy == hit


def test_one_request_does_not_end_the_harness(tmp_path, capsys):
    pytest.importorskip('lm_eval', reason='the lm-eval harness is an optional extra')
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM

    meta = merging_tokenizer(tmp_path)
    theirs, scored_alike = SimpleNamespace(backend='causal', tok_encode=lambda text: encode(meta, text)), 0
    for context, continuation in (request for request in REQUESTS if request[0]):
        _, scored = TemplateLM._encode_pair(theirs, context, continuation)  # the split of the harness's own classes
        if scored:  # else they stop
            scored_alike += scored == split_request(meta, context, continuation)[1]
        else:
            assert len(split_request(meta, context, continuation)[1]) == 1
    assert scored_alike == 4
    torch.manual_seed(0)
    model = build(GPTConfig(vocab_size=meta['vocab_size'], n_layer=2, n_head=2, n_embd=16, block_size=16)).eval()
    requests = [*REQUESTS, ('', ''), ('A', ' rainy' * 40)]
    found = []
    for _ in range(2):  # the second takes all from the file
        lm = harness(model, meta, 4, ResumableResults(str(tmp_path / 'part'), {}), None)
        with torch.inference_mode():
            found.append(lm.loglikelihood([Instance('loglikelihood', {}, args, i) for i, args in enumerate(requests)]))
            assert all(
                map(math.isfinite, lm.loglikelihood_rolling([Instance('', {}, ('',), 0), Instance('', {}, ('Sun',), 1)]))
            )
    assert found[0] == found[1]
    for (context, continuation), (total, greedy) in zip(requests, found[0], strict=True):
        assert (math.isfinite(total) and total < 0) if context + continuation else (total, greedy) == (0.0, False)
    assert capsys.readouterr().err.count('1 of the requests of the harness have no token') == 1


# Figures and settings


def test_curves_take_a_log_without_means(tmp_path, capsys):
    """A validation with nothing scored, without an exact one, or none at all."""
    lines = [{'step': 1, 'loss': 3.0}, {'step': 1, 'val': {}, 'val_exact': None}, {'step': 2, 'note': 'x'}, {'warning': 'y'}]
    lines += [
        {'step': 2, 'loss': None},
        {'step': 3, 'val': {}, 'val_exact': {}},
        {'step': 3, 'val': {'by_pass': []}},
        {'loss': 2.0},
    ]
    for name, kept in (('a', lines), ('b', lines[:1]), ('c', [*lines, {'step': 4, 'val': {'loss': 2.5}}]), ('d', lines[-2:-1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'log.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in kept))
    evaluation.main([f'--curves={tmp_path}/a,{tmp_path}/b,{tmp_path}/c', f'--figure={tmp_path}/f.png'])
    assert (tmp_path / 'f.png').stat().st_size > 1000
    with pytest.raises(SystemExit) as stop:
        evaluation.main([f'--curves={tmp_path}/d', f'--figure={tmp_path}/g.png'])
    assert stop.value.code == 2 and 'holds no loss' in capsys.readouterr().err and not (tmp_path / 'g.png').exists()


def test_show_is_refused_where_nothing_is_decoded(tmp_path, capsys):
    for argv in (['--lm_eval=piqa'], ['--diagnose'], [f'--curves={tmp_path}', f'--figure={tmp_path}/f.png']):
        with pytest.raises(SystemExit) as stop:
            evaluation.main(['--show=2', *argv])
        assert stop.value.code == 2 and 'show=2' in capsys.readouterr().err
