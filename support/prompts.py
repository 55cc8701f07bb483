"""Prompts: a text to continue, a message to a model with a chat template, or the tokens of an aligned task."""

import sys
from pathlib import Path

import torch

from configurator import ConfigError
from schedule import SEQUENTIAL
from support.chat import chat_tokens
from support.texts import argument_text, as_text, binary, printable
from support.tokens import encode


def read_prompts(config):
    """The prompts as texts; raises ConfigError for a file that cannot be read."""
    if not config.prompt_file:
        return [argument_text(config.prompt)]
    try:
        if config.prompt_file == '-' and sys.stdin is None:
            raise OSError('the standard input is closed')
        text = as_text(binary(sys.stdin).read() if config.prompt_file == '-' else Path(config.prompt_file).read_bytes())
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, 'strerror', None) or e  # the text of an OSError repeats the name
        raise ConfigError(f'prompt_file={config.prompt_file} cannot be read: {reason}.') from None
    if config.prompt_lines and not text:
        raise ConfigError(f'prompt_file={config.prompt_file} holds no line, and prompt_lines=True takes one prompt from each.')
    return text.removesuffix('\n').split('\n') if config.prompt_lines else [text]


def is_aligned(meta):
    """Whether the data of this meta.json is a task with an answer at each position, for which nothing is decoded."""
    return meta['kind'] == 'task' and meta.get('aligned', True)


def prompt_recurs(meta):
    """Whether prompts read the memory: they do unless the training data left that out."""
    return meta.get('settings', {}).get('recur_on_prompt', True)


def encode_prompts(meta, config):
    """(ids, text to print) of each prompt: a message under the chat template, the bare tokens of an
    aligned task, or a text after the document token. Raises ConfigError."""
    texts = read_prompts(config)
    if config.chats(meta) and not config.interactive:  # there each line is a turn
        return [(chat_tokens(meta, [{'role': 'user', 'content': text}]), printable(text + '\n')) for text in texts]
    opening = [] if is_aligned(meta) else [meta['document_token']]
    return [(opening + encode(meta, text), printable(text)) for text in texts]


def find_questions(meta, prompt):
    """The positions where a prompt (ids) of an aligned task asks: actions and slots after |. Raises ConfigError for none."""
    names = meta['names']
    start = prompt.index(names.index('|')) if names.index('|') in prompt else len(prompt)
    questions = [i for i in range(start, len(prompt)) if names[prompt[i]][0] in 'p_']
    if not questions:
        example = f'{names[1]} v0 | {names[1]} _' if 'retrieval' in meta['scores'] else f'| {names[1]} {names[1]}'
        what = 'asks nothing, as no action follows |' if prompt else 'is empty'
        raise ConfigError(f'prompt {what}; give tokens of the task, for example --prompt="{example}".')
    return questions


def print_answers(model, meta, prompt):
    """Prints, for a model of an aligned task, what it predicts where `prompt` asks, and how to read that."""
    tokens, names = torch.tensor([prompt], device=model.embed.weight.device), meta['names']
    questions = find_questions(meta, prompt)
    recurs = None if prompt_recurs(meta) else (tokens == names.index('|')).cumsum(1) > 0
    best = model(tokens, schedule=SEQUENTIAL, recur_mask=recurs)[0].argmax(-1).tolist()
    action = next((names[prompt[i]] for i in questions if names[prompt[i]] != '_'), names[1])
    moves = ', '.join(f'{a} to {b}' for a, b in enumerate(action[1:]))
    values = f', at _ a value of the {meta["settings"]["retrieve_by"]}' if 'retrieval' in meta['scores'] else ''
    print(f'{action} moves {moves}. At an action the answer is the state, the action after the state before{values}.')
    for i in questions:
        print(f'{names[prompt[i]]:>8} -> {names[best[i]]}')
