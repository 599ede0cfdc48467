"""Tables of a study: means over seeds, the average, bold values, losses against random, files."""

from __future__ import annotations

import csv
import math
import shutil
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from cluster_sft import reporting
from cluster_sft.artifacts import read_json, write_json
from cluster_sft.report import benchmarks, comparison, datasets, exports, latex, publication
from cluster_sft.report.benchmarks import AVERAGE
from cluster_sft.report.html import Title
from cluster_sft.report.points import Point
from cluster_sft.report.results import Results, collect
from cluster_sft.report.tables import Cell, Table, markdown
from report_leaves import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "results" / "demo")


def _seeds(workspace: Workspace, strategy: str, n: int, **settings) -> list[Point]:
    return [workspace.point(strategy, seed=i, shift=0.01 * i, **settings) for i in range(n)]


def _column(table: Table, head: str) -> list[Cell]:
    place = next(i for i, text in enumerate(table.heads) if text.startswith(head))
    return [row[place] for row in table.rows]


def _scores(results: Results) -> Table:
    return publication.score_blocks(results)[0].table


def test_row_is_the_mean_over_seeds_with_their_sample_deviation(workspace):
    results = collect(_seeds(workspace, "random", 3))
    values = results.summary["heldout_nll"].to_list()
    (cell,) = _column(_scores(results), "Held-out NLL")
    assert cell.text == f"{statistics.fmean(values):.3f} \u00b1 {statistics.stdev(values):.3f}"
    assert [c.text for c in _column(_scores(results), "seeds")] == ["3"]
    row = publication.frame(results).row(0, named=True)
    assert row["heldout_heldout_nll_sd"] == pytest.approx(statistics.stdev(values))


def test_average_is_over_benchmarks_and_leaves_the_loss_out(workspace):
    results = collect([workspace.point("random")])
    (cell,) = _column(_scores(results), "Average")
    assert cell.text == f"{100 * (0.375 + 0.25 + 0.30) / 3:.1f}"


def test_average_error_adds_suites_and_takes_benchmarks_of_one_as_the_same_answers(workspace):
    detailed = benchmarks.by_benchmark(collect([workspace.point("random")]))
    estimate = detailed.groups[0].estimates[AVERAGE.name]
    base, plus, questions = (
        math.sqrt(p * (1 - p) / n) for p, n in ((0.375, 8), (0.25, 8), (0.3, 100))
    )
    assert estimate.stderr == pytest.approx(math.hypot(base + plus, questions) / 3)


def test_average_items_add_up_to_the_average(workspace):
    suites = ("evalplus-small", "evalplus-other")
    detailed = benchmarks.by_benchmark(collect([workspace.point("cluster", suites=suites)]))
    items = detailed.items[AVERAGE.name][0]
    assert items["weight"].sum() == pytest.approx(1.0)
    assert items["total"].sum() == pytest.approx(detailed.groups[0].estimates[AVERAGE.name].value)
    assert len(items) == 2 * 8  # base and plus grade one answer


def test_point_that_lacks_a_benchmark_has_no_average(workspace):
    points = [workspace.point("random"), workspace.point("cluster", skip=("stdlib-mcq",))]
    words = [cell.text for cell in _column(_scores(collect(points)), "Average")]
    assert words[1] == "\u2013"
    assert words[0] != "\u2013"


def test_bold_needs_a_lead_over_every_row_of_the_same_budget(workspace):
    points = [workspace.point("full")]
    for ranking, shift in (("peripheral", 0.0), ("random", 0.001), ("core", 0.05)):
        points.append(workspace.point("cluster", axes={"select.ranking": ranking}, shift=shift))
    cells = _column(_scores(collect(points)), "Held-out NLL")
    assert [cell.best for cell in cells] == [False] * 4  # two are within the error
    points[2] = workspace.point("cluster", axes={"select.ranking": "other"}, shift=0.05)
    cells = _column(_scores(collect(points)), "Held-out NLL")
    assert [cell.best for cell in cells] == [False, True, False, False]


def test_rows_of_another_budget_do_not_compete(workspace):
    points = [workspace.point("random", ratio=r, shift=-0.1 * r) for r in (0.5, 1.0)]
    points += [workspace.point("cluster", ratio=r) for r in (0.5, 1.0)]
    cells = _column(_scores(collect(points)), "Held-out NLL")
    assert [cell.best for cell in cells] == [True, True, False, False]


