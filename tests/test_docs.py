"""README.md, CONTRIBUTING.md and docs/: every command that they show parses, and the cheap ones run; every file and heading
that they name exists; the tables of the studies are those of results/; the Python of the README runs."""

import io
import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import bench
import configurator
import eval as evaluation
import prepare_data
import sample
import train

ROOT = Path(configurator.__file__).parent
DOCS = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted(ROOT.glob('docs/*.md'))]
STAGES = {f'{module.__name__}.py': module for module in (prepare_data, train, sample, evaluation, bench)}


def fenced(path, language):
    return re.findall(rf'^```{language}\n(.*?)^```$', path.read_text(encoding='utf-8'), re.S | re.M)


def outside_fences(path):
    return re.sub(r'^```.*?^```$', '', path.read_text(encoding='utf-8'), flags=re.S | re.M)


def shown_commands(path):
    """The commands of a file, as lists of words: all of its fenced bash, and what its indented lines and its sentences hold."""
    text = outside_fences(path).replace('\\\n', ' ')
    elsewhere = re.findall(r'^    (.*)', text, re.M) + [' '.join(code.split()) for code in re.findall(r'`([^`]+ [^`]+)`', text)]
    lines = [line for line in elsewhere if line.startswith(('python ', 'bash ', 'torchrun ', 'srun '))]
    for block in fenced(path, 'bash'):
        lines += block.replace('\\\n', ' ').splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


COMMANDS = [(path.name, words) for path in DOCS for words in shown_commands(path)]


class ParsedError(Exception):
    """Raised in place of the work that a command would begin."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project's folder without data and runs, entered."""
    for name in ('config', 'runs'):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ('data', 'out'):
        (tmp_path / name).mkdir()
    shutil.copytree(ROOT / 'results', tmp_path / 'results')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse_alone(argv, monkeypatch):
    """Has the project's own parser read `python SCRIPT ARGUMENTS`, and nothing run."""
    name, *rest = argv
    if name == '-m':
        module, *rest = rest
        path = ROOT / f'{module.replace(".", "/")}.py'
        assert path.exists(), f'{module} does not exist'
        usage = re.match(r'"""(.*?)"""', path.read_text(encoding='utf-8'), re.S)[1]
        if module == 'runs.retrofit':
            assert re.search(rf'^{rest[0]}\b', usage, re.M), f'{module} has no command {rest[0]}'
        return
    stage = STAGES[name]

    def parse_and_stop(config_class, arguments, usage):
        configurator.parse(config_class, arguments, usage)
        raise ParsedError

    monkeypatch.setattr(stage, 'parse', parse_and_stop)
    if not rest:
        stage.main(rest)  # the list of datasets, or of benchmarks
    elif rest[-1] == '--help':
        with pytest.raises(SystemExit, match='0'):
            stage.main(rest)
    else:
        with pytest.raises(ParsedError):
            stage.main(rest)


def check(words, monkeypatch):
    """Fails unless a command names a script that exists and arguments that it takes."""
    program, *rest = words
    rest = [word for word in rest if word != '...']
    if '<' in rest:
        rest = rest[: rest.index('<')]
    if program == 'srun':
        program, *rest = rest
    if program == 'torchrun':
        at = next(i for i, word in enumerate(rest) if word.endswith('.py'))
        sizes = re.findall(r'--(?:nnodes|nproc_per_node)=(\d+)', ' '.join(rest[:at]))
        monkeypatch.setenv('WORLD_SIZE', str(math.prod(map(int, sizes))))
        return parse_alone(rest[at:], monkeypatch)
    monkeypatch.delenv('WORLD_SIZE', raising=False)
    if program == 'python':
        return parse_alone(rest, monkeypatch)
    if program == 'bash':
        script = ROOT / rest[0]
        assert script.exists() and subprocess.run(['bash', '-n', script]).returncode == 0, rest[0]
        assert len(rest) == 1 or rest[0] == 'runs/test.sh' or '$1' in script.read_text() or '$@' in script.read_text()
    elif program == 'pip':
        assert rest[0] == 'install' and ('-r' not in rest or (ROOT / rest[rest.index('-r') + 1]).exists())
    elif program == 'export':
        assert re.fullmatch(r'[A-Z_]+=\S+', rest[0])
    else:
        assert words == ['source', '.venv/bin/activate'], f'what is {words}? A command that no test checks may be wrong.'


