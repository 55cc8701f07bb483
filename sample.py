"""Decodes from a checkpoint: `python sample.py` takes the newest one under out/.

Every token costs one forward of one position: the state holds the keys and values of all layers and one memory vector a
sequence. A prompt is read token by token (--prefill=exact) or in parallel, by fixed-point passes (--prefill=jacobi). A model of
texts continues the prompt, or answers the question in it; one with a chat template answers it as a message; one of an aligned
task answers at every token of the prompt that asks. --ckpt=hf:FOLDER decodes from a pretrained folder, --export=FOLDER makes
one.

Prompts are UTF-8 in any locale, from an argument, a file or the standard input: a line ends with `\\n` or `\\r\\n`, read as
`\\n`, and a byte-order mark at the start is no part of them (support/texts.py).
"""

import codecs
import contextlib
import glob
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # read when torch is loaded: waiting threads leave their core to others

import torch
from tqdm import tqdm

from configurator import ConfigError, key, parse, reporting
from model import (
    OURS,
    SEQUENTIAL,
    GPTConfig,
    Schedule,
    build,
    hub_config,
    hub_names,
    is_recurrence,
    load_pretrained,
    pretrained_config,
    pretrained_folder,
)
from prepare_data import chat_meta, chat_tokens, decode, encode, tokenizer_meta, work_folder
from support.processes import check_compiler
from support.texts import argument_text, as_text, binary, printable, split_lines
from support.tokens import ids_without_token
from train import load_weights, read_checkpoint, use_device

SHORT = 16  # tokens; reading so few one by one takes no more passes than sweeps do to converge


@dataclass
class SampleConfig:
    ckpt: str = key('', 'checkpoint, or the folder of a ckpt.pt, or hf:FOLDER (pretrained); empty takes the newest under out/')
    prompt: str = key('', 'text to continue; for a model with a chat template, the message to answer')
    chat: bool = key(True, 'a model with a chat template answers messages; False continues texts with it')
    prompt_file: str = key('', 'read the prompt from this file; - is the standard input')
    prompt_lines: bool = key(False, 'prompt_file holds one prompt a line; all are continued together')
    num_samples: int = key(1, 'continuations of each prompt; they share its prefill', bounds=(1, 10**6))
    max_tokens: int = key(256, 'tokens to add at most; the context or the document may end earlier', bounds=(1, math.inf))
    temperature: float = key(0.8, 'below 1 favours likely tokens; 0 always takes the likeliest', bounds=(0, math.inf))
    top_k: int = key(0, 'sample among the k likeliest tokens; 0 is all', bounds=(0, math.inf))
    top_p: float = key(1.0, 'above 0, at most 1: sample among the likeliest tokens that together reach this probability')
    min_p: float = key(0.0, 'sample among the tokens with at least this share of the likeliest one', bounds=(0, 1))
    stop: str = key('', 'end a continuation before this text; several are separated by |')
    seed: int = key(1337, 'sample i is drawn with seed + i, whatever is decoded beside it', bounds=(0, 2**62 - 1))
    prefill: str = key('jacobi', 'prompts by parallel passes unless they are short, or token by token', ('jacobi', 'exact'))
    prefill_chunk: int = key(256, 'jacobi: tokens solved together; longer prompts go chunk by chunk', bounds=(1, math.inf))
    jacobi_tol: float = key(
        1e-4, 'jacobi: passes end when the span moves by a smaller share, or as rounding does; 0 is exact', bounds=(0, math.inf)
    )
    overflow: str = key('stop', 'at the end of the context stop, or go on from its second half', ('stop', 'slide'))
    interactive: bool = key(False, 'read a line, continue it, read the next; the state stays between turns')
    compile: bool = key(False, 'compile the forward of a token (on CUDA with CUDA graphs); pays off over many tokens')
    json: bool = key(False, 'print one JSON object a continuation, with the log-probability of each token')
    export: str = key('', 'decode nothing; write the model to this folder: for transformers if it has such a model, else ours')
    drop_recurrence: bool = key(False, 'export: leave out what the recurrence added')
    overwrite: bool = key(False, 'export: replace an earlier export')
    dtype: str = key('auto', 'of the computation; auto is bfloat16 on CUDA', ('auto', 'float32', 'bfloat16', 'float64'))
    device: str = key('auto', 'cpu, cuda, mps; auto takes the first that is there, from the right')
    threads: int = key(0, 'CPU threads; 0 leaves the default', bounds=(0, 1024))

    def check(self):
        if not 0 < self.top_p <= 1:
            why = 'it must be above 0 and at most 1, which is all tokens'
            raise ConfigError(f'top_p={self.top_p} is not possible: {why}; --temperature=0 takes the likeliest alone.')
        if self.prompt and self.prompt_file:
            raise ConfigError(f'both prompt and prompt_file={self.prompt_file} are given; keep one.')
        if self.prompt_lines and not self.prompt_file:
            raise ConfigError('prompt_lines=True needs prompt_file, the file with one prompt a line.')
        if (self.drop_recurrence or self.overwrite) and not self.export:
            raise ConfigError('drop_recurrence and overwrite belong to an export; name its folder with --export=FOLDER.')
        if self.interactive and (self.prompt or self.prompt_file or self.num_samples > 1 or self.json):
            raise ConfigError('interactive=True reads the keyboard and takes no prompt, prompt_file, num_samples or json.')

    def chats(self, meta):
        """Whether prompts are messages to a model of this meta.json."""
        return self.chat and 'chat_template' in meta


