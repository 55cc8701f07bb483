"""Checkpoints: written whole or not at all, read without running code, refused where they do not fit."""

import contextlib
import errno
import os
import shutil
import time
import zipfile
from dataclasses import asdict, fields

import torch
import torch.distributed as dist

from configurator import ConfigError, show
from model import GPTConfig
from support.processes import warn, warn_on_disk_error
from support.sharding import full, shard_like
from support.tokens import tokenizer_meta


class Checkpoints:
    """The checkpoints that a run writes into its out_dir: ckpt.pt, the one before it, those that are kept, the best."""

    def __init__(self, config, first, start):
        """first: whether this process writes them. start: the checkpoint that the run began with."""
        self.config, self.first = config, first
        self.path, self.written_at = self.file('ckpt.pt'), time.monotonic()
        self.written = start['step'] if start.get('path') == self.path else -1  # the step that ckpt.pt holds whole

    def file(self, name):
        return os.path.join(self.config.out_dir, name)

    def is_kept(self, step):
        return self.config.keep_every and step % self.config.keep_every == 0

    def due(self, step):
        """Whether step or clock ask for one, in all processes alike: the clock is that of the first."""
        seconds = 60 * self.config.save_minutes
        if seconds and dist.is_initialized():
            passed = torch.tensor(time.monotonic() - self.written_at)
            dist.broadcast(passed, 0)
            return self.is_kept(step) or passed.item() >= seconds
        return self.is_kept(step) or (seconds and time.monotonic() - self.written_at >= seconds)

    def save(self, step, model, optimizers, **rest):
        """Writes in the first process, to which the others give their shards. Whether ckpt.pt holds `step` now, as far as a
        process can know. A disk that is full is a warning."""
        state = full({'model': model.state_dict(), 'optimizers': [o.state_dict() for o in optimizers]})
        self.written_at = time.monotonic()
        if not self.first:
            return True
        state |= {'config': asdict(self.config), 'step': step, 'rng': torch.get_rng_state()} | rest
        with warn_on_disk_error(f'step {step} in {self.config.out_dir}'):
            # A damaged ckpt.pt must not replace the one before it.
            save_checkpoint(self.path, state, self.file('ckpt-previous.pt') if self.written >= 0 else None)
            self.written = step
            if self.is_kept(step):
                link_or_copy(self.path, self.file(f'ckpt-{step:06}.pt'))
        return self.written == step

    def keep_best(self, step):
        if self.config.keep_best and self.written == step:
            with warn_on_disk_error('best.pt'):
                link_or_copy(self.path, self.file('best.pt'))


