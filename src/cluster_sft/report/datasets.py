"""The table of data sets: rows, tokens, usage at the swept ratios, benchmarks and seeds."""

from __future__ import annotations

from pathlib import Path

from cluster_sft.artifacts import SUMMARY, read_json, read_table
from cluster_sft.report.benchmarks import benchmarks, by_benchmark, of_configuration
from cluster_sft.report.labels import show_count
from cluster_sft.report.overview import drops
from cluster_sft.report.points import Point, configurations
from cluster_sft.report.publication import Block
from cluster_sft.report.results import Results
from cluster_sft.report.tables import NONE, Cell, Table

FACTS = ("source rows", "dropped", "held-out rows", "training rows", "tokens")
FACTS += ("clusters K", "usage at ratio r", "benchmarks (items)", "seeds")
NOTE = (
    "Tokens are prompt and response of the training set as the model sees them. Usage is the share "
    "of the training set that the budget of K clusters leaves at each ratio r."
)


def datasets(results: Results, name: str) -> Block | None:
    """Return a column a configuration; None where no point names its prepared data.

    Args:
        results: the points that are reported.
        name: the run's name, for its head where there are no several configurations.

    Raises:
        UserError: a leaf lacks a file that its stage writes.
    """
    detailed = by_benchmark(results)
    columns: dict[str, list[Cell]] = {}
    for configuration in configurations(results.groups):
        part = of_configuration(detailed, configuration)
        points = [results.points[p] for g in part.groups for p in g.points]
        prepare = next((p.prepare for p in points if p.prepare is not None), None)
        if prepare is not None:
            title = name if configuration is None else str(configuration)
            columns[title] = [*_counts(prepare), *_uses(part, points)]
    if not columns:
        return None
    rows = tuple((Cell(f), *c) for f, *c in zip(FACTS, *columns.values(), strict=True))
    table = Table(("data set", *columns), rows, words=1 + len(columns))
    return Block("Data sets", table, NOTE)


def _counts(prepare: Path) -> list[Cell]:
    columns = ["n_prompt_tokens", "n_response_tokens"]
    kept = read_table(prepare, "dataset.parquet", columns)
    heldout = read_table(prepare, "heldout.parquet", ["id"]).height
    dropped = drops(prepare)
    lost = sum(n for _, n in dropped)
    words = ", ".join(f"{show_count(n)} {reason}" for reason, n in dropped)
    text = show_count(lost) + (f" ({words})" if words else "")
    tokens = sum(int(kept[c].sum()) for c in columns)
    return [
        Cell(show_count(kept.height + heldout + lost)),
        Cell(text),
        *(Cell(show_count(n)) for n in (heldout, kept.height, tokens)),
    ]


def _uses(results: Results, points: list[Point]) -> list[Cell]:
    shares: dict[int, dict[float, float]] = {}
    for point in points:
        if point.cluster is None or point.select is None or point.ratio is None:
            continue
        k = int(read_json(point.cluster / SUMMARY)["k"])
        found = read_json(point.select / SUMMARY)["data_share"]
        shares.setdefault(k, {}).setdefault(point.ratio, found)
    usage = [
        ", ".join(f"{share:.1%} at {ratio:g}" for ratio, share in sorted(of_k.items())[::-1])
        for of_k in shares.values()
    ]
    if len(shares) > 1:
        usage = [f"K = {k}: {text}" for k, text in zip(shares, usage, strict=True)]
    items = {m.title: _items(results, m.name) for m in benchmarks(results)}
    tested = [title if n is None else f"{title} ({show_count(n)})" for title, n in items.items()]
    seeds = sorted({p.seed for p in points if p.seed is not None})
    return [
        Cell(", ".join(str(k) for k in shares) or NONE),
        Cell("; ".join(usage) or NONE),
        Cell(", ".join(tested) or NONE),
        Cell(", ".join(str(seed) for seed in seeds) or NONE),
    ]


def _items(results: Results, name: str) -> int | None:
    found = [e.n for g in results.groups if (e := g.estimates.get(name)) and e.n is not None]
    return max(found, default=None)
