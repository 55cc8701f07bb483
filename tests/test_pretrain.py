"""From nothing to a trained model: the size of a CPU, the plan, the report; and an evaluation that processes share."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_train import ROOT

import eval as evaluation
import prepare_data
from configurator import ConfigError
from runs import pretrain
from support import harness
from support.results import ResumableResults
from train import TrainConfig, main, train

CONFIGS = sorted(p.stem for n in (20, 24) for p in ROOT.glob(f'config/*_{n}L.py'))
SETTINGS = {'n_layer': 2, 'n_head': 2, 'n_embd': 16, 'block_size': 24, 'max_steps': 4, 'eval_interval': 4, 'eval_batches': 1}


# The size of a CPU


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """The current folder is empty, but for the configs."""
    (tmp_path / 'config').symlink_to(ROOT / 'config')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize('name', CONFIGS)
def test_every_large_config_has_a_small_one(in_tmp, capsys, name):
    """train.py accepts it, nothing but the size differs, and the recurrence is as deep in proportion."""
    pretrain.main(['scale', f'config/{name}.py', 'tiny'])
    path = capsys.readouterr().out.strip()
    assert path == f'out/tiny/{name}.py'
    main([path, '--dry_run=True', '--json=True'])
    assert 0 < json.loads(capsys.readouterr().out.splitlines()[-1])['total_parameters'] < 10e6
    large, small = pretrain.read_config(f'config/{name}.py'), pretrain.read_config(path)
    sizes = {*pretrain.scaled(large), 'data_dir', 'out_dir'}
    assert {k for k, v in vars(small).items() if v != getattr(large, k)} <= sizes
    assert (small.data_dir, small.out_dir) == ('data/tiny/fineweb_edu', f'out/tiny/{name}')
    assert small.n_embd // small.n_head == large.n_embd // large.n_head // 4
    for config in (large, small):
        assert config.recurrence != 't2mlr' or (config.l_end + 1 - config.l_start) / config.n_layer == 0.2
        assert config.n_loop == 1 or (config.l_start, config.l_end) == (0, config.n_layer - 1)
        assert config.recurrence != 'lrt' or 0.58 < config.source_layer / config.n_layer < 0.67


def test_grouped_heads_and_the_final_layer_stay_so():
    """Key heads divide the query heads; a source at the end, and settings that leave the size open, stay."""
    config = TrainConfig(
        n_head=9, n_kv_head=3, n_layer=30, n_embd=576, n_hidden=1536, source_layer=-1, chunk_size=4, vocab_size=0
    )
    small = pretrain.scaled(config)
    assert small['n_head'] % small['n_kv_head'] == 0 and small['n_kv_head'] > 1
    assert small['n_hidden'] / small['n_embd'] == pytest.approx(1536 / 576, rel=0.02)
    assert (small['source_layer'], small['chunk_size'], small['vocab_size']) == (-1, 1, 0)
    assert pretrain.scaled(TrainConfig(n_layer=3, n_head=1, max_steps=5))['max_steps'] == 1


def test_the_plan(in_tmp, capsys):
    """What the script reads of a config: all of the papers' share one dataset; a small one takes the small sample."""
    pretrain.main(['plan', 'config/t2mlr_20L.py'])
    large = capsys.readouterr().out.split()
    assert large[:-1] == 'data/fineweb_edu out/t2mlr_20L 32768 100BT 20000000000 0.001 8 128'.split()
    pretrain.main(['plan', 'config/lrt_24L.py'])
    assert capsys.readouterr().out.split()[3:5] == large[3:5]
    Path('small.py').write_text('vocab_size, max_steps, batch_size, block_size = 300, 1000, 8, 128\n')
    pretrain.main(['plan', 'small.py'])
    assert capsys.readouterr().out.split()[2:-1] == '300 10BT 0 0.05 64 13'.split()
    Path('open.py').write_text('max_steps = 5\n')
    with pytest.raises(SystemExit) as stop:
        pretrain.main(['plan', 'open.py'])
    assert stop.value.code == 2 and 'set vocab_size' in capsys.readouterr().err


def test_the_text_is_written_once(tmp_path, monkeypatch, capsys):
    for name, content in (('a.py', b'x = 1\n'), ('b.py', b'\xff\xfe'), ('c.py', b' \n'), ('d.py', 'é = 2\n'.encode())):
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(pretrain, 'find_files', lambda source: [str(tmp_path / f'{name}.py') for name in 'abcd'])
    for _ in range(2):
        pretrain.main(['text', f'{tmp_path}/text'])
    assert 'exists already' in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / 'text' / 'stdlib.jsonl').read_text('utf-8').splitlines()]
    assert [row['text'] for row in rows] == ['x = 1\n', 'é = 2\n']
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ['text']


