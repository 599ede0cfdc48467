"""What a reader must know before trusting the table of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from cluster_sft.artifacts import SUMMARY, read_json, read_table
from cluster_sft.report.comparison import pairs
from cluster_sft.report.labels import label, show_count
from cluster_sft.report.overview import Clustering, manifest_of
from cluster_sft.report.points import Point, varying
from cluster_sft.report.results import Results

LOW_USAGE = 0.25  # share of the data that balanced selection can use at r = 1
TOKEN_GAP = 0.20  # share by which tokens may differ under equal rows
FEW_ITEMS = 50


def warnings(results: Results, clusterings: Sequence[Clustering]) -> list[str]:
    """Return what a reader must know before trusting the table, one sentence or two each."""
    return [
        *_usage_warnings(clusterings),
        *_displaced_warnings(clusterings),
        *_remainder_warnings(results.points),
        *_token_warnings(results),
        *_misled_warnings(results),
        *_target_warnings(results),
        *_item_warnings(results),
    ]


def _usage_warnings(clusterings: Sequence[Clustering]) -> list[str]:
    return [
        f"{c.title}: at r = 1 balanced selection can use only {c.usage_at_r1:.1%} of the data, "
        f"because the smallest cluster holds {show_count(min(c.sizes))} rows. Fewer clusters or a "
        "smaller alpha raise it."
        for c in clusterings
        if c.usage_at_r1 < LOW_USAGE
    ]


def _displaced_warnings(clusterings: Sequence[Clustering]) -> list[str]:
    """Warn once, however many clusterings have rows outside their nearest cluster."""
    displaced = [c for c in clusterings if c.displaced]
    if not displaced:
        return []
    shares = sorted(c.displaced / c.rows for c in displaced)
    span = f"{shares[0]:.1%}"
    if len(displaced) > 1:
        span = f"{span} to {shares[-1]:.1%} in {len(displaced)} clusterings"
    counts = f"{show_count(displaced[0].displaced)} of {show_count(displaced[0].rows)} rows"
    rows = f"{counts} ({span})" if len(displaced) == 1 else f"rows ({span})"
    taken = [c.displaced_share for c in displaced if c.displaced_share is not None]
    share = f"; of the rows that `cluster` selected they make up {max(taken):.1%}" if taken else ""
    return [
        f"The capacity kept {rows} out of their nearest cluster. They lie far from their own "
        f"centroid, so peripheral ranking favours them{share}."
    ]


def _remainder_warnings(points: Sequence[Point]) -> list[str]:
    """Warn where a stratified batch cannot hold equally many rows of every cluster."""
    cases: dict[tuple[int, int], None] = {}
    for point in points:
        params = manifest_of(point.train).get("params", {})
        if point.cluster is None or params.get("batches") != "stratified":
            continue
        k, batch = read_json(point.cluster / SUMMARY)["k"], int(params["global_batch_size"])
        if batch % k:
            cases[k, batch] = None
    return [
        f"K = {k} does not divide the global batch of {batch} rows: a single step favours some "
        "clusters, which averages out over the steps."
        for k, batch in cases
    ]


def _token_warnings(results: Results) -> list[str]:
    """Warn where equal rows hide unequal tokens."""
    names = varying(results.groups)
    found: dict[str, None] = {}
    for group, control in pairs(results, "cluster", "random"):
        mine, theirs = (g.costs["train_tokens"] for g in (group, control))
        gap = mine / theirs - 1 if mine and theirs else 0.0
        if abs(gap) > TOKEN_GAP:
            line = (
                f"{label(group, names)} trained on {abs(gap):.0%} {'more' if gap > 0 else 'fewer'} "
                "tokens than random with the same number of rows: equal rows are not equal compute."
            )
            found[line] = None
    return list(found)


def _misled_warnings(results: Results) -> list[str]:
    """Tell of subsets that IFD had to fill with rows above 1."""
    names = [name for name in varying(results.groups) if not name.startswith("train.")]
    found: dict[Path, str] = {}
    for group in results.groups:
        leaf = results.points[group.points[0]].select
        summary = read_json(leaf / SUMMARY) if leaf is not None else {}
        if leaf is not None and summary.get("above_one"):
            found[leaf] = (
                f"{label(group, names)}: {show_count(summary['above_one'])} of "
                f"{show_count(summary['rows'])} rows have a score above 1, that is, their response "
                "is likelier without the instruction; too few rows have a score up to 1."
            )
    return list(found.values())


def _target_warnings(results: Results) -> list[str]:
    """Warn where LESS chose rows for what the held-out loss is taken on, or for rows it can take.

    Rows are known by their content, wherever they stand.
    """
    leaves = {p.scores["less"]: p.prepare for p in results.points if "less" in p.scores}
    known = [
        (
            set(read_table(less / "targets", "gradients.parquet", ["id"])["id"]),
            set(read_table(prepare, "heldout.parquet", ["id"])["id"]),
            set(read_table(prepare, "dataset.parquet", ["id"])["id"]),
        )
        for less, prepare in leaves.items()
        if prepare
    ]
    found = []
    remedy = "Name other examples in score.less.targets."
    held = sum(len(targets & heldout) for targets, heldout, _ in known)
    if held and (results.scores["kind"] == "heldout").any():
        total = sum(len(heldout) for _, heldout, _ in known)
        found.append(
            f"less was shown {show_count(held)} of {show_count(total)} held-out rows as its "
            "targets, no other method was: its held-out NLL is not a fair comparison. " + remedy
        )
    if own := sum(len(targets & rows) for targets, _, rows in known):
        total = sum(len(targets) for targets, _, _ in known)
        found.append(
            f"{show_count(own)} of {show_count(total)} target examples of less are rows of the "
            "data to select from as well, which score high for being their own targets. " + remedy
        )
    return found


def _item_warnings(results: Results) -> list[str]:
    """Warn where a suite has so few items that one of them moves the score by over two points."""
    few = results.scores.filter((pl.col("kind") != "heldout") & (pl.col("n") < FEW_ITEMS))
    pairs = few.select("suite", "n").unique(maintain_order=True)
    return [
        f"{suite} has {n} items: one item moves its score by {100 / n:.1f} points."
        for suite, n in pairs.iter_rows()
    ]