def test_interval_over_two_seeds_is_students(workspace):
    points = [*_seeds(workspace, "cluster", 2), *_seeds(workspace, "random", 2)]
    results = benchmarks.by_benchmark(collect(points))
    (loss,) = [m for m in benchmarks.benchmarks(results) if not m.is_share]
    (difference,) = comparison.differences(results, "random", metrics=[loss])
    found = [g.estimates[loss.name].sd or 0.0 for g in (difference.group, difference.other)]
    seeds = [sd**2 / 2 for sd in found]
    items = [results.items[loss.name][p] for p in range(4)]
    gap = (items[0]["total"] + items[1]["total"] - items[2]["total"] - items[3]["total"]) / 2
    weight = items[0]["weight"]
    residual = gap - gap.sum() / weight.sum() * weight
    n = len(gap)
    variance = n / (n - 1) * (residual**2).sum() / weight.sum() ** 2 + sum(seeds)
    freedom = variance**2 / sum(v**2 for v in seeds)
    assert difference.margin == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(variance))
    assert freedom < 5


def test_loss_table_compares_at_equal_ratio_and_full_with_random_of_each(workspace):
    points = [workspace.point("full")]
    points += [workspace.point(s, ratio=r) for s in ("random", "cluster") for r in (0.5, 1.0)]
    (block,) = publication.loss_blocks(collect(points))
    assert "brackets" in block.note
    assert [(r[0].text, r[1].text) for r in block.table.rows] == [
        ("full", "(0.5)"),
        ("full", "(1.0)"),
        ("cluster", "0.5"),
        ("cluster", "1.0"),
    ]
    own, control, gap = (_column(block.table, h) for h in ("Held-out", "random", "difference"))
    for a, b, d in zip(own, control, gap, strict=True):
        value = float(d.text.replace("\u2212", "-"))
        assert value == pytest.approx(float(a.text) - float(b.text), abs=1.1e-3)


def test_random_stands_for_every_value_of_an_axis_it_does_not_vary_on(workspace):
    points = [workspace.point("random", axes={"train.weights": "none"})]
    points += [workspace.point("cluster", axes={"train.weights": w}) for w in ("cluster", "none")]
    (block,) = publication.loss_blocks(collect(points))
    assert [row[1].text for row in block.table.rows] == ["cluster", "none"]
    assert "brackets" not in block.note


def _two(tmp_path: Path) -> list[Point]:
    points = []
    for name, suites in (("code", ("heldout", "evalplus-x")), ("med", ("heldout", "medqa"))):
        workspace = Workspace(tmp_path / "results" / name)
        for strategy in ("base", "random", "cluster"):
            axes = {"configuration": name}
            points.append(workspace.point(strategy, suites=suites, axes=axes))
    return points


def test_configurations_have_a_table_each_with_their_own_benchmarks(tmp_path):
    code, med = publication.score_blocks(collect(_two(tmp_path)))
    assert (code.title, med.title) == ("Scores, code", "Scores, med")
    assert any("evalplus-x" in head for head in code.table.heads)
    assert any("MedQA" in head for head in med.table.heads)
    assert not any("MedQA" in head for head in code.table.heads)
    assert [row[0].text for row in med.table.rows] == ["base", "random", "cluster"]


def test_configurations_are_never_compared_with_one_another(tmp_path):
    results = collect(_two(tmp_path))
    assert len(publication.loss_blocks(results)) == 2
    for block in publication.loss_blocks(results):
        assert [row[0].text for row in block.table.rows] == ["base", "cluster"]


def test_mean_over_suites_is_of_a_configurations_own_suites(tmp_path):
    summary = collect(_two(tmp_path)).summary
    found = dict(zip(summary["configuration"], summary["lm_eval_acc"], strict=True))
    assert found == {"code": None, "med": pytest.approx(0.29)}


def test_plan_of_several_configurations_labels_each_point(workspace, tmp_path):
    point = workspace.point("random")
    leaves = {"prepare": point.prepare, "cluster": point.cluster, "select": point.select}
    leaves |= {"train": point.train, "score:less-warmup": workspace.step("less", "less-warmup")}
    described = {"strategy": "random", "configuration": "code", "ratio": 0.5, "seed": 0}
    described |= {"axes": {}, "leaves": {k: str(v) for k, v in leaves.items()}}
    assert reporting.point_of(described).axes == {}
    found = reporting.point_of(described, several=True)
    assert found.axes == {"configuration": "code"}
    assert list(found.scores) == ["less-warmup"]


