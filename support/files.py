"""Finds the files of a source and opens them, packed or not; what is passed over is counted."""

import difflib
import glob
import gzip
import io
import os
import re
import sysconfig
from collections import Counter, deque
from pathlib import Path

from configurator import ConfigError
from support.optional import import_optional

STDLIB_LEAVES_OUT = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}  # installed packages and tests
PACKED = ('.gz', '.zst')
JSONL, JSON, TXT = ((kind, *(kind + packed for packed in PACKED)) for kind in ('.jsonl', '.json', '.txt'))  # endings


def find_files(source, extensions='', out=''):
    """Paths of the documents, sorted by their path below the source that holds them, each once. Without a source they are
    the interpreter's own library. Raises ConfigError for a source that does not exist, and for a link that leads nowhere."""
    endings = tuple('.' + e.strip().lstrip('.') for e in extensions.split(',') if e.strip())
    passed, files = Counter(), {}
    for path, name in source_files(source, endings, out, passed) if source else stdlib_files(endings or '.py'):
        place = os.path.realpath(os.path.dirname(path)), os.path.basename(path)
        files.setdefault(place, (name, os.path.abspath(path)))
    if passed:
        kinds = ', '.join(f'{n:,} {kind}' for kind, n in passed.most_common())
        print(f'source={source}: passed over {kinds}')
    return [path for _, path in sorted(files.values(), key=lambda file: file[0])]


def stdlib_files(endings):
    """Yields (path, path below the library) of the interpreter's own library, except STDLIB_LEAVES_OUT, linked folders, and
    the build record _sysconfigdata*, which names folders of one machine."""
    root = sysconfig.get_path('stdlib')

    def enters(folder):
        name = os.path.basename(folder)
        return name[0] != '.' and name not in STDLIB_LEAVES_OUT and not os.path.islink(folder)

    for folder, names in folders_below(root, enters):
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(endings) and not name.startswith(('.', '_sysconfigdata')) and os.path.isfile(path):
                yield path, os.path.relpath(path, root)


def source_files(source, endings, out, passed):
    """Yields (path, path below its source) of the files that `source` names. Folders, linked ones too, are searched to the
    bottom, apart from hidden files and `out` itself. `passed` counts what is passed over."""

    def enters(folder):
        if os.path.basename(folder)[0] == '.':
            passed['hidden folders'] += 1
            return False
        return os.path.realpath(folder) != os.path.realpath(out)

    for root in (root for part in source.split(',') if part.strip() for root in match_source(part.strip())):
        if os.path.isfile(root):
            yield root, os.path.basename(root)
        for folder, names in folders_below(root, enters) if os.path.isdir(root) else ():
            for name in names:
                path = os.path.join(folder, name)
                if name[0] == '.':
                    passed['hidden files'] += 1
                elif not os.path.exists(path):
                    raise ConfigError(f'{path} is a link that leads nowhere; mend or remove it.')
                elif not name.endswith(endings or '') or not os.path.isfile(path):
                    passed[ending(name) or 'without an ending'] += 1
                else:
                    yield path, os.path.relpath(path, root)


def match_source(source):
    """The paths that a name or pattern in a source stands for; ConfigError for none."""
    source = os.path.expanduser(source)
    if matches := [source] if os.path.exists(source) else paths_like(source):
        return matches
    path = Path(source)
    close = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob('*')], n=1)
    hint = f'did you mean {path.parent / close[0]}?' if close else 'name a file, a folder or a pattern.'
    raise ConfigError(f'source={source} matches no file; {hint}')


def folders_below(root, enters):
    """Yields (folder, names of its files) of `root` and of the folders below that it `enters`, each once, linked ones last."""
    waiting, seen = deque([root]), set()

    def stop(error):
        raise error

    while waiting:
        for folder, below, names in os.walk(waiting.popleft(), onerror=stop):
            if (real := os.path.realpath(folder)) in seen:
                below.clear()
                continue
            seen.add(real)
            below[:] = sorted(b for b in below if enters(os.path.join(folder, b)))
            waiting.extend(os.path.join(folder, b) for b in below if os.path.islink(os.path.join(folder, b)))
            yield folder, names


def paths_like(pattern):
    """Sorted paths that match a pattern, in which ** stands for any number of folders. Each folder
    is entered once, where glob would follow two links to a folder above more than 2^40 times."""
    start, *rest = re.split(r'(?:^|(?<=/))\*\*(?:/|$)', pattern, maxsplit=1)
    if rest in ([], ['']):
        return sorted(glob.glob(start or '.') if rest else glob.glob(pattern))
    roots = [root for root in glob.glob(start or '.') if os.path.isdir(root)]
    folders = (folder for root in roots for folder, _ in folders_below(root, lambda f: os.path.basename(f)[0] != '.'))
    return sorted(path for folder in folders for path in paths_like(os.path.join(glob.escape(folder), *rest)))


def ending(path):
    """The ending of a file's name, like .txt; of a packed file both, like .txt.gz."""
    name, last = os.path.splitext(path)
    return os.path.splitext(name)[1] + last if last in PACKED else last


def unpacked(path, f):
    """The file object `f` of the file at `path`, or one that unpacks it if the name ends in .gz or .zst."""
    if path.endswith('.gz'):
        return gzip.open(f)
    return io.BufferedReader(import_optional('pyarrow').CompressedInputStream(f, 'zstd')) if path.endswith('.zst') else f


def refuse_scripts(files, kinds):
    """ConfigError for the first file that is Python code; it suggests a pattern for a file of `kinds` beside it."""
    for path in files:
        if path.endswith('.py'):
            folder = os.path.dirname(path)
            beside = (f for f in files if f.startswith(folder + os.sep) and ending(f) in kinds)
            data = next(beside, f'{folder}/x{kinds[0]}')
            pattern = f'{os.path.dirname(data)}/*{ending(data)}'
            raise ConfigError(f'{path} is a script, and no code of a dataset is run; name its data, like --source={pattern}.')
