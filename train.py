"""Trains a model: `python train.py config/x.py --key=value`, or the same behind `torchrun --nproc_per_node=N`.

Reads a dataset made by prepare_data.py, writes out_dir/ckpt.pt (newest state) and out_dir/log.jsonl (a line an interval).
Batches are a pure function of (seed, step, sample), so a resumed run and a run on more processes see the same data.
"""

import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
import weakref
import zipfile
from dataclasses import asdict, dataclass, fields, replace

try:
    import fcntl
except ImportError:  # not every system has it
    fcntl = None

if __name__ == '__main__':  # the imports below take seconds, and Ctrl-C there would print a traceback

    def leave(*_):
        if os.environ.get('RANK', '0') == '0':
            os.write(2, b'error: interrupted\n')
        os._exit(130)

    signal.signal(signal.SIGINT, leave)  # until a run, which has something to save, sets its own

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # read when torch is loaded: waiting threads leave their core to others

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from configurator import ConfigError, explaining, fail, key, parse, reporting, show
from model import (
    SEQUENTIAL,
    GPTConfig,
    Schedule,
    build,
    count_flops,
    count_parameters,
    is_recurrence,
    load_pretrained,
    pretrained_config,
    pretrained_folder,
    sliced,
)
from prepare_data import shard_names, token_dtype, tokenizer_meta
from support.flex import choose_flex
from support.log import finite, one_number_each
from support.optimizers import Muon
from support.processes import Signals, check_compiler, reporting_to_torchrun
from support.read_ahead import read_ahead

EXIT_CODES = (
    'Exit codes: 0 finished; 2 a mistake in the settings, or no space for the last checkpoint; 3 the loss or gradient is not\n'
    'finite any more; 4 another process of the run has ended; 128 + the number of SIGINT, SIGTERM, SIGHUP or SIGUSR2,\n'
    'with the state saved. SIGUSR1 saves the state, and the run continues.'
)

DOCUMENT = -2  # reset_token=document until the data are known
FROM_0, FROM_1, ANY = (0, 2**31 - 1), (1, 2**31 - 1), (0, math.inf)  # bounds of counts, and of what is no count


@dataclass
class TrainConfig(Schedule, GPTConfig):
    """Every setting of a training run; those of the model and of the schedule are declared in model.py."""

    data_dir: str = key('data/stdlib', 'dataset made by prepare_data.py')
    reset_token: int = key(
        DOCUMENT,
        'where the memory read is 0: at the documents of a text or of packed examples, nowhere, or at this token of the data',
        bounds=(0, 10**7),
        names={'document': DOCUMENT, 'none': -1},
    )
    document_rows: bool = key(False, 'each training sequence of a text starts at a document, whose token is reset_token')
    out_dir: str = key('out/run', 'folder for ckpt.pt and log.jsonl')
    init_from: str = key(
        'scratch', 'scratch, resume (out_dir holds a checkpoint), auto (either), hf:FOLDER or hf:NAME (pretrained, or auto)'
    )
    max_steps: int = key(2000, 'updates', bounds=FROM_1)
    d_forward_start: int = key(
        -1, 'jacobi: d_forward at the first update, growing to d_forward; -1: all at once', bounds=(-1, math.inf)
    )
    d_forward_steps: int = key(0, 'jacobi: update at which a growing d_forward has reached its full value', bounds=FROM_0)
    batch_size: int = key(32, 'sequences per update, over all processes and micro-batches', bounds=FROM_1)
    accumulation: int = key(1, 'micro-batches per update in each process', bounds=FROM_1)
    optimizer: str = key('adamw', 'adamw, or muon for matrices and adamw for the rest', ('adamw', 'muon'))
    learning_rate: float = key(1e-3, 'peak learning rate', bounds=ANY)
    lr_schedule: str = key(
        'cosine',
        'after the warm-up: cosine, linear over the last warmdown_fraction, or constant',
        ('cosine', 'linear', 'constant'),
    )
    warmup_steps: int = key(100, 'updates of linear warm-up; a tenth of the run where it is longer than that', bounds=FROM_0)
    decay_steps: int = key(0, 'update at which the decay ends; 0 means max_steps', bounds=FROM_0)
    warmdown_fraction: float = key(0.4, 'lr_schedule=linear: share of the updates that decay', bounds=(0, 1))
    final_lr_fraction: float = key(0.1, 'learning rate at the end, as a fraction of the peak', bounds=ANY)
    weight_decay: float = key(0.1, 'decay of the matrices; embeddings, head, gates, biases, scalars have none', bounds=ANY)
    beta1: float = key(0.9, 'AdamW: decay of the first moment', bounds=(0, 0.999999999))
    beta2: float = key(0.95, 'AdamW: decay of the second moment', bounds=(0, 0.999999999))
    grad_clip: float = key(1.0, 'largest norm of the gradient; 0 switches clipping off', bounds=ANY)
    max_bad_steps: int = key(
        10, 'updates in a row, skipped for a loss or gradient that is not finite, that end the run', bounds=FROM_1
    )
    debug_nan: bool = key(False, 'end at the first module and pass whose output is not finite, and name them; slow')
    recurrence_lr_scale: float = key(1.0, 'multiplies the learning rate of the parameters that the recurrence adds', bounds=ANY)
    freeze_base: bool = key(False, 'train only the parameters that the recurrence adds')
    eval_interval: int = key(250, 'updates between evaluations and checkpoints', bounds=FROM_1)
    save_minutes: float = key(0.0, 'also a checkpoint when so many minutes have passed since the last; 0 never', bounds=ANY)
    keep_every: int = key(0, 'updates between checkpoints that are kept as ckpt-UPDATE.pt; 0 keeps none', bounds=FROM_0)
    keep_best: bool = key(False, 'keep the checkpoint of the lowest validation loss as best.pt')
    eval_batches: int = key(8, 'validation batches under the training schedule, each of batch_size sequences', bounds=FROM_1)
    eval_exact_batches: int = key(
        1, 'validation micro-batches of each process under the exact sequential recurrence; 0 skips it', bounds=FROM_0
    )
    log_interval: int = key(10, 'updates between lines of log.jsonl', bounds=FROM_1)
    seed: int = key(1337, 'seed of the weights and of the order of the data', bounds=(0, 2**63 - 1))
    device: str = key('auto', 'cpu, cuda, mps; auto takes the first that is there, from the right')
    dtype: str = key('auto', 'of the computation; auto is bfloat16 on CUDA', ('auto', 'float32', 'bfloat16', 'float64'))
    compile: bool = key(False, 'compile the repeated block with torch.compile')
    attention: str = key(
        'auto',
        'of masked passes: sdpa, or flex (FlexAttention); auto: flex on CUDA, once it has given what sdpa gives',
        ('auto', 'sdpa', 'flex'),
    )
    activation_checkpointing: bool = key(
        False, 'layers keep only their inputs and run again in the backward: less memory, up to a third more time'
    )
    threads: int = key(0, 'CPU threads of each process; 0 leaves the default', bounds=(0, 1024))
    wandb: str = key('off', 'log to Weights & Biases too', ('off', 'online', 'offline'))
    wandb_project: str = key('latent-memory', 'project there; the run is named after out_dir')
    dry_run: bool = key(False, 'print parameters, operations and peak memory, allocate nothing, and stop')
    json: bool = key(False, 'with dry_run: also print one JSON object as the last line')

    @property
    def decay_end(self):
        """The step at which the learning rate has its last value."""
        return self.decay_steps or self.max_steps

    @property
    def warmup(self):
        """Steps of warm-up: warmup_steps, or a tenth of the run where they do not fit."""
        return self.warmup_steps if self.warmup_steps <= self.decay_end else max(1, self.decay_end // 10)

    @property
    def micro_batch(self):
        """Sequences that a process runs at a time."""
        return self.batch_size // (self.accumulation * int(os.environ.get('WORLD_SIZE', 1)))

    def check(self):
        if self.init_from not in ('scratch', 'resume', 'auto') and not self.init_from.startswith('hf:'):
            raise ConfigError(f'init_from={self.init_from} is not known; take scratch, resume, auto, hf:FOLDER or hf:NAME.')
        folder = self.init_from.removeprefix('hf:')
        if folder != self.init_from and (os.path.isdir(folder) or not self.dry_run):  # a dry run fetches nothing
            for name, value in pretrained_config(folder, self.block_size).items():
                given = name == 'document_attention' and self.document_attention  # which shapes no weights
                if name != 'reset_token' and not given:  # the token of documents is that of the new data
                    setattr(self, name, value)
        GPTConfig.check(self)
        Schedule.check(self)
        if self.recurrence == 'none' and self.schedule != 'parallel':
            raise ConfigError(f'schedule={self.schedule} needs a recurrence; with recurrence=none take schedule=parallel.')
        if self.pass_weights and self.recurrence != 'lrt':
            raise ConfigError(
                f'pass_weights={self.pass_weights} weighs the passes of LRT; recurrence={self.recurrence} is scored once.'
            )
        if not self.out_dir or os.path.isfile(self.out_dir):
            raise ConfigError(f'out_dir={self.out_dir} is no folder; name one for the checkpoint and the log.')
        if self.d_forward_start >= 0:
            if self.schedule != 'jacobi' or not self.d_forward_start < self.d_forward:
                raise ConfigError(
                    f'd_forward_start={self.d_forward_start} grows to a larger d_forward under schedule=jacobi, '
                    f'not with d_forward={self.d_forward} under schedule={self.schedule}; -1 switches growth off.'
                )
            if self.d_forward_steps < 1:
                raise ConfigError(f'd_forward_steps={self.d_forward_steps} must be at least 1 when d_forward_start is given.')
            if self.pass_weights or (self.freeze_base and not self.d_forward_start):
                raise ConfigError(
                    f'd_forward_start={self.d_forward_start} fits neither pass_weights, whose number is fixed, nor, at 0, '
                    f'freeze_base, because a pass without memory trains nothing that the recurrence adds.'
                )
        if self.activation_checkpointing and self.architecture == 'lstm':
            raise ConfigError('activation_checkpointing=True recomputes transformer layers; architecture=lstm has none.')
        if self.debug_nan and self.compile:
            raise ConfigError('debug_nan=True looks into every module, which compile=True fuses; switch one off.')
        if self.freeze_base and self.recurrence == 'none':
            raise ConfigError('freeze_base=True with recurrence=none leaves nothing to train.')
        if self.freeze_base and self.initial and len(self.passes(2)) == 1:
            raise ConfigError(
                f'freeze_base=True leaves nothing to train where no pass reads the memory: schedule={self.schedule}, '
                f'd_forward={self.d_forward}; take jacobi with d_forward of 1 or more, or another schedule.'
            )
        world = int(os.environ.get('WORLD_SIZE', 1))
        parts = world * self.accumulation
        if self.batch_size % parts:
            below = self.batch_size // parts * parts
            near = f'{below} or {below + parts}' if below else f'{parts}'
            raise ConfigError(
                f'batch_size={self.batch_size} does not divide over {world} processes x '
                f'accumulation={self.accumulation}; take {near}.'
            )


class Stream:
    """Token files, memory-mapped, addressed as one array: its length, and slices of it, which are views where one file holds
    them."""

    def __init__(self, parts):
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, where):
        start, stop, _ = where.indices(len(self))
        first = min(np.searchsorted(self.ends, start, 'right'), len(self.parts) - 1)
        last = max(np.searchsorted(self.ends, stop, 'left'), first)
        begins = self.ends - [len(part) for part in self.parts]
        found = [self.parts[i][max(start - begins[i], 0) : max(stop - begins[i], 0)] for i in range(first, last + 1)]
        return found[0] if len(found) == 1 else np.concatenate(found)