def test_axes_that_a_strategy_ignores_are_dropped_and_auto_is_what_was_taken(workspace):
    point = workspace.point("random")
    roles = ("prepare", "cluster", "select", "train")
    axes = {"select.ranking": "core", "train.weights": "auto", "train.seed": 3}
    described = {"strategy": "random", "ratio": 0.5, "seed": 3, "axes": axes}
    described |= {"leaves": {r: str(getattr(point, r)) for r in roles}}
    assert reporting.point_of(described).axes == {"train.weights": "none"}


def test_data_sets_count_rows_drops_tokens_usage_items_and_seeds(workspace):
    points = [p for r in (1.0, 0.5) for p in _seeds(workspace, "cluster", 2, ratio=r)]
    block = datasets.datasets(collect(points), "demo")
    assert block is not None
    facts = {row[0].text: row[1].text for row in block.table.rows}
    assert facts["source rows"] == "1,508"
    assert facts["dropped"].startswith("108 (61 exact duplicate, 33 ")
    assert (facts["training rows"], facts["tokens"]) == ("1,200", "8,400")
    assert facts["usage at ratio r"] == "47.7% at 1, 24.0% at 0.5"
    assert "stdlib-mcq (100)" in facts["benchmarks (items)"]
    assert facts["seeds"] == "0, 1"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a study with a name that LaTeX must not read as commands."""
    root = tmp_path_factory.mktemp("study")
    workspace = Workspace(root / "results" / "demo")
    points = [workspace.point("base", scored=True)]
    for strategy in ("random", "cluster", "less"):
        points += _seeds(workspace, strategy, 2, scored=True)
    leaf = points[0].evaluate["stdlib-mcq"] / "scores.json"
    write_json(leaf, {**read_json(leaf), "suite": "50%_of $x$ & #1 \\ {~^}"})
    points[0] = replace(
        points[0], evaluate={"50%_of $x$ & #1 \\ {~^}": points[0].evaluate["stdlib-mcq"]}
    )
    out = root / "out"
    out.mkdir()
    reporting.write_report(points, title=Title("demo", "a_b"), out=out)
    return out


def test_every_table_is_written_in_three_forms(study):
    names = (exports.STUDY, exports.COSTS, exports.COMPLEXITY, exports.DATASETS)
    for name in names:
        text = (study / f"{name}.md").read_text()
        assert text.startswith(f"# a_b: {name}\n")
        assert "\\toprule" in (study / f"{name}.tex").read_text()
        with (study / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert rows
        assert None not in rows[0]


def test_study_csv_has_the_interval_of_the_loss(study):
    with (study / "study.csv").open() as file:
        rows = {row["strategy"]: row for row in csv.DictReader(file)}
    low, value, high = (
        float(rows["cluster"][f"heldout_nll_minus_random{end}"]) for end in ("_low", "", "_high")
    )
    assert low < value < high
    assert value == pytest.approx((low + high) / 2)
    assert rows["random"]["heldout_nll_minus_random"] == ""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("50%_of", r"50\%\_of"),
        ("a & b # c", r"a \& b \# c"),
        ("{$x$}", r"\{\$x\$\}"),
        ("back\\slash~^", r"back\textbackslash{}slash\textasciitilde{}\textasciicircum{}"),
        ("\u22120.1 \u00b1 2", r"$-$0.1 $\pm$ 2"),
        ("two\n lines", "two lines"),
        ("\x00bell\x07", "bell"),
    ],
)
def test_text_is_escaped(text, wanted):
    assert latex.escape(text) == wanted


def test_latex_rows_have_a_cell_a_column_and_bold_bests(workspace):
    table = Table(("a", "b"), ((Cell("[x]"), Cell("1", best=True)), (Cell("*y"), Cell("2"))))
    text = latex.tabular(table, caption="c", label="a_b c")
    assert "\\label{tab:a-b-c}" in text
    assert "{}[x] & \\textbf{1} \\\\" in text  # \\[x] would be a length
    assert "{}*y & 2 \\\\" in text
    assert "**1**" in markdown(table)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_latex_compiles(study, tmp_path):
    tables = "".join(path.read_text() for path in sorted(study.glob("*.tex")))
    head = "\\documentclass{article}\\usepackage[T1]{fontenc}\\usepackage{booktabs}"
    (tmp_path / "all.tex").write_text(f"{head}\\begin{{document}}{tables}\\end{{document}}")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:]
    assert (tmp_path / "all.pdf").stat().st_size > 0
