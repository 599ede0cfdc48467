"""Diagnostics: every formula against a slow direct computation, and the stage on a tiny model."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from cluster_sft import diagnosing, embedding, validating
from cluster_sft.artifacts import CLUSTERS, SUBSET, read_json, read_table, write_json, write_table
from cluster_sft.diagnostics import (
    balance,
    composition,
    diversity,
    figures,
    gradients,
    premises,
    preservation,
    projection,
    semantics,
    validity,
    variance,
)
from cluster_sft.diagnostics.moments import group_moments
from cluster_sft.errors import UserError
from cluster_sft.params import Launch
from cluster_sft.report import drawing
from cluster_sft.report.html import inline
from cluster_sft.stage_params import DiagnoseParams, EmbedParams, ValidateParams
from cluster_sft.token_batches import TokenStore

LABELS = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2])
X = np.random.default_rng(0).normal(size=(9, 5)) + np.eye(5)[LABELS]


@pytest.fixture(scope="module")
def moments():
    return group_moments(X, LABELS, 3)


def test_moments_in_blocks_equal_sums_over_each_group(monkeypatch, moments):
    monkeypatch.setattr("cluster_sft.diagnostics.moments.BLOCK_ROWS", 2)
    scale = np.arange(1.0, 10.0)
    found = group_moments(X.astype(np.float32), LABELS, 4, scale_N=scale)
    for c in range(4):
        rows = (X.astype(np.float32) * scale[:, None])[c == LABELS]
        assert np.allclose(found.total[c], rows.sum(axis=0))
        assert np.isclose(found.square[c], (rows**2).sum())
        assert found.count[c] == len(rows)
    spread = [((X[c == LABELS] - X[c == LABELS].mean(0)) ** 2).sum(1).mean() for c in range(3)]
    assert np.allclose(moments.spread, spread)


def test_diversity_times_rows_is_one_for_equal_and_n_for_orthogonal_gradients():
    equal = group_moments(np.ones((6, 3)), np.zeros(6, int), 1)
    orthogonal = group_moments(np.eye(6), np.zeros(6, int), 1)
    assert np.isclose(6 * diversity.diversity(equal)[0], 1)
    assert np.isclose(6 * diversity.diversity(orthogonal)[0], 6)


def test_diversity_of_gradients_that_cancel_is_not_a_number():
    found = group_moments(np.array([[1.0, 2.0], [-1.0, -2.0]]), np.zeros(2, int), 1)
    assert np.isnan(diversity.diversity(found)[0])


def test_diversity_of_batches_is_that_of_each_batch_alone():
    steps = [np.array([0, 5, 3]), np.array([8, 1])]
    direct = [len(s) * (X[s] ** 2).sum() / (X[s].sum(0) ** 2).sum() for s in steps]
    assert np.allclose(diversity.batch_diversity(X, steps), direct)


def test_preservation_compares_the_two_means_of_every_cluster(moments):
    chosen = np.array([0, 2, 4, 5, 6])
    selected = group_moments(X[chosen], LABELS[chosen], 3)
    found = preservation.preservation(moments, selected)
    for c in (0, 1):
        a, b = X[c == LABELS].mean(0), X[chosen][LABELS[chosen] == c].mean(0)
        norms = np.linalg.norm(a), np.linalg.norm(b)
        assert np.isclose(found.cosine[c], a @ b / (norms[0] * norms[1]))
        assert np.isclose(found.distance[c], np.linalg.norm(a - b))
        assert np.isclose(found.norm_ratio[c], norms[1] / norms[0])
    assert np.isnan([found.cosine[2], found.distance[2], found.norm_ratio[2]]).all()


def test_centroids_largest_cosine_leaves_a_cluster_with_itself_out():
    found = group_moments(np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 2.0]]), np.arange(3), 3)
    assert np.isclose(preservation.largest_between(preservation.centroid_cosines(found)), 0.8)
    assert np.isnan(preservation.largest_between(preservation.centroid_cosines(found[:1])))


def _variance_of(estimates) -> float:
    estimates = np.array(list(estimates))
    return float(((estimates - estimates.mean(0)) ** 2).sum(1).mean())


def _draws(rows: np.ndarray, count: int, *, replace: bool):
    return itertools.product(rows, repeat=count) if replace else itertools.permutations(rows, count)


@pytest.mark.parametrize("replace", [True, False])
def test_variances_equal_those_over_every_possible_step(moments, replace):
    share, batch = np.array([4, 3, 2]) / 9, 3
    if replace:
        found = variance.variances(moments, batch=batch, alpha=1.5)
    else:
        found = variance.variances_drawn(moments, share, batch=batch)
    random = _variance_of(X[list(s)].mean(0) for s in _draws(np.arange(9), 3, replace=replace))
    members = [np.flatnonzero(c == LABELS) for c in range(3)]
    stratified = _variance_of(
        sum(p * X[list(rows)].mean(0) for p, rows in zip(share, step, strict=True))
        for step in itertools.product(*(_draws(rows, 1, replace=replace) for rows in members))
    )
    assert np.isclose(found.random, random)
    assert found.stratified is not None
    assert np.isclose(found.stratified, stratified)
    assert found.ratio is not None
    assert np.isclose(found.ratio, stratified / random)


def test_variances_without_replacement_of_two_rows_a_cluster_equal_those_over_every_step(moments):
    share = np.array([4, 3, 2]) / 9
    found = variance.variances_drawn(moments, share, batch=6)
    members = [np.flatnonzero(c == LABELS) for c in range(3)]
    stratified = _variance_of(
        sum(p * X[list(rows)].mean(0) for p, rows in zip(share, step, strict=True))
        for step in itertools.product(*(itertools.combinations(rows, 2) for rows in members))
    )
    assert found.stratified is not None
    assert np.isclose(found.stratified, stratified)


def test_variance_of_all_rows_splits_into_inside_and_between_clusters(moments):
    found = variance.variances(moments, batch=3, alpha=1.5)
    assert np.isclose(found.s_intra + found.s_inter, ((X - X.mean(0)) ** 2).sum(1).mean())


def test_variance_of_the_stratified_estimator_keeps_the_bound_of_the_capacity(moments):
    for alpha in (4 / 3, 2.0):
        found = variance.variances(moments, batch=6, alpha=alpha)
        assert found.stratified is not None
        assert found.bound is not None
        assert found.stratified <= found.bound
        assert np.isclose(found.bound, alpha * found.s_intra / 6)


def test_variance_of_a_step_too_small_for_the_clusters_is_undefined(moments):
    assert variance.variances(moments, batch=2, alpha=1.5).stratified is None


def test_sample_is_proportional_with_at_least_two_rows_of_every_cluster():
    labels = np.repeat([0, 1, 2, 3], [60, 35, 4, 1])
    rows = validity.sample_rows(labels, 4, size=20, seed=0)
    assert np.bincount(labels[rows]).tolist() == [12, 7, 2, 1]
    assert np.array_equal(rows, np.unique(rows))


def test_sample_of_more_than_all_rows_is_all_rows():
    assert len(validity.sample_rows(LABELS, 3, size=400, seed=0)) == 9


def test_permutation_statistic_is_the_mean_over_pairs_inside_minus_between():
    cosine = validity.cosines(X @ X.T)
    inside, between = [], []
    for i, j in itertools.combinations(range(9), 2):
        value = X[i] @ X[j] / np.linalg.norm(X[i]) / np.linalg.norm(X[j])
        (inside if LABELS[i] == LABELS[j] else between).append(value)
    test = validity.permutation_test(cosine, LABELS, permutations=50, seed=0)
    assert test is not None
    assert np.isclose(test.intra, np.mean(inside))
    assert np.isclose(test.inter, np.mean(between))
    assert np.isclose(test.statistic, np.mean(inside) - np.mean(between))


def test_permutation_p_value_is_the_share_of_labellings_that_reach_the_statistic():
    labels = np.array([0, 0, 1, 1])
    cosine = (labels[:, None] == labels).astype(float)  # reached by 1 of 3 ways to pair four rows
    test = validity.permutation_test(cosine, labels, permutations=3000, seed=1)
    assert test is not None
    assert abs(test.p_value - 1 / 3) < 4 * np.sqrt(2 / 9 / 3000)
    assert set(np.round(test.permuted, 9)) == {1.0, -0.5}


def test_permutation_p_value_is_least_where_no_labelling_reaches_the_statistic():
    labels = np.repeat([0, 1, 2], 12)
    cosine = (labels[:, None] == labels).astype(float)
    test = validity.permutation_test(cosine, labels, permutations=199, seed=1)
    assert test is not None
    assert test.p_value == 1 / 200


def test_permutation_test_needs_pairs_of_both_kinds():
    cosine = np.eye(3)
    assert validity.permutation_test(cosine, np.zeros(3, int), permutations=9, seed=0) is None
    assert validity.permutation_test(cosine, np.arange(3), permutations=9, seed=0) is None


def test_mean_cosines_of_clusters_leave_rows_with_themselves_out():
    cosine = validity.cosines(X @ X.T)
    found = validity.mean_cosines(cosine, LABELS, 3)
    assert np.isclose(found[2, 2], cosine[7, 8])
    assert np.isclose(found[0, 2], cosine[:4, 7:].mean())


def _store(rows: list[list[int]], prompt: int) -> TokenStore:
    labels = [[-100] * prompt + row[prompt:] for row in rows]
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    flat = (np.concatenate(each).astype(np.int32) for each in (rows, labels))
    return TokenStore(*flat, offsets)


def _autograd_gram(model, store: TokenStore, *, head: bool) -> np.ndarray:
    """Explicit per-sample gradients of the model's own mean loss; the head's matrix untied."""
    if head:
        weight = torch.nn.Parameter(model.get_output_embeddings().weight.detach().clone())
        model.get_output_embeddings().weight = weight
        wanted = [weight]
    else:
        wanted = list(model.parameters())
    flat = []
    for i in range(len(store.lengths)):
        span = slice(store.offsets[i], store.offsets[i + 1])
        ids = torch.from_numpy(store.input_ids[span].astype(np.int64))[None]
        labels = torch.from_numpy(store.labels[span].astype(np.int64))[None]
        loss = model(input_ids=ids, labels=labels).loss
        flat.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, wanted)]).double())
    stacked = torch.stack(flat)
    return (stacked @ stacked.T).numpy()


@pytest.fixture(scope="module")
def store() -> TokenStore:
    rng = np.random.default_rng(3)
    return _store([rng.integers(0, 250, size=n).tolist() for n in (9, 5, 7, 14)], prompt=3)


def test_gram_by_the_head_equals_autograd_of_each_sample(tiny_model_dir, store, monkeypatch):
    monkeypatch.setitem(gradients.BLOCK_BYTES, "cpu", 1 << 15)  # some hundred blocks
    load = AutoModelForCausalLM.from_pretrained
    found = gradients.gram(load(tiny_model_dir).eval(), store, head=True, batch_tokens=32)
    assert found.exact
    direct = _autograd_gram(load(tiny_model_dir).eval(), store, head=True)
    assert np.allclose(found.products, direct, rtol=1e-4, atol=1e-6)


def test_gram_by_the_head_follows_a_softcap(store):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.5,
    )
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    found = gradients.gram(model, store, head=True, batch_tokens=32)
    assert found.exact
    direct = _autograd_gram(model, store, head=True)
    assert np.allclose(found.products, direct, rtol=1e-4, atol=1e-6)


def test_gram_of_an_unknown_head_comes_from_backward_passes(tiny_model_dir, store, monkeypatch):
    monkeypatch.setattr(gradients, "head_is_exact", lambda *_: False)
    load = AutoModelForCausalLM.from_pretrained
    found = gradients.gram(load(tiny_model_dir).eval(), store, head=True, batch_tokens=32)
    direct = _autograd_gram(load(tiny_model_dir).eval(), store, head=True)
    assert not found.exact
    assert found.backward == 4
    assert np.abs(validity.cosines(found.products) - validity.cosines(direct)).max() < 0.05


def test_gram_by_all_parameters_is_near_autograd_of_each_sample(tiny_model_dir, store):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    found = gradients.gram(model, store, head=False, batch_tokens=32)
    direct = _autograd_gram(model, store, head=False)
    error = np.abs(validity.cosines(found.products) - validity.cosines(direct))
    assert error.max() < 5 / np.sqrt(gradients.SKETCH)
    assert all(p.requires_grad for p in model.parameters())


def test_terms_of_a_cluster_are_those_that_the_others_lack():
    texts = ["sort the list in python"] * 3 + ["sort the table with sql"] * 3
    found = semantics.top_terms(texts, np.repeat([0, 1], 3), 2, terms=5)
    best = {c: found.filter(pl.col("cluster") == c)["term"].to_list() for c in (0, 1)}
    assert best == {0: ["list", "python"], 1: ["sql", "table"]}


def test_terms_keep_the_names_of_languages_whole():
    texts = ["in c++ or c#"] * 2 + ["in java"] * 2
    found = semantics.top_terms(texts, np.repeat([0, 1], 2), 2, terms=5)
    assert found["term"].to_list() == ["c#", "c++", "java"]


def test_terms_of_texts_without_words_are_none():
    assert semantics.top_terms(["1 2", ""], np.array([0, 1]), 2, terms=3).is_empty()


def test_examples_are_the_nearest_and_the_farthest_with_ties_to_the_lower_row():
    distance = np.array([0.3, 0.1, 0.1, 0.3, 0.5])
    found = semantics.extreme_rows(distance, np.array([0, 0, 0, 0, 1]), 2, examples=2)
    rows = {k: part["row"].to_list() for (k,), part in found.group_by("kind", maintain_order=True)}
    assert rows == {"nearest": [1, 2, 4], "farthest": [0, 3, 4]}


def test_categories_agree_where_rows_have_the_dominant_one_of_their_cluster():
    category = pl.Series(["a", "a", "b", None, "c", "b"])
    found = semantics.category_agreement(category, np.array([0, 0, 0, 1, 2, 2]), 3)
    assert found == ([("a", 2, 3), None, ("b", 1, 2)], 3, 5)


def test_long_text_becomes_one_short_line():
    assert semantics.shorten("a\n b   c", 20) == "a b c"
    assert semantics.shorten("abcdef", 4) == "abc\u2026"


def test_map_by_principal_axes_holds_the_singular_vectors():
    found = projection.project(X, method="pca", seed=0)
    left, values, _ = np.linalg.svd(X - X.mean(0), full_matrices=False)
    assert np.allclose(np.abs(found.points), np.abs(left[:, :2] * values[:2]))
    assert np.allclose(found.explained, (values**2 / (values**2).sum())[:2])


def test_map_by_t_sne_is_the_same_for_the_same_seed():
    one, two = (projection.project(X, method="tsne", seed=4).points for _ in range(2))
    assert np.array_equal(one, two)
    assert one.shape == (9, 2)


def test_map_by_an_unknown_method_is_refused():
    with pytest.raises(UserError, match="pca, tsne"):
        projection.project(X, method="umap", seed=0)


def test_stratified_steps_hold_the_epochs_shares_and_random_ones_do_not():
    labels = np.repeat([0, 1, 2, 3], 8)
    found = {}
    for batches in ("random", "stratified"):
        steps = composition.epoch_steps(labels, 4, batch=8, seed=0, batches=batches)
        assert steps is not None
        counts = composition.step_counts(steps, labels, 4)
        assert counts.sum(axis=0).tolist() == [8, 8, 8, 8]
        found[batches] = composition.describe_counts(counts)
    assert found["stratified"] == {"steps": 4, "deviation": 0.0, "absent": 0.0}
    assert found["random"]["deviation"] > 0.05


def test_batches_are_judged_by_a_multiple_of_the_clusters_that_fills_four_steps():
    assert [composition.nominal_batch(*case) for case in ((72, 4), (10_000, 5), (9, 4))] == [
        16,
        65,
        4,
    ]


def test_stratified_steps_smaller_than_the_clusters_cannot_be_made():
    assert composition.epoch_steps(LABELS, 3, batch=2, seed=0, batches="stratified") is None


def test_effective_sample_size_is_all_rows_for_equal_weights_and_fewer_otherwise():
    assert np.isclose(balance.effective_sample_size(np.full(7, 0.3)), 7)
    assert np.isclose(balance.effective_sample_size(np.array([3.0, 1.0])), 16 / 10)


def test_eta_squared_is_the_variance_between_clusters_by_all_of_it():
    value = np.array([1.0, 3.0, 2.0, 8.0])
    between = 2 * ((2 - 3.5) ** 2 + (5 - 3.5) ** 2)
    expected = between / ((value - 3.5) ** 2).sum()
    assert np.isclose(balance.eta_squared(value, np.array([0, 0, 1, 1]), 2), expected)
    member = np.array([0, 0, 1, 1])
    assert np.allclose(
        balance.membership_r2(value, member, 2), np.corrcoef(value, member)[0, 1] ** 2
    )


def _subset(folder: Path, ids: list[str], clusters: list[int], strategy: str) -> Path:
    folder.mkdir()
    frame = pl.DataFrame(
        {"id": ids, "cluster": clusters, "distance": 0.0, "weight": 1.0, "rank": 0},
        schema_overrides=SUBSET,
    )
    write_table(folder, "subset.parquet", frame)
    write_json(folder / "summary.json", {"strategy": strategy})
    return folder


@pytest.fixture(scope="module")
def leaves(tiny_model_dir, tiny_dataset, tmp_path_factory) -> dict[str, Path]:
    """Embeddings and three clusters of the tiny dataset, and a subset of every third row."""
    root = tmp_path_factory.mktemp("leaves")
    (root / "embed").mkdir()
    embedding.run(
        EmbedParams(model=str(tiny_model_dir), dtype="fp32"),
        dataset=tiny_dataset,
        out=root / "embed",
        scratch=root / "scratch",
        launch=Launch(threads=1),
    )
    ids = read_table(root / "embed", "samples.parquet", ["id"])["id"].to_list()
    labels = [0 if i < 20 else 1 + i % 2 for i in range(len(ids))]
    (root / "cluster").mkdir()
    frame = pl.DataFrame(
        {"id": ids, "cluster": labels, "distance": [float(i % 7) for i in range(len(ids))]},
        schema_overrides=CLUSTERS,
    )
    write_table(root / "cluster", "clusters.parquet", frame)
    write_json(root / "cluster" / "summary.json", {"k": 3, "alpha": 1.5})
    select = _subset(root / "select", ids[::3], labels[::3], "cluster")
    full = _subset(root / "full", ids, [0] * len(ids), "full")
    both = {"embeddings": root / "embed", "clusters": root / "cluster", "dataset": tiny_dataset}
    return both | {"subset": select, "full": full}


def validate(leaves, model, out: Path, **changes) -> Path:
    out.mkdir()
    settings = {"sample": 12, "permutations": 99, "model": str(model), "dtype": "fp32"}
    validating.run(
        ValidateParams(**(settings | changes)),
        **{k: leaves[k] for k in ("dataset", "embeddings", "clusters")},
        out=out,
        scratch=out,
        launch=Launch(threads=1),
    )
    return out


@pytest.fixture(scope="module")
def validity_leaf(leaves, tiny_model_dir, tmp_path_factory) -> Path:
    return validate(leaves, tiny_model_dir, tmp_path_factory.mktemp("validity") / "out")


def diagnose(leaves, validity: Path, out: Path, *, subset="subset", examples=2) -> dict:
    out.mkdir()
    diagnosing.run(
        DiagnoseParams(examples=examples, terms=4),
        **{k: leaves[k] for k in ("dataset", "embeddings", "clusters")},
        subset=leaves[subset],
        validity=validity,
        out=out,
        scratch=out,
        launch=Launch(threads=1),
    )
    return read_json(out / "metrics.json")


@pytest.fixture(scope="module")
def diagnosed(leaves, validity_leaf, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("diagnosed") / "out"
    diagnose(leaves, validity_leaf, out)
    return out


def test_stage_writes_numbers_tables_and_figures(diagnosed):
    names = {p.relative_to(diagnosed).as_posix() for p in diagnosed.rglob("*") if p.is_file()}
    drawn = ("map", "composition", "centroids", "validity", "diversity")
    assert names == {
        *("metrics.json", "summary.json", "terms.csv", "examples.csv"),
        "map.parquet",
        *(f"figures/{name}.svg" for name in drawn),
    }


def test_examples_of_clusters_of_fewer_rows_than_twice_as_many_show_a_row_as_near_and_far(
    leaves, validity_leaf, tmp_path
):
    diagnose(leaves, validity_leaf, tmp_path / "out", examples=8)
    found = pl.read_csv(tmp_path / "out" / "examples.csv")
    sizes = dict(found.group_by("cluster").len().iter_rows())
    assert sizes == {0: 16, 1: 16, 2: 16}
    assert found.filter(pl.col("cluster") == 1)["id"].n_unique() == 10


def test_validity_states_the_passes_of_its_gradients(validity_leaf):
    cost = read_json(validity_leaf / "summary.json")["cost"]
    assert (cost["forward_passes"], cost["backward_passes"]) == (12, 0)
    assert np.load(validity_leaf / "permutations.npy").shape == (99,)


def test_figures_hold_only_the_palette_so_that_the_page_can_turn_dark(diagnosed):
    for path in (diagnosed / "figures").iterdir():
        svg = path.read_text()
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= set(drawing.DARK), path.name
        assert not re.search(r"(fill|stroke): #", inline(svg, path.stem)), path.name


def test_figures_of_more_clusters_than_colours_show_them_all():
    k = 14
    counts = {"random": np.eye(k, dtype=np.int64)}
    svg = figures.draw_composition(counts)
    assert svg.count("fill-opacity: 0.85") + svg.count("opacity: 0.85") >= k
    points = projection.Map(np.arange(2.0 * k).reshape(k, 2), ("a", "b"), None)
    words = figures.draw_map(points, np.arange(k), np.ones(k, bool), k)
    assert all(f">{c}</text>" in words for c in range(k))


def test_stage_measures_every_cluster(diagnosed):
    found = read_json(diagnosed / "metrics.json")
    assert [c["size"] for c in found["clusters"]] == [20, 10, 10]
    assert [c["rows"] for c in found["clusters"]] == [7, 3, 4]
    assert found["category"] == {
        "rows": 40,
        "agreeing": 30,
        "agreement": 0.75,
        "largest_category_share": 0.5,
    }
    assert found["validity"]["rows"] == 12


def test_stage_gives_the_same_bytes_again(diagnosed, leaves, tiny_model_dir, tmp_path):
    diagnose(leaves, validate(leaves, tiny_model_dir, tmp_path / "validity"), tmp_path / "again")
    for path in diagnosed.rglob("*"):
        if path.is_file() and path.name != "summary.json":
            again = tmp_path / "again" / path.relative_to(diagnosed)
            assert again.read_bytes() == path.read_bytes(), path.name


def test_stage_takes_clusters_of_the_cluster_leaf_where_the_strategy_ignored_them(
    leaves, validity_leaf, tmp_path
):
    found = diagnose(leaves, validity_leaf, tmp_path / "full", subset="full")
    assert [c["rows"] for c in found["clusters"]] == [20, 10, 10]
    assert found["preservation"]["lowest_e"] == pytest.approx(1)


def test_validity_takes_gradients_by_all_parameters(leaves, tiny_model_dir, tmp_path):
    leaf = validate(leaves, tiny_model_dir, tmp_path / "all", gradients="all")
    assert read_json(leaf / "metrics.json")["exact"] is False
    assert read_json(leaf / "summary.json")["cost"]["backward_passes"] == 12


def test_stage_refuses_clusters_of_other_rows(leaves, validity_leaf, tmp_path):
    frame = read_table(leaves["clusters"], "clusters.parquet")
    write_table(tmp_path, "clusters.parquet", frame[1:])
    with pytest.raises(UserError, match="has no cluster"):
        diagnose({**leaves, "clusters": tmp_path}, validity_leaf, tmp_path / "out")


def test_premises_that_hold_are_silent_and_each_that_fails_has_its_line():
    cluster = {
        "cluster": 0,
        "rows": 9,
        "cosine_e": 0.999,
        "cosine_g": 0.998,
        "length_r2": 0.1,
        "length_median": 50.0,
        "length_median_others": 60.0,
    }
    good = {
        "rows": 18,
        "clusters": [cluster, {**cluster, "cluster": 1}],
        "preservation": {"largest_between_e": 0.6},
        "validity": {"statistic": 0.1, "p_value": 0.01, "rows": 40},
        "variance": {"selected": {"e": {"ratio": 0.8}}},
        "weights": {
            "effective_share": 0.9,
            "effective_sample_size": 16.2,
            "smallest": 0.8,
            "largest": 1.2,
        },
    }
    assert premises.warnings(good) == []
    bad = [
        ({"clusters": [cluster, {**cluster, "cluster": 1, "cosine_g": 0.97}]}, "0.9700, on g"),
        ({"clusters": [cluster, {**cluster, "cluster": 1, "rows": 0}]}, "No row of cluster 1"),
        ({"clusters": [cluster, {**cluster, "cluster": 1, "length_r2": 0.4}]}, "length"),
        ({"preservation": {"largest_between_e": 0.995}}, "two different clusters"),
        ({"validity": {**good["validity"], "statistic": -0.1}}, "no more inside"),
        ({"validity": {**good["validity"], "p_value": 0.2}}, "chance"),
        ({"variance": {"selected": {"e": {"ratio": 1.3}}}}, "1.30 times"),
        ({"weights": {**good["weights"], "effective_share": 0.4}}, "effective sample"),
    ]
    for change, words in bad:
        [line] = premises.warnings(good | change)
        assert words in line
        assert "\n" not in line