class Dataset:
    """A folder made by prepare_data.py. Batches are a pure function of (split, seed, step, sample)."""

    def __init__(self, folder):
        """Raises ConfigError when the folder holds no dataset."""
        self.folder = folder
        path = os.path.join(folder, 'meta.json')
        if not os.path.exists(path):
            raise ConfigError(
                f'data_dir={folder} holds no dataset; make one with prepare_data.py (without arguments it lists them).'
            )
        with explaining(f'{path} cannot be read', 'make the dataset again with prepare_data.py'), open(path, 'rb') as f:
            self.meta = json.load(f)
            self.is_text = {'text': True, 'task': False}[self.meta['kind']]
            self.vocab_size = self.meta['vocab_size']
            if not isinstance(self.vocab_size, int) or not 0 < self.vocab_size < 2**31:
                raise ValueError(f'vocab_size={self.vocab_size}')
            self.scores = {name: (int(low), int(high)) for name, (low, high) in self.meta.get('scores', {}).items()}
            self.document_token = self.meta.get('document_token', -1)
            if not isinstance(self.document_token, int) or not -1 <= self.document_token < self.vocab_size:
                raise ValueError(f'document_token={self.document_token}')
            self.longest = {} if self.is_text else {name: int(n) for name, n in self.meta['longest'].items()}
            if self.is_text:
                self.expect(self.vocab_size, len(self.meta['token_bytes']), 'entries of token_bytes')
        self.splits, self.starts, self.document_rows = {}, {}, False

    def split(self, name):
        """Text: the token stream, a memory map or a Stream of them. Task: a dict of arrays."""
        if name not in self.splits:
            path = os.path.join(self.folder, name + ('.bin' if self.is_text else '.npz'))
            try:
                if os.path.basename(name) != name:
                    raise ValueError(f'the name {name!r} leads out of the folder')
                if self.is_text:
                    about, parts = self.meta['splits'][name], []
                    for file, entry in shard_names(name, about):
                        path = os.path.join(self.folder, file + '.bin')
                        if not os.path.getsize(path):
                            raise ValueError('it is empty')
                        parts.append(np.memmap(path, dtype=token_dtype(self.vocab_size), mode='r'))
                        self.expect(entry['tokens'], len(parts[-1]), 'tokens')
                    stream = parts[0] if 'shards' not in about else Stream(parts)
                    self.expect(self.meta['dtype'], parts[0].dtype.name, 'dtype')
                    self.expect(about['tokens'], len(stream), 'tokens')
                    self.splits[name] = stream
                else:
                    with np.load(path) as arrays:
                        arrays = self.splits[name] = dict(arrays)
                    about = self.meta['splits'][name]  # several examples share a row of a packed split
                    shape = about.get('rows', about['examples']), self.longest[name]
                    for array in ('tokens', 'targets', 'recur_mask'):
                        self.expect(shape, arrays[array].shape, f'shape of {array}')
                        self.expect(True, arrays[array].dtype.kind in 'iub', f'whole numbers in {array}')
            except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile) as e:
                raise ConfigError(f'{path} cannot be read ({e}); make the dataset again with prepare_data.py.') from None
        return self.splits[name]

    def expect(self, said, found, what):
        if said != found:
            raise ValueError(f'{what}: {said} by meta.json, {found} in the file')

    def openings(self, name):
        """Where the documents of a text begin, (documents,); reads its whole stream once."""
        if name not in self.starts:
            stream, size = self.split(name), 2**24
            blocks = ((i, stream[i : i + size]) for i in range(0, len(stream), size))
            self.starts[name] = np.concatenate([np.flatnonzero(b == self.document_token) + i for i, b in blocks])
        return self.starts[name]

    def reset_token(self, config):
        """The number that reset_token of the settings means with these data; raises ConfigError for another token of theirs."""
        if config.reset_token == DOCUMENT:
            used = config.architecture == 'gpt' and (self.is_text or config.document_attention)
            return self.document_token if used else -1
        reads = config.recurrence != 'none' or config.document_attention
        if reads and config.reset_token not in (-1, self.document_token):
            theirs = f'where {self.document_token} does' if self.document_token >= 0 else 'which marks none'
            raise ConfigError(
                f'reset_token={config.reset_token} opens no document of {self.folder}, {theirs}; take document or none.'
            )
        return config.reset_token

    def fit(self, config):
        """Raises ConfigError when the model cannot take this dataset; returns the vocabulary size of the model."""
        there = self.vocab_size
        if config.vocab_size and config.vocab_size < there:
            raise ConfigError(
                f'vocab_size={config.vocab_size} is too small for {self.folder}, which has {there} tokens; take {there} or 0.'
            )
        for name in ('train', 'val'):
            if self.is_text and len(self.split(name)) <= config.block_size:
                raise ConfigError(
                    f'{self.folder}/{name}.bin has {len(self.split(name))} tokens, too few for block_size={config.block_size}; '
                    f'take a smaller block_size or more data.'
                )
            if not self.is_text and not (self.split(name)['targets'] >= 0).any():
                what = f'no token of {name} in {self.folder} is scored'
                if name == 'train':
                    raise ConfigError(f'{what}, so there is nothing to learn; make the dataset again with prepare_data.py.')
                warn(f'{what}: there is no validation loss.')
        if self.longest and (longest := max(self.longest.values())) > config.block_size:  # eval.py reads the other splits
            split = max(self.longest, key=self.longest.get)
            raise ConfigError(
                f'{self.folder} has examples of {longest} tokens in {split}, above block_size={config.block_size}; '
                f'take {longest}.'
            )
        if not self.is_text and 'rows' in self.meta['splits']['train']:
            if config.reset_token != self.document_token or not config.document_attention:
                raise ConfigError(
                    f'{self.folder} has several examples in a row, which would read each other with reset_token='
                    f'{config.reset_token} and document_attention={config.document_attention}; '
                    f'take --reset_token=document --document_attention=True, or prepare it with pack=0.'
                )
        if config.document_rows:
            if not self.is_text or config.reset_token != self.document_token or self.document_token < 0:
                what = 'reset_token=document, and a token that opens them' if self.is_text else 'a text, not a task'
                raise ConfigError(f'document_rows=True needs, with {self.folder}, {what}.')
            for name in ('train', 'val'):
                starts, end, T = self.openings(name), len(self.split(name)), config.block_size
                if not len(starts) or starts[0] >= end - T:
                    raise ConfigError(
                        f'{self.folder} has no document in {name} that block_size={T} tokens follow from; '
                        f'take a smaller block_size, or document_rows=False.'
                    )
                if name == 'train' and os.environ.get('RANK', '0') == '0':
                    beyond = np.maximum(np.diff(starts, append=end) - T, 0).sum() / end
                    print(f'document_rows: {beyond:.1%} of train, behind the first {T} tokens of a document, is never read')
        self.document_rows = config.document_rows
        return config.vocab_size or there

    def rows(self, name, seed, step, batch_size, T):
        """Which samples make batch `step`: offsets into the stream (text) or numbers of examples (task), (batch_size,).

        The training split is drawn with replacement; the others are walked through in order, evenly spread. With
        document_rows each offset is that of a document; what follows within T tokens, more documents too, belongs to the row.
        """
        split = self.split(name)
        choices = len(split) - T if self.is_text else len(split['tokens'])
        if self.document_rows:
            starts = self.openings(name)
            choices = np.searchsorted(starts, choices)
        if name == 'train':
            number = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step])).integers(choices, size=batch_size)
        else:
            number = np.arange(step * batch_size, (step + 1) * batch_size)
            number = number * (T if self.is_text and not self.document_rows else 1) % choices
        return starts[number] if self.document_rows else number

    def epochs(self, n_rows, T):
        """How often `n_rows` sequences go through the training split: by its documents, tokens or examples."""
        split = self.split('train')
        if self.document_rows:
            return n_rows / len(self.openings('train'))
        return n_rows * T / len(split) if self.is_text else n_rows / len(split['tokens'])

    def batch(self, name, rows, T, device='cpu'):
        """tokens, targets (B, T) int64 and recur_mask (B, T) bool or None; targets are -1 where nothing is scored."""
        split = self.split(name)
        if self.is_text:
            window = np.stack([split[r : r + T + 1] for r in rows]).astype(np.int64)
            arrays = window[:, :-1], window[:, 1:]
        else:
            arrays = (
                split['tokens'][rows].astype(np.int64),
                split['targets'][rows].astype(np.int64),
                split['recur_mask'][rows].astype(bool),
            )
        lowest, highest = arrays[0].min(), max(arrays[0].max(), arrays[1].max())
        if lowest < 0 or highest >= self.vocab_size:
            raise ConfigError(
                f'{self.folder} holds the token {highest if lowest >= 0 else lowest} in {name}, outside its vocabulary of '
                f'{self.vocab_size}; make the dataset again with prepare_data.py.'
            )
        tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        return to_device((*tensors, *([None] if self.is_text else [])), device)

    def length(self, name, block_size):
        """Positions in a batch of this split."""
        return block_size if self.is_text else self.split(name)['tokens'].shape[1]

    def scored(self, name, rows, T):
        """How many samples of a batch score each position, (T,)."""
        if self.is_text:
            return np.full(T, len(rows))
        return (self.split(name)['targets'][rows] >= 0).sum(0)