def find_checkpoint(path, root='out'):
    """The file that `path` means: itself (or hf:FOLDER), the ckpt.pt inside it, or the newest below `root` when it is empty;
    raises ConfigError where there is none."""
    file = os.path.join(path, 'ckpt.pt') if os.path.isdir(path) else path
    if path.startswith('hf:') or os.path.isfile(file):
        return file
    found = glob.glob(os.path.join(glob.escape(root), '**', 'ckpt.pt'), recursive=True)
    found.sort(key=os.path.getmtime, reverse=True)
    if not found:
        where = f'{file}, nor any ' if file else ''
        raise ConfigError(f'there is no checkpoint {where}under {root}/; train a model first, or name one with --ckpt=PATH.')
    if file:
        newest = ', '.join(os.path.dirname(name) for name in found[:5])
        raise ConfigError(f'there is no checkpoint {file}; the newest under {root}/: {newest}.')
    return found[0]


def load_model(path, device='cpu', dtype='auto'):
    """(model in evaluation mode, checkpoint without its weights) from a checkpoint file; raises ConfigError.

    The weights are float64 if that is the dtype, or was in the training and dtype is auto; else float32, bfloat16 included.
    Ids that stand for no token under the checkpoint's tokenizer have no probability.
    """
    checkpoint = read_checkpoint(path)
    model = build(GPTConfig(**{f.name: checkpoint['config'][f.name] for f in fields(GPTConfig)}))
    load_weights(model, checkpoint)
    del checkpoint['model'], checkpoint['optimizers']
    return finish(model, checkpoint['meta'], device, checkpoint['config']['dtype'] if dtype == 'auto' else dtype), checkpoint


def load_folder(name, device='cpu', dtype='auto', chat=True):
    """As load_model, from a folder of pretrained weights, of the hub's format or one exported here; raises ConfigError.
    chat: whether a chat template that cannot be used is an error; else the folder is one without a template."""
    folder = pretrained_folder(name)
    model = build(GPTConfig(**pretrained_config(folder, 2048)))  # the whole context of some would take gigabytes of state
    load_pretrained(model, folder)
    path = os.path.join(folder, 'meta.json')
    try:
        meta = json.loads(Path(path).read_text(encoding='utf-8'))
    except FileNotFoundError:
        meta = {'kind': 'text'} | tokenizer_meta(folder)
        with contextlib.nullcontext() if chat else contextlib.suppress(ConfigError):
            meta |= chat_meta(folder, meta['tokenizer_json'])
    except ValueError as e:
        raise ConfigError(f'{path} cannot be read ({e}); export the model again.') from None
    return finish(model, meta, device, dtype), {'meta': meta, 'step': 0}


