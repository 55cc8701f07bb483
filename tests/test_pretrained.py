"""Laws of the import and of the export: logits and continuations are those of the transformers library, with and without an
untrained recurrence; what is exported loads as it was; a conversation is read as its template renders it.

With PRETRAINED=FOLDER (a SmolLM2 or another Llama-family checkpoint) they are also tested on real weights.
"""

import io
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from conftest import trial

import prepare_data
import sample
from configurator import ConfigError
from model import GPTConfig, build
from sample import Decoder, SampleConfig, generate
from schedule import SEQUENTIAL, Schedule
from support.chat import chat_meta, chat_tokens
from support.checkpoint import read_checkpoint
from support.data import Dataset
from support.loading import load_folder, load_model
from support.pretrained import load_pretrained, pretrained_config, take_pretrained_settings
from support.tokens import encode, tokenizer_meta
from train import TrainConfig, train

transformers = pytest.importorskip('transformers', reason='transformers is an optional extra, and the yardstick here')
tokenizers = pytest.importorskip('tokenizers', reason='tokenizers is an optional extra')
pytest.importorskip('safetensors', reason='safetensors is an optional extra')

ROOT = Path(prepare_data.__file__).parent
LLAMA3 = {'rope_type': 'llama3', 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 64}
T2MLR = dict(recurrence='t2mlr', l_start=1, l_end=1)
LRT = dict(recurrence='lrt', source_layer=1, identity_init=True)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

each_recurrence = pytest.mark.parametrize('recurrence', [{}, T2MLR, LRT], ids=['none', 't2mlr', 'lrt'])


def make(folder, shards=False, **changed):
    """A random Llama-family checkpoint in the format of transformers; returns its model."""
    small = dict(vocab_size=300, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2)
    small |= dict(intermediate_size=80, max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small | changed)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(folder, max_shard_size='100KB' if shards else '1GB')
    return model


