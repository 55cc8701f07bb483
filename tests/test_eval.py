"""Laws of evaluation: every number against one computed apart, from the logits of one example at a time."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval as evaluation
import prepare_data
from model import GPT
from schedule import SEQUENTIAL, Schedule
from support.accounting import count_flops
from support.data import Dataset
from support.harness import harness, score_continuations
from support.loading import load_model
from support.results import ResumableResults
from train import TrainConfig, train

BASE = dict(n_layer=2, n_head=2, n_embd=16, device='cpu', threads=1, batch_size=4, max_steps=30, warmup_steps=5)
BASE |= dict(learning_rate=1e-2, eval_exact_batches=0, eval_batches=1)
T2MLR = dict(recurrence='t2mlr', l_start=1, l_end=1, gamma_init=0.5, schedule='jacobi', d_forward=2, d_backward=2)
LRT = dict(recurrence='lrt', source_layer=1, schedule='interleaved')
MODELS = {'transformer': {}, 't2mlr': T2MLR, 'lrt': LRT, 'lstm': dict(architecture='lstm')}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """{(kind of data, model): out_dir}: a task with test examples longer than the trained ones, and a text with é and 中."""
    root = tmp_path_factory.mktemp('eval')
    sizes = ['--n_train=100', '--n_val=20', '--n_test=37']
    prepare_data.main(['s5', '--group=3', '--steps=1-3', '--test_steps=1-5', '--value_len=2', *sizes, f'--out={root}/task'])
    (root / 'source').mkdir()
    for i in range(6):
        (root / 'source' / f'{i}.txt').write_text(f'document {i} é中 ' * 20)
    prepare_data.main(['text', f'--source={root}/source', '--val_fraction=0.3', f'--out={root}/text'])
    found = {}
    for data in ('task', 'text'):
        for name, changed in MODELS.items():
            out = root / f'{data}-{name}'
            sized = {'block_size': 64 if data == 'task' else 20}
            if data == 'text' and name != 'lstm':
                sized['reset_token'] = 256
            train(TrainConfig(**BASE | changed | sized | {'data_dir': f'{root}/{data}', 'out_dir': str(out)}))
            found[data, name] = out
    return found


def measured(capsys, *argv):
    capsys.readouterr()
    evaluation.main(['--device=cpu', '--threads=1', '--json=True', *argv])
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


def refused(capsys, *argv):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        evaluation.main(['--device=cpu', *argv])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and len(err.splitlines()) == 1 and err.startswith('error: ')
    return err


@pytest.mark.parametrize('batch_size', [1, 5, 64])
@pytest.mark.parametrize('name', MODELS)
def test_task_accuracies_equal_those_counted_by_hand(runs, capsys, name, batch_size):
    out = runs['task', name]
    found, _ = measured(capsys, f'--ckpt={out}', f'--batch_size={batch_size}')
    model, checkpoint = load_model(str(out / 'ckpt.pt'))
    data = Dataset(checkpoint['config']['data_dir'])
    arrays = data.split('test')
    trained = evaluation.schedules(checkpoint['config'])['training']
    assert set(found) >= ({'training', 'exact'} if name in ('t2mlr', 'lrt') else {'training'})
    assert ('exact' in found) == (name in ('t2mlr', 'lrt')) and found['trained_length'] == 3
    for label, schedule in (('training', trained), ('exact', SEQUENTIAL)):
        if label not in found:
            continue
        hits = {'state': [], 'retrieval': []}
        for row in range(len(arrays['tokens'])):  # one unpadded example at a time
            n = int(arrays['lengths'][row])
            tokens, targets = (torch.from_numpy(arrays[k][row : row + 1, :n].astype(np.int64)) for k in ('tokens', 'targets'))
            mask = torch.from_numpy(arrays['recur_mask'][row : row + 1, :n])
            with torch.no_grad():
                right = (model(tokens, schedule=schedule, recur_mask=mask).argmax(-1) == targets)[0]
            scored = [i for i in range(n) if targets[0, i] >= 0]
            for j, i in enumerate(scored):  # an action, its two slots, an action, ..
                kind = 'state' if j % 3 == 0 else 'retrieval'
                hits[kind].append((1 + j // 3, int(arrays['steps'][row]), bool(right[i])))
        for kind, rows in hits.items():
            mine = found[label][kind]
            assert mine['all'] == pytest.approx(np.mean([h for *_, h in rows]))
            assert mine['last'] == pytest.approx(np.mean([h for step, length, h in rows if step == length]))
            for key, column, last in (('by_position', 0, False), ('by_length', 1, False), ('last_by_length', 1, True)):
                chosen = [r for r in rows if not last or r[0] == r[1]]
                values = sorted({r[column] for r in chosen})
                expected = {str(v): np.mean([r[2] for r in chosen if r[column] == v]) for v in values}
                assert mine[key] == pytest.approx(expected)


@pytest.mark.parametrize('name', MODELS)
def test_bits_per_byte_equal_those_summed_by_hand(runs, capsys, name):
    out = runs['text', name]
    found, printed = measured(capsys, f'--ckpt={out}')
    model, checkpoint = load_model(str(out / 'ckpt.pt'))
    stream = torch.from_numpy(Dataset(checkpoint['config']['data_dir']).split('val').astype(np.int64))
    for label, schedule in (evaluation.schedules(checkpoint['config'])).items():
        nats, count = 0.0, 0
        for start in range(0, len(stream) - 1, 20):  # the last window is shorter
            window = stream[start : start + 21][None]
            with torch.no_grad():
                p = F.log_softmax(model(window[:, :-1], schedule=schedule).double(), -1)
            for i, token in enumerate(window[0, 1:].tolist()):
                if token != 256:
                    nats, count = nats - p[0, i, token].item(), count + 1
        assert found[label]['tokens'] == count
        assert found[label]['nats_per_token'] == pytest.approx(nats / count, rel=1e-5)
        assert found[label]['bits_per_byte'] == pytest.approx(nats / count / math.log(2), rel=1e-5)
    assert 'bits per byte' in printed and ('exact' in found) == (name in ('t2mlr', 'lrt'))
    assert json.loads((out / 'eval-text-val.json').read_text()) == found
    saved = checkpoint['config']
    assert found['training_flops'] == count_flops(model, TrainConfig(**saved), 20)['step'] * 30 * 4 * 20
    assert found['parameters'] == sum(p.numel() for p in model.parameters()) and found['training_seconds'] > 0
    assert {k: saved[k] for k in found['settings']} == found['settings'] and found['settings']['max_steps'] == 30


def test_the_schedules_differ_and_a_batch_limit_spreads(runs, capsys):
    found, _ = measured(capsys, f'--ckpt={runs["text", "t2mlr"]}')
    assert found['training']['bits_per_byte'] != found['exact']['bits_per_byte']
    part, _ = measured(capsys, f'--ckpt={runs["text", "t2mlr"]}', '--batch_size=2', '--max_batches=3')
    assert 0 < part['exact']['tokens'] <= 120 < found['exact']['tokens']


def test_several_checkpoints_make_one_table_a_file_and_a_figure(runs, capsys, tmp_path):
    names = ['transformer', 't2mlr', 'lrt', 'lstm']
    found, out = measured(
        capsys,
        '--ckpt=' + ','.join(str(runs['task', n]) for n in names),
        f'--results={tmp_path}/r.json',
        f'--figure={tmp_path}/a.png',
    )
    written = json.loads((tmp_path / 'r.json').read_text())
    assert list(written) == list(found) == [f'task-{n}' for n in names]
    for name, scores in written.items():
        measured_here = found[name].get('exact', found[name]['training'])
        assert scores == {
            'state': measured_here['state']['by_length']['3'],
            'state_last': measured_here['state']['last_by_length']['3'],
            'retrieval': measured_here['retrieval']['by_length']['3'],
        }
        assert name in out
    assert (tmp_path / 'a.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


def test_a_length_that_is_not_measured_is_a_dash(runs, capsys, tmp_path):
    """Where no example of the few that are measured has the longest trained length, the table says so."""
    both = ','.join(str(runs['task', name]) for name in ('transformer', 'lrt'))
    limits = ['--batch_size=1', '--max_batches=1']
    arrays = Dataset(str(runs['task', 'lrt'].parent / 'task')).split('test')
    assert arrays['steps'][0] != 3
    found, out = measured(capsys, f'--ckpt={both}', *limits, f'--results={tmp_path}/r.json', f'--figure={tmp_path}/f.png')
    assert out.count(' -  ') and json.loads((tmp_path / 'r.json').read_text())['task-lrt']['state'] is None


def test_what_cannot_be_measured_is_one_sentence(runs, capsys, tmp_path, monkeypatch):
    task, text = runs['task', 't2mlr'], runs['text', 't2mlr']
    monkeypatch.chdir(tmp_path)
    assert 'no checkpoint under out/' in refused(capsys)
    assert 'split=nonsense' in refused(capsys, f'--ckpt={task}', '--split=nonsense')
    assert 'no checkpoint' in refused(capsys, '--ckpt=nowhere.pt')
    assert 'holds no dataset' in refused(capsys, f'--ckpt={task}', '--data_dir=nowhere')
    assert 'text model' in refused(capsys, f'--ckpt={text}', '--results=r.json')
    assert 'passes=True measures texts' in refused(capsys, f'--ckpt={task}', '--passes')
    assert not (tmp_path / 'r.json').exists()
    (tmp_path / 'cut.pt').write_bytes((task / 'ckpt.pt').read_bytes()[:-100])
    assert 'cannot be used' in refused(capsys, '--ckpt=cut.pt')
    for given in ('batch_size=0', 'max_batches=-1', 'threads=-1'):
        assert given in refused(capsys, f'--ckpt={task}', f'--{given}')


def test_a_dataset_that_the_model_cannot_read(runs, capsys, tmp_path):
    """Longer examples than its context, more tokens than its vocabulary, a text for a task's model."""
    prepare = ['s5', '--n_train=20', '--n_val=10', '--n_test=10']
    prepare_data.main([*prepare, '--group=3', '--steps=1-3', '--test_steps=40', f'--out={tmp_path}/long'])
    prepare_data.main([*prepare, '--group=4', '--steps=1-3', f'--out={tmp_path}/wide'])
    task = runs['task', 'lrt']
    assert 'context of 64' in refused(capsys, f'--ckpt={task}', f'--data_dir={tmp_path}/long')
    prepare_data.main([*prepare, '--group=3', '--steps=1-3', '--n_values=4', f'--out={tmp_path}/narrow'])
    for other in ('wide', 'narrow'):  # fewer tokens would fit, and mean something else
        assert 'names differs' in refused(capsys, f'--ckpt={task}', f'--data_dir={tmp_path}/{other}')
    text = str(runs['text', 'lrt'].parent / 'text')
    assert 'kind differs' in refused(capsys, f'--ckpt={task}', f'--data_dir={text}')


