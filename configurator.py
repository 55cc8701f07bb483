"""Settings of every command: a config file of plain assignments, then --key=value overrides.

A command declares its settings as a dataclass whose fields are made by `key(default, meaning)`. `parse` merges the defaults,
at most one config file and the command line, in this order. Whatever is wrong ends in one sentence on stderr and exit code 2,
before anything is written. A config file is Python and is executed: run only those you trust.
"""

import contextlib
import difflib
import math
import os
import sys
from dataclasses import field, fields
from pathlib import Path
from types import ModuleType

from support.suggestions import nearest, suggest_key

BOOLEANS = {'True': True, 'true': True, '1': True, 'False': False, 'false': False, '0': False}
FORMS = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'a text', tuple: 'numbers joined by commas'}


class ConfigError(Exception):
    """A mistake of the user; its text is one sentence that says what to change."""


def key(default, meaning, choices=(), bounds=(), names=None, heading=''):
    """A declared setting. Its default fixes its type. choices: the values allowed; bounds: the lowest and the highest. names:
    {word: number} of values outside the bounds. heading: of the group that the key begins in --help."""
    metadata = dict(meaning=meaning, choices=choices, bounds=bounds, names=names or {}, heading=heading)
    return field(default=default, metadata=metadata)


def check_keys(config):
    """ConfigError for the first key of `config` whose value is not among its choices or outside its bounds."""
    for f in fields(config):
        value, meta = getattr(config, f.name), f.metadata
        choices, bounds, names = meta['choices'], meta['bounds'], meta['names']
        if choices and value not in choices:
            raise ConfigError(f'{f.name}={value} is not known; {nearest(value, choices)}')
        if bounds and value not in names.values():
            within(f.name, value, *bounds, f'it must be {" or ".join([*names, bounds_text(bounds)])} ({meta["meaning"]})')


def bounds_text(bounds):
    return f'at least {bounds[0]}' if bounds[1] == math.inf else f'{bounds[0]} to {bounds[1]}'


def within(name, value, low, high, why):
    """ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f'{name}={value} is not possible: {why}; the nearest is {name}={min(max(value, low), high)}.')


def convert(name, value, default, names=None):
    """`value` (text, or any object of a config file) as the type of `default`; names: as in key."""
    kind = type(default)
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        if names and isinstance(value, str) and value in names:
            return names[value]
        if kind is bool:
            return BOOLEANS[str(value)]
        if kind is tuple:
            parts = [p for p in value.split(',') if p.strip()] if isinstance(value, str) else value
            return tuple(convert(name, p, 0.0) for p in parts)
        if kind is str and isinstance(value, str) and '\0' not in value:
            return value
        if kind in (int, float) and not isinstance(value, bool) and math.isfinite(number := float(value)):
            if kind is float:
                return number
            if isinstance(value, int) or str(value).strip().lstrip('+-').isdigit():
                return int(value)  # exact above 2^53, where floats are not
            if number.is_integer():
                return int(number)
    forms, example = ' or '.join([*(names or ()), FORMS[kind]]), show(default, names) or '1,2'
    raise ConfigError(f'{name}={value} is not {forms}; write it like {name}={example}.')


def show(value, names=None):
    """`value` as it is written on a command line; names: {word: number}, as those of a key."""
    words = {number: word for word, number in (names or {}).items()}
    return ','.join(f'{v:g}' for v in value) if isinstance(value, tuple) else words.get(value, str(value))


def read_config_file(path):
    """{name: value} that a config file assigns; `from other_config import *` in it finds files beside it and in config/."""
    if not os.path.isfile(path):
        folder, name = os.path.split(path)
        files = {p.name: os.path.relpath(p) for parent in ('config', folder) for p in Path(parent).glob('*.py') if p.is_file()}
        close = difflib.get_close_matches(name, files, n=1, cutoff=0.5)
        hint = f'did you mean {files[close[0]]!r}?' if close else f'there are {", ".join(sorted(files.values())) or "none"}.'
        raise ConfigError(f'there is no config file {path}; {hint}')
    names = {'__name__': 'config', '__file__': path}
    sys.path[:0] = [os.path.dirname(os.path.abspath(path)), os.path.join(os.path.dirname(os.path.abspath(__file__)), 'config')]
    try:
        with open(path, encoding='utf-8') as f:
            exec(compile(f.read(), path, 'exec'), names)
    except (Exception, SystemExit) as e:
        raise ConfigError(f'the config file {path} could not be run: {type(e).__name__}: {" ".join(str(e).split())}') from e
    finally:
        del sys.path[:2]
    return {k: v for k, v in names.items() if not k.startswith('_')}


def read_arguments(argv, switches):
    """(config file or None, {key: text}) from the command line, each given once. switches: keys that need no value."""
    path, given = None, {}
    for i, arg in enumerate(argv):
        name, equals, value = arg.lstrip('-').partition('=')
        if arg.startswith('--') and (equals or name in switches):
            if name in given:
                raise ConfigError(f'--{name} is given twice; keep one.')
            given[name] = value if equals else 'True'
        elif arg.startswith('-') or equals:
            follows = argv[i + 1] if not equals and i + 1 < len(argv) else 'VALUE'
            raise ConfigError(f'cannot read the argument {arg!r}; write it as --{name}={value if equals else follows}.')
        elif not arg.endswith('.py'):
            raise ConfigError(f'cannot read the argument {arg!r}; settings are written --key=value, a config file ends in .py.')
        elif path is not None:
            raise ConfigError(f'two config files are given, {path} and {arg}; give one, and let it import the other.')
        else:
            path = arg
    return path, given


def print_help(config_class, usage):
    print(f'usage: {usage}\n\nEvery key, its default and its meaning:')
    rows = [(f'--{f.name}={show(f.default, f.metadata["names"])}', f.metadata) for f in fields(config_class)]
    width = min(34, max(len(left) for left, _ in rows))
    for left, meta in rows:
        bounds = [bounds_text(meta['bounds'])] if meta['bounds'] else []
        allowed = ' | '.join(str(c) for c in [*meta['choices'], *meta['names'], *bounds])
        if meta['heading']:
            print(f'\n{meta["heading"]}')
        print(f'  {left:<{width}}  {meta["meaning"]}' + (f' [{allowed}]' if allowed else ''))


@contextlib.contextmanager
def explaining(what, remedy):
    """For code that fails in many ways (a parser, the network): a failure becomes ConfigError "WHAT (reason); REMEDY."."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as e:
        reason = f'no field {e}' if isinstance(e, KeyError) else f'{type(e).__name__}: {" ".join(str(e).split())[:300]}'
        raise ConfigError(f'{what} ({reason}); {remedy}.') from None