@pytest.mark.parametrize('name', sorted({name for name, _ in COMMANDS}))
def test_every_command_parses(name, folder, monkeypatch, capsys):
    for _, words in ((where, words) for where, words in COMMANDS if where == name):
        try:
            check(words, monkeypatch)
        except SystemExit:
            pytest.fail(f'{name}: {shlex.join(words)}: {capsys.readouterr().err}')


def test_what_is_wrong_is_found(folder, monkeypatch):
    """The check itself: a key, a file, a value, a dataset, a benchmark and a number of processes that do not exist."""
    wrong = {
        SystemExit: (
            'python train.py config/text_t2mlr.py --lr=1',
            'python train.py config/t2mlr.py',
            'python train.py config/text_t2mlr.py --schedule=jacoby',
            'python prepare_data.py s6',
            'python bench.py step',
            'torchrun --nproc_per_node=7 train.py config/t2mlr_20L.py',
        ),
        AssertionError: (
            'python -m runs.none',
            'python -m runs.retrofit none',
            'bash runs/none.sh',
            'pip install -r none.txt',
            'cd ..',
        ),
    }
    for error, lines in wrong.items():
        for line in lines:
            with pytest.raises(error):
                check(shlex.split(line), monkeypatch)


NOT_RUN = {  # the first of these that a command contains is why it is not run here
    'fineweb_edu': 'takes a corpus, and days',
    'tokenizer': 'takes an optional package; tests/test_bpe.py trains one',
    'gsm8k': 'takes the network',
    'hf:': 'takes weights',
    '--lm_eval': 'takes an optional package and the network',
    'bench.py': 'takes minutes',
    'runs.': 'takes minutes, weights or a checkpoint',
    'out/retrofit': 'takes weights',
    'config/retrofit': 'takes weights',
    'python prepare_data.py text': 'reads 12 MB; the same with a folder runs',
}
TINY = {
    'train.py': '--max_steps=2 --n_embd=16 --n_head=2 --batch_size=4 --eval_interval=2 --eval_batches=1 --threads=1',
    'sample.py': '--max_tokens=4 --threads=1',
    'eval.py': '--max_batches=1 --batch_size=4 --threads=1',
    's5': '--n_train=40 --n_val=20 --n_test=80',
    'variable_assignment': '--n_train=40 --n_val=20 --n_test=20',
    'pathfinding': '--n_train=40 --n_val=20 --n_test=20',
    'text': '',
}
RUNS = [  # what the commands need that the documents do not train
    'prepare_data.py text --source=FOLDER --out=data/stdlib',
    'prepare_data.py variable_assignment --depth=0-3 --variables=8 --values=0-9 --out=data/reasoning_variables',
    'prepare_data.py s5 --group=3 --steps=1-8 --test_steps=1-16 --recur_on_prompt=True',
    'train.py config/s3_t2mlr.py --out_dir=out/quickstart/t2mlr',
    'train.py config/text_lrt.py --block_size=64',
    'train.py config/reasoning_t2mlr.py --data_dir=data/reasoning_variables',
    *(f'train.py config/s3_{name}.py' for name in ('t2mlr', 'lrt', 'transformer')),
    'train.py config/text_t2mlr.py --block_size=64 --out_dir=out/quickstart/text',  # the newest, which sample.py takes
]
ORDER = {'README.md': 0, 'data.md': 1, 'training.md': 2}  # the others read what these leave


def run(words, monkeypatch):
    """Runs `SCRIPT ARGUMENTS` in this process, scaled down."""
    name, *rest = words
    given = {word.partition('=')[0] for word in rest}
    if rest and not given & {'--help', '--dry_run', '--study', '--overview', '--curves'}:
        tiny = TINY[rest[0] if name == 'prepare_data.py' else name].split()
        replaced = {word.partition('=')[0] for word in tiny}
        rest = [word for word in rest if word.partition('=')[0] not in replaced] + tiny
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(b'def f\n')))
    try:
        STAGES[name].main([word.replace('FOLDER', 'texts') for word in rest])
    except SystemExit as e:
        assert not e.code and '--help' in rest


