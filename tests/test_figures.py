"""Figures of the report: what they show, and that they read well."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_sft.report import drawing, figures, overview
from cluster_sft.report.html import inline
from cluster_sft.report.results import collect
from report_leaves import Workspace

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "results" / "demo")


def _draw(points: list) -> dict[str, str]:
    results, found = collect(points), overview.clusterings(points)
    return figures.draw(results, clusterings=found, way=overview.way(results, found))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The figures of a run of base, full, cluster and random; full trains for longer."""
    workspace = Workspace(tmp_path_factory.mktemp("usual") / "results" / "demo")
    return _draw([workspace.point(s) for s in ("base", "full", "cluster", "random")])


def _texts(svg: str) -> list[str]:
    return [
        "".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).iter(f"{SVG}text")
    ]


def test_run_draws_rows_clusters_loss_scores_and_costs(usual):
    assert set(usual) == {"rows", "clusters", "loss", "scores", "costs"}


def test_untrained_model_alone_draws_rows_and_scores(workspace):
    assert set(_draw([workspace.point("base")])) == {"rows", "scores"}


def test_clusters_show_sizes_capacity_selection_and_weights(usual):
    words = _texts(usual["clusters"])
    assert {"429", "346", "282", "143", "72", "capacity 450"} <= set(words)
    assert {"1.43", "1.15", "0.94", "0.48"} <= set(words)


def test_every_curve_is_named_at_its_end(usual):
    words = _texts(usual["loss"])
    assert {"cluster", "random", "full"} <= set(words)


def test_axes_carry_units(usual):
    assert any("nats per token" in word for word in _texts(usual["scores"]))
    assert any("nats per token" in word for word in _texts(usual["loss"]))
    assert "Rows" in _texts(usual["rows"])


def test_few_optimizer_steps_are_marked_by_whole_numbers(workspace):
    words = _texts(_draw([workspace.point("cluster", sizes=(30, 24, 20, 12))])["loss"])
    ticks = words[: words.index("Optimizer step")]
    assert ticks
    assert all(tick.isdecimal() for tick in ticks), ticks


def test_metric_that_a_point_lacks_is_said_to_be_not_run(workspace):
    skip = ("evalplus-small",)
    drawn = _draw([workspace.point("base"), workspace.point("cluster", skip=skip)])
    assert _texts(drawn["scores"]).count("not run") == 2


def test_swept_axis_shows_every_strategy_inside_its_frame(workspace):
    points = [workspace.point("base")]
    for k in (2, 4):
        sizes = (1200 - 300 * (k - 1),) + (300,) * (k - 1)
        axes = {"cluster.k": k}
        points += [workspace.point(s, sizes=sizes, axes=axes) for s in ("cluster", "random")]
    svg = _draw(points)["study-cluster.k"]
    assert {"cluster", "random", "base", "Clusters K", "2", "4"} <= set(_texts(svg))
    height = float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[1])  # type: ignore[index]
    drawn = [float(y) for y in re.findall(r"<use [^>]*y=\"(-?[\d.]+)\"", svg)]
    assert len(drawn) > 0
    assert all(0 <= y <= height for y in drawn)


def test_figures_hold_only_the_palette_so_that_the_page_can_turn_dark(usual):
    for name, svg in usual.items():
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= set(drawing.DARK), name
        assert not re.search(r"(fill|stroke): #", inline(svg, name)), name


def test_figures_hold_no_date_and_no_version(usual):
    for svg in usual.values():
        assert "<dc:date>" not in svg
        assert "matplotlib.org" not in svg
        assert "Matplotlib" not in svg


def test_strategy_keeps_its_look_whatever_stands_beside_it():
    alone, beside = drawing.styles(["cluster"]), drawing.styles(["mine", "random", "cluster"])
    assert alone["cluster"] == beside["cluster"]
    assert len(set(beside.values())) == 3


def test_known_strategies_differ_in_colour_and_in_marker():
    colours, markers = zip(*drawing.STYLES.values(), strict=True)
    assert len(set(colours)) == len(set(markers)) == len(drawing.STYLES)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out_from_the_page_by_three_to_one(theme):
    surface = drawing.SURFACE if theme == "light" else drawing.DARK[drawing.SURFACE]
    for light, dark in drawing.DARK.items():
        if light in (drawing.GRID, drawing.SURFACE):
            continue
        high, low = sorted((_luminance(surface), _luminance(light if theme == "light" else dark)))[
            ::-1
        ]
        assert (high + 0.05) / (low + 0.05) >= 3.0, (theme, light)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_labels_keep_their_order_their_distance_and_the_frame(values):
    gap = 0.1
    placed = drawing.spread(values, gap, 0.0, 1.0)
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    moved = [placed[i] for i in order]
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(moved))
    assert min(moved) >= -1e-9
    assert max(moved) <= 1 + 1e-9


def test_labels_apart_already_stay_where_they_are():
    assert drawing.spread([0.9, 0.1, 0.5], 0.1, 0.0, 1.0) == [0.9, 0.1, 0.5]
