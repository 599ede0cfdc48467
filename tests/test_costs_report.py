"""What a report says of costs: which leaves a method pays for, sums, passes in theory, figures."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cluster_sft.report import bars, cost_tables, costs, drawing, studies
from cluster_sft.report.complexity import complexity
from cluster_sft.report.points import varying
from cluster_sft.report.results import Results, collect
from report_leaves import Workspace

N = 1200


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "results" / "demo")


def _methods(workspace: Workspace, *strategies: str) -> Results:
    return collect([workspace.point(s, scored=True) for s in strategies])


def test_method_pays_for_what_its_rows_batches_and_weights_rest_on(workspace):
    points = [
        workspace.point(s, scored=True)
        for s in ("full", "random", "uniform", "cluster", "ifd", "less", "s2l", "k-center")
    ]
    assert {p.strategy: list(costs.selection_leaves(p)) for p in points} == {
        "full": ["select"],
        "random": ["select"],
        "uniform": ["embed", "cluster", "select"],
        "cluster": ["embed", "cluster", "select"],
        "ifd": ["ifd", "select"],
        "less": ["less-warmup", "less-gradients", "less", "select"],
        "s2l": ["s2l-proxy", "s2l-trajectories", "s2l", "select"],
        "k-center": ["embed", "k-center", "select"],
    }


def test_selection_and_training_add_up_to_the_total(workspace):
    (bill,) = costs.bills(_methods(workspace, "less"))
    selected, training, whole = bill.selected, bill.training, bill.whole
    passes = N * (0.2 + 4 + 0.1)
    assert selected.forward_passes == selected.backward_passes == pytest.approx(passes)
    assert training.forward_passes == training.backward_passes == 288
    assert whole.forward_passes == pytest.approx(passes + 288)
    assert whole.seconds == pytest.approx(selected.seconds + training.seconds)
    assert whole.tokens == pytest.approx(selected.tokens + training.tokens)
    assert whole.bytes_stored == selected.bytes_stored + training.bytes_stored
    assert whole.peak_memory_bytes == 3e9


def test_cost_of_selection_is_that_of_its_steps(workspace):
    selection, _ = cost_tables.cost_blocks(_methods(workspace, "cluster"))
    assert selection.table.heads[5] == "time"
    # 30 s of embed, 2 of cluster, half a second of select.
    assert selection.table.rows[0][5].text == "32 s"


def test_costs_are_averaged_over_seeds(workspace):
    points = [workspace.point("random", seed=i, scored=True) for i in (0, 2)]
    (bill,) = costs.bills(collect(points))
    assert bill.training.tokens == int(288 * 85.1) + 1


def test_selection_that_ratios_share_is_one_row(workspace):
    points = [
        workspace.point(s, ratio=r, scored=True) for s in ("cluster", "ifd") for r in (1, 0.5)
    ]
    selection, whole = cost_tables.cost_blocks(collect(points))
    assert [row[0].text for row in selection.table.rows] == ["cluster", "ifd"]
    assert [row[0].text for row in whole.table.rows] == ["cluster", "cluster", "ifd", "ifd"]


def test_costs_csv_has_every_step_and_the_sums(workspace):
    frame = cost_tables.cost_frame(_methods(workspace, "cluster", "s2l"))
    mine = frame.filter(frame["strategy"] == "s2l")
    assert mine.select("phase", "step").rows() == [
        *[("selection", s) for s in ("s2l-proxy", "s2l-trajectories", "s2l", "select", "all")],
        ("training", "all"),
        ("total", "all"),
    ]
    parts = mine["forward_passes"].to_list()
    assert parts[4] == pytest.approx(sum(parts[:4]))
    assert parts[6] == pytest.approx(parts[4] + parts[5])


def test_passes_a_row_stand_beside_theory(workspace):
    block = complexity(_methods(workspace, "random", "cluster", "ifd", "less", "s2l"))
    assert block is not None
    found = {(r[0].text, r[1].text): [c.text for c in r[2:7]] for r in block.table.rows}
    assert found["cluster", "embed"] == ["F", "1", "1", "0", "0"]
    assert found["ifd", "ifd"] == ["2 F", "2", "2", "0", "0"]
    assert found["less", "less-warmup"] == ["s E (F + B)", "0.2", "0.2", "0.2", "0.2"]
    assert found["less", "less-gradients"] == ["E (F + B)", "4", "4", "4", "4"]
    assert found["s2l", "s2l-trajectories"] == ["T F, proxy", "12", "12", "0", "0"]
    assert not any(strategy == "random" for strategy, _ in found)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (1.5e9, "1.5 GB")]
)
def test_sizes_read_with_three_digits(size, text):
    assert cost_tables.show_bytes(size) == text


def _words(svg: str) -> list[str]:
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()).strip() for node in found]


def test_figure_of_costs_names_groups_steps_and_totals(workspace):
    results = _methods(workspace, "full", "cluster", "less")
    with drawing.style():
        words = _words(bars.draw_costs(costs.bills(results), varying(results.groups)))
    assert {"full", "cluster", "less", "embed", "less-gradients", "train"} <= set(words)
    assert "3.8 min" in words  # full: training, and a moment of selection


def test_axis_of_words_has_bars_and_one_of_numbers_a_curve(workspace):
    points = [
        workspace.point("cluster", ratio=r, axes={"train.weights": w}, seed=i)
        for r in (0.5, 1.0)
        for w in ("cluster", "none")
        for i in (0, 1)
    ]
    points += [workspace.point("random", ratio=r, axes={"train.weights": "none"}) for r in (0.5, 1)]
    with drawing.style():
        assert set(studies.draw_all(collect(points))) == {"bars-train.weights"}
        svg = studies.draw_all(collect(points))["bars-train.weights"]
    words = _words(svg)
    assert {"cluster, weights cluster", "cluster, weights none", "r 0.5", "r 1.0"} <= set(words)
    with drawing.style():
        plain = [workspace.point("uniform", ratio=r) for r in (0.5, 1.0)]
        assert set(studies.draw_all(collect(plain))) == {"study-ratio"}


def test_configurations_stand_side_by_side_where_nothing_else_varies(tmp_path):
    points = []
    for name in ("small", "large"):
        own = Workspace(tmp_path / "results" / name)
        points += [own.point(s, axes={"configuration": name}) for s in ("random", "cluster")]
    with drawing.style():
        drawn = studies.draw_all(collect(points))
    assert set(drawn) == {"bars-configuration"}
    assert {"small", "large", "random", "cluster"} <= set(_words(drawn["bars-configuration"]))


def test_bars_of_shares_stand_on_zero(workspace):
    points = [workspace.point("cluster", axes={"train.weights": w}) for w in ("cluster", "none")]
    with drawing.style():
        svg = studies.draw_all(collect(points))["bars-train.weights"]
    assert _words(svg).count("0") == 4  # three benchmarks and their average, not the loss
    assert re.search(r"0\.5[0-9]+", " ".join(_words(svg)))