def test_the_cheap_commands_run(folder, monkeypatch, capfd):
    """In the order of the documents, with tiny models, texts and tasks."""
    (folder / 'texts').mkdir()
    for name in ('schedule', 'configurator'):
        (folder / 'texts' / f'{name}.txt').write_text((ROOT / f'{name}.py').read_text())
    (folder / 'prompts.txt').write_text('def a\nclass B\n')
    commands = [shlex.split(line) for line in RUNS]
    for _, (program, *rest) in sorted(COMMANDS, key=lambda command: ORDER.get(command[0], 3)):
        line = shlex.join([program, *rest])
        shown = rest[: rest.index('<')] if '<' in rest else rest
        if program == 'python' and 'FOLDER' in line and 'text' in rest and 'gpt2' not in line:
            commands.append(shown)
        elif program == 'python' and 'gpt2' not in line and not any(part in line for part in NOT_RUN):
            commands.append(shown)
    assert len(commands) > len(RUNS) + 20
    for words in commands:
        try:
            run(words, monkeypatch)
        except BaseException as e:
            e.add_note(f'{shlex.join(words)}\n{capfd.readouterr().err}')
            raise
    assert (folder / 'out/text_t2mlr/ckpt.pt').exists() and (folder / 'out/curves.png').exists()


def test_the_python_of_the_readme_runs():
    (source,) = fenced(ROOT / 'README.md', 'python')
    code = [line for line in source.splitlines() if line and 'import' not in line]
    assert len(code) == 8
    names = {}
    exec(compile(source, 'README.md', 'exec'), names)
    assert names['state'].position == 20 and names['token'].shape == (1, 1)


def anchors(path):
    """What `#...` may name in a Markdown file."""
    titles = re.findall(r'^#+ (.*)$', outside_fences(path), re.M)
    return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles}


def test_every_link_and_file_exists():
    for path in DOCS:
        text = outside_fences(path)
        for target in re.findall(r'\]\(([^)\s]+)\)', text):
            if not target.startswith('http'):
                file, _, anchor = target.partition('#')
                linked = (path.parent / file).resolve() if file else path
                assert linked.exists(), f'{path.name} links to {target}'
                assert not anchor or anchor in anchors(linked), f'{path.name} links to {target}'
        for code in re.findall(r'`([^`\s]+)`', text):
            named = re.fullmatch(
                r'(?!out/|data/)[\w*/.-]+\.(?:py|sh|md)|(?:config|docs|results|runs|support|tests)/[\w*/.-]*', code
            )
            # A page of docs/ is also named from its neighbours.
            assert not named or any(p for at in (ROOT, path.parent) for p in at.glob(code.rstrip('/'))), f'{path.name}: {code}'
    for name in re.findall(r'^\| `(\w+)` \| \(?\d', (ROOT / 'docs/costs.md').read_text(), re.M):
        assert (ROOT / f'config/{name}.py').exists(), name


def test_the_table_of_the_quickstart_is_its_result():
    results = json.loads((ROOT / 'results/quickstart.json').read_text())
    for model, name in (('T2MLR', 't2mlr'), ('transformer', 'transformer'), ('LSTM', 'lstm')):
        row = ' | '.join([f'| {model}', *(f'{share:.1%}' for share in results[name].values())])
        assert all(row in (ROOT / file).read_text() for file in ('README.md', 'docs/results.md')), row


def test_the_readme_is_short():
    assert len((ROOT / 'README.md').read_text(encoding='utf-8').splitlines()) <= 230


@pytest.mark.parametrize('study', ['s5', 'reasoning_paths', 'reasoning_variables', 'ablation'])
def test_tables_of_studies_are_those_of_their_results(study, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    evaluation.main([f'--study=results/{study}'])
    rows = [line.split(' | ') for line in capsys.readouterr().out.splitlines()]
    left_out = [i for i, title in enumerate(rows[0]) if title == 'seconds']  # the machine had other work
    for row in rows[2:]:
        line = ' | '.join(cell for i, cell in enumerate(row) if i not in left_out)
        assert line in (ROOT / 'docs/results.md').read_text(), line
