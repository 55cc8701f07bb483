"""Decodes from a checkpoint: `python sample.py` takes the newest one under out/.

Every token costs one forward of one position: the state holds the keys and values of all layers and one memory vector per
sequence. A prompt is read token by token (--prefill=exact) or in parallel, by fixed-point passes (--prefill=jacobi). A model of
texts continues the prompt, or answers the question in it; one with a chat template answers it as a message; one of an aligned
task answers at every token of the prompt that asks. --ckpt=hf:FOLDER takes a pretrained folder, --export=FOLDER makes one.
Prompts are UTF-8 in any locale, from an argument, a file or the standard input (support/texts.py).
"""

import codecs
import json
import math
import os
import sys
from dataclasses import dataclass

if 'OMP_WAIT_POLICY' not in os.environ:  # read when torch is loaded: a waiting thread soon leaves its core to others
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')

import torch
from tqdm import tqdm

from configurator import ConfigError, key, parse, reporting
from schedule import SEQUENTIAL, Schedule
from support.chat import chat_tokens
from support.loading import DTYPES, computing, find_checkpoint, load
from support.pretrained import export
from support.processes import check_compiler, use_device
from support.prompts import encode_prompts, find_questions, is_aligned, print_answers, prompt_recurs
from support.texts import argument_text, as_text, binary
from support.tokens import decode, encode

SHORT = 16  # tokens; reading so few one by one takes no more passes than sweeps do to converge


@dataclass
class SampleConfig:
    ckpt: str = key('', 'checkpoint, or the folder of a ckpt.pt, or hf:FOLDER (pretrained); empty takes the newest under out/')
    prompt: str = key('', 'text to continue; with a chat template, the message to answer')
    chat: bool = key(True, 'a model with a chat template answers messages; False continues texts with it')
    prompt_file: str = key('', 'read the prompt from this file; - is the standard input')
    prompt_lines: bool = key(False, 'prompt_file holds one prompt per line; all are continued at once')
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
    jacobi_tol: float = key(1e-4, 'jacobi: ends at a smaller relative change, or at rounding; 0 is exact', bounds=(0, math.inf))
    overflow: str = key('stop', 'at the end of the context stop, or continue from its second half', ('stop', 'slide'))
    interactive: bool = key(False, 'read a line, continue it, read the next; the state stays between turns')
    compile: bool = key(False, 'compile the forward of a token (on CUDA with CUDA graphs); pays off over many tokens')
    json: bool = key(False, 'print one JSON object per continuation, with the log-probability of each token')
    export: str = key('', 'decode nothing; write the model to this folder: for transformers if it has such a model, else ours')
    drop_recurrence: bool = key(False, 'export: leave out what the recurrence added')
    overwrite: bool = key(False, 'export: replace an earlier export')
    dtype: str = key('auto', 'of the computation; auto is bfloat16 on CUDA', DTYPES)
    device: str = key('auto', 'cpu, cuda or mps; auto takes a GPU where there is one')
    threads: int = key(0, 'CPU threads; 0 leaves the default', bounds=(0, 1024))

    def check(self):
        if not 0 < self.top_p <= 1:
            why = 'it must be above 0 and at most 1, which is all tokens'
            raise ConfigError(f'top_p={self.top_p} is not possible: {why}; --temperature=0 takes the likeliest alone.')
        if self.prompt and self.prompt_file:
            raise ConfigError(f'both prompt and prompt_file={self.prompt_file} are given; keep one.')
        if self.prompt_lines and not self.prompt_file:
            raise ConfigError('prompt_lines=True needs prompt_file, the file with one prompt per line.')
        if (self.drop_recurrence or self.overwrite) and not self.export:
            raise ConfigError('drop_recurrence and overwrite belong to an export; name its folder with --export=FOLDER.')
        if self.interactive and (self.prompt or self.prompt_file or self.num_samples > 1 or self.json):
            raise ConfigError('interactive=True reads the keyboard and takes no prompt, prompt_file, num_samples or json.')

    def chats(self, meta):
        """Whether prompts are messages to a model of this meta.json."""
        return self.chat and 'chat_template' in meta


def sample_next_token(logits, config, generators):
    """The next token of each row: logits (B, vocab_size) -> (B, 1). Row i draws from generators[i] alone."""
    if config.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits, order = logits.double().sort(-1, descending=True)
    p = ((logits - logits[:, :1]) / config.temperature).softmax(-1)
    p[:, config.top_k or p.size(-1) :] = 0
    p[:, 1:][p.cumsum(-1)[:, :-1] >= config.top_p * p.sum(-1, keepdim=True)] = 0  # the token that crosses top_p stays
    p[p < config.min_p * p[:, :1]] = 0
    cumulative, last = p.cumsum(-1), ((p > 0).sum(-1, keepdim=True) - 1).clamp(0)
    drawn = torch.stack([torch.rand(1, dtype=p.dtype, generator=g) for g in generators])
    ranks = torch.searchsorted(cumulative, drawn.to(p.device) * cumulative[:, -1:], right=True)  # stays on the device
    return order.gather(-1, ranks.minimum(last))


