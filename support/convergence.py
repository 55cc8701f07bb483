"""How far the passes of one forward have come: which positions still change, and by how much."""

import torch


class Convergence:
    """Follows how much each pass changes the output of the span. A pass without gradient leaves out the positions before the
    first that changed by `jacobi_tol` or more in the last sweep: they depend on nothing that still changes."""

    def __init__(self, schedule, T, wanted, rounding):
        """wanted: whether the caller asks for `changes`, the largest relative change of each pass after the initial one.
        rounding: the relative change that rounding alone makes."""
        self.tolerance = schedule.jacobi_tol and max(schedule.jacobi_tol, rounding)
        self.measures = schedule.initial and (wanted or self.tolerance > 0)
        self.sweep = min(schedule.n_subsets, T) if schedule.schedule == 'interleaved' else 1  # passes that cover T once
        self.end, self.first_moving, self.changes = T, [], []

    def moving(self, p):
        """The positions that pass p has to recompute."""
        if (p.with_grad and torch.is_grad_enabled()) or len(self.first_moving) < self.sweep:
            return p.positions
        return drop_converged(p.positions, min(self.first_moving[-self.sweep :]))

    def add(self, positions, old, new):
        """Takes the outputs (B, n, D) of a pass at `positions` and of the last one before it; old is None in the first."""
        if old is None or not self.measures:
            return
        first = self.end
        if positions:
            smallest = torch.finfo(new.dtype).tiny
            with torch.no_grad():  # and no decorator, which torch.compile cannot trace on a method
                change = ((new - old).norm(dim=-1) / new.norm(dim=-1).clamp(min=smallest)).amax(0)  # of each position
            self.changes.append(change.max())
            if self.tolerance and len(moving := (~(change < self.tolerance)).nonzero()):
                first = positions[int(moving[0])]
        if self.tolerance:
            self.first_moving.append(first)


def drop_converged(positions, first):
    """The `positions`, a range, without those before `first`. Whole eighths are left out, for few shapes to compile."""
    unit = max(1, len(positions) // 8)
    skipped = len(range(positions.start, min(first, positions.stop), positions.step))
    return positions[skipped if skipped == len(positions) else skipped // unit * unit :]
