"""One plan, two engines: never silently stale, never computed twice, nothing lost.

The project is small but whole: real stages, a real random model, git, DVC with a directory remote.
"""

from __future__ import annotations

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

from cluster_sft import plan
from cluster_sft.params_files import load
from cluster_sft.yaml_files import read_mapping
from engines import ROOT, Project

CHAIN = [
    *("prepare", "embed", "scorer", "features", "score", "cluster", "validate", "select"),
    *("train", "diagnose", "evaluate", "report"),
]
LATER = {"cluster", "validate", "select", "diagnose", "train", "evaluate", "report"}
WHOLE = Counter(
    {
        "computed prepare": 1,
        "computed embed": 1,
        "computed cluster": 1,
        "computed validate": 1,
        **{  # the empty leaves of two strategies have one key
            f"{outcome} {stage}": 1
            for stage in ("scorer", "features", "score")
            for outcome in ("computed", "restored")
        },
        "computed select": 2,
        "computed diagnose": 2,
        "computed train": 2,
        "computed evaluate": 3,
        "computed report": 1,
    }
)


@pytest.fixture(scope="module")
def made(tiny_model_dir, tmp_path_factory) -> Project:
    """A project that Snakemake ran, that DVC then recorded and pushed."""
    home = tmp_path_factory.mktemp("engines")
    project = Project.create(home / "made", tiny_model_dir)
    first = project.snakemake()
    assert first == WHOLE
    again = project.repro()
    assert {k.split()[0] for k in again} == {"reused"}, again
    project.call("dvc", "remote", "add", "-q", "-d", "store", str(home / "remote"))
    project.call("dvc", "push", "-q")
    project.commit()
    return project


@pytest.fixture(params=["tree", "clone"])
def project(request, made, tmp_path) -> Project:
    """The working tree, or a fresh clone of it after `dvc pull`, with file times shuffled."""
    return made.copy(tmp_path / "p") if request.param == "tree" else made.clone(tmp_path / "p")


def downstream(stage: str) -> set[str]:
    aside = {"select": {"validate"}, "train": {"diagnose"}}
    return set(CHAIN[CHAIN.index(stage) :]) - aside.get(stage, set())


def test_engines_unchanged_project_has_nothing_to_do(project):
    assert (project.planned(), project.changed()) == (set(), set())


EDITS = [
    ("select.ratio", 0.75, "select"),
    ("cluster.alpha", 1.2, "cluster"),
    ("cluster.n_init", 2, "cluster"),
    ("select.trim", 0.1, "select"),
    ("train.learning_rate", 2e-5, "train"),
    ("data.holdout", 0.2, "prepare"),
    ("data.max_samples", 50, "prepare"),
]


def test_engines_edit_of_a_key_plans_exactly_what_is_downstream(project):
    """One clone for all edits: making it is what takes the time."""
    original = (project.root / "params.yaml").read_text()
    planned, stale = {}, {}
    for key, value, _ in EDITS:
        project.edit(key, value)
        planned[key], stale[key] = project.planned(), project.changed()
        (project.root / "params.yaml").write_text(original)
    wanted = {key: downstream(stage) for key, _, stage in EDITS}
    assert planned == wanted
    # DVC names the stages whose own parameters or paths changed; the rest follows from outputs.
    assert {k: first(v) for k, v in stale.items()} == {k: stage for k, _, stage in EDITS}
    assert [k for k, v in stale.items() if not v <= wanted[k]] == []


def first(stages: set[str]) -> str:
    return min((s.removesuffix("-base") for s in stages), key=CHAIN.index)


def test_engines_edits_that_cannot_change_a_result_plan_nothing(project):
    project.edit("launch.processes", 2)
    project.replace("params.yaml", "# Stage select:", "# A remark.\n# Stage select:")
    text = (project.root / "params.yaml").read_text()
    start, end = text.index("\n# Stage cluster"), text.index("\n# Stage select")
    moved = text[:start] + text[end:] + text[start:end]
    (project.root / "params.yaml").write_text(moved)
    assert (project.planned(), project.changed()) == (set(), set())


