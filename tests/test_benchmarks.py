"""Benchmarks: each runs on tiny sizes without its peers, and the note is written from results."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
from benchmarks import labelling, measuring, report, selection, tables, targets


@pytest.mark.parametrize(
    "name", ["selection", "clustering", "out_of_core", "embedding", "training"]
)
def test_benchmark_of_tiny_sizes_ends_in_a_note(name, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "PEERS_PYTHON", tmp_path / "absent")
    monkeypatch.setattr(measuring, "processors", lambda: 1)  # tests share the machine
    module = importlib.import_module(f"benchmarks.{name}")
    options = module.parse(["--small", "--rounds", "1", "--scratch", str(tmp_path / "scratch")])
    measuring.save(name, module.measure(options), out=tmp_path / "results")
    note = report.write(tmp_path / "results", tmp_path / "docs").read_text()
    title = {"out_of_core": "Larger than memory"}.get(name, name.capitalize())
    assert f"## {title}" in note
    assert "nan" not in note


def test_note_names_a_missed_target():
    point = {
        "n": 10_000_000,
        "part": "choice",
        "strategy": "cluster",
        "seconds": measuring.spread([21.0, 25.0, 23.0]),
        "resident_bytes": 1e9,
    }
    note = "\n".join(targets.targets({"selection": {"points": [point]}}))
    assert "| select cluster, 10 million rows | 20 s and 2 GB | 23.00 (21.00 to 25.00) s, " in note
    assert "**missed**" in note


def test_inertia_is_the_squared_distance_to_the_means(tmp_path):
    path = tables.mixture(tmp_path / "x.npy", n_rows=50, width=8)
    x = np.load(path).astype(np.float64)
    labels = np.arange(50, dtype=np.int32) % 3
    own = np.stack([x[labels == c].mean(axis=0) for c in range(3)])[labels]
    assert labelling.inertia(path, labels, 3) == pytest.approx(((x - own) ** 2).sum())


def test_mixture_has_unit_rows_and_is_the_same_every_time(tmp_path):
    first, second = (
        np.load(tables.mixture(tmp_path / name, n_rows=300, width=16))
        for name in ("a.npy", "b.npy")
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(np.linalg.norm(first.astype(np.float32), axis=1), 1, atol=1e-2)


def test_tables_too_large_for_the_folder_are_refused_before_writing(tmp_path):
    with pytest.raises(SystemExit, match="give another folder with --scratch"):
        tables.check_room(tmp_path, 1 << 60)


def test_ratios_pair_neighbours_in_time():
    found = measuring.ratios([2.0, 30.0, 4.0], [1.0, 10.0, 4.0])
    assert (found["median"], found["min"], found["max"]) == (2.0, 1.0, 3.0)


def test_memory_peak_sees_what_was_freed_again():
    with measuring.MemoryPeak() as peak:
        np.ones(40_000_000)
    assert peak.facts()["resident_bytes"] > 300e6


def test_child_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"clusters\.parquet"):
        measuring.run_child(
            "selection",
            {
                "folder": str(tmp_path),
                "out": str(tmp_path / "out"),
                "strategy": "cluster",
                "whole": False,
            },
        )


def test_selection_leaves_are_what_the_stage_reads(tmp_path):
    selection.write_leaves(tmp_path, 400, record_bytes=300)
    job = {"folder": str(tmp_path), "out": str(tmp_path / "out"), "strategy": "uniform"}
    found = measuring.run_child("selection", {**job, "whole": True})
    assert 0 < found["rows"] <= 400
    assert json.loads((tmp_path / "clusters" / "summary.json").read_text()) == {"zero_rows": []}
