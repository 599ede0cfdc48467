"""params.yaml as typed, frozen sections: what a user edits.

`launch:` can change no number and enters no cache key.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

TOKEN = re.compile(r"[A-Za-z0-9.-]+")
LONGEST = 100  # characters; file systems take 255, and the path part of a strategy has more in it


def _token(value: str) -> str:
    if len(value) > LONGEST:
        raise ValueError(f"must have at most {LONGEST} characters, since it becomes part of a path")
    if not TOKEN.fullmatch(value) or value.startswith("."):  # "." and ".." are other folders
        raise ValueError(
            "must match [A-Za-z0-9.-]+ and not start with a dot, since it becomes part of a path"
        )
    return value


def _distinct(value: list[str]) -> list[str]:
    if len(set(value)) < len(value):
        raise ValueError("must name nothing twice")
    return value


Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what all libraries take
Token = Annotated[str, AfterValidator(_token)]
Distinct = Annotated[list[Token], AfterValidator(_distinct)]
Dtype = Literal["fp32", "bf16"]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
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
    seed: Seed = 0


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
    seed: Seed = 0


class Cluster(ClusterRule):
    """The `cluster` section; `k: auto` is `train.workers`."""

    k: Literal["auto"] | PositiveInt = "auto"


class Ifd(Section):
    """Instruction-following difficulty: which ratio of the two losses."""

    formula: Literal["loss_ratio", "perplexity_ratio"] = "loss_ratio"


LoraTargets = Annotated[list[str], Field(min_length=1), AfterValidator(_distinct)]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Warmup(Section):
    """The LoRA warm-up of LESS."""

    warmup_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.05
    warmup_epochs: PositiveInt = 4
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-5
    batch_size: PositiveInt = 32
    warmup_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.03
    lora_rank: PositiveInt = 128
    lora_alpha: PositiveInt = 512
    lora_dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.1
    lora_targets: LoraTargets = ATTENTION
    seed: Seed = 0


# A row's features take 2 bytes a dimension and checkpoint: more than 2^20 is a slip of the hand.
Dimensions = Annotated[int, Field(ge=1, le=2**20)]


class Less(Warmup):
    """LESS: warm-up, projected gradients, target examples."""

    gradient: Literal["adam", "sgd", "sign"] = "adam"
    projection_dim: Dimensions = 8192
    targets: str = "data/heldout.yaml"


class S2lTraining(Section):
    """The proxy model of S2L and its training."""

    epochs: PositiveInt = 3
    checkpoints: PositiveInt = 12
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-5
    batch_size: PositiveInt = 128
    warmup_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.03
    seed: Seed = 0


class S2l(S2lTraining):
    """S2L: `model: auto` is the model to tune."""

    model: str = "auto"
    clusters: PositiveInt = 100


class Score(Section):
    """The `score` section: one part a method; only strategies that are run read theirs."""

    ifd: Ifd = Ifd()
    less: Less = Less()
    s2l: S2l = S2l()


class SelectRule(Section):
    """What to keep of the clusters, for whichever strategy."""

    ranking: Ranking = "peripheral"
    downsample: Literal["random", "strategy"] = "random"
    ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.5
    trim: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    seed: Seed = 0


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
    lora_rank: PositiveInt | None = None
    lora_alpha: PositiveInt = 16
    lora_dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    lora_targets: LoraTargets = ATTENTION
    cosine_every: NonNegativeInt = 0
    seed: Seed = 0

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


class Validate(Section):
    """The test of the clusters on true gradients."""

    sample: Annotated[int, Field(ge=2)] = 400
    permutations: PositiveInt = 9999
    gradients: Literal["head", "all"] = "head"
    seed: Seed = 0


class Describe(Section):
    """What to show of each subset."""

    map: Literal["pca", "tsne"] = "pca"
    examples: NonNegativeInt = 3
    terms: NonNegativeInt = 10
    seed: Seed = 0


class Diagnose(Validate, Describe):
    """The `diagnose` section: the test of the clusters, and what to show of each subset."""


class Launch(Section):
    """Execution: none of it can change a number, so none of it enters a cache key."""

    processes: PositiveInt = 1
    nodes: PositiveInt = 1
    threads: PositiveInt | None = None
    parallelism: Literal["ddp", "fsdp"] = "ddp"
    batch_tokens: PositiveInt = 8192
    micro_batch: PositiveInt = 8
    gradient_checkpointing: bool = False
    checkpoint_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    offline: bool = False
    trackers: Annotated[list[Tracker], AfterValidator(_distinct)] = ["tensorboard"]


class Params(Section):
    """params.yaml, whole."""

    name: Token
    data: Data
    model: Model
    cluster: Cluster = Cluster()
    score: Score = Score()
    select: Select = Select()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    diagnose: Diagnose = Diagnose()
    launch: Launch = Launch()
    study: Token | None = None
    configurations: list[str] | list[dict[str, Any]] = []  # names of files, or what they hold
    sweep: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
