"""Step s2l-trajectories of score: the loss of every row at every snapshot of the proxy.

Writes trajectories.npy (N, T) float32, mean negative log-likelihood in nats per supervised token,
NaN for a row without any; trajectories.parquet with the rows' ids; and summary.json.

Legend: N rows, T snapshots.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cluster_sft import costs
from cluster_sft.artifacts import (
    SUMMARY,
    create_array,
    read_json,
    read_table,
    write_json,
    write_table,
)
from cluster_sft.row_losses import Pass, row_losses
from cluster_sft.token_batches import pack_tokens

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import S2lTrajectoriesParams


def run(
    params: S2lTrajectoriesParams,
    *,
    dataset: Path,
    proxy: Path,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Compute every row's loss under every snapshot, in the order of the data.

    Args:
        params: the proxy's name and the dtype it runs in.
        dataset: leaf of stage prepare.
        proxy: leaf of step s2l-proxy; its own tokens are used where it has rendered some.
        out: empty folder for the payload.
        scratch: folder of partial results; a later call resumes by snapshot and batch.
        launch: processes, threads of all of them together, and tokens of a batch.

    Raises:
        UserError: no such model, or snapshots of another one.
    """
    meter = costs.start()
    source = proxy if (proxy / "dataset.parquet").is_file() else dataset
    ids = read_table(source, "dataset.parquet", ["id"])
    pack_tokens(source / "dataset.parquet", scratch)
    snapshots = read_json(proxy / SUMMARY)["snapshots"]
    losses = row_losses(
        scratch,
        [Pass(scratch / str(s["step"]), proxy / s["weights"]) for s in snapshots],
        model=params.s2l_model,
        dtype=params.dtype,
        launch=launch,
        scratch=scratch,
        label="s2l-trajectories",
    )
    shape = (len(ids), len(snapshots))
    loss_NT = create_array(out / "trajectories.npy", shape, np.float32)
    for t, nll_N in enumerate(losses.nll):
        loss_NT[:, t] = nll_N
    loss_NT.flush()
    write_table(out, "trajectories.parquet", ids)
    means = [float(n[np.isfinite(n)].mean()) if np.isfinite(n).any() else None for n in losses.nll]
    cost = meter.stop(
        out,
        forward_passes=len(ids) * len(snapshots),
        tokens=losses.tokens,
        peak_memory_bytes=losses.peak_memory_bytes,
        earlier_seconds=losses.earlier_seconds,
    )
    summary = {
        "steps": [s["step"] for s in snapshots],
        "mean_loss": means,
        "rows": len(ids),
        "resumed_tokens": losses.resumed_tokens,
        "cost": cost,
    }
    write_json(out / SUMMARY, summary)
