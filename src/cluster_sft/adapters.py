"""LoRA adapters (Hu et al., 2021) through PEFT: put on a loaded model, saved, merged into it.

The layers that PEFT puts in stay inside the model's own class, so that whatever works on the model
(its head, its configuration) works on it with an adapter. Adapter weights are float32 and are drawn
on the CPU from the seed alone: alike on every device and in every process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cluster_sft.errors import UserError

if TYPE_CHECKING:
    from peft import PeftModel

CONFIG = "adapter_config.json"


def add_adapter(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: int,
    dropout: float,
    targets: Sequence[str],
    seed: int,
) -> PeftModel:
    """Put a fresh adapter on `model`, in place; nothing but the adapter is trainable afterwards.

    A linear layer W becomes W + (alpha / rank) B A, with B zero at the start. The model itself,
    as `get_base_model()` of the result, stays in the mode it was in.

    Args:
        model: a causal language model, of any dtype.
        rank: r, rows of A.
        alpha: scale of the adapter's output, in units of 1 / rank.
        dropout: of what enters A, while training; drawn from torch's global generators.
        targets: last names of the linear layers, in whichever block they stand.
        seed: of A.

    Raises:
        UserError: the model has no linear layer of such a name.
    """
    # PEFT takes seconds to import, and full fine-tuning does without it.
    from peft import LoraConfig, get_peft_model

    _check_targets(model, targets)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(targets),
    )
    training = model.training
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        adapter = get_peft_model(model, config)
    adapter.train(training)
    assert all(p.dtype == torch.float32 for p in adapter.parameters() if p.requires_grad)
    return cast("PeftModel", adapter)


def linear_names(model: PreTrainedModel) -> list[str]:
    """Return the last names of the linear layers that can carry an adapter, sorted.

    A head that shares its weights with the input embeddings cannot: merging would change both.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and not (tied and module is head)
        }
    )


def save_adapter(adapter: PeftModel, folder: Path, *, base: str) -> None:
    """Write the adapter alone, as PEFT loads it onto the model named `base`."""
    for config in adapter.peft_config.values():
        config.base_model_name_or_path = base
    # Embeddings are never trained here; to find out PEFT would ask the Hub.
    adapter.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / CONFIG
    written = json.loads(path.read_text())
    # Of a set, in an order that differs from run to run.
    written["target_modules"] = sorted(written["target_modules"])
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def load_weights(model: PreTrainedModel, path: Path) -> None:
    """Put weights that were saved by their names into the model; the others stay."""
    unknown = model.load_state_dict(load_file(path), strict=False).unexpected_keys
    assert not unknown, f"{path} holds {unknown[0]}, which the model lacks"


def merge_adapter(adapter: PeftModel) -> PreTrainedModel:
    """Add the adapter to the weights it is on, in their dtype; return the plain model."""
    return cast("PreTrainedModel", cast("Any", adapter).merge_and_unload())


def _check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    known = linear_names(model)
    lost = [name for name in targets if name not in known]
    if lost or not targets:
        raise UserError(
            f"lora_targets must name linear layers of {type(model).__name__}, got "
            f"{lost[0] if lost else '[]'!r}; it has {', '.join(known)}"
        )
