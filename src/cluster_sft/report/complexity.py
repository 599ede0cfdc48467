"""Passes a row of each method: what theory says beside what the runs measured.

CluSTER needs one forward pass a row. IFD needs two, LESS a warm-up and then a backward pass a row
at each of its epochs, S2L the training of a proxy and a forward pass a row at each checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_sft.artifacts import read_table
from cluster_sft.report.costs import Bill, bills
from cluster_sft.report.labels import show_duration
from cluster_sft.report.overview import manifest_of
from cluster_sft.report.points import CONFIGURATION, setting
from cluster_sft.report.publication import Block
from cluster_sft.report.results import Results
from cluster_sft.report.tables import NONE, Cell, Table


@dataclass(frozen=True)
class Theory:
    """Passes of a step a row of the data; None where another number than the rows' decides."""

    formula: str = "none"
    forward: float | None = 0.0
    backward: float | None = 0.0


Params = Mapping[str, Mapping[str, Any]]  # step -> the parameters in its manifest
THEORY: Mapping[str, Callable[[Params], Theory]] = {
    "embed": lambda p: Theory("F", 1, 0),
    "ifd": lambda p: Theory("2 F", 2, 0),
    "less-warmup": lambda p: _both(
        "s E (F + B)", _number(p, "less-warmup", "warmup_share", "warmup_epochs")
    ),
    "less-gradients": lambda p: _both("E (F + B)", _number(p, "less-warmup", "warmup_epochs")),
    "less": lambda p: Theory("E (F + B) a target", None, None),
    "s2l-proxy": lambda p: _both("E (F + B), proxy", _number(p, "s2l-proxy", "epochs")),
    "s2l-trajectories": lambda p: Theory("T F, proxy", _number(p, "s2l-proxy", "checkpoints"), 0),
}
COMPLEXITY_NOTE = (
    "Passes a row of the training set, in theory and as measured. F: one forward pass, B: one "
    "backward pass, s: share of the rows in LESS's warm-up, E: epochs, T: checkpoints. A step "
    "without passes works on what earlier steps kept. A scorer may leave rows out, and the last "
    "step of an epoch may be short: small differences are no error."
)


def _number(params: Params, step: str, *names: str) -> float | None:
    """Return the product of a step's parameters; None where its manifest does not hold them."""
    product = 1.0
    for name in names:
        if name not in params.get(step, {}):
            return None
        product *= float(params[step][name])
    return product


def _both(formula: str, passes: float | None) -> Theory:
    return Theory(formula, passes, passes)


def complexity(results: Results) -> Block | None:
    """Return a row a method and step of selection; None where no method has a step with passes.

    Raises:
        UserError: a leaf lacks a file that its stage writes.
    """
    rows = [row for bill in _one_a_method(bills(results)) for row in _steps(results, bill)]
    sides = [f"{way}, {what}" for way in ("forward", "backward") for what in ("theory", "measured")]
    heads = ("strategy", "step", "passes a row", *sides, "time")
    if not rows:
        return None
    return Block("Passes a row", Table(heads, tuple(rows), words=3), COMPLEXITY_NOTE)


def _one_a_method(found: Sequence[Bill]) -> list[Bill]:
    """Return the first bill of each strategy and configuration that has any pass to count."""
    first: dict[tuple[object, ...], Bill] = {}
    for bill in found:
        key = (bill.group.strategy, setting(bill.group, CONFIGURATION))
        if any(step in THEORY for step in bill.selection):
            first.setdefault(key, bill)
    return list(first.values())


def _steps(results: Results, bill: Bill) -> list[tuple[Cell, ...]]:
    point = results.points[bill.group.points[0]]
    rows = _rows_of(point.prepare)
    params = {step: manifest_of(leaf).get("params", {}) for step, leaf in _leaves(bill).items()}
    name = bill.group.strategy
    if (configuration := setting(bill.group, CONFIGURATION)) is not None:
        name += f", {configuration}"
    shown = []
    for step, cost in bill.selection.items():
        theory = THEORY.get(step, lambda p: Theory())(params)
        cells = [
            Cell(text)
            for wanted, measured in (
                (theory.forward, cost.forward_passes),
                (theory.backward, cost.backward_passes),
            )
            for text in (_passes(wanted), _passes(measured / rows if rows else None))
        ]
        head = (Cell(name, style=bill.group.strategy), Cell(step), Cell(theory.formula))
        shown.append((*head, *cells, Cell(show_duration(cost.seconds))))
    return shown


def _leaves(bill: Bill) -> dict[str, Path]:
    return dict(zip((s for s in bill.selection if s != "select"), bill.leaves, strict=True))


def _rows_of(prepare: Path | None) -> int:
    return read_table(prepare, "dataset.parquet", ["id"]).height if prepare else 0


def _passes(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}"
