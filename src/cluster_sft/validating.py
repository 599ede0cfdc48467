"""Stage validate: do rows of one cluster push the model alike, by their true gradients.

Of the clustering alone, so that every subset of it shares one leaf. Reads dataset, embeddings and
clusters, joined by id. Writes metrics.json, summary.json (cost), permutations.npy and a figure.

Legend: n rows with true gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cluster_sft import costs, models
from cluster_sft.artifacts import SUMMARY, write_json
from cluster_sft.diagnostics import figures, gradients, validity
from cluster_sft.diagnostics.inputs import Clustered, read_clustered, read_tokens
from cluster_sft.diagnostics.numbers import finite
from cluster_sft.errors import UserError

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import ValidateParams

METRICS = "metrics.json"


def run(
    params: ValidateParams,
    *,
    dataset: Path,
    embeddings: Path,
    clusters: Path,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Test the clusters on true per-sample gradients.

    Args:
        params: sample, permutations, gradients, seed, model, dtype.
        dataset: leaf of prepare.
        embeddings: leaf of embed.
        clusters: leaf of cluster.
        out: empty folder for the payload.
        scratch: not used.
        launch: threads, and tokens of a forward pass.

    Raises:
        UserError: leaves that do not fit each other, no such model, or an unknown setting.
    """
    meter = costs.start()
    inputs = read_clustered(dataset, embeddings=embeddings, clusters=clusters)
    metrics, cost = _measure(inputs, params, out=out, launch=launch)
    write_json(out / METRICS, finite(metrics))
    write_json(out / SUMMARY, {"rows": metrics["rows"], "cost": meter.stop(out, **cost)})


def _measure(
    inputs: Clustered, params: ValidateParams, *, out: Path, launch: Launch
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the test on true gradients and what it costs; draw it."""
    rows = validity.sample_rows(inputs.label_N, inputs.k, size=params.sample, seed=params.seed)
    gram, tokens = _true_gradients(inputs, rows, params, launch)
    true = validity.cosines(gram.products)
    known = np.diag(gram.products) > 0
    true, label = true[np.ix_(known, known)], inputs.label_N[rows][known]
    x = inputs.x[rows[known]].astype(np.float64)
    proxy = validity.cosines(x @ x.T)
    test, own = (
        validity.permutation_test(c, label, permutations=params.permutations, seed=params.seed)
        for c in (true, np.nan_to_num(proxy))
    )
    cost = {"forward_passes": len(rows), "backward_passes": gram.backward, "tokens": tokens}
    within = validity.mean_cosines(true, label, inputs.k)
    if test is not None:
        np.save(out / "permutations.npy", test.permuted)
        figures.write(out, "validity", figures.draw_validity(test, within))
    return {
        "gradients": params.gradients,
        "exact": gram.exact,
        "rows": len(label),
        "rows_without_gradient": len(rows) - len(label),
        "permutations": params.permutations,
        "statistic": test and test.statistic,
        "intra": test and test.intra,
        "inter": test and test.inter,
        "p_value": test and test.p_value,
        "proxy_statistic": own and own.statistic,
        "proxy_correlation": validity.agreement(true, np.nan_to_num(proxy)),
        "mean_cosines": within,
    }, cost


def _true_gradients(
    inputs: Clustered, rows: np.ndarray, params: ValidateParams, launch: Launch
) -> tuple[gradients.Gram, int]:
    """Return the rows' Gram matrix and their tokens."""
    if params.gradients not in ("head", "all"):
        raise UserError(f"diagnose.gradients must be head or all, got {params.gradients!r}")
    store = read_tokens(inputs, rows)
    device = models.pick_device("auto")
    threads = torch.get_num_threads()
    torch.set_num_threads(launch.threads or threads)
    try:
        model = models.load_model(params.model, dtype=params.dtype, device=device)
        head = params.gradients == "head"
        gram = gradients.gram(model, store, head=head, batch_tokens=launch.batch_tokens)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"diagnose: {device} is out of memory; lower diagnose.sample, which is "
            f"{params.sample}, or launch.batch_tokens"
        ) from error
    finally:
        torch.set_num_threads(threads)
    return gram, int(store.lengths.sum())
