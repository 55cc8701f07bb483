"""Trains a model: `python train.py config/x.py --key=value`, or the same after `torchrun --nproc_per_node=N`.

Reads a dataset made by prepare_data.py, writes out_dir/ckpt.pt (newest state) and out_dir/log.jsonl (a line per interval).
Batches are a pure function of (seed, step, sample), so a resumed run and a run on more processes see the same data.
"""

import contextlib
import math
import os
import random
import signal
import sys
from dataclasses import dataclass, fields, replace

if __name__ == '__main__':  # the imports below take seconds, and Ctrl-C there would print a traceback

    def leave(*_):
        if os.environ.get('RANK', '0') == '0':
            os.write(2, b'error: interrupted\n')
        os._exit(130)

    signal.signal(signal.SIGINT, leave)  # until a run, which has something to save, sets its own

if 'OMP_WAIT_POLICY' not in os.environ:  # read when torch is loaded: a waiting thread soon leaves its core to others
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')

import torch
import torch.distributed as dist
from tqdm import tqdm

from configurator import ConfigError, fail, key, parse, reporting
from model import GPTConfig, build
from schedule import Schedule
from support.accounting import check_memory, dry_run
from support.buffers import as_slice
from support.checkpoint import (
    Checkpoints,
    changed_settings,
    check_same_tokens,
    check_same_vocabulary,
    load_optimizers,
    load_weights,
    read_checkpoint,
)
from support.data import DOCUMENT, Dataset, to_device
from support.flex import choose_flex
from support.log import DivergenceWarning, Log, Progress, announce
from support.nan_hooks import check_gradients, install_nan_hooks
from support.optimizers import SkippedSteps, freeze_base, make_optimizers, step_optimizers
from support.pretrained import load_pretrained, pretrained_folder, take_pretrained_settings
from support.processes import Process, Signals, check_compiler, check_processes_agree, locked, reporting_to_torchrun, warn
from support.sharding import check_batch, clip_gradients, distribute, end_backward, shard, without_sync
from support.validation import validate

EXIT_CODES = (
    'Exit codes: 0 finished; 2 a mistake in the settings, or no space for the last checkpoint; 3 the loss or gradient is not\n'
    'finite any more; 4 another process of the run has ended; 128 + the number of SIGINT, SIGTERM, SIGHUP or SIGUSR2,\n'
    'with the state saved. SIGUSR1 saves the state, and the run continues.'
)

FROM_0, FROM_1, ANY = (0, 2**31 - 1), (1, 2**31 - 1), (0, math.inf)  # bounds of counts, and of what is no count