def to_device(tensors, device):
    """Copies on `device` of tensors, or None, in the memory of the host; on a GPU the host does not wait for them."""
    if str(device).startswith('cuda'):
        return tuple(t if t is None else t.pin_memory().to(device, non_blocking=True) for t in tensors)
    return tuple(t if t is None else t.to(device) for t in tensors)


def warn(sentence):
    """One line on stderr, from the first process, that leaves the progress bar whole."""
    if os.environ.get('RANK', '0') == '0':
        tqdm.write(f'warning: {sentence}', file=sys.stderr)


def use_device(config):
    """Sets the CPU threads of a command's settings; returns the device that they mean ('auto': the best there is). Raises
    ConfigError for one that this machine lacks."""
    if config.threads:
        torch.set_num_threads(config.threads)
    name = config.device
    there = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available(), 'cpu': True}
    if name == 'auto':
        return next(kind for kind, available in there.items() if available)
    kind, colon, number = name.partition(':')
    there['cuda:' + number] = kind == 'cuda' and number.isdigit() and int(number) < torch.cuda.device_count()
    if not there.get(name, False):
        raise ConfigError(
            f'device={name} is not available here; choose from auto, {", ".join(k for k, v in there.items() if v)}.'
        )
    if number:  # what names no device, in torch and in libraries, means the current one
        torch.cuda.set_device(name)
    return name