def save_checkpoint(path, checkpoint, previous=None):
    """Writes beside, flushes, renames: whoever reads `path`, at any moment, finds a whole checkpoint. What was there is kept as
    `previous`. Raises OSError when it cannot be written, and then leaves all as it was."""
    try:
        with open(path + '.tmp', 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        if previous and os.path.exists(path):
            link_or_copy(path, previous)
        os.replace(path + '.tmp', path)
    except (OSError, RuntimeError) as e:  # the writer of torch has its own name for a disk that is full
        with contextlib.suppress(OSError):
            os.remove(path + '.tmp')
        number = getattr(e, 'errno', None) or errno.EIO
        raise OSError(number, os.strerror(number), path) from e


def link_or_copy(path, name):
    """The file `path` under `name` too, at once: a hard link, which takes no space, or a copy where there are none."""
    if os.path.exists(name) and os.path.samefile(path, name):
        return
    with contextlib.suppress(FileNotFoundError):
        os.remove(name + '.tmp')  # it may be a link to a checkpoint, which a copy would write over
    try:
        os.link(path, name + '.tmp')
    except OSError:
        shutil.copyfile(path, name + '.tmp')
    os.replace(name + '.tmp', name)


def read_checkpoint(path, device='cpu'):
    """The checkpoint at `path`; raises ConfigError when it is missing or damaged. Executes nothing that the file holds.

    Where ckpt.pt is damaged, the ckpt-previous.pt beside it is read, after a warning.
    """
    if not os.path.isfile(path):
        raise ConfigError(f'there is no checkpoint {path}; train.py writes one into its out_dir.')
    try:
        with zipfile.ZipFile(path) as parts:
            if damaged := parts.testzip():
                raise ValueError(f'the checksum of {damaged} is wrong')
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        if missing := {'model', 'optimizers', 'step', 'best_loss', 'rng', 'meta'} - checkpoint.keys():
            raise ValueError('it lacks ' + ', '.join(sorted(missing)))
        return checkpoint | {'path': str(path)}
    except Exception as e:
        reason = str(e) if isinstance(e, ValueError) else 'it is cut, or not of train.py'
        previous = os.path.join(os.path.dirname(path), 'ckpt-previous.pt')
        if os.path.basename(path) == 'ckpt.pt' and os.path.isfile(previous):
            warn(f'the checkpoint {path} cannot be used ({reason}); the one before it, {previous}, is taken.')
            return read_checkpoint(previous, device)
        raise ConfigError(f'the checkpoint {path} cannot be used ({reason}); restore it or delete it.') from None


def load_weights(model, checkpoint):
    """The checkpoint's weights into `model`; raises ConfigError when they do not belong to its settings."""
    try:
        model.load_state_dict(checkpoint['model'])
    except RuntimeError as e:
        reason = ' '.join(str(e).split())[:300]
        raise ConfigError(f'the weights in {checkpoint["path"]} do not fit its settings: {reason}') from None


def load_optimizers(optimizers, checkpoint):
    """The checkpoint's moments into the optimisers, which keep their rate, decay and fusing, and its random numbers; raises
    ConfigError when they do not belong to its settings."""
    try:
        for optimizer, saved in zip(optimizers, checkpoint['optimizers'], strict=True):
            for old, new in zip(saved['param_groups'], optimizer.param_groups, strict=True):
                for number, p in zip(old['params'], new['params'], strict=True):
                    moments = saved['state'].get(number, {})
                    moments.update({name: shard_like(value, p) for name, value in moments.items()})
                old.update({k: v for k, v in new.items() if k != 'params'})
            optimizer.load_state_dict(saved)
        torch.set_rng_state(checkpoint['rng'])
    except (ValueError, LookupError, TypeError, RuntimeError) as e:
        raise ConfigError(f'the optimiser in {checkpoint["path"]} does not fit its settings: {e}') from None


def check_same_tokens(checkpoint, data):
    """Raises ConfigError when a model was trained on other tokens than those of `data`."""
    for name in ('kind', 'tokenizer', 'tokenizer_json', 'names'):
        if checkpoint['meta'].get(name) != data.meta.get(name):
            raise ConfigError(
                f'{checkpoint["path"]} was trained on other tokens than those of {data.folder} ({name} differs in meta.json); '
                f'choose a dataset of the same kind.'
            )


def check_same_vocabulary(folder, data):
    """Raises ConfigError when `data` was not made with the tokenizer that lies beside pretrained weights, if there is one."""
    path = os.path.join(folder, 'tokenizer.json')
    if os.path.exists(path):
        of_weights = tokenizer_meta(path)
        if any(of_weights[k] != data.meta.get(k) for k in ('vocab_size', 'token_bytes')):
            raise ConfigError(
                f'{data.folder} was made with the tokenizer {data.meta["tokenizer"]}, not that of the weights in {folder}; '
                f'make it again with --tokenizer={path}.'
            )


def changed_settings(before, config):
    """What differs from the settings (a dict) of a checkpoint, as ['name=value (before: value)']. Raises ConfigError for what
    cannot: what shapes the weights and the state of the optimisers."""
    fixed = (*(f.name for f in fields(GPTConfig)), 'optimizer', 'freeze_base', 'dtype')
    new = asdict(config)
    changed = {k: f'{k}={show(new[k])} (before: {show(before[k])})' for k in new if new[k] != before[k]}
    if wrong := [changed[name] for name in fixed if name in changed]:
        raise ConfigError(f'{config.out_dir} cannot continue with {", ".join(wrong)}; give what it had, or another --out_dir.')
    return [changed[name] for name in changed if name not in ('init_from', 'out_dir', 'device', 'threads', 'json')]
