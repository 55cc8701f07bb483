"""Laws of decoding from a checkpoint: one forward a token, what was learned comes back, every sample is its own, and every
mistake is one sentence."""

import hashlib
import io
import itertools
import os
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import prepare_data
import sample
from configurator import ConfigError
from model import SEQUENTIAL, GPTConfig, build
from sample import SampleConfig, choose, find_checkpoint, generate, load_model, repeat_state
from train import TrainConfig, read_checkpoint, save_checkpoint, train

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


@pytest.fixture(scope='module')
def overfit(texts, tmp_path_factory):
    """{name: out_dir of a model that knows the sentence by heart}."""
    found = {}
    for name, changed in MODELS.items():
        out = tmp_path_factory.mktemp('run')
        config = dict(n_embd=48, block_size=len(SENTENCE) + 4, max_steps=400, learning_rate=1e-2, warmup_steps=10)
        config |= dict(eval_interval=400, eval_exact_batches=0, lr_schedule='linear', weight_decay=0.0)
        train(TrainConfig(**BASE | config | changed | {'data_dir': str(texts), 'out_dir': str(out)}))
        found[name] = out
    return found


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
def test_an_overfitted_sentence_comes_back(overfit, capsys, name):
    """From prompts of nothing, one character and half the sentence, greedily, and nothing after its end."""
    for n in (0, 1, 2, len(SENTENCE) // 2, len(SENTENCE) - 1):
        prompt = SENTENCE[:n]
        out, _ = said(capsys, f'--ckpt={overfit[name]}', f'--prompt={prompt}', '--temperature=0')
        assert out == SENTENCE + '\n'


@pytest.mark.parametrize('name', MODELS)
def test_one_forward_of_one_token_each(overfit, name):
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    lengths = []
    model.register_forward_pre_hook(lambda module, given: lengths.append(given[0].shape))
    config = SampleConfig(max_tokens=10, num_samples=3, temperature=2.0)
    prompt = [256, *SENTENCE[:5].encode()]
    with torch.inference_mode():
        steps = list(generate(model, prompt, config))
    assert len(steps) == 10 and lengths == [(1, 6), *[(3, 1)] * 9]


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
        drawn = choose(logits.expand(4000, -1), config, [generator] * 4000).flatten()
        counts = torch.bincount(drawn, minlength=6).double() / 4000
        expected = torch.tensor([p[i] / sum(p[j] for j in kept) if i in kept else 0.0 for i in range(6)])
        assert (counts - expected).abs().max() < 0.03 and not counts[expected == 0].any()


def test_temperature_0_is_greedy_and_tiny_temperatures_are_finite():
    logits = torch.tensor([[0.0, 3.0, 2.9], [5.0, -5.0, 4.9]])
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    for temperature in (0.0, 1e-6, 1e-300, 5e-324):
        assert choose(logits, SampleConfig(temperature=temperature), generators).flatten().tolist() == [1, 0]


def test_a_sample_does_not_depend_on_its_neighbours(untrained):
    """Sample i of n with seed s is the only sample with seed s + i, for any n."""
    model, _ = load_model(str(untrained / 'ckpt.pt'))
    config = SampleConfig(max_tokens=12, temperature=1.0, seed=5)
    with torch.inference_mode():
        alone = [[t for (t,) in generate(model, [256, 65], replace(config, seed=5 + i))] for i in range(4)]
        together = list(zip(*generate(model, [256, 65], replace(config, num_samples=4)), strict=True))
    assert [list(row) for row in together] == alone and len(set(map(tuple, alone))) == 4


def test_a_finished_row_stays_finished(overfit):
    """Rows end at different steps; each is what it is alone, and the step at which all have ended is the last."""
    model, _ = load_model(str(overfit['t2mlr'] / 'ckpt.pt'))
    config = SampleConfig(max_tokens=40, temperature=1.5, seed=0)
    prompt = [256, *SENTENCE[:20].encode()]
    with torch.inference_mode():
        rows = list(zip(*generate(model, prompt, replace(config, num_samples=6), 256), strict=True))
        for i, row in enumerate(rows):
            alone = [t for (t,) in generate(model, prompt, replace(config, seed=i), 256)]
            assert list(row[: len(alone)]) == alone and set(row[len(alone) :]) <= {256}
    assert len({row.index(256) if 256 in row else -1 for row in rows}) > 1


@pytest.mark.parametrize('name', ['t2mlr', 'lrt', 'lstm'])
def test_a_repeated_state_is_that_of_equal_rows(overfit, name):
    model, _ = load_model(str(overfit[name] / 'ckpt.pt'))
    prompt = torch.tensor([list(SENTENCE[:9].encode())])
    with torch.no_grad():
        one, three = model.new_state(1), model.new_state(3)
        model(prompt, schedule=SEQUENTIAL, state=one)
        model(prompt.repeat(3, 1), schedule=SEQUENTIAL, state=three)
        token = torch.tensor([[65], [66], [67]])
        wide = model(token, schedule=SEQUENTIAL, state=repeat_state(one, 3))
        torch.testing.assert_close(wide, model(token, schedule=SEQUENTIAL, state=three), rtol=1e-5, atol=1e-5)
        before = [t.clone() for kv in one.kv for t in kv]
        assert all(torch.equal(a, b) for a, b in zip(before, (t for kv in one.kv for t in kv), strict=True))


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
        assert f'update {i}' in said(capsys, '--max_tokens=3').err
    assert find_checkpoint('out/b') == 'out/b/ckpt.pt' and find_checkpoint('x.pt') == 'x.pt'


def test_prompts_from_a_file_and_from_standard_input(tmp_path, monkeypatch, capsys, overfit):
    ckpt = f'--ckpt={overfit["lrt"]}'
    (tmp_path / 'p.txt').write_text(SENTENCE[:10])
    assert said(capsys, ckpt, f'--prompt_file={tmp_path}/p.txt', '--temperature=0').out == SENTENCE + '\n'
    monkeypatch.setattr('sys.stdin', io.StringIO(SENTENCE[:12]))
    assert said(capsys, ckpt, '--prompt_file=-', '--temperature=0').out == SENTENCE + '\n'
    assert 'keep one' in refused(capsys, ckpt, '--prompt=a', '--prompt_file=-')
    assert 'cannot be read' in refused(capsys, ckpt, f'--prompt_file={tmp_path}/none.txt')
    (tmp_path / 'binary').write_bytes(b'\xff\xfe\x00')
    assert 'cannot be read' in refused(capsys, ckpt, f'--prompt_file={tmp_path}/binary')


def test_characters_arrive_whole(untrained, capsys, monkeypatch):
    """Bytes that only together make a character are held back until it is complete."""
    text = 'é€😀.'
    steps = [(b,) for b in text.encode()]
    written = []
    monkeypatch.setattr(sample, 'generate', lambda *a: iter(steps))
    monkeypatch.setattr('builtins.print', lambda *a, **k: written.append(''.join(map(str, a))))
    sample.main([f'--ckpt={untrained}', f'--max_tokens={len(steps)}', '--device=cpu'])
    assert ''.join(written[2:]) == text and not any('�' in w for w in written)


def test_several_samples_are_printed_apart(overfit, capsys):
    out, _ = said(capsys, f'--ckpt={overfit["t2mlr"]}', '--prompt=the', '--num_samples=3', '--temperature=0', '--seed=7')
    assert out == ''.join(f'--- sample {i + 1}, seed {7 + i}\n{SENTENCE}\n' for i in range(3))


def test_the_end_of_the_context_is_said_once(untrained, capsys):
    model, _ = load_model(str(untrained / 'ckpt.pt'))
    for n in (0, 1, 30, 38, 39):
        out, err = said(capsys, f'--ckpt={untrained}', f'--prompt={"a" * n}', '--max_tokens=500', '--temperature=0')
        assert err.count('end of the context, 40 tokens') == 1
    with torch.inference_mode():
        for n in (1, 2, 39, 40):
            assert len(list(generate(model, [65] * n, SampleConfig(max_tokens=500), -1))) == 40 - n + 1
    assert 'has 41 tokens, more than the context of 40' in refused(capsys, f'--ckpt={untrained}', f'--prompt={"a" * 40}')


def test_a_task_model_answers_every_token(tmp_path, capsys):
    prepare_data.main(['s5', '--group=3', '--steps=1-2', f'--out={tmp_path}/s3', '--n_train=50', '--n_val=20', '--n_test=20'])
    settings = dict(block_size=32, max_steps=1, warmup_steps=0, data_dir=f'{tmp_path}/s3', out_dir=f'{tmp_path}/run')
    train(TrainConfig(**BASE | T2MLR | settings | {'reset_token': -1}))
    names = read_checkpoint(tmp_path / 'run' / 'ckpt.pt')['meta']['names']
    prompt = f'{names[-1]} | {names[-1]}'
    out, _ = said(capsys, f'--ckpt={tmp_path}/run', f'--prompt={prompt}')
    lines = [line.split(' -> ') for line in out.splitlines()]
    assert [left.strip() for left, _ in lines] == prompt.split() and all(right in names for _, right in lines)
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
