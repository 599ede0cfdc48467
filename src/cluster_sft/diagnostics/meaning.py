"""What the clusters are about: terms, examples, categories and the map, measured and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from cluster_sft.diagnostics import figures, projection, semantics
from cluster_sft.diagnostics.inputs import Inputs, instructions, read_rows, responses

MAP_ROWS = 2000  # rows that the map is made of and shows
TEXT_ROWS = 20_000  # rows whose instructions the terms come from
TEXT_LENGTH = 220  # characters of an example


def measure_meaning(
    inputs: Inputs, *, terms: int, examples: int, seed: int, out: Path
) -> dict[str, Any]:
    """Return terms and categories of the clusters; write terms.csv and examples.csv.

    Args:
        inputs: the embedded rows.
        terms: of each cluster.
        examples: nearest and as many farthest rows of each cluster.
        seed: of the sample that terms come from.
        out: folder of the tables.
    """
    k, n = inputs.k, len(inputs.label_N)
    rng = np.random.default_rng([seed, n])
    rows = np.sort(rng.permutation(n)[:TEXT_ROWS])
    texts = instructions(read_rows(inputs, rows, ["messages"])["messages"])
    table = semantics.top_terms(texts, inputs.label_N[rows], k, terms=terms)
    table.write_csv(out / "terms.csv")
    _write_examples(inputs, examples, out)
    category = read_rows(inputs, np.arange(n), ["category"])["category"]
    per_cluster, agreed, known = semantics.category_agreement(category, inputs.label_N, k)
    most = max(category.drop_nulls().value_counts()["count"].to_list(), default=0)
    found = []
    for c in range(k):
        name, count, of = per_cluster[c] or (None, 0, 0)
        words = table.filter(pl.col("cluster") == c)["term"].to_list()
        found.append(
            {"terms": words, "category": name, "category_share": count / of if of else None}
        )
    return {
        "clusters": found,
        "category": {
            "rows": known,
            "agreeing": agreed if known else None,
            "agreement": agreed / known if known else None,
            "largest_category_share": most / known if known else None,
        },
    }


def _write_examples(inputs: Inputs, examples: int, out: Path) -> None:
    found = semantics.extreme_rows(inputs.distance_N, inputs.label_N, inputs.k, examples=examples)
    rows = found["row"].to_numpy()
    messages = read_rows(inputs, rows, ["messages"])["messages"]
    columns = {
        "id": inputs.ids[rows],
        "distance": inputs.distance_N[rows],
        "instruction": [semantics.shorten(t, TEXT_LENGTH) for t in instructions(messages)],
        "response": [semantics.shorten(t, TEXT_LENGTH) for t in responses(messages)],
    }
    found.drop("row").with_columns(pl.Series(n, v) for n, v in columns.items()).write_csv(
        out / "examples.csv"
    )


def draw_map(inputs: Inputs, *, method: str, seed: int, out: Path) -> dict[str, Any]:
    """Draw the 2-D map of a seeded sample of rows; write map.parquet."""
    rng = np.random.default_rng([seed, inputs.k])
    rows = np.sort(rng.permutation(len(inputs.label_N))[:MAP_ROWS])
    found = projection.project(inputs.x[rows], method=method, seed=seed)
    label, selected = inputs.label_N[rows], inputs.selected_N[rows]
    figures.write(out, "map", figures.draw_map(found, label, selected, inputs.k))
    columns = {"id": inputs.ids[rows], "cluster": label.astype(np.int32), "selected": selected}
    columns |= {"x": found.points[:, 0], "y": found.points[:, 1]}
    pl.DataFrame(columns).write_parquet(out / "map.parquet", compression="zstd")
    return {"method": method, "rows": len(rows), "explained": found.explained}
