"""Laws of decoding that were once broken: ids without a token are never drawn or counted, bfloat16 ends, a token costs one
transfer, a prompt is the same text however it arrives, and advice is true."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import eval as evaluation
import prepare_data
import sample
import train
from configurator import parse
from model import GPTConfig, build
from sample import SHORT, Decoder, SampleConfig, complete, generate, prefill
from schedule import SEQUENTIAL, Schedule, exact_schedule
from support.checkpoint import save_checkpoint
from support.harness import score_continuations
from support.loading import computing, load, load_model
from support.loss import token_nll
from support.questions import read_rows
from support.tokens import ids_without_token, tokenizer_meta

ROOT = Path(sample.__file__).parent
T2MLR = dict(recurrence='t2mlr', l_start=1, l_end=2, gamma_init=0.5)
LRT = dict(recurrence='lrt', source_layer=2)
MODELS = {'plain': {}, 't2mlr': T2MLR, 'lrt': LRT, 't2mlr llama': T2MLR | {'family': 'llama'}, 'lstm': {'architecture': 'lstm'}}
META = {'kind': 'text'} | tokenizer_meta('bytes')


def random_model(name, **changed):
    """A model whose passes converge: matrices scaled so that a change of the memory shrinks from token to token."""
    torch.manual_seed(0)
    shape = dict(vocab_size=257, block_size=128, n_layer=4, n_head=2, n_embd=32)
    model = build(GPTConfig(**shape | MODELS[name] | changed)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.6 / parameter.size(1) ** 0.5)
    return model


def saved(folder, model, meta=META, **changed):
    """The folder of a checkpoint of `model`."""
    config = train.TrainConfig(**{f.name: getattr(model.config, f.name) for f in fields(GPTConfig)}, **changed)
    rest = {'optimizers': [], 'best_loss': 0.0, 'rng': torch.get_rng_state(), 'step': 0}
    folder.mkdir(exist_ok=True)
    save_checkpoint(str(folder / 'ckpt.pt'), {'model': model.state_dict(), 'config': asdict(config), 'meta': meta} | rest)
    return folder


def said(capsys, *argv):
    capsys.readouterr()
    sample.main(['--device=cpu', '--threads=1', *argv])
    return capsys.readouterr()


def refused(capsys, main, *argv):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([*argv])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == '' and len(err.splitlines()) == 1, err
    return err


# Ids without a token


def test_ids_without_a_token():
    """Those above the tokenizer's last and the gaps in it; special tokens are known, and so are a task's names."""
    assert ids_without_token(META, 257) == [] and ids_without_token(META, 260) == [257, 258, 259]
    assert ids_without_token({}, 5) == []
    gaps = {'tokenizer': 'x', 'token_bytes': [1, 0, 2, 0, 0, 0], 'document_token': 3}
    assert ids_without_token(gaps, 7) == [1, 4, 5, 6]
    special = json.dumps({'added_tokens': [{'id': 4, 'content': '<s>', 'special': True}]})
    assert ids_without_token(gaps | {'tokenizer_json': special, 'stop_token': 5}, 7) == [1, 6]
    assert ids_without_token({'tokenizer': 'names', 'names': ['p01', '.'], 'pad_token': 1}, 4) == [2, 3]


@pytest.fixture(params=['t2mlr', 'lrt', 't2mlr llama', 'lstm'])
def larger(request, tmp_path):
    """A folder of a model of 320 ids that prefers the 63 above the last byte token, and the same with all ids known."""
    model = random_model(request.param, vocab_size=320)
    with torch.no_grad():
        model.head.weight[257:] *= 50.0
    return saved(tmp_path / 'run', model)


def test_unknown_ids_are_never_drawn(larger, capsys):
    """Greedily, by any sampling, in batches, past the end of the context; log-probabilities are those over the known ids."""
    for more in (
        ['--temperature=0'],
        ['--top_k=300', '--temperature=5'],
        ['--top_p=0.99', '--num_samples=3'],
        ['--min_p=1e-9'],
    ):
        given = [f'--ckpt={larger}', '--prompt=ab', '--overflow=slide', '--max_tokens=140', '--json', *more]
        for line in said(capsys, *given).out.splitlines():
            assert max(json.loads(line)['tokens']) < 257
    model, checkpoint = load_model(str(larger / 'ckpt.pt'))
    tokens = torch.randint(257, (2, 9))
    known = model(tokens, schedule=SEQUENTIAL)
    assert known[..., 257:].exp().sum() == 0
    model.unknown_ids = None
    raw = model(tokens, schedule=SEQUENTIAL)
    assert (raw.argmax(-1) >= 257).any()
    torch.testing.assert_close(known[..., :257], raw[..., :257], rtol=0, atol=0)


def test_unknown_ids_have_no_share_in_an_evaluation(larger):
    model, _ = load_model(str(larger / 'ckpt.pt'))
    tokens = torch.randint(257, (1, 12))
    logits = model(tokens, schedule=SEQUENTIAL)[0, :, :257].double().log_softmax(-1)
    expected = -logits[:-1].gather(-1, tokens[0, 1:, None]).flatten()
    with torch.no_grad():
        torch.testing.assert_close(token_nll(model, tokens[:, :-1], tokens[:, 1:], SEQUENTIAL)[0], expected)
        ((total, _),) = score_continuations(model, [(tokens[0, :4].tolist(), tokens[0, 4:].tolist())], 2)
        assert total == pytest.approx(-expected[3:].sum().item(), rel=1e-5)
        assert all(complete(model, META, [[256, 65]], SampleConfig(temperature=0, max_tokens=5)))


def test_where_all_ids_are_known_nothing_changes(tmp_path):
    model = random_model('lrt')
    loaded, _ = load_model(str(saved(tmp_path / 'run', model) / 'ckpt.pt'))
    tokens = torch.randint(257, (2, 9))
    assert loaded.unknown_ids is None and 'unknown_ids' not in loaded.state_dict()
    torch.testing.assert_close(loaded(tokens), model(tokens), rtol=0, atol=0)


def test_a_folder_with_more_rows_than_its_tokenizer_has_tokens(tmp_path, capsys):
    """The rows of 263 to 299 stand for nothing; with --chat=False a chat template that fails is no hindrance."""
    pretrained = pytest.importorskip('test_pretrained')
    pretrained.make(tmp_path / 'base')
    pretrained.add_tokenizer(tmp_path / 'base', template='{{ raise_exception("no date") }}')
    folder = f'hf:{tmp_path}/base'
    assert 'no date' in refused(capsys, sample.main, f'--ckpt={folder}', '--prompt=a', '--device=cpu')
    model, _ = load(folder, chat=False)
    assert model.unknown_ids.tolist() == list(range(263, 300))
    given = ['--prompt=a', '--json', '--temperature=3', '--max_tokens=40', '--chat=False']
    assert max(json.loads(said(capsys, f'--ckpt={folder}', *given).out)['tokens']) < 263


# Types


@pytest.mark.parametrize('name', MODELS)
def test_bfloat16_decodes_as_it_trains(name, tmp_path, capsys):
    """Weights in float32, buffers of keys and values in bfloat16; the logits are near those of float32."""
    folder = saved(tmp_path / 'run', random_model(name))
    assert said(capsys, f'--ckpt={folder}', '--prompt=some text', '--dtype=bfloat16', '--max_tokens=4', '--num_samples=2').out
    found = {}
    for dtype in ('float32', 'bfloat16'):
        model, _ = load_model(str(folder / 'ckpt.pt'), dtype=dtype)
        with torch.inference_mode(), computing(model, dtype):
            decoder = Decoder(model, SampleConfig(dtype=dtype, temperature=0))
            decoder.read([[256, *b'a prompt of more than sixteen tokens'], [256, 65]])
            decoder.read([[66], [67]])
        assert {p.dtype for p in model.parameters()} == {torch.float32} and decoder.logits.dtype == torch.float32
        assert {t.dtype for kv in decoder.state.kv for t in kv} <= {getattr(torch, dtype)}
        found[dtype] = decoder.logits
    assert 0 < (found['float32'] - found['bfloat16']).abs().max() < 0.1


def test_the_type_of_a_loaded_model(tmp_path):
    model = random_model('plain')
    for trained, dtype, expected in (
        ('float64', 'auto', torch.float64),
        ('float64', 'bfloat16', torch.float32),
        ('auto', 'float64', torch.float64),
        ('bfloat16', 'auto', torch.float32),
    ):
        loaded, _ = load_model(str(saved(tmp_path / 'run', model, dtype=trained) / 'ckpt.pt'), dtype=dtype)
        assert loaded.embed.weight.dtype == expected
        assert isinstance(computing(loaded, dtype), contextlib.nullcontext) == (dtype != 'bfloat16')


ITERATED = {
    'jacobi': Schedule('jacobi', d_forward=96, d_backward=1, jacobi_tol=1e-9),
    'interleaved': Schedule('interleaved', n_subsets=3, n_sweeps=32, jacobi_tol=1e-9),
    'evaluation': exact_schedule(96, 'jacobi'),
}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', ['t2mlr', 'lrt', 't2mlr llama'])
def test_a_tolerance_below_rounding_ends(name, dtype):
    """Every loop of passes with a tolerance that rounding never lets it reach ends long before the exact-prefix law ends it."""
    model = random_model(name, block_size=96)
    tokens = torch.randint(257, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), computing(model, dtype):
        for schedule in ITERATED.values():
            changes = []
            model(tokens, schedule=schedule, changes=changes)
            assert len(changes) <= (len(schedule.passes(96)) - 1) * 0.75
        for tolerance in (1e-9, 1e-5):
            _, passes = prefill(model, model.new_state(1), tokens, SampleConfig(jacobi_tol=tolerance))
            assert passes < 0.75 * 96
        _, passes = prefill(model, model.new_state(1), tokens, SampleConfig(jacobi_tol=0.0))
        assert passes == 1 + 96  # exact by the law


class Transfers(TorchDispatchMode):
    """Counts what waits for the device: a number asked of a tensor, or a shape that depends on one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = ('_local_scalar_dense', 'item', 'is_nonzero', 'nonzero')  # the middle two in inference mode
        self.count += func in [getattr(torch.ops.aten, name).default for name in names]
        return func(*args, **kwargs or {})


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('temperature', [0.0, 0.8])
def test_one_transfer_a_token(name, temperature, monkeypatch):
    """Whatever the number of rows; texts of tensors, which no dispatch shows on a CPU, count too."""
    model, transfers = random_model(name), Transfers()
    for method in ('tolist', 'cpu', 'numpy'):
        real = getattr(torch.Tensor, method)

        def counted(tensor, *given, real=real):
            transfers.count += 1
            return real(tensor, *given)

        monkeypatch.setattr(torch.Tensor, method, counted)
    config = SampleConfig(temperature=temperature, top_k=20, top_p=0.9, max_tokens=12, num_samples=3)
    with torch.inference_mode():
        decoder = Decoder(model, config)
        decoder.read([[256, 65, 66]])
        decoder.repeat_rows(3)
        transfers.count = 0
        with transfers:
            generate(decoder, config, lambda *drawn: False)
    assert transfers.count == 12


