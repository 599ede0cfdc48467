"""The weighted objective: its variance facts by exact enumeration, its gradient against autograd.

Gradients are vectors g_i of a made-up problem, in float64; expectations run over all possible
draws, so that nothing is left to chance. Estimators are built from the package's own weights,
batches and coefficients.
"""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster_sft.batching import batch_plan, cluster_weights
from cluster_sft.heads import supervised_positions
from cluster_sft.objective import RowLoss, row_coefficients

TIGHT = {"rtol": 1e-12, "atol": 1e-14}


class Problem:
    """Clusters of gradients, with the quantities of the variance formulas."""

    def __init__(self, sizes, *, seed=0, spread=1.0):
        rng = np.random.default_rng(seed)
        self.sizes = np.array(sizes)
        self.clusters = np.repeat(np.arange(len(sizes)), sizes)
        centers = spread * rng.normal(size=(len(sizes), 3))
        self.gradients = centers[self.clusters] + rng.normal(size=(len(self.clusters), 3))
        self.members = [np.flatnonzero(self.clusters == c) for c in range(len(sizes))]
        self.shares = self.sizes / self.sizes.sum()
        self.mean = self.gradients.mean(axis=0)
        self.cluster_means = np.stack([self.gradients[m].mean(axis=0) for m in self.members])
        self.inner = np.array(
            [mean_square(self.gradients[m] - self.gradients[m].mean(0)) for m in self.members]
        )
        self.intra = float(self.shares @ self.inner)
        self.inter = float(self.shares @ ((self.cluster_means - self.mean) ** 2).sum(axis=1))

    def estimate(self, rows, weights=None):
        """Return the step gradient of these rows as the package weighs them."""
        rows = np.asarray(rows)
        row_weights = np.ones(len(rows)) if weights is None else weights[self.clusters[rows]]
        tokens = np.arange(2, 2 + len(rows))
        coefficients = row_coefficients(row_weights, tokens, loss_reduction="sequence")
        return (coefficients * tokens) @ self.gradients[rows]

    def moments(self, draws, weights=None):
        """Return mean and variance of the step gradient over equally likely draws."""
        estimates = np.stack([self.estimate(rows, weights) for rows in draws])
        return estimates.mean(axis=0), mean_square(estimates - estimates.mean(axis=0))

    def stratified_draws(self, per_cluster, draw=product):
        options = [
            list(product(m, repeat=per_cluster) if draw is product else draw(m, per_cluster))
            for m in self.members
        ]
        return [sum(parts, ()) for parts in product(*options)]


def mean_square(rows):
    return float((rows**2).sum(axis=1).mean())


def test_variance_splits_into_intra_and_inter():
    p = Problem([4, 3, 2])
    assert np.isclose(mean_square(p.gradients - p.mean), p.intra + p.inter, **TIGHT)


def test_random_batch_variance_is_total_over_batch():
    p = Problem([2, 2, 1])
    mean, variance = p.moments(list(product(range(5), repeat=3)))
    assert np.allclose(mean, p.mean, **TIGHT)
    assert np.isclose(variance, (p.intra + p.inter) / 3, **TIGHT)


@pytest.mark.parametrize(("spread", "smaller"), [(1.0, True), (0.0, False)])
def test_balanced_stratified_variance_is_intra_over_batch(spread, smaller):
    p = Problem([3, 3], spread=spread)
    if not smaller:
        for members in p.members:
            p.gradients[members] -= p.gradients[members].mean(axis=0)
        p.inter, p.mean = 0.0, np.zeros(3)
    mean, variance = p.moments(p.stratified_draws(2))
    _, random_variance = p.moments(list(product(range(6), repeat=4)))
    assert np.allclose(mean, p.mean, **TIGHT)
    assert np.isclose(variance, p.intra / 4, **TIGHT)
    assert (variance < random_variance - 1e-12) == smaller


