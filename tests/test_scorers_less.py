"""LESS against slow references: autograd a row, Adam by hand, a naive score, any process count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from cluster_sft import training
from cluster_sft.adapters import add_adapter, load_weights
from cluster_sft.artifacts import (
    read_array,
    read_json,
    read_scores,
    read_table,
    write_json,
    write_table,
)
from cluster_sft.errors import UserError
from cluster_sft.models import load_model
from cluster_sft.params import Launch
from cluster_sft.scorers import (
    _gradient_features,
    less,
    less_gradients,
    less_warmup,
)
from cluster_sft.scorers._less_targets import write_targets
from cluster_sft.scorers._projection import project, signs
from cluster_sft.scorers._row_gradients import RowGradients
from cluster_sft.stage_params import LessGradientsParams, LessParams, LessWarmupParams
from cluster_sft.token_batches import build_batch, open_tokens, pack_tokens

K = 2048
TARGETS = ["q_proj", "v_proj", "down_proj"]
RAW = [
    {"instruction": "Count to 3.", "output": "one two three", "subtask": "count"},
    {"instruction": "Count to 5.", "output": "one two three four one", "subtask": "count"},
    {"instruction": "Capital of France?", "output": "Paris", "subtask": "facts"},
]


@pytest.fixture(scope="module")
def warmup(tiny_model_dir, tiny_dataset, tmp_path_factory) -> Path:
    """A warm-up of two epochs on 12 of 40 rows, in this process."""

    def work_here(module, job, *, processes, **_):
        training.worker({**job, "processes": processes})

    params = LessWarmupParams(
        model=str(tiny_model_dir),
        dtype="fp32",
        warmup_share=0.3,
        warmup_epochs=2,
        learning_rate=1e-2,
        batch_size=4,
        lora_rank=4,
        lora_alpha=16,
        lora_targets=TARGETS,
        seed=2,
    )
    out = tmp_path_factory.mktemp("warmup")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.launching, "launch", work_here)
        run(less_warmup, params, out, dataset=tiny_dataset)
    return out


def run(module, params, out, *, scratch=None, launch=None, **leaves) -> Path:
    out.mkdir(exist_ok=True)
    scratch = scratch or out.parent / f"{out.name}-scratch"
    scratch.mkdir(exist_ok=True)
    launch = launch or Launch(threads=1, micro_batch=3)
    module.run(params, **leaves, out=out, scratch=scratch, launch=launch)
    return out


def gradient_params(model, **changes) -> LessGradientsParams:
    settings = {"projection_dim": K, "seed": 5, "model": str(model), "dtype": "fp32"}
    return LessGradientsParams(**{**settings, **changes})


@pytest.fixture(scope="module")
def gradients(tiny_model_dir, tiny_dataset, warmup, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("gradients") / "out"
    params = gradient_params(tiny_model_dir)
    return run(less_gradients, params, out, dataset=tiny_dataset, warmup=warmup)


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "targets.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in RAW))
    return path


@pytest.fixture(scope="module")
def scored(tiny_model_dir, tiny_dataset, warmup, gradients, examples, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("scored") / "out"
    leaves = {"dataset": tiny_dataset, "warmup": warmup, "gradients": gradients}
    return run(less, score_params(tiny_model_dir, examples), out, **leaves)


def take_targets(params, out, *, dataset, warmup) -> Path:
    out.mkdir()
    scratch = out.parent / f"{out.name}-scratch"
    launch = Launch(threads=1, micro_batch=3)
    write_targets(params, dataset, warmup=warmup, out=out, scratch=scratch, launch=launch)
    return out


def score_params(model, path) -> LessParams:
    return LessParams(targets=str(path), projection_dim=K, seed=5, model=str(model), dtype="fp32")


@pytest.fixture(scope="module")
def adapted(tiny_model_dir, warmup):
    """The model with the adapter of each checkpoint, loaded by name."""

    def adapted(number):
        model = load_model(str(tiny_model_dir), dtype="fp32")
        facts = read_json(warmup / "summary.json")
        add_adapter(model, **facts["lora"])
        folder = warmup / facts["checkpoints"][number]["folder"]
        load_weights(model, folder / "weights.safetensors")
        return model, folder

    return adapted


def explicit_gradient(model, input_ids, labels) -> torch.Tensor:
    """The gradient of the model's own mean loss of one row, parameters in the order of names."""
    ids, targets = (torch.tensor([x]) for x in (input_ids, labels))
    trained = dict(sorted((n, p) for n, p in model.named_parameters() if p.requires_grad))
    loss = model(input_ids=ids, labels=targets).loss
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(trained.values()))])


