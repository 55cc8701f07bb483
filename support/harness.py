"""A model behind the interface of the LM Evaluation Harness, and the CORE average."""

import hashlib
import json

import torch
from tqdm import tqdm

from configurator import ConfigError
from schedule import exact_schedule
from support.loss import score_tokens
from support.optional import import_optional
from support.processes import is_first, warn
from support.tokens import encode

# CORE (DCLM): {(examples before the question, metric, accuracy of guessing): tasks}, and those of its 22 that the
# harness lacks.
CORE = {
    (0, 'acc', 0.0): 'lambada_openai',
    (0, 'acc', 0.25): 'openbookqa',
    (0, 'acc', 0.5): 'copa winogrande wsc273',
    (0, 'em', 0.0): 'coqa',
    (3, 'acc', 0.25): 'agieval_lsat_ar',
    (10, 'acc', 0.2): 'commonsense_qa',
    (10, 'acc', 0.25): 'arc_easy arc_challenge bigbench_language_identification_multiple_choice',
    (10, 'acc', 0.5): 'boolq piqa',
    (10, 'acc_norm', 0.25): 'hellaswag',
    (10, 'exact_match', 0.0): 'bigbench_cs_algorithms_generate_until bigbench_dyck_languages_generate_until '
    'bigbench_operators_generate_until bigbench_qa_wikidata_generate_until bigbench_repeat_copy_logic_generate_until',
}
CORE = {task: numbers for numbers, tasks in CORE.items() for task in tasks.split()}
BROKEN = ImportError, AssertionError  # the harness cannot run a task, whatever the data: a package is missing, or is too new
LEFT_OUT = ['jeopardy', 'squad as completion', 'hellaswag without examples']


def score_continuations(model, pairs, batch_size):
    """(log-probability, whether greedy decoding would give it) of each continuation, for pairs (context ids, its ids). Exact
    decoding. A continuation of more than block_size tokens is scored in pieces of block_size; what comes before a piece is cut
    from the left where the two do not fit. An empty continuation scores 0. The order and the batch do not matter."""
    T, device = model.config.block_size, model.embed.weight.device
    pieces = []  # (number of the pair, tokens, how many of them, at the end, are scored)
    for i, (context, continuation) in enumerate(pairs):
        for start in range(0, len(continuation), T):
            piece = continuation[start : start + T]
            pieces.append((i, (context + continuation[:start] + piece)[-T - 1 :], len(piece)))
    pieces.sort(key=lambda piece: -len(piece[1]))
    scores = [(0.0, len(continuation) > 0) for _, continuation in pairs]
    for low in tqdm(range(0, len(pieces), batch_size), unit='batch', leave=False, disable=None if is_first() else True):
        batch = pieces[low : low + batch_size]
        longest = len(batch[0][1]) - 1
        padded = [row[:-1] + [0] * (longest + 1 - len(row)) for _, row, _ in batch]  # padding at the end changes nothing
        outputs = model(torch.tensor(padded, device=device), schedule=exact_schedule(longest), logits_from=None)
        for (i, row, n), hidden in zip(batch, outputs, strict=True):
            nll, hit = score_tokens(model, hidden[len(row) - 1 - n : len(row) - 1], torch.tensor(row[-n:], device=device))
            total, greedy = scores[i]
            scores[i] = total - nll.sum().item(), greedy and bool(hit.all())
    return scores


def split_request(meta, context, continuation):
    """(ids of the context, ids of the continuation) of a request of the harness, as its own classes split. Spaces at the end of
    the context belong to the continuation, and the whole is encoded once. Where a token crosses the border, so that no token is
    left after the context's, the last token of the whole is what is scored."""
    whole = encode(meta, context + continuation)
    n = min(len(encode(meta, context.rstrip())), max(len(whole) - 1, 0))
    return whole[:n], whole[n:]


