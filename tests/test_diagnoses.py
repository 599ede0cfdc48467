"""The report's section on diagnostics, and the curve of the workers' cosine."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster_sft import reporting
from cluster_sft.artifacts import write_json
from cluster_sft.report import diagnoses
from cluster_sft.report.html import Title
from cluster_sft.report.points import Point
from cluster_sft.report.results import collect
from report_leaves import Workspace

LENGTH = "Cluster 1 is largely a matter of length."
WEIGHTS = "The weights leave an effective sample of 100 rows."


def _metrics(lowest: float) -> dict[str, Any]:
    cluster = {
        "category": "sorting",
        "category_share": 0.82,
        "cosine_e": lowest,
        "length_median": 61.0,
        "n_gd": 1.234,
        "rows": 36,
        "size": 143,
        "terms": ["list", "sort", "<b>", "key", "order", "rank"],
        "weight": 0.5,
    }
    return {
        "batch_rows": 16,
        "rows": 288,
        "category": {
            "agreeing": 328,
            "agreement": 0.82,
            "largest_category_share": 0.3,
            "rows": 400,
        },
        "clusters": [{**cluster, "cluster": c} for c in range(4)],
        "diversity": {"subset": {"n_gd": 1.412}},
        "length": {"mean_selected": 76.8},
        "preservation": {"lowest_e": lowest, "lowest_g": None},
        "validity": {
            "gradients": "head",
            "inter": 0.034,
            "intra": 0.087,
            "p_value": 0.0464,
            "permutations": 9999,
            "rows": 400,
            "statistic": 0.053,
        },
        "variance": {
            "all": {
                "e": {"s_inter": 1.0, "s_intra": 3.0, "ratio": 0.81, "random": 0.25, "bound": 0.28}
            },
            "selected": {"e": {"ratio": 0.885}},
        },
        "weights": {"effective_sample_size": 267.3},
    }


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "results" / "demo")


def _diagnosed(point: Point, root: Path, lowest: float, warnings: list[str]) -> Point:
    leaf = root / "diagnose" / f"{point.strategy}-{point.ratio}"
    (leaf / "figures").mkdir(parents=True, exist_ok=True)
    write_json(leaf / "metrics.json", _metrics(lowest))
    write_json(leaf / "summary.json", {"warnings": warnings})
    svg = f'<?xml version="1.0"?>\n<svg viewBox="0 0 9 9"><text>{point.strategy} map</text></svg>'
    (leaf / "figures" / "map.svg").write_text(svg)
    (leaf / "examples.csv").write_text(
        "cluster,kind,rank,id,distance,instruction,response\n"
        '0,nearest,0,ab,0.2,"Sort, please",<script>\n'
    )
    return dataclasses.replace(point, diagnose=leaf)


@pytest.fixture
def points(workspace) -> list[Point]:
    pair = [workspace.point(s) for s in ("base", "random", "cluster")]
    return [
        pair[0],
        _diagnosed(pair[1], workspace.root, 0.985, [LENGTH, WEIGHTS]),
        _diagnosed(pair[2], workspace.root, 0.999, [LENGTH]),
    ]


def _page(points: list[Point], out: Path) -> str:
    out.mkdir()
    reporting.write_report(points, title=Title("demo"), out=out)
    return (out / "report.html").read_text()


def test_warning_of_some_subsets_names_them_and_one_of_all_stands_alone(points):
    found = diagnoses.diagnoses(collect(points))
    assert diagnoses.warnings(found) == [LENGTH, f"random: {WEIGHTS}"]


def test_page_and_summary_show_warnings_numbers_terms_and_examples(points, tmp_path):
    page = _page(points, tmp_path / "out")
    section = page[page.index("<h2>Diagnostics</h2>") : page.index("<h2>Training</h2>")]
    words = re.sub(r"<[^>]+>", " ", section)
    for text in (WEIGHTS, "0.9850", "0.885", "267", "p = 0.046", "328 of 400 rows"):
        assert text in words, text
    assert "list, sort, &lt;b&gt;, key, order" in words
    assert "Sort, please" in words
    assert "<script>" not in page
    assert WEIGHTS in (tmp_path / "out" / "summary.md").read_text()


def test_page_draws_the_subset_of_the_method_itself(points, tmp_path):
    page = _page(points, tmp_path / "out")
    assert "cluster map" in page
    assert "random map" not in page
    assert (tmp_path / "out" / "figures" / "diagnose-map.svg").is_file()


def test_subset_that_trainings_share_has_one_row(points, workspace):
    again = workspace.point("cluster", axes={"train.learning_rate": 0.1})
    shared = dataclasses.replace(again, diagnose=points[2].diagnose)
    table = diagnoses.subsets_table(diagnoses.diagnoses(collect([*points, shared])))
    assert [row[0].text for row in table.rows] == ["random", "cluster"]


def test_point_takes_the_leaf_of_diagnose_from_its_roles(points):
    described = {
        "strategy": "cluster",
        "ratio": 0.5,
        "seed": 0,
        "axes": {},
        "leaves": {"select": str(points[2].select), "diagnose": "some/leaf"},
    }
    assert reporting.point_of(described).diagnose == Path("some/leaf")


def test_run_without_diagnostics_has_no_such_section(workspace, tmp_path):
    page = _page([workspace.point("cluster")], tmp_path / "out")
    assert "Diagnostics" not in page
    assert "worker-cosine" not in page


def test_cosine_of_workers_is_drawn_where_it_was_measured(workspace, tmp_path):
    point = workspace.point("cluster")
    assert point.train is not None
    log = point.train / "train_log.jsonl"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    for entry in entries[::3]:
        entry |= {"worker_cosine": 0.4, "workers_without_gradient": 0}
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    page = _page([point], tmp_path / "out")
    assert "Cosine of the workers" in page
    found = collect([point]).loss["worker_cosine"]
    assert found.count() == len(entries[::3])
    assert found.max() == 0.4
