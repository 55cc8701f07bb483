"""Checkpoints in the format of the transformers library: a Llama-family model read from one, or written as one."""

import glob
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from configurator import ConfigError, explaining
from model import GPTConfig, build, recurrence_parameters
from schedule import SEQUENTIAL
from support.folders import work_folder
from support.optional import import_optional

OURS = 'latent-memory'  # model_type of a folder that only this code loads
REMOVED = {'gamma_per_channel': False}  # keys of earlier versions, with the value that is left
SHAPE = dict(vocab_size='vocab_size', n_embd='hidden_size', n_hidden='intermediate_size')  # ours='theirs'
SHAPE |= dict(n_layer='num_hidden_layers', n_head='num_attention_heads', n_kv_head='num_key_value_heads')
SHAPE |= dict(block_size='max_position_embeddings', rope_base='rope_theta', norm_eps='rms_norm_eps')
ROPE_SCALING = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')
LLAMA_LAYER = [f'self_attn.{part}_proj' for part in 'qkvo'] + [f'mlp.{part}_proj' for part in ('gate', 'up', 'down')]
LLAMA_LAYER += ['input_layernorm', 'post_attention_layernorm']


def pretrained_folder(name):
    """The folder of a Llama-family checkpoint in the format of the transformers library: `name` itself, or that of the hub."""
    if os.path.isdir(name):
        return name
    with explaining(f'{name} is neither a folder nor a model that the hub gives', 'name a folder of the transformers library'):
        from huggingface_hub import snapshot_download  # an extra

        return snapshot_download(name, allow_patterns=['*.json', '*.jinja', '*.safetensors'])


