"""Laws of the import: logits are those of the transformers library, with and without an untrained recurrence."""

import json
import shutil

import pytest
import torch

import prepare_data
from configurator import ConfigError
from model import SEQUENTIAL, GPTConfig, Schedule, build, load_pretrained, pretrained_config
from train import TrainConfig, read_checkpoint, train

transformers = pytest.importorskip('transformers', reason='transformers is an optional extra, and the yardstick here')
pytest.importorskip('safetensors', reason='safetensors is an optional extra')

LLAMA3 = {'rope_type': 'llama3', 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 64}
T2MLR = dict(recurrence='t2mlr', l_start=1, l_end=1)
LRT = dict(recurrence='lrt', source_layer=1, identity_init=True)


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


def imported(folder, **recurrence):
    model = build(GPTConfig(**pretrained_config(str(folder), 256) | recurrence))
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
def test_logits_equal_those_of_transformers(tmp_path, changed, recurrence):
    """Over four times the original length, in every schedule and in decoding, before anything is trained."""
    theirs = make(tmp_path, shards=bool(recurrence), **changed)
    ours = imported(tmp_path, **recurrence)
    tokens = torch.randint(300, (2, 256))
    with torch.no_grad():
        expected = theirs(tokens).logits
        schedules = [Schedule('jacobi', 2, 1), Schedule('interleaved')] if recurrence else [Schedule()]
        for schedule in schedules:
            torch.testing.assert_close(ours(tokens, schedule=schedule), expected, rtol=1e-4, atol=1e-4)
        state = ours.new_state(2)
        steps = [ours(tokens[:, t : t + 1], schedule=SEQUENTIAL, state=state) for t in range(40)]
        torch.testing.assert_close(torch.cat(steps, 1), expected[:, :40], rtol=1e-4, atol=1e-4)


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
    config.check()
    assert config.n_layer == 3 and config.family == 'llama' and config.vocab_size == 300
    train(config)
    lines = [json.loads(line) for line in (tmp_path / 'run' / 'log.jsonl').read_text().splitlines()]
    from train import Dataset

    data = Dataset(f'{tmp_path}/data')
    x, y, _ = data.batch('train', data.rows('train', config.seed, 0, 4, 32), 32)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    assert lines[0]['loss'] == pytest.approx(loss.item(), rel=1e-4)
    config.max_steps = 6
    train(config)
    assert read_checkpoint(tmp_path / 'run' / 'ckpt.pt')['step'] == 6
