"""The studies of sweeps/: each plans over params.yaml and shares what its points have in common."""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster_sft import plan
from cluster_sft.params_files import load
from cluster_sft.stages import SCORING

ROOT = Path(__file__).parents[1]
STUDIES = (
    *("main", "evol", "complexity", "selection-cost", "workers", "ratio", "clusters", "capacity"),
    *("model-size", "weighting", "mechanism", "batch-size", "coverage", "datasets"),
)


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    for folder in ("data", "presets", "sweeps"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)


def _load(*names: str) -> dict[str, Any]:
    return load([Path("params.yaml"), *(Path("sweeps", f"{name}.yaml") for name in names)])


def _count(raw: dict[str, Any]) -> dict[str, int]:
    """Return how many results a study makes, by stage, or step of score."""
    nodes = plan.ancestry(plan.target(raw)).values()
    return collections.Counter(
        f"{n.stage}/{Path(n.leaf).name}" if n.stage in SCORING else n.stage for n in nodes
    )


def test_every_published_study_has_a_file():
    assert sorted(p.stem for p in Path("sweeps").glob("*.yaml")) == sorted(STUDIES)


@pytest.mark.parametrize("study", STUDIES)
def test_study_is_planned_where_its_file_says(study):
    text = Path("sweeps", f"{study}.yaml").read_text()
    raw = _load(study)
    assert raw["study"] == study
    leaf = plan.target(raw).leaf
    told = re.findall(r"^# Report: (\S+)/$", text, re.MULTILINE)
    assert told == [leaf.replace("results/demo/", "results/NAME/")]
    assert f"make study-{study}\n" in re.sub(r" +on params.*", "", text)
    assert f"snakemake --cores all --configfile params.yaml sweeps/{study}.yaml" in text


@pytest.mark.parametrize("study", STUDIES)
def test_commands_of_a_study_name_files_that_are_there(study):
    text = Path("sweeps", f"{study}.yaml").read_text()
    for name in re.findall(r"ON=(\S+)", text):
        assert plan.points(_load(study, f"on/{name}"))
    for name in re.findall(r"PARAMS=(\S+)", text):
        own = load([Path("params.yaml"), Path(name), Path("sweeps", f"{study}.yaml")])
        assert plan.points(own)


def test_main_study_makes_every_common_result_once():
    budgeted, ratios, seeds = 7, 3, 3
    found = _count(_load("main"))
    trained = (budgeted * ratios + 1) * seeds
    shared = ("prepare", "embed", "cluster", "validate", "report", "scorer/less", "features/less")
    shared += ("score/less", "score/ifd", "scorer/s2l", "features/s2l", "score/s2l")
    shared += ("score/length-matched-random",)
    assert {stage: found[stage] for stage in shared} == dict.fromkeys(shared, 1)
    assert (found["select"], found["train"]) == (budgeted * ratios + 1, trained)
    assert found["evaluate"] == (trained + 1) * len(_load("main")["evaluate"]["suites"])


def test_weighting_trains_random_once_a_ratio_and_selects_once_for_both_weights():
    raw = _load("weighting")
    trained = collections.Counter(p.strategy for p in plan.points(raw))
    assert trained == {"base": 1, "random": 3 * 3, "cluster": 2 * 3 * 3}
    assert _count(raw)["select"] == 2 * 3


def test_mechanism_draws_random_rows_once_however_clusters_rank():
    trained = collections.Counter(p.strategy for p in plan.points(_load("mechanism")))
    assert trained == {"base": 1, "random": 3 * 3, "cluster": 3 * 3 * 3}


def test_workers_study_has_a_cluster_for_each_worker():
    points = [p for p in plan.points(_load("workers")) if p.strategy == "cluster"]
    clusters = {
        p.raw["train"]["workers"]: p.nodes["cluster"].params.model_dump()["k"] for p in points
    }
    assert clusters == {4: 4, 8: 8}


def test_studies_share_what_they_have_in_common_through_their_leaves():
    main, weighting = (
        {n.stamp for n in plan.ancestry(plan.target(_load(s))).values() if n.stage == "train"}
        for s in ("main", "weighting")
    )
    assert len(main & weighting) == 2 * 3 * 3


def test_make_runs_a_study_on_the_files_that_it_is_given():
    command = [
        "make",
        "-n",
        "study-weighting",
        "PARAMS=presets/evol-7b.yaml",
        "ON=code-and-medical",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = "presets/evol-7b.yaml sweeps/weighting.yaml sweeps/on/code-and-medical.yaml"
    assert f"snakemake --cores all --configfile {files}\n" in run.stdout
    assert f"cluster-sft show --params {files}\n" in run.stdout
