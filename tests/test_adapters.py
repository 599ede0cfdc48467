"""LoRA: what an adapter changes, what training leaves of it, and snapshots with Adam's moments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cluster_sft import training, training_loop
from cluster_sft.adapters import add_adapter, merge_adapter
from cluster_sft.batching import batch_plan
from cluster_sft.errors import UserError
from cluster_sft.heads import head_is_exact, supervised_positions
from cluster_sft.models import load_model
from cluster_sft.params import Launch
from cluster_sft.training_loop import read_log
from cluster_sft.training_rows import plain_settings, read_rows, write_subset

IDS = [f"{i:04d}" for i in range(3, 15)]
LORA = {"lora_rank": 4, "lora_alpha": 16, "lora_targets": ["q_proj", "v_proj", "down_proj"]}
ADAPTER = {"rank": 4, "alpha": 16, "dropout": 0.0, "targets": ["q_proj", "down_proj"], "seed": 3}


@pytest.fixture
def model(tiny_model_dir):
    return load_model(str(tiny_model_dir), dtype="fp32")


@pytest.fixture(scope="module")
def settings(tiny_model_dir):
    """Return settings of a run of 9 steps, 3 an epoch, with changes."""
    base = plain_settings(
        model=str(tiny_model_dir),
        epochs=3,
        learning_rate=1e-2,
        batch_size=4,
        warmup_ratio=0.1,
        precision="fp32",
        seed=1,
    )
    return {**base, **LORA}


@pytest.fixture(scope="module")
def fit(tiny_dataset, tmp_path_factory):
    """Train on 12 rows; return the folder that was written. A single process is this one."""
    subset = tmp_path_factory.mktemp("subset")
    write_subset(subset, IDS)

    def work_here(module, job, *, processes, **_):
        training.worker({**job, "processes": processes})

    def fit(
        settings, *, scratch=None, processes=1, minutes=10.0, parallelism="ddp", **options
    ) -> Path:
        out = tmp_path_factory.mktemp("fit")
        with pytest.MonkeyPatch.context() as patch:
            if processes == 1:
                patch.setattr(training.launching, "launch", work_here)
            facts = training.fit(
                settings,
                dataset=tiny_dataset,
                subset=subset,
                out=out,
                scratch=scratch or tmp_path_factory.mktemp("scratch"),
                launch=Launch(
                    processes=processes,
                    threads=2,
                    micro_batch=2,
                    checkpoint_minutes=minutes,
                    parallelism=parallelism,
                ),
                **options,
            )
        (out / "facts.json").write_text(json.dumps(facts))
        return out

    return fit


@pytest.fixture(scope="module")
def snapshots(fit, settings) -> Path:
    return fit(settings, snapshots=(3, 6, 9), keep_moments=True, label="warm-up")


def reference(settings, dataset, subset):
    """Train the adapter on whole batches with torch's AdamW; return snapshots after each epoch."""
    model = load_model(settings["model"], dtype="fp32")
    add_adapter(
        model,
        rank=4,
        alpha=16,
        dropout=0.0,
        targets=settings["lora_targets"],
        seed=settings["seed"],
    )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), weight_decay=0.0)
    rows = read_rows(dataset, subset, weights="none")
    plan = batch_plan(
        [0] * len(IDS), [1.0], workers=1, global_batch_size=4, epochs=3, seed=1, batches="random"
    )
    seen = []
    for index, [(positions, _)] in enumerate(plan):
        for position in positions:
            ids, labels = (
                torch.from_numpy(x[position]).long()[None] for x in (rows.input_ids, rows.labels)
            )
            (model(input_ids=ids, labels=labels).loss / len(positions)).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        # One step of warm-up, then a line to 0.
        optimizer.param_groups[0]["lr"] = 0.0 if index == 0 else 1e-2 * (9 - index) / 8
        optimizer.step()
        optimizer.zero_grad()
        if (index + 1) % 3 == 0:
            weights = {n: p.detach().clone() for n, p in trained.items()}
            moments = {n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in trained.items()}
            seen.append((weights, moments))
    return seen


def random_batch(seed: int = 0):
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(seed))
    return ids, torch.ones_like(ids)


def test_adapter_starts_without_an_effect_and_alone_is_trainable(model):
    ids, mask = random_batch()
    before = model(input_ids=ids, attention_mask=mask).logits
    add_adapter(model, **ADAPTER)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2  # A and B of two layers in two blocks
    assert all("lora_" in name for name in trained)
    assert not model.training
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)


def test_adapter_depends_on_its_seed_alone(tiny_model_dir):
    drawn = []
    for state in (1, 2):
        torch.manual_seed(state)
        model = load_model(str(tiny_model_dir), dtype="fp32")
        add_adapter(model, **ADAPTER)
        drawn.append([p for p in model.parameters() if p.requires_grad])
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(state))
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