def prefill(model, state, tokens, config, recurs=True):
    """Reads `tokens` (B, n) after `state`: the logits after the last one, (B, vocab_size), and the passes it took.
    recurs: whether they read the memory, which they write in any case; a mask (B, n) where only some do.

    `jacobi` iterates over a chunk of tokens at once, until the largest relative change of the span's output is below
    jacobi_tol, or no more than rounding makes, or, by the exact-prefix law, nothing can change any more; a tolerance of 0 is
    exact. A sweep goes through the chunk in three subsets, each of which reads what the one before has just written: about half
    the FLOPs of passes over all positions at once. Prelude and coda run once. At most SHORT tokens are read one by one.
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
    """Sequences that are decoded together: their tokens, and the state after those that have been read. The state is made once
    and never grows. Prompts may differ in length; each row is what it would be alone."""

    def __init__(self, model, config):
        self.model, self.config, self.size = model, config, model.config.block_size
        self.ended, self.state, self.logits, self.passes = [], None, None, 0
        self.rows = []  # of each sequence, pairs of a token and whether it reads the memory

    def read(self, new, recurs=True):
        """Reads `new`, a list of ids for each row (of equal length after the first call); leaves
        logits (rows, vocab_size). recurs: whether these tokens read the memory. A row that does not
        fit the context continues from its last half, which is read again into a fresh state."""
        self.rows, self.ended = self.rows or [[] for _ in new], self.ended or [False] * len(new)
        for row, more, ended in zip(self.rows, new, self.ended, strict=True):
            row += [] if ended else [(token, recurs) for token in more]  # an ended row is decoded too, without effect
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

    def repeat_rows(self, n):
        """Repeats each row n times, so that several samples share one prefill."""
        index = torch.arange(len(self.rows), device=self.logits.device).repeat_interleave(n)
        self.rows, self.ended = [list(self.rows[i]) for i in index.tolist()], [False] * len(index)
        self.logits, self.state = self.logits[index], self.state.repeat_rows(index)


def generate(decoder, config, push, generators=None):
    """Draws tokens until every row has ended, one forward of one position each.

    push(i, token, log-probability) takes a token of row i and says whether the row ends with it. A row whose context is full
    ends too, unless overflow=slide. Row i draws from generators[i]; without them, the samples of a prompt draw from seed,
    seed + 1, ... Returns the tokens drawn last, which have not been read. Each step copies one tensor from the device, for all
    rows. Raises ConfigError where a log-probability is not finite.
    """
    n = len(decoder.rows)
    generators = generators or [torch.Generator().manual_seed(config.seed + i % config.num_samples) for i in range(n)]
    drawn, decoder.ended = None, [False] * n
    for _ in range(config.max_tokens):
        if drawn is not None:
            decoder.read([[token] for token in drawn])
        token = sample_next_token(decoder.logits, config, generators)
        logprob = decoder.logits.double().log_softmax(-1).gather(-1, token)
        tokens, logprobs = torch.cat((token, logprob), -1).t().tolist()
        if not all(map(math.isfinite, logprobs)):
            raise ConfigError('the log-probabilities are not finite, because the weights are not; take an earlier checkpoint.')
        drawn = [int(token) for token in tokens]
        for i in range(n):
            full = config.overflow == 'stop' and len(decoder.rows[i]) == decoder.size
            decoder.ended[i] = decoder.ended[i] or push(i, drawn[i], logprobs[i]) or full
        if all(decoder.ended):
            break
    return drawn


class Text:
    """The text of one row as its tokens arrive: whole characters, and nothing that may yet turn out to be a stop text. With
    `echo` it is printed as it becomes certain, except for what `close` returns."""

    def __init__(self, meta, stops, echo=False):
        self.meta, self.stops, self.echo = meta, [stop for stop in stops if stop], echo
        self.utf8 = codecs.getincrementaldecoder('utf-8')('replace')  # a character may span several tokens
        self.tokens, self.logprobs, self.text, self.shown, self.finish = [], [], '', 0, None

    def push(self, token, logprob):
        """Takes a token; returns whether it ends the row."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in (self.meta['document_token'], self.meta.get('stop_token')):
            self.finish = 'stop'
            return True
        before = len(self.text)
        self.text += self.utf8.decode(decode(self.meta, [token]))
        starts = [self.text.find(stop, max(0, before - len(stop))) for stop in self.stops]
        if max(starts, default=-1) >= 0:
            self.text, self.finish = self.text[: min(at for at in starts if at >= 0)], 'stop'
        if self.echo:
            print(self.new(), end='', flush=True)
        return self.finish is not None

    def new(self):
        """The text that has become certain since the last call."""
        starts = (stop[:n] for stop in self.stops for n in range(1, len(stop)) if self.finish is None)
        held = max((len(start) for start in starts if self.text.endswith(start)), default=0)
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
    """Decodes after each of the prompts (ids), which are read with or without the memory (recurs); returns a Text each.
    done(text): whether a row ends with this text, as with one of the stops, which are left out of it."""
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