@dataclass
class TrainConfig(Schedule, GPTConfig):
    """Every setting of a training run. model.py declares those of the model, schedule.py those of the schedule."""

    d_forward_start: int = key(
        -1, 'jacobi: d_forward at the first step, growing to d_forward; -1: all at once', bounds=(-1, math.inf)
    )
    d_forward_steps: int = key(0, 'jacobi: step at which a growing d_forward has reached its full value', bounds=FROM_0)

    data_dir: str = key('data/stdlib', 'dataset made by prepare_data.py', heading='Data')
    reset_token: int = key(
        DOCUMENT,
        'where the memory read is 0: at the documents of a text or of packed examples, nowhere, or at this token of the data',
        bounds=(0, 10**7),
        names={'document': DOCUMENT, 'none': -1},
    )
    document_rows: bool = key(False, 'each training sequence of a text starts at a document, whose token is reset_token')
    batch_size: int = key(32, 'sequences per step, over all processes and micro-batches', bounds=FROM_1)
    device_batch_size: int = key(
        0, 'sequences that one process runs at a time: larger shares of the batch take micro-batches; 0: all', bounds=FROM_0
    )
    seed: int = key(1337, 'seed of the weights and of the order of the data', bounds=(0, 2**63 - 1))

    init_from: str = key(
        'scratch',
        'scratch, resume (out_dir holds a checkpoint), auto (either), hf:FOLDER or hf:NAME (pretrained, or auto)',
        heading='Model start',
    )
    freeze_base: bool = key(False, 'train only the parameters that the recurrence adds')

    optimizer: str = key('adamw', 'adamw, or muon for matrices and adamw for the rest', ('adamw', 'muon'), heading='Optimiser')
    max_steps: int = key(2000, 'steps of the whole run', bounds=FROM_1)
    weight_decay: float = key(0.1, 'decay of the matrices; embeddings, head, gates, biases, scalars have none', bounds=ANY)
    beta1: float = key(0.9, 'AdamW: decay of the first moment', bounds=(0, 0.999999999))
    beta2: float = key(0.95, 'AdamW: decay of the second moment', bounds=(0, 0.999999999))
    grad_clip: float = key(1.0, 'largest norm of the gradient; 0 switches clipping off', bounds=ANY)
    max_bad_steps: int = key(
        10, 'steps in a row, skipped for a loss or gradient that is not finite, that end the run', bounds=FROM_1
    )
    debug_nan: bool = key(False, 'end at the first module and pass whose output is not finite, and name them; slow')

    learning_rate: float = key(1e-3, 'peak learning rate', bounds=ANY, heading='Learning rate')
    recurrence_lr_scale: float = key(1.0, 'multiplies the learning rate of the parameters that the recurrence adds', bounds=ANY)
    lr_schedule: str = key(
        'cosine',
        'after the warm-up: cosine, linear over the last warmdown_fraction, or constant',
        ('cosine', 'linear', 'constant'),
    )
    warmup_steps: int = key(100, 'steps of linear warm-up; a tenth of the run where it is longer than that', bounds=FROM_0)
    decay_steps: int = key(0, 'step at which the decay ends; 0 means max_steps', bounds=FROM_0)
    warmdown_fraction: float = key(0.4, 'lr_schedule=linear: share of the steps that decay', bounds=(0, 1))
    final_lr_fraction: float = key(0.1, 'learning rate at the end, as a fraction of the peak', bounds=ANY)

    eval_interval: int = key(250, 'steps between evaluations and checkpoints', bounds=FROM_1, heading='Evaluation')
    eval_batches: int = key(8, 'validation batches under the training schedule, each of batch_size sequences', bounds=FROM_1)
    eval_exact_batches: int = key(
        1, 'validation micro-batches of each process under the exact sequential recurrence; 0 skips it', bounds=FROM_0
    )

    out_dir: str = key('out/run', 'folder for ckpt.pt and log.jsonl', heading='Checkpoints')
    save_minutes: float = key(0.0, 'also a checkpoint when so many minutes have passed since the last; 0 never', bounds=ANY)
    keep_every: int = key(0, 'steps between checkpoints that are kept as ckpt-STEP.pt; 0 keeps none', bounds=FROM_0)
    keep_best: bool = key(False, 'keep the checkpoint of the lowest validation loss as best.pt')

    log_interval: int = key(10, 'steps between lines of log.jsonl', bounds=FROM_1, heading='Logging')
    wandb: str = key('off', 'log to Weights & Biases too; its project is $WANDB_PROJECT', ('off', 'online', 'offline'))
    dry_run: bool = key(False, 'print parameters, FLOPs and the peak memory of one process, allocate nothing, and stop')
    world_size: int = key(0, 'dry_run: processes of the run that it describes; 0: those that it runs under', bounds=FROM_0)
    device_memory: float = key(80.0, 'dry_run: GB of one device, the limit beside the peak', bounds=(1, math.inf))
    json: bool = key(False, 'with dry_run: also print one JSON object as the last line')

    device: str = key('auto', 'cpu, cuda or mps; auto takes a GPU where there is one', heading='Machine')
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
    shard: bool = key(False, 'each process holds a part of the weights, gradients and moments, for models larger than a GPU')
    threads: int = key(0, 'CPU threads of each process; 0 leaves the default', bounds=(0, 1024))

    @property
    def decay_end(self):
        """The step at which the learning rate has its last value."""
        return self.decay_steps or self.max_steps

    @property
    def warmup(self):
        """Steps of warm-up: warmup_steps, or a tenth of the run where they do not fit."""
        return self.warmup_steps if self.warmup_steps <= self.decay_end else max(1, self.decay_end // 10)

    @property
    def processes(self):
        """How many processes share the batch: those of this run, or of the one that a dry run describes."""
        return (self.dry_run and self.world_size) or int(os.environ.get('WORLD_SIZE', 1))

    @property
    def micro_batch(self):
        """Sequences that a process runs at a time."""
        share = self.batch_size // self.processes
        return min(self.device_batch_size or share, share)

    @property
    def accumulation(self):
        """Micro-batches per step in each process."""
        return self.batch_size // (self.processes * self.micro_batch)

    def check(self):
        """Raises ConfigError, one sentence, for what cannot be trained. With init_from=hf: the model is checked by
        `take_pretrained_settings`, which knows its shape."""
        if self.init_from not in ('scratch', 'resume', 'auto') and not self.init_from.startswith('hf:'):
            raise ConfigError(f'init_from={self.init_from} is not known; take scratch, resume, auto, hf:FOLDER or hf:NAME.')
        if not self.init_from.startswith('hf:'):
            self.check_model()
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
        if self.debug_nan and self.compile:
            raise ConfigError('debug_nan=True looks into every module, which compile=True fuses; switch one off.')
        if self.shard and self.architecture == 'lstm':
            raise ConfigError('shard=True cuts a transformer into its layers; architecture=lstm is trained whole.')
        check_batch(self.batch_size, self.device_batch_size, self.processes)

    def check_model(self):
        """Raises ConfigError for a model and schedule that cannot be, or that do not fit each other."""
        GPTConfig.check(self)
        Schedule.check(self)
        if self.recurrence == 'none' and self.schedule != 'parallel':
            raise ConfigError(f'schedule={self.schedule} needs a recurrence; with recurrence=none take schedule=parallel.')
        if self.scan and not self.has_direct_path:
            without = f'cache_residual={self.cache_residual}, residual_injection={self.residual_injection}'
            raise ConfigError(
                f'scan=True needs a memory that residual connections carry; {self.recurrence} with {without} has none.'
            )
        if self.pass_weights and self.recurrence != 'lrt':
            raise ConfigError(
                f'pass_weights={self.pass_weights} weighs the passes of LRT, not of recurrence={self.recurrence}.'
            )
        if self.activation_checkpointing and self.architecture == 'lstm':
            raise ConfigError('activation_checkpointing=True recomputes transformer layers; architecture=lstm has none.')
        if self.freeze_base and self.recurrence == 'none':
            raise ConfigError('freeze_base=True with recurrence=none leaves nothing to train.')
        if self.freeze_base and self.initial and len(self.with_passes(self.numbers[0]).passes(2)) == 1:
            without = f'schedule={self.schedule}, d_forward={self.d_forward}, min_passes={self.min_passes}'
            raise ConfigError(f'freeze_base=True needs passes that read the memory, not {without}; take jacobi with 1 or more.')


def saved_settings(checkpoint):
    """The settings of the run that wrote a checkpoint, as a dict; a key that came later has its default."""
    return {f.name: checkpoint['config'].get(f.name, f.default) for f in fields(TrainConfig)}


def learning_rate(config, step):
    """The rate of `step`, counted from 0: linear warm-up that ends at the peak, then the decay, then its last value."""
    peak, warmup, end = config.learning_rate, config.warmup, config.decay_end
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_schedule == 'constant':
        return peak
    start = warmup if config.lr_schedule == 'cosine' else max(warmup, round(end * (1 - config.warmdown_fraction)))
    done = min(max((step + 1 - start) / (end - start), 0.0), 1.0) if end > start else 0.0
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.lr_schedule == 'cosine' else 1 - done
    return peak * (config.final_lr_fraction + (1 - config.final_lr_fraction) * left)


def full_schedule(config, step):
    """The schedule of `step`, counted from 0, with all its passes: the config's, unless its d_forward is still growing."""
    if config.d_forward_start < 0 or step >= config.d_forward_steps:
        return config
    grown = config.d_forward_start + (config.d_forward - config.d_forward_start) * step // config.d_forward_steps
    d_backward, min_passes = min(config.d_backward, grown + 1), min(config.min_passes, grown)
    return replace(config, d_forward=grown, d_backward=d_backward, min_passes=min_passes)


def schedule_at(config, step):
    """The schedule that `step` runs: where min_passes says so, with a number of passes drawn by (seed, step)."""
    schedule = full_schedule(config, step)
    return schedule.with_passes(random.Random(f'{config.seed} {step}').choice(schedule.numbers))


def main(argv):
    config = parse(TrainConfig, argv, f'python train.py [config/NAME.py] [--key=value ...], or after torchrun\n\n{EXIT_CODES}')
    with reporting():
        return dry_run(config) if config.dry_run else train(config)


def train(config):
    """A whole run. Raises ConfigError when it cannot start."""
    with contextlib.ExitStack() as resources:
        try:
            run(config, resources)
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


def run(config, resources):
    """One run, from its set-up to its last step. resources: an ExitStack, closed at the end, whatever the end is."""
    # 1. Set-up: what may fail comes first, before anything is written.
    process = Process(config)
    data = open_data(config, process)
    checkpoint, changed = open_run(config, data, process, resources)
    start, T = checkpoint['step'], data.length('train', config.block_size)
    process.connect()
    if process.world > 1:
        check_processes_agree(config, data, start)
    raw, optimizers = start_model(config, process, T, checkpoint)
    model = distribute(raw, full_schedule(config, 0), process, T)
    signals = resources.enter_context(Signals())
    log = Log(config, process.first, start, checkpoint.get('wandb_id'))
    checkpoints = Checkpoints(config, process.first, checkpoint)
    skipped, best = SkippedSteps(*checkpoint.get('bad_steps', ())), min(checkpoint['best_loss'], log.best_loss)
    if process.first:
        announce(config, data, raw, process, start, changed)
    batches = resources.enter_context(contextlib.closing(data.training_batches(config, process, start)))
    progress, divergence = Progress(config, process.first, start), DivergenceWarning()

    for step in range(start, config.max_steps):
        done = step + 1
        final = done == config.max_steps
        evaluated = done % config.eval_interval == 0 or final
        logged = done % config.log_interval == 0 or evaluated

        # 2. One step: rate, forward and backward, clipping, optimisers.
        rate, schedule = learning_rate(config, step), schedule_at(config, step)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group['lr'] = rate * group['scale']
        scored, micro_batches = next(batches)
        counts = torch.tensor([scored[as_slice(p)].sum() for p in raw.scored_passes(schedule, T)])
        weights = schedule.weights(T) if raw.scores_every_pass else (1.0,)
        empty = not any(n and weight for n, weight in zip(counts.tolist(), weights, strict=True))
        changes = [] if logged and process.first and config.recurrence != 'none' else None
        loss, means = accumulate_gradients(model, schedule, micro_batches, counts, process, changes)
        if config.debug_nan:  # before clipping, which spreads what is not finite
            check_gradients(raw, done)
        norm = clip_gradients(raw, config.grad_clip or math.inf)
        skip = ~norm.isfinite() | empty
        skipped.add(skip)
        step_optimizers(optimizers, skip)
        progress.bar.update()

        # 3. What asks for a checkpoint or the end. Only here, and for the log, the host waits for the device.
        signals.poll(process, logged or done % 20 == 0)
        due = evaluated or signals.save or checkpoints.due(done)
        if logged or signals.stop or due:
            skipped.count(done)
            if skipped.longest >= config.max_bad_steps and (logged or signals.stop):  # which all processes look at together
                progress.bar.close()
                skipped.give_up(done, config.learning_rate, checkpoints.path)

        # 4. Log, save, evaluate.
        if logged:
            loss, *means = process.sum(torch.cat((loss[None], means))).tolist()
            means = [mean if n else math.nan for mean, n in zip(means, counts, strict=True)]
            line = {'step': done, 'loss': math.nan if empty else loss, 'passes': means, 'grad_norm': norm.item(), 'lr': rate}
            line |= {'skipped': skipped.total, 'tokens_per_s': round(progress.speed(done) * config.batch_size * T, 1)}
            if changes:
                line['changes'] = [round(change.item(), 6) for change in changes]
            if config.schedule == 'jacobi':
                divergence.add(done, line.get('changes'))
            log.write(line)
            progress.show(done, line['loss'], line['tokens_per_s'])
        if final or signals.stop or (due and not skipped.in_a_row):
            state = {'meta': data.meta, 'best_loss': best, 'bad_steps': (skipped.total, skipped.in_a_row)}
            written = checkpoints.save(done, raw, optimizers, **state, wandb_id=log.tracker.id)
            if not written and (final or signals.stop):
                raise fail(f'{checkpoints.path} could not be written with step {done}; make space and --init_from=auto.')
            if signals.save and written and process.first:
                progress.bar.write(f'{checkpoints.path} holds step {done}, as SIGUSR1 asked', file=sys.stderr)
        if signals.save and not skipped.in_a_row:
            signals.forget_save()
        if signals.stop:
            break
        if evaluated:
            results = validate(raw, data, config, full_schedule(config, step), process)
            if (new := results['training schedule'].get('loss', math.inf)) < best:
                best = new
                checkpoints.keep_best(done)
            log.write({'step': done, 'val': results['training schedule'], 'val_exact': results.get('exact')})
            progress.show_validation(done, results)

    # 5. The end.
    progress.bar.close()
    log.tracker.finish()
    if process.world > 1:
        del model  # were its reducer the last to hold the process group, freeing it could wait for itself
        dist.destroy_process_group()
    if signals.stop:
        if process.first:
            saved = f'{checkpoints.path} holds step {done}'
            print(f'interrupted; {saved}: the same command with --init_from=resume continues', file=sys.stderr)
        raise SystemExit(128 + signals.stop)


# Set-up


def open_data(config, process):
    """The dataset, after which no setting is open any more. Raises ConfigError for what cannot be trained on it here."""
    if config.attention == 'flex' and process.kind != 'cuda':
        raise ConfigError(f'attention=flex has no backward on {process.kind}; take attention=sdpa, or a CUDA device.')
    if config.compile:
        check_compiler(process.device)
    pretrained = config.init_from.startswith('hf:')
    if pretrained:
        take_pretrained_settings(config)
    data = Dataset(config.data_dir, 0 if pretrained else config.vocab_size)
    data.complete(config)
    config.check()
    if pretrained:
        config.check_model()
        check_same_vocabulary(pretrained_folder(config.init_from[3:]), data)
    return data


def open_run(config, data, process, resources):
    """Locks out_dir; returns the checkpoint to continue, or what stands for it at step 0, and the settings that changed since.
    Raises ConfigError where the settings, the data and what out_dir holds do not go together."""
    path = os.path.join(config.out_dir, 'ckpt.pt')
    exists = os.path.exists(path)
    if exists and config.init_from == 'scratch':
        raise ConfigError(f'{path} exists; continue it with --init_from=resume, or choose another --out_dir.')
    if process.first and (exists or config.init_from != 'resume'):  # before reading what another run might be about to write
        os.makedirs(config.out_dir, exist_ok=True)
        resources.enter_context(locked(config.out_dir))
    if config.init_from != 'resume' and not os.path.exists(path):
        return {'step': 0, 'best_loss': math.inf}, []
    checkpoint = read_checkpoint(path)
    settings = saved_settings(checkpoint)
    changed = changed_settings(settings, config)
    check_same_tokens(checkpoint, data)
    changed += [f'other data in {data.folder}'] if checkpoint['meta'] != data.meta else []
    if checkpoint['step'] > config.max_steps:
        raise ConfigError(f'max_steps={config.max_steps} is below step {checkpoint["step"]}, which {path} holds; raise it.')
    if settings['out_dir'] != config.out_dir:  # a copy of the checkpoint begins a run of its own
        checkpoint['wandb_id'] = None
    return checkpoint, changed


def start_model(config, process, T, checkpoint):
    """The model on its device and its optimisers, as they were at the checkpoint's step; those are taken out of it."""
    if process.kind == 'cpu':
        check_memory(config, T)
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision('high')
    model = build(config).to(process.device, torch.float64 if process.dtype == torch.float64 else torch.float32)
    model.activation_checkpointing = config.activation_checkpointing
    model.flex, problem = choose_flex(config, config, config.micro_batch, T, process.dtype, process.device)
    if problem:
        warn(problem)
    if config.init_from.startswith('hf:') and 'model' not in checkpoint:
        load_pretrained(model, config.init_from[3:])
    if config.freeze_base:
        freeze_base(model)
    if 'model' in checkpoint:
        load_weights(model, checkpoint)
    if config.shard and process.world > 1:
        shard(model, process)
    optimizers = make_optimizers(model, config, process.kind)
    if 'model' in checkpoint:
        load_optimizers(optimizers, checkpoint)
        del checkpoint['model'], checkpoint['optimizers']
    if config.compile:
        model.compile()
    if config.debug_nan:
        install_nan_hooks(model)
    return model, optimizers


# The loop


def accumulate_gradients(model, schedule, micro_batches, counts, process, changes):
    """Forward and backward of one step. Returns this process's part of the loss, and of the mean of each scored pass,
    (passes,), on the device. counts (passes,): scored positions of the whole step. changes: as for `GPT.forward`."""
    loss, means = 0.0, 0.0
    for i, micro_batch in enumerate(micro_batches):
        x, y, mask = to_device(micro_batch, process.device)
        last = i == len(micro_batches) - 1
        with contextlib.nullcontext() if last else without_sync(model), process.autocast():
            part, part_means = model(x, y, schedule, mask, counts, changes=None if i else changes)
            # Counts are those of the whole step; DDP averages what is to be summed. A loss that is not finite makes all
            # gradients so, in every process, whatever its own derivative is.
            part.backward(process.world + 0 * part.detach())
        loss, means = loss + part.detach(), means + part_means
    end_backward(model)
    return loss, means


if __name__ == '__main__':
    with reporting_to_torchrun():
        main(sys.argv[1:])