@pytest.mark.parametrize("targets", [["q_proj", "qkv"], ["lm_head"], []])
def test_adapter_on_layers_that_the_model_lacks_names_those_it_has(model, targets):
    # The tiny model's head is its input embedding.
    with pytest.raises(UserError, match=r"got .*; it has down_proj, .*, up_proj, v_proj$"):
        add_adapter(model, **{**ADAPTER, "targets": targets})


def test_head_alone_gives_the_logits_of_a_model_with_an_adapter(model):
    adapter = add_adapter(model, **ADAPTER)
    for name, p in adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    ids, mask = random_batch()
    marked = supervised_positions(ids, mask)
    positions = marked.flatten().nonzero()[:, 0]
    assert head_is_exact(model, ids, mask, positions, ids.roll(-1, dims=1)[marked])
    full = model(input_ids=ids, attention_mask=mask).logits
    plain = merge_adapter(adapter)
    assert torch.allclose(plain(input_ids=ids, attention_mask=mask).logits, full, atol=1e-5)


def test_fit_snapshots_equal_a_plain_loop_with_adamw(snapshots, settings, tiny_dataset, tmp_path):
    write_subset(tmp_path, IDS)
    for step, (weights, moments) in zip(
        (3, 6, 9), reference(settings, tiny_dataset, tmp_path), strict=True
    ):
        folder = snapshots / f"step-{step:08d}"
        found = load_file(folder / "weights.safetensors")
        squares = load_file(folder / "exp_avg_sq.safetensors")
        assert found.keys() == squares.keys() == weights.keys()
        for name, expected in weights.items():
            assert torch.allclose(found[name], expected, atol=1e-5), name
            assert torch.allclose(squares[name], moments[name], rtol=1e-3, atol=1e-10), name


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_fit_two_processes_give_the_snapshots_of_one_dropout_included(fit, settings, parallelism):
    options = {"snapshots": (9,), "keep_moments": True, "parallelism": parallelism}
    leaves = [fit({**settings, "lora_dropout": 0.5}, processes=p, **options) for p in (1, 2)]
    for name in ("weights", "exp_avg"):
        ours, theirs = (load_file(x / "step-00000009" / f"{name}.safetensors") for x in leaves)
        assert all(torch.allclose(ours[n], theirs[n], atol=1e-5) for n in theirs)


def test_fit_processes_that_do_not_divide_a_batch_are_fewer(
    settings, tiny_dataset, tmp_path, monkeypatch
):
    class Started(Exception):
        pass

    def launch(module, job, *, processes, **_):
        raise Started(processes, job["params"]["workers"])

    write_subset(tmp_path, IDS)
    monkeypatch.setattr(training.launching, "launch", launch)
    leaves = {"dataset": tiny_dataset, "subset": tmp_path, "out": tmp_path, "scratch": tmp_path}
    with pytest.raises(Started) as started:
        training.fit(settings, **leaves, launch=Launch(processes=3))
    assert started.value.args == (2, 4)


def test_fit_interrupted_keeps_snapshots_and_ends_with_the_same_bits(
    fit, settings, snapshots, tmp_path, monkeypatch
):
    step = training_loop._run_step

    def break_down(session, index, *, is_due):
        if index == 5:
            raise KeyboardInterrupt
        return step(session, index, is_due=is_due)

    options = {"snapshots": (3, 6, 9), "keep_moments": True, "scratch": tmp_path}
    monkeypatch.setattr(training_loop, "_run_step", break_down)
    with pytest.raises(KeyboardInterrupt):
        fit(settings, minutes=1e-9, **options)
    monkeypatch.setattr(training_loop, "_run_step", step)
    before = read_log(tmp_path / "train_log.jsonl")
    leaf = fit(settings, **options)
    assert read_log(leaf / "train_log.jsonl")[:5] == before
    for number in (3, 6, 9):
        for name in ("weights", "exp_avg", "exp_avg_sq"):
            file = Path(f"step-{number:08d}", f"{name}.safetensors")
            assert (leaf / file).read_bytes() == (snapshots / file).read_bytes()


def test_train_with_lora_writes_the_merged_model_and_the_adapter(fit, settings, tiny_model_dir):
    leaf = fit({**settings, "precision": "bf16"})
    merged = AutoModelForCausalLM.from_pretrained(leaf)
    assert merged.dtype == torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    ids, mask = random_batch()
    before = base(input_ids=ids, attention_mask=mask).logits
    adapted = PeftModel.from_pretrained(base, leaf / "adapter")
    after = adapted(input_ids=ids, attention_mask=mask).logits
    found = merged.float()(input_ids=ids, attention_mask=mask).logits
    change = (after - before).norm()
    assert (found - after).norm() < 0.1 * change  # bf16 rounds the weights
    config = json.loads((leaf / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model_dir)


def test_train_lora_dropout_changes_the_losses_and_is_seeded(fit, settings):
    dropped = {**settings, "lora_dropout": 0.5}
    plain, first, again = (
        [e["loss"] for e in read_log(fit(s) / "train_log.jsonl")]
        for s in (settings, dropped, dropped)
    )
    assert first == again != plain
    assert first[0] == pytest.approx(plain[0])  # B is zero at the start
