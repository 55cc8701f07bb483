"""Laws of decoding from a checkpoint: one forward a token, what was learned comes back, every sample is its own, and every
mistake is one sentence."""

import hashlib
import io
import itertools
import json
import math
import os
import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import made_once

import prepare_data
import sample
from configurator import ConfigError
from model import GPTConfig, build
from sample import Decoder, SampleConfig, Text, generate, sample_next_token
from schedule import SEQUENTIAL
from support.checkpoint import read_checkpoint, save_checkpoint
from support.loading import find_checkpoint, load_model
from support.prompts import prompt_recurs
from support.tokens import encode
from train import TrainConfig, train

SENTENCE = 'the memory of one token is read by the next.'
T2MLR = dict(recurrence='t2mlr', l_start=1, l_end=1, schedule='jacobi', d_forward=3, d_backward=2)
LRT = dict(recurrence='lrt', source_layer=1, schedule='interleaved')
MODELS = {
    'transformer': {},
    't2mlr': T2MLR,
    'lrt': LRT,
    't2mlr llama': T2MLR | {'family': 'llama'},
    'lrt llama': LRT
    | dict(family='llama', memory_projection='layerwise', max_steps=900, schedule='jacobi', d_forward=2, d_backward=3),
    'loop': dict(n_loop=2, l_start=0, l_end=1),
    't2mlr loop': T2MLR | dict(n_loop=2),
    'lstm': dict(architecture='lstm', reset_token=-1),
}
BASE = dict(n_layer=2, n_head=2, n_embd=16, reset_token=256, device='cpu', threads=1, batch_size=4)


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
    """A corpus of one sentence, once a document; val, which takes the smallest sha256, is another text."""
    root = tmp_path_factory.mktemp('text')
    (root / 'source').mkdir()
    for i in range(40):
        (root / 'source' / f'{i}.txt').write_text(SENTENCE)
    others = (f'{i} is another text. ' * 20 for i in itertools.count())
    smallest = hashlib.sha256(SENTENCE.encode()).digest()
    (root / 'source' / 'val.txt').write_text(next(t for t in others if hashlib.sha256(t.encode()).digest() < smallest))
    prepare_data.main(['text', f'--source={root}/source', f'--out={root}/data'])
    return root / 'data'


class Overfit(dict):
    """{name: out_dir of a model that knows the sentence by heart}; each is trained when a test first asks for it."""

    def __init__(self, texts, tmp_path_factory):
        self.texts, self.tmp_path_factory = texts, tmp_path_factory

    def __missing__(self, name):
        def make(out):
            config = dict(n_embd=48, block_size=len(SENTENCE) + 4, max_steps=400, learning_rate=1e-2, warmup_steps=10)
            config |= dict(eval_interval=400, eval_exact_batches=0, lr_schedule='linear', weight_decay=0.0)
            train(TrainConfig(**BASE | config | MODELS[name] | {'data_dir': str(self.texts), 'out_dir': str(out)}))

        self[name] = made_once(self.tmp_path_factory, f'overfit-{name.replace(" ", "-")}', make)
        return self[name]


@pytest.fixture(scope='module')
def overfit(texts, tmp_path_factory):
    return Overfit(texts, tmp_path_factory)


@pytest.fixture(scope='module')
def untrained(texts, tmp_path_factory):
    out = tmp_path_factory.mktemp('untrained')
    config = BASE | T2MLR | dict(block_size=40, max_steps=1, warmup_steps=0, eval_exact_batches=0)
    train(TrainConfig(**config | {'data_dir': str(texts), 'out_dir': str(out)}))
    return out


def said(capsys, *argv):
    """(standard output, standard error) of `python sample.py` with these arguments."""
    capsys.readouterr()
    sample.main(['--device=cpu', '--threads=1', *argv])
    return capsys.readouterr()


def refused(capsys, *argv, device='cpu'):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        sample.main([f'--device={device}', *argv])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == '' and len(err.splitlines()) == 1 and err.startswith('error: ')
    return err