def test_engines_one_byte_of_data_and_code_of_clustering_are_seen(project):
    project.replace("data/raw.jsonl", "Add", "Sum")
    assert project.planned() == downstream("prepare")
    assert first(project.changed()) == "prepare"
    project.replace("data/raw.jsonl", "Sum", "Add")
    project.replace("src/cluster_sft/clustering.py", "LOW_USAGE = 0.25", "LOW_USAGE = 0.26")
    assert project.planned() == downstream("cluster")
    assert first(project.changed()) == "cluster"
    project.replace("src/cluster_sft/clustering.py", "LOW_USAGE = 0.26", "LOW_USAGE = 0.25  # why")
    assert project.planned() == set()


def test_engines_dvc_runs_what_is_downstream_and_restores_old_values(made, tmp_path):
    project = made.clone(tmp_path / "p")
    project.edit("cluster.n_init", 2)  # a key that no path spells
    done = project.repro()
    assert done == Counter({k: n for k, n in WHOLE.items() if k.split()[1] in LATER}) - Counter(
        {"computed evaluate": 1}
    )
    assert (project.planned(), project.changed()) == (set(), set())
    project.edit("cluster.n_init", 4)
    assert project.planned() == downstream("cluster")
    back = project.snakemake()
    assert {k.split()[0] for k in back} == {"restored"}, back
    assert {k.split()[0] for k in project.repro()} <= {"reused"}
    assert (project.planned(), project.changed()) == (set(), set())


def test_engines_snakemake_runs_what_is_downstream_and_dvc_keeps_it(made, tmp_path):
    project = made.copy(tmp_path / "p")
    project.edit("select.ratio", 0.75)  # a key that paths spell
    done = project.snakemake()
    assert done == Counter(
        {
            "computed select": 2,
            "computed train": 2,
            "computed diagnose": 2,
            "computed evaluate": 2,
            "computed report": 1,
        }
    )
    leaf = next(project.root.glob("results/tiny/train/*/cluster-*0.75*/*"))
    before = (leaf / "manifest.json").read_bytes()
    again = project.repro()
    assert {k.split()[0] for k in again} == {"reused"}, again
    assert (leaf / "manifest.json").read_bytes() == before
    project.edit("select.ratio", 0.5)
    assert {k.split()[0] for k in project.snakemake()} <= {"reused", "restored"}
    assert {k.split()[0] for k in project.repro()} <= {"reused", "restored"}
    report = (project.root / "results/tiny/report/summary.csv").read_text()
    assert ",0.75," not in report and ",0.5," in report


def test_engines_sweep_shares_upstream_and_reports_every_point(made, tmp_path):
    project = made.copy(tmp_path / "p")
    (project.root / "sweeps").mkdir(exist_ok=True)
    sweep = project.root / "sweeps/two seeds.yaml"
    sweep.write_text("study: seeds\nsweep: {train.seed: [0, 1]}\nselect: {strategies: [random]}\n")
    files = ("--configfile", "params.yaml", "sweeps/two seeds.yaml")
    done = project.snakemake(*files)
    assert done == Counter({"computed train": 1, "computed evaluate": 1, "computed studies": 1})
    table = (project.root / "results/tiny/studies/seeds/summary.csv").read_text()
    assert [line.split(",")[:3] for line in table.splitlines()[1:]] == [
        ["base", "", ""],
        ["random", "0.5", "0"],
        ["random", "0.5", "1"],
    ]


def test_engines_job_takes_no_more_threads_than_launch_threads_of_the_cores_of_its_rule(
    made, tmp_path
):
    project = made.copy(tmp_path / "threads")
    project.edit("train.seed", 7)

    def told(*arguments: str) -> set[str]:
        text = project.call("snakemake", "-n", "-p", "--cores", "8", *arguments)
        return set(re.findall(r"run \$\(dirname \S+/train/.* --threads (\d+)", text))

    project.edit("launch.threads", 3)
    assert told("--set-threads", "train=8") == {"3"}
    project.edit("launch.threads", None)
    assert told("--set-threads", "train=6") == {"6"}


