"""The report stage: what it reads from leaves and what it writes."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cluster_sft import reporting
from cluster_sft.errors import UserError
from cluster_sft.report import overview
from cluster_sft.report.html import Title
from cluster_sft.report.points import CONTRACT, METRICS, Point
from cluster_sft.report.results import collect
from report_leaves import Workspace

NLL, BASE_PASS, _, ACCURACY = METRICS


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "results" / "demo")


def _written(points: list[Point], out: Path, study: str | None = None) -> Path:
    out.mkdir(parents=True)
    reporting.write_report(points, title=Title("demo", study), out=out)
    return out


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on base, cluster and random, everything run."""
    root = tmp_path_factory.mktemp("usual")
    workspace = Workspace(root / "results" / "demo")
    return _written([workspace.point(s) for s in ("base", "cluster", "random")], root / "out")


def _summary(leaf: Path) -> list[dict[str, str]]:
    with (leaf / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def test_summary_has_the_contract_columns_first_and_one_base_row(usual):
    rows = _summary(usual)
    assert tuple(rows[0])[: len(CONTRACT)] == CONTRACT
    assert [row["strategy"] for row in rows] == ["base", "cluster", "random"]
    base, cluster, _ = rows
    assert base["rows"] == base["train_tokens"] == base["ratio"] == base["seed"] == ""
    assert float(base["heldout_nll"]) == pytest.approx(0.677, abs=0.01)
    assert (cluster["ratio"], cluster["seed"], cluster["rows"]) == ("0.5", "0", "288")
    assert float(cluster["data_share"]) == 288 / 1200
    assert cluster["lm_eval_n"] == "100"
    assert float(cluster["evalplus_base_stderr"]) == pytest.approx(math.sqrt(0.5 * 0.5 / 8))


def test_suite_not_run_leaves_its_columns_empty_and_the_page_says_why(workspace, tmp_path):
    skip = ("evalplus-small",)
    points = [workspace.point(s, skip=skip) for s in ("base", "cluster", "random")]
    out = _written(points, tmp_path / "out")
    assert all(row["evalplus_base_pass1"] == row["evalplus_n"] == "" for row in _summary(out))
    for name in ("report.html", "summary.md"):
        text = (out / name).read_text()
        assert "evalplus-small" in text
        assert "evaluate.allow_code_execution is false" in text


def test_several_suites_of_a_kind_are_averaged_and_kept_apart(workspace):
    suites = ("stdlib-mcq", "medqa")
    results = collect(
        [workspace.point("base", suites=suites), workspace.point("random", suites=suites)]
    )
    row = results.summary.row(0, named=True)
    single = math.sqrt(0.26 * 0.74 / 100)
    assert row["lm_eval_acc"] == pytest.approx(0.26)
    assert row["lm_eval_stderr"] == pytest.approx(single / math.sqrt(2))
    assert row["lm_eval_n"] == 200
    assert row["medqa_lm_eval_acc"] == row["stdlib-mcq_lm_eval_acc"] == pytest.approx(0.26)


def test_mean_over_suites_is_empty_where_one_of_them_did_not_run(workspace):
    suites = ("stdlib-mcq", "medqa")
    points = [
        workspace.point("base", suites=suites),
        workspace.point("random", suites=suites, skip=("medqa",)),
    ]
    summary = collect(points).summary
    assert summary["lm_eval_acc"].to_list() == [pytest.approx(0.26), None]
    assert summary["stdlib-mcq_lm_eval_acc"].to_list() == [pytest.approx(0.26), pytest.approx(0.30)]


def test_rows_on_the_way_add_up_to_the_source(workspace):
    points = [workspace.point(s) for s in ("base", "cluster", "random")]
    steps = overview.way(collect(points), overview.clusterings(points))
    left = steps[0].rows - sum(step.rows for step in steps if step.kind == "dropped")
    named = {step.name: step.rows for step in steps}
    assert left == named["training set"] == 1200
    assert named["exact duplicate"] == 61
    assert named["balanced clusters, r = 1"] == 4 * 143
    assert named["subset: cluster"] == named["subset: random"] == 288


def test_same_leaves_give_the_same_bytes(workspace, tmp_path):
    points = [workspace.point(s) for s in ("base", "cluster", "random")]
    one, two = (_written(points, tmp_path / name) for name in ("one", "two"))
    names = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert len(names) >= 10
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


class _References(HTMLParser):
    """Collects everything that a page would fetch, its ids, and its tag balance."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.scripts += tag == "script"
        self.ids += [v for k, v in attrs if k == "id" and v]
        found = [values.get(k) for k in ("src", "href", "xlink:href", "data")]
        self.fetched += [v for v in found if v and not v.startswith("#")]


def test_page_needs_nothing_from_elsewhere_and_repeats_no_id(usual):
    text = (usual / "report.html").read_text()
    parser = _References()
    parser.feed(text)
    assert parser.fetched == []
    assert parser.scripts == 0
    assert len(parser.ids) == len(set(parser.ids))
    assert not re.search(r"@import|url\((?!#)|https?://", text)
    assert text.count("<svg") == 5


def test_page_escapes_text_from_leaves(workspace, tmp_path):
    point = workspace.point("base", skip=("stdlib-mcq",))
    path = point.evaluate["stdlib-mcq"] / "scores.json"
    scores = json.loads(path.read_text()) | {"reason": "<script>alert(1)</script>"}
    path.write_text(json.dumps(scores))
    text = (_written([point], tmp_path / "out") / "report.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_provenance_is_the_same_wherever_the_checkout_lies(workspace, tmp_path):
    sources = overview.sources([workspace.point("cluster")])
    assert {s.stage for s in sources} == {"prepare", "cluster", "select", "train", "evaluate"}
    assert not any(str(tmp_path) in s.leaf for s in sources)
    assert all(len(s.key) == 64 for s in sources)


def test_metrics_are_nested_by_strategy_and_by_what_varies(workspace, tmp_path):
    points = [workspace.point("base"), *(workspace.point("cluster", ratio=r) for r in (0.5, 1.0))]
    found = json.loads((_written(points, tmp_path / "out") / "metrics.json").read_text())
    assert set(found) == {"base", "cluster_ratio-0.5", "cluster_ratio-1.0"}
    assert found["cluster_ratio-1.0"]["rows"] == 572
    assert "rows" not in found["base"]


def test_study_has_a_row_a_point_and_a_figure_an_axis(workspace, tmp_path):
    points = [workspace.point("base"), workspace.point("full")]
    for strategy in ("cluster", "random"):
        for k in (2, 4):
            sizes = (1200 - 300 * (k - 1),) + (300,) * (k - 1)
            for seed in (0, 1):
                axes = {"cluster.k": k}
                points.append(workspace.point(strategy, sizes=sizes, axes=axes, seed=seed))
    out = _written(points, tmp_path / "studies" / "clusters", study="clusters")
    rows = _summary(out)
    assert len(rows) == len(points)
    assert [row["cluster.k"] for row in rows[2:]] == ["2", "2", "4", "4"] * 2
    assert (out / "figures" / "study-cluster.k.svg").is_file()
    assert not (out / "figures" / "study-ratio.svg").exists()
    with (out / "means.csv").open() as file:
        means = list(csv.DictReader(file))
    assert [(row["strategy"], row["seeds"]) for row in means] == [
        *(("base", "1"), ("full", "1")),
        *[("cluster", "2")] * 2,
        *[("random", "2")] * 2,
    ]


def test_plots_hold_a_curve_a_group_with_means_over_seeds(workspace, tmp_path):
    points = [workspace.point("base"), *(workspace.point("random", seed=i) for i in (0, 1))]
    plots = _written(points, tmp_path / "out") / "plots"
    assert [p.name for p in (plots / "loss").iterdir()] == ["random.csv"]
    logs = [
        [json.loads(line)["loss"] for line in (p.train / "train_log.jsonl").open()]
        for p in points[1:]
        if p.train
    ]
    with (plots / "loss" / "random.csv").open() as file:
        means = [float(row["loss"]) for row in csv.DictReader(file)]
    assert means == pytest.approx([sum(pair) / 2 for pair in zip(*logs, strict=True)])
    with (plots / "scores.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["base", "random"]


def test_terminal_digest_has_a_line_a_group_and_names_the_page(usual):
    lines = reporting.digest_of(usual).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["base", "cluster", "random"]
    assert lines[-1] == f"Report: {usual / 'report.html'}"


@dataclass(frozen=True)
class _Params:
    name: str
    study: str | None
    points: list[dict[str, Any]]


def _described(point: Point) -> dict[str, Any]:
    roles = {s: getattr(point, s) for s in ("prepare", "cluster", "select", "train")}
    roles |= {f"evaluate:{s}": leaf for s, leaf in point.evaluate.items()}
    leaves = {role: str(leaf) for role, leaf in roles.items() if leaf}
    return {"strategy": point.strategy, "ratio": 0.5, "seed": 0, "axes": {}, "leaves": leaves}


def test_run_reads_points_as_the_plan_describes_them(workspace, tmp_path):
    strategies = ("base", "full", "cluster")
    described = [_described(workspace.point(s)) for s in strategies]
    params = _Params("demo", None, described)
    (tmp_path / "out").mkdir()
    reporting.run(params, out=tmp_path / "out", scratch=tmp_path, launch=None)  # type: ignore[arg-type]
    rows = _summary(tmp_path / "out")
    assert [row["ratio"] for row in rows] == ["", "", "0.5"]
    assert [row["seed"] for row in rows] == ["", "0", "0"]


def test_report_without_points_is_refused():
    with pytest.raises(UserError, match="at least one point"):
        collect([])


def test_damaged_training_log_is_named(workspace):
    point = workspace.point("random")
    assert point.train is not None
    (point.train / "train_log.jsonl").write_text('{"step": 1, "loss"\n')
    with pytest.raises(UserError, match=r"train_log\.jsonl: missing or damaged"):
        collect([point])
