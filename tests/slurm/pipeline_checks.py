"""The pipeline through profiles/slurm on a real Slurm, with training over two nodes.

`tests/slurm/run.sh` starts Slurm and runs this file; its name keeps it out of `make test`. Three
working trees hold the same small project: one process, two processes, two nodes. On the nodes
trainings are interrupted in every way that a cluster knows; what comes out must be the same.

What takes the time is Snakemake asking for the states of jobs, about 12 s a level of the DAG.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import pytest
from safetensors.torch import load_file
from torch import equal

from cluster_sft import plan
from cluster_sft.nodes import Node
from cluster_sft.params_files import load
from cluster_sft.yaml_files import read_mapping
from engines import Project, outcomes

UP = Path(__file__).with_name("up.sh")
PROFILE = Path(__file__).parents[2] / "profiles/slurm/profile.yaml"
NOTED = Path(os.environ.get("SLURM_TEST_DIR", "/tmp/cluster-sft-slurm")) / "pids"
STRATEGIES = ["cluster", "random", "uniform", "full"]
SETTINGS = {
    "select.strategies": STRATEGIES,
    "train.epochs": 20,
    "diagnose.permutations": 99,
    "launch.threads": 1,  # of every training process, in all three trees
    "launch.micro_batch": 2,
    "launch.checkpoint_minutes": 1e-6,  # after every step
}
# The profile as it is, but for what only this Slurm needs: it has no accounting, and tests poll.
SLURM = [
    *("snakemake", "--profile", "profiles/slurm"),
    *("--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "1"),
    *("--seconds-between-status-checks", "1", "--latency-wait", "10", "--jobs", "4"),
]
# Seconds for what takes one or two minutes on a machine with nothing else to do.
PATIENCE = float(os.environ.get("SLURM_TEST_PATIENCE", "900"))
EARLY = 3  # steps after which a training counts as under way


class Tree(Project):
    """A project whose nodes can be asked for by stage and strategy."""

    timeout = PATIENCE

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.known: dict[str, dict[str, Node]] = {}

    def nodes(self, stage: str) -> dict[str, Node]:
        """Return the nodes of a stage by the strategy in their leaf's path."""
        if stage not in self.known:
            self.known[stage] = self._nodes(stage)
        return self.known[stage]

    def _nodes(self, stage: str) -> dict[str, Node]:
        before = os.getcwd()
        os.chdir(self.root)
        try:
            found = plan.ancestry(plan.target(load([Path("params.yaml")]))).values()
        finally:
            os.chdir(before)
        of = [n for n in found if n.stage == stage]
        return {
            next((s for s in STRATEGIES if f"/{s}-" in n.leaf or n.leaf.endswith(f"/{s}")), ""): n
            for n in of
        }

    def leaf(self, stage: str, strategy: str = "") -> Path:
        return self.root / self.nodes(stage)[strategy].leaf

    def log(self, strategy: str) -> list[dict]:
        """Return the steps that a training has logged, in its leaf or, until then, its scratch."""
        node = self.nodes("train")[strategy]
        places = [self.root / node.leaf, self.root / "work" / node.key]
        for path in (p / "train_log.jsonl" for p in places):
            if path.is_file():
                whole = path.read_text().rpartition("\n")[0]
                return [json.loads(line) for line in whole.splitlines()]
        return []

    @contextmanager
    def submitted(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run Snakemake on Slurm in the background; what it says is in `snakemake.out`."""
        with (self.root / "snakemake.out").open("w") as out:
            process = subprocess.Popen(
                [*SLURM, *arguments],
                cwd=self.root,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def said(self) -> str:
        return (self.root / "snakemake.out").read_text()

    def stage_log(self, stage: str, strategy: str = "") -> str:
        """Return what `cluster-sft run` said of a leaf when it was last run."""
        node = self.nodes(stage)[strategy]
        place = node.leaf.split("/", 1)[1]
        return (self.root / "work/logs" / place / f"{node.key[:12]}.log").read_text()


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("slurm")


def tree(home: Path, name: str, model: Path, processes: int) -> Tree:
    """Make one of the trees; they differ in the number of processes alone."""
    made = Tree(Project.create(home / name, model).root)
    for key, value in {**SETTINGS, "launch.processes": processes}.items():
        made.edit(key, value)
    made.commit()
    return made


@pytest.fixture(scope="module")
def one(home, tiny_model_dir) -> Tree:
    """One process, uninterrupted."""
    made = tree(home, "one", tiny_model_dir, 1)
    made.snakemake("--until", "train")
    return made


@pytest.fixture(scope="module")
def two(home, tiny_model_dir) -> Tree:
    """Two processes of this machine, uninterrupted."""
    made = tree(home, "two", tiny_model_dir, 2)
    made.snakemake("--until", "train")
    return made


@pytest.fixture(scope="module")
def cluster(home, tiny_model_dir) -> Tree:
    """Two nodes of the cluster: all that comes before training is made."""
    made = tree(home, "nodes", tiny_model_dir, 2)
    with made.submitted("--until", "select") as process:
        assert process.wait(timeout=PATIENCE) == 0, made.said()
    return made


def wait_until(condition: Callable[[], object], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def slurm(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def jobs(tree: Tree, *, rule: str = "") -> list[list[str]]:
    """Return number, state, comment and nodes of a tree's jobs, oldest first."""
    listed = slurm("squeue", "-h", "--states=all", "--sort=i", "--format=%i|%T|%k|%N|%Z")
    found = [line.split("|") for line in listed.splitlines()]
    return [j[:4] for j in found if j[4] == str(tree.root) and j[2].startswith(f"rule_{rule}")]


def job_of(tree: Tree, strategy: str) -> str:
    """Return the running job of a training, from the environment of its processes."""
    return workers(tree, strategy)[0].environ()["SLURM_JOB_ID"]


def workers(tree: Tree, strategy: str) -> list[psutil.Process]:
    """Return the worker processes of a training, of all nodes."""
    mark = str(tree.root / "work" / tree.nodes("train")[strategy].key / "job.json")
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command[-3:] == ["-m", "cluster_sft.training", mark]:
            found.append(process)
    return found


def hold(tree: Tree, strategy: str) -> list[dict]:
    """Wait until a training is under way, and halt it in mid-run; return the steps it has done."""
    wait_until(
        lambda: len(tree.log(strategy)) > EARLY, seconds=PATIENCE, what=f"{strategy} does not train"
    )
    for process in workers(tree, strategy):
        process.suspend()
    return tree.log(strategy)


def let_go(halted: list[psutil.Process]) -> None:
    """Resume workers, who then end themselves; Slurm may have done it before."""
    for process in halted:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def targets(tree: Tree, *strategies: str) -> list[str]:
    return [tree.nodes("train")[s].stamp for s in strategies]


def test_slurm_stages_before_training_are_jobs_and_short_ones_are_not(cluster):
    submitted = Counter(comment.split("_wildcards_")[0] for _, _, comment, _ in jobs(cluster))
    assert {"rule_prepare", "rule_embed", "rule_cluster"} <= set(submitted)
    assert not any("select" in name or "unscored" in name for name in submitted)
    assert {state for _, state, _, _ in jobs(cluster)} == {"COMPLETED"}


@pytest.fixture(scope="module")
def interrupted(cluster) -> dict[str, list[dict]]:
    """Trainings that failed: cancelled, at their time limit, of damaged input; their steps."""
    damaged = cluster.leaf("select", "full") / "subset.jsonl"
    whole = damaged.read_text()
    damaged.write_text(whole[:-2])
    steps = {}
    wanted = targets(cluster, "cluster", "random", "full")
    with cluster.submitted("--retries", "0", *wanted) as process:
        held = set()
        while len(held) < 2:
            for strategy in {"cluster", "random"} - held:
                if len(cluster.log(strategy)) > EARLY:
                    steps[strategy] = hold(cluster, strategy)
                    held.add(strategy)
            assert process.poll() is None, cluster.said()
            time.sleep(0.02)
        slurm("scancel", job_of(cluster, "cluster"))
        reach_time_limit(cluster, "random")
        assert process.wait(timeout=PATIENCE) == 1, cluster.said()
    damaged.write_text(whole)
    return steps


def reach_time_limit(tree: Tree, strategy: str) -> None:
    """Wait until a halted training was told that its time limit is near.

    Slurm wakes it up itself before it tells it, so that it may be gone when we look.
    """
    number, ends = job_of(tree, strategy), workers(tree, strategy)
    limit = minutes_of(number) + 2
    slurm("scontrol", "update", f"JobId={number}", f"TimeLimit={limit}")
    wait_until(
        lambda: all(not p.is_running() or is_pending(p, signal.SIGTERM) for p in ends),
        seconds=PATIENCE,
        what="no signal before the time limit",
    )
    let_go(ends)


def minutes_of(number: str) -> int:
    """Return the whole minutes that a job has run."""
    shown = slurm("scontrol", "show", "job", number)
    hours, minutes, _ = re.search(r"RunTime=(?:\d+-)?(\d+):(\d+):(\d+)", shown).groups()
    return 60 * int(hours) + int(minutes)


def is_pending(process: psutil.Process, number: int) -> bool:
    """Whether a halted process has a signal waiting."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    masks = [int(v.split(":")[1], 16) for v in lines if v.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def test_slurm_failing_rule_is_told_in_one_line_and_its_neighbours_go_on(cluster, interrupted):
    told = cluster.stage_log("train", "full").splitlines()
    assert len(told) == 1 and "truncated or altered" in told[0]
    assert "Error in rule train" in cluster.said()


def test_slurm_cancelled_training_is_told_as_cancelled(cluster, interrupted):
    assert "SLURM status is: 'CANCELLED'" in cluster.said()
    assert not cluster.leaf("train", "cluster").exists()


def test_slurm_training_told_of_its_time_limit_saves_its_last_step(cluster, interrupted):
    assert is_saved(cluster, "random")


def is_saved(tree: Tree, strategy: str) -> bool:
    """Whether an interrupted training said so and has its last step in a checkpoint."""
    node = tree.nodes("train")[strategy]
    (saved,) = (tree.root / "work" / node.key / "checkpoints").glob("step-*")
    told = "interrupted; run it again to resume" in tree.stage_log("train", strategy)
    return told and saved.name == f"step-{len(tree.log(strategy))}"


def on_one_node() -> list[str]:
    """Return what the profile says of training, less what makes it take several nodes."""
    train = read_mapping(PROFILE)["set-resources"]["train"]
    return [f"train:{k}={v}" for k, v in train.items() if k not in ("nodes", "tasks", "mpi")]


def test_slurm_training_on_one_node_saves_its_last_step_and_resumes(home, two, tiny_model_dir):
    made = tree(home, "node", tiny_model_dir, 2)
    made.snakemake("--until", "select")
    wanted = ["--set-resources", *on_one_node(), "--retries", "0", *targets(made, "random")]
    with made.submitted(*wanted) as process:
        steps = hold(made, "random")
        reach_time_limit(made, "random")
        assert process.wait(timeout=PATIENCE) == 1, made.said()
    assert is_saved(made, "random")
    with made.submitted(*wanted) as process:
        assert process.wait(timeout=PATIENCE) == 0, made.said()
    assert continues(made.log("random"), steps)
    ours, theirs = (load_file(t.leaf("train", "random") / "model.safetensors") for t in (made, two))
    assert all(equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def requeued(cluster, interrupted) -> list[dict]:
    """A training whose second node was lost and came back; its steps before that."""
    with cluster.submitted("--retries", "0", *targets(cluster, "uniform")) as process:
        steps = hold(cluster, "uniform")
        number = job_of(cluster, "uniform")
        pid = next(int(v.split()[1]) for v in NOTED.read_text().splitlines() if "node2" in v)
        psutil.Process(pid).terminate()
        wait_until(
            lambda: state(number) != "RUNNING", seconds=PATIENCE, what="the loss was not noticed"
        )
        let_go(workers(cluster, "uniform"))  # of the lost node, which Slurm did not reach
        subprocess.run([UP, "node2"], check=True, timeout=60)
        assert process.wait(timeout=PATIENCE) == 0, cluster.said()
    assert slurm("scontrol", "show", "job", number).count("Restarts=1") == 1
    return steps


def state(number: str) -> str:
    return slurm("squeue", "-h", "--states=all", f"--jobs={number}", "--format=%T")


@pytest.fixture(scope="module")
def finished(cluster, interrupted, requeued) -> Tree:
    """The whole project, after the same command was given once more."""
    with cluster.submitted() as process:
        assert process.wait(timeout=PATIENCE) == 0, cluster.said()
    return cluster


def test_slurm_training_of_a_lost_node_is_requeued_and_resumes(cluster, requeued):
    assert continues(cluster.log("uniform"), requeued)


@pytest.mark.parametrize("strategy", ["cluster", "random"])
def test_slurm_same_command_again_resumes_from_the_checkpoint(finished, interrupted, strategy):
    assert continues(finished.log(strategy), interrupted[strategy])


def continues(log: list[dict], before: list[dict]) -> bool:
    """Whether steps from before an interruption, but perhaps the last, were not run again.

    The seconds that they took are theirs alone.
    """
    kept = before[: len(before) - 1]
    return [e["step"] for e in log] == list(range(1, len(log) + 1)) and log[: len(kept)] == kept


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slurm_final_weights_are_those_of_an_uninterrupted_run(finished, two, strategy):
    ours, theirs = (
        load_file(t.leaf("train", strategy) / "model.safetensors") for t in (finished, two)
    )
    assert all(equal(ours[name], theirs[name]) for name in theirs)


def test_slurm_trainings_ran_on_two_nodes(finished):
    assert {nodes for _, s, _, nodes in jobs(finished, rule="train") if s == "COMPLETED"} == {
        "node[1-2]"
    }
    facts = json.loads((finished.leaf("train", "cluster") / "summary.json").read_text())
    assert facts["processes"] == 2


@pytest.mark.parametrize("other", ["one", "two"])
def test_slurm_clusters_subset_and_batches_are_the_same_integers(finished, other, request):
    other = request.getfixturevalue(other)
    ours, theirs = (
        pl.read_parquet(t.leaf("cluster") / "clusters.parquet").select("id", "cluster")
        for t in (finished, other)
    )
    assert ours.equals(theirs)
    for strategy in STRATEGIES:
        ours, theirs = (
            pl.read_parquet(t.leaf("select", strategy) / "subset.parquet").select("id", "cluster")
            for t in (finished, other)
        )
        assert ours.equals(theirs)
        ours, theirs = (
            [(e["rows"], e["tokens"], e["supervised_tokens"]) for e in t.log(strategy)]
            for t in (finished, other)
        )
        assert ours == theirs


@pytest.mark.parametrize("other", ["one", "two"])
def test_slurm_losses_are_the_same_within_a_ten_thousandth(finished, other, request):
    other = request.getfixturevalue(other)
    for strategy in STRATEGIES:
        ours, theirs = (np.array([e["loss"] for e in t.log(strategy)]) for t in (finished, other))
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_slurm_results_are_recorded_with_dvc_and_pulled_elsewhere(finished, home):
    again = outcomes(finished.call("dvc", "repro"))
    assert {k.split()[0] for k in again} == {"reused"}
    finished.call("dvc", "remote", "add", "-q", "-d", "store", str(home / "store"))
    finished.call("dvc", "push", "-q")
    finished.commit()
    clone = finished.clone(home / "clone")
    assert (clone.planned(), clone.changed()) == (set(), set())
