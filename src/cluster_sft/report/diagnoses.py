"""What stage diagnose found, for the page: a table of subsets, one of clusters, words, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from cluster_sft.artifacts import SUMMARY, read_json
from cluster_sft.errors import UserError
from cluster_sft.report.labels import label, show_count
from cluster_sft.report.points import varying
from cluster_sft.report.results import Results
from cluster_sft.report.tables import NONE, Cell, Table

FIGURES = ("map", "validity", "centroids", "diversity", "composition")
FIRST = "cluster"  # the strategy whose subset is drawn
TERMS = 5


@dataclass(frozen=True)
class Diagnosis:
    """One leaf of stage diagnose: whose subset it is of, its numbers and its warnings."""

    name: str
    strategy: str
    leaf: Path
    metrics: Mapping[str, Any]
    warnings: tuple[str, ...]


def diagnoses(results: Results) -> list[Diagnosis]:
    """Return every diagnosed subset once, named by its group; training settings share one."""
    names = varying(results.groups)
    found: dict[Path, Diagnosis] = {}
    for group in results.groups:
        leaf = next((x for p in group.points if (x := results.points[p].diagnose)), None)
        if leaf is None or leaf in found:
            continue
        summary = read_json(leaf / SUMMARY)
        found[leaf] = Diagnosis(
            name=label(group, [n for n in names if not n.startswith("train.")]),
            strategy=group.strategy,
            leaf=leaf,
            metrics=read_json(leaf / "metrics.json"),
            warnings=tuple(summary["warnings"]),
        )
    return list(found.values())


def shown(found: Sequence[Diagnosis]) -> Diagnosis:
    """Return the subset that is drawn: the first of CluSTER's own strategy, else the first."""
    return next((d for d in found if d.strategy == FIRST), found[0])


def warnings(found: Sequence[Diagnosis]) -> list[str]:
    """Return each warning once, led by the subsets that it concerns, unless these are all."""
    who: dict[str, list[str]] = {}
    for diagnosis in found:
        for line in diagnosis.warnings:
            who.setdefault(line, []).append(diagnosis.name)
    return [
        line if len(names) == len(found) else f"{'; '.join(names)}: {line}"
        for line, names in who.items()
    ]


def figures(found: Sequence[Diagnosis]) -> dict[str, str]:
    """Return the figures of the shown subset: `diagnose-NAME` -> SVG text.

    Raises:
        UserError: the leaf holds a figure that cannot be read.
    """
    drawn = {}
    for name in FIGURES if found else ():
        path = shown(found).leaf / "figures" / f"{name}.svg"
        try:
            if path.exists():
                drawn[f"diagnose-{name}"] = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: damaged ({error}); run diagnose again") from error
    return drawn


def subsets_table(found: Sequence[Diagnosis]) -> Table:
    """Return one row a subset: how well it stands for the full data."""
    heads = ("subset", "rows", "effective rows", "response tokens a row", "n\u00b7GD")
    heads += ("centroid cosine, e", "centroid cosine, g", "variance ratio")
    return Table(heads, tuple(_subset_row(d) for d in found))


def _subset_row(diagnosis: Diagnosis) -> tuple[Cell, ...]:
    m = diagnosis.metrics
    return (
        Cell(diagnosis.name, style=diagnosis.strategy),
        Cell(show_count(m["rows"])),
        Cell(show_count(m["weights"]["effective_sample_size"])),
        Cell(_number(m["length"]["mean_selected"], 1)),
        Cell(_number(m["diversity"]["subset"]["n_gd"], 3)),
        Cell(_number(m["preservation"]["lowest_e"], 4)),
        Cell(_number(m["preservation"]["lowest_g"], 4)),
        Cell(_number(m["variance"]["selected"]["e"]["ratio"], 3)),
    )


def clusters_table(diagnosis: Diagnosis) -> Table:
    """Return one row a cluster: what it is about, its size, and what was selected of it."""
    clusters = diagnosis.metrics["clusters"]
    categories = any(c["category"] is not None for c in clusters)
    heads = ("cluster", "terms", *(["category"] if categories else []), "rows", "selected")
    heads += ("weight", "median response tokens", "n\u00b7GD", "centroid cosine")
    rows = []
    for c in clusters:
        words = [Cell(str(c["cluster"])), Cell(", ".join(c["terms"][:TERMS]) or NONE)]
        words += [Cell(_category(c))] if categories else []
        numbers = (
            show_count(c["size"]),
            show_count(c["rows"]),
            _number(c["weight"], 2),
            _number(c["length_median"], 0),
            _number(c["n_gd"], 3),
            _number(c["cosine_e"], 4),
        )
        rows.append((*words, *(Cell(text) for text in numbers)))
    return Table(tuple(heads), tuple(rows), words=3 if categories else 2)


def sentences(diagnosis: Diagnosis) -> list[str]:
    """Return what the clusters' own numbers say, whichever subset is taken of them."""
    m = diagnosis.metrics
    found = []
    v = m["validity"]
    if v["statistic"] is not None:
        kind = "the head" if v["gradients"] == "head" else "all parameters"
        found.append(
            f"True gradients by {kind}, of {v['rows']} sampled rows: their mean cosine is "
            f"{_number(v['intra'], 3)} inside clusters and {_number(v['inter'], 3)} between them; "
            f"labels permuted {show_count(v['permutations'])} times give p = {v['p_value']:.2g}."
        )
    e = m["variance"]["all"]["e"]
    split = e["s_inter"] / (e["s_inter"] + e["s_intra"]) if e["s_inter"] + e["s_intra"] else 0.0
    found.append(
        f"Of the embedding's variance {split:.0%} lies between clusters. A weighted stratified "
        f"step has {_number(e['ratio'], 2)} times the variance of a random one, for draws from all "
        f"rows; its bound by the capacity is {_number(_share(e['bound'], e['random']), 2)} times."
    )
    if m["category"]["agreement"] is not None:
        found.append(
            f"{m['category']['agreeing']} of {m['category']['rows']} rows "
            f"({m['category']['agreement']:.0%}) are of their cluster's dominant category; the "
            f"largest category holds {m['category']['largest_category_share']:.0%}."
        )
    return found


def examples(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """Return cluster, nearest or farthest, instruction and response of the example rows.

    Raises:
        UserError: the leaf lacks them.
    """
    path = diagnosis.leaf / "examples.csv"
    columns = ["cluster", "kind", "instruction", "response"]
    try:
        frame = pl.read_csv(path, columns=columns, infer_schema=False)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{path}: missing or damaged ({error}); run diagnose again") from error
    rows = frame.select(columns).iter_rows()
    return [tuple("" if value is None else value for value in row) for row in rows]


def _share(value: float, whole: float) -> float | None:
    return value / whole if whole else None


def _category(cluster: Mapping[str, Any]) -> str:
    if cluster["category"] is None:
        return NONE
    return f"{cluster['category']} ({cluster['category_share']:.0%})"


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}".replace("-", "\u2212")
