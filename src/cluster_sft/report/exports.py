"""The tables of a report as files: Markdown, CSV and LaTeX, each with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from cluster_sft.report import headline, latex, publication, tables
from cluster_sft.report.complexity import complexity
from cluster_sft.report.cost_tables import cost_blocks, cost_frame
from cluster_sft.report.datasets import datasets
from cluster_sft.report.publication import Block
from cluster_sft.report.results import Results

STUDY, COSTS, COMPLEXITY, DATASETS = "study", "costs", "complexity", "datasets"


def blocks(results: Results, name: str) -> dict[str, list[Block]]:
    """Return the tables of every file, by the file's name without suffix; none of them empty.

    Raises:
        UserError: a leaf lacks a file that its stage writes.
    """
    optional = {COMPLEXITY: complexity(results), DATASETS: datasets(results, name)}
    found = {
        STUDY: publication.loss_blocks(results) + publication.score_blocks(results),
        COSTS: cost_blocks(results),
        **{key: [block] if block else [] for key, block in optional.items()},
    }
    return {key: some for key, some in found.items() if some}


def write(results: Results, made: dict[str, list[Block]], *, title: str, out: Path) -> None:
    """Write the tables that `blocks` made into the folder `out`.

    CSV holds plain numbers: of study and costs a row a group with every deviation and error, of
    the others the cells as shown.
    """
    frames = {STUDY: publication.frame, COSTS: cost_frame}
    for key, some in made.items():
        words = f"# {title}: {key}\n\n{headline.compared(results)}\n\n"
        (out / f"{key}.md").write_text(words + _markdown(some))
        (out / f"{key}.tex").write_text(_latex(some, f"{title}-{key}"))
        frame = frames[key](results) if key in frames else _cells(some[0])
        frame.write_csv(out / f"{key}.csv")


def _markdown(some: Sequence[Block]) -> str:
    parts = []
    for block in some:
        parts += [f"## {block.title}\n", tables.markdown(block.table)]
        parts += [block.note + "\n"] if block.note else []
    return "\n".join(parts)


def _latex(some: Sequence[Block], label: str) -> str:
    parts = [latex.PREAMBLE]
    for i, block in enumerate(some):
        caption = ". ".join(part for part in (block.title, block.note) if part)
        name = label if len(some) == 1 else f"{label}-{i + 1}"
        parts.append(latex.tabular(block.table, caption=caption, label=name))
    return "\n".join(parts)


def _cells(block: Block) -> pl.DataFrame:
    """Return a table's cells as text."""
    rows = [[cell.text for cell in row] for row in block.table.rows]
    return pl.DataFrame(rows, schema=dict.fromkeys(block.table.heads, pl.String), orient="row")