def test_a_machine_without_git(runs, capsys, monkeypatch):
    monkeypatch.setenv('PATH', '')
    found, _ = measured(capsys, f'--ckpt={runs["task", "lstm"]}', '--max_batches=1')
    assert found['revision'] is None and found['training_seconds'] > 0


def test_checkpoints_of_equal_folder_names_stay_apart(runs, capsys, tmp_path):
    for name in ('t2mlr', 'lrt'):
        (tmp_path / name / 'run').mkdir(parents=True)
        (tmp_path / name / 'run' / 'ckpt.pt').write_bytes((runs['task', name] / 'ckpt.pt').read_bytes())
    found, _ = measured(capsys, f'--ckpt={tmp_path}/t2mlr/run,{tmp_path}/lrt/run', f'--results={tmp_path}/r.json')
    assert len(found) == 2 and list(found) == list(json.loads((tmp_path / 'r.json').read_text()))


def test_a_study_is_a_table_of_means(runs, capsys, tmp_path):
    for name in ('transformer', 't2mlr'):
        measured(capsys, f'--ckpt={runs["text", name]}')
        whole = json.loads((runs['text', name] / 'eval-text-val.json').read_text())
        for seed, shift in ((1, 0.1), (2, -0.1)):
            exact = whole.get('exact', whole['training'])
            whole['training' if name == 'transformer' else 'exact'] = exact | {'bits_per_byte': 2.0 + shift}
            (tmp_path / f'{name}-{seed}.json').write_text(json.dumps(whole))
    found, out = measured(capsys, f'--study={tmp_path}', f'--figure={tmp_path}/f.png')
    assert {name: row['bits_per_byte'] for name, row in found.items()} == pytest.approx({'transformer': 2.0, 't2mlr': 2.0})
    assert out.count('| 2.0000 | 0.2000 |') == 2 and (tmp_path / 'f.png').stat().st_size > 1000
    (tmp_path / 'empty').mkdir()
    assert 'holds no results' in refused(capsys, f'--study={tmp_path}/empty')
    for name in ('transformer', 'lrt'):  # a task, in two made-up seeds
        measured(capsys, f'--ckpt={runs["task", name]}')
        whole = json.loads((runs['task', name] / 'eval-task-test.json').read_text())
        for seed, share in ((1, 0.25), (2, 0.75)):
            for of in (whole['training'], whole.get('exact', whole['training'])):
                of['state']['by_position']['3'] = share
            (tmp_path / 'empty' / f'{name}-{seed}.json').write_text(json.dumps(whole))
    found, out = measured(capsys, f'--study={tmp_path}/empty', f'--figure={tmp_path}/g.png')
    scores = whole.get('exact', whole['training'])
    assert [row['state, step 3'] for row in found.values()] == [0.5, 0.5] and (tmp_path / 'g.png').exists()
    assert found['lrt']['retrieval, step 3'] == pytest.approx(scores['retrieval']['by_position']['3'])
    assert out.count('| 50.0% |') == 2
    (tmp_path / 'lrt-9.json').write_text(json.dumps(whole))
    assert 'different tasks' in refused(capsys, f'--study={tmp_path}')
    (tmp_path / 'lrt-9.json').unlink()
    for content in ('{', '[]', '{}', ''):
        (tmp_path / 'x-1.json').write_text(content)
        assert 'x-1.json cannot be read' in refused(capsys, f'--study={tmp_path}')


