"""Conversations as token ids, by a chat template, as the transformers library renders them."""

import functools
import json
import re

from configurator import ConfigError
from support.templates import CHAT_DATE, read_template, render
from support.tokens import encode

BREAK = '\ud800'  # half of a surrogate pair, which no text holds


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer_json):
    """({text: id} of the special tokens of a tokenizer.json, pattern that finds them with the spaces that belong to them)."""
    special = [t for t in json.loads(tokenizer_json).get('added_tokens', []) if t['special']]
    special.sort(key=lambda t: -len(t['content']))  # where several match, the longest counts
    parts = (r'\s*' * t.get('lstrip', 0) + re.escape(t['content']) + r'\s*' * t.get('rstrip', 0) for t in special)
    return {t['content']: t['id'] for t in special}, re.compile('|'.join(parts) or '(?!)')


def chat_meta(name, tokenizer_json, date=CHAT_DATE):
    """What meta.json keeps of the chat template beside the tokenizer.json that `name` names, {} where there is none.
    'chat_template'; 'template_tokens'; 'chat_date' unless it is CHAT_DATE; 'stop_token', the id that ends a turn of the
    assistant: the special token that the template puts there, or else eos_token. ConfigError for files that cannot be used."""
    if not (meta := read_template(name)):
        return {}
    if date != CHAT_DATE:
        meta['chat_date'] = date
    ids, pattern = special_tokens(tokenizer_json)
    turns = [{'role': role, 'content': f'word{i}'} for i, role in enumerate(('user', 'assistant'))]
    end = pattern.search(render(meta, turns, False).rpartition('word1')[2])
    end = end[0].strip() if end else meta['template_tokens'].get('eos_token')
    if end not in ids:
        raise ConfigError(f'the chat template of {name} ends no turn, and eos_token={end} is no token; take --chat=False.')
    return meta | {'stop_token': ids[end]}


def chat_tokens(meta, messages):
    """Ids (list of int) of a conversation [{'role', 'content'}, ..] under the chat template of a dataset's meta.json, up to
    where the assistant is to speak. The document token opens it, once, whether the template writes it or not.

    No content becomes a special token: before the template runs, BREAK goes between the characters of whatever spells one.
    A special token in the rendered text is therefore the template's own; the text between them is encoded without BREAK.
    Raises ConfigError for a conversation that the template refuses.
    """
    ids, pattern = special_tokens(meta['tokenizer_json'])
    harmless = [m | {'content': pattern.sub(lambda found: BREAK.join([*found[0], '']), m['content'])} for m in messages]
    text, tokens, start = render(meta, harmless), [], 0
    for match in pattern.finditer(text):
        tokens += [*encode(meta, text[start : match.start()].replace(BREAK, '')), ids[match[0].strip()]]
        start = match.end()
    tokens += encode(meta, text[start:].replace(BREAK, ''))
    return tokens if tokens[:1] == [meta['document_token']] else [meta['document_token'], *tokens]
