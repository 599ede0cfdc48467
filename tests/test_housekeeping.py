"""`ls` and `gc`: every result is listed under its state, and only surplus is deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster_sft import housekeeping, plan, store
from cluster_sft.claims import claimed
from cluster_sft.params_files import load
from cluster_sft.stages import replace

ROOT = Path(__file__).parents[1]


def compute(node, out, scratch):
    (out / "payload").write_text(node.key)


@pytest.fixture
def raw(tmp_path, monkeypatch):
    """Parameters in whose workspace prepare is up to date, embed stale, and one old result kept."""
    shutil.copytree(ROOT / "data", tmp_path / "data")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    store.WORK.mkdir()
    raw = load([Path("params.yaml")])
    old = replace(raw, "model.dtype", "fp32")
    for parameters, leaf in [
        (raw, "results/demo/prepare"),
        (raw, "results/demo/embed"),
        (old, "results/demo/embed"),
        (old, "results/demo/cluster/k-auto_w-4_alpha-9_seed-0"),
    ]:
        store.make(plan.at(leaf, parameters), compute)
    return raw


def states(text):
    return {(line.split()[0], line.split()[-1]) for line in text.splitlines()}


def test_ls_tells_ready_stale_missing_orphan_and_kept(raw, capsys):
    kept = plan.at("results/demo/embed", raw).key
    housekeeping.show(raw)
    found = states(capsys.readouterr().out)
    assert {
        ("ready", "results/demo/prepare"),
        ("stale", "results/demo/embed"),
        ("missing", "results/demo/report"),
        ("orphan", "results/demo/cluster/k-auto_w-4_alpha-9_seed-0"),
        ("kept", f"work/kept/{kept}"),
    } <= found


def test_gc_deletes_surplus_and_nothing_that_params_yaml_asks_for(raw):
    interrupted = store.WORK / ("b" * 64)
    interrupted.mkdir()
    (interrupted / "holder").write_text("process 1 on elsewhere")  # of a killed run
    housekeeping.collect(raw, ask=False)
    assert sorted(p.name for p in store.leaves(Path("results"))) == ["embed", "prepare"]
    assert not interrupted.exists()
    second_names = {p.name for p in Path("work/kept").iterdir()}
    assert second_names == {store.leaf_key(p) for p in store.leaves(Path("results"))}


def test_gc_spares_what_a_running_job_writes(raw):
    key = "c" * 64
    partial = Path("results/demo/.partial") / key
    partial.mkdir(parents=True)
    with claimed(store.WORK / key) as scratch:
        housekeeping.collect(raw, ask=False)
        assert partial.is_dir() and scratch.is_dir()
    housekeeping.collect(raw, ask=False)
    assert not partial.exists()


def test_gc_without_a_yes_deletes_nothing(raw, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda question: "n")
    before = sorted(Path().rglob("*"))
    housekeeping.collect(raw, ask=True)
    assert sorted(Path().rglob("*")) == before
    assert "nothing was deleted" in capsys.readouterr().out
