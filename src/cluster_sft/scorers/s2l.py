"""Step s2l of score: group the rows of each source whose loss falls alike (Yang et al., 2024).

K-means of the loss trajectories, source by source; a row's source is the field `source` of its raw
record, and rows without one are a source of their own. Strategy `s2l` shares its budget out over
sources and groups; the score is minus the distance to the group's centre.

Legend: N rows, T snapshots.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from cluster_sft import costs
from cluster_sft.artifacts import read_array, read_table
from cluster_sft.errors import UserError
from cluster_sft.score_files import write_scored

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import S2lParams

ROWS_PER_GROUP = 39  # that K-means needs at least, as faiss has it
READ_ROWS = 16384


def run(
    params: S2lParams,
    *,
    dataset: Path,
    trajectories: Path,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Group every row with a finite trajectory.

    Args:
        params: most groups of a source, and the seed.
        dataset: leaf of stage prepare.
        trajectories: leaf of step s2l-trajectories.
        out: empty folder for the payload.
        scratch: unused.
        launch: unused; one thread, so that sums are added in one order.

    Raises:
        UserError: trajectories and ids do not fit each other.
    """
    meter = costs.start()
    loss_NT = read_array(trajectories / "trajectories.npy", ndim=2, dtype=np.float32)
    ids = read_table(trajectories, "trajectories.parquet")
    if len(ids) != len(loss_NT):
        raise UserError(
            f"{trajectories}: trajectories.npy has {len(loss_NT)} rows, trajectories.parquet "
            f"{len(ids)}; delete the leaf and run it again"
        )
    names, source_N = _numbered(
        ids.join(read_sources(dataset), on="id", how="left", maintain_order="left")
    )
    group_N = np.full(len(ids), -1, np.int32)
    score_N = np.full(len(ids), np.nan)
    usable = np.flatnonzero(np.isfinite(loss_NT).all(axis=1))
    for rows in _by_source(usable, source_N):
        words = np.random.SeedSequence([params.seed, int(source_N[rows[0]])])
        seed = int(words.generate_state(1)[0])
        group_N[rows], distance = groups(loss_NT[rows], most=params.clusters, seed=seed)
        score_N[rows] = -distance
    empty = pl.Series("empty", np.asarray(np.isnan(loss_NT).all(axis=1)), pl.Boolean)
    frame = ids.with_columns(
        score=pl.Series(score_N),
        reason=pl.when(empty).then(pl.lit("no_response_tokens")),
        source=pl.Series(source_N),
        group=pl.Series(group_N).replace(-1, None),
    )
    write_scored(out, frame, meter=meter, facts={"sources": _facts(names, frame)})


def groups(loss_NT: np.ndarray, *, most: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the K-means group of each trajectory and the distance to its centre.

    Groups are numbered by size, largest first, ties by the lowest row. Fewer than `most` where rows
    are few: one for 39 rows.

    Args:
        loss_NT: (N, T), finite, N at least 1.
        most: number of groups.
        seed: of the first centres.

    Returns:
        int32 (N,) and float64 (N,).
    """
    count = min(most, max(1, len(loss_NT) // ROWS_PER_GROUP))
    rows = np.ascontiguousarray(loss_NT, np.float64)
    # Threads would add in whatever order they come.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different rows than groups
        # One start: with k-means++ that is what auto means.
        means = KMeans(count, n_init="auto", random_state=seed).fit(rows)
    found_N = np.asarray(means.labels_)
    distance_N = np.linalg.norm(rows - means.cluster_centers_[found_N], axis=1)
    _, first, compact_N, sizes = np.unique(
        found_N, return_index=True, return_inverse=True, return_counts=True
    )
    number = np.empty(len(sizes), np.int32)
    number[np.lexsort((first, -sizes))] = np.arange(len(sizes))
    return number[compact_N], distance_N


def read_sources(dataset: Path) -> pl.DataFrame:
    """Return id and `source` of the raw record of every row, null where it has none; in blocks."""
    read_table(dataset, "dataset.parquet", ["id"])  # checks the file
    file = pq.ParquetFile(dataset / "dataset.parquet")
    parts = [pl.DataFrame(schema={"id": pl.String, "source": pl.String})]
    for block in file.iter_batches(READ_ROWS, columns=["id", "record"]):
        frame = pl.DataFrame(pl.from_arrow(block))
        source = pl.col("record").str.json_path_match("$.source")
        parts.append(frame.select("id", source=source))
    return pl.concat(parts)


def _numbered(frame: pl.DataFrame) -> tuple[pl.Series, np.ndarray]:
    """Return the names of the sources in order, "" for none, and each row's number among them."""
    source = frame["source"].fill_null("")
    names = source.unique().sort()
    numbers = source.replace_strict(names, range(len(names)), return_dtype=pl.Int32)
    return names, numbers.to_numpy()


def _by_source(rows: np.ndarray, source_N: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each source that has some, ascending."""
    order = rows[np.argsort(source_N[rows], kind="stable")]
    parts = np.split(order, np.flatnonzero(np.diff(source_N[order])) + 1)
    return [part for part in parts if len(part)]


def _facts(names: pl.Series, frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Return name, rows and groups of every source."""
    counts = frame.group_by("source").agg(
        rows=pl.len(), groups=pl.col("group").drop_nulls().n_unique()
    )
    return counts.sort("source").with_columns(source=names).to_dicts()