def parse(config_class, argv, usage):
    """An instance of `config_class` (a dataclass of `key` fields) from `argv`, checked by its own
    `check()`. Raises SystemExit: 0 after --help, 2 with one sentence on stderr after a mistake."""
    if '--help' in argv or '-h' in argv:
        with reporting():
            print_help(config_class, usage)
        raise SystemExit(0)
    with reporting():
        declared = {f.name: f for f in fields(config_class)}
        path, given = read_arguments(argv, {name for name, f in declared.items() if type(f.default) is bool})
        values, assigned = {}, read_config_file(path) if path else {}
        if path and not any(name in declared or not isinstance(value, ModuleType) for name, value in assigned.items()):
            raise ConfigError(f'the config file {path} sets no key; write key = value, or `from other_config import *`.')
        for source, pairs in ((path, assigned), ('the command line', given)):
            for name, value in pairs.items():
                if name in declared:
                    values[name] = convert(name, value, declared[name].default, declared[name].metadata['names'])
                elif not callable(value) and not isinstance(value, ModuleType):  # these a file may have for its own use
                    raise ConfigError(f'unknown key {name!r} in {source}; {suggest_key(name, declared)}')
        config = config_class(**values)
        check_keys(config)
        config.check()
        return config


def fail(sentence, code=2):
    """SystemExit with `code`, after one line on stderr (from the first process only, when there are several)."""
    line, end = 'error: ' + ' '.join(str(sentence).split('\n')), SystemExit(code)
    if os.environ.get('RANK', '0') == '0':
        print(line, file=sys.stderr)
    end.add_note(line)  # torchrun repeats it when it ends
    return end


@contextlib.contextmanager
def reporting():
    """For the work of a command: a failure that a user can cause ends in one sentence and a documented exit code."""
    try:
        yield
        if sys.stdout:  # None if it was closed from the start
            sys.stdout.flush()
    except ConfigError as e:
        raise fail(e) from None
    except KeyboardInterrupt:
        raise fail('interrupted', 130) from None
    except BrokenPipeError:  # the reader of the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as e:  # no permission, no space, no such disk
        raise fail(f'{e.filename or "a file"} could not be read or written: {e.strerror or e}.') from None
    except (MemoryError, RuntimeError) as e:
        if 'without overflow' in str(e):
            raise fail('a number is too large for the computation; lower learning_rate or whatever else is huge.') from None
        if isinstance(e, RuntimeError) and 'allocate' not in str(e) and 'out of memory' not in str(e):
            raise
        raise fail('there is not enough memory for this; ask for a smaller model, batch or dataset.') from None
