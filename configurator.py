"""Settings of every command: a config file of plain assignments, then --key=value overrides.

A command declares its settings as a dataclass whose fields are made by `key(default, meaning)`. The type of the default is
the type of the key. `parse` merges, in this order: the defaults, at most one config file, the command line. Whatever is
wrong (an unknown key, a wrong type, an impossible combination) ends in one sentence on stderr and exit code 2, before
anything is written. A config file is Python and is executed: run only those you trust.
"""

import contextlib
import difflib
import glob
import math
import os
import sys
from dataclasses import field, fields
from types import ModuleType

BOOLEANS = {'True': True, 'true': True, '1': True, 'False': False, 'false': False, '0': False}
FORMS = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'a text', tuple: 'numbers joined by commas'}


class ConfigError(Exception):
    """A mistake of the person at the keyboard; its text is one sentence that says what to change."""


def key(default, meaning, choices=(), bounds=()):
    """A declared setting: its default (which fixes its type), one line of meaning, and the values allowed if they are few, or
    the lowest and the highest of them."""
    return field(default=default, metadata={'meaning': meaning, 'choices': tuple(choices), 'bounds': tuple(bounds)})


def check_keys(config):
    """ConfigError for the first key of `config` whose value is not among its choices or outside its bounds."""
    for f in fields(config):
        value, choices, bounds = getattr(config, f.name), f.metadata['choices'], f.metadata['bounds']
        if choices and value not in choices:
            raise ConfigError(f'{f.name}={value} is not known; {nearest(value, choices)}')
        if bounds:
            within(f.name, value, *bounds, f'it must be {spelled(bounds)} ({f.metadata["meaning"]})')


def spelled(bounds):
    return f'at least {bounds[0]}' if bounds[1] == math.inf else f'{bounds[0]} to {bounds[1]}'


