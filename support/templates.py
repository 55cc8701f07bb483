"""Chat templates beside a tokenizer, read and rendered as the transformers library does."""

import datetime
import functools
import json
from pathlib import Path

import jinja2.ext
import jinja2.sandbox

from configurator import explaining

CHAT_DATE = '2024-07-26'  # today's, for templates that ask; Llama 3 has it where there is none


def tokenizer_file(name):
    """The path of the tokenizer.json that a tokenizer setting names, itself or by its folder; None for another tokenizer."""
    path = Path(name).expanduser()
    inside = path / 'tokenizer.json'
    return inside if inside.is_file() else path if name.endswith('.json') else None


def read_beside(name, file):
    """The object in a JSON file beside the tokenizer.json of `name`; {} where there is none."""
    path = tokenizer_file(name).parent / file
    with explaining(f'{path} cannot be read', 'repair or remove it'):
        return dict(json.loads(path.read_text('utf-8')).items()) if path.exists() else {}


def read_template(name):
    """'chat_template' and 'template_tokens', the texts such as bos_token that it may write, of the
    chat template beside the tokenizer.json that `name` names; {} where there is none."""
    path = tokenizer_file(name).parent / 'chat_template.jinja'
    config = read_beside(name, 'tokenizer_config.json')
    with explaining(f'the chat template in {path.parent} cannot be read', 'repair or remove it'):
        template = path.read_text('utf-8') if path.exists() else config.get('chat_template')
        if isinstance(template, list):  # several, by name
            template = next((t['template'] for t in template if t['name'] == 'default'), None)
    tokens = {k: v.get('content') if isinstance(v, dict) else v for k, v in config.items() if k.endswith('_token')}
    tokens = {k: v for k, v in tokens.items() if isinstance(v, str)}
    return {'chat_template': template, 'template_tokens': tokens} if template else {}


class Generation(jinja2.ext.Extension):
    """The tag by which some templates mark the assistant's text; here it changes nothing."""

    tags = {'generation'}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(['name:endgeneration'], drop_needle=True)


@functools.lru_cache(maxsize=4)
def compile_template(template):
    """A compiled chat template, with what those of Hugging Face models expect."""
    extensions = [Generation, 'jinja2.ext.loopcontrols']
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def raise_exception(message):
        raise ValueError(message)

    return sandbox.from_string(template, {'raise_exception': raise_exception, 'tools': None, 'documents': None})


def render(meta, messages, add_generation_prompt=True):
    """The text of a conversation by the chat template in `meta`; ConfigError for one that the template refuses. Today is
    'chat_date', CHAT_DATE where meta has none, so that the ids are the same every day."""
    today = datetime.datetime.fromisoformat(meta.get('chat_date', CHAT_DATE))
    names = {'messages': messages, 'add_generation_prompt': add_generation_prompt, 'strftime_now': today.strftime}
    with explaining('the chat template fails', 'take another, or --chat=False'):
        return compile_template(meta['chat_template']).render(names | meta['template_tokens'])
