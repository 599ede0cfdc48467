"""docs/benchmarks.md and its figures, from the results that the benchmarks left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import measuring, training_note
from benchmarks.cells import cell, gigabytes, table
from benchmarks.growth import draw_growth
from benchmarks.targets import Result, targets

DOCS = measuring.ROOT / "docs"
HEAD = """\
# Benchmarks

Written by `make bench` from the runs it has just made; nothing here is typed by hand. A cell is a
median, with least and greatest of the repetitions behind it. Ratios are taken between neighbours in
time and then summarised. Everything is compared within one run on one machine, with other work as
the load says; absolute times hold for that machine only.
"""


def write(results: Path, docs: Path = DOCS) -> Path:
    """Write `docs/benchmarks.md` and its SVG figures from the JSON files in `results`."""
    writers: dict[str, Callable[[Result], Iterator[str]]] = {
        "embedding": _embedding,
        "training": training_note.write,
        "clustering": _clustering,
        "out_of_core": _out_of_core,
        "selection": _selection,
    }
    found = {
        name: json.loads((results / f"{name}.json").read_text())
        for name in writers
        if (results / f"{name}.json").is_file()
    }
    docs.mkdir(parents=True, exist_ok=True)
    parts = [HEAD, *targets(found)]
    for name, result in found.items():
        parts += [*writers[name](result), *_conditions(name, result)]
    if figure := draw_growth(found, docs / "benchmarks-growth.svg"):
        parts += [
            "\n## Growth\n",
            f"![Time of each stage over the rows of the data]({figure.name})\n",
        ]
    path = docs / "benchmarks.md"
    path.write_text("\n".join(parts).rstrip() + "\n")
    return path


def _embedding(result: Result) -> Iterator[str]:
    yield "\n## Embedding\n"
    yield (
        f"`{Path(result['model']).name}`, {result['dtype']}, batches of {result['batch_tokens']:,} "
        "tokens. *floor*: the bare model over the stage's batches, made beforehand, and its head "
        "on supervised positions. *stage*: tokenised table to array on disk. *naive*: batches of "
        "8 in file order, padded, all logits, log-softmax. Weights are in memory when a clock "
        "starts and when the peak of memory begins to count; loading is a column of its own. These "
        f"three run in one process (threads: {result['threads']}).\n"
    )
    heads = [
        *("data", "rows", "tokens", "padding", "floor, s", "stage, s", "naive, s"),
        *("stage, tok/s", "loading, s", "least cosine to naive"),
    ]
    rows = []
    for c in result["comparisons"]:
        times = [cell(c["seconds"][arm]) for arm in ("floor", "stage", "naive")]
        speed, load = cell(c["tokens_per_second"]["stage"], 0), cell(c["load_seconds"])
        rows.append(
            [
                *(c["data"], f"{c['n']:,}", f"{c['tokens']:,}", f"{c['padding_share']:.2%}"),
                *(*times, speed, load, f"{c['least_cosine_with_naive']:.4f}"),
            ]
        )
    yield table(heads, rows)
    rows = [
        [
            c["data"],
            *(gigabytes(c["resident_bytes"][arm]) for arm in ("floor", "stage", "naive")),
            cell(c["processes"]["one_process_seconds"]),
            cell(c["processes"]["one_thread_each_seconds"]),
        ]
        for c in result["comparisons"]
    ]
    heads = [
        "data",
        "floor, peak",
        "stage, peak",
        "naive, peak",
        "1 process, s",
        "a process a core, s",
    ]
    yield "\n" + table(heads, rows)
    yield (
        "\nThe stage over N, with a tiny random model on random rows, so that what is not the "
        "model shows; its memory must not follow N.\n"
    )
    rows = [
        [
            f"{p['n']:,}",
            f"{p['tokens']:,}",
            cell(p["seconds"]),
            f"{1e6 * p['seconds']['median'] / p['tokens']:.1f}",
            gigabytes(p["anonymous_bytes"]),
        ]
        for p in result["growth"]
    ]
    yield table(["N", "tokens", "s", "\u00b5s a token", "anonymous memory"], rows)


def _clustering(result: Result) -> Iterator[str]:
    first = result["iterations"][0]
    yield "\n## Clustering\n"
    yield (
        f"{first['n']:,} rows of float16 in memory; *mixture* is {first['width']:,} wide: 24 parts "
        "on the sphere, 60 % in one, the others by Zipf's law, each spread along 64 directions of "
        "its own as gradient proxies are, the variance along the i-th in proportion to i^-1.4; "
        "*embeddings* are rows of a real run tiled with noise. All arms start from equal centres "
        "and make the same number of assignments (peers end with one that follows their last "
        "iteration), or fewer where no label changes any more; peers get float32, as they ask for. "
        "*no capacity* compares what scikit-learn and faiss compute. Seconds an iteration include "
        "all that is read before and after. *a whole fit* is `constrained_kmeans` with its four "
        "restarts on a sample, until 1e-4 of the labels change.\n"
    )
    yield _iterations(result)
    if result["seedings"]:
        yield from _seedings(result)
    yield "\nA pass over all rows beside reading them, in one process, in turn.\n"
    yield _passes(result)
    yield "\nOne assignment from nothing known, beside POT's network simplex (alpha = 1.2).\n"
    yield _assignments(result)
    yield "\nGrowth over N at K = 4, alpha = 1.2: the whole fit, and one iteration.\n"
    yield _growth(result)


def _iterations(result: Result) -> str:
    rows = []
    for c in result["iterations"]:
        for arm, a in c["arms"].items():
            faster = c["times_faster"].get(arm)
            rows.append(
                [
                    *(f"{c['data']} x {c['width']:,}", str(c["k"]), str(c["alpha"]), arm),
                    *(str(a["n_iter"]), cell(a["per_iteration"], 3)),
                    *(f"{a['inertia']:.3f}", gigabytes(a["resident_bytes"])),
                    cell(faster, 1) if faster else "",
                ]
            )
        fit = c["fit"]
        rows.append(
            [
                *(f"{c['data']} x {c['width']:,}", str(c["k"]), str(c["alpha"]), "a whole fit"),
                *(str(fit["n_iter"]), f"{fit['seconds']:.2f} in all", f"{fit['inertia']:.3f}"),
                *(gigabytes(fit["resident_bytes"]), ""),
            ]
        )
    heads = [
        *("data", "K", "alpha", "arm", "assignments", "s an iteration", "inertia", "peak"),
        "ours is faster, times",
    ]
    return table(heads, rows, words=4)


def _seedings(result: Result) -> Iterator[str]:
    yield (
        "\nNo other assignment is cheaper for the same centres, yet iterations that assign "
        "differently part ways and may end in either the higher or the lower local optimum: so "
        "can inertia from equal centres, and that of a whole fit. The signs over seedings: our "
        "inertia over that of k-means-constrained, less 1, both from equal centres until no "
        "label changes (at most 100 assignments).\n"
    )
    rows = [
        [
            *(s["data"], f"{s['n']:,}", str(s["k"]), str(len(gaps := s["gap"]["values"]))),
            *(str(sum(g < -1e-9 for g in gaps)), str(sum(g > 1e-9 for g in gaps))),
            f"{s['gap']['median']:+.1e} ({s['gap']['min']:+.1e} to {s['gap']['max']:+.1e})",
        ]
        for s in result["seedings"]
    ]
    yield table(["data", "N", "K", "seedings", "lower", "higher", "median"], rows)


def _passes(result: Result) -> str:
    rows = [
        [
            f"{p['n']:,}",
            str(p["k"]),
            f"{1e3 * p['read_seconds']['median']:.1f}",
            f"{p['read_bytes_per_second'] / 1e9:.1f}",
            cell(p["distances_over_read"]),
            cell(p["first_pass_over_read"]),
        ]
        for p in result["passes"]
    ]
    heads = ["N", "K", "reading, ms", "GB/s", "distances, times that", "first pass, times that"]
    return table(heads, rows)


def _assignments(result: Result) -> str:
    rows = [
        [
            *(f"{a['n']:,}", str(a["k"]), cell(a["ours_seconds"], 4)),
            cell(a["pot_seconds"]) if "pot_seconds" in a else "",
            cell(a["times_faster"], 0) if "times_faster" in a else "",
        ]
        for a in result["assignments"]
    ]
    return table(["N", "K", "ours, s", "POT, s", "times"], rows)


def _growth(result: Result) -> str:
    rows = [
        [
            *(f"{g['n']:,}", cell(g["fit_seconds"]), gigabytes(g["fit_resident_bytes"])),
            cell(g["per_iteration"], 4),
            cell(g["peer_per_iteration"], 3) if "peer_per_iteration" in g else "",
            gigabytes(g["peer_resident_bytes"]) if "peer_resident_bytes" in g else "",
        ]
        for g in result["growth"]
    ]
    heads = ["N", "fit, s", "peak", "s an iteration", "k-means-constrained, s", "its peak"]
    return table(heads, rows)


def _out_of_core(result: Result) -> Iterator[str]:
    yield "\n## Larger than memory\n"
    yield (
        f"The stage `cluster` on {result['n']:,} x {result['width']:,} float16 "
        f"({result['bytes'] / 1e9:.1f} GB) from disk. The file's cached pages are dropped before "
        "every run and every reading. *mixture*: parts that spread along directions of their own, "
        "as embeddings do. *round parts*: as wide in all directions, so that no split of a part is "
        "better than another, and labels flow to no effect. *Anonymous* memory is what the system "
        "cannot take back; the greatest resident set (what `/usr/bin/time -v` reports) counts the "
        "mapped file's pages, which it can.\n"
    )
    rows = [
        [
            *(c["data"], str(c["k"]), str(c["alpha"])),
            *(cell(c["seconds"], 1), cell(c["read_seconds"], 1)),
            *(cell(c["over_read"]), str(c["n_iter"]), f"{c['table_reads']:.2f}"),
            *(gigabytes(c["anonymous_bytes"]), gigabytes(c["max_rss_bytes"])),
        ]
        for c in result["cases"]
    ]
    heads = [
        *("data", "K", "alpha", "s", "one cold reading, s", "times that", "iterations"),
        "table reads",
        *("anonymous", "resident"),
    ]
    yield table(heads, rows, words=3)


def _selection(result: Result) -> Iterator[str]:
    yield "\n## Selection\n"
    yield (
        "*choice*: clusters.parquet to subset.parquet, which never touches the data. *stage*: "
        f"with subset.jsonl, the chosen rows' text of {result['record_bytes']} bytes each, copied "
        "out of dataset.parquet. Peak memory includes the interpreter and its libraries.\n"
    )
    rows = [
        [
            *(p["strategy"], p["part"], f"{p['n']:,}", f"{p['rows']:,}"),
            *(cell(p["seconds"]), gigabytes(p["resident_bytes"])),
        ]
        for p in sorted(result["points"], key=lambda p: (p["part"], p["strategy"], p["n"]))
    ]
    yield table(["strategy", "part", "N", "selected", "s", "peak"], rows, words=2)


def _conditions(name: str, result: Result) -> Iterator[str]:
    m = result["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    yield (
        f"\n*{name}, {result['date']}: {m['processor']}, {m['cores']} cores, "
        f"{gigabytes(m['memory_bytes'])}, {m['system']}, Python {m['python']}, load "
        f"{m['load']:.1f} at the end; {versions}.*\n"
    )
