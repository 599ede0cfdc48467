"""Step less-warmup of score: a short LoRA training whose checkpoints LESS takes gradients at.

Adapter weights and Adam's moments are kept after every epoch (Xia et al., 2024). Writes a folder
`step-XXXXXXXX` an epoch, the log of the training, and summary.json.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster_sft import training
from cluster_sft.artifacts import SUMMARY, read_table, write_json
from cluster_sft.checkpoints import snapshot_name
from cluster_sft.errors import UserError
from cluster_sft.scorers._steps import check_steps
from cluster_sft.training_loop import TRAIN_LOG, read_log
from cluster_sft.training_rows import plain_settings, write_subset

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import LessWarmupParams

SALT = 0x1E55  # of the draw of rows, apart from that of their order


def run(
    params: LessWarmupParams, *, dataset: Path, out: Path, scratch: Path, launch: Launch
) -> None:
    """Train an adapter on a random share of the rows.

    Raises:
        UserError: no rows, a learning rate of 0 throughout, or as `training.fit`.
    """
    ids = read_table(dataset, "dataset.parquet", ["id"])["id"].to_list()
    chosen = draw_rows(len(ids), share=params.warmup_share, seed=params.seed)
    if not len(chosen):
        raise UserError(f"{dataset}: dataset.parquet has no rows; there is nothing to warm up on")
    subset = scratch / "subset"
    write_subset(subset, [ids[i] for i in chosen])
    steps = -(-len(chosen) // params.batch_size)
    check_steps(
        steps * params.warmup_epochs,
        warmup_ratio=params.warmup_ratio,
        rows=len(chosen),
        label="less-warmup",
        remedy="lower score.less.batch_size, or raise score.less.warmup_share or warmup_epochs",
    )
    settings = plain_settings(
        model=params.model,
        epochs=params.warmup_epochs,
        learning_rate=params.learning_rate,
        batch_size=params.batch_size,
        warmup_ratio=params.warmup_ratio,
        precision=params.dtype,
        seed=params.seed,
    )
    ends = [steps * (epoch + 1) for epoch in range(params.warmup_epochs)]
    facts = training.fit(
        {**settings, **{k: getattr(params, k) for k in settings if k.startswith("lora_")}},
        dataset=dataset,
        subset=subset,
        out=out,
        scratch=scratch,
        launch=launch,
        snapshots=ends,
        keep_moments=True,
        label="less-warmup",
    )
    summary = {
        **facts,
        "checkpoints": _checkpoints(read_log(out / TRAIN_LOG), ends),
        "lora": {
            "rank": params.lora_rank,
            "alpha": params.lora_alpha,
            "dropout": params.lora_dropout,
            "targets": params.lora_targets,
            "seed": params.seed,
        },
    }
    write_json(out / SUMMARY, summary)


def draw_rows(n: int, *, share: float, seed: int) -> np.ndarray:
    """Return max(1, floor(share * n)) of n positions, ascending; `share` is read as a decimal."""
    count = min(n, max(1, int(Fraction(str(share)) * n)))
    return np.sort(np.random.default_rng([seed, SALT]).permutation(n)[:count])


def _checkpoints(log: list[dict[str, Any]], ends: list[int]) -> list[dict[str, Any]]:
    """Return folder, step and mean learning rate of every epoch."""
    found = []
    for start, end in zip([0, *ends], ends, strict=False):
        rates = [entry["lr"] for entry in log[start:end]]
        found.append(
            {"folder": snapshot_name(end), "step": end, "learning_rate": sum(rates) / len(rates)}
        )
    return found