@pytest.mark.parametrize('name', ['t2mlr', 'lrt'])
def test_short_prompts_are_read_token_by_token(name):
    """No more passes than tokens, in a whole prompt and in the last chunk of a long one, with the logits of exact reading."""
    model = random_model(name).double()
    tokens = torch.randint(257, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for n in (1, 2, 7, SHORT):
            found, passes = prefill(model, model.new_state(1), tokens[:, :n], SampleConfig())
            exact, _ = prefill(model, model.new_state(1), tokens[:, :n], SampleConfig(prefill='exact'))
            assert passes == n
            torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)
        for n in (33, 40):
            _, passes = prefill(model, model.new_state(1), tokens[:, :n], SampleConfig(prefill_chunk=32, jacobi_tol=0.0))
            assert passes == 1 + 3 * 11 + n - 32


# Texts


ARRIVALS = {  # bytes, the one prompt they are, the prompts that they are line by line
    'plain': (b'a b', 'a b', ['a b']),
    'line ends': (b'a\r\nb\n\nc\r\n', 'a\nb\n\nc\n', ['a', 'b', '', 'c']),
    'mark': (b'\xef\xbb\xbfa\xc3\xa9\r\n', 'aé\n', ['aé']),
    'inner mark': (b'a\xef\xbb\xbfb', 'a\ufeffb', ['a\ufeffb']),
    'no line ends': ('a\u2028b\x0cc\x85d\x1ee\rf\n'.encode(), 'a\u2028b\x0cc\x85d\x1ee\rf\n', ['a\u2028b\x0cc\x85d\x1ee\rf']),
}


