"""Dataset folders: written whole or not at all, with a meta.json that says what they hold."""

import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from configurator import ConfigError, explaining

DATASET_FILES = re.compile(r'(train|val|test)(-\d{5,})?\.(bin|npz|jsonl)|(meta|unfinished)\.json(\.tmp)?')
ADDED_LATER = ('text_key', 'chat_date')  # settings that the first datasets did not have
VAL_BOUNDS = 1e-12, 0.999999999999  # of val_fraction, which takes a part and leaves one


def file_sha256(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def settings_of(config, *left_out):
    """The settings that decide what a dataset holds; those of ADDED_LATER only where they are not at their default."""
    settings = asdict(config)
    later = [name for name in ADDED_LATER if name in settings and settings[name] == getattr(type(config), name)]
    return {name: value for name, value in settings.items() if name not in (*left_out, *later, 'out', 'overwrite')}


def source_names(source, default):
    """What meta.json says of the sources: names without the folders of one machine; `default` where none is named."""
    return ', '.join(os.path.basename(os.path.normpath(s.strip())) for s in source.split(',') if s.strip()) or default


def choose_val(digests, fraction):
    """The digests that make val: the smallest `fraction` of the distinct ones, at least one, and one at least stays out."""
    distinct = sorted(set(digests))
    return set(distinct[: min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)])


def is_ready(out, overwrite, wanted):
    """True if the folder `out` holds the dataset described by `wanted` (part of its meta.json), False if it may be written.
    Raises ConfigError when something else is there and `overwrite` is off."""
    if os.path.exists(out) and not os.path.isdir(out):
        raise ConfigError(f'out={out} is a file; name a folder.')
    names = os.listdir(out) if os.path.isdir(out) else []
    foreign = [name for name in names if not DATASET_FILES.fullmatch(name)]
    if foreign and not {'meta.json', 'unfinished.json'} & {*names}:
        raise ConfigError(f'out={out} holds no dataset but other files, like {foreign[0]}; name a folder of its own.')
    left_by_killed_run = not foreign and not any(name.endswith('.json') for name in names)
    if overwrite or left_by_killed_run:
        return False
    with explaining(f'out={out} holds an unfinished or damaged dataset', 'choose another out, or --overwrite=True'):
        meta = json.loads(Path(out, 'meta.json').read_text('utf-8'))
        if any(meta.get(k) != v for k, v in wanted.items()):
            raise ConfigError(f'out={out} holds a dataset made with other settings; choose another out, or --overwrite=True.')
        for name, digest in checksums(meta).items():
            if file_sha256(os.path.join(out, name)) != digest:
                raise ValueError(f'{name} has changed')
    print(f'{out} already holds this dataset; --overwrite=True makes it again.')
    return True


def checksums(meta):
    """{file: sha256} of the files that a meta.json describes."""
    files = {f'{split}.jsonl': digest for split, digest in meta.get('jsonl_sha256', {}).items()}
    ending = 'bin' if meta['kind'] == 'text' else 'npz'
    for split, entry in meta['splits'].items():
        files |= {f'{name}.{ending}': part['sha256'] for name, part in shard_names(split, entry)}
    return files


def shard_names(split, entry):
    """[(file name without its ending, entry)] of the files of a split, by its entry in meta.json, which states no names."""
    if 'shards' not in entry:
        return [(split, entry)]
    return [(f'{split}-{i:05}', shard) for i, shard in enumerate(entry['shards'])]


def save_split(work, meta, name, arrays, counts):
    """Writes the arrays of a task's split into the folder `work`, and describes them in meta: by
    `counts`, the checksum, and waste, the share of the tokens that is padding."""
    np.savez(f'{work}/{name}.npz', **arrays)
    waste = round(1 - int(arrays['lengths'].sum()) / arrays['tokens'].size, 4)
    meta['longest'][name] = arrays['tokens'].shape[1]
    meta['splits'][name] = counts | {'waste': waste, 'sha256': file_sha256(f'{work}/{name}.npz')}


def write_json(path, value):
    """Writes a file that is whole at any moment."""
    with open(path + '.tmp', 'w', encoding='utf-8') as f:
        json.dump(value, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + '.tmp', path)


def work_folder(out):
    """A temporary folder beside `out`, on the same disk, so that moving a file from one to the other is a rename."""
    out = os.path.abspath(out)
    os.makedirs(os.path.dirname(out), exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=os.path.basename(out) + '.partial-', dir=os.path.dirname(out))


def publish(work, out, meta):
    """Moves the finished files of the folder `work` to `out`; killed at any moment, it leaves no meta.json or a true one."""
    os.makedirs(out, exist_ok=True)
    clear(out)  # meta.json goes first ...
    for name in os.listdir(work):
        os.replace(os.path.join(work, name), os.path.join(out, name))
    write_json(os.path.join(out, 'meta.json'), meta)  # ... and comes last
    announce(out, meta['splits'])


def clear(out):
    """Removes the dataset in `out`, meta.json first, and leaves other files."""
    for name in sorted(os.listdir(out), key=lambda name: name != 'meta.json'):
        if DATASET_FILES.fullmatch(name):
            os.remove(os.path.join(out, name))


def announce(out, splits):
    for name, entry in splits.items():
        waste = f'  {entry["waste"]:>6.1%} padding' if 'waste' in entry else ''
        print(f'{name:<5}  ' + '  '.join(f'{v:>11,} {k}' for k, v in entry.items() if isinstance(v, int)) + waste)
    print(f'wrote {out}')