def test_files_to_write_are_checked_before_anything_is_measured(runs, capsys, tmp_path):
    task = f'--ckpt={runs["task", "lrt"]}'
    for given in (f'results={tmp_path}/none/r.json', f'figure={tmp_path}/none/f.png', f'results={tmp_path}', 'figure=x.zzz'):
        assert given.partition('=')[0] + '=' in refused(capsys, task, f'--{given}')


def test_what_cannot_be_is_refused_before_anything_is_measured(runs, capsys, tmp_path, monkeypatch):
    """Of one checkpoint or of several, whichever of them is wrong."""
    task, text = (f'{runs[kind, "lrt"]}' for kind in ('task', 'text'))
    sizes = ['--n_train=20', '--n_val=10', '--n_test=10', '--retrieval=False']
    prepare_data.main(['s5', '--group=3', '--steps=1-3', *sizes, f'--out={tmp_path}/state'])
    one = BASE | {
        'block_size': 64,
        'max_steps': 1,
        'warmup_steps': 0,
        'data_dir': f'{tmp_path}/state',
        'out_dir': f'{tmp_path}/run',
    }
    train(TrainConfig(**one))
    monkeypatch.setattr(GPT, 'forward', None)
    monkeypatch.chdir(tmp_path)
    for argv, says in (
        ([f'--ckpt={text}', '--figure=f.png'], 'is a text model'),
        ([f'--ckpt={task},{text}', '--figure=f.png'], 'is a text model'),
        ([f'--ckpt={task},{tmp_path}/run', '--results=r.json'], 'are of several'),
        ([f'--ckpt={task},nowhere'], 'no checkpoint nowhere'),
        ([f'--ckpt={text},{task}', '--split=test'], 'split=test'),
        ([f'--ckpt={text},{runs["text", "transformer"]}', '--diagnose'], 'has none'),
        ([f'--ckpt={text},{text}', '--diagnose', '--figure=f.png'], 'keep one'),
        ([f'--ckpt={text},{task}', '--lm_eval=piqa'], 'needs a text model'),
        ([f'--ckpt={text}', '--lm_eval=piqa', '--diagnose'], 'lm_eval and diagnose'),
        ([f'--ckpt={text}', '--lm_eval=piqa', '--figure=f.png'], 'figure is not written'),
        (['--study=results', '--results=r.json'], 'results is not written'),
        (['--ckpt=hf:nowhere'], 'which lm_eval measures'),
    ):
        assert says in refused(capsys, *argv)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['run', 'state']