@pytest.mark.parametrize('content,whole,lines', ARRIVALS.values(), ids=ARRIVALS)
def test_a_prompt_is_the_same_however_it_arrives(content, whole, lines, tmp_path, monkeypatch, capsys):
    folder, read, real = saved(tmp_path / 'run', random_model('plain')), [], Decoder.read
    monkeypatch.setattr(Decoder, 'read', lambda self, new, *a: read.append(new) or real(self, new, *a))
    (tmp_path / 'p.txt').write_bytes(content)
    stdin = lambda: io.TextIOWrapper(io.BytesIO(content), encoding='ascii')  # noqa: E731

    def prompts(*given):
        read.clear()
        monkeypatch.setattr('sys.stdin', stdin())
        said(capsys, f'--ckpt={folder}', '--max_tokens=1', *given)
        return [bytes(row[1:]).decode() for row in read[0]]

    for given in (
        f'--prompt={whole}',
        f'--prompt={os.fsdecode(content)}',
        f'--prompt={content.decode("ascii", "surrogateescape")}',
    ):
        assert prompts(given) == [whole]
    for name in (f'{tmp_path}/p.txt', '-'):
        assert prompts(f'--prompt_file={name}') == [whole]
        assert prompts(f'--prompt_file={name}', '--prompt_lines') == lines
    typed = prompts('--interactive', '--overflow=slide')
    assert typed == [lines[0] + '\n' * (content.count(b'\n') > 0)]