def learning_rate(config, step):
    """Rate of update `step`, counted from 0: linear warm-up that ends at the peak, then the decay, then its last value."""
    peak, warmup, end = config.learning_rate, config.warmup, config.decay_end
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_schedule == 'constant':
        return peak
    start = warmup if config.lr_schedule == 'cosine' else max(warmup, round(end * (1 - config.warmdown_fraction)))
    done = min(max((step + 1 - start) / (end - start), 0.0), 1.0) if end > start else 0.0
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.lr_schedule == 'cosine' else 1 - done
    return peak * (config.final_lr_fraction + (1 - config.final_lr_fraction) * left)


def schedule_at(config, step):
    """The schedule of update `step`, counted from 0: that of the config, unless its d_forward is still growing."""
    if config.d_forward_start < 0 or step >= config.d_forward_steps:
        return config
    grown = config.d_forward_start + (config.d_forward - config.d_forward_start) * step // config.d_forward_steps
    values = {f.name: getattr(config, f.name) for f in fields(Schedule)}
    return Schedule(**values | {'d_forward': grown, 'd_backward': min(config.d_backward, grown + 1)})


def is_matrix(name, parameter):
    """Whether Muon and weight decay may act on a parameter: the matrices inside the layers, no table and no gate."""
    return (
        parameter.dim() == 2 and not name.startswith(('embed.', 'value_embeds.', 'head.', 'fusion.f_')) and '.gate_' not in name
    )


def make_optimizers(model, config, device):
    """One optimiser or two; every trainable parameter is in exactly one group, whose 'scale' multiplies the rate."""
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups.setdefault((is_matrix(name, p), is_recurrence(name)), []).append(p)

    def made(which):
        return [
            {
                'params': params,
                'weight_decay': config.weight_decay if matrix else 0.0,
                'scale': config.recurrence_lr_scale if added else 1.0,
            }
            for (matrix, added), params in groups.items()
            if matrix in which
        ]

    betas, fused = (config.beta1, config.beta2), device in ('cuda', 'cpu')
    muon = config.optimizer == 'muon'
    adamw_groups = made((False,) if muon else (False, True))
    optimizers = []
    if adamw_groups:
        optimizers.append(torch.optim.AdamW(adamw_groups, lr=config.learning_rate, betas=betas, fused=fused))
    if muon and made((True,)):
        optimizers.append(Muon(made((True,)), lr=config.learning_rate))
    return optimizers


def update(optimizers, bad):
    """Steps the optimisers, unless `bad`, a bool tensor on the device: then weights, moments and counters stay as they are.

    Muon and the fused AdamW read the flag on the device, so the host runs ahead; for AdamW on MPS, whose kernel does not read
    it, the host waits.
    """
    for optimizer in optimizers:
        if getattr(optimizer, '_step_supports_amp_scaling', False):
            optimizer.found_inf = bad.float()
            optimizer.step()
        elif not bad.item():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def check_memory(config, T):
    """ConfigError when weights, gradients and one moment of the trainable ones, and what the layers of one pass keep at least
    for the backward, do not fit into the memory that is free: the kernel would end the process without a word."""
    with torch.device('meta'):
        parameters = list(build(config).named_parameters())
    trained = sum(p.numel() for name, p in parameters if is_recurrence(name) or not config.freeze_base)
    rows = config.micro_batch
    whole = config.architecture == 'gpt' and not config.activation_checkpointing
    kept = 3 * config.n_embd + 2 * config.kv_dim + config.mlp_dim if whole else config.n_embd  # of each layer and position
    kept *= 0 if config.freeze_base else rows * T * config.n_layer / (2 if config.dtype == 'bfloat16' else 1)
    need = (sum(p.numel() for _, p in parameters) + 2 * trained + kept) * (8 if config.dtype == 'float64' else 4)
    if need > (free := free_memory()):
        raise ConfigError(
            f'an update needs at least {need / 2**30:,.1f} GiB for weights, gradients, moments and {rows} sequences, and '
            f'{free / 2**30:,.1f} GiB are free; take a smaller n_layer={config.n_layer}, n_embd={config.n_embd} or '
            f'batch_size={config.batch_size}, and see --dry_run=True.'
        )


def free_memory():
    """Bytes that a process can still take on this machine; infinite where it does not say."""
    with contextlib.suppress(OSError, StopIteration), open('/proc/meminfo', encoding='ascii') as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith('MemAvailable'))
    return math.inf


def load_optimizer(optimizer, saved):
    """Restores the moments; rate, decay and fusing stay those of the current config, not of the file."""
    for old, new in zip(saved['param_groups'], optimizer.param_groups, strict=True):
        old.update({k: v for k, v in new.items() if k != 'params'})
    optimizer.load_state_dict(saved)


@contextlib.contextmanager
def surviving(what):
    """Around the writing of `what`: a full disk is a warning, and the run goes on."""
    try:
        yield
    except OSError as e:
        warn(f'{what} could not be written ({e.strerror}); what was there before is intact.')


@contextlib.contextmanager
def locked(folder):
    """Holds folder/lock, which the kernel releases however the process ends; raises ConfigError where another run has it."""
    with open(os.path.join(folder, 'lock'), 'w') as f:
        try:
            if fcntl is None:
                raise OSError(errno.ENOLCK, 'this system has no fcntl')
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f'another run is writing to {folder}; wait for its end or choose another --out_dir.') from None
        except OSError as e:
            warn(f'{folder} cannot be locked ({e.strerror}); start no second run there.')
        yield


