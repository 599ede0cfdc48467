"""The parameters that each stage receives: what can change its result, and nothing else.

A section of params.yaml with `auto` resolved, plus what the stage needs of other sections.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from cluster_sft.params import (
    ClusterRule,
    Data,
    Describe,
    Dimensions,
    Dtype,
    EvaluateRule,
    Ifd,
    S2lTraining,
    Section,
    Seed,
    SelectRule,
    Token,
    Train,
    Validate,
    Warmup,
)


class Loaded(Section):
    """The model as a stage runs it."""

    model: str
    dtype: Dtype = "bf16"


class Rendering(Section):
    """How text becomes tokens."""

    template: str = "auto"
    max_length: PositiveInt | None = None


class Projected(Loaded):
    """Gradients of a model, projected: two leaves compare where all of this is equal."""

    projection_dim: Dimensions = 8192
    seed: Seed = 0


class PrepareParams(Data, Rendering):
    """What prepare reads beside the source's bytes."""

    model: str


class EmbedParams(Loaded):
    """What embed reads beside the data."""


class ClusterParams(ClusterRule):
    """What cluster reads beside the embeddings; K resolved."""

    k: PositiveInt


class IfdParams(Ifd, Loaded):
    """What IFD reads beside the data."""


class LessWarmupParams(Warmup, Loaded):
    """What the warm-up of LESS reads beside the data."""


class LessParams(Projected, Rendering):
    """What LESS's scores read beside the gradients: the target examples, projected alike."""

    targets: str = "data/heldout.yaml"


class LessGradientsParams(Projected):
    """What the gradients of LESS's training rows read beside the data and the warm-up."""

    gradient: Literal["adam", "sgd", "sign"] = "adam"


class S2lProxyParams(S2lTraining, Loaded, Rendering):
    """What S2L's proxy reads beside the data; the proxy's name resolved."""

    s2l_model: str


class S2lTrajectoriesParams(Section):
    """What the trajectories read beside the data and the trained proxy."""

    s2l_model: str
    dtype: Dtype = "bf16"


class S2lParams(Section):
    """What S2L's groups read beside the trajectories."""

    clusters: PositiveInt = 100
    seed: Seed = 0


class ValidateParams(Validate, Loaded):
    """What validate reads beside embeddings and clusters."""


class DiagnoseParams(Describe):
    """What diagnose reads beside embeddings, clusters and subset."""


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
