"""Selection: budgets on exact decimals, rankings, nesting, the contract of every strategy."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from cluster_sft import artifacts, selection, strategies
from cluster_sft.errors import UserError
from cluster_sft.params import Launch
from cluster_sft.stage_params import SelectParams
from cluster_sft.strategies import Budget, Pool


def make_pool(sizes=(9, 6, 5), seed=0, zero=()):
    rng = np.random.default_rng(seed)
    label_N = rng.permutation(np.repeat(np.arange(len(sizes)), sizes)).astype(np.int32)
    rows = np.arange(len(label_N))
    distance_N = rng.integers(0, 4, len(label_N)).astype(np.float32)
    scores = {
        "score": np.where(rows == 1, np.nan, rng.integers(0, 14, len(label_N)) / 10),
        "source": np.where(rows == 1, -1, rows % 2),
        "group": np.where(rows == 1, -1, rows % 3),
    }
    return Pool(label_N, distance_N, np.isin(rows, zero), scores)


def rule(ranking="peripheral", downsample="random", seed=0):
    return SimpleNamespace(ranking=ranking, downsample=downsample, seed=seed)


def choose(name, pool, ratio=0.5, share=0.0, **settings):
    trimmed = selection.trim(pool, int(pool.label_N.max()) + 1, share)
    budget = selection.budget_of(trimmed, ratio)
    return strategies.get(name).choose(pool, budget, trimmed, rule(**settings)), budget


@pytest.mark.parametrize(
    ("n_min", "ratio", "m"),
    [(5, 0.5, 3), (7, 0.5, 4), (100, 0.285, 29), (200, 0.575, 115), (3, 1, 3)],
)
def test_budget_rounds_half_up_on_the_decimal(n_min, ratio, m):
    assert selection.budget_of([np.arange(n_min)] * 2, ratio) == Budget(k=2, n_min=n_min, m=m)


def test_budget_of_no_row_is_refused_with_the_remedy():
    with pytest.raises(UserError, match=r"select\.ratio.*\(4 rows\), got 0\.1.*raise the ratio"):
        selection.budget_of([np.arange(9), np.arange(4)], 0.1)


def test_trim_drops_the_floor_of_the_farthest_and_rows_without_direction_first():
    pool = Pool(
        np.zeros(5, np.int32),
        np.array([5, 1, 4, 4, 0], np.float32),
        np.array([False, False, False, False, True]),
    )
    assert [selection.trim(pool, 1, s)[0].tolist() for s in (0.0, 0.2, 0.4, 0.6, 0.79)] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3],
        [1, 2, 3],
        [1, 2],
        [1, 2],
    ]


@pytest.mark.parametrize("downsample", ["random", "strategy"])
@pytest.mark.parametrize("ranking", ["peripheral", "core", "random"])
@pytest.mark.parametrize("name", strategies.names())
def test_strategy_keeps_the_contract(name, ranking, downsample):
    pool = make_pool(zero=(3,))
    settings = {"ranking": ranking, "downsample": downsample, "seed": 1}
    chosen, budget = choose(name, pool, **settings)
    again, _ = choose(name, pool, **settings)
    wanted = len(pool.label_N) if name == "full" else budget.rows
    assert len(set(chosen.tolist())) == len(chosen) == wanted
    assert set(chosen.tolist()) <= set(range(len(pool.label_N)))
    assert not strategies.get(name).scored or 1 not in chosen  # the row without a score
    assert chosen.tolist() == again.tolist()


@pytest.mark.parametrize("name", [n for n in strategies.names() if n != "full"])
def test_strategy_declares_truly_what_it_ignores(name):
    pool, ignored = make_pool((90, 60, 50)), set(strategies.get(name).ignores)
    changed = {
        "ranking": {"ranking": "core"},
        "downsample": {"downsample": "strategy"},
        "seed": {"seed": 5},
    }
    base = choose(name, pool)[0].tolist()
    differing = {
        key for key, over in changed.items() if choose(name, pool, **over)[0].tolist() != base
    }
    assert differing == set(changed) - ignored


@pytest.mark.parametrize(("ranking", "kept"), [("peripheral", [3, 1]), ("core", [0, 2])])
def test_cluster_by_strategy_keeps_farthest_or_nearest_ties_to_lower_row(ranking, kept):
    pool = Pool(np.zeros(4, np.int32), np.array([1, 3, 1, 9], np.float32), np.zeros(4, bool))
    chosen, _ = choose("cluster", pool, ranking=ranking, downsample="strategy")
    assert chosen.tolist() == kept


def test_cluster_keeps_rows_without_direction_only_when_nothing_else_is_left():
    pool = Pool(
        np.zeros(3, np.int32), np.array([9, 1, 2], np.float32), np.array([True, False, False])
    )
    kept = {
        r: choose("cluster", pool, ratio=r, downsample="strategy")[0].tolist() for r in (0.67, 1)
    }
    assert kept == {0.67: [2, 1], 1: [2, 1, 0]}


def test_cluster_at_ratio_one_with_random_downsample_gives_the_same_rows_for_all_rankings():
    pool = make_pool()
    found = {
        r: sorted(choose("cluster", pool, ratio=1, ranking=r)[0].tolist())
        for r in ("peripheral", "core", "random")
    }
    assert found["core"] == found["peripheral"] == found["random"]


@pytest.mark.parametrize("name", ["random", "uniform"])
def test_subsets_of_random_draws_nest_in_the_ratio(name):
    pool = make_pool((30, 20))
    small, large = (set(choose(name, pool, ratio=r)[0].tolist()) for r in (0.25, 0.75))
    assert small < large


def test_cluster_random_ranking_nests_in_the_ratio():
    pool = make_pool((30, 20))
    small, large = (
        set(choose("cluster", pool, ratio=r, ranking="random")[0].tolist()) for r in (0.25, 0.75)
    )
    assert small < large


def scored_pool(scores, last=(), **groups):
    n = len(scores)
    columns = {"score": np.array(scores, float)} | {k: np.array(v) for k, v in groups.items()}
    zero = np.isin(np.arange(n), last)
    return Pool(np.zeros(n, np.int32), np.zeros(n, np.float32), zero, columns)


def rows_of(name, pool, budget, seed=0):
    found = strategies.get(name).choose(pool, Budget(1, budget, budget), [], rule(seed=seed))
    return found.tolist()


def test_by_score_is_best_first_ties_to_the_lower_row_nan_never_zero_direction_last():
    pool = scored_pool([1, 3, np.nan, 3, 2, 9], last=[5])
    assert pool.by_score(np.array([5, 4, 3, 2, 1, 0])).tolist() == [1, 3, 4, 0, 5]


@pytest.mark.parametrize("name", ["less", "loss-top", "k-center"])
def test_best_scored_rows_are_chosen(name):
    assert rows_of(name, scored_pool([0.1, np.nan, 0.4, 0.4, -1]), 3) == [2, 3, 0]


def test_ifd_takes_rows_above_one_only_when_the_others_do_not_fill_the_budget():
    pool = scored_pool([1.2, 0.3, 1.0, 1.1, 0.9, np.nan])
    assert [rows_of("ifd", pool, n) for n in (2, 3, 5)] == [[2, 4], [2, 4, 1], [2, 4, 1, 3, 0]]
    assert strategies.get("ifd").describe(pool, np.array([2, 3, 0])) == {"above_one": 2}


@pytest.mark.parametrize(
    ("sizes", "budget", "given"),
    [
        ([3, 3, 3, 3], 2, [0, 0, 1, 1]),
        ([2, 10, 5], 9, [2, 4, 3]),
        ([100, 1, 4], 20, [15, 1, 4]),
        ([5, 5], 11, [5, 5]),
    ],
)
def test_s2l_pours_the_budget_smallest_first(sizes, budget, given):
    from cluster_sft.strategies import s2l

    assert s2l.quotas(np.array(sizes), budget).tolist() == given


def test_s2l_divides_over_sources_and_then_over_groups_tiny_groups_last():
    source = [0] * 4 + [1] * 16
    group = [0] * 4 + [0] * 10 + [1] * 4 + [2] * 2
    pool = scored_pool([0.0] * 20, source=source, group=group)
    counts = {}
    for budget in (10, 16, 19, 20):
        chosen = rows_of("s2l", pool, budget)
        counts[budget] = [
            sum(r in chosen for r in rows) for rows in np.split(range(20), [4, 14, 18])
        ]
    # 10: 4 of source 0 (all it has), 6 of source 1 as 3 + 3; 16: 8 + 4; then the group of two.
    assert counts == {
        10: [4, 3, 3, 0],
        16: [4, 8, 4, 0],
        19: [4, 10, 4, 1],
        20: [4, 10, 4, 2],
    }


def test_s2l_draws_are_seeded():
    pool = scored_pool([0.0] * 40, source=[0] * 40, group=[0] * 20 + [1] * 20)
    assert rows_of("s2l", pool, 10) == rows_of("s2l", pool, 10)
    assert set(rows_of("s2l", pool, 10)) != set(rows_of("s2l", pool, 10, seed=1))


def test_s2l_without_groups_is_one_line():
    with pytest.raises(UserError, match=r"needs the columns source and group.*score s2l"):
        rows_of("s2l", scored_pool([0.0] * 4), 2)


def test_length_matched_random_has_the_lengths_of_clusters_subset():
    pool = make_pool((300, 200), seed=3)
    length_N = np.random.default_rng(0).integers(1, 12, 500).astype(float)
    pool.scores["score"] = length_N
    ours, theirs = (choose(name, pool)[0] for name in ("length-matched-random", "cluster"))
    assert np.bincount(length_N[ours].astype(int)).tolist() == (
        np.bincount(length_N[theirs].astype(int)).tolist()
    )
    assert set(ours.tolist()) != set(theirs.tolist())


def test_length_bins_stand_alone_where_rows_are_many_and_join_where_they_are_few():
    from cluster_sft.strategies.length_matched_random import bins

    lengths = np.array([5.0] * 16 + [7] * 10 + [8] * 6 + [9] * 3 + [np.nan] + [30] * 20)
    assert bins(lengths).tolist() == [0] * 16 + [1] * 16 + [2] * 3 + [-1] + [3] * 20


def test_unknown_strategy_is_one_line_with_the_nearest_name():
    with pytest.raises(UserError, match=r"unknown strategy 'clutser'; did you mean 'cluster'"):
        strategies.get("clutser")


@pytest.fixture
def leaves(tmp_path):
    """A dataset leaf of 10 rows, and a clusters leaf: 6 rows in cluster 0, 4 in cluster 1."""
    dataset, clusters = tmp_path / "prepare", tmp_path / "cluster"
    dataset.mkdir()
    clusters.mkdir()
    rows = [
        {
            "id": f"{i:02d}",
            "source_row": 9 - i,
            "record": json.dumps({"instruction": f"q{i}", "cluster": "own"} if i else {"a": 1}),
        }
        for i in range(10)
    ]
    frame = pl.DataFrame(rows).with_columns(
        **{c: pl.lit(None, t) for c, t in artifacts.DATASET.items() if c not in rows[0]}
    )
    artifacts.write_table(dataset, "dataset.parquet", frame)
    table = pl.DataFrame(
        {
            "id": [f"{i:02d}" for i in range(10)],
            "cluster": [0, 1] * 4 + [0, 0],
            "distance": [i / 10 for i in range(10)],
        }
    )
    artifacts.write_table(clusters, "clusters.parquet", table)
    artifacts.write_json(clusters / "summary.json", {"zero_rows": ["09"]})
    return dataset, clusters


def run(leaves, out, scores=None, **params):
    dataset, clusters = leaves
    out.mkdir()
    typed = SelectParams(**params)
    given = None if typed.strategy == "full" else clusters
    selection.run(
        typed,
        dataset=dataset,
        clusters=given,
        scores=scores,
        out=out,
        scratch=out,
        launch=Launch(threads=1),
    )
    return artifacts.read_table(out, "subset.parquet")


def test_selection_weights_are_the_clusters_shares_of_the_data(leaves, tmp_path):
    subset = run(leaves, tmp_path / "out", downsample="strategy", ratio=0.5)
    assert subset.rows() == [
        ("05", 1, pytest.approx(0.5), 0.8, 1),
        ("06", 0, pytest.approx(0.6), 1.2, 1),
        ("07", 1, pytest.approx(0.7), 0.8, 0),
        ("08", 0, pytest.approx(0.8), 1.2, 0),
    ]


def test_selection_tells_the_share_of_displaced_rows(leaves, tmp_path):
    frame = pl.DataFrame({"id": ["05", "04"]})
    artifacts.write_table(leaves[1], "displaced.parquet", frame)
    run(leaves, tmp_path / "out", downsample="strategy", ratio=0.5)  # keeps 05, 06, 07, 08
    summary = artifacts.read_json(tmp_path / "out" / "summary.json")
    assert summary["displaced_share"] == 0.25


def test_selection_jsonl_is_the_sources_own_rows_in_its_order(leaves, tmp_path):
    run(leaves, tmp_path / "out", strategy="full")
    lines = [json.loads(x) for x in (tmp_path / "out" / "subset.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "instruction": "q9",
        "cluster": "own",
        "cluster_sft_cluster": 0,
        "weight": 1.0,
    }
    assert lines[-1] == {"a": 1, "cluster": 0, "weight": 1.0}
    assert len(lines) == 10


@pytest.mark.parametrize(
    ("column", "value"), [("cluster", -1), ("cluster", None), ("distance", float("nan"))]
)
def test_selection_of_clusters_with_a_value_that_is_none_is_refused(
    leaves, tmp_path, column, value
):
    table = artifacts.read_table(leaves[1], "clusters.parquet")
    table[2, column] = value
    artifacts.write_table(leaves[1], "clusters.parquet", table)
    with pytest.raises(UserError, match=f"row 2: '{column}' must be a number of at least 0"):
        run(leaves, tmp_path / "out")


def write_scores(folder, ids, scores, **groups):
    folder.mkdir()
    frame = pl.DataFrame({"id": ids, "score": scores, **groups}).with_columns(reason=None)
    artifacts.write_scores(folder, frame)
    return folder


def test_selection_joins_scores_by_id_and_never_takes_a_row_without(leaves, tmp_path):
    ids = ["00", "02", "03", "05", "07", "08", "other"]
    scores = write_scores(tmp_path / "s", ids, [0.2, 1.5, 0.4, None, 0.9, float("inf"), 0.95])
    subset = run(leaves, tmp_path / "out", scores=scores, strategy="ifd", ratio=0.5)
    assert subset["id"].to_list() == ["00", "02", "03", "07"]
    assert subset["weight"].to_list() == [1.0] * 4
    summary = artifacts.read_json(tmp_path / "out" / "summary.json")
    assert (summary["scored"], summary["above_one"]) == (4, 1)


def test_selection_of_fewer_scored_rows_than_the_budget_is_one_line(leaves, tmp_path):
    scores = write_scores(tmp_path / "s", ["00", "01"], [0.2, 0.3])
    with pytest.raises(UserError, match=r"'less' needs scores of at least 4 rows.*got 2; lower"):
        run(leaves, tmp_path / "out", scores=scores, strategy="less", ratio=0.5)


def test_selection_by_scores_without_scores_is_one_line(leaves, tmp_path):
    with pytest.raises(UserError, match="needs the leaf of its score"):
        run(leaves, tmp_path / "out", strategy="less", ratio=0.5)


def test_selection_of_scores_with_an_id_twice_is_refused(leaves, tmp_path):
    scores = write_scores(tmp_path / "s", ["00", "00"], [0.2, 0.3])
    with pytest.raises(UserError, match="one is twice"):
        run(leaves, tmp_path / "out", scores=scores, strategy="less", ratio=0.5)


def test_selection_of_random_rows_carries_no_weights(leaves, tmp_path):
    subset = run(leaves, tmp_path / "out", strategy="random", ratio=0.5)
    assert subset["weight"].to_list() == [1.0] * 4


def test_strategy_that_returns_a_row_twice_is_refused():
    with pytest.raises(UserError, match="must return 3 distinct rows below 5, got 2 distinct of 3"):
        selection._check(np.array([0, 1, 1]), 3, 5, "mine")


def test_selection_of_clusters_and_dataset_of_two_runs_is_refused(leaves, tmp_path):
    dataset, clusters = leaves
    other = tmp_path / "other"
    other.mkdir()
    frame = artifacts.read_table(dataset, "dataset.parquet").head(3)
    artifacts.write_table(other, "dataset.parquet", frame)
    with pytest.raises(UserError, match="must come from one run"):
        run((other, clusters), tmp_path / "out")


@pytest.mark.parametrize(
    "record",
    [
        {"a": 1, "b": 'é\n"}{'},
        {},
        {"cluster": 7, "weight": None},
        {"nested": {"weight": 2}},
        {"said": 'a "cluster" of stars'},
    ],
)
def test_line_of_a_row_is_its_record_with_cluster_and_weight(record):
    added = {"cluster": 3, "weight": 0.5}
    named = {f"cluster_sft_{k}" if k in record else k: v for k, v in added.items()}
    line = selection._line(json.dumps(record, ensure_ascii=False), 3, 0.5)
    assert line == json.dumps({**record, **named}, ensure_ascii=False) + "\n"


def test_selection_reads_data_in_blocks_and_writes_them_in_the_sources_order(
    leaves, tmp_path, monkeypatch
):
    run(leaves, tmp_path / "whole", strategy="full")
    monkeypatch.setattr(selection, "BLOCK_ROWS", 3)
    run(leaves, tmp_path / "blocks", strategy="full")
    whole, blocks = ((tmp_path / name / "subset.jsonl").read_text() for name in ("whole", "blocks"))
    assert whole == blocks
    assert [json.loads(line).get("instruction") for line in blocks.splitlines()] == [
        *(f"q{i}" for i in range(9, 0, -1)),
        None,
    ]
