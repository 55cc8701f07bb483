"""The validation losses of a training run, under its own schedule and as decoding has it."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from schedule import SEQUENTIAL


def validate(model, data, config, schedule, process):
    """The results of `evaluate` under the training schedule and, of a recurrence, under the exact one, for fewer sequences."""
    results = {'training schedule': evaluate(model, data, config, schedule, config.eval_batches, process)}
    if config.eval_exact_batches and config.recurrence != 'none':
        one_micro_batch = replace(config, batch_size=config.micro_batch * process.world)
        results['exact'] = evaluate(model, data, one_micro_batch, SEQUENTIAL, config.eval_exact_batches, process)
    return results


@torch.no_grad()
def evaluate(model, data, config, schedule, batches, process):
    """Loss (nats per scored position) on the validation split of the newest output of every position under `schedule`; of tasks
    also the accuracy of each score. All processes share `batches` global batches. A mean over nothing is left out."""
    T = data.length('val', config.block_size)
    micro = config.micro_batch  # the shape that training runs: nothing compiles again
    begin, sums = process.rank * micro * config.accumulation, []
    for step in range(batches):
        rows = data.rows('val', config.seed, step, config.batch_size, T)[begin:]
        for i in range(config.accumulation):
            x, y, mask = data.batch('val', rows[i * micro : (i + 1) * micro], T, process.device)
            with process.autocast():
                logits = model(x, schedule=schedule, recur_mask=mask)
            nll = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction='sum')
            correct = logits.argmax(-1) == y
            pairs = [(nll, (y >= 0).sum())]
            for low, high in data.scores.values():
                of_score = (y >= low) & (y < high)
                pairs.append(((correct & of_score).sum(), of_score.sum()))
            sums.append(torch.stack([torch.stack(pair).to(nll.dtype) for pair in pairs]))  # .item() would wait for the GPU
    totals = process.sum(torch.stack(sums).cpu().double().sum(0))
    return {name: a / b for name, (a, b) in zip(['loss', *data.scores], totals.tolist(), strict=True) if b}