@pytest.mark.parametrize("spread", [0.0, 0.3, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_balanced_stratified_without_replacement_is_smaller_iff_inter_exceeds(spread, seed):
    p = Problem([3, 3], spread=spread, seed=seed)
    _, stratified = p.moments(p.stratified_draws(2, draw=combinations))
    _, random = p.moments(list(combinations(range(6), 4)))
    assert (stratified < random) == (p.inter / (2 - 1) > p.intra / (6 - 2))


def test_weighted_stratified_step_is_unbiased_with_known_variance():
    p = Problem([4, 2, 1])
    weights = cluster_weights(p.sizes, [1, 1, 1])
    mean, variance = p.moments(p.stratified_draws(2), weights)
    assert np.allclose(mean, p.mean, **TIGHT)
    assert np.isclose(variance, 3 / 6 * (p.shares**2 @ p.inner), **TIGHT)


@pytest.mark.parametrize("sizes", [[6, 3, 3], [4, 4, 4], [5, 4, 2]])
def test_weighted_variance_is_bounded_by_the_largest_weight_and_the_capacity(sizes):
    p = Problem(sizes)
    n, k = sum(sizes), len(sizes)
    _, variance = p.moments(p.stratified_draws(1), cluster_weights(sizes, [1] * k))
    by_weight = cluster_weights(sizes, [1] * k).max() * p.intra / k
    capacity_factor = max(1.5, k * -(-n // k) / n)
    assert variance <= by_weight * (1 + 1e-12)
    assert by_weight <= capacity_factor * p.intra / k * (1 + 1e-12)


def test_without_replacement_every_cluster_gets_the_finite_population_factor():
    p = Problem([5, 3, 2])
    weights = cluster_weights(p.sizes, [2, 2, 2])
    mean, variance = p.moments(p.stratified_draws(2, draw=combinations), weights)
    factors = (p.sizes - 2) / (p.sizes - 1)
    assert np.allclose(mean, p.mean, **TIGHT)
    assert np.isclose(variance, p.shares**2 @ (p.inner / 2 * factors), **TIGHT)


def test_without_replacement_single_row_clusters_add_no_variance():
    p = Problem([1, 1])
    _, variance = p.moments(p.stratified_draws(1, draw=combinations))
    assert variance < 1e-28


@pytest.mark.filterwarnings("ignore:.*do not divide")
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("batch", [4, 8, 20])
@pytest.mark.parametrize(("sizes", "selected"), [([9, 5, 3], [3, 3, 3]), ([9, 5, 8], [7, 2, 6])])
def test_epoch_sum_is_the_combined_mean_for_any_workers(workers, batch, sizes, selected):
    p = Problem(sizes)
    kept = np.concatenate([m[:s] for m, s in zip(p.members, selected, strict=True)])
    weights = cluster_weights(sizes, selected)
    plan = batch_plan(
        p.clusters[kept], weights, workers=workers, global_batch_size=batch, epochs=1, seed=5
    )
    total = np.zeros(3)
    for step in plan:
        rows_B = np.concatenate([rows for rows, _ in step])
        coefficients_B = row_coefficients(
            np.concatenate([w for _, w in step]), np.ones(len(rows_B)), loss_reduction="sequence"
        )
        ends = np.cumsum([len(rows) for rows, _ in step])[:-1]
        parts = zip(np.split(rows_B, ends), np.split(coefficients_B, ends), strict=True)
        by_worker = [workers * (c @ p.gradients[kept[rows]]) for rows, c in parts]
        total += len(rows_B) / len(kept) * np.mean(by_worker, axis=0)
    means = [p.gradients[m[:s]].mean(axis=0) for m, s in zip(p.members, selected, strict=True)]
    assert np.allclose(total, p.shares @ np.stack(means), **TIGHT)


def test_identical_rows_give_the_full_mean_only_with_weights():
    p = Problem([6, 3, 1])
    p.gradients = p.cluster_means[p.clusters]
    kept = [int(m[0]) for m in p.members]
    full_mean = p.gradients.mean(axis=0)
    assert np.allclose(p.estimate(kept, cluster_weights(p.sizes, [1, 1, 1])), full_mean, **TIGHT)
    assert not np.allclose(p.estimate(kept), full_mean, atol=1e-3)


def test_token_reduction_is_one_ratio_over_the_step():
    weights, tokens, sums = (
        np.array([2.0, 1.0, 0.5]),
        np.array([3, 1, 7]),
        np.array([6.0, 5.0, 2.0]),
    )
    coefficients = row_coefficients(weights, tokens, loss_reduction="token")
    assert np.isclose(coefficients @ sums, (2 * 6 + 5 + 1) / (2 * 3 + 1 + 3.5), **TIGHT)


def test_coefficients_row_without_tokens_is_an_error():
    with pytest.raises(ValueError, match="row 1"):
        row_coefficients([1.0, 1.0], [3, 0], loss_reduction="sequence")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).double()


def padded_batch():
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, 50, (3, 9)))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    mask[2, :2] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    labels[1, :2] = -100
    return ids, mask, labels


def cross_entropy_losses(model, ids, mask, labels):
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100
    )
    return (losses * (mask[:, :-1] * mask[:, 1:])).sum(dim=1)


@pytest.mark.parametrize("full_logits", [False, True])
def test_row_loss_matches_plain_cross_entropy_in_value_and_gradient(model, full_logits):
    batch = padded_batch()
    factors = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    gradients = []
    losses = []
    row_loss = RowLoss(model, full_logits=full_logits)
    for compute in (row_loss, lambda *b: cross_entropy_losses(model, *b)):
        model.zero_grad()
        losses.append(compute(*batch))
        (factors * losses[-1]).sum().backward()
        gradients.append(torch.cat([q.grad.flatten() for q in model.parameters()]))
    assert torch.allclose(losses[0], losses[1], rtol=1e-12)
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_reduction", ["sequence", "token"])
def test_step_gradient_is_the_same_however_rows_are_split(model, loss_reduction):
    ids, mask, labels = padded_batch()
    weights = np.array([2.0, 0.5, 1.0])
    tokens = supervised_positions(labels, mask).sum(dim=1).numpy()
    coefficients = torch.from_numpy(
        row_coefficients(weights, tokens, loss_reduction=loss_reduction)
    )
    gradients = []
    for parts in ([[0, 1, 2]], [[0], [1, 2]], [[2], [1], [0]]):
        model.zero_grad()
        for part in parts:
            losses = RowLoss(model)(ids[part], mask[part], labels[part])
            (coefficients[part] * losses).sum().backward()
        gradients.append(torch.cat([q.grad.flatten() for q in model.parameters()]))
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradients[0], gradients[2], rtol=1e-9, atol=1e-12)


def test_supervised_positions_padding_on_either_side_is_left_out():
    _, mask, labels = padded_batch()
    marked = supervised_positions(labels, mask)
    expected = [[3, 4, 5, 6, 7], [1, 2, 3, 4], [2, 3, 4, 5, 6, 7]]
    assert [row.nonzero()[:, 0].tolist() for row in marked] == expected