def harness(model, meta, batch_size, results, generate, opens=True):
    """Our model for the lm-eval harness (optional: pip install lm-eval). results (ResumableResults): what an interrupted
    run has measured; where it has several processes, each scores a part of the requests and all have all results.
    generate(model, meta, prompts, max_tokens, temperature, stops): the texts that are decoded after prompts (ids). opens: the
    document token comes before every text, as in our training; else only where there is no context at all."""
    LM = import_optional('lm_eval.api.model', 'lm-eval').LM
    Collator = import_optional('lm_eval.models.utils', 'lm-eval').Collator

    def resumable(measure):
        """A method of the harness from a function that turns the arguments of some requests into their results."""

        def method(self, requests):
            arguments = [request.args for request in requests]
            order = sorted(range(len(arguments)), key=lambda i: sum(len(a) for a in arguments[i] if isinstance(a, str)))[::-1]
            ordered = [arguments[i] for i in order]  # little padding, and equal work for processes side by side
            name = f'{measure.__name__} {hashlib.sha256(json.dumps(ordered).encode()).hexdigest()}'
            starts = range(0, len(ordered), batch_size)
            parts = results.batches(name, starts, lambda low: measure(ordered[low : low + batch_size]))
            measured = dict(zip(order, (result for part in parts for result in part), strict=True))
            return [tuple(r) if isinstance(r, list) else r for r in (measured[i] for i in range(len(order)))]

        return method

    def opening(context):
        return [meta['document_token']] if opens or not context else []

    class Harness(LM):
        @resumable
        def loglikelihood(arguments):
            pairs = [split_request(meta, *request) for request in arguments]
            if empty := sum(not continuation for _, continuation in pairs):
                warn(f'{empty} of the requests of the harness have no token to score and count as 0')
            return score_continuations(model, [(opening(context) + context, ids) for context, ids in pairs], batch_size)

        @resumable
        def loglikelihood_rolling(arguments):
            pairs = [([meta['document_token']], encode(meta, text)) for (text,) in arguments]
            return [total for total, _ in score_continuations(model, pairs, batch_size)]

        @resumable
        def generate_until(arguments):
            texts, T = [], model.config.block_size
            batches = Collator(arguments, sort_fn=lambda request: len(request[0]), group_by='gen_kwargs')  # of equal settings
            for batch in batches.get_batched(batch_size):
                settings, stops = batch[0][1], batch[0][1].get('until') or []
                length = min(settings.get('max_gen_toks', 256), T - 1)
                temperature = settings.get('temperature', 1.0) if settings.get('do_sample', False) else 0.0
                prompts = (encode(meta, context) for context, _ in batch)
                prompts = [[*opening(ids), *ids][-(T - length + 1) :] for ids in prompts]
                texts += generate(model, meta, prompts, length, temperature, [stops] if isinstance(stops, str) else stops)
            return batches.get_original(texts)

    return Harness()


def run_harness(lm, config):
    """{task: {metric: value}} of the harness, and with CORE its centred average: the mean of (acc - guess) / (1 - guess), over
    how many 'tasks', and what is 'left_out': also tasks that BROKEN ends. Raises ConfigError where data cannot be had."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=config.lm_tasks or None)
    shared = dict(model=lm, task_manager=manager, limit=config.limit or None, bootstrap_iters=0)
    core, metrics, left_out = config.lm_eval == 'core', {}, list(LEFT_OUT)
    for name in CORE if core else config.lm_eval.split(','):
        shots = CORE[name][0] if core else config.num_fewshot
        try:
            scores = lm_eval.simple_evaluate(tasks=[name], num_fewshot=None if shots < 0 else shots, **shared)['results']
        except (ValueError, KeyError, OSError, *BROKEN) as e:
            reason = f'{type(e).__name__}: {str(e)[:200]}'
            if not core or not isinstance(e, BROKEN):
                raise ConfigError(f'the task {name} could not be run ({reason}).') from None
            left_out.append(f'{name} ({reason})')
            continue
        for task, values in scores.items():
            numbers = {k.partition(',')[0]: v for k, v in values.items() if isinstance(v, float) and 'stderr' not in k}
            metrics[task] = numbers
            if is_first():
                print(f'{task:<50}' + '  '.join(f'{k} {v:.4f}' for k, v in numbers.items()))
    if core:
        known = {name: numbers for name, numbers in CORE.items() if name in metrics}
        if not known:
            raise ConfigError(f'no task of CORE could be run; the last was {left_out[-1]}.')
        centred = [(metrics[name][metric] - guess) / (1 - guess) for name, (_, metric, guess) in known.items()]
        metrics['CORE'] = {'centred': sum(centred) / len(centred), 'tasks': len(centred), 'left_out': left_out}
        if is_first():
            print(f'{"CORE":<50}centred {metrics["CORE"]["centred"]:.4f}')
            print(f'CORE is the average of {len(centred)} tasks; left out: {", ".join(left_out)}.')
    return metrics
