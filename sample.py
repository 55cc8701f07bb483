"""Decodes from a checkpoint: `python sample.py` takes the newest one under out/.

Every token costs one forward of one position: the state holds the keys and values of all layers and one memory vector a
sequence. A text model continues the prompt; a model of an aligned task answers at every token of the prompt.
"""

import codecs
import copy
import glob
import os
import sys
from dataclasses import dataclass, fields

import torch
from tqdm import tqdm

from configurator import ConfigError, key, parse, reporting
from model import SEQUENTIAL, GPTConfig, build
from prepare_data import decode, encode
from train import load_weights, pick_device, read_checkpoint


@dataclass
class SampleConfig:
    ckpt: str = key('', 'checkpoint, or the folder that holds ckpt.pt; empty takes the newest under out/')
    prompt: str = key('', 'text to continue')
    prompt_file: str = key('', 'read the prompt from this file; - is the standard input')
    num_samples: int = key(1, 'continuations of the prompt, decoded together')
    max_tokens: int = key(256, 'tokens to add at most; the end of the context or of the document stops earlier')
    temperature: float = key(0.8, 'below 1 favours likely tokens; 0 always takes the likeliest')
    top_k: int = key(0, 'sample among the k likeliest tokens; 0 is all')
    top_p: float = key(1.0, 'sample among the likeliest tokens that together reach this probability')
    seed: int = key(1337, 'sample i is drawn with seed + i, whatever is decoded beside it')
    device: str = key('auto', 'cpu, cuda, mps; auto takes the first that is there, from the right')
    threads: int = key(0, 'CPU threads; 0 leaves the default')

    def check(self):
        for name, low in (('num_samples', 1), ('max_tokens', 1), ('temperature', 0), ('top_k', 0), ('seed', 0), ('threads', 0)):
            if getattr(self, name) < low:
                raise ConfigError(f'{name}={getattr(self, name)} must be at least {low}.')
        if self.seed >= 2**62 or self.num_samples > 10**6 or self.threads > 1024:
            raise ConfigError(f'seed={self.seed}, num_samples={self.num_samples} or threads={self.threads} is too large.')
        if not 0 < self.top_p <= 1:
            raise ConfigError(f'top_p={self.top_p} must be above 0 and at most 1.')
        if self.prompt and self.prompt_file:
            raise ConfigError(f'both prompt and prompt_file={self.prompt_file} are given; keep one.')


def find_checkpoint(path, root='out'):
    """The file that `path` means: itself, the ckpt.pt inside it, or the newest below `root` when it is empty."""
    if path:
        return os.path.join(path, 'ckpt.pt') if os.path.isdir(path) else path
    found = glob.glob(os.path.join(glob.escape(root), '**', 'ckpt.pt'), recursive=True)
    if not found:
        raise ConfigError(f'there is no checkpoint under {root}/; train a model first, or name one with --ckpt=PATH.')
    return max(found, key=os.path.getmtime)


def load_model(path, device='cpu'):
    """(model in evaluation mode, checkpoint without its weights) from a checkpoint file; raises ConfigError."""
    checkpoint = read_checkpoint(path)
    model = build(GPTConfig(**{f.name: checkpoint['config'][f.name] for f in fields(GPTConfig)}))
    load_weights(model, checkpoint)
    del checkpoint['model'], checkpoint['optimizers']
    dtype = torch.float64 if checkpoint['config']['dtype'] == 'float64' else torch.float32
    return model.to(device, dtype).eval(), checkpoint


def choose(logits, config, generators):
    """The next token of each row: logits (B, vocab_size) -> (B, 1). Row i draws from generators[i] alone."""
    if config.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits, order = logits.double().sort(-1, descending=True)
    p = ((logits - logits[:, :1]) / config.temperature).softmax(-1)
    p[:, config.top_k or p.size(-1) :] = 0
    p[:, 1:][p.cumsum(-1)[:, :-1] >= config.top_p * p.sum(-1, keepdim=True)] = 0  # the token that crosses top_p stays
    drawn = torch.stack([torch.multinomial(row, 1, generator=g) for row, g in zip(p.cpu(), generators, strict=True)])
    return order.gather(-1, drawn.to(order.device))


def repeat_state(state, n):
    """The state of one sequence as that of n equal ones, so that several samples share one prefill."""
    wide = copy.copy(state)
    wide.kv = [tuple(t.repeat(n, 1, 1, 1) for t in kv) for kv in state.kv]
    lstm = isinstance(state.memory, tuple)
    wide.memory = tuple(s.repeat(1, n, 1) for s in state.memory) if lstm else state.memory.repeat(n, 1, 1)
    wide.start, wide.first = state.start.repeat(n), state.first.repeat(n)
    return wide