def agree(config, data, step):
    """Raises ConfigError, in all processes alike, where they differ in code, data, settings or the update they start from."""
    code = hashlib.sha256()
    root = glob.escape(os.path.dirname(os.path.abspath(__file__)))
    for path in sorted(glob.glob(f'{root}/*.py') + glob.glob(f'{root}/support/*.py')):
        with open(path, 'rb') as f:
            code.update(f.read())
    meta = hashlib.sha256(json.dumps(data.meta, sort_keys=True).encode())  # it holds the checksums of the files
    mine = {'checksum of the code': code.hexdigest()[:12], 'checksum of the data': meta.hexdigest()[:12]}
    mine |= asdict(config) | {'update of the checkpoint': step}
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for rank, theirs in enumerate(found):
        for name, value in found[0].items():
            if (other := theirs.get(name)) != value:
                raise ConfigError(f'process {rank} has {name}={other} and process 0 {name}={value}; start all with the same.')


def save_checkpoint(path, checkpoint, previous=None):
    """Writes beside, flushes, renames: whoever reads `path`, at any moment, finds a whole checkpoint. What was there is kept as
    `previous`. Raises OSError when it cannot be written, and then leaves all as it was."""
    try:
        with open(path + '.tmp', 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        if previous and os.path.exists(path):
            keep(path, previous)
        os.replace(path + '.tmp', path)
    except (OSError, RuntimeError) as e:  # the writer of torch has its own name for a disk that is full
        with contextlib.suppress(OSError):
            os.remove(path + '.tmp')
        number = getattr(e, 'errno', None) or errno.EIO
        raise OSError(number, os.strerror(number), path) from e


def keep(path, name):
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

    Where a damaged ckpt.pt has a ckpt-previous.pt beside it, that one, after a warning.
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
        settings = asdict(TrainConfig()) | checkpoint['config']  # a key that came later has its default
        return checkpoint | {'config': {f.name: settings[f.name] for f in fields(TrainConfig)}, 'path': str(path)}
    except Exception as e:
        said = str(e) if isinstance(e, ValueError) else 'it is cut, or not of train.py'
        previous = os.path.join(os.path.dirname(path), 'ckpt-previous.pt')
        if os.path.basename(path) == 'ckpt.pt' and os.path.isfile(previous):
            warn(f'the checkpoint {path} cannot be used ({said}); the one before it, {previous}, is taken.')
            return read_checkpoint(previous, device)
        raise ConfigError(f'the checkpoint {path} cannot be used ({said}); restore it or delete it.') from None


def load_weights(model, checkpoint):
    """The checkpoint's weights into `model`; raises ConfigError when they do not belong to its settings."""
    try:
        model.load_state_dict(checkpoint['model'])
    except RuntimeError as e:
        said = ' '.join(str(e).split())[:300]
        raise ConfigError(f'the weights in {checkpoint["path"]} do not fit its settings: {said}') from None


def same_tokens(checkpoint, data):
    """Raises ConfigError when a model was trained on other tokens than those of `data`."""
    for name in ('kind', 'tokenizer', 'tokenizer_json', 'names'):
        if checkpoint['meta'].get(name) != data.meta.get(name):
            raise ConfigError(
                f'{checkpoint["path"]} was trained on other tokens than those of {data.folder} ({name} differs in meta.json); '
                f'choose a dataset of the same kind.'
            )


def same_vocabulary(folder, data):
    """Raises ConfigError when `data` was not made with the tokenizer that lies beside pretrained weights, if there is one."""
    path = os.path.join(folder, 'tokenizer.json')
    if os.path.exists(path):
        theirs = tokenizer_meta(path)
        if any(theirs[k] != data.meta.get(k) for k in ('vocab_size', 'token_bytes')):
            raise ConfigError(
                f'{data.folder} was made with the tokenizer {data.meta["tokenizer"]}, not that of the weights in {folder}; '
                f'make it again with --tokenizer={path}.'
            )


def changed_settings(before, config):
    """What differs from the settings (a dict) of a checkpoint, as ['name=value (before: value)']. Raises ConfigError for what
    cannot: what shapes the weights and the state of the optimisers."""
    fixed = (*(f.name for f in fields(GPTConfig)), 'optimizer', 'freeze_base', 'dtype')
    changed = {
        name: f'{name}={show(value)} (before: {show(before[name])})'
        for name, value in asdict(config).items()
        if value != before[name]
    }
    if wrong := [changed[name] for name in fixed if name in changed]:
        raise ConfigError(f'{config.out_dir} cannot go on with {", ".join(wrong)}; give what it had, or another --out_dir.')
    return [changed[name] for name in changed if name not in ('init_from', 'out_dir', 'device', 'threads', 'json')]


class Tracker:
    """wandb, if asked for, on the first process only; whatever goes wrong there is one warning and no more.

    `id` is that of the run there, which a checkpoint keeps: a resumed run continues it, and sends no step a second time.
    """

    def __init__(self, config, active, id=None):
        self.run, self.id, self.starts = None, id, 0
        if config.wandb != 'off' and active:
            with self.giving_up():
                import wandb

                self.run = wandb.init(
                    project=config.wandb_project,
                    name=config.out_dir.replace('/', '-'),
                    config=asdict(config),
                    mode=config.wandb,
                    dir=config.out_dir,
                    settings=wandb.Settings(init_timeout=30),
                    id=id,
                    resume='allow' if id else None,
                )
                self.id, self.starts = self.run.id, self.run.starting_step

    @contextlib.contextmanager
    def giving_up(self):
        try:
            yield
        except Exception as e:
            self.run = None
            warn(f'wandb is off from here on ({type(e).__name__}: {e}); log.jsonl is complete.')

    def log(self, values):
        if self.run and values['step'] >= self.starts:
            with self.giving_up():
                self.run.log(one_number_each({k: v for k, v in values.items() if k != 'step'}), step=values['step'])

    def finish(self):
        if self.run:
            with self.giving_up():
                self.run.finish()


@torch.no_grad()
def evaluate(
    model, data, config, schedule, batches, split='val', rank=0, world=1, device='cpu', autocast=contextlib.nullcontext
):
    """Loss (nats a scored position) of the newest output of every position under `schedule`; for tasks also the accuracy of
    each score. All processes together see `batches` batches of the global batch size. A mean over nothing is left out."""
    T = data.length(split, config.block_size)
    micro = config.batch_size // (world * config.accumulation)  # the shape that training runs, so nothing compiles again
    names, sums = ['loss', *data.scores], []
    for step in range(batches):
        rows = data.rows(split, config.seed, step, config.batch_size, T)[rank * micro * config.accumulation :]
        for i in range(config.accumulation):
            x, y, mask = data.batch(split, rows[i * micro : (i + 1) * micro], T, device)
            with autocast():
                logits = model(x, schedule=schedule, recur_mask=mask)
            nll = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction='sum')
            hit = logits.argmax(-1) == y
            found = [(nll, (y >= 0).sum())]
            for low, high in data.scores.values():
                kind = (y >= low) & (y < high)
                found.append(((hit & kind).sum(), kind.sum()))
            sums.append(torch.stack([torch.stack(pair).to(nll.dtype) for pair in found]))  # a number here would cost a wait
    totals = torch.stack(sums).cpu().double().sum(0)
    if world > 1:
        dist.all_reduce(totals)
    return {name: a / b for name, (a, b) in zip(names, totals.tolist(), strict=True) if b}