def within(name, value, low, high, why):
    """ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f'{name}={value} is not possible: {why}; the nearest is {name}={min(max(value, low), high)}.')


def nearest(word, words):
    """The end of a sentence that helps: the one of `words` that resembles `word`, or else all of them."""
    close = difflib.get_close_matches(str(word), [str(w) for w in words], n=1, cutoff=0.5)
    return f'did you mean {close[0]!r}?' if close else 'choose from: ' + ', '.join(str(w) for w in words) + '.'


def typed(name, value, default):
    """`value` (text from the command line, or an object from a config file) as the type of `default`, or ConfigError."""
    kind = type(default)
    wrong = ConfigError(f'{name}={value} is not {FORMS[kind]}; write it like {name}={show(default) or "1,2"}.')
    try:
        if kind is str:
            if not isinstance(value, str) or '\0' in value:
                raise wrong
            return value
        if kind is bool:
            return BOOLEANS[str(value)]
        if kind is tuple:
            parts = [p for p in value.split(',') if p.strip()] if isinstance(value, str) else value
            return tuple(typed(name, p, 0.0) for p in parts)
        if isinstance(value, bool) or not math.isfinite(number := float(value)):
            raise wrong
        if kind is float:
            return number
        if isinstance(value, int) or str(value).strip().lstrip('+-').isdigit():
            return int(value)  # exact above 2^53, where floats are not
        if not number.is_integer():
            raise wrong
        return int(number)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise wrong from None


def show(value):
    return ','.join(f'{v:g}' for v in value) if isinstance(value, tuple) else str(value)


def read_file(path):
    """The names that a config file assigns, as a dict. It may start from another, in its own folder or in config/, by
    `from other_config import *`."""
    if not os.path.isfile(path):
        folder, name = os.path.split(path)
        there = [f for of in ('config', folder or '.') for f in glob.glob(os.path.join(glob.escape(of), '*.py'))]
        files = {os.path.basename(f): os.path.relpath(f) for f in there if os.path.isfile(f)}
        close = difflib.get_close_matches(name, files, n=1, cutoff=0.5)
        hint = f'did you mean {files[close[0]]!r}?' if close else f'there are {", ".join(sorted(files.values())) or "none"}.'
        raise ConfigError(f'there is no config file {path}; {hint}')
    names = {'__name__': 'config', '__file__': path}
    ours = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'config')
    sys.path[:0] = [os.path.dirname(os.path.abspath(path)), ours]
    try:
        with open(path, encoding='utf-8') as f:
            exec(compile(f.read(), path, 'exec'), names)
    except (Exception, SystemExit) as e:
        said = ' '.join(str(e).split())
        raise ConfigError(f'the config file {path} could not be run: {type(e).__name__}: {said}') from e
    finally:
        del sys.path[:2]
    return {k: v for k, v in names.items() if not k.startswith('_')}


def read_arguments(argv, declared):
    """(config file or None, {key: text}) from the command line; every key and the file may be given once."""
    path, given = None, {}
    for i, arg in enumerate(argv):
        name, equals, value = arg.lstrip('-').partition('=')
        if arg.startswith('--') and (equals or type(declared.get(name)) is bool):
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
    rows = [(f'--{f.name}={show(f.default)}', f.metadata) for f in fields(config_class)]
    width = min(34, max(len(left) for left, _ in rows))
    for left, meta in rows:
        allowed = ' | '.join(str(c) for c in meta['choices']) or (meta['bounds'] and spelled(meta['bounds']))
        print(f'  {left:<{width}}  {meta["meaning"]}' + (f' [{allowed}]' if allowed else ''))


@contextlib.contextmanager
def explaining(what, remedy):
    """Around what fails in many ways (another's parser, the network): then ConfigError "WHAT (what went wrong); REMEDY."."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as e:
        said = f'no field {e}' if isinstance(e, KeyError) else f'{type(e).__name__}: {" ".join(str(e).split())[:300]}'
        raise ConfigError(f'{what} ({said}); {remedy}.') from None


def parse(config_class, argv, usage):
    """An instance of `config_class` (a dataclass of `key` fields) from `argv`, checked by its own `check()`.

    Raises SystemExit: 0 after --help, 2 with one sentence on stderr after a mistake.
    """
    if '--help' in argv or '-h' in argv:
        with reporting():
            print_help(config_class, usage)
        raise SystemExit(0)
    try:
        declared = {f.name: f for f in fields(config_class)}
        path, given = read_arguments(argv, {name: f.default for name, f in declared.items()})
        values, of_file = {}, read_file(path) if path else {}
        if path and not any(name in declared or not isinstance(value, ModuleType) for name, value in of_file.items()):
            raise ConfigError(f'the config file {path} sets no key; write key = value, or `from other_config import *`.')
        for source, pairs in ((path, of_file), ('the command line', given)):
            for name, value in pairs.items():
                if name not in declared and (callable(value) or isinstance(value, ModuleType)):
                    continue  # what a config file imports or defines for its own use
                if name not in declared:
                    raise ConfigError(f'unknown key {name!r} in {source}; {nearest(name, declared)}')
                values[name] = typed(name, value, declared[name].default)
        config = config_class(**values)
        check_keys(config)
        config.check()
        return config
    except ConfigError as e:
        raise fail(e) from None


def fail(sentence, code=2):
    """SystemExit with `code`, after one line on stderr (from the first process only, when there are several)."""
    if os.environ.get('RANK', '0') == '0':
        print('error: ' + ' '.join(str(sentence).split('\n')), file=sys.stderr)
    return SystemExit(code)


@contextlib.contextmanager
def reporting():
    """Around the work of a command: whatever a person can cause ends in one sentence and a documented exit code."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except ConfigError as e:
        raise fail(e) from None
    except KeyboardInterrupt:
        raise fail('interrupted', 130) from None
    except BrokenPipeError:  # whoever read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as e:  # no permission, no space, no such disk
        raise fail(f'{e.filename or "a file"} could not be read or written: {e.strerror or e}.') from None
    except (MemoryError, RuntimeError) as e:
        if 'without overflow' in str(e):
            raise fail('a number is too large for the computation; lower learning_rate or what else is huge.') from None
        if isinstance(e, RuntimeError) and 'allocate' not in str(e) and 'out of memory' not in str(e):
            raise
        raise fail('there is not enough memory for this; ask for a smaller model, batch or dataset.') from None