def test_a_stream_with_nothing_to_score(runs, capsys, tmp_path):
    text = runs['text', 'lrt'].parent / 'text'
    for tokens in ([65], [256] * 30):
        meta = json.loads((text / 'meta.json').read_text())
        meta['splits']['val']['tokens'] = len(tokens)
        (tmp_path / 'meta.json').write_text(json.dumps(meta))
        np.array(tokens, dtype=np.uint16).tofile(tmp_path / 'val.bin')
        assert 'nothing to score' in refused(capsys, f'--ckpt={runs["text", "lrt"]}', f'--data_dir={tmp_path}')


# Text: passes, positions, convergence, diagnosis


@pytest.mark.parametrize('name', ['t2mlr', 'lrt'])
def test_positions_and_passes_add_up(runs, capsys, name):
    """The buckets of positions cover each once and average to the whole; the last pass is the training schedule; pass 0 is the
    model without memory."""
    out = runs['text', name]
    found, printed = measured(capsys, f'--ckpt={out}', '--passes', '--batch_size=3')
    model, checkpoint = load_model(str(out / 'ckpt.pt'))
    stream = torch.from_numpy(Dataset(checkpoint['config']['data_dir']).split('val').astype(np.int64))
    rows = [stream[i : i + 21] for i in range(0, len(stream) - 1, 20)]
    scored = torch.stack([F.pad(row[1:] != 256, (0, 21 - len(row))) for row in rows]).double()

    def lost(schedule):
        """(windows, 20); 0 where nothing is scored."""
        found = torch.zeros_like(scored)
        for i, row in enumerate(rows):
            with torch.no_grad():
                logits = model(row[None, :-1], schedule=schedule)[0]
            found[i, : len(row) - 1] = F.cross_entropy(logits, row[1:], reduction='none') / math.log(2)
        return found * scored

    for label, schedule in evaluation.schedules(checkpoint['config']).items():
        bits, buckets = lost(schedule), found[label]['by_position']
        assert list(buckets) == ['0-0', '1-1', '2-3', '4-7', '8-15', '16-19']
        for bucket, value in buckets.items():
            a, b = map(int, bucket.split('-'))
            expected = bits[:, a : b + 1].sum() / scored[:, a : b + 1].sum()
            assert value == pytest.approx(expected.item(), rel=1e-5)
    passes = found['training']['passes']
    assert list(passes) == (['pass 0', 'pass 1', 'pass 2'] if name == 't2mlr' else ['pass 0', 'all passes'])
    assert list(passes.values())[-1] == pytest.approx(found['training']['bits_per_byte'], rel=1e-6)
    assert passes['pass 0'] == pytest.approx((lost(Schedule()).sum() / scored.sum()).item(), rel=1e-5)
    assert all(label in printed for label in passes)