def watch(model):
    """Ends the run with exit code 3 at the first module whose input or output is not finite, naming it and the pass, counted
    from 0, the one without memory; what precedes the passes counts to 0 and what follows them to the last."""
    number = 0

    def look(what, value):
        if isinstance(value, torch.Tensor) and not value.isfinite().all():
            rank = f'in process {os.environ["RANK"]}, ' if 'RANK' in os.environ else ''
            sentence, end = f'error: {rank}{what} in pass {max(number, 0)} is not finite.', SystemExit(3)
            print(sentence, file=sys.stderr)  # whichever process it is
            end.add_note(sentence)
            raise end

    def begin(*_):
        nonlocal number
        number = -1

    def counted(*args):
        nonlocal number
        number += 1
        return span(*args)

    if span := getattr(model, 'span', None):  # the LSTM has no passes
        model.span = counted
    model.register_forward_pre_hook(begin)
    for name, module in model.named_modules():
        name = name or 'the model'
        module.register_forward_pre_hook(lambda _, args, name=name: look(f'the input of {name}', args[0]))
        module.register_forward_hook(
            lambda _, args, out, name=name: look(f'the output of {name}', out[0] if isinstance(out, tuple) else out)
        )


class Allocations(TorchDispatchMode):
    """Follows what tensors hold, in bytes: `now`, and the largest so far, `peak`."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in self.known:
                self.known.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, id(storage), storage.nbytes())
        return out

    def free(self, number, size):
        self.known.remove(number)
        self.now -= size


def count_memory(config):
    """Bytes of tensors in an update of one process: {'weights', 'optimiser', 'peak'}, the last with those and all that the
    passes keep for the backward. Two updates run on tensors that have shapes and no content."""
    config = replace(config, jacobi_tol=0.0)  # what no content can decide: all passes run
    with FakeTensorMode(), Allocations() as found:
        torch.set_default_dtype(torch.float64 if config.dtype == 'float64' else torch.float32)
        model = build(config)
        torch.set_default_dtype(torch.float32)
        model.activation_checkpointing = config.activation_checkpointing
        for name, p in model.named_parameters():
            p.requires_grad_(is_recurrence(name) or not config.freeze_base)
        weights, optimizers = found.now, make_optimizers(model, config, 'cpu')
        tokens = torch.zeros(config.micro_batch, config.block_size, dtype=torch.long)
        counts = torch.ones(len(model.scored_passes(config, config.block_size)))
        for _ in range(2):
            with torch.autocast('cpu', torch.bfloat16, enabled=config.dtype == 'bfloat16'):
                model(tokens, tokens, config, None, counts)[0].backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return {'weights': weights, 'optimiser': found.now - weights, 'peak': found.peak}


def dry_run(config):
    """Prints parameters by part, the recurrence's share, operations per token and memory, from weights that hold none."""
    if config.reset_token == DOCUMENT:  # without data; whichever token it is, the cost is the same
        config.reset_token = 0
    with torch.device('meta'):
        model = build(config)
    parts, flops = count_parameters(model), count_flops(model, config, config.block_size)
    total, ratio = sum(parts.values()), flops['step'] / flops['plain_step']
    share = parts.get('recurrence', 0) / total
    for part, n in [*parts.items(), ('total', total)]:
        print(f'{part:<18}{n:>16,}{n / total:>9.2%}')
    print(f'\noperations per token, schedule={config.schedule}, {config.block_size} tokens    x plain transformer')
    for name, label, plain in (
        ('forward', 'forward', 'plain_forward'),
        ('step', 'training step', 'plain_step'),
        ('decode', 'decoded token', 'plain_forward'),
    ):
        print(f'{label:<18}{flops[name]:>16.4g}{flops[name] / flops[plain]:>9.2f}')
    if config.dtype == 'auto':
        config.dtype = 'bfloat16' if config.device.startswith('cuda') else 'float32'
    memory = count_memory(config)
    print(f'\nmemory of tensors, {config.micro_batch} sequences at a time, {config.dtype}, as on CPU without compile')
    for part, size in memory.items():
        print(f'{part:<18}{size / 2**20:>16,.0f} MiB')
    if config.json:
        found = {'parameters': parts, 'total_parameters': total, 'recurrence_share': share}
        found |= {f'{k}_flops_per_token': v for k, v in flops.items()} | {'step_flops_ratio': ratio, 'memory': memory}
        print(json.dumps(found))


def continue_log(path, step):
    """Drops the lines of log.jsonl past update `step` (written after the checkpoint), and one cut short by a kill.

    Returns the lowest validation loss in what is left.
    """
    kept, best = [], math.inf
    if os.path.exists(path):
        with open(path, encoding='utf-8', errors='replace') as f:
            for line in f:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    values = json.loads(line)
                    if values['step'] <= step:
                        kept.append(line)
                        best = min(best, (values.get('val') or {}).get('loss', math.inf))
    with open(path + '.tmp', 'w', encoding='utf-8') as f:
        f.writelines(kept)
    os.replace(path + '.tmp', path)
    return best


def main(argv):
    config = parse(TrainConfig, argv, f'python train.py [config/NAME.py] [--key=value ...], or behind torchrun\n\n{EXIT_CODES}')
    with reporting():
        if config.dry_run:
            if not config.vocab_size and os.path.exists(os.path.join(config.data_dir, 'meta.json')):
                data = Dataset(config.data_dir)
                config.reset_token = data.reset_token(config)
                config.vocab_size = data.fit(config)
            if not config.vocab_size:
                raise ConfigError(
                    f'vocab_size=0 takes the number from data_dir={config.data_dir}, which holds no dataset; give a number.'
                )
            if config.init_from.startswith('hf:') and not os.path.isdir(config.init_from[3:]):
                print(f'{config.init_from[3:]} is no folder here: this is the shape that the settings state.', file=sys.stderr)
            return dry_run(config) if os.environ.get('RANK', '0') == '0' else None
        return train(config)


def train(config):
    """A whole run. Raises ConfigError when it cannot start."""
    with contextlib.ExitStack() as held:
        try:
            run(config, held)
        except ConfigError:
            if dist.is_initialized():  # left to the end of the interpreter, its threads may abort the process
                dist.destroy_process_group()
            raise
        except RuntimeError as e:
            if 'RANK' not in os.environ or not (isinstance(e, dist.DistError) or 'gloo' in str(e)):
                raise
            # torchrun names the process that ended first; without it every process that is left says what it saw.
            if os.environ['RANK'] == '0' or 'TORCHELASTIC_RUN_ID' not in os.environ:
                sentence = f'error: another process of this run has ended; continue {config.out_dir} with --init_from=auto.'
                tqdm.write(sentence, file=sys.stderr)
            raise SystemExit(4) from None


