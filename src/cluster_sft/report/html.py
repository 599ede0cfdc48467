"""The report as one HTML file: nothing fetched, no script; fit for light, dark and print."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster_sft.report import caveats, diagnoses, drawing, headline, overview, tables
from cluster_sft.report.comparison import ONE_DRAW, REFERENCES, against, drawn_once
from cluster_sft.report.diagnoses import Diagnosis
from cluster_sft.report.figures import MAX_PANELS
from cluster_sft.report.overview import Clustering
from cluster_sft.report.page import PAGE
from cluster_sft.report.points import METRICS, varying
from cluster_sft.report.publication import Block
from cluster_sft.report.results import Results
from cluster_sft.report.stylesheet import STYLE

NAMES = {
    drawing.INK: "ink",
    drawing.MUTED: "muted",
    drawing.GRID: "grid",
    drawing.SURFACE: "surface",
}


@dataclass(frozen=True)
class Title:
    """What the page is called: the run's name, and the study's where it is one."""

    name: str
    study: str | None = None


def render(
    results: Results,
    *,
    title: Title,
    clusterings: Sequence[Clustering],
    figures: Mapping[str, str],
    made: Mapping[str, Sequence[Block]],
    diagnosed: Sequence[Diagnosis],
) -> str:
    """Return the whole page.

    Args:
        results: the points that are reported.
        title: names for the head of the page.
        clusterings: every clustering behind the points, whether or not it fits a figure.
        figures: file name without suffix -> SVG text, as `figures.draw` and `diagnoses.figures`
            return it.
        made: tables by their file's name, as `exports.blocks` returns them.
        diagnosed: what stage diagnose found, if it ran.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    looks = drawing.styles([g.strategy for g in results.groups])
    seeds = tables.seeds_table(results)
    return environment.from_string(PAGE).render(
        title=title.study or title.name,
        kind=f"study \u00b7 {title.name}" if title.study else "report",
        theme=Markup(theme()),
        style=Markup(STYLE),
        compared=headline.compared(results),
        verdicts=headline.verdicts(results),
        notes=headline.notes(results),
        results=tables.results_table(results),
        differences=tables.differences_table(results),
        paired=_paired(results),
        draw=ONE_DRAW if drawn_once(results) else "",
        seeds=seeds,
        runs=tables.runs_table(results) if seeds else None,
        items=_items(results),
        colours={name: _variable(colour) for name, (colour, _) in looks.items()},
        figures={n: Markup(inline(svg, n)) for n, svg in figures.items()},
        studies=[name for name in figures if name.startswith(("study-", "bars-"))],
        study=bool(title.study),
        thin=len(varying(results.groups)) > 1,
        levels=any(g.strategy in REFERENCES for g in results.groups),
        made=made,
        skipped=overview.not_run(results),
        warnings=caveats.warnings(results, clusterings),
        hidden=len(clusterings) - MAX_PANELS,
        diagnosis=_diagnosis(diagnosed),
        parameters=overview.parameters(results.points),
        sources=[(s.leaf, s.key[:12]) for s in overview.sources(results.points)],
    )


def theme() -> str:
    """Return the palette as CSS variables, light first, dark where the reader prefers it."""
    light = "".join(f"{_name(c)}: {c}; " for c in drawing.DARK)
    dark = "".join(f"{_name(light)}: {dark}; " for light, dark in drawing.DARK.items())
    return (
        f":root {{ {light}--better: #1a7f4b; --worse: #a40e26; }}\n"
        "@media screen and (prefers-color-scheme: dark) {\n"
        f":root {{ {dark}--better: #5fd08f; --worse: #ff8f8f; }}\n}}\n"
    )


def inline(svg: str, prefix: str) -> str:
    """Return an SVG file's picture for use inside the page.

    Its colours become the page's variables, its ids are made unique, and its size is the page's.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height|version|xmlns(:\w+)?)="[^"]*"', "", head)
    rest = re.sub(r'\bid="', f'id="{prefix}-', rest)
    rest = rest.replace("url(#", f"url(#{prefix}-").replace('xlink:href="#', f'href="#{prefix}-')
    for colour in drawing.DARK:
        rest = rest.replace(colour, _variable(colour))
    return f"{head}>{rest}"


def _name(colour: str) -> str:
    return f"--{NAMES.get(colour, 'c' + colour[1:])}"


def _variable(colour: str) -> str:
    return f"var({_name(colour)})"


def _diagnosis(found: Sequence[Diagnosis]) -> dict[str, Any] | None:
    """Return what the section on diagnostics holds; None where nothing was diagnosed."""
    if not found:
        return None
    drawn = diagnoses.shown(found)
    return {
        "warnings": diagnoses.warnings(found),
        "subsets": diagnoses.subsets_table(found),
        "clusters": diagnoses.clusters_table(drawn),
        "sentences": diagnoses.sentences(drawn),
        "examples": diagnoses.examples(drawn),
        "of": drawn.name,
        "batch": drawn.metrics["batch_rows"],
    }


def _paired(results: Results) -> str:
    """Return the metrics whose differences are taken item by item."""
    strategies = dict.fromkeys(g.strategy for g in results.groups)
    found = [d for s in strategies for d in against(results, s, headline.CONTROL)]
    return ", ".join(dict.fromkeys(d.metric.title for d in found if d.paired))


def _items(results: Results) -> str:
    """Return how many items each metric rests on."""
    counts = {}
    for metric in METRICS:
        found = {e.n for g in results.groups if (e := g.estimates.get(metric.name)) and e.n}
        if found:
            counts[metric.title] = " or ".join(f"{n:,}" for n in sorted(found))
    return ", ".join(f"{title} {n}" for title, n in counts.items())
