"""Tasks made of prompts and answers in text, as rows of tokens. A new task needs a config derived
from TextTaskConfig and a function that returns its examples; make_text_task() does the rest."""

import datetime
import json
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from configurator import ConfigError, key
from support import folders
from support.chat import chat_meta, chat_tokens
from support.templates import CHAT_DATE
from support.tokens import decode, encode_document, tokenizer_meta


@dataclass
class TextTaskConfig:
    """The settings that every task made of text has."""

    tokenizer: str = key('bytes', 'bytes, a tiktoken encoding such as gpt2, or a tokenizer.json or its folder')
    chat: bool = key(True, "ask in the chat template of the tokenizer's folder, where there is one")
    chat_date: str = key(CHAT_DATE, "today's date, for a chat template that asks for it")
    longest: int = key(0, 'tokens that an example may have at most; 0: no limit', bounds=(0, 10**6))
    drop_longer: bool = key(False, 'leave out longer examples instead of refusing them')
    pack: int = key(0, 'tokens of a row of train, which several examples share; 0: one row per example', bounds=(0, 10**6))
    score_prompt: bool = key(False, 'train on the prompt too')
    recur_on_prompt: bool = key(False, 'read memory on the prompt too')
    out: str = key('', 'the folder to write; empty: data/ and the name of the dataset')
    overwrite: bool = key(False, 'replace what `out` holds')

    def check(self):
        if self.drop_longer and not self.longest:
            raise ConfigError('drop_longer=True needs a limit; write it with longest=2048, or leave it out.')
        try:
            datetime.date.fromisoformat(self.chat_date)
        except ValueError:
            raise ConfigError(f'chat_date={self.chat_date} is no date; write it like chat_date={CHAT_DATE}.') from None


def make_text_task(task, config, examples, **source):
    """Writes the dataset of a task, unless it exists already. `examples()` returns {split: [{'prompt', 'response',
    'answer', 'depth'}, ..]}: a response ends in '#### ' and the answer; accuracy is reported by depth, a whole number.
    source: what meta.json says of the origin of examples that are not drawn from a seed."""
    out = config.out or f'data/{task}'
    meta = {'kind': 'task', 'task': task, 'settings': folders.settings_of(config, 'source')} | source
    meta |= tokenizer_meta(config.tokenizer)
    if config.chat and 'tokenizer_json' in meta:
        meta |= chat_meta(config.tokenizer, meta['tokenizer_json'], config.chat_date)
    if not folders.is_ready(out, config.overwrite, meta):
        write_task(config, out, meta, examples())


def write_task(config, out, meta, examples):
    """Writes {split: examples} as SPLIT.npz, and unchanged as SPLIT.jsonl, one example per line. The arrays of a split:

    tokens (N, T): document token, prompt, response, document token, padding; with a chat template the conversation,
    response, stop_token, padding. targets (N, T): those of the next token (meta: aligned False; s5 has True), so target i
    is token i + 1 if that is in the response or ends it, else -1; with score_prompt the prompt is scored too.
    recur_mask (N, T): True on the response, and with recur_on_prompt on the prompt. lengths (N,): tokens without padding.
    prompt_lengths (N,): the tokens before the response, after which decoding starts. steps (N,): the depth.

    With `pack` a row of train holds several examples, each as it would stand alone, and T is
    `pack`; N counts rows, and prompt_lengths and steps, which belong to one example, are left out.
    """
    meta = meta | {'pad_token': meta['document_token'], 'aligned': False, 'scores': {}}
    meta |= {'longest': {}, 'splits': {}, 'jsonl_sha256': {}}
    encoded = {split: encode_examples(config, meta, split, rows) for split, rows in examples.items()}
    with folders.work_folder(out) as work:
        for split, kept in encoded.items():
            counts, lengths = {'examples': len(kept)}, np.array([len(example.ids) for example in kept])
            if config.pack and split == 'train':
                rows = [[kept[i] for i in row] for row in pack_rows(lengths, config.pack)]
                arrays = fill_rows(config, meta, rows, config.pack)
                counts['rows'] = len(rows)
            else:
                arrays = fill_rows(config, meta, [[example] for example in kept], max(lengths))
                arrays['prompt_lengths'] = np.array([example.prompt_length for example in kept])
                arrays['steps'] = np.array([example.raw['depth'] for example in kept])
            with open(f'{work}/{split}.jsonl', 'w', encoding='utf-8') as f:
                f.writelines(json.dumps(example.raw, ensure_ascii=False) + '\n' for example in kept)
            folders.save_split(work, meta, split, arrays, counts)
            meta['jsonl_sha256'][split] = folders.file_sha256(f'{work}/{split}.jsonl')
        folders.publish(work, out, meta)


