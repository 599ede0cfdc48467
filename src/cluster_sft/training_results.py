"""What a finished training leaves: the model or its snapshots, the log, the facts of the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel

from cluster_sft.adapters import merge_adapter, save_adapter
from cluster_sft.artifacts import write_json
from cluster_sft.checkpoints import snapshot_name
from cluster_sft.costs import peak_resident_bytes
from cluster_sft.models import load_tokenizer
from cluster_sft.trackers import TENSORBOARD
from cluster_sft.training_loop import SAVED_DTYPES, SNAPSHOTS, TRAIN_LOG, Session, read_log

if TYPE_CHECKING:
    from peft import PeftModel

FACTS = "facts.json"


def write_results(session: Session, job: Mapping[str, Any], *, resumed_seconds: float) -> None:
    """Write the payload, and the run's facts to the scratch folder, as the main process."""
    accelerator, out = session.accelerator, Path(job["out"])
    peak = torch.tensor([_peak_memory(accelerator.device)], dtype=torch.float64)
    peaks = cast("torch.Tensor", accelerator.gather(peak.to(accelerator.device)))
    trained = None
    if not session.snapshots:
        trained = session.parallelism.collect(session.model, session.adapter, session.make_model)
    if not accelerator.is_main_process:
        return
    for step in sorted(session.snapshots):
        name = snapshot_name(step)
        shutil.copytree(session.scratch / SNAPSHOTS / name, out / name, copy_function=_link)
    if trained is not None:
        _write_model(session, *trained, source=job["model"], out=out)
    log = session.scratch / TRAIN_LOG
    shutil.copyfile(log, out / TRAIN_LOG)
    # Their own names hold the host's.
    for number, events in enumerate(sorted((session.scratch / TENSORBOARD).glob("*"))):
        (out / TENSORBOARD).mkdir(exist_ok=True)
        shutil.copyfile(events, out / TENSORBOARD / f"events.out.tfevents.{number}")
    facts = {
        **_facts(session, read_log(log)),
        "peak_memory_bytes": int(peaks.max()),
        "resumed_seconds": resumed_seconds,
    }
    write_json(session.scratch / FACTS, facts)


def _write_model(
    session: Session,
    model: PreTrainedModel,
    adapter: PeftModel | None,
    *,
    source: str,
    out: Path,
) -> None:
    """Write the model directory; an adapter is saved, and merged into the model."""
    if adapter is not None:
        save_adapter(adapter, out / "adapter", base=session.params.model)
        model = merge_adapter(adapter)
    cast("Any", model).to(SAVED_DTYPES[session.params.precision]).save_pretrained(out)
    # safetensors 0.8 writes files that only their owner can read.
    for weights in out.rglob("*.safetensors"):
        weights.chmod((out / "config.json").stat().st_mode)
    load_tokenizer(source).save_pretrained(out)


def _facts(session: Session, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = sum(entry["seconds"] for entry in entries)
    tokens = sum(entry["tokens"] for entry in entries)
    return {
        "steps": len(entries),
        "rows": len(session.rows.selection.ids),
        "row_visits": sum(entry["rows"] for entry in entries),
        "train_tokens": tokens,
        "supervised_tokens": sum(entry["supervised_tokens"] for entry in entries),
        "train_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "processes": session.accelerator.num_processes,
        "workers": session.params.workers,
        "last_loss": entries[-1]["loss"],
    }


def _link(source: str, target: str) -> str:
    """Give a large file a second name, or copy it where the folders are on different disks."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        shutil.copymode(source, target)
    return target


def _peak_memory(device: torch.device) -> float:
    """Return the most bytes this process held: of its GPU, else resident."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(peak_resident_bytes())
