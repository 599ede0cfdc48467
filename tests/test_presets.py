"""The published settings: complete files that both engines take in place of params.yaml."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset

from cluster_sft import descriptors, plan, sources
from cluster_sft.formats import reader
from cluster_sft.params_files import load, typed
from cluster_sft.stages import SCORING, get
from cluster_sft.yaml_files import read_mapping
from engines import ROOT, Project

PRESETS = sorted(ROOT.glob("presets/*.yaml"))
CODE = {
    "train.workers": 4,
    "train.global_batch_size": 512,
    "train.epochs": 2,
    "train.optimizer": "adafactor",
    "train.learning_rate": 5e-5,
    "train.scheduler": "linear",
    "train.warmup_steps": 15,
    "train.warmup_ratio": None,
    "model.name": "codellama/CodeLlama-7b-Python-hf",
    "model.template": "magicoder",
    "model.max_length": 1216,
    "data.source": "data/magicoder.yaml",
    "evaluate.suites": ["heldout", "humaneval", "mbpp"],
    "evaluate.allow_code_execution": True,
    "score.s2l.model": "deepseek-ai/deepseek-coder-1.3b-instruct",
    "score.s2l.epochs": 2,
}
MEDICAL = {
    "train.workers": 4,
    "train.global_batch_size": 128,
    "train.epochs": 3,
    "train.optimizer": "adamw",
    "train.learning_rate": 2e-5,
    "train.scheduler": "cosine",
    "train.warmup_steps": None,
    "train.warmup_ratio": 0.03,
    "model.name": "meta-llama/Llama-2-7b-hf",
    "model.template": "alpaca",
    "model.max_length": 1024,
    "data.source": "data/medinstruct.yaml",
    "evaluate.suites": ["heldout", "medmcqa", "medqa", "pubmedqa", "mmlu-medical"],
    "score.s2l.model": "meta-llama/Llama-3.2-1B-Instruct",
    "score.s2l.epochs": 1,
}
ADAMW = {"train.optimizer": "adamw", "train.warmup_steps": None, "train.warmup_ratio": 0.05}
PUBLISHED = {
    "magicoder-7b": CODE,
    "magicoder-7b-8gpu": {**CODE, "train.workers": 8},
    "magicoder-13b": {**CODE, "model.name": "codellama/CodeLlama-13b-Python-hf"},
    "evol-7b": {**CODE, **ADAMW, "data.source": "data/evol.yaml"},
    "med-7b": MEDICAL,
    "med-13b": {**MEDICAL, "model.name": "meta-llama/Llama-2-13b-hf"},
}
EVERYWHERE = {
    "cluster.k": "auto",
    "cluster.alpha": 1.5,
    "model.dtype": "bf16",
    "select.ranking": "peripheral",
    "select.trim": 0.0,
    "train.precision": "bf16",
    "train.weight_decay": 0.0,
    "train.max_grad_norm": 1.0,
    "train.lora_rank": None,
    "score.less.lora_rank": 128,
    "score.less.lora_alpha": 512,
    "score.less.projection_dim": 8192,
    "score.less.learning_rate": 2e-5,
    "score.less.batch_size": 32,
    "score.less.warmup_share": 0.05,
    "score.less.warmup_epochs": 4,
    "score.s2l.checkpoints": 12,
    "score.s2l.clusters": 100,
    "diagnose.sample": 400,
    "diagnose.permutations": 9999,
    "evaluate.limit": None,
    "launch.gradient_checkpointing": True,
    "study": None,
    "sweep": {},
}
ROWS = {  # what the Hub's data sets hold, and the conversation that it stands for
    "magicoder": ({"problem": "q", "solution": "a", "lang": "python"}, "q", "python"),
    "evol": ({"instruction": "q", "output": "a"}, "q", None),
    "medinstruct": ({"instruction": "q", "input": "i", "output": "a"}, "q\n\ni", None),
}


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """The working folder of a project whose params.yaml a preset replaces."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_presets_are_the_published_settings_by_name():
    assert {path.stem for path in PRESETS} == set(PUBLISHED)


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_preset_states_the_published_values(path):
    raw = read_mapping(path)
    wanted = {"name": path.stem, **EVERYWHERE, **PUBLISHED[path.stem]}
    assert {key: get(raw, key) for key in wanted} == wanted
    # As many processes as workers, so that each GPU plays one.
    assert get(raw, "launch.processes") == get(raw, "train.workers")


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_preset_spells_every_key_and_plans_without_network(path, tree):
    shutil.copy(path, "params.yaml")
    raw = load([Path("params.yaml")])
    assert keys(raw) == keys(typed(raw).model_dump())
    nodes = plan.ancestry(plan.target(raw)).values()
    evaluated = Counter(Path(n.leaf).name for n in nodes if n.stage == "evaluate")
    strategies = 1 + len(raw["select"]["strategies"])  # and the untrained model
    assert evaluated == dict.fromkeys(raw["evaluate"]["suites"], strategies)
    assert {n.params.k for n in nodes if n.stage == "cluster"} == {raw["train"]["workers"]}


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_preset_plans_every_strategy_of_the_main_study(path, tree):
    raw = load([path])
    raw["select"]["strategies"] = ["full", "random", "uniform", "ifd", "less", "s2l", "cluster"]
    nodes = plan.ancestry(plan.target(raw)).values()
    made = {f"{n.stage}/{Path(n.leaf).name}": n.params for n in nodes if n.stage in SCORING}
    assert {"score/ifd", "score/less", "features/less", "score/s2l"} <= set(made)
    assert made["scorer/s2l"].s2l_model == PUBLISHED[path.stem]["score.s2l.model"]


