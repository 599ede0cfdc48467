"""What the project promises of its speed and memory, held against what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.cells import cell, gigabytes, table

MARKS = {True: "met", False: "**missed**"}
Result = dict[str, Any]


def targets(found: dict[str, Result]) -> Iterator[str]:
    """Yield the table of targets: what was wanted, what was measured, whether that is enough."""
    rows = [row for name in found for row in _TARGETS[name](found[name])]
    yield "\n## Targets\n"
    yield table(
        ["target", "wanted", "measured", ""],
        [[what, wanted, got, MARKS[met]] for what, wanted, got, met in rows],
    )


def _embedding_targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    for c in result["comparisons"]:
        name = c["data"]
        speed, faster = c["stage_speed_of_floor"], c["times_faster_than_naive"]
        yield (f"embed, {name}: speed of the floor", "0.93", cell(speed), speed["median"] >= 0.93)
        if "gpteacher" in name or "codegen" in name:
            yield (
                f"embed, {name}: times faster than naive",
                "1.8",
                cell(faster),
                faster["median"] >= 1.8,
            )
        peak = c["resident_bytes"]
        yield (
            f"embed, {name}: peak memory against naive",
            "lower",
            f"{gigabytes(peak['stage'])} to {gigabytes(peak['naive'])}",
            peak["stage"] < peak["naive"],
        )
        padding = c["padding_share_of_data"]
        yield (f"embed, {name}: padding", "below 3 %", f"{padding:.2%}", padding < 0.03)
        both = c["processes"]["speed_of_processes"]
        yield (
            f"embed, {name}: speed of {c['processes']['cores']} processes of one",
            "0.98",
            cell(both),
            both["median"] >= 0.98,
        )


def _clustering_targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    for c in result["iterations"]:
        if not (faster := c["times_faster"].get("k-means-constrained")):
            continue
        case = f"{c['data']}, K = {c['k']}, alpha = {c['alpha']}"
        yield (
            f"cluster, {case}: times faster than k-means-constrained, an iteration",
            "20",
            cell(faster),
            faster["median"] >= 20,
        )
        ours, theirs = (c["arms"][arm]["inertia"] for arm in ("ours", "k-means-constrained"))
        gap = ours / theirs - 1
        yield (
            f"cluster, {case}: inertia over that of k-means-constrained, less 1, equal centres and "
            "assignments",
            "at most 0",
            f"{gap:+.1e}",
            gap <= 1e-6,
        )
        gap = c["gap_from_its_end"]
        yield (
            f"cluster, {case}: inertia over that of k-means-constrained, less 1, both going on "
            "from where it ended",
            "at most 0",
            f"{gap:+.1e}",
            gap <= 1e-9,
        )
        fit, theirs = c["fit"], c["arms"]["k-means-constrained"]
        gap = fit["inertia"] / theirs["inertia"] - 1
        yield (
            f"cluster, {case}: a whole fit's inertia over theirs, less 1, and its share of their "
            "time",
            "at most 0, below 1",
            f"{gap:+.1e}, {(share := fit['seconds'] / theirs['seconds']['median']):.2f}",
            gap <= 1e-9 and share < 1,
        )
    for p in result["passes"]:
        if p["k"] == 4:
            got = p["distances_over_read"]
            yield (
                "cluster: a pass at K = 4 over one reading",
                "2.5",
                cell(got),
                got["median"] <= 2.5,
            )
    for a in result["assignments"]:
        if "objective_gap" in a:
            yield (
                f"assign, N = {a['n']:,}, K = {a['k']}: objective over POT's, less 1",
                "0",
                f"{a['objective_gap']:+.1e}",
                abs(a["objective_gap"]) < 1e-9,
            )


def _out_of_core_targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    for c in result["cases"]:
        yield (
            f"cluster, {result['bytes'] / 1e9:.1f} GB, {c['data']}, K = {c['k']}, "
            f"alpha = {c['alpha']}",
            "converged, anonymous memory below 1 GB",
            f"{c['n_iter']} iterations, {gigabytes(c['anonymous_bytes'])}",
            c["converged"] and c["anonymous_bytes"] < 1e9,
        )


def _selection_targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    for p in result["points"]:
        if p["n"] == 10_000_000 and p["part"] == "choice":
            yield (
                f"select {p['strategy']}, 10 million rows",
                "20 s and 2 GB",
                f"{cell(p['seconds'])} s, {gigabytes(p['resident_bytes'])}",
                p["seconds"]["median"] < 20 and p["resident_bytes"] < 2e9,
            )


def _training_targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    names = {"trainer": "Transformers' Trainer", "trl": "TRL's SFTTrainer"}
    for arm, speed in result["speed_of"].items():
        yield (f"train: tokens/s over {names[arm]}'s", "1", cell(speed), speed["median"] >= 1)
    cost = result["weighted_over_plain"]
    yield ("train: cost of the weighting", "below 1 %", _percent(cost, 1), cost["median"] < 1.01)
    share = result["plan"]["share"]
    yield ("train: cost of the plan", "below 1 %", _percent(share, 0), share["median"] < 0.01)
    for p in result["memory"]:
        chunked, full = p["bytes"]["chunked"], p["bytes"]["full"]
        yield (
            f"train: peak of a pass of {p['rows']} x {p['tokens']} against full logits",
            "lower",
            f"{gigabytes(chunked)} to {gigabytes(full)}",
            chunked < full,
        )


def _percent(spread: Result, base: float) -> str:
    low, mid, high = (f"{spread[name] - base:.2%}" for name in ("min", "median", "max"))
    return f"{mid} ({low} to {high})"


_TARGETS = {
    "embedding": _embedding_targets,
    "training": _training_targets,
    "clustering": _clustering_targets,
    "out_of_core": _out_of_core_targets,
    "selection": _selection_targets,
}