@pytest.mark.parametrize('name', MODELS)
def test_iterating_to_convergence_is_exact(runs, capsys, name):
    """And a model without recurrence scores the same in parallel as decoded."""
    exact, _ = measured(capsys, f'--ckpt={runs["text", name]}', '--exact=sequential')
    found, _ = measured(capsys, f'--ckpt={runs["text", name]}', '--exact=jacobi')
    if 'exact' in exact:
        assert found['exact']['bits_per_byte'] == pytest.approx(exact['exact']['bits_per_byte'], rel=1e-4)
        assert found['exact']['nats_from_sequential'] < 1e-3
    else:
        model, _ = load_model(str(runs['text', name] / 'ckpt.pt'))
        x = torch.randint(256, (3, 20))
        state = model.new_state(3)
        with torch.no_grad():
            steps = torch.cat([model(x[:, t : t + 1], schedule=SEQUENTIAL, state=state) for t in range(20)], 1)
            torch.testing.assert_close(steps, model(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('name', ['t2mlr', 'lrt'])
def test_a_diagnosis(runs, capsys, tmp_path, name):
    out = runs['text', name]
    found, printed = measured(capsys, f'--ckpt={out}', '--diagnose', '--batch_size=4', f'--figure={tmp_path}/d.png')
    model, checkpoint = load_model(str(out / 'ckpt.pt'))
    gammas = {n: p.mean().item() for n, p in model.named_parameters() if 'gamma' in n}
    assert found['gammas'] == pytest.approx(gammas) and (tmp_path / 'd.png').stat().st_size > 1000
    if name == 'lrt':
        assert set(found['gates']) == {'0', '1'}
        assert all(0 < gate[k] < 2 for gate in found['gates'].values() for k in ('loc', 'rec'))
    else:
        assert 0 < found['gates']['cur'] < 1 and 0 < found['gates']['rec'] < 1 and found['moved'] > 0
    assert found['residuals'][-1] < 1e-5 or len(found['residuals']) == 20
    # The memory that token t reads, set to 0 for t = 5, 10 and 15: a document that opens at t reads 0 too.
    stream = torch.from_numpy(Dataset(checkpoint['config']['data_dir']).split('val').astype(np.int64))
    starts = np.linspace(0, len(stream) - 21, 4).astype(int)
    windows = torch.stack([stream[i : i + 21] for i in starts])
    effects = []
    for t in (5, 10, 15):
        losses = []
        for reads in (True, False):
            mask = torch.ones(4, 20, dtype=torch.bool)
            logits = model(windows[:, :-1], schedule=SEQUENTIAL, recur_mask=mask)
            if not reads:
                state = model.new_state(4)
                model(windows[:, :t], schedule=SEQUENTIAL, state=state)
                state.memory = torch.zeros_like(state.memory)
                logits[:, t:] = model(windows[:, t:-1], schedule=SEQUENTIAL, state=state)
            losses.append(F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction='none')[:, t : t + 5].mean(0))
        effects.append(losses[1] - losses[0])
    expected = torch.stack(effects).mean(0)
    assert set(found['carried']) == {'0', '1', '2', '4'}
    for k, value in found['carried'].items():
        assert value == pytest.approx(expected[int(k)].item(), abs=1e-5)
    assert 'nats' in printed
    assert 'has none' in refused(capsys, f'--ckpt={runs["text", "transformer"]}', '--diagnose')
    assert 'is a task' in refused(capsys, f'--ckpt={runs["task", name]}', '--diagnose')


def test_drawings(runs, capsys, tmp_path):
    evaluation.main([f'--overview={tmp_path}/o.png'])
    evaluation.main([f'--curves={runs["text", "lrt"]},{runs["text", "lstm"]}', f'--figure={tmp_path}/c.png'])
    for name in 'oc':
        assert (tmp_path / f'{name}.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    assert 'log.jsonl cannot be read' in refused(capsys, f'--curves={tmp_path}', f'--figure={tmp_path}/c.png')
    assert 'needs figure' in refused(capsys, f'--curves={tmp_path}')
    assert 'overview=' in refused(capsys, '--overview=x.zzz')


# The harness


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.fault('continuations of any length, batch and order', 'log-probabilities as summed by hand')
def test_continuations_are_scored_as_by_hand(runs, name):
    """Continuations of 1, 2 and 5 tokens, long contexts, any batch and order: the sum of teacher-forced log-probabilities."""
    model, _ = load_model(str(runs['text', name] / 'ckpt.pt'))
    model.double()
    rng = np.random.default_rng(0)
    pairs = [([256, *rng.integers(97, 120, n)], list(rng.integers(97, 120, m))) for n in (0, 1, 7, 30) for m in (1, 2, 5, 20)]
    pairs = [([int(i) for i in a], [int(i) for i in b]) for a, b in pairs]
    expected = []
    with torch.no_grad():
        for context, continuation in pairs:
            ids = (context + continuation)[-21:]
            p = model(torch.tensor([ids[:-1]]), schedule=SEQUENTIAL)[0].log_softmax(-1)
            places = range(len(ids) - 1 - len(continuation), len(ids) - 1)
            total = sum(p[at, ids[at + 1]].item() for at in places)
            expected.append((total, all(p[at].argmax().item() == ids[at + 1] for at in places)))
        best = model(torch.tensor([[256, 97]]), schedule=SEQUENTIAL)[0, -1].argmax().item()
        for batch_size in (1, 3, 64):
            found = score_continuations(model, pairs, batch_size)
            reverse = score_continuations(model, pairs[::-1], batch_size)[::-1]
            for (a, greedy), (b, also), (c, wanted) in zip(found, reverse, expected, strict=True):
                assert a == pytest.approx(c, abs=1e-6) and b == pytest.approx(c, abs=1e-6) and greedy == also == wanted
        assert score_continuations(model, [([256, 97], [best])], 1)[0][1]


def test_the_harness_of_a_local_task(runs, capsys, tmp_path):
    """Multiple choice, rolling likelihood and generation through lm-eval, against the direct path."""
    pytest.importorskip('lm_eval', reason='the lm-eval harness is an optional extra')
    from lm_eval.api.instance import Instance

    out = runs['text', 't2mlr']
    model, checkpoint = load_model(str(out / 'ckpt.pt'))
    meta = checkpoint['meta']
    lm = harness(model, meta, 4, ResumableResults(str(tmp_path / 'part'), {}), evaluation.continue_prompts)

    def ask(kind, *arguments):
        with torch.inference_mode():
            return getattr(lm, kind)([Instance(kind, {}, args, i) for i, args in enumerate(arguments)])

    a, b = ask('loglikelihood', ('document', ' 1'), ('document ', '1'))
    assert a == b  # spaces at the end of a context belong to what follows
    text = 'document 1 ' * 20  # 220 bytes: eleven windows of 20
    ids = torch.tensor([256, *text.encode()])
    windows = torch.stack([ids[i : i + 21] for i in range(0, 220, 20)])
    with torch.no_grad():
        nll = F.cross_entropy(model(windows[:, :-1], schedule=SEQUENTIAL).transpose(1, 2), windows[:, 1:], reduction='sum')
    assert -ask('loglikelihood_rolling', (text,))[0] == pytest.approx(nll.item(), rel=1e-5)
    (free,) = ask('generate_until', ('docu', {'until': [], 'max_gen_toks': 8}))
    (cut,) = ask('generate_until', ('docu', {'until': [free[3]], 'max_gen_toks': 8}))
    assert cut == free[: free.index(free[3])]
    rows = [{'q': f'document {i}', 'choices': [' é', ' zz'], 'gold': i % 2} for i in range(6)]
    (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (tmp_path / 'local.yaml').write_text(
        f'task: local_choice\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/rows.jsonl\n'
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\n'
        'doc_to_target: gold\ntarget_delimiter: ""\nmetric_list:\n  - metric: acc\n'
    )
    found, _ = measured(capsys, f'--ckpt={out}', '--lm_eval=local_choice', f'--lm_tasks={tmp_path}')
    hits = 0
    for row in rows:
        scores = [s for s, _ in ask('loglikelihood', *((row['q'], c) for c in row['choices']))]
        hits += int(np.argmax(scores)) == row['gold']
    assert found['lm_eval']['local_choice']['acc'] == pytest.approx(hits / 6)
    assert json.loads((out / 'eval-lm_eval.json').read_text()) == found
    assert 'could not be run' in refused(capsys, f'--ckpt={out}', '--lm_eval=no_such_task', f'--lm_tasks={tmp_path}')


def test_the_harness_says_what_it_lacks(runs, capsys, monkeypatch):
    import sys

    assert 'needs a text model' in refused(capsys, f'--ckpt={runs["task", "lrt"]}', '--lm_eval=piqa')
    monkeypatch.setitem(sys.modules, 'lm_eval', None)
    monkeypatch.setitem(sys.modules, 'lm_eval.api.model', None)
    assert 'pip install lm-eval' in refused(capsys, f'--ckpt={runs["text", "lrt"]}', '--lm_eval=piqa')


# Answers


@pytest.mark.parametrize('recurs', [False, True])
@pytest.mark.parametrize('name', ['transformer', 't2mlr', 'lrt'])
def test_answers_are_those_decoded_one_by_one(capsys, tmp_path, name, recurs):
    """Exact match, by depth, of a model that has learnt something of a tiny task: against decoding each prompt alone."""
    sizes = ['--n_train=300', '--n_val=20', '--n_test=40', '--depth=1-2', '--variables=3', '--values=0-1']
    prepare_data.main(['variable_assignment', *sizes, f'--recur_on_prompt={recurs}', f'--out={tmp_path}/data'])
    data = Dataset(f'{tmp_path}/data')
    settings = MODELS[name] | dict(block_size=40, max_steps=60, batch_size=16, reset_token=256, learning_rate=2e-2)
    train(TrainConfig(**BASE | settings | {'data_dir': f'{tmp_path}/data', 'out_dir': f'{tmp_path}/run'}))
    written = [f'--results={tmp_path}/r.json', *([f'--figure={tmp_path}/f.png'] if name == 'lrt' else [])]
    found, printed = measured(capsys, f'--ckpt={tmp_path}/run', '--batch_size=7', *written)
    model, checkpoint = load_model(f'{tmp_path}/run/ckpt.pt')
    arrays, hits = data.split('test'), []
    examples = [json.loads(line) for line in (tmp_path / 'data' / 'test.jsonl').read_text().splitlines()]
    for i, example in enumerate(examples):
        ids = arrays['tokens'][i, : arrays['prompt_lengths'][i]].tolist()
        asked = len(ids)
        assert ids == [256, *example['prompt'].encode()]
        while len(ids) < 41:
            recur_mask = torch.tensor([[recurs] * asked + [True] * (len(ids) - asked)])
            recur_mask[:, : arrays['prompt_lengths'][i]] = torch.from_numpy(arrays['recur_mask'][i, :asked])
            with torch.no_grad():
                token = model(torch.tensor([ids]), schedule=SEQUENTIAL, recur_mask=recur_mask)[0, -1].argmax().item()
            if token == 256:
                break
            ids.append(token)
        text = bytes(t for t in ids[asked:] if t < 256).decode('utf-8', 'replace')
        hits.append(text.rpartition('####')[2].partition('\n')[0].strip() == example['answer'] and '####' in text)
    depth = np.array([example['depth'] for example in examples])
    assert found['decoded']['exact_match'] == pytest.approx(np.mean(hits)) and found['decoded']['answers'] == 40
    assert found['decoded']['by_depth'] == {str(d): pytest.approx(np.mean(np.array(hits)[depth == d])) for d in (1, 2)}
    assert 'exact match' in printed and 0 < np.mean(hits) < 1
    config, T = TrainConfig(**checkpoint['config']), checkpoint['meta']['longest']['train']
    assert found['training_flops'] == count_flops(model, config, T)['step'] * checkpoint['step'] * config.batch_size * T
    assert T < config.block_size
    ((_, shares),) = json.loads((tmp_path / 'r.json').read_text()).items()
    by_depth = {f'depth {d}': share for d, share in found['decoded']['by_depth'].items()}
    assert shares == {'exact match': found['decoded']['exact_match']} | by_depth and found['trained_length'] == 2
    assert (tmp_path / 'f.png').exists() == (name == 'lrt')


@pytest.mark.parametrize('kind', ['task', 'text'])
@pytest.mark.parametrize('after', [0, 1, 4])
@pytest.mark.fault('an evaluation is interrupted', 'it continues, same numbers')
def test_an_interrupted_evaluation_goes_on(runs, capsys, monkeypatch, kind, after):
    """Stopped after some batches, with its last line cut short: the rest is measured and the result is the same; what belongs
    to another checkpoint or to other settings is not taken."""
    out = runs[kind, 'lrt']
    argv = [f'--ckpt={out}', '--batch_size=4']
    expected, _ = measured(capsys, *argv)
    part = out / f'eval-{kind}-{"test" if kind == "task" else "val"}.json.part'
    assert not part.exists()
    whole, calls = GPT.forward, []

    def forward(self, *given, limit, **named):
        calls.append(1)
        if len(calls) > limit:
            raise KeyboardInterrupt
        return whole(self, *given, **named)

    monkeypatch.setattr(GPT, 'forward', lambda *given, **named: forward(*given, limit=after, **named))
    with pytest.raises(SystemExit) as stop:
        measured(capsys, *argv)
    assert stop.value.code == 130
    lines = part.read_text().splitlines(keepends=True) if after else []
    assert len(lines) == after
    part.write_text(''.join(lines) + '["cut sho')
    calls.clear()
    monkeypatch.setattr(GPT, 'forward', lambda *given, **named: forward(*given, limit=10**9, **named))
    assert measured(capsys, *argv)[0] == expected
    rest = len(calls)
    calls.clear()
    part.write_text(''.join(lines))  # of a batch size that is not asked for
    measured(capsys, f'--ckpt={out}', '--batch_size=5')
    calls.clear()
    assert measured(capsys, *argv)[0] == expected and len(calls) == rest + after


def test_two_evaluations_at_once_keep_apart(tmp_path):
    """Whatever order they write to one file in, what is read again is each one's own, however damaged the rest."""
    path = str(tmp_path / 'part')
    for seed in range(20):
        rng = np.random.default_rng(seed)
        both = [ResumableResults(path, {'batch_size': i}) for i in range(2)]
        for low in range(6):
            i = int(rng.integers(2))
            both[i].add('answers', low, [i, low])
        with open(path, 'a') as f:
            f.write(('', '5\n', 'null\n', '{}\n', '[[], 0, 0, 0]\n', '["cut sho', '\0\0')[seed % 7])
        for i in range(2):
            again = ResumableResults(path, {'batch_size': i})
            assert all(value == [i, low] for (_, low), value in again.measured.items())
            assert list(again.batches('answers', range(6), lambda low, i=i: [i, low])) == [[i, low] for low in range(6)]
        assert not ResumableResults(path, {'batch_size': 2}).measured