# The report


def result(bits, **more):
    scores = {'bits_per_byte': bits, 'nats_per_token': 1.0}
    return {
        'training': scores,
        'exact': scores | {'bits_per_byte': bits + 0.01},
        'update': 100,
        'settings': {'batch_size': 8, 'block_size': 128, 'n_layer': 5},
        'parameters': 1234567,
        'training_flops': 5e12,
        'training_seconds': 90.0,
        'step_flops_ratio': 2.5,
        'machine': 'x86_64, 2 CPUs',
    } | more


def test_the_report_shows_every_run_beside_the_published_numbers(in_tmp, capsys):
    text = "data_dir, out_dir = 'data/tiny/corpus', 'out/tiny/lrt_20L'\nvocab_size = 300\n"
    Path('lrt_20L.py').write_text(text)
    with pytest.raises(ConfigError, match='holds no eval-corpus-val.json'):
        pretrain.report('lrt_20L.py')
    runs = {name: Path('out/tiny', name) for name in ('lrt_20L', 'mine', 'transformer_20L')}
    for i, folder in enumerate(runs.values()):
        folder.mkdir(parents=True)
        (folder / 'eval-corpus-val.json').write_text(json.dumps(result(1.0 + i)))
        (folder / 'log.jsonl').write_text('{"step": 1, "loss": 3.0}\n')
    (runs['lrt_20L'] / 'core.log').write_text('loading\nerror: this needs the package lm_eval; run it.\n')
    (runs['lrt_20L'] / 'sample.txt').write_text('def f():\n')
    core = {'lm_eval': {'CORE': {'centred': 0.25, 'tasks': 19, 'left_out': ['jeopardy']}}}
    (runs['mine'] / 'core.json').write_text(json.dumps(core))
    Path('out/elsewhere').mkdir()
    capsys.readouterr()
    pretrain.report('lrt_20L.py')
    lines = [
        '| `lrt_20L` | 1,234,567 | 0.1 | 5 | 1.5 | 1.000 | 1.010 | 0.752 | - | 0.274 |',
        '| `mine` | 1,234,567 | 0.1 | 5 | 1.5 | 2.000 | 2.010 | - | 0.250 | - |',
        '| `transformer_20L` | 1,234,567 | 0.1 | 5 | 1.5 | 3.000 | 3.010 | 0.767 | - | 0.271 |',
    ]
    written, printed = (runs['lrt_20L'] / 'report.md').read_text(), capsys.readouterr().out
    for found in (written, printed):
        assert '\n'.join(lines) in found and 'CORE is left out: this needs the package lm_eval; run it.' in found
    assert '100 steps, 102,400 tokens, 1.5 minutes' in written and '| n_layer | `5` |' in written and 'def f():' in written
    assert (runs['lrt_20L'] / 'loss.png').stat().st_size > 1000
    (runs['lrt_20L'] / 'core.json').write_text(json.dumps(core))
    pretrain.report('lrt_20L.py')
    assert 'average of 19 tasks; left out: jeopardy.' in (runs['lrt_20L'] / 'report.md').read_text()
    (runs['mine'] / 'core.json').write_text('{')
    with pytest.raises(ConfigError, match='core.json'):
        pretrain.report('lrt_20L.py')


def test_commands_that_do_not_exist(capsys):
    for argv, says in ((['plans'], "'plan'"), (['plan'], 'CONFIG'), (['scale', 'a'], 'CONFIG NAME')):
        with pytest.raises(SystemExit) as stop:
            pretrain.main(argv)
        assert stop.value.code == 2 and says in capsys.readouterr().err
    pretrain.main(['--help'])
    assert 'report CONFIG' in capsys.readouterr().out


def test_the_script_asks_only_for_commands_and_keys_that_exist():
    """Its lines are read by bash, and every command and key in them is known to the file that is called."""
    script = (ROOT / 'runs' / 'pretrain.sh').read_text()
    subprocess.run(['bash', '-n', 'runs/pretrain.sh'], cwd=ROOT, check=True)
    assert {*re.findall(r'runs\.pretrain (\w+)', script)} == {*pretrain.COMMANDS}
    assert script.count('read -r ') == 1 and len(re.search('read -r (.*) <<<', script)[1].split()) == 9
    without = subprocess.run(['bash', 'runs/pretrain.sh'], cwd=ROOT, capture_output=True, text=True)
    assert without.returncode == 2 and 'name one config' in without.stderr