def chat_loop(model, meta, config):
    """Reads a line, continues it or, with a chat template, answers it; then the next, until the input ends. Only what is new is
    read into the state, unless the template changes what it rendered before: then all of it, into a fresh state."""
    if sys.stdin is None:
        raise ConfigError('interactive=True reads the standard input, which is closed.')
    decoder, messages, unread = Decoder(model, config), [], [meta['document_token']]
    generators, lines = [torch.Generator().manual_seed(config.seed)], binary(sys.stdin)
    while True:
        # 1. The next line.
        print('> ', end='', file=sys.stderr, flush=True)
        if not (line := as_text(lines.readline(), 'surrogateescape')):
            return
        # 2. The tokens that the state has not read.
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
        # 3. The answer, printed as it comes.
        text = Text(meta, argument_text(config.stop).split('|'), echo=True)
        decoder.ended = [False]  # a row that a turn has ended continues in the next
        decoder.read([new], prompt_recurs(meta))
        unread = generate(decoder, config, lambda _, *drawn, text=text: text.push(*drawn), generators)
        print(text.close('length' if len(text.tokens) == config.max_tokens else 'context'), flush=True)
        if text.finish == 'context':
            print(f'stopped at the end of the context, {decoder.size} tokens; --overflow=slide continues', file=sys.stderr)
        messages.append({'role': 'assistant', 'content': text.text})


@torch.inference_mode()
def sample(config):
    """Loads the model of a command; exports it, or decodes and prints."""
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(encoding='utf-8', errors='replace')  # in any locale
    device = use_device(config)
    if config.compile:
        check_compiler(device)
    path = find_checkpoint(config.ckpt)
    torch.set_float32_matmul_precision('high')
    model, checkpoint = load(path, device, config.dtype, config.chat)
    meta, known = checkpoint['meta'], model.config.vocab_size
    if meta['vocab_size'] > known:
        raise ConfigError(f'{path} knows {known} ids, but its tokenizer has {meta["vocab_size"]} tokens: another tokenizer.')
    if config.export:
        return export(model, meta, config)
    with computing(model, config.dtype):
        decode_prompts(model, meta, f'{path}, step {checkpoint["step"]}', config)


def decode_prompts(model, meta, title, config):
    """Reads the prompts of a command, decodes and prints."""
    # 1. The prompts as tokens. Mistakes are refused before anything is decoded.
    prompts, texts = zip(*encode_prompts(meta, config), strict=True)
    for prompt in prompts if is_aligned(meta) else ():
        find_questions(meta, prompt)
    longest, size = max(map(len, prompts)), model.config.block_size
    if longest > size and config.overflow == 'stop':
        raise ConfigError(f'the prompt has {longest} tokens, more than the context of {size}; shorten it or --overflow=slide.')
    if config.compile:
        model.compile_token()
    print(title, file=sys.stderr)

    # 2. Models and modes that decode no prompts.
    if is_aligned(meta):
        for prompt in prompts:
            print_answers(model, meta, prompt)
        return
    if config.interactive:
        return chat_loop(model, meta, config)

    # 3. Prefill, once for all samples of a prompt.
    decoder, n = Decoder(model, config), config.num_samples
    decoder.read(prompts, prompt_recurs(meta))
    if model.config.recurrence != 'none':
        print(f'read {longest} tokens in {decoder.passes} passes', file=sys.stderr)
    decoder.repeat_rows(n)

    # 4. Decoding. A single continuation is printed as it comes.
    streamed = len(decoder.rows) == 1 and not config.json
    rows = [Text(meta, argument_text(config.stop).split('|'), echo=streamed) for _ in decoder.rows]
    with tqdm(total=config.max_tokens, unit='token', disable=streamed or None, leave=False) as bar:

        def push(i, *drawn):
            bar.update(i == 0)
            if streamed and not rows[i].tokens:
                print(texts[0], end='', flush=True)
            return rows[i].push(*drawn)

        generate(decoder, config, push)

    # 5. Printing.
    for i, row in enumerate(rows):
        rest = row.close('length' if len(row.tokens) == config.max_tokens else 'context')
        text, seed = texts[i // n], config.seed + i % n
        if config.json:
            line = {'prompt': text, 'text': row.text, 'finish': row.finish, 'seed': seed}
            print(json.dumps(line | {'tokens': row.tokens, 'logprobs': row.logprobs}))
        elif streamed:
            print(rest)
        else:
            name = f'sample {i % n + 1}' if len(texts) == 1 else f'prompt {i // n + 1}'
            print(f'--- {name}, seed {seed}\n{text}{row.text}')
    if any(row.finish == 'context' for row in rows):
        print(f'stopped at the end of the context, {size} tokens', file=sys.stderr)


def main(argv):
    config = parse(SampleConfig, argv, 'python sample.py [--key=value ...]')
    with reporting():
        sample(config)


if __name__ == '__main__':
    main(sys.argv[1:])