def generate(model, prompt, config, stop_token=-1):
    """Yields the tokens of each step, (num_samples,), after `prompt` (a list of at least one token).

    A row that has drawn stop_token yields it ever after; the last step is the one at which all have, or the context ends.
    """
    device = model.embed.weight.device
    state = model.new_state(1)
    logits = model(torch.tensor([prompt], device=device), schedule=SEQUENTIAL, state=state)[:, -1]
    state, logits = repeat_state(state, config.num_samples), logits.repeat(config.num_samples, 1)
    generators = [torch.Generator().manual_seed(config.seed + i) for i in range(config.num_samples)]
    ended = torch.zeros(config.num_samples, 1, dtype=torch.bool, device=device)
    token = None
    for _ in range(min(config.max_tokens, model.config.block_size - len(prompt) + 1)):
        if not logits.isfinite().all():
            raise ConfigError('the model gives no numbers (its weights are not finite); take an earlier checkpoint.')
        if token is not None:
            logits = model(token.clamp(min=0), schedule=SEQUENTIAL, state=state)[:, -1]
        token = choose(logits, config, generators).masked_fill(ended, stop_token)
        ended |= token == stop_token
        yield token.flatten().tolist()
        if ended.all():
            return


def answer(model, meta, prompt):
    """Prints, for a model of an aligned task, what it predicts at each token of `prompt`."""
    tokens = torch.tensor([prompt], device=model.embed.weight.device)
    recurs = None
    if not meta['settings']['recur_on_prompt']:
        recurs = (tokens == meta['names'].index('|')).cumsum(1) > 0
    state = model.new_state(1)
    logits = model(tokens, schedule=SEQUENTIAL, recur_mask=recurs, state=state)
    for token, predicted in zip(prompt, logits[0].argmax(-1).tolist(), strict=True):
        print(f'{meta["names"][token]:>8} -> {meta["names"][predicted]}')


@torch.inference_mode()
def sample(config):
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='replace')  # whatever the terminal cannot show
    if config.threads:
        torch.set_num_threads(config.threads)
    path = find_checkpoint(config.ckpt)
    model, checkpoint = load_model(path, pick_device(config.device))
    meta = checkpoint['meta']
    text = config.prompt
    if config.prompt_file:
        try:
            if config.prompt_file == '-' and sys.stdin is None:
                raise OSError('the standard input is closed')
            text = sys.stdin.read() if config.prompt_file == '-' else open(config.prompt_file, encoding='utf-8').read()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f'prompt_file={config.prompt_file} cannot be read: {e}.') from None
    prompt = encode(meta, text)
    if meta['kind'] == 'text':
        prompt = [meta['document_token'], *prompt]
    if not prompt:
        raise ConfigError(f'prompt is empty; give tokens of the task, for example --prompt="{" ".join(meta["names"][-3:])}".')
    if len(prompt) > model.config.block_size:
        raise ConfigError(
            f'the prompt has {len(prompt)} tokens, more than the context of {model.config.block_size}; shorten it.'
        )
    print(f'{path}, update {checkpoint["step"]}', file=sys.stderr)
    if meta['kind'] == 'task':
        return answer(model, meta, prompt)
    stop = meta['document_token']
    streams = generate(model, prompt, config, stop)
    if config.num_samples == 1:
        characters = codecs.getincrementaldecoder('utf-8')('replace')  # a character may span several tokens
        print(text, end='', flush=True)
        tokens = 0
        for (token,) in streams:
            tokens += 1
            print(characters.decode(decode(meta, [token])), end='', flush=True)
        print(characters.decode(b'', final=True))
        if tokens < config.max_tokens and token != stop:
            print(f'stopped at the end of the context, {model.config.block_size} tokens', file=sys.stderr)
        return
    rows = list(zip(*tqdm(streams, total=config.max_tokens, unit='token', disable=None), strict=True))
    for i, row in enumerate(rows):
        print(f'--- sample {i + 1}, seed {config.seed + i}\n{text}{decode(meta, row).decode("utf-8", "replace")}')


def main(argv):
    config = parse(SampleConfig, argv, 'python sample.py [--key=value ...]')
    with reporting():
        sample(config)


if __name__ == '__main__':
    main(sys.argv[1:])
