"""From a node to the call of its stage's `run`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster_sft import gpus
from cluster_sft.errors import UserError
from cluster_sft.nodes import Node
from cluster_sft.params import Launch
from cluster_sft.stages import STAGES, STEPS
from cluster_sft.threads import available_threads, limited

GPUS = {spec.module: spec.gpus for spec in (*STAGES.values(), *STEPS.values())}


def gpus_of(node: Node, processes: int) -> int:
    """Return how many GPUs computing a node takes, where there are any, with these processes."""
    return {"none": 0, "one": 1, "one a process": processes}[GPUS.get(node.module, "none")]


def compute_with(launch: Launch) -> Callable[[Node, Path, Path], None]:
    """Return the function that computes a node's payload into a folder under these settings.

    It waits until the machine has the GPUs that the stage takes, and keeps to the job's threads. Of
    several machines all stages but train use one, with the processes that fall on it.

    Raises:
        UserError: the processes cannot be spread evenly over the machines.
    """
    if launch.processes % launch.nodes:
        raise UserError(
            f"launch.processes must be a multiple of launch.nodes ({launch.nodes}), "
            f"got {launch.processes}"
        )
    threads = launch.threads or available_threads()
    here = launch.processes // launch.nodes
    alone = launch.model_copy(update={"processes": here, "nodes": 1})

    def compute(node: Node, out: Path, scratch: Path) -> None:
        settings = launch if node.stage == "train" else alone
        # Before the stage is imported: torch and CUDA read their variables once.
        with limited(threads), gpus.hold(gpus_of(node, here), label=node.leaf):
            run = importlib.import_module(f"cluster_sft.{node.module}").run
            run(node.params, **_arguments(node), out=out, scratch=scratch, launch=settings)

    return compute


def _arguments(node: Node) -> dict[str, Any]:
    """Return the paths that a stage's `run` takes beside its parameters."""
    if node.stage == "report":
        return {}
    arguments: dict[str, Any] = {role: Path(n.leaf) for role, n in node.inputs.items()}
    if node.stage == "evaluate":
        arguments["suite"] = node.files["suite"]
        arguments["model"] = str(arguments.get("model") or node.identity["model"])
    return arguments