def run(config, held):
    """Set up, resume, loop, save. held: an ExitStack for what is to be released at the end, whatever the end is."""
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    first, parent = rank == 0, os.getppid()
    device = use_device(config)
    kind = device.split(':')[0]
    if world > 1 and kind == 'cuda':
        device = use_device(replace(config, device=f'cuda:{os.environ["LOCAL_RANK"]}'))
    if config.attention == 'flex' and kind != 'cuda':
        raise ConfigError(f'attention=flex has no backward on {kind}; take attention=sdpa, or a CUDA device.')
    if config.compile:
        check_compiler(device)
    data = Dataset(config.data_dir)
    config.reset_token = data.reset_token(config)
    config.vocab_size = data.fit(config)
    config.check()
    if config.init_from.startswith('hf:'):
        same_vocabulary(pretrained_folder(config.init_from[3:]), data)

    path = os.path.join(config.out_dir, 'ckpt.pt')
    saved, changed, there = None, [], os.path.exists(path)
    if there and config.init_from == 'scratch':
        raise ConfigError(f'{path} exists; continue it with --init_from=resume, or choose another --out_dir.')
    if first and (there or config.init_from != 'resume'):  # before reading what another run might be about to write
        os.makedirs(config.out_dir, exist_ok=True)
        held.enter_context(locked(config.out_dir))
    if config.init_from == 'resume' or os.path.exists(path):
        saved = read_checkpoint(path)
        changed = changed_settings(saved['config'], config)
        same_tokens(saved, data)
        changed += [f'other data in {data.folder}'] if saved['meta'] != data.meta else []
        if saved['step'] > config.max_steps:
            raise ConfigError(f'max_steps={config.max_steps} lies behind {path}, which holds update {saved["step"]}; raise it.')

    if world > 1:
        # What only the hosts have to tell each other does not wait for the GPUs.
        dist.init_process_group('cpu:gloo,cuda:nccl' if kind == 'cuda' else 'gloo')
        agree(config, data, saved['step'] if saved else 0)

    if kind == 'cpu':
        check_memory(config, data.length('train', config.block_size))
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision('high')
    dtype = {'auto': 'bfloat16' if kind == 'cuda' else 'float32'}.get(config.dtype, config.dtype)
    raw = build(config).to(device, torch.float64 if dtype == 'float64' else torch.float32)
    raw.activation_checkpointing = config.activation_checkpointing
    computed = getattr(torch, dtype)
    raw.flex, problem = choose_flex(
        config, config, config.micro_batch, data.length('train', config.block_size), computed, device
    )
    if problem:
        warn(problem)
    if config.init_from.startswith('hf:') and not saved:
        load_pretrained(raw, config.init_from[3:])
    if config.freeze_base:
        for name, p in raw.named_parameters():
            p.requires_grad_(is_recurrence(name))

    def autocast():
        return torch.autocast(kind, torch.bfloat16) if dtype == 'bfloat16' else contextlib.nullcontext()

    optimizers = make_optimizers(raw, config, kind)
    start, best, skipped, bad_row, whole, tracked = 0, math.inf, 0, 0, False, None
    if saved:
        load_weights(raw, saved)
        try:
            for optimizer, state in zip(optimizers, saved['optimizers'], strict=True):
                load_optimizer(optimizer, state)
            torch.set_rng_state(saved['rng'])
        except (ValueError, LookupError, TypeError, RuntimeError) as e:
            raise ConfigError(f'the optimiser in {path} does not fit its settings: {e}') from None
        start, best = saved['step'], saved['best_loss']
        skipped, bad_row = saved.get('bad_steps', (0, 0))
        whole = saved['path'] == path
        if saved['config']['out_dir'] == config.out_dir:  # not where a copy of the checkpoint begins a run of its own
            tracked = saved.get('wandb_id')
        saved = None
    if config.compile:
        raw.compile()
    if config.debug_nan:
        watch(raw)
    T = data.length('train', config.block_size)
    model = raw
    if world > 1:
        # Only a schedule without a pass that reads the memory leaves parameters without gradient, and growth begins with it.
        starting = schedule_at(config, 0)
        unused = config.recurrence != 'none' and config.initial and len(starting.passes(T)) == 1
        ids = [torch.device(device).index] if kind == 'cuda' else None
        model = DistributedDataParallel(raw, device_ids=ids, find_unused_parameters=unused, gradient_as_bucket_view=True)

    signals = held.enter_context(Signals())
    log_path = os.path.join(config.out_dir, 'log.jsonl')
    if first:
        best = min(best, continue_log(log_path, start))  # a checkpoint is written before the evaluation that belongs to it
        print(f'{sum(count_parameters(raw).values()):,} parameters, {kind}, {dtype}, updates {start} to {config.max_steps}')
        if (epochs := data.epochs(config.max_steps * config.batch_size, T)) > 1:
            print(f'the run goes through the training data {epochs:,.1f} times')
        if config.warmup != config.warmup_steps:
            print(f'warmup_steps={config.warmup_steps} is above {config.decay_end} steps; the warm-up takes {config.warmup}')
        if changed:
            print(f'goes on with other settings than before: {", ".join(changed)}')
    tracker = Tracker(config, first, tracked)

    def log(values):
        if first:
            values = finite(values)
            with surviving(log_path), open(log_path, 'a', encoding='utf-8') as f:
                f.write(json.dumps(values) + '\n')
            tracker.log(values)

    previous = os.path.join(config.out_dir, 'ckpt-previous.pt')
    written, written_at = start if whole else -1, time.monotonic()

    def save(step):
        """Whether ckpt.pt holds update `step` now."""
        nonlocal written, written_at
        state = {
            'model': raw.state_dict(),
            'optimizers': [o.state_dict() for o in optimizers],
            'config': asdict(config),
            'meta': data.meta,
            'step': step,
            'best_loss': best,
            'bad_steps': (skipped, bad_row),
            'rng': torch.get_rng_state(),
            'wandb_id': tracker.id,
        }
        written_at = time.monotonic()
        with surviving(f'update {step} in {config.out_dir}'):
            save_checkpoint(path, state, previous if written >= 0 else None)  # a damaged one replaces none
            written = step
            if config.keep_every and step % config.keep_every == 0:
                keep(path, os.path.join(config.out_dir, f'ckpt-{step:06}.pt'))
        return written == step

    def read(step):
        """How many sequences of a step score each position, (T,), and this process's micro-batches of it."""
        rows = data.rows('train', config.seed, step, config.batch_size, T)
        parts = rows.reshape(world, config.accumulation, -1)[rank]
        return data.scored('train', rows, T), [data.batch('train', part, T) for part in parts]

    batches = held.enter_context(contextlib.closing(read_ahead(read, range(start, config.max_steps))))
    one_micro_batch = replace(config, batch_size=config.batch_size // config.accumulation, accumulation=1)
    shared = dict(rank=rank, world=world, device=device, autocast=autocast)
    bar = tqdm(total=config.max_steps, initial=start, disable=not first or None, unit='update', mininterval=1)
    said_at = time.monotonic()
    since, counted, done, interrupted, asked = time.perf_counter(), start, start, 0, False
    growing = 0  # lines in a row whose passes moved the span more and more
    recent, longest = [], 0  # whether each update since the last look was skipped, on the device; the longest row of them
    for step in range(start, config.max_steps):
        rate = learning_rate(config, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group['lr'] = rate * group['scale']
        schedule = schedule_at(config, step)
        passes = raw.scored_passes(schedule, T)
        done = step + 1
        final = done == config.max_steps
        evaluated = done % config.eval_interval == 0 or final
        logged = done % config.log_interval == 0 or evaluated
        scored, micro_batches = next(batches)
        counts = torch.tensor([scored[sliced(p)].sum() for p in passes])
        weights = schedule.pass_weights[: len(passes)] or (1.0,) * len(passes)
        empty = not any(n and weight for n, weight in zip(counts.tolist(), weights, strict=True))
        loss, means, changes = 0.0, 0.0, [] if logged and first and config.recurrence != 'none' else None
        for i, micro_batch in enumerate(micro_batches):
            x, y, mask = to_device(micro_batch, device)
            last = i == config.accumulation - 1
            with contextlib.nullcontext() if last or world == 1 else model.no_sync(), autocast():
                part, part_means = model(x, y, schedule, mask, counts, changes=None if i else changes)
                # Counts are those of the whole update; DDP averages what is to be summed. A loss that is not finite makes all
                # gradients so, in every process, whatever its own derivative is.
                part.backward(world + 0 * part.detach())
            loss, means = loss + part.detach(), means + part_means
        if config.debug_nan:  # before clipping, which spreads what is not finite
            for name, p in raw.named_parameters():
                if p.grad is not None and not p.grad.isfinite().all():
                    raise fail(f'the gradient of {name} in update {done} is not finite, though every output is.', 3)
        norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), config.grad_clip or math.inf)
        recent.append(~norm.isfinite() | empty)
        update(optimizers, recent[-1])
        bar.update()

        if os.getppid() != parent and world > 1:  # torchrun was killed, and nobody would end this process any more
            signals.stop = signal.SIGTERM
        if world == 1:
            interrupted, asked = signals.stop, signals.save
        elif logged or done % 20 == 0:  # all stop at one step, though the signal may have reached only some
            flags = torch.tensor([signals.stop, signals.save])
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            interrupted, asked = flags.tolist()
        due = evaluated or asked or (config.keep_every and done % config.keep_every == 0)
        due = due or (first and config.save_minutes and time.monotonic() - written_at >= 60 * config.save_minutes)
        if logged or interrupted or due:
            before = skipped
            for bad in torch.stack(recent).tolist():
                skipped, bad_row = skipped + bad, bad_row + 1 if bad else 0
                longest = max(longest, bad_row)
            recent.clear()
            if skipped > before:
                warn(
                    f'up to update {done}, {skipped - before} were skipped: they score nothing, or their loss or gradient '
                    f'is not finite.'
                )
            if longest >= config.max_bad_steps and (logged or interrupted):  # which all processes look at together
                bar.close()
                kept = f'{path} holds an earlier update' if os.path.exists(path) else 'there is no checkpoint yet'
                what = (
                    f'{longest} updates in a row, up to update {done}, score nothing, or their loss or gradient is not finite'
                )
                raise fail(f'{what}; {kept}. Lower learning_rate={config.learning_rate}, or see --debug_nan=True.', 3)
        if logged:
            values = torch.cat((loss[None], means))
            if world > 1:
                dist.all_reduce(values)
            loss, *means = (v if n else math.nan for v, n in zip(values.tolist(), [not empty, *counts], strict=True))
            tokens = (done - counted) * config.batch_size * T / (time.perf_counter() - since)
            since, counted = time.perf_counter(), done
            moved = [round(c.item(), 6) for c in changes or ()]
            line = {'step': done, 'loss': loss, 'passes': means, 'grad_norm': norm.item(), 'lr': rate, 'skipped': skipped}
            line |= {'tokens_per_s': round(tokens, 1)} | ({'changes': moved} if moved else {})
            apart = config.schedule == 'jacobi' and moved and moved[-1] > max(moved[0], 1e-3)
            growing = growing + 1 if apart else min(growing, 0)
            if growing == 5:
                growing = -math.inf  # once a run
                warn(
                    f'the passes do not settle: in 5 lines of the log in a row, up to update {done}, the last changed the span '
                    f'more than the first ({", ".join(f"{c:g}" for c in moved)}); lower recurrence_lr_scale or learning_rate.'
                )
            log(line)
            bar.set_postfix(loss=f'{loss:.4f}', refresh=False)
            if first and bar.disable and time.monotonic() - said_at >= 60:  # a file has no bar; a line a minute shows life
                said_at = time.monotonic()
                print(f'update {done:>6}  loss {loss:.4f}, {tokens:,.0f} tokens a second', flush=True)
        if first and (final or interrupted or (due and not bad_row)):
            if not save(done) and (final or interrupted):
                raise fail(f'{path} could not be written with update {done}, the last; make space and --init_from=auto.')
            if asked and written == done:
                bar.write(f'{path} holds step {done}, as SIGUSR1 asked', file=sys.stderr)
        if asked and not bad_row:
            signals.save = asked = False
        if interrupted:
            break
        if evaluated:
            found = {'training schedule': evaluate(raw, data, config, schedule, config.eval_batches, **shared)}
            if config.eval_exact_batches and config.recurrence != 'none':
                found['exact'] = evaluate(raw, data, one_micro_batch, SEQUENTIAL, config.eval_exact_batches, **shared)
            if (reached := found['training schedule'].get('loss', math.inf)) < best:
                best = reached
                if first and config.keep_best and written == done:
                    with surviving('best.pt'):
                        keep(path, os.path.join(config.out_dir, 'best.pt'))
            log({'step': done, 'val': found['training schedule'], 'val_exact': found.get('exact')})
            if first:
                shown = {name: ', '.join(f'{k} {v:.4f}' for k, v in f.items()) for name, f in found.items()}
                line = ' | '.join(f'{name}: {means or "nothing is scored"}' for name, means in shown.items())
                bar.write(f'update {done:>6}  validation, {line}')
            since, counted = time.perf_counter(), done
    bar.close()
    tracker.finish()
    if world > 1:
        del model  # were its reducer the last to hold the process group, freeing it could wait for itself
        dist.destroy_process_group()
    if interrupted:
        if first:
            print(f'interrupted; {path} holds update {done}: the same command with --init_from=resume goes on', file=sys.stderr)
        raise SystemExit(128 + interrupted)


if __name__ == '__main__':
    with reporting_to_torchrun():
        main(sys.argv[1:])
