"""Finds, builds and loads the models that are decoded from or evaluated."""

import contextlib
import glob
import json
import os
from dataclasses import fields

import torch

from configurator import ConfigError, explaining
from model import GPTConfig, build
from support.chat import chat_meta
from support.checkpoint import load_weights, read_checkpoint
from support.pretrained import load_pretrained, pretrained_config, pretrained_folder
from support.tokens import ids_without_token, tokenizer_meta

DTYPES = ('auto', 'float32', 'bfloat16', 'float64')  # what a command may compute in


def find_checkpoint(path, root='out'):
    """The file that `path` means: itself (or hf:FOLDER), the ckpt.pt inside it, or the newest below
    `root` when it is empty. Raises ConfigError where there is none."""
    file = os.path.join(path, 'ckpt.pt') if os.path.isdir(path) else path
    if path.startswith('hf:') or os.path.isfile(file):
        return file
    newest = glob.glob(os.path.join(glob.escape(root), '**', 'ckpt.pt'), recursive=True)
    newest.sort(key=os.path.getmtime, reverse=True)
    if not newest:
        where = f'{file}, nor any ' if file else ''
        raise ConfigError(f'there is no checkpoint {where}under {root}/; train a model first, or name one with --ckpt=PATH.')
    if file:
        folders = ', '.join(os.path.dirname(name) for name in newest[:5])
        raise ConfigError(f'there is no checkpoint {file}; the newest under {root}/: {folders}.')
    return newest[0]


def load_model(path, device='cpu', dtype='auto'):
    """(model in evaluation mode, checkpoint without its weights) from a checkpoint file; raises ConfigError. The weights are
    float64 if that is the dtype, or was in the training and dtype is auto; else float32, bfloat16 included. Ids that stand for
    no token under the checkpoint's tokenizer have no probability."""
    checkpoint = read_checkpoint(path)
    saved = checkpoint['config']  # an older checkpoint lacks newer keys
    model = build(GPTConfig(**{f.name: saved.get(f.name, f.default) for f in fields(GPTConfig)}))
    load_weights(model, checkpoint)
    del checkpoint['model'], checkpoint['optimizers']
    return to_evaluation(model, checkpoint['meta'], device, saved['dtype'] if dtype == 'auto' else dtype), checkpoint


def load_folder(name, device='cpu', dtype='auto', chat=True):
    """As load_model, from a folder of pretrained weights, of the hub's format or one exported here; raises ConfigError.
    chat: whether a chat template that cannot be used is an error; else it is ignored."""
    folder = pretrained_folder(name)
    model = build(GPTConfig(**pretrained_config(folder, 2048)))  # the whole context of some would take gigabytes of state
    load_pretrained(model, folder)
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        with explaining(f'{path} cannot be read', 'export the model again'), open(path, encoding='utf-8') as f:
            meta = json.load(f)
    else:
        meta = {'kind': 'text'} | tokenizer_meta(folder)
        with contextlib.nullcontext() if chat else contextlib.suppress(ConfigError):
            meta |= chat_meta(folder, meta['tokenizer_json'])
    return to_evaluation(model, meta, device, dtype), {'meta': meta, 'step': 0}


def to_evaluation(model, meta, device, dtype):
    """`model` with its weights in the type of load_model, on the device, in evaluation mode."""
    model.to(device, torch.float64 if dtype == 'float64' else torch.float32)
    if unknown := ids_without_token(meta, model.config.vocab_size):
        model.unknown_ids = torch.tensor(unknown, device=device)
    return model.eval()


def load(path, device='cpu', dtype='auto', chat=True):
    """As load_model or, for hf:FOLDER, as load_folder."""
    if path.startswith('hf:'):
        return load_folder(path.removeprefix('hf:'), device, dtype, chat)
    return load_model(path, device, dtype)


def computing(model, dtype='auto'):
    """A context in which `model` computes in `dtype` as in the training: bfloat16 is autocast, and auto means it on CUDA."""
    weight = model.embed.weight
    if dtype == 'bfloat16' or (dtype == 'auto' and weight.is_cuda and weight.dtype == torch.float32):
        return torch.autocast(weight.device.type, torch.bfloat16)
    return contextlib.nullcontext()