# An evaluation on several processes

STAND_IN = {  # as much of the lm-eval harness as support/harness.py asks for
    'lm_eval/api/__init__.py': '',
    'lm_eval/api/model.py': 'class LM:\n    pass\n',
    'lm_eval/models/__init__.py': '',
    'lm_eval/models/utils.py': """
class Collator:
    def __init__(self, rows, sort_fn, group_by):
        self.rows = rows

    def get_batched(self, n):
        return [self.rows[i : i + n] for i in range(0, len(self.rows), n)]

    def get_original(self, found):
        return found
""",
    'lm_eval/tasks/__init__.py': 'class TaskManager:\n    def __init__(self, include_path):\n        pass\n',
    'lm_eval/__init__.py': """
from types import SimpleNamespace


def simple_evaluate(model, tasks, **_):
    def ask(kind, *arguments):
        return getattr(model, kind)([SimpleNamespace(args=args) for args in arguments])

    texts = ['document ' * n for n in (1, 5, 2, 9, 1, 3, 7)]
    scores = [score for score, _ in ask('loglikelihood', *((text, f' {i}') for i, text in enumerate(texts)))]
    totals = ask('loglikelihood_rolling', *((text,) for text in texts))
    found = ask('generate_until', *((text, {'max_gen_toks': n}) for n, text in enumerate(texts, 2)))
    values = {f'score_{i}': score for i, score in enumerate(scores + totals)}
    return {'results': {tasks[0]: values | {f'made_{i}': float(hash_of(text)) for i, text in enumerate(found)}}}


def hash_of(text):
    return sum(i * byte for i, byte in enumerate(text.encode(), 1))
""",
}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """(a folder with the stand-in harness, the out_dir of a small T2MLR text model)."""
    root = tmp_path_factory.mktemp('pretrain')
    for name, text in STAND_IN.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / 'source').mkdir()
    for i in range(6):
        (root / 'source' / f'{i}.txt').write_text(f'document {i} é中 ' * 40)
    prepare_data.main(['text', f'--source={root}/source', '--val_fraction=0.3', f'--out={root}/text'])
    recurrence = {'recurrence': 't2mlr', 'l_start': 1, 'l_end': 1, 'schedule': 'jacobi', 'd_forward': 3, 'd_backward': 2}
    folders = {'data_dir': f'{root}/text', 'out_dir': f'{root}/run', 'device': 'cpu', 'threads': 1}
    train(TrainConfig(**SETTINGS | recurrence | folders))
    return root


def evaluated(root, processes, *argv):
    """(the results, the lines printed) of eval.py on so many processes."""
    launch = [sys.executable]
    if processes > 1:
        launch += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    command = [*launch, 'eval.py', f'--ckpt={root}/run', '--batch_size=2', '--device=cpu', '--threads=1', '--json=True', *argv]
    env = os.environ | {'PYTHONPATH': str(root), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]), lines


@pytest.mark.parametrize('argv', [('--lm_eval=a,b',), ()], ids=['harness', 'text'])
@pytest.mark.fault('an evaluation on one process and on three', 'the same numbers, reported once')
def test_processes_share_an_evaluation(trained, argv):
    """All requests and all batches, whose number three does not divide, are measured to the last bit as by one process."""
    one, lines = evaluated(trained, 1, *argv)
    three, together = evaluated(trained, 3, *argv)
    assert one == three and lines == together
    name = 'eval-lm_eval.json' if argv else 'eval-text-val.json'
    assert json.loads((trained / 'run' / name).read_text()) == one and not (trained / 'run' / f'{name}.part').exists()


class Ranks(SimpleNamespace):
    """What ResumableResults asks of one process; the others of the run have measured `others`."""

    def gather(self, value):
        return [self.others.pop(0) if rank != self.rank and self.others else value for rank in range(self.world)]