def test_json_and_stop_texts_in_the_locale_c(tmp_path, monkeypatch, capsys):
    """In a locale that knows ASCII alone, arguments are the texts they spell, and no lone surrogate is printed."""
    folder, given = saved(tmp_path / 'run', random_model('plain')), ['--max_tokens=2', '--temperature=0', '--device=cpu']
    environment = {**os.environ, 'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
    command = [
        sys.executable,
        'sample.py',
        f'--ckpt={folder}',
        '--prompt=é\ud800'.encode('utf-8', 'surrogatepass'),
        '--json',
        *given,
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300)
    found = json.loads(run.stdout)
    assert run.returncode == 0 and found['prompt'].startswith('é\ufffd') and 'ud' not in run.stdout.decode()
    for stop in ('é', 'é'.encode().decode('ascii', 'surrogateescape')):
        answer = iter('aébc'.encode())
        monkeypatch.setattr(sample, 'sample_next_token', lambda *a, answer=answer: torch.tensor([[next(answer)]]))
        assert json.loads(said(capsys, f'--ckpt={folder}', '--prompt=x', f'--stop={stop}', '--json').out)['text'] == 'a'


@pytest.mark.parametrize('ending', ['jsonl', 'json'])
def test_question_files_take_a_mark(ending, tmp_path):
    row = {'question': 'é?', 'answer': '1'}
    text = json.dumps([row] if ending == 'json' else row, ensure_ascii=False)
    (tmp_path / f'q.{ending}').write_bytes(b'\xef\xbb\xbf' + text.encode() + b'\r\n')
    assert read_rows(str(tmp_path / f'q.{ending}')) == [row]


# Sentences


def test_no_compiler_is_one_sentence(tmp_path):
    """In a process of its own, because torch remembers which compiler it found."""
    folder = saved(tmp_path / 'run', random_model('plain'))
    env = {name: value for name, value in os.environ.items() if name != 'CXX'}
    env |= {'PATH': str(tmp_path), 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path / 'cache')}
    argv = [sys.executable, str(ROOT / 'sample.py'), f'--ckpt={folder}', '--prompt=a', '--compile', '--device=cpu']
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stdout == '' and len(done.stderr.splitlines()) == 1, done.stderr
    assert 'C++ compiler' in done.stderr and '--compile=False' in done.stderr


@pytest.mark.parametrize('config', [SampleConfig, evaluation.EvalConfig], ids=lambda c: c.__name__)
def test_the_nearest_value_that_is_advised_is_taken(config, capsys):
    """Of every number with bounds, a value below and one above them."""
    advised = []
    for f in (f for f in fields(config) if type(f.default) in (int, float)):
        for value in ('-77777777777', '1e300' if isinstance(f.default, float) else str(10**30)):
            with contextlib.suppress(SystemExit):
                parse(config, [f'--{f.name}={value}'], '')
            advised += re.findall(rf'the nearest is ({f.name}=\S+)\.\n', capsys.readouterr().err)
    assert len(advised) > 3
    for one in advised:
        parse(config, [f'--{one}'], '')


def test_top_p_says_what_it_takes(capsys):
    for value in ('-1', '0', '1.5'):
        err = refused(capsys, sample.main, f'--top_p={value}')
        assert f'top_p={float(value)} ' in err and 'above 0' in err and 'nearest' not in err


@pytest.mark.parametrize(
    'main,argv',
    [(sample.main, ['--help']), (evaluation.main, ['-h']), (train.main, ['--help']), (bench.main, ['--help'])]
    + [(bench.main, ['decode', '--help']), (prepare_data.main, []), (prepare_data.main, ['text', '--help'])],
)
def test_help_into_a_closed_pipe_ends_quietly(main, argv, monkeypatch):
    end, beginning = os.pipe()
    os.close(end)
    with os.fdopen(beginning, 'w') as pipe:
        monkeypatch.setattr('sys.stdout', pipe)
        with pytest.raises(SystemExit) as stop:
            main(argv)
        monkeypatch.undo()
    assert stop.value.code == 141


def test_a_closed_output_is_no_traceback(monkeypatch):
    monkeypatch.setattr('sys.stdout', None)
    with pytest.raises(SystemExit) as stop:
        sample.main(['--help'])
    assert stop.value.code == 0


def test_a_model_without_numbers_prints_nothing(tmp_path, capsys):
    model = random_model('plain')
    with torch.no_grad():
        model.embed.weight.fill_(float('nan'))
    folder = saved(tmp_path / 'run', model)
    for temperature in (0, 1):
        given = ['--prompt=a', '--device=cpu', f'--temperature={temperature}']
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            sample.main([f'--ckpt={folder}', *given])
        out, err = capsys.readouterr()
        assert stop.value.code == 2 and out == '' and 'not finite' in err
