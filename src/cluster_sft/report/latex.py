"""Tables as LaTeX with booktabs: for a document that loads that package."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cluster_sft.report.tables import Cell, Table

ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "\u00a0": "~",
    "\u2013": "--",
    "\u2009": r"\,",
    "\u202f": r"\,",
    "\u2212": "$-$",
    "\u00b1": r"$\pm$",
    "\u00d7": r"$\times$",
    "\u00b7": r"$\cdot$",
    "\u2190": r"$\leftarrow$",
    "\u2191": r"$\uparrow$",
    "\u2192": r"$\rightarrow$",
    "\u2193": r"$\downarrow$",
    "\u03b1": r"$\alpha$",
    "\u2248": r"$\approx$",
    "\u25b2": r"$\bigtriangleup$",
    "\u25bc": r"$\bigtriangledown$",
}
PREAMBLE = "% The document's head needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}.\n"


def escape(text: str) -> str:
    """Return text as LaTeX that prints it; line breaks and tabs become spaces.

    Letters beyond ASCII stay as they are, which LaTeX reads as UTF-8 since 2018.
    """
    text = re.sub(r"\s*[\n\r\t\x0b\x0c]\s*", " ", text)
    return "".join(ESCAPES.get(c, c) for c in text if c.isprintable() or c in ESCAPES)


def tabular(table: Table, *, caption: str, label: str) -> str:
    """Return a table environment; proven bests are bold, a gap parts one strategy from the next.

    Args:
        table: the cells.
        caption: plain text, escaped here.
        label: what comes after `tab:`, as a reference names it: kept to letters, digits and dashes.
    """
    columns = "l" * table.words + "r" * (len(table.heads) - table.words)
    lines = [
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{escape(caption)}}}",
        f"  \\label{{tab:{re.sub(r'[^A-Za-z0-9]+', '-', label).strip('-')}}}",
        f"  \\begin{{tabular}}{{{columns}}}",
        "    \\toprule",
        f"    {_line([escape(head) for head in table.heads])}",
        "    \\midrule",
        *_body(table.rows),
        "    \\bottomrule",
        "  \\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _body(rows: Sequence[Sequence[Cell]]) -> list[str]:
    names = [row[0].text for row in rows]
    grouped = len(set(names)) < len(names)
    lines = []
    for i, row in enumerate(rows):
        if grouped and i and names[i] != names[i - 1]:
            lines.append("    \\addlinespace")
        lines.append(f"    {_line([_cell(cell) for cell in row])}")
    return lines


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    return f"\\textbf{{{text}}}" if cell.best else text


def _line(cells: Sequence[str]) -> str:
    # A row that opens with a bracket would be read as an argument of the \\ before it.
    first, *rest = cells
    if first.lstrip().startswith(("[", "*")):
        first = f"{{}}{first}"
    return " & ".join([first, *rest]) + r" \\"