class Encoded(NamedTuple):
    """An example as tokens."""

    raw: dict
    ids: np.ndarray
    prompt_length: int


def encode_example(meta, example):
    """An example as tokens: its prompt, or the conversation that asks it; its response; and the token that ends it."""
    question, end = example['prompt'], meta.get('stop_token', meta['document_token'])
    if 'chat_template' in meta:
        prompt = np.array(chat_tokens(meta, [{'role': 'user', 'content': question.strip()}]), meta['dtype'])
        if question.strip().encode() not in decode(meta, prompt):
            raise ConfigError(f'the chat template or its tokenizer changes the text {question[:40]!r}...; take --chat=False.')
    else:
        prompt = encode_document(meta, question.encode())
    response = encode_document(meta, example['response'].encode(), opens=False)
    return Encoded(example, np.concatenate([prompt, response, np.array([end], meta['dtype'])]), len(prompt))


def encode_examples(config, meta, split, examples):
    """The Encoded examples of at most `longest` tokens; ConfigError where the others may not be left out."""
    encoded = [encode_example(meta, example) for example in examples]
    kept = [example for example in encoded if len(example.ids) <= (config.longest or math.inf)]
    if longer := len(encoded) - len(kept):
        if not config.drop_longer or not kept:
            why = f'{longer} of the {len(encoded)} examples of {split} are above longest={config.longest} tokens'
            longest = max(len(example.ids) for example in encoded)
            raise ConfigError(f'{why}; take longest={longest}, which fits all, or drop_longer=True where some fit.')
        print(f'{split}: left out {longer} examples above {config.longest} tokens')
    longest = max(len(example.ids) for example in kept)
    if split == 'train' and 0 < config.pack < longest:
        raise ConfigError(f'pack={config.pack} is too short for an example of {longest} tokens; take pack={longest} or more.')
    return kept


def pack_rows(lengths, size):
    """The numbers of the examples in each row of `size` tokens, by first fit decreasing: the
    longest example first, the earlier of equals, each into the first row that has room for it."""
    rows, room = [], np.full(len(lengths), size, np.int32)
    for i in np.argsort(-lengths, kind='stable').tolist():
        row = int(np.argmax(room[: len(rows) + 1] >= lengths[i]))  # after the last row there is an empty one
        rows += [[]] if row == len(rows) else []
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def fill_rows(config, meta, rows, width):
    """The arrays tokens, targets, recur_mask (N, T) and lengths (N,) of rows of Encoded examples; T = `width`."""
    tokens = np.full((len(rows), width), meta['pad_token'], meta['dtype'])
    targets = np.full(tokens.shape, -1, dtype=np.int16 if meta['vocab_size'] <= 2**15 else np.int32)
    recur_mask, lengths = np.zeros(tokens.shape, dtype=bool), np.zeros(len(rows), dtype=np.int64)
    for n, row in enumerate(rows):
        start = 0
        for _, ids, prompt_length in row:
            end = start + len(ids)
            first_scored = 0 if config.score_prompt else prompt_length - 1
            tokens[n, start:end] = ids
            targets[n, start + first_scored : end - 1] = ids[first_scored + 1 :]
            recur_mask[n, start + (0 if config.recur_on_prompt else prompt_length) : end] = True
            start = end
        lengths[n] = start
    return {'tokens': tokens, 'targets': targets, 'recur_mask': recur_mask, 'lengths': lengths}
