"""Schedules: which positions each pass over the span recomputes, and which passes carry gradient.

A schedule is an ordered list of passes. Each recomputes the span at its positions, reads the newest memory and the newest keys
and values of all others, and writes both back. What a new schedule needs is here; model.py runs whatever `passes` lists.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from configurator import ConfigError, check_keys, key, within
from support.convergence import drop_converged


class Pass(NamedTuple):
    """One pass over the span."""

    positions: range  # what it recomputes
    reads_memory: bool  # False in the initial pass
    with_grad: bool  # in training; LRT scores the outputs of these passes


@dataclass
class Schedule:
    """How a recurrence runs over a whole sequence."""

    schedule: str = key(
        'parallel',
        'passes over the span: one without memory; fixed-point; strided subsets; chunks; one position at a time',
        ('parallel', 'jacobi', 'interleaved', 'chunked', 'sequential'),
        heading='Schedule',
    )
    d_forward: int = key(16, 'jacobi: passes over all positions after the initial one', bounds=(0, 10**7))
    d_backward: int = key(4, 'jacobi: how many of the d_forward + 1 passes, from the last, carry gradient', bounds=(1, 10**7))
    n_subsets: int = key(2, 'interleaved: S, pass i recomputes the positions p with p mod S = i', bounds=(1, 10**7))
    n_sweeps: int = key(1, 'interleaved: how often the S subsets are recomputed', bounds=(1, 10**7))
    scan: bool = key(False, 'jacobi, interleaved: each pass solves the direct path of the memory (docs/scan.md)')
    min_passes: int = key(
        -1,
        'jacobi: each training step draws d_forward evenly, from this number on; interleaved: n_sweeps; none: all steps alike',
        bounds=(0, 10**7),
        names={'none': -1},
    )
    jacobi_tol: float = key(0.0, 'end passes without gradient at a relative change below this; 0 never', bounds=(0, math.inf))
    chunk_size: int = key(64, 'chunked: positions in a chunk', bounds=(1, 10**7))
    pass_weights: tuple = key((), 'LRT: weight of each scored pass in the loss, the initial one first; empty means equal')

    def check(self):
        """Raises ConfigError, one sentence, for a schedule that cannot run."""
        check_keys(self)
        for name, off in (('jacobi_tol', 0), ('scan', False), ('min_passes', -1)):
            if (value := getattr(self, name)) != off and self.schedule not in ('jacobi', 'interleaved'):
                raise ConfigError(f'schedule={self.schedule} takes no {name}={value}; take schedule=jacobi or interleaved.')
        if self.schedule == 'jacobi' and self.d_backward > (n := self.d_forward + 1):
            raise ConfigError(f'd_backward={self.d_backward} exceeds d_forward + 1 = {n} passes; take d_backward={n} or less.')
        if self.min_passes >= 0:
            name, least = ('d_forward', 0) if self.schedule == 'jacobi' else ('n_sweeps', 1)
            within('min_passes', self.min_passes, least, getattr(self, name), f'it is the least {name} that a step draws')
            if self.pass_weights:
                raise ConfigError('min_passes draws the number of passes, and pass_weights needs a fixed one; leave one out.')
        if self.pass_weights:
            scored = {'interleaved': self.n_subsets * self.n_sweeps + 1, 'jacobi': self.d_backward}.get(self.schedule, 0)
            if len(self.pass_weights) != scored or min(self.pass_weights) < 0 or sum(self.pass_weights) <= 0:
                raise ConfigError(
                    f'pass_weights={self.pass_weights} must be {scored or "no"} numbers, one for each scored pass of '
                    f'schedule={self.schedule} (jacobi and interleaved have a fixed number), none negative and not all 0.'
                )

    @property
    def initial(self):
        """Whether the first pass runs over all positions without memory."""
        return self.schedule in ('parallel', 'jacobi', 'interleaved')

    @property
    def numbers(self):
        """The numbers of passes (jacobi: d_forward; interleaved: n_sweeps) of which a training step draws one, a range."""
        full = self.n_sweeps if self.schedule == 'interleaved' else self.d_forward
        return range(full if self.min_passes < 0 else self.min_passes, full + 1)

    def with_passes(self, number):
        """This schedule with one of its `numbers`."""
        if self.min_passes < 0:
            return self
        if self.schedule == 'interleaved':
            return replace(self, min_passes=-1, n_sweeps=number)
        return replace(self, min_passes=-1, d_forward=number, d_backward=min(self.d_backward, number + 1))

    def passes(self, T, reads_from=0):
        """The passes over a sequence of T positions, in order.
        reads_from: no position before it reads memory. By the exact-prefix law the positions before reads_from + k - 1 are
        final when pass k of `jacobi` begins; passes without gradient leave them out.
        """
        whole = range(T)
        if not self.initial:
            size = self.chunk_size if self.schedule == 'chunked' else 1
            return [Pass(whole[t : t + size], True, True) for t in range(0, T, size)]
        if self.schedule == 'jacobi':
            first_with_grad = self.d_forward + 1 - self.d_backward
            passes = [Pass(whole, False, first_with_grad <= 0)]
            for k in range(1, self.d_forward + 1):
                positions = whole if k >= first_with_grad else drop_converged(whole, reads_from + k - 1)
                passes += [Pass(positions, True, k >= first_with_grad)] if positions else []
            return passes
        passes = [Pass(whole, False, True)]
        if self.schedule == 'interleaved':
            passes += [Pass(whole[i :: self.n_subsets], True, True) for i in range(min(self.n_subsets, T))] * self.n_sweeps
        return passes

    def weights(self, T):
        """The weight of each pass with gradient in the loss. Raises ConfigError where all weight is on empty subsets."""
        if not self.pass_weights:
            return [1.0 for p in self.passes(T) if p.with_grad]
        weights, S = self.pass_weights, self.n_subsets
        if self.schedule == 'interleaved' and S > T:  # the last subsets of each sweep are empty
            weights = weights[:1] + tuple(w for i, w in enumerate(weights[1:]) if i % S < T)
            if not any(weights):
                raise ConfigError(
                    f'pass_weights={self.pass_weights} scores nothing in a sequence of {T} tokens, which has {T} of the {S} '
                    f'subsets; take n_subsets={T} or less, or weigh an earlier pass.'
                )
        return weights


PARALLEL, SEQUENTIAL = Schedule(), Schedule(schedule='sequential')


def exact_schedule(T, how='auto'):
    """The exact recurrence over T positions: token by token, or Jacobi passes until float32 shows no change."""
    jacobi = how == 'jacobi' or (how == 'auto' and T > 256)  # far fewer passes than positions
    return Schedule('jacobi', d_forward=T, d_backward=1, jacobi_tol=1e-5) if jacobi else SEQUENTIAL
