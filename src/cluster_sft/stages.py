"""The stages: what each reads of params.yaml, and how a leaf's path spells its axes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from cluster_sft.errors import UserError
from cluster_sft.params import (
    TOKEN,
    Cluster,
    Data,
    EvaluateRule,
    Ifd,
    S2lTraining,
    Section,
    SelectRule,
    Train,
    Validate,
    Warmup,
)
from cluster_sft.stage_params import (
    ClusterParams,
    DiagnoseParams,
    EmbedParams,
    EvaluateParams,
    IfdParams,
    LessGradientsParams,
    LessParams,
    LessWarmupParams,
    PrepareParams,
    S2lParams,
    S2lProxyParams,
    S2lTrajectoriesParams,
    SelectParams,
    TrainParams,
    ValidateParams,
)

ROOT = "results"
BASE = "base"  # the point without training


def _part(section: str, names: Iterable[str]) -> dict[str, str]:
    return {name: f"{section}.{name}" for name in names}


def _of(section: str, model: type[BaseModel]) -> dict[str, str]:
    return _part(section, model.model_fields)


@dataclass(frozen=True)
class Stage:
    """A stage: its module, its parameters, what it reads, and the leaf's slug.

    Attributes:
        module: the module below `cluster_sft` that has `run`.
        params: the typed parameters that `run` receives.
        keys: parameter -> dotted key of params.yaml.
        reads: role -> the stage whose leaf `run` receives under that name.
        files: parameters that name a file, which counts by its bytes and not by its path.
        slug: the path parts that this stage adds to those of the stage it builds on.
        about: what it does, for the command line's help.
        gpus: what it computes on where there are GPUs.
    """

    module: str
    params: type[Section]
    keys: dict[str, str]
    reads: dict[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    slug: str = ""
    about: str = ""
    gpus: Literal["none", "one", "one a process"] = "none"


MODEL = {"model": "model.name", "dtype": "model.dtype"}
RENDERING = {"template": "model.template", "max_length": "model.max_length"}
STAGES: dict[str, Stage] = {
    "prepare": Stage(
        "preparation",
        PrepareParams,
        {**_of("data", Data), "model": "model.name", **RENDERING},
        files=("source",),
        about="render, tokenise and label raw data",
    ),
    "embed": Stage(
        "embedding",
        EmbedParams,
        MODEL,
        {"dataset": "prepare"},
        about="one forward pass: a gradient-proxy embedding of every sample",
        gpus="one a process",
    ),
    "cluster": Stage(
        "clustering",
        ClusterParams,
        _of("cluster", Cluster),
        {"embeddings": "embed"},
        slug="k-{cluster.k}_w-{train.workers}_alpha-{cluster.alpha}_seed-{cluster.seed}",
        about="capacity-constrained K-means on the embeddings",
    ),
    "select": Stage(
        "selection",
        SelectParams,
        {**_of("select", SelectRule), "strategy": "strategy"},
        {"dataset": "prepare", "clusters": "cluster", "scores": "score"},
        slug="{strategy}-{select.ranking}_r-{select.ratio}_seed-{select.seed}",
        about="choose rows of the clusters under one budget",
    ),
    "train": Stage(
        "training",
        TrainParams,
        {**_of("train", Train), "strategy": "strategy", "model": "model.name"},
        {"dataset": "prepare", "subset": "select"},
        slug="weights-{train.weights}_batches-{train.batches}_lr-{train.learning_rate}"
        "_epochs-{train.epochs}_batch-{train.global_batch_size}_seed-{train.seed}",
        about="weighted data-parallel fine-tuning on a subset",
        gpus="one a process",
    ),
    "evaluate": Stage(
        "evaluation",
        EvaluateParams,
        {**_of("evaluate", EvaluateRule), **MODEL, "template": "model.template"},
        {"dataset": "prepare", "model": "train"},
        slug="{suite}",
        about="score a model on a suite",
        gpus="one",
    ),
    "validate": Stage(
        "validating",
        ValidateParams,
        {**_of("diagnose", Validate), **MODEL},
        {"dataset": "prepare", "embeddings": "embed", "clusters": "cluster"},
        about="test the clusters on true per-sample gradients",
        gpus="one",
    ),
    "diagnose": Stage(
        "diagnosing",
        DiagnoseParams,
        _of("diagnose", DiagnoseParams),
        {
            "dataset": "prepare",
            "embeddings": "embed",
            "clusters": "cluster",
            "subset": "select",
            "validity": "validate",
        },
        about="measure what clusters and subset do to the gradients",
    ),
}
SAMPLES = {"embeddings": "embed"}
STEPS: dict[str, Stage] = {  # what the methods do in the stages of SCORING
    "ifd": Stage(
        "scorers.ifd",
        IfdParams,
        {**_of("score.ifd", Ifd), **MODEL},
        {"dataset": "prepare"},
        about="IFD: loss of the response with and without the instruction",
        gpus="one a process",
    ),
    "less-warmup": Stage(
        "scorers.less_warmup",
        LessWarmupParams,
        {**_of("score.less", Warmup), **MODEL},
        {"dataset": "prepare"},
        about="LESS: LoRA warm-up on a random share of the rows",
        gpus="one a process",
    ),
    "less-gradients": Stage(
        "scorers.less_gradients",
        LessGradientsParams,
        {**_part("score.less", ("gradient", "projection_dim", "seed")), **MODEL},
        {"dataset": "prepare", "warmup": "scorer"},
        about="LESS: projected gradients of the training rows",
        gpus="one a process",
    ),
    "less": Stage(
        "scorers.less",
        LessParams,
        {**_part("score.less", ("targets", "projection_dim", "seed")), **MODEL, **RENDERING},
        {"dataset": "prepare", "warmup": "scorer", "gradients": "features"},
        files=("targets",),
        about="LESS: influence of every row on the target examples",
        gpus="one a process",
    ),
    "s2l-proxy": Stage(
        "scorers.s2l_proxy",
        S2lProxyParams,
        {**_of("score.s2l", S2lTraining), "s2l_model": "score.s2l.model", **MODEL, **RENDERING},
        {"dataset": "prepare"},
        about="S2L: train a small proxy model, keeping checkpoints",
        gpus="one a process",
    ),
    "s2l-trajectories": Stage(
        "scorers.s2l_trajectories",
        S2lTrajectoriesParams,
        {"s2l_model": "score.s2l.model", "dtype": "model.dtype"},
        {"dataset": "prepare", "proxy": "scorer"},
        about="S2L: loss of every row at every checkpoint",
        gpus="one a process",
    ),
    "s2l": Stage(
        "scorers.s2l",
        S2lParams,
        _part("score.s2l", ("clusters", "seed")),
        {"dataset": "prepare", "trajectories": "features"},
        about="S2L: groups of rows with like trajectories",
    ),
    "k-center": Stage(
        "scorers.k_center", Section, {}, SAMPLES, about="order of greedy k-center on the embeddings"
    ),
    "loss-top": Stage(
        "scorers.loss_top", Section, {}, SAMPLES, about="loss of every row under the model"
    ),
    "length-matched-random": Stage(
        "scorers.length_matched_random", Section, {}, SAMPLES, about="response tokens of every row"
    ),
}
NO_STEP = Stage("scorers.none", Section, {}, about="nothing, for a strategy without this stage")
# The stages that scoring may take, one leaf a strategy, with all that any method reads there.
SCORING: dict[str, dict[str, str]] = {
    "scorer": {"dataset": "prepare"},
    "features": {"dataset": "prepare", "scorer": "scorer"},
    "score": {
        "dataset": "prepare",
        "embeddings": "embed",
        "scorer": "scorer",
        "features": "features",
    },
}
METHODS: dict[str, dict[str, str]] = {  # strategy -> stage of SCORING -> step; none is empty there
    "less": {"scorer": "less-warmup", "features": "less-gradients", "score": "less"},
    "s2l": {"scorer": "s2l-proxy", "features": "s2l-trajectories", "score": "s2l"},
    **{name: {"score": name} for name in ("ifd", "k-center", "loss-top", "length-matched-random")},
}
STAGE_OF = {step: stage for method in METHODS.values() for stage, step in method.items()}
CHAIN = {  # the stages whose slugs make up a leaf, in order
    "prepare": (),
    "embed": (),
    "cluster": ("cluster",),
    "select": ("cluster", "select"),
    "train": ("cluster", "select", "train"),
    "evaluate": ("cluster", "select", "train", "evaluate"),
    "validate": ("cluster",),
    "diagnose": ("cluster", "select"),
}
PER_STRATEGY = (*SCORING, "select", "train", "evaluate", "diagnose")  # one leaf a strategy


def step_of(stage: str, strategy: str) -> str:
    """Return the step that a strategy takes in a stage of SCORING; "" for none."""
    return METHODS.get(strategy, {}).get(stage, "")


def spec_of(stage: str, strategy: str = "") -> Stage:
    """Return the table's entry of a stage; in SCORING, of the step that the strategy takes."""
    if stage not in SCORING:
        return STAGES[stage]
    return STEPS.get(step_of(stage, strategy), NO_STEP)


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