def pretrained_config(name, block_size):
    """The settings of a model that equals a pretrained checkpoint, as a dict; its context is at most block_size. Raises
    ConfigError that names what the Llama family here cannot express; nothing that config.json states is passed over."""
    folder = pretrained_folder(name)
    path = os.path.join(folder, 'config.json')
    with explaining(f'{path} cannot be read', 'take a folder of the transformers library'), open(path, encoding='utf-8') as f:
        c = json.load(f)
        if c['model_type'] == OURS:
            own = asdict(GPTConfig(**{k: v for k, v in c['settings'].items() if k not in REMOVED or v != REMOVED[k]}))
            return own | {'block_size': min(block_size, own['block_size']), 'rope_scaling': tuple(own['rope_scaling'])}
        rope = c.get('rope_parameters') or c.get('rope_scaling') or {}
        kind = rope.get('rope_type', rope.get('type', 'default'))
        scaling = tuple(float(rope[k]) for k in ROPE_SCALING) if kind == 'llama3' else ()
        refused = {
            'model_type': c['model_type'] != 'llama',
            'hidden_act': c.get('hidden_act', 'silu') != 'silu',
            'attention_bias': c.get('attention_bias', False),
            'mlp_bias': c.get('mlp_bias', False),
            'tie_word_embeddings': not c.get('tie_word_embeddings', False),
            'rope_type': kind not in ('default', 'llama3'),
            'head_dim': c.get('head_dim') not in (None, c['hidden_size'] // c['num_attention_heads']),
        }
        for what, wrong in refused.items():
            if wrong:
                stated = f'{what}={kind if what == "rope_type" else c.get(what)}'
                remedy = 'Llama-family models with tied embeddings are'
                raise ConfigError(f'{folder} has {stated}, which is not supported here; {remedy}.')
        c['max_position_embeddings'] = min(block_size, c['max_position_embeddings'])
        c['num_key_value_heads'] = c.get('num_key_value_heads') or c['num_attention_heads']
        c['rope_theta'] = float(rope.get('rope_theta', c.get('rope_theta', 10000.0)))
        c['rms_norm_eps'] = float(c['rms_norm_eps'])
        fixed = {'family': 'llama', 'value_embeddings': 'none', 'positional': 'rope', 'rope_scaling': scaling}
        return fixed | {ours: c[theirs] for ours, theirs in SHAPE.items()}


def take_pretrained_settings(config):
    """Gives the model the shape of the weights that init_from=hf: names, which the hub may have to provide. Raises ConfigError
    where there are none, or where the other settings do not fit them."""
    for name, value in pretrained_config(config.init_from.removeprefix('hf:'), config.block_size).items():
        given = name == 'document_attention' and config.document_attention  # the weights fit both values
        if name != 'reset_token' and not given:  # the new data have a document token of their own
            setattr(config, name, value)
    config.check_model()


def hub_config(c):
    """The config.json, as a dict, with which the transformers library builds the model of a GPTConfig; None: it has none."""
    required = {'architecture': 'gpt', 'family': 'llama', 'positional': 'rope'}
    required |= {'recurrence': 'none', 'value_embeddings': 'none', 'n_loop': 1}
    if any(getattr(c, name) != value for name, value in required.items()):
        return None
    hub = {'architectures': ['LlamaForCausalLM'], 'model_type': 'llama'}
    hub |= {theirs: getattr(c, ours) for ours, theirs in SHAPE.items()}
    hub |= {'intermediate_size': c.mlp_dim, 'num_key_value_heads': c.n_kv_head or c.n_head}
    hub |= {'hidden_act': 'silu', 'tie_word_embeddings': True}
    if c.rope_scaling:
        *factors, length = c.rope_scaling
        hub['rope_scaling'] = {'rope_type': 'llama3'} | dict(zip(ROPE_SCALING, (*factors, int(length)), strict=True))
    return hub


def hub_names(model):
    """{parameter of a llama-family GPT: its name on the hub}; what a recurrence adds has none and is left out."""
    theirs = {'embed': 'embed_tokens', 'norm': 'norm'}
    theirs |= {'norm_attention': 'input_layernorm', 'norm_mlp': 'post_attention_layernorm'}
    theirs |= {part: f'self_attn.{part}_proj' for part in 'qkvo'}
    theirs |= {part: f'mlp.{part}_proj' for part in ('gate', 'up', 'down')}
    names, added = {}, recurrence_parameters(model)
    for name, _ in model.named_parameters():
        part = name.split('.')[-2]
        if name not in added and part in theirs:
            layer = f'layers.{name.split(".")[1]}.' if name.startswith('blocks.') else ''
            names[name] = f'model.{layer}{theirs[part]}.weight'
    return names


def llama_logits(hub, tensors, tokens):
    """What the transformers library computes from a config.json and its tensors, both as `hub_config` and `hub_names` have
    them: tokens (B, T) -> logits (B, T, vocab_size). Every export is compared with it."""
    heads, groups, eps = hub['num_attention_heads'], hub['num_key_value_heads'], hub['rms_norm_eps']
    d, T = hub['hidden_size'] // heads, tokens.size(1)
    frequency = hub['rope_theta'] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    if scaling := hub.get('rope_scaling'):
        factor, low, high, length = (scaling[k] for k in ROPE_SCALING)
        smooth = ((length * frequency / (2 * math.pi) - low) / max(high - low, 1e-30)).clamp(0, 1)
        frequency = (smooth + (1 - smooth) / factor) * frequency
    x = F.embedding(tokens, tensors['model.embed_tokens.weight'])
    angle = torch.cat([torch.arange(T)[:, None] * frequency] * 2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def rotated(y):
        a, b = y.chunk(2, -1)
        return y * cos + torch.cat((-b, a), -1) * sin

    for layer in range(hub['num_hidden_layers']):
        w = {name: tensors[f'model.layers.{layer}.{name}.weight'] for name in LLAMA_LAYER}
        y = F.rms_norm(x, x.shape[-1:], w['input_layernorm'], eps)
        q, k, v = ((y @ w[f'self_attn.{part}_proj'].T).unflatten(-1, (-1, d)).transpose(1, 2) for part in 'qkv')
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=groups != heads)
        x = x + y.transpose(1, 2).flatten(2) @ w['self_attn.o_proj'].T
        y = F.rms_norm(x, x.shape[-1:], w['post_attention_layernorm'], eps)
        x = x + (F.silu(y @ w['mlp.gate_proj'].T) * (y @ w['mlp.up_proj'].T)) @ w['mlp.down_proj'].T
    return F.rms_norm(x, x.shape[-1:], tensors['model.norm.weight'], eps) @ tensors['model.embed_tokens.weight'].T


@torch.no_grad()
def check_export(model, settings, weights, hub, tensors):
    """Raises ConfigError unless what is to be written is the model. settings (a GPTConfig) and weights: what our own code would
    build and load; hub and tensors: a config.json and what transformers would load, or None."""
    with torch.device('meta'):
        exported = build(settings)
    modules = dict(model.named_modules())
    for name, module in exported.named_modules():
        if type(modules.get(name)) is not type(module):
            what = name or 'the model'
            raise ConfigError(f'this model cannot be exported: {what} is of a kind that model.py does not build.')
    weights = weights | ({'head.weight': weights['embed.weight']} if settings.family == 'llama' else {})
    exported.load_state_dict(weights, assign=True)
    exported = exported.to(model.embed.weight.device).eval()
    tokens = torch.arange(min(16, settings.block_size), device=model.embed.weight.device)[None] % settings.vocab_size
    known = torch.ones(settings.vocab_size, dtype=torch.bool, device=tokens.device)
    if model.unknown_ids is not None:  # whose logits the model leaves out
        known[model.unknown_ids] = False
    logits = exported(tokens, schedule=SEQUENTIAL)[..., known]
    others = [llama_logits(hub, tensors, tokens)] if tensors else []
    if settings == model.config:  # nothing is left out
        others.append(model(tokens, schedule=SEQUENTIAL))
    for other in others:
        if not (other[..., known] - logits).abs().max() <= 1e-3 * logits.abs().max():
            raise ConfigError('this model cannot be exported: what is read back gives other logits.')


@torch.no_grad()
def load_pretrained(model, name):
    """Copies the weights of a checkpoint in safetensors files into `model`, one tensor at a time;
    what the recurrence adds keeps its initial values, unless the checkpoint is one of ours. Raises
    ConfigError for a file that is missing or cut short, and for a tensor of another shape."""
    safetensors = import_optional('safetensors', 'safetensors')
    folder, wanted = pretrained_folder(name), dict(model.named_parameters())
    with explaining(f'the weights in {folder} cannot be read', 'fetch them again'):
        with open(os.path.join(folder, 'config.json'), encoding='utf-8') as f:
            if json.load(f)['model_type'] != OURS:
                wanted = {theirs: wanted[ours] for ours, theirs in hub_names(model).items()}
        files = sorted(glob.glob(os.path.join(glob.escape(folder), '*.safetensors')))
        index = os.path.join(folder, 'model.safetensors.index.json')
        if os.path.exists(index):
            with open(index, encoding='utf-8') as f:
                files = sorted({os.path.join(folder, os.path.basename(n)) for n in json.load(f)['weight_map'].values()})
        for file in files:
            with safetensors.safe_open(file, framework='pt') as tensors:
                for tensor_name in set(tensors.keys()) & set(wanted):
                    tensor, p = tensors.get_tensor(tensor_name), wanted.pop(tensor_name)
                    if tensor.shape != p.shape:
                        shapes = f'{tuple(tensor.shape)}, not {tuple(p.shape)}'
                        raise ConfigError(f'{file} holds {tensor_name} of shape {shapes}.')
                    p.copy_(tensor)
    if wanted:
        raise ConfigError(f'{folder} lacks {len(wanted)} tensors, the first is {sorted(wanted)[0]}; a file may be missing.')


def export(model, meta, config):
    """Writes the folder config.export whole or not at all: config.json and model.safetensors, as the transformers library has
    them where it has such a model, else under our names and settings; the tokenizer; meta.json. Raises ConfigError."""
    safetensors = import_optional('safetensors.torch', 'safetensors')
    out, settings = os.path.abspath(config.export), model.config
    weights = dict(model.named_parameters())
    if config.drop_recurrence:
        settings = replace(settings, recurrence='none')
        added = recurrence_parameters(model)
        weights = {name: p for name, p in weights.items() if name not in added}
    hub, end = hub_config(settings), meta.get('stop_token', meta.get('document_token', -1))
    renamed = hub_names(model) if hub else {}
    if hub and 0 <= end < settings.vocab_size:
        hub |= {'bos_token_id': meta['document_token'], 'eos_token_id': end}
    hub = hub or {'model_type': OURS, 'settings': asdict(settings)}
    files = {'config.json': json.dumps(hub, indent=1), 'meta.json': json.dumps(meta)}
    if 'tokenizer_json' in meta:
        specials = {t['id']: t['content'] for t in json.loads(meta['tokenizer_json']).get('added_tokens', [])}
        named = {'tokenizer_class': 'PreTrainedTokenizerFast'} | meta.get('template_tokens', {})
        named |= {'eos_token': specials.get(end)} | {k: meta[k] for k in ('chat_template',) if k in meta}
        files |= {'tokenizer.json': meta['tokenizer_json'], 'tokenizer_config.json': json.dumps(named, indent=1)}
    tensors = {renamed.get(name, name): p.detach().cpu().contiguous() for name, p in weights.items()}
    check_export(model, settings, weights, hub, tensors if renamed else None)
    if os.path.exists(out):
        present = set(os.listdir(out)) if os.path.isdir(out) else {''}
        if not config.overwrite or not present <= {*files, 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'}:
            raise ConfigError(f'export={out} exists; choose another folder, or --overwrite=True if it is an earlier export.')
    with work_folder(out) as work:
        new = os.path.join(work, 'new')
        os.mkdir(new)
        for name, text in files.items():
            Path(new, name).write_text(text, encoding='utf-8')
        try:
            safetensors.save_file(tensors, os.path.join(new, 'model.safetensors'), {'format': 'pt'})
        except import_optional('safetensors').SafetensorError as e:
            raise ConfigError(f'export={out} cannot be written: {e}.') from None
        if os.path.exists(out):
            os.rename(out, os.path.join(work, 'old'))
        os.rename(new, out)
    form = 'in our own format' if 'settings' in hub else 'which transformers loads'
    print(f'wrote {out}, {len(tensors)} tensors, {form}; train.py --init_from and sample.py --ckpt take hf:{config.export}')
