"""From a node to the call of its stage's `run`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster_sft.errors import UserError
from cluster_sft.nodes import Node
from cluster_sft.params import Launch


def compute_with(launch: Launch) -> Callable[[Node, Path, Path], None]:
    """Return the function that computes a node's payload into a folder under these settings.

    Of several machines all stages but train use one, with the processes that fall on it.

    Raises:
        UserError: the processes cannot be spread evenly over the machines.
    """
    if launch.processes % launch.nodes:
        raise UserError(
            f"launch.processes must be a multiple of launch.nodes ({launch.nodes}), "
            f"got {launch.processes}"
        )
    local = {"processes": launch.processes // launch.nodes, "nodes": 1}
    alone = launch.model_copy(update=local)

    def compute(node: Node, out: Path, scratch: Path) -> None:
        run = importlib.import_module(f"cluster_sft.{node.module}").run
        settings = launch if node.stage == "train" else alone
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
