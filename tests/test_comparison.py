"""What a report concludes: estimates, differences with their errors, verdicts and warnings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy import stats

from cluster_sft.artifacts import read_json, write_json, write_table
from cluster_sft.report import caveats, comparison, headline, overview, publication, tables
from cluster_sft.report.points import METRICS
from cluster_sft.report.results import collect
from report_leaves import Workspace

NLL, BASE_PASS, _, ACCURACY = METRICS


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "results" / "demo")


def test_seeds_are_averaged_with_their_standard_deviation(workspace):
    points = [workspace.point("random", seed=i, shift=0.01 * i) for i in range(3)]
    results = collect(points)
    (group,) = results.groups
    values = results.summary["heldout_nll"].to_list()
    estimate = group.estimates["heldout_nll"]
    assert estimate.value == pytest.approx(sum(values) / 3)
    deviations = sum((v - estimate.value) ** 2 for v in values)
    assert estimate.sd == pytest.approx(math.sqrt(deviations / 2))
    table = tables.seeds_table(results)
    assert table is not None
    assert table.rows[0][1].text == "3"


def test_paired_comparison_finds_what_separate_errors_hide(workspace):
    results = collect([workspace.point("cluster"), workspace.point("random")])
    found = {d.metric.name: d for d in comparison.against(results, "cluster", "random")}
    nll = found["heldout_nll"]
    separate = comparison.Z * math.hypot(
        *(g.estimates["heldout_nll"].stderr or 0.0 for g in results.groups)
    )
    assert nll.paired
    assert nll.outcome == "worse"
    assert nll.margin is not None
    assert nll.margin < nll.value < separate
    assert found["evalplus_base_pass1"].outcome == "within error"


def test_paired_error_equals_the_bootstrap_over_rows(workspace):
    results = collect([workspace.point("cluster"), workspace.point("random")])
    (nll,) = [d for d in comparison.against(results, "cluster", "random") if d.metric == NLL]
    a, b = (results.items["heldout_nll"][i] for i in (0, 1))
    tokens, gap = a["weight"].to_numpy(), (a["total"] - b["total"]).to_numpy()
    draws = np.random.default_rng(0).integers(0, len(gap), (4000, len(gap)))
    spread = (gap[draws].sum(1) / tokens[draws].sum(1)).std()
    assert nll.margin == pytest.approx(comparison.Z * spread, rel=0.06)


def test_paired_shares_that_barely_differ_still_have_an_error(workspace):
    results = collect([workspace.point("cluster"), workspace.point("random")])
    (base,) = [d for d in comparison.against(results, "cluster", "random") if d.metric == BASE_PASS]
    assert base.paired
    assert base.value == pytest.approx(1 / 8)  # one problem more, none less
    assert base.margin == pytest.approx(comparison.Z * math.sqrt(1 + 1 - 1 / 10) / 10)


def test_items_that_do_not_give_the_reported_score_are_not_paired(workspace):
    points = [workspace.point("cluster"), workspace.point("random")]
    path = points[0].evaluate["heldout"] / "samples.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    found = comparison.against(collect(points), "cluster", "random")
    assert [d.paired for d in found if d.metric == NLL] == [False]


def test_perfect_score_on_few_items_does_not_beat_a_near_perfect_one(workspace):
    results = collect([workspace.point("cluster"), workspace.point("random")])
    perfect = comparison.Estimate(1.0, 0.0, 8, None)
    close = comparison.Estimate(7 / 8, math.sqrt(7 / 8 / 8 / 8), 8, None)
    groups = [
        comparison.Group(s, 0.5, {}, (i,), {}, {BASE_PASS.name: e})
        for i, (s, e) in enumerate((("cluster", perfect), ("random", close)))
    ]
    difference = comparison.compare(results, groups[0], groups[1], BASE_PASS)
    assert difference is not None
    assert difference.outcome == "within error"


@pytest.mark.parametrize(
    ("correct", "low", "high"), [(0, 0.0, 0.3244), (8, 0.6756, 1.0), (4, 0.2152, 0.7848)]
)
def test_interval_of_a_share_is_wilsons(correct, low, high):
    p = correct / 8
    estimate = comparison.Estimate(p, math.sqrt(p * (1 - p) / 8), 8, None)
    group = comparison.Group("cluster", 0.5, {}, (0,), {}, {BASE_PASS.name: estimate})
    assert comparison.interval(BASE_PASS, group) == pytest.approx((low, high), abs=1e-4)


def test_interval_over_two_seeds_that_disagree_is_wider_than_a_normal_one(workspace):
    points = [workspace.point("random", seed=i, shift=0.1 * i) for i in range(2)]
    (group,) = collect(points).groups
    estimate = group.estimates[NLL.name]
    low, high = comparison.interval(NLL, group) or (0.0, 0.0)
    assert estimate.stderr is not None and estimate.sd is not None
    freedom = estimate.stderr**4 / (estimate.sd**2 / 2) ** 2
    wide = stats.t.ppf(0.975, freedom) * estimate.stderr
    assert (low, high) == pytest.approx((estimate.value - wide, estimate.value + wide))
    assert wide > 2 * comparison.Z * estimate.stderr


def test_best_is_marked_only_where_the_difference_exceeds_its_error(workspace):
    results = collect([workspace.point(s) for s in ("base", "full", "cluster", "random")])
    assert comparison.best(results, NLL) == {3}
    assert comparison.best(results, ACCURACY) == set()
    marked = [[c.text for c in row if c.best] for row in tables.results_table(results).rows]
    assert [len(texts) for texts in marked] == [0, 0, 0, 1]


def test_headline_says_plainly_that_random_is_better(workspace):
    points = [workspace.point(s) for s in ("base", "cluster", "random")]
    results = collect(points)
    assert headline.compared(results).startswith("Cluster and random, each trained on 288 rows")
    verdict = headline.verdicts(results)[0]
    assert verdict.outcome == "worse"
    assert verdict.text.startswith("Random is better than cluster by 0.0")
    assert any("clustering did not pay" in note for note in headline.notes(results))


def test_random_ahead_in_few_of_many_comparisons_is_no_verdict(workspace):
    points = []
    for k, shift in ((2, 0.0), (3, -0.017), (4, -0.017)):
        sizes = (1200 - 300 * (k - 1),) + (300,) * (k - 1)
        for strategy in ("cluster", "random"):
            own = shift if strategy == "cluster" else 0.0
            axes = {"cluster.k": k}
            points.append(workspace.point(strategy, sizes=sizes, axes=axes, shift=own))
    verdict = headline.verdicts(collect(points))[0]
    assert "better than random in 0, worse in 1, within the error in 2" in verdict.text
    assert verdict.outcome == "mixed"
    assert not any("did not pay" in note for note in headline.notes(collect(points)))


def test_training_that_does_not_help_is_said(workspace):
    results = collect([workspace.point("base"), workspace.point("random", shift=0.3)])
    assert any("did not lower" in note for note in headline.notes(results))


def test_warnings_name_low_usage_remainder_displaced_rows_and_few_items(workspace):
    sizes = (600, 400, 170, 30)
    points = [workspace.point(s, sizes=sizes, batch=18) for s in ("cluster", "random")]
    results = collect(points)
    found = " ".join(caveats.warnings(results, overview.clusterings(points)))
    assert "only 10.0% of the data" in found
    assert "K = 4 does not divide the global batch of 18 rows" in found
    assert "23 of 1,200 rows" in found
    assert "evalplus-small has 8 items: one item moves its score by 12.5 points" in found


def test_displaced_rows_of_many_clusterings_are_one_warning(workspace):
    points = [workspace.point("cluster", alpha=a, axes={"cluster.alpha": a}) for a in (1.5, 2.0)]
    found = caveats.warnings(collect(points), overview.clusterings(points))
    assert [w for w in found if "nearest cluster" in w] == [
        "The capacity kept rows (1.9% to 1.9% in 2 clusterings) out of their nearest cluster. They "
        "lie far from their own centroid, so peripheral ranking favours them."
    ]


def test_usual_clustering_gives_no_warning_on_usage_or_batch(workspace):
    points = [workspace.point(s) for s in ("cluster", "random")]
    found = " ".join(caveats.warnings(collect(points), overview.clusterings(points)))
    assert "balanced selection can use only" not in found
    assert "does not divide" not in found


def test_token_gap_to_random_is_told_for_every_value_of_an_axis_that_random_ignores(workspace):
    points = [workspace.point("random")]
    for ranking, factor in (("peripheral", 1.5), ("core", 1.0)):
        point = workspace.point("cluster", axes={"select.ranking": ranking})
        assert point.train is not None
        path = point.train / "summary.json"
        facts = read_json(path)
        write_json(path, {**facts, "train_tokens": facts["train_tokens"] * factor})
        points.append(point)
    found = [w for w in caveats.warnings(collect(points), []) if "equal compute" in w]
    assert found == [
        "cluster, ranking peripheral trained on 63% more tokens than random with the same number "
        "of rows: equal rows are not equal compute."
    ]


def test_rows_above_one_that_ifd_had_to_take_are_told_once_a_subset(workspace):
    points = [workspace.point("ifd", ratio=r, axes={"train.epochs": 1}) for r in (1, 0.5)]
    points.append(replace(points[0], axes={"train.epochs": 2}))
    assert points[0].select is not None
    path = points[0].select / "summary.json"
    write_json(path, {**read_json(path), "above_one": 12})
    found = [w for w in caveats.warnings(collect(points), []) if "above 1" in w]
    assert [w.split(" have")[0] for w in found] == ["ifd, r 1: 12 of 572 rows"]


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (["held-00003", "held-00007", "x"], ["less was shown 2 of 200 held-out rows"]),
        (["00003", "x"], ["1 of 2 target examples of less are rows of the data to select from"]),
        (["x"], []),
    ],
)
def test_rows_of_the_data_among_the_targets_of_less_are_told(workspace, ids, told):
    point = workspace.point("less", scored=True)
    frame = pl.DataFrame({"id": ids, "subtask": None, "reason": None})
    write_table(point.scores["less"] / "targets", "gradients.parquet", frame)
    found = [w for w in caveats.warnings(collect([point]), []) if "targets" in w]
    assert [w.split(" as ")[0] for w in found] == told


def test_intervals_of_one_draw_of_the_rows_say_so(workspace):
    points = [workspace.point(s, seed=i) for s in ("cluster", "random") for i in range(2)]
    results = collect(points)
    (block,) = publication.loss_blocks(results)
    assert comparison.drawn_once(results) and comparison.ONE_DRAW in block.note
    points[0] = replace(points[0], select=workspace.point("cluster", ratio=1.0).select)
    results = collect(points)
    (block,) = publication.loss_blocks(results)
    assert not comparison.drawn_once(results) and comparison.ONE_DRAW not in block.note
