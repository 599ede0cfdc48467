"""The model that a training starts from, and how its losses can be computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster_sft.adapters import add_adapter
from cluster_sft.batching import Step
from cluster_sft.heads import head_is_exact, supervised_positions
from cluster_sft.models import load_config, load_model
from cluster_sft.training_rows import TrainingRows, collate

if TYPE_CHECKING:
    from peft import PeftModel

    from cluster_sft.stage_params import TrainParams

TRIED = 32  # tokens that tell whether the head alone gives the model's logits


def make_model(
    params: TrainParams, path: str, device: torch.device
) -> tuple[PreTrainedModel, PeftModel | None]:
    """Load the untrained model, float32 and in eval mode, with a fresh adapter for LoRA.

    Args:
        params: the training's.
        path: the model's directory.
        device: where to; "meta" makes its tensors without their data.

    Raises:
        UserError: a model that cannot be read, or one without the adapter's layers.
    """
    if device.type == "meta":
        with device:
            model = AutoModelForCausalLM.from_config(load_config(path), dtype=torch.float32)
        model.eval()
    else:
        model = load_model(path, dtype="fp32", device=device)
    if not params.lora_rank:
        return model, None
    adapter = add_adapter(
        model,
        rank=params.lora_rank,
        alpha=params.lora_alpha,
        dropout=params.lora_dropout,
        targets=params.lora_targets,
        seed=params.seed,
    )
    return model, adapter


def head_gives_logits(model: PreTrainedModel, rows: TrainingRows, step: Step) -> bool:
    """Whether the head alone gives the model's own logits, tried on the start of one row."""
    first = next(positions for positions, _ in step if len(positions))[:1]
    ids, mask, _ = (x[:, :TRIED] for x in collate(rows, first, device=model.device))
    marked = supervised_positions(ids, mask)
    targets = ids.roll(-1, dims=1)[marked]
    exact = head_is_exact(model, ids, mask, marked.flatten().nonzero()[:, 0], targets)
    if not exact:
        print("the head alone does not give this model's logits: training on full logits")
    return exact
