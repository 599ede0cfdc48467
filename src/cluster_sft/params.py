"""params.yaml as typed, frozen sections, and the parameters that each stage receives.

A section holds what a user edits. A stage's parameters (`ClusterParams`, ...) are the values that
can change its result: the section with `auto` resolved, plus what it needs of other sections.
`launch:` can change no number and enters no cache key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from cluster_sft.errors import UserError

TOKEN = re.compile(r"[A-Za-z0-9.-]+")


def _token(value: str) -> str:
    if not TOKEN.fullmatch(value) or value.startswith("."):  # "." and ".." are other folders
        raise ValueError(
            "must match [A-Za-z0-9.-]+ and not start with a dot, since it becomes part of a path"
        )
    return value


def _distinct(value: list[str]) -> list[str]:
    if len(set(value)) < len(value):
        raise ValueError("must name nothing twice")
    return value


Token = Annotated[str, AfterValidator(_token)]
Distinct = Annotated[list[Token], AfterValidator(_distinct)]
Dtype = Literal["fp32", "bf16"]
Ranking = Literal["peripheral", "core", "random"]


class Section(BaseModel):
    """Frozen, strictly typed, and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Data(Section):
    """Which rows: the source, how to read it, the held-out split."""

    source: str
    format: str = "auto"
    fields: dict[str, str] = {}
    holdout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    max_samples: PositiveInt | None = None
    seed: NonNegativeInt = 0


class Model(Section):
    """The model to tune: a directory, a Hub id, or `pypi:PACKAGE`."""

    name: str
    dtype: Dtype = "bf16"
    template: str = "auto"
    max_length: PositiveInt | None = None


class ClusterRule(Section):
    """Capacity-constrained K-means, whatever K."""

    alpha: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.5
    n_init: PositiveInt = 4
    max_iter: PositiveInt = 100
    tol: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 1e-4
    seed: NonNegativeInt = 0


class Cluster(ClusterRule):
    """The `cluster` section; `k: auto` is `train.workers`."""

    k: Literal["auto"] | PositiveInt = "auto"


class SelectRule(Section):
    """What to keep of the clusters, for whichever strategy."""

    ranking: Ranking = "peripheral"
    downsample: Literal["random", "strategy"] = "random"
    ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.5
    trim: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    seed: NonNegativeInt = 0


class Select(SelectRule):
    """The `select` section: a rule and the strategies that run under its budget."""

    strategies: Annotated[Distinct, Field(min_length=1)] = ["cluster", "random"]


class Train(Section):
    """Weighted data-parallel fine-tuning."""

    workers: PositiveInt = 4
    weights: Literal["auto", "cluster", "none"] = "auto"
    batches: Literal["auto", "stratified", "random"] = "auto"
    global_batch_size: PositiveInt = 64
    epochs: PositiveInt = 2
    drop_last: bool = False
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5e-5
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    scheduler: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: NonNegativeInt | None = None
    warmup_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    loss_reduction: Literal["sequence", "token"] = "sequence"
    precision: Dtype = "bf16"
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _consistent(self) -> Train:
        if self.global_batch_size % self.workers:
            raise ValueError(
                f"global_batch_size must be a multiple of workers ({self.workers}), "
                f"got {self.global_batch_size}"
            )
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio exclude each other: set one to null")
        return self


class EvaluateRule(Section):
    """How far a suite goes, whichever it is."""

    limit: PositiveInt | None = None
    max_new_tokens: PositiveInt = 512
    allow_code_execution: bool = False


class Evaluate(EvaluateRule):
    """The `evaluate` section: each suite is a folder of data/suites/."""

    suites: Annotated[Distinct, Field(min_length=1)] = ["heldout"]


class Launch(Section):
    """Execution: none of it can change a number, so none of it enters a cache key."""

    processes: PositiveInt = 1
    threads: PositiveInt | None = None
    parallelism: Literal["ddp"] = "ddp"
    batch_tokens: PositiveInt = 8192
    micro_batch: PositiveInt = 8
    gradient_checkpointing: bool = False
    checkpoint_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0


