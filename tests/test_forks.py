"""Forks made from outside, as a person would make them: a memory from two tokens back, a fusion by addition, a GELU MLP. The
laws hold for each, its cost is counted, its parameters are found, and no export writes it as a model that it is not."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from test_model import RESET, FlopCounter, close, draw_batch, seeds
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from configurator import ConfigError
from model import GPT, GPTConfig, SwiGLU, recurrence_parameters
from schedule import SEQUENTIAL, Schedule
from support.accounting import count_flops, count_parameters
from support.optimizers import make_optimizers
from support.pretrained import export
from train import TrainConfig


class TwoBack(GPT):
    """Reads the memory of the token before the last: each token hands on, beside its own, the memory of the one before it."""

    def __init__(self, config):
        super().__init__(config)
        self.memory_dim = 2 * config.n_embd

    def span(self, h, local, site, kv, m):
        near, far = (None, None) if m is None else m.chunk(2, -1)
        y, written = super().span(h, local, site, kv, far)
        return y, torch.cat((written, torch.zeros_like(written) if near is None else near), -1)


class Addition(nn.Module):
    """The simplest fusion: h + W R."""

    def __init__(self, config):
        super().__init__()
        self.w = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def local(self, h):
        return h  # nothing to prepare

    def forward(self, h, local, R, recurs):
        return h + self.w(R) if recurs is None else torch.where(recurs, h + self.w(R), h)


class GeluMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, config.mlp_dim)
        self.down = nn.Linear(config.mlp_dim, config.n_embd)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def two_back(config):
    return TwoBack(config)


def by_addition(config):
    model = GPT(config)
    model.fusion = Addition(config)
    return model


def with_gelu(config):
    model = GPT(config)
    for block in model.blocks:
        block.mlp = GeluMLP(config)
    return model


T2MLR, LRT = {'recurrence': 't2mlr', 'l_start': 1, 'l_end': 1}, {'recurrence': 'lrt', 'source_layer': 1}
FORKS = [(two_back, T2MLR), (two_back, LRT), (by_addition, T2MLR), (with_gelu, T2MLR), (with_gelu, LRT), (with_gelu, {})]
each_fork = pytest.mark.parametrize(
    'fork, recurrence', FORKS, ids=lambda x: getattr(x, '__name__', '') or str(x.get('recurrence'))
)
each_family = pytest.mark.parametrize('family', ('nanochat', 'llama'))


def draw_fork(fork, seed, **settings):
    """A fork in float64 with random weights."""
    torch.manual_seed(seed)
    model = fork(GPTConfig(**dict(vocab_size=7, block_size=32, n_layer=3, n_head=2, n_embd=8) | settings)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.dim() else 0.8))
    return model


@each_fork
@each_family
@seeds(2)
@torch.no_grad()
def test_the_laws_hold_for_a_fork(fork, recurrence, family, seed):
    """Exact prefix, causality, decoding, and documents that read nothing of each other."""
    T = 9
    model = draw_fork(fork, seed, family=family, reset_token=RESET, document_attention=True, **recurrence)
    tokens, _, recur_mask = draw_batch(seed, T, B=2)
    exact = model(tokens, schedule=SEQUENTIAL, recur_mask=recur_mask)
    for k in range(T + 1):
        logits = model(tokens, schedule=Schedule('jacobi', k, 1), recur_mask=recur_mask)
        close(logits[:, :k], exact[:, :k])
    for schedule in (Schedule('interleaved', n_subsets=T), Schedule('chunked', chunk_size=1)):
        close(model(tokens, schedule=schedule, recur_mask=recur_mask), exact)

    state = model.new_state(2)
    steps = [tokens[:, :3], tokens[:, 3:4], tokens[:, 4:]]
    masks = [None if recur_mask is None else recur_mask[:, a:b] for a, b in ((0, 3), (3, 4), (4, T))]
    close(
        torch.cat([model(x, schedule=SEQUENTIAL, recur_mask=m, state=state) for x, m in zip(steps, masks, strict=True)], 1),
        exact,
    )

    shape = model.config.recurrence
    schedules = [Schedule()] + [Schedule('jacobi', 3, 2), Schedule('interleaved'), SEQUENTIAL] * (shape != 'none')
    for schedule in schedules:
        logits = model(tokens, schedule=schedule, recur_mask=recur_mask)
        later = tokens.clone()
        later[:, 5:] = (later[:, 5:] + 1) % 7
        close(model(later, schedule=schedule, recur_mask=recur_mask)[:, :5], logits[:, :5])

        documents = tokens.clone()
        documents[:, 4] = RESET
        before = documents.clone()
        before[:, :4] = (before[:, :4] + 3) % 7
        outputs = [model(x, schedule=schedule, recur_mask=recur_mask)[:, 4:] for x in (documents, before)]
        assert torch.equal(*outputs)


@each_fork
@each_family
def test_what_a_fork_costs_is_counted(fork, recurrence, family):
    """FLOPs within 1% of those that torch counts in a forward and in a decoded token; parameters in their parts."""
    T, settings = 16, dict(n_layer=3, n_head=2, n_embd=32, vocab_size=64, family=family)
    model = draw_fork(fork, 0, **settings, **recurrence).float()
    schedule = Schedule('jacobi', 3, 2) if recurrence else Schedule()
    tokens = torch.zeros(1, T, dtype=torch.long)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter:
        for p in model.scored_passes(schedule, T):
            model.logits(torch.zeros(1, len(p), 32))  # what scoring adds
        model(tokens, schedule=schedule, logits_from=None)
    assert counter.total == pytest.approx(count_flops(model, schedule, T)['forward'] * T, rel=0.01)
    parts = count_parameters(model)
    assert sum(parts.values()) == sum(p.numel() for p in model.parameters())
    added = sum(p.numel() for name, p in model.named_parameters() if name in recurrence_parameters(model))
    assert parts.get('recurrence', 0) == added
    if fork is by_addition:
        assert added == 32 * 32
    if fork is with_gelu:
        assert parts['MLP'] == sum(p.numel() for p in GeluMLP(model.config).parameters()) * 3


@each_fork
def test_each_parameter_of_a_fork_is_in_one_group(fork, recurrence):
    model = draw_fork(fork, 0, **recurrence)
    optimizers = make_optimizers(model, TrainConfig(optimizer='muon', recurrence_lr_scale=7.0), 'cpu')
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    listed = [id(p) for group in groups for p in group['params']]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        for p in group['params']:
            assert (group['scale'] == 7.0) == (names[id(p)] in recurrence_parameters(model))


META = {'kind': 'text', 'vocab_size': 7, 'document_token': 0}


@pytest.mark.parametrize('drop_recurrence', (False, True))
@each_fork
@each_family
def test_an_export_refuses_what_it_cannot_express(fork, recurrence, family, drop_recurrence, tmp_path):
    """Neither the format of transformers nor our own has a word for a fork: one sentence, nothing written."""
    pytest.importorskip('safetensors')
    model = draw_fork(fork, 0, family=family, **recurrence).float()
    config = SampleSettings(str(tmp_path / 'out'), drop_recurrence)
    if fork is by_addition and drop_recurrence:  # what is left is the plain transformer
        export(model, META, config)
        assert json.loads((tmp_path / 'out' / 'config.json').read_text())['model_type'] == {'llama': 'llama'}.get(
            family, 'latent-memory'
        )
        return
    with pytest.raises(ConfigError, match='cannot be exported'):
        export(model, META, config)
    assert not (tmp_path / 'out').exists()


class SampleSettings:
    def __init__(self, out, drop_recurrence):
        self.export, self.drop_recurrence, self.overwrite = out, drop_recurrence, False


def test_an_export_refuses_a_module_that_was_edited_in_place(tmp_path, monkeypatch):
    """The same class and names, another function: what transformers would compute is compared, not what it is called."""
    pytest.importorskip('safetensors')
    model = draw_fork(GPT, 0, family='llama').float()
    export(model, META, SampleSettings(str(tmp_path / 'right'), False))
    monkeypatch.setattr(SwiGLU, 'forward', lambda self, x: self.down(F.gelu(self.gate(x)) * self.up(x)))
    with pytest.raises(ConfigError, match='gives other logits'):
        export(copy.deepcopy(model), META, SampleSettings(str(tmp_path / 'wrong'), False))
    assert not (tmp_path / 'wrong').exists()
