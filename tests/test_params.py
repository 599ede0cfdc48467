"""params.yaml: types, faults in one line, YAML 1.2 numbers, the comment beside each key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster_sft import params_files, yaml_files
from cluster_sft.errors import UserError

SHIPPED = Path(__file__).parents[1] / "params.yaml"
MINIMAL = {"name": "n", "data": {"source": "s"}, "model": {"name": "m"}}


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ({"clutser": {}}, ["'clutser'", "did you mean 'cluster'"]),
        ({"cluster": {"alhpa": 1.5}}, ["'cluster.alhpa'", "did you mean 'alpha'"]),
        ({"cluster": {"alpha": 0.9}}, ["cluster.alpha", "equal to 1", "0.9"]),
        ({"cluster": {"alpha": "1.5"}}, ["cluster.alpha", "number", "'1.5'"]),
        ({"cluster": {"k": 0}}, ["cluster.k", "auto", "greater than 0", "got 0"]),
        ({"cluster": {"n_init": True}}, ["cluster.n_init", "integer", "True"]),
        ({"select": {"ratio": 0}}, ["select.ratio", "greater than 0", "got 0"]),
        ({"select": {"ratio": 1.01}}, ["select.ratio", "equal to 1", "1.01"]),
        ({"select": {"trim": 1}}, ["select.trim", "less than 1", "got 1"]),
        ({"select": {"strategies": ["a", "a"]}}, ["select.strategies", "twice"]),
        ({"select": {"ranking": "far"}}, ["select.ranking", "peripheral", "'far'"]),
        ({"train": {"global_batch_size": 6}}, ["multiple of workers (4)", "got 6"]),
        ({"train": {"warmup_steps": 1, "warmup_ratio": 0.1}}, ["exclude each other"]),
        ({"evaluate": {"suites": ["a", "a"]}}, ["evaluate.suites", "twice"]),
        ({"evaluate": {"suites": []}}, ["evaluate.suites", "at least 1"]),
        ({"name": "a b"}, ["name", "[A-Za-z0-9.-]+", "'a b'"]),
        ({"name": ".."}, ["name", "not start with a dot", "'..'"]),
        ({"study": "."}, ["study", "not start with a dot", "'.'"]),
        ({"data": {"holdout": float("nan")}}, ["data.holdout", "nan"]),
        ({"diagnose": {"seed": 2**32}}, ["diagnose.seed", "less than 4294967296"]),
        ({"launch": {"processes": -1}}, ["launch.processes", "-1"]),
    ],
)
def test_params_faulty_value_is_one_line_with_key_rule_and_value(over, told):
    with pytest.raises(UserError) as caught:
        params_files.typed(params_files.merge(MINIMAL, over), where="p.yaml")
    message = str(caught.value)
    assert message.startswith("p.yaml: ") and "\n" not in message
    assert [t for t in told if t not in message] == []


def test_params_missing_key_is_named_with_its_default(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(re.sub(r"\n  alpha: .*", "", SHIPPED.read_text()))
    with pytest.raises(UserError, match=r"'cluster\.alpha' is missing; add it \(default: 1\.5\)"):
        params_files.load([path])


def test_params_exponent_without_point_is_a_number(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("a: 1e-5\nb: 010\nc: yes\n")
    assert yaml_files.read_mapping(path) == {"a": 1e-5, "b": 10, "c": "yes"}


@pytest.mark.parametrize(
    ("text", "told"),
    [("a: [1\n", "not valid YAML"), ("- 1\n", "mapping"), ("a: 1\na: 2\n", "not valid YAML")],
)
def test_params_broken_file_is_one_line(tmp_path, text, told):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=told) as caught:
        yaml_files.read_mapping(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_params_missing_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: no such file"):
        params_files.load([tmp_path / "none.yaml"])


def test_params_later_file_replaces_lists_and_merges_sections():
    over = {"select": {"strategies": ["full"]}, "sweep": {"cluster.k": [2]}}
    merged = params_files.merge(
        {"select": {"strategies": ["a", "b"], "ratio": 0.5}, "sweep": {"x": [1]}}, over
    )
    assert merged == {
        "select": {"strategies": ["full"], "ratio": 0.5},
        "sweep": {"cluster.k": [2]},
    }


def test_params_every_shipped_key_has_a_comment():
    lines = SHIPPED.read_text().splitlines()
    keys = [i for i, line in enumerate(lines) if re.match(r" *[a-z_0-9]+:", line)]
    bare = [lines[i] for i in keys if "#" not in lines[i] and "#" not in lines[i - 1]]
    assert bare == []


def test_preset_takes_the_place_of_the_files_before_it_in_every_configuration(tmp_path):
    preset, other, over = (tmp_path / name for name in ("preset.yaml", "other.yaml", "over.yaml"))
    text = SHIPPED.read_text()
    preset.write_text(
        text.replace("name: demo", "name: preset").replace("  format: auto", "  format: messages")
    )
    other.write_text(text.replace("name: demo", "name: other"))
    over.write_text(f"configurations: [{preset}, {other}]\ntrain: {{epochs: 7}}\n")
    raw = params_files.load([SHIPPED, preset, over])
    assert raw == params_files.load([preset, over])
    found = [(c["name"], c["data"]["format"], c["train"]["epochs"]) for c in raw["configurations"]]
    assert found == [("preset", "messages", 7), ("other", "auto", 7)]


def test_overlay_before_a_whole_file_is_refused_for_it_would_be_undone(tmp_path):
    preset, over = tmp_path / "preset.yaml", tmp_path / "over.yaml"
    preset.write_text(SHIPPED.read_text())
    over.write_text("train: {epochs: 7}\n")
    for files in ([SHIPPED, over, preset], [over, preset]):
        with pytest.raises(UserError, match=rf"{over}: .* {preset}, .* name it after that file"):
            params_files.load(files)


def test_fields_of_an_overlay_replace_those_before():
    base = {"data": {"fields": {"output": "answer"}, "source": "s"}}
    over = {"data": {"fields": {}}}
    assert params_files.merge(base, over) == {"data": {"fields": {}, "source": "s"}}


def test_configurations_that_are_no_file_names_are_refused(tmp_path):
    over = tmp_path / "over.yaml"
    over.write_text("configurations: [{name: a}]\n")
    with pytest.raises(UserError, match="configurations: must name parameter files, got"):
        params_files.load([SHIPPED, over])


def test_folder_in_place_of_a_parameter_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot be read .*; name a YAML file"):
        yaml_files.read_mapping(tmp_path)
