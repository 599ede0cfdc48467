"""Nodes of a Slurm job: what is asked of srun, and what is wrong is told in one line."""

from __future__ import annotations

import pytest

from cluster_sft import slurm
from cluster_sft.computing import compute_with
from cluster_sft.errors import UserError
from cluster_sft.params import Launch
from engines import Project

VARIABLES = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Slurm's commands, as far as they are asked: a job of two nodes, localhost the first."""
    answers = {"srun": "", "squeue": "2", "scontrol": "localhost\nnode2"}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{answer}\\n'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def answer(commands, name, script):
    (commands / name).write_text(f"#!/bin/sh\n{script}\n")


def test_srun_is_asked_for_one_task_on_each_node_of_the_job(commands):
    command = slurm.srun_command(["program", "job.json"], nodes=2)
    assert {"--jobid=4711", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(command)
    assert command[-2:] == ["program", "job.json"]


def test_srun_obeys_no_variable_of_the_step_around_it(commands, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/elsewhere/slurm.conf")
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "1")
    left = slurm.srun_environment()
    assert [n for n in left if n.startswith(("SLURM", "SRUN"))] == ["SLURM_CONF"]
    assert left["PATH"].startswith(str(commands))


def test_nodes_outside_of_a_job_are_refused(commands, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(UserError, match=r"launch\.nodes is 2, but this process is in no Slurm job"):
        slurm.srun_command(["program"], nodes=2)


def test_nodes_that_the_job_has_not_are_refused(commands):
    with pytest.raises(UserError, match=r"nodes is 4, but Slurm job 4711 has 2 nodes"):
        slurm.srun_command(["program"], nodes=4)


def test_place_is_read_from_the_step_and_the_port_from_the_job(commands):
    assert slurm.place() == slurm.Place(rank=1, nodes=2, address="localhost", port=24711)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("exit 1", r"names 0 nodes, not the 2 of Slurm job 4711"),
        ("printf 'no-such-host.invalid\\nnode2\\n'", r"no-such-host\.invalid, the first node"),
    ],
)
def test_place_without_an_address_of_the_first_node_is_refused(commands, script, told):
    answer(commands, "scontrol", script)
    with pytest.raises(UserError, match=told):
        slurm.place()


def test_place_outside_of_a_step_is_refused(commands, monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST is not set"):
        slurm.place()


def test_processes_that_cannot_be_spread_over_the_nodes_are_refused():
    with pytest.raises(UserError, match=r"multiple of launch\.nodes \(2\), got 3"):
        compute_with(Launch(processes=3, nodes=2))


def test_profile_spreads_training_over_nodes_and_every_rule_is_told(tiny_model_dir, tmp_path):
    project = Project.create(tmp_path / "p", tiny_model_dir)
    project.edit("launch.processes", 2)
    planned = project.call("snakemake", "-n", "-p", "--profile", "profiles/slurm")
    assert planned.count("nodes=2, tasks=2, mpi=srun") == 2  # of two strategies
    assert planned.count(" --nodes 2 --threads ") == planned.count("cluster-sft run ")


def test_nodes_without_a_scheduler_are_those_of_the_parameters(tiny_model_dir, tmp_path):
    project = Project.create(tmp_path / "p", tiny_model_dir)
    planned = project.call("snakemake", "-n", "-p", "--cores", "2")
    assert planned.count(" --nodes 1 --threads ") == planned.count("cluster-sft run ") > 0
