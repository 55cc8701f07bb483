"""Results of a long evaluation, kept as they come."""

import contextlib
import hashlib
import json
import os
from pathlib import Path

from tqdm import tqdm


class ResumableResults:
    """The results of an evaluation's batches, in a file until all are measured: an interrupted evaluation continues."""

    def __init__(self, path, identity):
        """path: that of the final results and `.part`. identity: all that they depend on, as JSON. Each line holds its digest:
        another evaluation may write to the same file, and its lines are skipped."""
        self.path, self.measured = path, {}
        self.identity = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        text = Path(path).read_text(encoding='utf-8', errors='replace') if os.path.exists(path) else ''
        self.gap = '' if text[-1:] in ('', '\n') else '\n'  # ends a last line that was cut short
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError):
                digest, name, start, value = json.loads(line)
                if digest == self.identity:
                    self.measured[name, start] = value

    def add(self, name, start, value):
        """Appends a batch to the file."""
        self.measured[name, start] = value
        with open(self.path, 'a', encoding='utf-8') as f:
            f.write(f'{self.gap}{json.dumps([self.identity, name, start, value])}\n')
        self.gap = ''

    def batches(self, name, starts, measure):
        """measure(start), JSON, for each of the starts; `name` tells measurements apart."""
        for start in tqdm(starts, unit='batch', leave=False, disable=None):
            if (name, start) not in self.measured:
                self.add(name, start, measure(start))
            yield self.measured[name, start]

    def finish(self, results):
        """Writes the results, JSON, removes the file and returns them."""
        Path(self.path.removesuffix('.part')).write_text(json.dumps(results, indent=1), encoding='utf-8')
        Path(self.path).unlink(missing_ok=True)
        return results
