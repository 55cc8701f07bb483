"""Losses: that of training, over several passes, and that of each token. None holds the logits of a whole batch."""

import torch
import torch.nn.functional as F

from support.buffers import as_slice

LOGITS_AT_ONCE = 2**25  # elements: enough for full speed, and little beside a model with so large a vocabulary


def count_scored(targets, passes):
    """Scored positions (targets != -1) of each pass, (len(passes),); targets (B, T), passes as ranges."""
    scored = (targets >= 0).sum(0)
    return torch.stack([scored[as_slice(p)].sum() for p in passes])


def summed_loss(model, y, targets):
    """Summed cross-entropy of y (n, D), the top of the stack, at targets (n,), -1 where nothing is scored."""
    return F.cross_entropy(model.logits(y), targets, ignore_index=-1, reduction='sum')


class ScoredLoss(torch.autograd.Function):
    """The weighted sum of the summed cross-entropies of several passes.

    Logits are made, scored and differentiated a few positions at a time, all in the forward: what is kept for the backward is
    as large as the outputs and the head, whatever the number of passes and the vocabulary.
    """

    @staticmethod
    def forward(ctx, model, targets, weights, *tensors):
        """targets [(B, n)] and weights [scalar tensor] of each pass; tensors: its outputs [(B, n, D)], then the parameters of
        model.logits with gradient. Returns the loss, and the sum of each pass (passes,), which has no gradient."""
        rows, with_grad = max(1, LOGITS_AT_ONCE // model.config.vocab_size), any(ctx.needs_input_grad)
        outputs, parameters = tensors[: len(targets)], tensors[len(targets) :]
        # Contiguous even where the outputs are not, as with nn.LSTM: they are written through a view.
        gradients = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors] if with_grad else outputs
        sums = []
        for y, target, weight, gradient in zip(outputs, targets, weights, gradients, strict=False):
            sums.append(torch.zeros((), dtype=torch.promote_types(y.dtype, torch.float32), device=y.device))
            chunks = (t.flatten(0, 1).split(rows) for t in (y, target, gradient))
            for part, part_target, part_gradient in zip(*chunks, strict=True):
                with torch.set_grad_enabled(with_grad):
                    part = part.detach().requires_grad_(with_grad)
                    loss = model.summed_loss(part.view_as(part), part_target)  # hooks of modules want no leaf
                    new = torch.autograd.grad(loss * weight, (part, *parameters)) if with_grad else ()
                for total, term in zip((part_gradient, *gradients[len(targets) :]), new, strict=with_grad):
                    total += term
                sums[-1] += loss.detach()
        ctx.gradients, sums = gradients, torch.stack(sums)
        ctx.mark_non_differentiable(sums)
        return sum(s * w for s, w in zip(sums, weights, strict=True)), sums

    @staticmethod
    def backward(ctx, upstream, _):
        return None, None, None, *(upstream * g for g in ctx.gradients)


def scored_loss(model, outputs, targets, counts, weights):
    """The mean over passes of each pass's own mean, weighted; passes with nothing to score are left out.

    outputs [(B, n, D)], targets [(B, n)], counts (passes,) on the host or the device of the outputs, weights: numbers. Returns
    the loss (a scalar, 0 when nothing at all is scored) and each pass's mean (passes,).
    """
    dtype = torch.promote_types(outputs[0].dtype, torch.float32)
    weights = torch.tensor(weights, dtype=dtype, device=counts.device) * (counts > 0)
    weights = weights / (weights.sum().clamp(min=torch.finfo(weights.dtype).tiny) * counts.clamp(min=1))
    tensors = [y.detach() for y in outputs]
    if torch.is_grad_enabled():
        tensors = [*outputs, *(p for part in (model.norm, model.head) for p in part.parameters() if p.requires_grad)]
    loss, sums = ScoredLoss.apply(model, targets, weights.unbind(), *tensors)
    return loss, torch.stack([s / n for s, n in zip(sums, counts.clamp(min=1), strict=True)])


def score_tokens(model, hidden, targets):
    """(-log p, whether it is the likeliest token) of each of the targets (..), from the top of the stack (.., n_embd) where
    they are predicted; float64 and bool, on the CPU. A target of -1 gives 0 and False."""
    rows, scores = max(1, LOGITS_AT_ONCE // model.config.vocab_size), []
    for part, target in zip(hidden.flatten(0, -2).split(rows), targets.flatten().split(rows), strict=True):
        logits = model.logits(part)
        nll = F.cross_entropy(logits, target, ignore_index=-1, reduction='none')
        scores.append(torch.stack([nll, (logits.argmax(-1) == target).to(nll.dtype)]))
    nll, hit = torch.cat(scores, 1).cpu().double().view(2, *targets.shape)
    return nll, hit.bool()


def token_nll(model, x, y, schedule, state=None):
    """-log p of the targets y (B, T) under `schedule`, after `state` if there is one, in float64 on the CPU."""
    return score_tokens(model, model(x, schedule=schedule, state=state, logits_from=None), y)[0]