# What was learned comes back


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.fault('prompts of 1, 2 and block_size tokens', 'the learned sentence comes back')
def test_an_overfitted_sentence_comes_back(overfit, capsys, name):
    """From prompts of nothing, one character and half the sentence, greedily, and nothing after its end."""
    for n in (0, 1, 2, len(SENTENCE) // 2, len(SENTENCE) - 1):
        prompt = SENTENCE[:n]
        out, _ = said(capsys, f'--ckpt={overfit[name]}', f'--prompt={prompt}', '--temperature=0')
        assert out == SENTENCE + '\n'


def decoded(model, prompts, config, stop_token=-1):
    """(tokens of each row up to and with stop_token, log-probabilities of each row)."""
    with torch.inference_mode():
        decoder = Decoder(model, config)
        decoder.read(prompts)
        decoder.repeat_rows(config.num_samples)
        rows = [([], []) for _ in decoder.rows]

        def push(i, token, likelihood):
            rows[i][0].append(token)
            rows[i][1].append(likelihood)
            return token == stop_token

        generate(decoder, config, push)
    return [tokens for tokens, _ in rows], [likelihoods for _, likelihoods in rows]


def logits_after(decoder, new):
    decoder.read(new)
    return decoder.logits


EXACT = SampleConfig(prefill='exact', temperature=1.0)


@pytest.mark.parametrize('name', MODELS)
def test_one_forward_of_one_token_each(overfit, name):
    """Three samples of two prompts: the prompts once, then each token of all rows once, and no forward after the last."""
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    lengths = []
    model.register_forward_pre_hook(lambda module, given: lengths.append(tuple(given[0].shape)))
    prompts = [[256, *SENTENCE[:5].encode()], [256]]
    rows, _ = decoded(model, prompts, replace(EXACT, max_tokens=10, num_samples=3))
    reading = [(2, 6)] if model.config.recurrence == 'none' else [(2, 1)] * 6  # exact: token by token
    assert [len(row) for row in rows] == [10] * 6 and lengths == [*reading, *[(6, 1)] * 9]


@pytest.mark.parametrize('prefill', [{'prefill': 'exact'}, {'prefill': 'jacobi', 'jacobi_tol': 0.0, 'prefill_chunk': 7}])
@pytest.mark.parametrize('name', MODELS)
@pytest.mark.fault('prompts of unlike lengths in one batch', 'each row is what it is alone')
def test_each_row_is_what_it_is_alone(overfit, name, prefill):
    """Prompts of 1, 5 and 40 tokens in every order, several samples, rows that end at different steps: tokens equal, the
    log-probabilities to 1e-9; and sample i with seed s is the only sample with seed s + i."""
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    model.double()
    config = replace(EXACT, max_tokens=60, num_samples=2, temperature=1.5, seed=3, **prefill)
    prompts = {n: [256, *SENTENCE.encode()][:n] for n in (1, 5, 40)}
    alone = {}
    for n, prompt in prompts.items():
        for i in range(2):
            (tokens,), (likelihoods,) = decoded(model, [prompt], replace(config, num_samples=1, seed=3 + i), 256)
            alone[n, i] = tokens, likelihoods
            assert tokens[-1] == 256 or len(tokens) == model.config.block_size - n + 1
    assert len({len(tokens) for tokens, _ in alone.values()}) > 1
    for order in itertools.permutations(prompts):
        rows, likelihoods = decoded(model, [prompts[n] for n in order], config, 256)
        for (n, i), row, found in zip(itertools.product(order, range(2)), rows, likelihoods, strict=True):
            assert row == alone[n, i][0]
            np.testing.assert_allclose(found, alone[n, i][1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', MODELS)
def test_log_probabilities_are_those_of_teacher_forcing(overfit, name):
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    model.double()
    prompt = [256, *SENTENCE[:6].encode()]
    (tokens,), (likelihoods,) = decoded(model, [prompt], replace(EXACT, max_tokens=20, temperature=2.0, top_k=5))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]]), schedule=SEQUENTIAL)[0, len(prompt) - 1 :].log_softmax(-1)
    expected = logits.gather(-1, torch.tensor(tokens)[:, None]).flatten().tolist()
    np.testing.assert_allclose(likelihoods, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', ['t2mlr', 'lrt', 't2mlr llama', 'lrt llama'])
def test_jacobi_prefill_equals_exact_prefill(overfit, name):
    """In float64: exactly with a tolerance of 0, and within a multiple of any other; fewer passes the larger it is; long
    prompts chunk by chunk."""
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    model.double()
    prompts = [[256, *SENTENCE.encode()][:n] for n in (45, 30)]
    token = [[65], [66]]
    with torch.inference_mode():
        exact = Decoder(model, EXACT)
        expected = logits_after(exact, prompts), logits_after(exact, token)
        assert exact.passes == 45 + 1
        taken = []
        for tolerance, chunk in ((0.0, 256), (0.0, 1), (0.0, 16), (1e-12, 256), (1e-6, 256), (1e-6, 16), (1e-2, 256)):
            decoder = Decoder(model, replace(EXACT, prefill='jacobi', jacobi_tol=tolerance, prefill_chunk=chunk))
            found = logits_after(decoder, prompts)
            taken.append(decoder.passes)
            for a, b in zip((found, logits_after(decoder, token)), expected, strict=True):
                bound = max(1e-9, 1e3 * tolerance)
                torch.testing.assert_close(a, b, rtol=bound, atol=bound)
        assert taken[0] == 46 and taken[1] == 45 and taken[3] > taken[4] > taken[6] and taken[4] < 40


@pytest.mark.parametrize('recurrence', [T2MLR, LRT], ids=['t2mlr', 'lrt'])
@torch.inference_mode()
def test_a_prompt_reads_the_memory_as_in_the_training(recurrence):
    """Where the data leave the prompt without memory, decoding does: the prompt writes it, the answer reads it."""
    torch.manual_seed(0)
    model = build(
        GPTConfig(**{k: v for k, v in (BASE | recurrence).items() if k in GPTConfig.__dataclass_fields__}, vocab_size=257)
    )
    for p in model.double().parameters():
        p.normal_(0, 0.3)
    tokens = torch.randint(256, (1, 20))
    for recurs in (False, True):
        assert prompt_recurs({'settings': {'recur_on_prompt': recurs}}) is recurs and prompt_recurs({})
        mask = torch.ones(1, 20, dtype=torch.bool)
        mask[:, :12] = recurs
        exact = model(tokens, schedule=SEQUENTIAL, recur_mask=mask)
        decoder, found = Decoder(model, SampleConfig(jacobi_tol=0.0)), []
        for start, end in ((0, 12), *((t, t + 1) for t in range(12, 20))):
            decoder.read(tokens[:, start:end].tolist(), recurs or start > 0)
            found.append(decoder.logits)
        torch.testing.assert_close(torch.stack(found, 1), exact[:, 11:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', MODELS)
def test_sliding_goes_on_from_the_second_half(overfit, name):
    """At the end of the context a row is what a fresh prompt of its last half would be, and rows that still fit stay."""
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    model.double()
    size = model.config.block_size
    config = replace(EXACT, temperature=0, max_tokens=30, overflow='slide')
    prompts = [[65 + i % 3 for i in range(size - 3)], [66, 67]]
    rows, _ = decoded(model, prompts, config)
    assert [len(row) for row in rows] == [30, 30]
    tokens = prompts[0] + rows[0][:4]  # the last of these is the first that does not fit
    (after,), _ = decoded(model, [tokens[-(size // 2) :]], replace(config, max_tokens=26))
    assert rows[0][4:] == after
    (alone,), _ = decoded(model, [prompts[1]], config)
    assert rows[1] == alone
    long = [65 + i % 3 for i in range(3 * size)]
    (a,), (b,) = decoded(model, [long], config)[0], decoded(model, [long[-(size // 2) :]], config)[0]
    assert a == b


@pytest.mark.parametrize('prefill', ['exact', 'jacobi'])
@pytest.mark.parametrize('name', MODELS)
def test_a_row_that_slides_leaves_the_others_as_they_were(overfit, name, prefill):
    """Where prompts read no memory, those that are read again beside a row that slides read none then either; what a row has
    answered does."""
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    model.double()
    size = model.config.block_size
    config = replace(EXACT, prefill=prefill, jacobi_tol=0.0, temperature=0, overflow='slide')
    prompts = [[65 + i % 3 for i in range(n)] for n in (size - 4, 5, size // 2)]
    later = torch.randint(257, (20, 3), generator=torch.Generator().manual_seed(0)).tolist()

    def logits(rows):
        decoder = Decoder(model, config)
        with torch.inference_mode():
            decoder.read([prompts[i] for i in rows], False)
            decoder.repeat_rows(1)
            found = [decoder.logits]
            for number, tokens in enumerate(later):
                decoder.read([[tokens[i]] for i in rows], number % 4 > 0)
                found.append(decoder.logits)
        return torch.stack(found, 1)

    together = logits(range(3))
    for i in range(3):
        torch.testing.assert_close(together[i], logits([i])[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', MODELS)
def test_cached_logits_equal_teacher_forcing(overfit, name):
    """In float64, to 1e-9, at every step from one token to the whole context."""
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    model.double()
    tokens = torch.randint(257, (2, model.config.block_size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(tokens, schedule=SEQUENTIAL)
        for prefix in (1, 2, 7, model.config.block_size):
            state = model.new_state(2)
            steps = [model(tokens[:, :prefix], schedule=SEQUENTIAL, state=state)]
            steps += [model(tokens[:, t : t + 1], schedule=SEQUENTIAL, state=state) for t in range(prefix, tokens.size(1))]
            torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', MODELS)
def test_the_state_does_not_grow(overfit, name):
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    state = model.new_state(1)
    sizes = set()
    with torch.no_grad():
        for token in SENTENCE.encode():
            model(torch.tensor([[token]]), schedule=SEQUENTIAL, state=state)
            memory = state.memory if isinstance(state.memory, tuple) else (state.memory,)
            sizes.add(sum(t.numel() for t in (*memory, *(t for kv in state.kv for t in kv))))
    assert len(sizes) == 1


# Sampling


def test_sampled_frequencies_follow_the_settings():
    """Temperature, top-k and top-p against probabilities computed by hand."""
    torch.manual_seed(0)
    logits = torch.randn(1, 6) * 2
    order = logits[0].argsort(descending=True).tolist()
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.7), (1.5, 4, 0.9), (1.0, 1, 1.0)):
        config = SampleConfig(temperature=temperature, top_k=top_k, top_p=top_p)
        p = (logits[0].double() / temperature).softmax(0).tolist()
        allowed = order[: top_k or 6]
        total, reached, kept = sum(p[i] for i in allowed), 0.0, []
        for i in allowed:
            if reached >= top_p * total:
                break
            kept.append(i)
            reached += p[i]
        generator = torch.Generator().manual_seed(3)
        drawn = sample_next_token(logits.expand(4000, -1), config, [generator] * 4000).flatten()
        counts = torch.bincount(drawn, minlength=6).double() / 4000
        expected = torch.tensor([p[i] / sum(p[j] for j in kept) if i in kept else 0.0 for i in range(6)])
        assert (counts - expected).abs().max() < 0.03 and not counts[expected == 0].any()


def test_temperature_0_is_greedy_and_tiny_temperatures_are_finite():
    logits = torch.tensor([[0.0, 3.0, 2.9], [5.0, -5.0, 4.9]])
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    for temperature in (0.0, 1e-6, 1e-300, 5e-324):
        assert sample_next_token(logits, SampleConfig(temperature=temperature), generators).flatten().tolist() == [1, 0]


# The command


def test_the_newest_checkpoint_is_taken(tmp_path, monkeypatch, capsys, untrained):
    monkeypatch.chdir(tmp_path)
    assert 'there is no checkpoint under out/' in refused(capsys)
    whole = read_checkpoint(untrained / 'ckpt.pt')
    for i, name in enumerate(('b', 'a/deep', 'c [x]')):
        folder = tmp_path / 'out' / name
        folder.mkdir(parents=True)
        save_checkpoint(str(folder / 'ckpt.pt'), whole | {'step': i})
        os.utime(folder / 'ckpt.pt', (i, i))
        assert find_checkpoint('') == f'out/{name}/ckpt.pt'
        assert f'step {i}' in said(capsys, '--max_tokens=3').err
    assert find_checkpoint('out/b') == 'out/b/ckpt.pt' and find_checkpoint('out/b/ckpt.pt') == 'out/b/ckpt.pt'
    assert find_checkpoint('hf:x') == 'hf:x'
    for name, file in (
        ('c', 'c'),
        ('out', 'out/ckpt.pt'),
        ('out/b/best.pt', 'out/b/best.pt'),
    ):  # says what is there, newest first
        assert f'no checkpoint {file}; the newest under out/: out/c [x], out/a/deep, out/b.' in refused(
            capsys, f'--ckpt={name}'
        )


def test_prompts_from_a_file_and_from_standard_input(tmp_path, monkeypatch, capsys, overfit):
    ckpt = f'--ckpt={overfit["lrt"]}'
    (tmp_path / 'p.txt').write_text(SENTENCE[:10])
    assert said(capsys, ckpt, f'--prompt_file={tmp_path}/p.txt', '--temperature=0').out == SENTENCE + '\n'
    monkeypatch.setattr('sys.stdin', io.StringIO(SENTENCE[:12]))
    assert said(capsys, ckpt, '--prompt_file=-', '--temperature=0').out == SENTENCE + '\n'
    assert 'keep one' in refused(capsys, ckpt, '--prompt=a', '--prompt_file=-')
    err = refused(capsys, ckpt, f'--prompt_file={tmp_path}/none.txt')
    assert 'cannot be read: No such file' in err and err.count('none.txt') == 1
    (tmp_path / 'binary').write_bytes(b'\xff\xfe\x00')
    assert 'cannot be read' in refused(capsys, ckpt, f'--prompt_file={tmp_path}/binary')


META = {'tokenizer': 'bytes', 'document_token': 256}


def pushed(text, stops):
    """(what is printed after each byte, the row)."""
    row, written = Text(META, stops), []
    for byte in text.encode():
        ended = row.push(byte, -1.0)
        written.append(row.new())
        if ended:
            break
    return [*written, row.close('length')], row


def test_characters_arrive_whole():
    """Bytes that only together make a character are held back until it is complete; a cut one is replaced at the end."""
    written, row = pushed('é€😀.', [])
    assert ''.join(written) == row.text == 'é€😀.' and not any('�' in w for w in written)
    row = Text(META, [])
    row.push(0xE2, 0.0)
    assert row.new() == '' and row.close('length') == '�'


def test_stop_texts():
    """Nothing of a stop text is ever printed, wherever it is cut; the earliest counts; what only begins like one comes out."""
    rng = random.Random(0)
    for _ in range(300):
        text = ''.join(rng.choice('abé') for _ in range(rng.randint(1, 12)))
        stops = [''.join(rng.choice('abé') for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(0, 3))]
        written, row = pushed(text, stops)
        # The row ends with the first character that completes a stop text; of those it completes, the longest begins first.
        ends = [n for n in range(1, len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
        expected = text if not ends else text[: min(ends[0] - len(s) for s in stops if text[: ends[0]].endswith(s))]
        assert ''.join(written) == row.text == expected
        assert row.finish == ('stop' if ends else 'length')
        shown = ''
        for piece in written:
            shown += piece
            assert expected.startswith(shown)


def test_stop_texts_of_the_command(overfit, capsys):
    for name, stop, expected in (('t2mlr', 'token', 'the memory of one '), ('lrt', 'zzz|read', 'the memory of one token is ')):
        out, _ = said(capsys, f'--ckpt={overfit[name]}', '--prompt=the', '--temperature=0', f'--stop={stop}')
        assert out == expected + '\n'


def test_prompts_of_a_file_one_a_line(overfit, capsys, tmp_path):
    (tmp_path / 'p.txt').write_text(f'{SENTENCE[:3]}\n{SENTENCE[:20]}\n{SENTENCE[:8]}\n')
    given = [f'--ckpt={overfit["lrt"]}', f'--prompt_file={tmp_path}/p.txt', '--prompt_lines', '--temperature=0', '--seed=5']
    out, _ = said(capsys, *given)
    assert out == ''.join(f'--- prompt {i}, seed 5\n{SENTENCE}\n' for i in (1, 2, 3))
    (tmp_path / 'p.txt').write_text('')
    assert 'holds no line' in refused(capsys, *given[:3])
    assert 'prompt_file' in refused(capsys, given[0], '--prompt_lines', '--prompt=a')


def test_json_of_each_continuation(overfit, capsys):
    out, _ = said(capsys, f'--ckpt={overfit["t2mlr"]}', '--prompt=the m', '--num_samples=2', '--temperature=0', '--json')
    found = [json.loads(line) for line in out.splitlines()]
    assert [f['seed'] for f in found] == [1337, 1338]
    for f in found:
        assert f['prompt'] + f['text'] == SENTENCE and f['finish'] == 'stop'
        assert bytes(f['tokens'][:-1]).decode() == f['text'] and f['tokens'][-1] == 256
        assert len(f['logprobs']) == len(f['tokens']) and max(f['logprobs']) <= 0 and math.exp(sum(f['logprobs'])) > 0.3
    for given, finish in ((['--max_tokens=2'], 'length'), (['--stop=e'], 'stop')):
        out, _ = said(capsys, f'--ckpt={overfit["t2mlr"]}', '--prompt=the m', '--temperature=0', '--json', *given)
        assert json.loads(out)['finish'] == finish


def test_a_conversation_keeps_its_state(overfit, capsys, monkeypatch):
    """Turn by turn, only what is new is read; the answers are those to the whole conversation at once."""
    reads = []
    read = Decoder.read
    monkeypatch.setattr(Decoder, 'read', lambda self, new, *a: reads.append([len(row) for row in new]) or read(self, new, *a))
    monkeypatch.setattr('sys.stdin', io.StringIO('the\n memory\n'))
    ckpt = f'--ckpt={overfit["t2mlr"]}'
    out, _ = said(capsys, ckpt, '--interactive', '--temperature=0', '--max_tokens=4')
    assert reads == [[5], [1], [1], [1], [9], [1], [1], [1]]
    first, second = out.splitlines()
    whole = f'the\n{first} memory\n'
    again, _ = said(capsys, ckpt, f'--prompt={whole}', '--temperature=0', '--max_tokens=4', '--prefill=exact')
    assert again == whole + second + '\n'
    monkeypatch.setattr('sys.stdin', io.StringIO('a' * 60 + '\n'))
    with pytest.raises(SystemExit) as stop:
        said(capsys, ckpt, '--interactive')
    assert stop.value.code == 2 and 'longer than the context' in capsys.readouterr().err
    monkeypatch.setattr('sys.stdin', io.StringIO('a' * 60 + '\n'))
    assert said(capsys, ckpt, '--interactive', '--overflow=slide', '--max_tokens=90', '--stop=zzz')
    for more in ('--json', '--num_samples=2', '--prompt_file=x', '--prompt=x'):
        assert 'interactive' in refused(capsys, ckpt, '--interactive', more)


def test_a_conversation_takes_any_input(overfit, capsys, monkeypatch):
    """Bytes that are no UTF-8 are read as they are; a closed input is one sentence."""
    ckpt, read, real = f'--ckpt={overfit["t2mlr"]}', [], Decoder.read
    monkeypatch.setattr(Decoder, 'read', lambda self, new, *a: read.extend(new[0]) or real(self, new, *a))
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(b'a\xff\xc3\n'), encoding='utf-8'))
    said(capsys, ckpt, '--interactive', '--max_tokens=1')
    assert read == [256, *b'a\xff\xc3\n']
    monkeypatch.setattr('sys.stdin', None)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        sample.main([ckpt, '--interactive', '--device=cpu'])
    assert stop.value.code == 2 and 'is closed' in capsys.readouterr().err


def test_compiled_decoding_says_the_same(overfit, capsys):
    torch._dynamo.reset()
    for prefill in ('exact', 'jacobi'):
        out, _ = said(
            capsys, f'--ckpt={overfit["t2mlr"]}', '--prompt=the mem', '--temperature=0', '--compile', f'--prefill={prefill}'
        )
        assert out == SENTENCE + '\n'


@pytest.mark.parametrize('name', ['t2mlr', 'lrt'])
def test_a_token_is_one_graph_that_moves_nothing(overfit, name):
    """A graph for each number of rows: not for each prompt, nor state, nor token. The state's tensors stay where they are, and
    the logits are those of the model that is not compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (model, _), (eager, _) = (load_model(os.path.join(overfit[name], 'ckpt.pt')) for _ in range(2))
    model.compile_token()
    with torch.inference_mode():
        for length in (1, 5, 9):
            decoders = [Decoder(m, EXACT) for m in (model, eager)]
            for width in (1, 3):
                for decoder in decoders:
                    if width == 1:
                        decoder.read([list(SENTENCE.encode()[:length])])
                    else:
                        decoder.repeat_rows(width)
                state = decoders[0].state
                tensors = [t for kv in state.kv for t in kv] + [state.memory, state.position, state.first]
                addresses = [t.data_ptr() for t in tensors]
                for token in SENTENCE.encode()[length : length + 6]:
                    for decoder in decoders:
                        decoder.read([[token]] * width)
                    torch.testing.assert_close(decoders[0].logits, decoders[1].logits, rtol=1e-4, atol=1e-4)
                assert [t.data_ptr() for t in tensors] == addresses
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 2 and not torch._dynamo.utils.counters['graph_break']


def test_a_graph_for_each_size_of_the_state(overfit, monkeypatch):
    """Rows of many different lengths that slide have states of as many sizes."""
    torch._dynamo.reset()
    real = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda call, mode, **given: real(call, backend='eager', **given))
    model, _ = load_model(str(overfit['lrt'] / 'ckpt.pt'))
    model.compile_token()
    with torch.inference_mode():
        for slots in range(20, 32):
            model.token(torch.tensor([[65]]), model.new_state(1, None, slots))
    torch._dynamo.reset()


@pytest.mark.parametrize('name', MODELS)
def test_a_saved_state_goes_on(overfit, name, tmp_path):
    """Written to a file and read again, as plain tensors, in another order of events."""
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    model.double()
    decoder = Decoder(model, EXACT)
    with torch.inference_mode():
        decoder.read([[256, *SENTENCE[:9].encode()], [65, 66]])
        torch.save(vars(decoder.state), tmp_path / 'state.pt')
        decoder.read([[67], [68]])
        decoder.read([[69], [70]])
        again = Decoder(model, EXACT)
        again.read([[1], [2]])
        again.state = type(again.state)(**torch.load(tmp_path / 'state.pt', weights_only=True))
        again.read([[67], [68]])
        again.read([[69], [70]])
    torch.testing.assert_close(again.logits, decoder.logits, rtol=0, atol=0)


def test_special_texts_are_ordinary_texts(overfit, capsys):
    """What looks like a special token is spelt in bytes; the document token cannot be typed."""
    out, _ = said(capsys, f'--ckpt={overfit["t2mlr"]}', '--prompt=<|endoftext|>', '--max_tokens=3', '--json')
    assert json.loads(out)['prompt'] == '<|endoftext|>'
    meta = read_checkpoint(overfit['t2mlr'] / 'ckpt.pt')['meta']
    assert encode(meta, '<|endoftext|>') == list(b'<|endoftext|>')


def test_a_tokenizer_that_does_not_match(tmp_path, capsys, untrained):
    whole = read_checkpoint(untrained / 'ckpt.pt')
    save_checkpoint(str(tmp_path / 'ckpt.pt'), whole | {'meta': whole['meta'] | {'vocab_size': 300}})
    assert '300 tokens' in refused(capsys, f'--ckpt={tmp_path}', '--prompt=a')
    (tmp_path / 'ckpt.pt').write_bytes((untrained / 'ckpt.pt').read_bytes()[:5000])
    assert 'cannot be used' in refused(capsys, f'--ckpt={tmp_path}')


def test_several_samples_are_printed_apart(overfit, capsys):
    out, _ = said(capsys, f'--ckpt={overfit["t2mlr"]}', '--prompt=the', '--num_samples=3', '--temperature=0', '--seed=7')
    assert out == ''.join(f'--- sample {i + 1}, seed {7 + i}\n{SENTENCE}\n' for i in range(3))


def test_the_end_of_the_context_is_said_once(untrained, capsys, monkeypatch):
    for n in (0, 1, 30, 38, 39):
        out, err = said(capsys, f'--ckpt={untrained}', f'--prompt={"a" * n}', '--max_tokens=500', '--temperature=0')
        assert err.count('end of the context, 40 tokens') == 1
    assert 'has 41 tokens, more than the context of 40' in refused(capsys, f'--ckpt={untrained}', f'--prompt={"a" * 40}')
    for n, times in ((5, 0), (500, 1)):
        monkeypatch.setattr('sys.stdin', io.StringIO('aaa\n'))
        out, err = said(capsys, f'--ckpt={untrained}', '--interactive', f'--max_tokens={n}', '--temperature=0')
        assert err.count('end of the context, 40 tokens') == times


def test_a_task_model_answers_where_it_is_asked(tmp_path, capsys):
    prepare_data.main(['s5', '--group=3', '--steps=1-2', f'--out={tmp_path}/s3', '--n_train=50', '--n_val=20', '--n_test=20'])
    settings = dict(block_size=32, max_steps=1, warmup_steps=0, data_dir=f'{tmp_path}/s3', out_dir=f'{tmp_path}/run')
    train(TrainConfig(**BASE | T2MLR | settings | {'reset_token': -1}))
    names = read_checkpoint(tmp_path / 'run' / 'ckpt.pt')['meta']['names']
    out, _ = said(capsys, f'--ckpt={tmp_path}/run', '--prompt=p021 v3 p120 v5 | p120 _ p021 _ v1 .')
    legend, *lines = out.splitlines()
    assert legend.startswith('p120 moves 0 to 1, 1 to 2, 2 to 0.')
    lines = [line.split(' -> ') for line in lines]
    assert [left.strip() for left, _ in lines] == 'p120 _ p021 _'.split() and all(right in names for _, right in lines)
    assert 'asks nothing' in refused(capsys, f'--ckpt={tmp_path}/run', '--prompt=p021 v3 |')
    assert 'prompt is empty' in refused(capsys, f'--ckpt={tmp_path}/run')
    assert "'nonsense'" in refused(capsys, f'--ckpt={tmp_path}/run', '--prompt=nonsense')


def test_settings_out_of_range(capsys, untrained):
    assert 'device=cuda:77' in refused(capsys, f'--ckpt={untrained}', device='cuda:77')
    for given, says in (
        ('num_samples=0', 'num_samples=0'),
        ('max_tokens=0', 'max_tokens=0'),
        ('temperature=-1', 'temperature=-1'),
        ('top_k=-1', 'top_k=-1'),
        ('top_p=0', 'top_p=0'),
        ('top_p=1.5', 'top_p=1.5'),
        ('min_p=1.5', 'min_p=1.5'),
        ('prefill_chunk=0', 'prefill_chunk=0'),
        ('jacobi_tol=-1', 'jacobi_tol=-1'),
        ('prefill=jacobbi', "'jacobi'"),
        ('overflow=slid', "'slide'"),
        ('seed=-1', 'seed=-1'),
        (f'seed={2**64}', 'seed='),
        (f'num_samples={10**21}', 'num_samples='),
        ('threads=100000', 'threads=100000'),
        ('ckpt=nowhere', 'nowhere'),
    ):
        assert says in refused(capsys, *([] if 'ckpt' in given else [f'--ckpt={untrained}']), f'--{given}')


def test_a_model_on_random_settings_round_trips_through_a_checkpoint(tmp_path, texts):
    """load_model restores config, weights and type, whatever the architecture."""
    rng = random.Random(0)
    for i, (name, changed) in enumerate(MODELS.items()):
        config = TrainConfig(**BASE | changed | {'data_dir': str(texts), 'vocab_size': 257, 'block_size': 20})
        config.dtype = rng.choice(['float32', 'float64'])
        config.check()
        model = build(config).to(torch.float64 if config.dtype == 'float64' else torch.float32)
        path = str(tmp_path / f'{i}.pt')
        rest = {'optimizers': [], 'best_loss': 0.0, 'rng': torch.get_rng_state()}
        save_checkpoint(path, {'model': model.state_dict(), 'config': asdict(config), 'step': 0, 'meta': {}} | rest)
        loaded, _ = load_model(path)
        assert loaded.config == GPTConfig(**{k: v for k, v in asdict(config).items() if k in asdict(GPTConfig())})
        tokens = torch.randint(257, (2, 9))
        torch.testing.assert_close(loaded(tokens), model(tokens), rtol=0, atol=0)
        assert not Path(path + '.tmp').exists(), name


def test_find_checkpoint_names_what_is_missing():
    with pytest.raises(ConfigError, match='under nowhere/'):
        find_checkpoint('', root='nowhere')


def test_a_model_without_numbers_says_so(tmp_path, capsys, untrained):
    whole = read_checkpoint(untrained / 'ckpt.pt')
    whole['model']['embed.weight'].fill_(float('nan'))
    save_checkpoint(str(tmp_path / 'ckpt.pt'), whole)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        sample.main([f'--ckpt={tmp_path}', '--prompt=a', '--device=cpu'])
    assert stop.value.code == 2 and 'not finite' in capsys.readouterr().err