def explicit_moments(folder, name) -> torch.Tensor:
    return torch.cat([t.flatten() for _, t in sorted(load_file(folder / name).items())])


def naive_signs(rows, columns, seed) -> np.ndarray:
    """The matrix of signs, from Python's own integers."""
    bits = (1 << 64) - 1

    def mix(x):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = ((x ^ (x >> shift)) * factor) & bits
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    found = np.empty((rows, columns))
    for d in range(rows):
        key = mix((d * golden + mix((seed + golden) & bits)) & bits)
        for j in range(columns):
            word = mix((key + (j // 64 + 1) * golden) & bits)
            found[d, j] = 2 * (word >> (j % 64) & 1) - 1
    return found


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 11])
def test_projection_signs_are_those_of_pythons_integers(seed):
    assert np.array_equal(signs(slice(0, 9), columns=130, seed=seed), naive_signs(9, 130, seed))


def test_projection_signs_of_any_part_are_those_of_the_whole():
    whole = signs(slice(0, 500), columns=100, seed=3)
    assert torch.equal(whole[123:301], signs(slice(123, 301), columns=100, seed=3))
    assert torch.equal(whole[:, :37], signs(slice(0, 500), columns=37, seed=3))
    assert not torch.equal(whole, signs(slice(0, 500), columns=100, seed=4))


def test_projection_signs_have_no_mean_and_no_correlations():
    matrix = signs(slice(0, 4096), columns=256, seed=1).double()
    # Standard deviations: 1 / sqrt(entries) of a mean, 1 / sqrt(rows) of a column's correlation.
    assert abs(matrix.mean()) < 5 / 1024
    between = matrix.T @ matrix / 4096 - torch.eye(256)
    assert between.abs().max() < 6 / 64
    assert between.std() == pytest.approx(1 / 64, rel=0.05)


def test_projection_of_any_blocks_is_the_product_with_the_matrix():
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    expected = x.double() @ signs(slice(0, 700), columns=96, seed=2).double() / 96**0.5
    for rows in (1, 64, 333, 700):
        found = project(x, columns=96, seed=2, block_rows=rows)
        assert torch.allclose(found, expected, atol=1e-5)


def test_projection_keeps_inner_products_within_the_expected_spread():
    x = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0)).double()
    unit = x / x.norm(dim=1, keepdim=True)
    found = project(unit.float(), columns=1024, seed=9)
    error = (found @ found.T - unit @ unit.T)[torch.triu(torch.ones(40, 40), 1).bool()]
    assert error.std() == pytest.approx(1 / 32, rel=0.15)
    assert error.abs().max() < 5 / 32


@pytest.mark.parametrize("batched", [True, False])
def test_row_gradients_equal_autograd_row_by_row(adapted, tiny_dataset, tmp_path, batched):
    pack_tokens(tiny_dataset / "dataset.parquet", tmp_path)
    store = open_tokens(tmp_path)
    model, _ = adapted(0)
    gradients = RowGradients(model, build_batch(store, np.asarray([3, 20])))
    assert gradients.batched
    gradients.batched = batched
    rows = [39, 2, 17]
    found = torch.full((3, gradients.size), torch.nan)
    gradients(build_batch(store, np.asarray(rows)), found)
    table = read_table(tiny_dataset, "dataset.parquet")
    for i, row in enumerate(rows):
        expected = explicit_gradient(model, table["input_ids"][row], table["labels"][row])
        assert (found[i] - expected).norm() < 1e-5 * expected.norm()
    assert all(p.requires_grad for p in gradients.trained.values())


