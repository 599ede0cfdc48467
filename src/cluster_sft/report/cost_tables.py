"""Tables of costs: of selection alone, and of selection and training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from cluster_sft.report.costs import Bill, Cost, bills
from cluster_sft.report.labels import axis_name, show_count, show_duration
from cluster_sft.report.points import CONFIGURATION, setting, varying
from cluster_sft.report.publication import Block
from cluster_sft.report.results import Results
from cluster_sft.report.tables import Cell, Table, identity

UNITS = ("B", "kB", "MB", "GB", "TB")
UPSTREAM = (CONFIGURATION, "cluster.", "train.workers")  # settings that selection's cost hangs on
HEADS = ("forward passes", "backward passes", "tokens", "time", "peak memory", "stored")
NOTE = (
    "Selection: all that the subset needed beyond the prepared data, whole for each method even "
    "where methods share it; preparation, which all share, and evaluation are left out. A pass is "
    "one row through a model; for S2L's steps that model is the proxy. Times are as these runs "
    "measured them."
)


def cost_blocks(results: Results) -> list[Block]:
    """Return the cost of selection by method, and of selection and training by group."""
    found = bills(results)
    if not found:
        return []
    return [
        Block("Cost of selection", _selection(results, found), NOTE),
        Block("Cost of selection and training", _whole(results, found)),
    ]


def _selection(results: Results, found: Sequence[Bill]) -> Table:
    """Return a row a distinct selection: the same leaves upstream, whatever was kept of them."""
    names = [n for n in varying(results.groups) if n.startswith(UPSTREAM)]
    distinct = {(b.group.strategy, b.leaves): b for b in reversed(found)}
    rows = [
        (*identity(b.group, names), Cell(", ".join(b.selection)), *_cells(b.selected))
        for b in reversed(distinct.values())
    ]
    heads = ("strategy", *(axis_name(n) for n in names), "steps", *HEADS)
    return Table(heads, tuple(rows), words=2 + len(names))


def _whole(results: Results, found: Sequence[Bill]) -> Table:
    names = varying(results.groups)
    rows = []
    for bill in found:
        whole = bill.whole
        times = [bill.selected.seconds, bill.training.seconds, whole.seconds]
        cells = _cells(whole)
        cells[3:4] = [Cell(show_duration(t)) for t in times]
        rows.append((*identity(bill.group, names), *cells))
    times = ("selection time", "training time", "total time")
    heads = ("strategy", *(axis_name(n) for n in names), *HEADS[:3], *times, *HEADS[4:])
    return Table(heads, tuple(rows))


def _cells(cost: Cost) -> list[Cell]:
    return [
        *(Cell(show_count(n)) for n in (cost.forward_passes, cost.backward_passes, cost.tokens)),
        Cell(show_duration(cost.seconds)),
        Cell(show_bytes(cost.peak_memory_bytes)),
        Cell(show_bytes(cost.bytes_stored)),
    ]


def show_bytes(value: float) -> str:
    """Return a size in decimal units with three digits."""
    power = 0
    while value >= 999.5 and power < len(UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {UNITS[power]}"


def cost_frame(results: Results) -> pl.DataFrame:
    """Return costs.csv: a row a group and step, and their sums: selection, training, total."""
    axes = dict.fromkeys(axis for g in results.groups for axis in g.axes)
    rows: list[dict[str, Any]] = []
    for bill in bills(results):
        group = bill.group
        named = {"strategy": group.strategy, "ratio": group.ratio}
        named |= {axis: setting(group, axis) for axis in axes} | {"seeds": len(group.points)}
        parts = [("selection", step, cost) for step, cost in bill.selection.items()]
        parts += [("selection", "all", bill.selected), ("training", "all", bill.training)]
        parts += [("total", "all", bill.whole)]
        for phase, step, cost in parts:
            rows.append({**named, "phase": phase, "step": step, **vars(cost)})
    return pl.DataFrame(rows, infer_schema_length=None, strict=False)
