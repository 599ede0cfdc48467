"""From a node to the call of its stage's `run`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster_sft.nodes import Node
from cluster_sft.params import Launch


def compute_with(launch: Launch) -> Callable[[Node, Path, Path], None]:
    """Return the function that computes a node's payload into a folder under these settings."""

    def compute(node: Node, out: Path, scratch: Path) -> None:
        run = importlib.import_module(f"cluster_sft.{node.module}").run
        run(node.params, **_arguments(node), out=out, scratch=scratch, launch=launch)

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
