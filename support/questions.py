"""Question sets from the hub or from local files."""

import glob
import hashlib
import json
import os
import re
from dataclasses import dataclass

from configurator import ConfigError, explaining, key
from support.files import JSON, JSONL, ending, refuse_scripts, unpacked
from support.folders import VAL_BOUNDS, choose_val, source_names
from support.optional import import_optional
from support.text_tasks import TextTaskConfig, make_text_task
from support.texts import as_text

COCONUT = 'https://raw.githubusercontent.com/facebookresearch/coconut/main/data/prosqa_'
HUB = {  # what `datasets` loads: plain files, without code
    'prosqa': ('json', {'data_files': {name: f'{COCONUT}{name}.json' for name in ('train', 'valid', 'test')}}),
    'gsm8k': ('openai/gsm8k', {'name': 'main'}),
    'gsm8k_aug': ('whyNLP/gsm8k-aug', {}),
    'hotpotqa': ('hotpotqa/hotpot_qa', {'name': 'distractor'}),
    'math500': ('HuggingFaceH4/MATH-500', {}),
}


@dataclass
class QuestionConfig(TextTaskConfig):
    source: str = key('', 'a jsonl, json or parquet file of the same format, a folder or pattern of them; empty: the hub')
    val_fraction: float = key(0.05, 'share of the examples that makes val, if the source lacks train or val', bounds=VAL_BOUNDS)


def make_questions(task, config):
    source = source_names(config.source, HUB[task][0])
    make_text_task(task, config, lambda: read_questions(task, config), source=source)


def read_questions(task, config):
    """{split: examples} of a question-answer dataset. Where train or val is missing, the prompts with the smallest sha256 make
    val. What test holds is left out of val and train, and what val holds out of train. Test alone is for evaluation."""
    examples = {}
    for split, rows in read_splits(task, config.source).items():
        examples[split] = []
        for where, row in rows:
            with explaining(f'{where} is not of the form of {task}', 'name a source that is'):
                examples[split].append(question_example(task, row))
    if ('train' in examples) != ('val' in examples):
        pool = [(hashlib.sha256(e['prompt'].encode()).digest(), e) for e in examples.get('train') or examples['val']]
        in_val = choose_val([digest for digest, _ in pool], config.val_fraction)
        for split in ('train', 'val'):
            examples[split] = [e for digest, e in pool if (digest in in_val) == (split == 'val')]
    later = set()  # the prompts of later splits
    for split in ('test', 'val', 'train'):
        if split not in examples:
            continue
        kept = [e for e in examples[split] if e['prompt'] not in later]
        if copies := len(examples[split]) - len(kept):
            print(f'{split}: left out {copies} examples that another split holds')
        if not kept:
            raise ConfigError(f'the source of {task} has no example for {split} alone; train and val need different ones.')
        examples[split] = kept
        later.update(e['prompt'] for e in kept)
    return {split: examples[split] for split in ('train', 'val', 'test') if split in examples}


def read_splits(task, source):
    """{split: [(where, row)]} of files or of the hub, by the word for a split in their names, or else train."""
    if source:
        parts = {path: read_rows(path) for path in question_files(source)}
    else:
        path, options = HUB[task]
        with explaining(f'{task} could not be loaded from the hub', 'try again with a network, or name local files by source'):
            loaded = import_optional('datasets').load_dataset(path, **options)
            parts = {f'{task}, {name}': rows for name, rows in loaded.items()}
    splits = {}
    for name, rows in parts.items():
        if not len(rows):
            raise ConfigError(f'{name} is empty; leave it out of the source.')
        words = {*re.split(r'[^a-z]+', os.path.basename(name).lower())}
        split = 'test' if 'test' in words else 'val' if words & {'val', 'valid', 'validation', 'dev'} else 'train'
        splits.setdefault(split, []).extend((f'{name}, example {i}', row) for i, row in enumerate(rows, start=1))
    return splits