def test_an_interrupted_evaluation_continues_on_more_processes(tmp_path):
    """The first process takes what is there and measures its part of the rest; another neither reads nor writes the file."""
    path, asked = str(tmp_path / 'part'), []

    def measure(start):
        asked.append(start)
        return start * 10

    alone = ResumableResults(path, {})
    for start in (0, 2):
        alone.add('x', start, start * 10)
    first = ResumableResults(path, {}, Ranks(rank=0, world=2, first=True, others=[]))
    first.process.others = [f'x {[1, 3, 4]}', 30, None]
    assert first.batches('x', range(5), measure) == [0, 10, 20, 30, 40] and asked == [1, 4]
    before = Path(path).read_text()
    second = ResumableResults(str(tmp_path / 'none'), {}, Ranks(rank=1, world=2, first=False, others=[alone.measured]))
    second.process.others = [f'x {[1, 3, 4]}', 10, 40]
    assert second.batches('x', range(5), measure) == [0, 10, 20, 30, 40] and asked == [1, 4, 3]
    second.finish({})
    assert Path(path).read_text() == before and [p.name for p in tmp_path.iterdir()] == ['part']
    second.process.others = ['other requests']
    with pytest.raises(ConfigError, match='do not measure the same'):
        second.batches('y', range(5), measure)


def test_core_says_what_it_leaves_out(monkeypatch, capsys):
    """The average is that of its tasks, each with 0 for guessing and 1 for all right; what is missing is printed and kept."""
    shots = {}

    def simple_evaluate(tasks, num_fewshot, **_):
        _, metric, guess = harness.CORE[tasks[0]]
        shots[tasks[0]] = num_fewshot
        score = guess if len(shots) % 2 else 1.0
        return {'results': {tasks[0]: {f'{metric},none': score, f'{metric}_stderr,none': 9.0, 'alias': tasks[0]}}}

    manager = SimpleNamespace(TaskManager=lambda include_path: None)
    monkeypatch.setitem(sys.modules, 'lm_eval', SimpleNamespace(simple_evaluate=simple_evaluate, tasks=manager))
    monkeypatch.setitem(sys.modules, 'lm_eval.tasks', manager)
    found = harness.run_harness(None, SimpleNamespace(lm_eval='core', lm_tasks='', limit=0))
    assert shots == {name: numbers[0] for name, numbers in harness.CORE.items()}
    assert found['CORE'] == {'centred': pytest.approx(9 / 19), 'tasks': 19, 'left_out': harness.LEFT_OUT}
    assert len(harness.CORE) + len(harness.LEFT_OUT) == 22
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f'CORE is the average of 19 tasks; left out: {", ".join(harness.LEFT_OUT)}.'


def test_core_goes_without_what_no_package_can_run(monkeypatch, capsys):
    """A task that cannot be imported is named and left out of the average; without network there is no average at all."""
    broken = {'coqa': ImportError('no squad_metrics')}

    def simple_evaluate(tasks, **_):
        if tasks[0] in broken:
            raise broken[tasks[0]]
        return {'results': {tasks[0]: {f'{harness.CORE[tasks[0]][1]},none': 1.0}}}

    manager = SimpleNamespace(TaskManager=lambda include_path: None)
    monkeypatch.setitem(sys.modules, 'lm_eval', SimpleNamespace(simple_evaluate=simple_evaluate, tasks=manager))
    monkeypatch.setitem(sys.modules, 'lm_eval.tasks', manager)
    core = SimpleNamespace(lm_eval='core', lm_tasks='', limit=0)
    found = harness.run_harness(None, core)['CORE']
    left_out = [*harness.LEFT_OUT, 'coqa (ImportError: no squad_metrics)']
    assert found == {'centred': 1.0, 'tasks': 18, 'left_out': left_out}
    assert f'of 18 tasks; left out: {", ".join(left_out)}.' in capsys.readouterr().out
    with pytest.raises(ConfigError, match='coqa could not be run'):
        harness.run_harness(None, SimpleNamespace(lm_eval='coqa', lm_tasks='', limit=0, num_fewshot=-1))
    broken['piqa'] = OSError('no network')
    with pytest.raises(ConfigError, match='piqa could not be run .OSError: no network'):
        harness.run_harness(None, core)
    broken.update(dict.fromkeys(harness.CORE, ImportError('nothing')))
    with pytest.raises(ConfigError, match='no task of CORE'):
        harness.run_harness(None, core)
    broken.clear()
    capsys.readouterr()
    monkeypatch.setenv('RANK', '1')
    harness.run_harness(None, core)
    assert capsys.readouterr().out == ''