def add_tokenizer(folder, specials=('<|endoftext|>', '<|im_start|>', '<|im_end|>'), template=TEMPLATE):
    """Bytes, four merges and special tokens, with a chat template."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [('h', 'e'), ('l', 'l'), ('he', 'll'), ('Ġ', 'a')]
    vocabulary = {t: i for i, t in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(folder / 'tokenizer.json'))
    about = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<|im_end|>', 'chat_template': template}
    (folder / 'tokenizer_config.json').write_text(json.dumps(about))
    return str(folder)


@pytest.fixture(scope='module', params=['random', 'real'])
def base(request, tmp_path_factory):
    """(folder, its model in transformers, tokens of a text (1, 512 at most))."""
    folder = os.environ.get('PRETRAINED')
    if request.param == 'random':
        folder = tmp_path_factory.mktemp('base')
        make(folder, max_position_embeddings=512)
        add_tokenizer(folder)
    elif not folder:
        pytest.skip('PRETRAINED names no folder of real weights')
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = encode(tokenizer_meta(f'{folder}/tokenizer.json'), (ROOT / 'README.md').read_text())
    return str(folder), theirs, torch.tensor([text[:512]])


def imported(folder, **recurrence):
    model = build(GPTConfig(**pretrained_config(str(folder), 512) | recurrence))
    load_pretrained(model, str(folder))
    return model.eval()


@pytest.mark.parametrize('recurrence', [{}, T2MLR, LRT, LRT | {'memory_projection': 'layerwise'}])
@pytest.mark.parametrize(
    'changed',
    [
        {},
        {'num_key_value_heads': 6, 'rope_theta': 100000.0},
        {'rope_scaling': LLAMA3 | {'factor': 32.0}, 'rope_theta': 500000.0},
        {'rope_scaling': LLAMA3 | {'factor': 8.0}},
        {'rope_scaling': LLAMA3 | {'factor': 1.0}},
    ],
)
@pytest.mark.fault('imported weights, rotary scalings and head counts', 'the logits of transformers')
def test_logits_equal_those_of_transformers(tmp_path, changed, recurrence):
    """Over four times the original length, in every schedule and in decoding, before anything is trained."""
    theirs = make(tmp_path, shards=bool(recurrence), **changed)
    ours = imported(tmp_path, **recurrence)
    tokens = torch.randint(300, (2, 256))
    with torch.inference_mode():
        expected = theirs(tokens).logits
        schedules = [Schedule('jacobi', 2, 1), Schedule('interleaved')] if recurrence else [Schedule()]
        for schedule in schedules:
            torch.testing.assert_close(ours(tokens, schedule=schedule), expected, rtol=1e-4, atol=1e-4)
        state = ours.new_state(2)
        steps = [ours(tokens[:, t : t + 1], schedule=SEQUENTIAL, state=state) for t in range(40)]
        torch.testing.assert_close(torch.cat(steps, 1), expected[:, :40], rtol=1e-4, atol=1e-4)


@each_recurrence
@torch.inference_mode()
def test_logits_on_random_and_on_real_text(base, recurrence):
    folder, theirs, text = base
    ours = imported(folder, **recurrence)
    torch.manual_seed(0)
    tokens = torch.cat((text, torch.randint(ours.config.vocab_size, text.shape)))
    schedule = Schedule('jacobi', 2, 1) if recurrence else Schedule()
    torch.testing.assert_close(ours(tokens, schedule=schedule), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope='module')
def continuations(base):
    """Twenty prompts of a text, of different lengths, and the 64 likeliest tokens after each, by transformers."""
    _, theirs, text = base
    rng, prompts, expected = random.Random(0), [], []
    for _ in range(20):
        start = rng.randrange(text.size(1) - 40)
        prompts.append(text[0, start : start + rng.randint(1, 40)].tolist())
        tokens, cache, found = torch.tensor(prompts[-1:]), None, []
        for _ in range(64):
            with torch.inference_mode():
                out = theirs(tokens, past_key_values=cache, use_cache=True)
            tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            found.append(tokens.item())
        expected.append(found)
    return prompts, expected


@each_recurrence
@torch.inference_mode()
def test_greedy_continuations_are_those_of_transformers(base, continuations, recurrence):
    """All prompts decoded together."""
    prompts, expected = continuations
    config, found = SampleConfig(temperature=0.0, max_tokens=64), [[] for _ in prompts]
    decoder = Decoder(imported(base[0], **recurrence), config)
    decoder.read(prompts)
    generate(decoder, config, lambda i, token, _: found[i].append(token))
    assert found == expected


@pytest.mark.parametrize('recurrence', [T2MLR, LRT], ids=['t2mlr', 'lrt'])
@torch.inference_mode()
def test_the_laws_hold_on_imported_weights(base, recurrence):
    """With the recurrence at work: decoding equals the sequential schedule, and so do converged Jacobi passes."""
    model, T = imported(base[0], **recurrence), 16
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if name.startswith(('fusion.gamma', 'memory.')) or name.endswith('.gamma'):
            p.normal_(0, 0.02)
    model.double()
    tokens = torch.cat((base[2][:, :T], torch.randint(model.config.vocab_size, (1, T))))
    exact = model(tokens, schedule=SEQUENTIAL)
    state = model.new_state(2, slots=T)
    steps = [model(tokens[:, t : t + 1], schedule=SEQUENTIAL, state=state) for t in range(T)]
    torch.testing.assert_close(torch.cat(steps, 1), exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(tokens, schedule=Schedule('jacobi', T, 1)), exact, rtol=1e-9, atol=1e-9)
    assert (model(tokens, schedule=Schedule('jacobi', 0, 1)) - exact).abs().max() > 1e-6


@pytest.mark.fault('a pretrained checkpoint of another kind, cut or incomplete', 'refused by name')
def test_what_cannot_be_imported_is_named(tmp_path):
    make(tmp_path / 'whole', shards=True)
    config = json.loads((tmp_path / 'whole' / 'config.json').read_text())
    for changed, says in (
        ({'model_type': 'gpt2'}, 'model_type=gpt2'),
        ({'hidden_act': 'gelu'}, 'hidden_act=gelu'),
        ({'attention_bias': True}, 'attention_bias=True'),
        ({'tie_word_embeddings': False}, 'tie_word_embeddings=False'),
        ({'rope_parameters': {'rope_type': 'yarn', 'factor': 2.0}}, 'rope_type=yarn'),
        ({'head_dim': 16}, 'head_dim=16'),
        ({'rms_norm_eps': None}, 'config.json cannot be read'),
    ):
        trial()
        (tmp_path / 'whole' / 'config.json').write_text(json.dumps(config | changed))
        with pytest.raises(ConfigError, match=says):
            pretrained_config(str(tmp_path / 'whole'), 64)
    (tmp_path / 'whole' / 'config.json').write_text('{')
    with pytest.raises(ConfigError, match='config.json cannot be read'):
        pretrained_config(str(tmp_path / 'whole'), 64)
    (tmp_path / 'whole' / 'config.json').write_text(json.dumps(config))
    shards = sorted((tmp_path / 'whole').glob('*.safetensors'))
    assert len(shards) > 2
    for fault in ('missing', 'cut', 'empty'):
        trial()
        folder = tmp_path / fault
        shutil.copytree(tmp_path / 'whole', folder)
        path = folder / shards[1].name
        if fault == 'missing':
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: 1000 if fault == 'cut' else 0])
        with pytest.raises(ConfigError, match='cannot be read'):
            imported(folder)
    (tmp_path / 'whole' / 'model.safetensors.index.json').unlink()
    shards[0].unlink()
    with pytest.raises(ConfigError, match='lacks'):
        imported(tmp_path / 'whole')
    wider = build(GPTConfig(**pretrained_config(str(tmp_path / 'whole'), 64) | {'n_hidden': 96}))
    with pytest.raises(ConfigError, match='of shape'):
        load_pretrained(wider, str(tmp_path / 'whole'))


@pytest.mark.parametrize('recurrence', [T2MLR | {'schedule': 'jacobi', 'd_forward': 2, 'd_backward': 2}, {}])
def test_a_retrofit_trains_and_resumes(tmp_path, recurrence):
    """init_from=hf:FOLDER begins with the pretrained loss, and goes on from its own checkpoint when started again."""
    theirs = make(tmp_path / 'base')
    (tmp_path / 'source').mkdir()
    for i in range(4):
        (tmp_path / 'source' / f'{i}.txt').write_text(f'text {i} ' * 40)
    prepare_data.main(['text', f'--source={tmp_path}/source', '--val_fraction=0.3', f'--out={tmp_path}/data'])
    settings = dict(data_dir=f'{tmp_path}/data', out_dir=f'{tmp_path}/run', init_from=f'hf:{tmp_path}/base', block_size=32)
    settings |= dict(batch_size=4, warmup_steps=0, device='cpu', threads=1, log_interval=1, eval_batches=1) | recurrence
    config = TrainConfig(**settings, max_steps=4)
    take_pretrained_settings(config)
    assert config.n_layer == 3 and config.family == 'llama' and config.vocab_size == 300
    train(config)
    lines = [json.loads(line) for line in (tmp_path / 'run' / 'log.jsonl').read_text().splitlines()]
    data = Dataset(f'{tmp_path}/data')
    x, y, _ = data.batch('train', data.rows('train', config.seed, 0, 4, 32), 32)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    assert lines[0]['loss'] == pytest.approx(loss.item(), rel=1e-4)
    config.max_steps = 6
    train(config)
    assert read_checkpoint(tmp_path / 'run' / 'ckpt.pt')['step'] == 6


# Export


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """{name: out_dir} of models retrofitted for two updates, and of one of our own; 'base' is where they started."""
    root = tmp_path_factory.mktemp('runs')
    make(root / 'base')
    add_tokenizer(root / 'base')
    (root / 'source').mkdir()
    for i in range(4):
        (root / 'source' / f'{i}.txt').write_text(f'hello a {i} ' * 40)
    tokens = f'--tokenizer={root}/base/tokenizer.json'
    prepare_data.main(['text', f'--source={root}/source', '--val_fraction=0.3', f'--out={root}/data', tokens])
    settings = dict(data_dir=f'{root}/data', block_size=32, batch_size=4, warmup_steps=0, device='cpu', threads=1, max_steps=2)
    settings |= dict(eval_batches=1, eval_exact_batches=0, recurrence_lr_scale=100.0)
    found = {'base': root / 'base'}
    for name, changed in {
        'plain': {'init_from': f'hf:{root}/base'},
        't2mlr': {'init_from': f'hf:{root}/base', 'schedule': 'jacobi', 'd_forward': 2, 'd_backward': 2} | T2MLR,
        'lrt': {'init_from': f'hf:{root}/base', 'schedule': 'interleaved'} | LRT,
        'nanochat': {'n_layer': 2, 'n_embd': 32, 'schedule': 'interleaved', 'value_embeddings': 'all'} | LRT,
        'lstm': {'architecture': 'lstm', 'n_layer': 1, 'n_embd': 16},
    }.items():
        config = TrainConfig(**settings | changed | {'out_dir': str(root / name)})
        config.check()
        train(config)
        found[name] = root / name
    return found


def exported(capsys, run, out, *more):
    capsys.readouterr()
    sample.main(['--device=cpu', '--threads=1', f'--ckpt={run}', f'--export={out}', *more])
    return capsys.readouterr().out


@pytest.mark.parametrize('name', ['plain', 't2mlr', 'lrt'])
def test_transformers_loads_an_export_without_recurrence(runs, tmp_path, capsys, name):
    """The same logits, each tied weight once, the tokenizer and its template; the round trip gives every weight back."""
    assert 'which transformers loads' in exported(capsys, runs[name], tmp_path / 'out', '--drop_recurrence=True')
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out').eval()
    model, checkpoint = load_model(runs[name] / 'ckpt.pt')
    base = build(GPTConfig(**pretrained_config(str(tmp_path / 'out'), 32)))
    load_pretrained(base, str(tmp_path / 'out'))
    weights = dict(model.named_parameters())
    assert all(torch.equal(p, weights[n]) for n, p in base.named_parameters()) and base.config.recurrence == 'none'
    tokens = torch.randint(300, (2, 32))
    with torch.inference_mode():
        torch.testing.assert_close(base(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    from safetensors import safe_open

    with safe_open(tmp_path / 'out' / 'model.safetensors', framework='pt') as tensors:
        assert len(tensors.keys()) == len(dict(base.named_parameters())) and 'lm_head.weight' not in tensors.keys()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
    assert tokenizer('hello a')['input_ids'] == encode(checkpoint['meta'], 'hello a')
    assert tokenizer.convert_tokens_to_ids(tokenizer.eos_token) == theirs.config.eos_token_id


@pytest.mark.parametrize('name', ['t2mlr', 'lrt', 'nanochat', 'lstm'])
def test_our_own_export_comes_back(runs, tmp_path, capsys, name):
    """Weights, settings and logits, in sample.py and as a start of a training; a shorter context may be asked for."""
    assert 'in our own format' in exported(capsys, runs[name], tmp_path / 'out')
    model, checkpoint = load_model(runs[name] / 'ckpt.pt')
    again, there = load_folder(str(tmp_path / 'out'))
    assert again.config == model.config and there['meta'] == checkpoint['meta']
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    changed = dict(data_dir=str(runs['base'].parent / 'data'), out_dir=str(tmp_path / 'run'), device='cpu', threads=1)
    changed['learning_rate'] = 0.0
    config = TrainConfig(init_from=f'hf:{tmp_path}/out', block_size=16, batch_size=4, max_steps=1, warmup_steps=0, **changed)
    take_pretrained_settings(config)
    assert config.block_size == 16 and config.recurrence == model.config.recurrence
    if name != 'lstm':  # how the new data mark documents is for the new settings to say
        about = {'reset_token': 256, 'document_attention': True}
        other = TrainConfig(init_from=config.init_from, **about)
        for _ in range(2):
            take_pretrained_settings(other)
            assert {k: getattr(other, k) for k in about} == about and other.recurrence == model.config.recurrence
    train(config)
    trained = read_checkpoint(tmp_path / 'run' / 'ckpt.pt')['model']
    assert all(torch.equal(trained[n], p) for n, p in model.state_dict().items())


def test_an_export_of_an_earlier_version_comes_back(runs, tmp_path, capsys):
    """A key that is gone is no obstacle where it said what this code does anyway; any other unknown key is."""
    exported(capsys, runs['t2mlr'], tmp_path / 'out')
    model, path = load_folder(str(tmp_path / 'out'))[0], tmp_path / 'out' / 'config.json'
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {'settings': config['settings'] | {'gamma_per_channel': False}}))
    again = load_folder(str(tmp_path / 'out'))[0]
    assert again.config == model.config
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    for unknown in ({'gamma_per_channel': True}, {'fusion': False}):
        path.write_text(json.dumps(config | {'settings': config['settings'] | unknown}))
        with pytest.raises(ConfigError, match=f'config.json cannot be read.*{next(iter(unknown))}'):
            load_folder(str(tmp_path / 'out'))


def test_what_a_template_writes_is_exported(tmp_path, capsys):
    """A conversation has the same ids in the exported folder, read here or by transformers, though it has no meta.json."""
    template = '{{ bos_token }}' + TEMPLATE.replace('message[', "(pad_token or '') + message[")
    make(tmp_path / 'base')
    add_tokenizer(tmp_path / 'base', ('<|endoftext|>', '<s>', '<pad>', '<|im_start|>', '<|im_end|>'), template)
    path = tmp_path / 'base' / 'tokenizer_config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'bos_token': '<s>', 'pad_token': '<pad>'}))
    exported(capsys, f'hf:{tmp_path}/base', tmp_path / 'out')
    said, found = [{'role': 'user', 'content': 'hello a'}], []
    for folder in (tmp_path / 'base', tmp_path / 'out'):
        meta = tokenizer_meta(str(folder))
        meta |= chat_meta(str(folder), meta['tokenizer_json'])
        found.append((meta['document_token'], meta['stop_token'], chat_tokens(meta, said)))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ids = theirs.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ids == found[-1][2]
    assert found[0] == found[1]


def test_a_template_that_refuses_empty_messages_converses(tmp_path, capsys, monkeypatch):
    make(tmp_path / 'base')
    template = "{% if not messages[-1]['content'] %}{{ raise_exception('empty') }}{% endif %}" + TEMPLATE
    add_tokenizer(tmp_path / 'base', template=template)
    monkeypatch.setattr('sys.stdin', io.StringIO('hello\n'))
    sample.main([f'--ckpt=hf:{tmp_path}/base', '--interactive', '--device=cpu', '--max_tokens=2'])
    assert capsys.readouterr().err.endswith('> > ')


def test_a_llama3_scaling_is_exported(tmp_path, capsys):
    theirs = make(tmp_path / 'base', rope_scaling=LLAMA3 | {'factor': 32.0}, rope_theta=500000.0)
    add_tokenizer(tmp_path / 'base')
    exported(capsys, f'hf:{tmp_path}/base', tmp_path / 'out')
    tokens = torch.randint(300, (1, 256))
    with torch.inference_mode():
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out').eval()
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits)


def test_an_export_is_whole_or_absent(runs, tmp_path, capsys, monkeypatch):
    """An existing folder stays as it is, unless it is an export and may be overwritten; a failure leaves nothing behind."""

    def refused(*more):
        with pytest.raises(SystemExit) as stop:
            exported(capsys, runs['plain'], tmp_path / 'out', *more)
        assert stop.value.code == 2
        return capsys.readouterr().err

    exported(capsys, runs['t2mlr'], tmp_path / 'out')
    assert 'exists' in refused() and load_folder(str(tmp_path / 'out'))[0].config.recurrence == 't2mlr'
    exported(capsys, runs['plain'], tmp_path / 'out', '--overwrite')
    assert load_folder(str(tmp_path / 'out'))[0].config.recurrence == 'none'
    (tmp_path / 'out' / 'notes.txt').write_text('mine')
    assert 'exists' in refused('--overwrite') and (tmp_path / 'out' / 'notes.txt').exists()
    shutil.rmtree(tmp_path / 'out')
    import safetensors.torch

    def full(tensors, path, metadata):
        Path(path).write_bytes(b'half')
        raise OSError(28, 'No space left on device', path)

    monkeypatch.setattr(safetensors.torch, 'save_file', full)
    assert 'No space left' in refused() and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        sample.main([f'--ckpt={runs["plain"]}', '--drop_recurrence'])
    assert '--export=FOLDER' in capsys.readouterr().err


# Vocabularies


def test_tokens_that_are_not_those_of_the_weights_are_refused(runs, tmp_path, capsys):
    """Data of another tokenizer, a tokenizer with more tokens than the weights, files cut short, none at all."""
    source = runs['base'].parent / 'source'
    prepare_data.main(['text', f'--source={source}', '--val_fraction=0.3', f'--out={tmp_path}/bytes'])
    config = TrainConfig(init_from=f'hf:{runs["base"]}', data_dir=f'{tmp_path}/bytes', out_dir=f'{tmp_path}/run', block_size=16)
    with pytest.raises(ConfigError, match=f'--tokenizer={runs["base"]}/tokenizer.json'):
        train(config)
    make(tmp_path / 'other')
    add_tokenizer(tmp_path / 'other', ['<|endoftext|>', '<|im_start|>', '<|im_end|>', *(f'<{i}>' for i in range(60))])

    def refused():
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            sample.main([f'--ckpt=hf:{tmp_path}/other', '--prompt=a', '--device=cpu'])
        out, err = capsys.readouterr()
        assert stop.value.code == 2 and out == '' and len(err.splitlines()) == 1
        return err

    assert 'another tokenizer' in refused()
    path = tmp_path / 'other' / 'tokenizer.json'
    path.write_bytes(path.read_bytes()[:1000])
    assert 'tokenizer.json' in refused()
    path.unlink()
    assert 'tokenizer.json' in refused()
    (tmp_path / 'other' / 'meta.json').write_text('{')
    assert 'meta.json' in refused()
    (tmp_path / 'other' / 'config.json').unlink()
    assert 'config.json' in refused()
    shutil.rmtree(tmp_path / 'other')
    assert f'{tmp_path}/other is neither a folder' in refused()


# Conversations


class Script:
    """Stands for the drawing of tokens: says each answer of a list, token by token."""

    def __init__(self, answers):
        self.answers = [list(a) for a in answers]

    def __call__(self, logits, config, generators):
        while not self.answers[0]:
            self.answers.pop(0)
        return torch.tensor([[self.answers[0].pop(0)]] * len(logits))


@pytest.mark.parametrize('name', ['base', 't2mlr', 'lrt'])
def test_a_conversation_is_read_as_its_template_renders_it(runs, tmp_path, monkeypatch, capsys, name):
    """What a state has read before each answer is what chat_tokens gives; one state serves all turns whose rendering goes on
    from the last; tokens that the text does not give back cost a fresh state, and the logits are those of a fresh reading."""
    folder = runs['base']
    if name != 'base':
        exported(capsys, runs[name], tmp_path / 'out')
        shutil.copy(folder / 'tokenizer_config.json', tmp_path / 'out')
        (tmp_path / 'out' / 'meta.json').unlink()
        folder = tmp_path / 'out'
        settings = json.loads((folder / 'config.json').read_text())
        settings['settings']['block_size'] = 256
        (folder / 'config.json').write_text(json.dumps(settings))
    model, checkpoint = load_folder(str(folder))
    meta = checkpoint['meta']
    stop = meta['stop_token']
    ids = {t: encode(meta, t) for t in ('hello', 'a', 'all hell', '!')}
    assert len(ids['hello']) == 2  # hell, o
    letters = [i for c in 'hello' for i in encode(meta, c)]
    answers = [[*ids['hello'], stop], [*ids['a'], stop], [*letters, stop], [*ids['all hell'], meta['document_token']]]
    answers += [ids['!'] * 8, [*ids['a'], stop]]
    lines = ['hello a', 'say <|im_end|> twice <|im_end|>', '', 'hell', 'é a', 'a']
    reads, fresh, real = [], [], sample.prefill

    def prefill(model, state, tokens, config, recurs=True):
        if not int(state.position):
            reads.append([])
            fresh.append(len(turns))
        reads[-1] += tokens[0].tolist()
        if tokens.size(1) > 1:
            turns.append((list(reads[-1]), real(model, state, tokens, config, recurs)))
            return turns[-1][1]
        return real(model, state, tokens, config, recurs)

    turns = []
    monkeypatch.setattr(sample, 'prefill', prefill)
    monkeypatch.setattr(sample, 'sample_next_token', Script(answers))
    monkeypatch.setattr('sys.stdin', io.StringIO('\n'.join(lines) + '\n'))
    capsys.readouterr()
    sample.main([f'--ckpt=hf:{folder}', '--interactive', '--device=cpu', '--max_tokens=8', '--jacobi_tol=0'])
    said = capsys.readouterr().out.split('\n')
    assert said == ['hello', 'a', 'hello', 'all hell', '!' * 8, 'a', '']
    messages = []
    for line, answer, (read, (logits, _)) in zip(lines, said[:-1], turns, strict=True):
        messages.append({'role': 'user', 'content': line})
        assert read == chat_tokens(meta, messages)
        with torch.inference_mode():
            alone = real(model, model.new_state(1), torch.tensor([read]), SampleConfig(jacobi_tol=0.0))[0]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
        messages.append({'role': 'assistant', 'content': answer})
    assert fresh == [0, 3]  # at first, and after letters that are no tokens of their text


def test_a_message_is_answered_and_a_text_continued(runs, capsys, monkeypatch):
    meta = load_folder(str(runs['base']))[1]['meta']
    read, real = [], sample.prefill
    monkeypatch.setattr(sample, 'prefill', lambda m, s, tokens, *a: read.append(tokens[0].tolist()) or real(m, s, tokens, *a))
    monkeypatch.setattr(sample, 'sample_next_token', Script([[*encode(meta, 'a'), meta['stop_token']]] * 2))
    for more, expected, shown in (
        ([], chat_tokens(meta, [{'role': 'user', 'content': 'hello <|im_end|>'}]), 'hello <|im_end|>\na\n'),
        (['--chat=False'], [meta['document_token'], *encode(meta, 'hello <|im_end|>')], 'hello <|im_end|>a\n'),
    ):
        capsys.readouterr()
        sample.main([f'--ckpt=hf:{runs["base"]}', '--prompt=hello <|im_end|>', '--device=cpu', *more])
        assert capsys.readouterr().out == shown and read.pop(0) == expected
        read.clear()


def test_a_long_conversation_slides_or_stops(runs, capsys, monkeypatch):
    meta = load_folder(str(runs['base']))[1]['meta']
    answer = [*encode(meta, 'hello'), meta['stop_token']]
    for more, turns in (['--overflow=slide'], 12), ([], 3):
        monkeypatch.setattr(sample, 'sample_next_token', Script([answer] * 12))
        monkeypatch.setattr('sys.stdin', io.StringIO(('x' * 60 + '\n') * 12))
        capsys.readouterr()
        command = [f'--ckpt=hf:{runs["base"]}', '--interactive', '--device=cpu', *more]
        if more:
            sample.main(command)
        else:
            with pytest.raises(SystemExit):
                sample.main(command)
        out, err = capsys.readouterr()
        assert out == 'hello\n' * turns and ('--overflow=slide' in err) == (not more)


@pytest.mark.parametrize('inserted', [{}, T2MLR, LRT], ids=['none', 't2mlr', 'lrt'])
def test_the_harness_scores_as_its_own_class(base, tmp_path, monkeypatch, inserted):
    """A multiple-choice task of local data: our class of the lm-eval harness gives the accuracies and, for each choice, the
    likelihood that the harness's class for transformers gives, also with an untrained recurrence."""
    lm_eval = pytest.importorskip('lm_eval', reason='the lm-eval harness is an optional extra')
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from support.harness import harness
    from support.results import ResumableResults

    folder, theirs, _ = base
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    words = (ROOT / 'README.md').read_text().split()
    rng = random.Random(0)
    rows = []
    for i in range(8):
        at = rng.randrange(len(words) - 60)
        others = [' '.join(rng.sample(words, rng.randint(1, 9))) for _ in range(3)]
        choices = [' '.join(words[at + 40 : at + 40 + rng.randint(1, 9)]), *others]
        rows.append({'q': ' '.join(words[at + rng.randrange(39) : at + 40]), 'choices': choices, 'gold': i % 4})
        choices[0], choices[i % 4] = choices[i % 4], choices[0]
    (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (tmp_path / 'local.yaml').write_text(
        f'task: local_choice\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/rows.jsonl\n'
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\n'
        'doc_to_target: gold\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n'
    )
    ours, meta = imported(folder, **inserted), load_folder(folder)[1]['meta']
    kept = ResumableResults(str(tmp_path / 'part'), {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for lm in (harness(ours, meta, 8, kept, None, False), HFLM(pretrained=theirs, tokenizer=tokenizer, batch_size=8)):
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        shared = dict(tasks=['local_choice'], task_manager=manager, bootstrap_iters=0)
        with torch.inference_mode():
            found.append(lm_eval.simple_evaluate(model=lm, log_samples=True, **shared))
    a, b = (f['results']['local_choice'] for f in found)
    assert (a['acc,none'], a['acc_norm,none']) == (b['acc,none'], b['acc_norm,none'])
    for x, y in zip(*(f['samples']['local_choice'] for f in found), strict=True):
        for (logp, greedy), (wanted, also) in zip(x['filtered_resps'], y['filtered_resps'], strict=True):
            assert float(logp) == pytest.approx(float(wanted), rel=1e-4, abs=1e-3) and greedy == also