def test_row_gradients_of_layers_that_mix_rows_are_taken_one_by_one(
    adapted, tiny_dataset, tmp_path
):
    pack_tokens(tiny_dataset / "dataset.parquet", tmp_path)
    store = open_tokens(tmp_path)
    model, _ = adapted(0)

    def flatten_tokens(layer, inputs):
        # As experts see them: all tokens of the batch in one list.
        return (inputs[0].flatten(0, 1),)

    layer = model.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(flatten_tokens)
    layer.register_forward_hook(lambda m, i, o: o.view(-1, shape["T"], o.shape[-1]))
    shape = {}
    model.register_forward_pre_hook(
        lambda m, args, kwargs: shape.update(T=kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert not RowGradients(model, build_batch(store, np.asarray([3, 20]))).batched


def test_gradient_features_keep_the_cosines_of_explicit_adam_directions(
    gradients, adapted, tiny_dataset
):
    table = read_table(tiny_dataset, "dataset.parquet")
    rows = list(range(0, 40, 3))
    for number in (0, 1):
        model, folder = adapted(number)
        m, v = (explicit_moments(folder, f"{x}.safetensors") for x in ("exp_avg", "exp_avg_sq"))
        directions = []
        for row in rows:
            g = explicit_gradient(model, table["input_ids"][row], table["labels"][row])
            step = (0.9 * m + 0.1 * g) / (0.999 * v + 0.001 * g**2 + 1e-8).sqrt()
            directions.append(step / step.norm())
        exact = torch.stack(directions).double()
        matrix = signs(slice(0, exact.shape[1]), columns=K, seed=5).double()
        expected = exact @ matrix
        expected /= expected.norm(dim=1, keepdim=True)
        features = read_array(gradients / f"features-{number + 1}.npy", ndim=2, dtype=np.float16)
        found = torch.from_numpy(features[rows].astype(np.float64))
        assert (found - expected).abs().max() < 1e-3  # float16 of numbers below 0.2
        error = (found @ found.T - exact @ exact.T)[~torch.eye(len(rows), dtype=torch.bool)]
        assert error.abs().max() < 5 / K**0.5


@pytest.mark.parametrize("gradient", ["sgd", "sign"])
def test_gradient_features_of_other_kinds_are_unit_projections(
    gradient, adapted, tiny_model_dir, tiny_dataset, warmup, tmp_path
):
    params = gradient_params(tiny_model_dir, gradient=gradient)
    leaf = run(less_gradients, params, tmp_path / "out", dataset=tiny_dataset, warmup=warmup)
    table = read_table(tiny_dataset, "dataset.parquet")
    g = explicit_gradient(adapted(1)[0], table["input_ids"][8], table["labels"][8])
    x = (g if gradient == "sgd" else g.sign()).double()
    expected = x @ signs(slice(0, len(x)), columns=K, seed=5).double()
    found = read_array(leaf / "features-2.npy", ndim=2, dtype=np.float16)[8]
    assert np.allclose(found, expected / expected.norm(), atol=1e-3)


def test_warmup_weights_are_the_mean_learning_rates_of_the_epochs(warmup, gradients):
    rates = [json.loads(x)["lr"] for x in (warmup / "train_log.jsonl").read_text().splitlines()]
    assert len(rates) == 6  # 12 rows in batches of 4, twice
    means = np.array([np.mean(rates[:3]), np.mean(rates[3:])])
    weights = read_json(gradients / "summary.json")["weights"]
    assert weights == pytest.approx((means / means.sum()).tolist())


def test_warmup_draws_its_share_of_the_rows_by_the_seed_alone():
    rows = less_warmup.draw_rows(270_679, share=0.05, seed=1)
    assert len(rows) == 13_533 and (np.diff(rows) > 0).all()
    assert np.array_equal(rows, less_warmup.draw_rows(270_679, share=0.05, seed=1))
    assert not np.array_equal(rows, less_warmup.draw_rows(270_679, share=0.05, seed=2))
    assert len(less_warmup.draw_rows(3, share=0.05, seed=0)) == 1


def test_warmup_of_a_single_step_is_refused(tiny_model_dir, tiny_dataset, tmp_path):
    params = LessWarmupParams(model=str(tiny_model_dir), warmup_epochs=1, batch_size=8)
    with pytest.raises(UserError, match="2 rows make a single step, whose learning rate is 0"):
        run(less_warmup, params, tmp_path / "out", dataset=tiny_dataset)


def test_less_scores_equal_a_naive_loop_over_targets(gradients, scored):
    weights = read_json(gradients / "summary.json")["weights"]
    ours, theirs = (
        [np.load(x / f"features-{i}.npy").astype(np.float64) for i in (1, 2)]
        for x in (gradients, scored / "targets")
    )
    subtasks = read_table(scored / "targets", "gradients.parquet")["subtask"].to_list()
    assert subtasks == ["count", "count", "facts"]
    expected = []
    for row in range(40):
        means = {"count": [], "facts": []}
        for q, name in enumerate(subtasks):
            influence = sum(
                w * (a[row] @ b[q]) for w, a, b in zip(weights, ours, theirs, strict=True)
            )
            means[name].append(influence)
        expected.append(max(np.mean(values) for values in means.values()))
    scores = read_scores(scored)
    assert scores["id"].to_list() == [f"{i:04d}" for i in range(40)]
    assert scores["score"].to_list() == pytest.approx(expected)
    summary = read_json(scored / "summary.json")
    assert summary["scored"] == 40 and sum(summary["subtasks"].values()) == 40


def test_less_prefers_the_target_itself_to_all_other_rows(
    gradients, tiny_model_dir, tiny_dataset, warmup, tmp_path
):
    # The question and answer of row 33, with plain gradients on both sides.
    row = read_table(tiny_dataset, "dataset.parquet").row(33, named=True)
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"messages": row["messages"]}))
    params = gradient_params(tiny_model_dir, gradient="sgd")
    leaves = {"dataset": tiny_dataset, "warmup": warmup}
    ours = run(less_gradients, params, tmp_path / "ours", **leaves)
    params = score_params(tiny_model_dir, path)
    leaf = run(less, params, tmp_path / "out", gradients=ours, **leaves)
    scores = read_scores(leaf)["score"].to_numpy()
    assert scores.argmax() == 33
    assert scores[33] == pytest.approx(1, abs=1e-3)