def core_rows():
    """{dataset of the hub, its subset where it has several: a row} in the form of each dataset that a task of CORE reads."""
    four = {'label': ['A', 'B', 'C', 'D'], 'text': ['oak', 'elm', 'fir', 'ash']}
    five = {'label': [*'ABCDE'], 'text': ['oak', 'elm', 'fir', 'ash', 'yew']}
    copa = {'premise': 'It fell.', 'choice1': 'It was wet.', 'choice2': 'It flew.', 'question': 'cause', 'label': 0}
    hellaswag = {'ctx_a': 'A cup', 'ctx_b': 'falls', 'activity_label': 'Cups', 'endings': four['text'], 'label': '2'}
    wsc = {'text': 'The cup fell off the shelf because it was wet.', 'options': ['The cup', 'The shelf'], 'pronoun': 'it'}
    coqa = {'questions': {'input_text': ['Who fell?']}, 'answers': {'input_text': ['the cup']}, 'additional_answers': {}}
    bigbench = {'inputs': 'Q: Which tree? A:', 'targets': ['oak'], 'multiple_choice_targets': ['oak', 'elm']}
    return {
        'EleutherAI/lambada_openai': {'text': 'the cup fell off the shelf'},
        'allenai/openbookqa': {'question_stem': 'The tree is', 'choices': four, 'answerKey': 'B'},
        'aps/super_glue copa': copa,
        'aps/super_glue boolq': {'passage': 'The cup fell.', 'question': 'did it fall', 'label': 1},
        'allenai/winogrande': {'sentence': 'The cup fell as _ was wet.', 'option1': 'it', 'option2': 'he', 'answer': '1'},
        'lighteval/winograd_wsc': wsc | {'pronoun_loc': 35, 'quote': '', 'quote_loc': 0, 'label': 0},
        'EleutherAI/coqa': coqa | {'story': 'The cup fell.'},
        'hails/agieval-lsat-ar': {'query': 'Q: Which tree? A:', 'choices': ['oak', 'elm', 'fir', 'ash', 'yew'], 'gold': [1]},
        'tau/commonsense_qa': {'question': 'Which tree?', 'choices': five, 'answerKey': 'C'},
        'allenai/ai2_arc': {'question': 'Which tree?', 'choices': four, 'answerKey': 'D'},
        'baber/piqa': {'goal': 'Catch the cup', 'sol1': 'with a hand', 'sol2': 'with a tree', 'label': 0},
        'Rowan/hellaswag': hellaswag,
        'hails/bigbench': bigbench | {'multiple_choice_scores': [1, 0]},
    }


@pytest.mark.parametrize('shown', ['all', 'three of a task'])
def test_core_of_the_tasks_of_the_harness(trained, monkeypatch, tmp_path, shown):
    """The library's own tasks on twelve rows each: every metric that the average asks for is among what a task gives."""
    pytest.importorskip('lm_eval', reason='the lm-eval harness is an optional extra')
    datasets, rows = pytest.importorskip('datasets'), core_rows()
    varied = 'text passage goal inputs question activity_label'.split()  # examples are drawn among other rows only

    def load_dataset(path, name=None, **_):
        row = rows.get(f'{path} {name}') or rows[path]
        several = [{k: f'{v} {i}' if k in varied and v != 'cause' else v for k, v in row.items()} for i in range(12)]
        splits = 'train', 'validation', 'test', 'default'
        return datasets.DatasetDict({split: datasets.Dataset.from_list(several) for split in splits})

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    out = tmp_path / 'run'
    out.mkdir()
    (out / 'ckpt.pt').symlink_to(trained / 'run' / 'ckpt.pt')
    limit = ['--limit=3'] if shown != 'all' else []
    evaluation.main([f'--ckpt={out}', '--lm_eval=core', '--device=cpu', '--threads=1', *limit])
    found = json.loads((out / 'eval-lm_eval.json').read_text())['lm_eval']
    left_out = [name for name in harness.CORE if name not in found]
    # Release 0.4.13 scores coqa with a module that newer transformers lack, and shows no examples with several right answers.
    assert {*left_out} <= {'coqa', 'agieval_lsat_ar'}
    assert [name.partition(' ')[0] for name in found['CORE']['left_out'][3:]] == left_out
    numbers = [(found[name][metric], guess) for name, (_, metric, guess) in harness.CORE.items() if name in found]
    by_hand = [(score - guess) / (1 - guess) for score, guess in numbers]
    assert found['CORE']['centred'] == pytest.approx(sum(by_hand) / len(by_hand)) and found['CORE']['tasks'] == len(by_hand)