def question_files(source):
    """The paths that a source names, sorted; what is passed over is printed. ConfigError where none is left."""
    source = os.path.expanduser(source)
    paths = [os.path.join(source, name) for name in os.listdir(source)] if os.path.isdir(source) else glob.glob(source)
    paths = sorted([source] if os.path.isfile(source) else paths)
    kinds = ('.parquet', *JSONL, *JSON)
    refuse_scripts(paths, kinds)
    if missing := [path for path in paths if not os.path.exists(path)]:
        raise ConfigError(f'{missing[0]} is a link that leads nowhere; mend or remove it.')
    kept = [p for p in paths if ending(p) in kinds and os.path.basename(p)[0] != '.' and os.path.isfile(p)]
    if not kept:
        raise ConfigError(f'source={source} is not there, or holds no jsonl, json or parquet file; name one that does.')
    if len(kept) < len(paths):
        print(f'source={source}: passed over {", ".join(os.path.basename(path) for path in paths if path not in kept)}')
    return kept


def read_rows(path):
    """The rows of a jsonl, json (a list) or parquet file, the first two perhaps packed; ConfigError for any other file."""
    remedy, kind = 'it should hold one JSON object per row', ending(path).split('.')[1]
    with explaining(f'{path} cannot be read', remedy):
        if kind == 'parquet':
            return import_optional('pyarrow.parquet').read_table(path).to_pylist()
        with open(path, 'rb') as packed:
            text = as_text(unpacked(path, packed).read())
        rows = json.loads(text or '[]') if kind == 'json' else []
        if not isinstance(rows, list):
            raise ValueError('it is not a list of objects')
    for number, line in enumerate(text.split('\n') if kind == 'jsonl' else (), start=1):
        with explaining(f'{path} cannot be read at line {number}', remedy):
            rows += [json.loads(line)] if line.strip() else []
    return rows


def question_example(task, row):
    """A row of a question-answer dataset as an example; KeyError, TypeError or ValueError for a row of another form. Reasoning:
    gsm8k's lines without their <<calculator notes>>; the steps of gsm8k_aug and prosqa; hotpotqa's supporting sentences, after
    a prompt of all its paragraphs; math500's solution. depth: how many lines; math500: its level, 1 to 5."""
    question, answer = row['problem' if task == 'math500' else 'question'], row['answer']
    if not isinstance(question, str) or not isinstance(answer, str):
        raise TypeError('its question and answer should be texts')
    if task == 'gsm8k':
        reasoning, mark, answer = answer.rpartition('####')
        if not mark:
            raise ValueError("its answer has no '####'")
        lines = re.sub(r'<<[^<>]*>>', '', reasoning).split('\n')
    elif task == 'math500':
        lines = row['solution'].split('\n')
    elif task == 'hotpotqa':
        context, facts = row['context'], row['supporting_facts']  # the hub has columns where the original files have pairs
        context = list(zip(context['title'], context['sentences'], strict=True)) if isinstance(context, dict) else context
        facts = list(zip(facts['title'], facts['sent_id'], strict=True)) if isinstance(facts, dict) else facts
        paragraphs = dict(context)
        question = ''.join(f'{title}: {"".join(sentences).strip()}\n' for title, sentences in context) + question
        lines = [paragraphs[title][i] for title, i in facts if i < len(paragraphs[title])]  # some name a sentence too many
    else:
        lines = row['steps']
        if not isinstance(lines, list):
            raise TypeError('its steps should be a list')
    question, answer, lines = question.strip(), answer.strip(), [' '.join(line.split()) for line in lines if line.strip()]
    if not question or not answer or '\n' in answer:
        raise ValueError('its question or answer is empty, or its answer has several lines')
    response = '\n'.join([*lines, f'#### {answer}'])
    (question + response).encode()  # half of a surrogate pair is no character
    depth = int(row['level']) if task == 'math500' else len(lines)
    return {'prompt': question + '\n', 'response': response, 'answer': answer, 'depth': depth}