def test_less_gradients_of_another_projection_are_refused(
    examples, tiny_model_dir, tiny_dataset, warmup, tmp_path
):
    leaves = {"dataset": tiny_dataset, "warmup": warmup}
    other = run(less_gradients, gradient_params(tiny_model_dir, seed=6), tmp_path / "x", **leaves)
    params = score_params(tiny_model_dir, examples)
    with pytest.raises(UserError, match="differ in projection_seed"):
        run(less, params, tmp_path / "out", gradients=other, **leaves)


def test_targets_of_the_heldout_split_are_its_rows(tiny_model_dir, tiny_dataset, warmup, tmp_path):
    leaf = tmp_path / "dataset"
    leaf.mkdir()
    held = read_table(tiny_dataset, "dataset.parquet").head(4)
    write_table(leaf, "heldout.parquet", held)
    params = score_params(tiny_model_dir, Path(__file__).parents[1] / "data/heldout.yaml")
    out = take_targets(params, tmp_path / "out", dataset=leaf, warmup=warmup)
    rows = read_table(out, "gradients.parquet")
    assert rows["id"].to_list() == held["id"].to_list()
    assert rows["subtask"].to_list() == rows["reason"].to_list() == [None] * 4


def test_targets_of_an_empty_heldout_split_are_refused(
    tiny_model_dir, tiny_dataset, warmup, tmp_path
):
    write_table(tmp_path, "heldout.parquet", read_table(tiny_dataset, "dataset.parquet").head(0))
    (tmp_path / "held.yaml").write_text("split: heldout\n")
    params = score_params(tiny_model_dir, tmp_path / "held.yaml")
    with pytest.raises(UserError, match=r"there are none; set data.holdout above 0"):
        take_targets(params, tmp_path / "out", dataset=tmp_path, warmup=warmup)