def keys(value: object, prefix: str = "") -> set[str]:
    """Return the dotted keys of nested mappings; an empty one is a value."""
    if not isinstance(value, dict) or not value:
        return {prefix}
    return {found for k, v in value.items() for found in keys(v, f"{prefix}.{k}")}


@pytest.mark.parametrize("name", ROWS)
def test_descriptor_of_a_preset_reads_the_columns_of_its_data_set(name, monkeypatch):
    row, asked, category = ROWS[name]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: Dataset.from_list([row]))
    source = sources.read(ROOT / f"data/{name}.yaml")
    forms = [typed(read_mapping(p)).data for p in PRESETS]
    (form,) = {d.format for d in forms if d.source == f"data/{name}.yaml"}
    sample = reader(source.rows, name=form, fields=source.fields, where="row 0").read(row)
    assert [m["content"] for m in sample.messages] == [asked, "a"]
    assert sample.category == category


@pytest.mark.parametrize("name", ROWS)
def test_descriptor_of_a_preset_pins_a_revision(name):
    described = descriptors.read(ROOT / f"data/{name}.yaml")
    assert described.hub.count("/") == 1
    assert described.revision


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    """A project of both engines, in which no stage was run."""
    home = tmp_path_factory.mktemp("presets")
    return Project.create(home / "p", home / "no-model")


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_preset_is_taken_by_both_engines_and_their_targets_agree(path, project, monkeypatch):
    from dvc.repo import Repo

    monkeypatch.chdir(project.root)
    shutil.copy(path, "params.yaml")
    nodes = plan.ancestry(plan.target(load([Path("params.yaml")]))).values()
    with Repo(os.curdir) as repo:
        listed = {os.path.relpath(o.fs_path) for stage in repo.index.stages for o in stage.outs}
    assert listed == {n.leaf for n in nodes}
    planned = jobs(project.call("snakemake", "-n", "--cores", "2"))
    rules = ("unscored" if n.module == "scorers.none" else n.stage for n in nodes)
    assert planned == Counter(rules)


def jobs(text: str) -> Counter[str]:
    """Return how many jobs of each rule `snakemake -n` would run."""
    found = re.search(r"^job +count\n[- ]+\n(.*?)^total", text, re.MULTILINE | re.DOTALL)
    assert found, text
    rows = (line.split() for line in found[1].splitlines() if line.strip())
    return Counter({name: int(count) for name, count in rows if name != "all"})
