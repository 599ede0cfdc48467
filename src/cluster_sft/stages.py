"""The stages: what each reads of params.yaml, and how a leaf's path spells its axes."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from cluster_sft.errors import UserError
from cluster_sft.params import (
    TOKEN,
    Cluster,
    ClusterParams,
    Data,
    EmbedParams,
    EvaluateParams,
    EvaluateRule,
    PrepareParams,
    Section,
    SelectParams,
    SelectRule,
    Train,
    TrainParams,
)

ROOT = "results"
BASE = "base"  # the point without training


def _of(section: str, model: type[BaseModel]) -> dict[str, str]:
    return {f: f"{section}.{f}" for f in model.model_fields}


@dataclass(frozen=True)
class Stage:
    """A stage: its module, its parameters, where each comes from, and the leaf's slug.

    Attributes:
        module: the module below `cluster_sft` that has `run`.
        params: the typed parameters that `run` receives.
        keys: parameter -> dotted key of params.yaml.
        slug: the path parts that this stage adds to those of the stage it builds on.
    """

    module: str
    params: type[Section]
    keys: dict[str, str]
    slug: str = ""


STAGES: dict[str, Stage] = {
    "prepare": Stage(
        "preparation",
        PrepareParams,
        {
            **_of("data", Data),
            "model": "model.name",
            "template": "model.template",
            "max_length": "model.max_length",
        },
    ),
    "embed": Stage("embedding", EmbedParams, {"model": "model.name", "dtype": "model.dtype"}),
    "cluster": Stage(
        "clustering",
        ClusterParams,
        _of("cluster", Cluster),
        "k-{cluster.k}_w-{train.workers}_alpha-{cluster.alpha}_seed-{cluster.seed}",
    ),
    "select": Stage(
        "selection",
        SelectParams,
        {**_of("select", SelectRule), "strategy": "strategy"},
        "{strategy}-{select.ranking}_r-{select.ratio}_seed-{select.seed}",
    ),
    "train": Stage(
        "training",
        TrainParams,
        {**_of("train", Train), "strategy": "strategy", "model": "model.name"},
        "weights-{train.weights}_batches-{train.batches}_lr-{train.learning_rate}"
        "_epochs-{train.epochs}_batch-{train.global_batch_size}_seed-{train.seed}",
    ),
    "evaluate": Stage(
        "evaluation",
        EvaluateParams,
        {
            **_of("evaluate", EvaluateRule),
            "model": "model.name",
            "dtype": "model.dtype",
            "template": "model.template",
        },
        "{suite}",
    ),
}
CHAIN = {  # the stages whose slugs make up a leaf, in order
    "prepare": (),
    "embed": (),
    "cluster": ("cluster",),
    "select": ("cluster", "select"),
    "train": ("cluster", "select", "train"),
    "evaluate": ("cluster", "select", "train", "evaluate"),
}
NAMES = re.compile(r"\{([a-z_.]+)\}")
AXES = sorted({n for s in STAGES.values() for n in NAMES.findall(s.slug)} - {"strategy", "suite"})


def get(raw: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = raw
    for part in key.split("."):
        value = value[part]
    return value


def replace(raw: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of the raw parameters with one dotted key set."""
    out = copy.deepcopy(dict(raw))
    *path, last = key.split(".")
    place = out
    for part in path:
        place = place.setdefault(part, {})
    place[last] = value
    return out


def token(value: Any) -> str:
    """Return a YAML scalar as DVC's templates print it, checked to be fit for a path.

    Raises:
        UserError: it holds a character outside [A-Za-z0-9.-].
    """
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if not TOKEN.fullmatch(text):
        raise UserError(f"{text!r} becomes part of a path and must match [A-Za-z0-9.-]+")
    return text