class Params(Section):
    """params.yaml, whole."""

    name: Token
    data: Data
    model: Model
    cluster: Cluster = Cluster()
    select: Select = Select()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    launch: Launch = Launch()
    study: Token | None = None
    sweep: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}


class PrepareParams(Data):
    """What prepare reads beside the source's bytes."""

    model: str
    template: str = "auto"
    max_length: PositiveInt | None = None


class EmbedParams(Section):
    """What embed reads beside the data."""

    model: str
    dtype: Dtype = "bf16"


class ClusterParams(ClusterRule):
    """What cluster reads beside the embeddings; K resolved."""

    k: PositiveInt


class SelectParams(SelectRule):
    """What select reads beside the clusters."""

    strategy: Token = "cluster"


class TrainParams(Train):
    """What train reads beside the subset; `auto` resolved to the strategy's preset."""

    model: str
    strategy: Token = "cluster"


class EvaluateParams(EvaluateRule):
    """What evaluate reads beside the data and the suite; `model` is null for a trained one."""

    model: str | None = None
    dtype: Dtype = "bf16"
    template: str = "auto"


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML 1.2 mapping, so that `1e-5` is a number here as it is for DVC.

    Raises:
        UserError: no such file, not YAML, a key twice, or no mapping at the top.
    """
    try:
        value = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (YAMLError, UnicodeDecodeError, OSError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = getattr(error, "problem", None) or str(error)
        raise UserError(f"{where}: not valid YAML ({what})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must be a mapping of keys, got {type(value).__name__}")
    return value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` laid on it; sections merge, everything else is replaced."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping) and key != "sweep"
        out[key] = merge(out[key], value) if both else value
    return out


def load(files: Sequence[Path]) -> dict[str, Any]:
    """Read and merge the files, later ones over earlier ones, and check the result.

    Returns the raw mapping, whose scalars print in paths as they stand in the file; `typed` gives
    the typed view.

    Raises:
        UserError: a file or a key is at fault; the message names it.
    """
    raw: dict[str, Any] = {}
    for path in files:
        raw = merge(raw, read_yaml(path))
    where = ", ".join(str(f) for f in files)
    params = typed(raw, where=where)
    for name, section in params:
        if missing := _missing(section, raw.get(name)):
            raise UserError(
                f"{where}: key '{name}.{missing}' is missing; add it "
                f"(default: {getattr(section, missing)!r})"
            )
    return raw


def _missing(section: object, raw: object) -> str | None:
    """Return a key that the file leaves to its default: DVC's templates need each spelled out."""
    if not isinstance(section, Section):
        return None
    given = raw if isinstance(raw, Mapping) else {}
    return next((k for k in type(section).model_fields if k not in given), None)


def typed(raw: Mapping[str, Any], *, where: str = "params.yaml") -> Params:
    """Return the typed parameters.

    Raises:
        UserError: an unknown key (the nearest name is given), a wrong type or a value out of range.
    """
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{where}: {describe(error, Params)}") from error


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """Return one line for the first fault: the key, the rule, the value got, the remedy."""
    faults = error.errors(include_url=False)
    first = faults[0]
    path = _path(first["loc"])
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _fields(model, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        return f"unknown key {key!r}; {hint}"
    if first["type"] == "missing":
        return f"key {key!r} is missing; add it"
    rule = " or ".join(
        dict.fromkeys(
            re.sub(r"^(Value error, |Input )", "", f["msg"])
            for f in faults
            if _path(f["loc"]) == path
        )
    )
    if first["type"] == "value_error" and isinstance(first["input"], dict):
        return f"{key}: {rule}" if key else rule
    return f"{key}: {rule}, got {first['input']!r}"


def _path(location: tuple[int | str, ...]) -> list[str]:
    """Return the key's path without the names of union branches that pydantic puts into it."""
    branch = re.compile(r"(literal|constrained|float|int|none)\b")
    return [str(p) for p in location if not branch.match(str(p))]


def _fields(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        field = model.model_fields.get(part)
        inner = [field.annotation, *get_args(field.annotation)] if field else []
        model = next(
            (t for t in inner if isinstance(t, type) and issubclass(t, BaseModel)), Section
        )
    return list(model.model_fields)