def test_rows_without_a_finite_gradient_are_excluded_with_a_reason(
    examples, tiny_model_dir, tiny_dataset, warmup, tmp_path, monkeypatch
):
    rows = read_table(tiny_dataset, "dataset.parquet").head(5)
    labels = rows["labels"].to_list()
    labels[1] = [-100] * len(labels[1])
    leaf = tmp_path / "dataset"
    leaf.mkdir()
    write_table(leaf, "dataset.parquet", rows.with_columns(pl.Series("labels", labels)))
    compute = RowGradients.__call__

    def overflow(self, batch, out):
        compute(self, batch, out)
        out[torch.from_numpy(batch.rows == 3)] = torch.inf

    monkeypatch.setattr(RowGradients, "__call__", overflow)
    leaves = {"dataset": leaf, "warmup": warmup}
    ours = run(less_gradients, gradient_params(tiny_model_dir), tmp_path / "ours", **leaves)
    monkeypatch.undo()
    assert read_json(ours / "summary.json")["excluded"] == {"non_finite": 1, "zero_gradient": 1}
    params = score_params(tiny_model_dir, examples)
    out = run(less, params, tmp_path / "out", gradients=ours, **leaves)
    scores = read_scores(out)
    assert scores["reason"].to_list() == [None, "zero_gradient", None, "non_finite", None]
    assert scores["score"].is_null().to_list() == [False, True, False, True, False]


def test_gradient_features_two_processes_give_the_bits_of_one(
    gradients, tiny_model_dir, tiny_dataset, warmup, tmp_path, monkeypatch
):
    launch = Launch(processes=2, threads=2, micro_batch=3)
    params = gradient_params(tiny_model_dir)
    leaf = run(
        less_gradients,
        params,
        tmp_path / "out",
        launch=launch,
        dataset=tiny_dataset,
        warmup=warmup,
    )
    for number in (1, 2):
        name = f"features-{number}.npy"
        assert (leaf / name).read_bytes() == (gradients / name).read_bytes()


def test_gradient_features_interrupted_go_on_and_end_with_the_same_bits(
    tiny_model_dir, tiny_dataset, warmup, tmp_path, monkeypatch
):
    monkeypatch.setattr(_gradient_features, "GROUP_ROWS", 8)
    monkeypatch.setattr("cluster_sft.partial_results.FLUSH_SECONDS", 0)
    params, leaves = gradient_params(tiny_model_dir), {"dataset": tiny_dataset, "warmup": warmup}
    whole = run(less_gradients, params, tmp_path / "whole", **leaves)
    project_rows, calls = _gradient_features._project, []

    def break_down(*arguments):
        calls.append(arguments)
        if len(calls) == 8:  # of ten groups, five a checkpoint
            raise KeyboardInterrupt
        return project_rows(*arguments)

    monkeypatch.setattr(_gradient_features, "_project", break_down)
    scratch = tmp_path / "scratch"
    with pytest.raises(KeyboardInterrupt):
        run(less_gradients, params, tmp_path / "killed", scratch=scratch, **leaves)
    write_json(scratch / "seconds.json", {"seconds": 1000.0})
    again = run(less_gradients, params, tmp_path / "again", scratch=scratch, **leaves)
    assert len(calls) == 8 + 3
    assert 1000 < read_json(again / "summary.json")["cost"]["seconds"] < 1200
    for number in (1, 2):
        name = f"features-{number}.npy"
        assert (again / name).read_bytes() == (whole / name).read_bytes()


def test_steps_of_less_state_their_cost(warmup, gradients, scored):
    costs = [read_json(leaf / "summary.json")["cost"] for leaf in (warmup, gradients, scored)]
    assert [c["forward_passes"] for c in costs] == [c["backward_passes"] for c in costs]
    assert [c["backward_passes"] for c in costs] == [24, 80, 6]
    assert all(c["seconds"] > 0 and c["bytes_stored"] > 0 and c["tokens"] > 0 for c in costs)