def test_engines_config_on_the_command_line_is_refused_with_the_remedy(made):
    text = made.call("snakemake", "-n", "--config", "name=other", status=1)
    assert "--configfile" in text


def test_engines_key_that_changed_under_a_run_is_refused_before_any_work(made):
    leaf = "results/tiny/embed"
    text = made.call("cluster-sft", "run", leaf, "--expect", "0" * 12, status=2)
    assert "expected key 000000000000" in text and len(text.splitlines()) == 1


def test_engines_fault_in_params_is_one_line_for_snakemake(made, tmp_path):
    project = made.copy(tmp_path / "p")
    project.edit("cluster.alpha", 0.5)
    text = project.call("snakemake", "-n", status=1)
    assert "cluster-sft: params.yaml: cluster.alpha: should be greater than or equal to 1" in text
    assert "Traceback" not in text


OVERRIDES = [
    {},
    {"cluster.k": 3, "cluster.alpha": 1, "train.learning_rate": 1e-5},
    {"select.strategies": ["full", "uniform"], "select.ranking": "core", "name": "other"},
    {"evaluate.suites": ["heldout", "stdlib-mcq"], "train.seed": 3, "train.weights": "none"},
    {"train.learning_rate": 0.00001, "select.ratio": 0.333, "data.max_samples": 30},
    {"select.strategies": ["less", "ifd", "s2l", "k-center", "loss-top"]},
]


@pytest.mark.parametrize("over", OVERRIDES)
def test_engines_have_the_same_targets_commands_and_dependencies(made, tmp_path, monkeypatch, over):
    from dvc.repo import Repo

    project = made.copy(tmp_path / "p")
    for key, value in over.items():
        project.edit(key, value)
    monkeypatch.chdir(project.root)
    nodes = plan.ancestry(plan.target(load([Path("params.yaml")]))).values()
    ours = {n.leaf: (n.stage, f"cluster-sft run {n.leaf}", reads(n)) for n in nodes}
    theirs = {}
    with Repo(str(project.root)) as repo:
        for stage in repo.index.stages:
            (out,) = stage.outs
            name = stage.name.split("@")[0].removesuffix("-base")
            deps = {
                d.def_path for d in stage.deps if d.protocol != "local" or "src/" not in d.def_path
            }
            deps -= {d.def_path for d in stage.deps if hasattr(d, "params")}
            theirs[out.def_path] = (name, stage.cmd, deps)
    assert theirs == ours


def reads(node: plan.Node) -> set[str]:
    """What a node reads, as dvc.yaml spells it: the report depends on the folders of two stages."""
    if node.stage == "report":
        folder = "/".join(node.leaf.split("/")[:2])
        return {f"{folder}/evaluate", f"{folder}/diagnose"}
    files = {str(p) for role, p in node.files.items() if role in ("source", "suite", "targets")}
    if node.stage == "score":
        files.add("data/heldout.yaml")  # of LESS: DVC has one stage for all methods
    return files | {n.leaf for n in node.parents}


def test_dvc_yaml_is_what_its_writer_makes_of_the_stages():
    writer = runpy.run_path(str(ROOT / "workflow/dvc_yaml.py"))
    assert (ROOT / "dvc.yaml").read_text() == writer["pipeline"](), "run workflow/dvc_yaml.py"


def test_dvc_yaml_lists_the_code_behind_every_stage():
    stages = read_mapping(ROOT / "dvc.yaml")["stages"]
    of = {name: {Path(d).name for d in stage["deps"]} for name, stage in stages.items()}
    assert {"clustering.py", "kmeans.py", "transport.py"} <= of["cluster"]
    assert {"selection.py", "strategies"} <= of["select"]
    assert {"training.py", "objective.py", "adapters.py"} <= of["train"]
    assert {"less_gradients.py", "_projection.py", "s2l_trajectories.py"} <= of["features"]
    assert "less_gradients.py" not in of["score"] | of["train"]