def finish(model, meta, device, dtype):
    """`model` with its weights as load_model has them, ready to evaluate."""
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


def export(model, meta, config):
    """Writes the folder config.export whole or not at all: config.json and model.safetensors, as the transformers library has
    them where it has such a model, else under our names and settings; the tokenizer; meta.json. Raises ConfigError."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigError('an export needs an extra; pip install safetensors.') from None
    out, settings = os.path.abspath(config.export), model.config
    weights = dict(model.named_parameters())
    if config.drop_recurrence:
        settings = replace(settings, recurrence='none')
        weights = {name: p for name, p in weights.items() if not is_recurrence(name)}
    about, end = hub_config(settings), meta.get('stop_token', meta.get('document_token', -1))
    renamed = hub_names(weights) if about else {}
    if about and 0 <= end < settings.vocab_size:
        about |= {'bos_token_id': meta['document_token'], 'eos_token_id': end}
    about = about or {'model_type': OURS, 'settings': asdict(settings)}
    files = {'config.json': json.dumps(about, indent=1), 'meta.json': json.dumps(meta)}
    if 'tokenizer_json' in meta:
        specials = {t['id']: t['content'] for t in json.loads(meta['tokenizer_json']).get('added_tokens', [])}
        named = {'tokenizer_class': 'PreTrainedTokenizerFast'} | meta.get('template_tokens', {})
        named |= {'eos_token': specials.get(end)} | {k: meta[k] for k in ('chat_template',) if k in meta}
        files |= {'tokenizer.json': meta['tokenizer_json'], 'tokenizer_config.json': json.dumps(named, indent=1)}
    if os.path.exists(out):
        there = set(os.listdir(out)) if os.path.isdir(out) else {''}
        if not config.overwrite or not there <= {*files, 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'}:
            raise ConfigError(f'export={out} exists; choose another folder, or --overwrite=True if it is an earlier export.')
    with work_folder(out) as work:
        new = os.path.join(work, 'new')
        os.mkdir(new)
        for name, text in files.items():
            Path(new, name).write_text(text, encoding='utf-8')
        tensors = {renamed.get(name, name): p.detach().cpu().contiguous() for name, p in weights.items()}
        try:
            save_file(tensors, os.path.join(new, 'model.safetensors'), {'format': 'pt'})
        except SafetensorError as e:
            raise ConfigError(f'export={out} cannot be written: {e}.') from None
        if os.path.exists(out):
            os.rename(out, os.path.join(work, 'old'))
        os.rename(new, out)
    whose = 'in our own format' if 'settings' in about else 'which transformers loads'
    print(f'wrote {out}, {len(tensors)} tensors, {whose}; train.py --init_from and sample.py --ckpt take hf:{config.export}')


def choose(logits, config, generators):
    """The next token of each row: logits (B, vocab_size) -> (B, 1). Row i draws from generators[i] alone."""
    if config.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits, order = logits.double().sort(-1, descending=True)
    p = ((logits - logits[:, :1]) / config.temperature).softmax(-1)
    p[:, config.top_k or p.size(-1) :] = 0
    p[:, 1:][p.cumsum(-1)[:, :-1] >= config.top_p * p.sum(-1, keepdim=True)] = 0  # the token that crosses top_p stays
    p[p < config.min_p * p[:, :1]] = 0
    reached, last = p.cumsum(-1), ((p > 0).sum(-1, keepdim=True) - 1).clamp(0)
    shares = torch.stack([torch.rand(1, dtype=p.dtype, generator=g) for g in generators]).to(p.device)  # nothing comes back
    drawn = torch.searchsorted(reached, shares * reached[:, -1:], right=True)
    return order.gather(-1, drawn.minimum(last))


def prefill(model, state, tokens, config, recurs=True):
    """Reads `tokens` (B, n) behind `state`: the logits after the last one, (B, vocab_size), and the passes it took.
    recurs: whether they read the memory, which they write in any case; a mask (B, n) where only some do.

    `jacobi` iterates over a chunk of tokens at once, until the largest relative change of the span's output is below
    jacobi_tol, or no more than rounding makes, or, by the exact-prefix law, nothing can change any more; a tolerance of 0 is
    exact. A sweep goes through the chunk in three subsets, each of which reads what the one before has just written: about half
    the operations of passes over all positions at once. Prelude and coda run once. At most SHORT tokens are read one by one.
    """
    recurrent, exact = model.config.recurrence != 'none', config.prefill == 'exact'
    if recurs is True and (tokens.size(1) == 1 or (recurrent and (exact or tokens.size(1) <= SHORT))):
        for token in tokens.t().clone(memory_format=torch.contiguous_format).unsqueeze(-1):  # one layout, hence one graph
            logits = model.token(token, state)
        return logits[:, -1], tokens.size(1)
    if not recurrent or recurs is False:
        return model(tokens, state=state, logits_from=-1)[:, -1], 1
    passes = 0
    for start in range(0, tokens.size(1), config.prefill_chunk):
        chunk, mask = (None if t is True else t[:, start : start + config.prefill_chunk] for t in (tokens, recurs))
        changes, n, schedule = [], chunk.size(1), SEQUENTIAL
        if not exact and n > SHORT:
            schedule = Schedule('interleaved', n_subsets=3, n_sweeps=math.ceil(n / 3), jacobi_tol=config.jacobi_tol)
        logits = model(chunk, schedule=schedule, recur_mask=mask, state=state, changes=changes, logits_from=-1)
        passes += n if schedule is SEQUENTIAL else 1 + len(changes)
    return logits[:, -1], passes


class Decoder:
    """Sequences that are decoded together: their tokens, and the state behind those that have been read.

    The state is made once and never grows. Rows may begin with prompts of different lengths; each is what it would be alone.
    """

    def __init__(self, model, config):
        self.model, self.config, self.size = model, config, model.config.block_size
        self.ended, self.state, self.logits, self.passes = [], None, None, 0
        self.rows = []  # of each sequence, its tokens and whether they read the memory, as pairs

    def read(self, new, recurs=True):
        """Reads `new`, a list of ids for each row (of one length, after the first time), and leaves logits (rows, vocab_size).
        recurs: whether these tokens read the memory.

        A row that does not fit the context goes on from its last half, which is read again into a fresh state.
        """
        self.rows, self.ended = self.rows or [[] for _ in new], self.ended or [False] * len(new)
        for row, more, ended in zip(self.rows, new, self.ended, strict=True):
            row += [] if ended else [(token, recurs) for token in more]  # an ended row runs along without effect
        device = self.model.embed.weight.device
        if self.state is None or max(map(len, self.rows)) > self.size:
            half = max(1, self.size // 2)
            self.rows = [row if len(row) <= self.size else row[-half:] for row in self.rows]
            longest = max(map(len, self.rows))
            start = torch.tensor([longest - len(row) for row in self.rows])
            self.state = self.model.new_state(len(new), start, self.size + int(start.max()))
            padded = torch.tensor([[(0, recurs)] * (longest - len(row)) + row for row in self.rows], device=device)
            tokens, reads = padded[..., 0], padded[..., 1].bool()
            recurs = recurs if (reads == recurs).all() else reads
        else:
            tokens = torch.tensor(new, device=device)
        self.logits, passes = prefill(self.model, self.state, tokens, self.config, recurs)
        self.passes += passes

    def widen(self, n):
        """Each row n times, so that several samples share one prefill."""
        of = torch.arange(len(self.rows), device=self.logits.device).repeat_interleave(n)
        self.rows, self.ended, self.logits = [list(self.rows[i]) for i in of.tolist()], self.ended * n, self.logits[of]
        old, lstm = self.state, isinstance(self.state.memory, tuple)
        memory = tuple(t[:, of] for t in old.memory) if lstm else old.memory[of]
        kv = [(k[of], v[of]) for k, v in old.kv]
        self.state = replace(old, kv=kv, memory=memory, start=old.start[of], first=old.first[of])


def generate(decoder, config, push, generators=None):
    """Draws tokens until every row has ended, one forward of one position each.

    push(i, token, log-probability) takes a token of row i and says whether the row ends with it. A row whose context is full
    ends too, unless overflow=slide. Row i draws from generators[i]; without them, the samples of a prompt from seed, seed + 1,
    ... Returns the tokens drawn last, which have not been read. A step brings one tensor from the device, for all rows. Raises
    ConfigError where the model gives no numbers.
    """
    n = len(decoder.rows)
    generators = generators or [torch.Generator().manual_seed(config.seed + i % config.num_samples) for i in range(n)]
    drawn, decoder.ended = None, [False] * n
    for _ in range(config.max_tokens):
        if drawn is not None:
            decoder.read([[token] for token in drawn])
        token = choose(decoder.logits, config, generators)
        likelihood = decoder.logits.double().log_softmax(-1).gather(-1, token)
        found = torch.cat((token, likelihood), -1).tolist()
        if not all(math.isfinite(value) for _, value in found):
            raise ConfigError('the model gives no numbers (its weights are not finite); take an earlier checkpoint.')
        drawn = [int(token) for token, _ in found]
        for i in range(n):
            full = config.overflow == 'stop' and len(decoder.rows[i]) == decoder.size
            decoder.ended[i] = decoder.ended[i] or push(i, drawn[i], found[i][1]) or full
        if all(decoder.ended):
            break
    return drawn


class Text:
    """The text of one row as its tokens arrive: whole characters, and nothing that may yet turn out to be a stop text. With
    `echo` it is printed as it becomes certain, but for what `close` returns."""

    def __init__(self, meta, stops, echo=False):
        self.meta, self.stops, self.echo = meta, [stop for stop in stops if stop], echo
        self.utf8 = codecs.getincrementaldecoder('utf-8')('replace')  # a character may span several tokens
        self.tokens, self.likelihoods, self.text, self.shown, self.finish = [], [], '', 0, None

    def push(self, token, likelihood):
        """Takes a token; returns whether it ends the row."""
        self.tokens.append(token)
        self.likelihoods.append(likelihood)
        if token in (self.meta['document_token'], self.meta.get('stop_token')):
            self.finish = 'stop'
            return True
        before = len(self.text)
        self.text += self.utf8.decode(decode(self.meta, [token]))
        found = [at for stop in self.stops if (at := self.text.find(stop, max(0, before - len(stop)))) >= 0]
        if found:
            self.text, self.finish = self.text[: min(found)], 'stop'
        if self.echo:
            print(self.new(), end='', flush=True)
        return bool(found)

    def new(self):
        """The text that has become certain since the last call."""
        begun = (stop[:n] for stop in self.stops for n in range(1, len(stop)) if self.finish is None)
        held = max((len(begin) for begin in begun if self.text.endswith(begin)), default=0)
        end = max(len(self.text) - held, self.shown)
        fresh, self.shown = self.text[self.shown : end], end
        return fresh

    def close(self, finish):
        """Ends the row; returns the rest of its text."""
        self.finish = self.finish or finish
        if self.finish != 'stop':
            self.text += self.utf8.decode(b'', final=True)
        return self.new()


def complete(model, meta, prompts, config, stops=(), recurs=True, done=lambda text: False):
    """What is decoded behind each of the prompts (ids), read with or without the memory (recurs), as a Text each. done(text):
    whether a row ends with this text, as with one of the stops, which it would leave out."""
    decoder, rows = Decoder(model, config), [Text(meta, stops) for _ in prompts]

    def push(i, *drawn):
        if not rows[i].push(*drawn) and done(rows[i].text):
            rows[i].finish = 'stop'
        return rows[i].finish is not None

    decoder.read(prompts, recurs)
    generate(decoder, config, push)
    for row in rows:
        row.close('length')
    return rows


def asking(meta, prompt):
    """Where a prompt (ids) of an aligned task asks: the positions of actions and slots after |. Raises ConfigError for none."""
    names, begun, found = meta['names'], False, []
    for i, token in enumerate(prompt):
        begun = begun or names[token] == '|'
        found += [i] if begun and names[token][0] in 'p_' else []
    if not found:
        example = f'{names[1]} v0 | {names[1]} _' if 'retrieval' in meta['scores'] else f'| {names[1]} {names[1]}'
        what = 'asks nothing, as no action follows |' if prompt else 'is empty'
        raise ConfigError(f'prompt {what}; give tokens of the task, for example --prompt="{example}".')
    return found


def answer(model, meta, prompt):
    """Prints, for a model of an aligned task, what it predicts where `prompt` asks, and how to read that."""
    tokens, names, places = torch.tensor([prompt], device=model.embed.weight.device), meta['names'], asking(meta, prompt)
    recurs = None if prompt_recurs(meta) else (tokens == names.index('|')).cumsum(1) > 0
    best = model(tokens, schedule=SEQUENTIAL, recur_mask=recurs)[0].argmax(-1).tolist()
    action = next((names[prompt[i]] for i in places if names[prompt[i]] != '_'), names[1])
    moves = ', '.join(f'{a} to {b}' for a, b in enumerate(action[1:]))
    values = f', at _ a value of the {meta["settings"]["retrieve_by"]}' if 'retrieval' in meta['scores'] else ''
    print(f'{action} moves {moves}. At an action the answer is the state, the action after the state before{values}.')
    for i in places:
        print(f'{names[prompt[i]]:>8} -> {names[best[i]]}')


def read_prompts(config):
    """The prompts as texts; raises ConfigError for a file that cannot be read."""
    if not config.prompt_file:
        return [argument_text(config.prompt)]
    try:
        if config.prompt_file == '-' and sys.stdin is None:
            raise OSError('the standard input is closed')
        text = as_text(binary(sys.stdin).read() if config.prompt_file == '-' else Path(config.prompt_file).read_bytes())
    except (OSError, UnicodeDecodeError) as e:
        said = getattr(e, 'strerror', None) or e  # the whole of an OSError repeats the name
        raise ConfigError(f'prompt_file={config.prompt_file} cannot be read: {said}.') from None
    prompts = split_lines(text) if config.prompt_lines else [text]
    if not prompts:
        raise ConfigError(f'prompt_file={config.prompt_file} holds no line, and prompt_lines=True takes one prompt from each.')
    return prompts


def prompt_recurs(meta):
    """Whether prompts read the memory, as in the training: where the data left that out, it is left out here."""
    return meta.get('settings', {}).get('recur_on_prompt', True)


def converse(model, meta, config):
    """Reads a line, continues it or, with a chat template, answers it; reads the next. Only what is new is read into the state,
    unless the template renders the longer conversation in another way: then all of it, into a fresh one. Ends with the input.
    """
    if sys.stdin is None:
        raise ConfigError('interactive=True reads the standard input, which is closed.')
    decoder, messages, unread = Decoder(model, config), [], [meta['document_token']]
    generators, typed = [torch.Generator().manual_seed(config.seed)], binary(sys.stdin)
    while True:
        print('> ', end='', file=sys.stderr, flush=True)
        if not (line := as_text(typed.readline(), 'surrogateescape')):
            return
        seen = [token for token, _ in decoder.rows[0]] if decoder.rows else []
        if config.chats(meta):
            messages.append({'role': 'user', 'content': line.removesuffix('\n')})
            whole = chat_tokens(meta, messages)
            if whole[: len(seen)] != seen or len(whole) == len(seen):
                decoder, seen = Decoder(model, config), []
            new = whole[len(seen) :]
        else:
            new = unread + encode(meta, line)
        if config.overflow == 'stop' and len(seen) + len(new) > decoder.size:
            raise ConfigError(f'the conversation is longer than the context of {decoder.size} tokens; take --overflow=slide.')
        text = Text(meta, argument_text(config.stop).split('|'), echo=True)
        decoder.ended = [False]  # a row that a turn has ended goes on in the next
        decoder.read([new], prompt_recurs(meta))
        unread = generate(decoder, config, lambda _, *drawn, text=text: text.push(*drawn), generators)
        print(text.close('length' if len(text.tokens) == config.max_tokens else 'context'), flush=True)
        if text.finish == 'context':
            print(f'stopped at the end of the context, {decoder.size} tokens; --overflow=slide goes on', file=sys.stderr)
        messages.append({'role': 'assistant', 'content': text.text})


@torch.inference_mode()
def sample(config):
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(encoding='utf-8', errors='replace')  # in any locale
    if config.compile:
        check_compiler(use_device(config))
    path = find_checkpoint(config.ckpt)
    torch.set_float32_matmul_precision('high')
    model, checkpoint = load(path, use_device(config), config.dtype, config.chat)
    meta = checkpoint['meta']
    if meta['vocab_size'] > model.config.vocab_size:
        known = model.config.vocab_size
        raise ConfigError(f'{path} was trained on {meta["vocab_size"]} tokens but knows {known}: another tokenizer.')
    if config.export:
        return export(model, meta, config)
    with computing(model, config.dtype):
        decode_prompts(model, checkpoint, path, config)


def decode_prompts(model, checkpoint, path, config):
    """Reads the prompts of a command, decodes and prints."""
    meta, size = checkpoint['meta'], model.config.block_size
    texts, chats = read_prompts(config), config.chats(meta) and not config.interactive  # there each line has its turn
    aligned = meta['kind'] == 'task' and meta.get('aligned', True)
    if chats:
        prompts = [chat_tokens(meta, [{'role': 'user', 'content': text}]) for text in texts]
        texts = [text + '\n' for text in texts]
    else:
        prompts = [([] if aligned else [meta['document_token']]) + encode(meta, text) for text in texts]
    texts = [printable(text) for text in texts]
    for prompt in prompts if aligned else ():
        asking(meta, prompt)
    longest = max(map(len, prompts))
    if longest > size and config.overflow == 'stop':
        raise ConfigError(f'the prompt has {longest} tokens, more than the context of {size}; shorten it or --overflow=slide.')
    if config.compile:
        model.compile_token()
    print(f'{path}, update {checkpoint["step"]}', file=sys.stderr)
    if aligned:
        for prompt in prompts:
            answer(model, meta, prompt)
        return
    if config.interactive:
        return converse(model, meta, config)
    decoder = Decoder(model, config)
    decoder.read(prompts, prompt_recurs(meta))
    if model.config.recurrence != 'none':
        print(f'read {longest} tokens in {decoder.passes} passes', file=sys.stderr)
    n = config.num_samples
    decoder.widen(n)
    streamed = len(decoder.rows) == 1 and not config.json
    rows = [Text(meta, argument_text(config.stop).split('|'), echo=streamed) for _ in decoder.rows]
    with tqdm(total=config.max_tokens, unit='token', disable=streamed or None, leave=False) as bar:

        def push(i, *drawn):
            bar.update(i == 0)
            if streamed and not rows[i].tokens:
                print(texts[0], end='', flush=True)
            return rows[i].push(*drawn)

        generate(decoder, config, push)
    for i, row in enumerate(rows):
        rest = row.close('length' if len(row.tokens) == config.max_tokens else 'context')
        text, seed = texts[i // n], config.seed + i % n
        if config.json:
            found = {'prompt': text, 'text': row.text, 'finish': row.finish, 'seed': seed}
            print(json.dumps(found | {'tokens': row.tokens, 'logprobs': row.likelihoods}))
        elif streamed:
            print(rest)
        else:
            title = f'--- sample {i % n + 1}, seed {seed}' if len(texts) == 1 else f'--- prompt {i // n + 1}, seed {seed}'
            print(f'{title}\n{text}{row.text}')
    if any(row.finish == 'context' for row in rows):
        print(f'stopped at the end of the context, {size} tokens', file=sys.stderr)


def main(argv):
    config = parse(SampleConfig, argv, 'python sample.py [--key=value ...]')
    with reporting():
        sample(config)


if __name__ == '__main__':
    main(sys.argv[1:])
