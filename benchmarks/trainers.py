"""Transformers' Trainer and TRL's SFTTrainer on ready-made rows. Imports nothing of this project.

Rows come as JSON lines of input_ids and labels, in the order that they are trained on. Settings are
those of our stage; everything else is the trainer's own default. Of TRL's defaults two are changed:
gradient checkpointing is off, and rows are neither packed nor cut.

Called with a job as JSON; prints the result as JSON. TRL runs in the peers' venv.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

CLEAR_PEAK = "5"  # to /proc/self/clear_refs


class Clock(TrainerCallback):
    """The times at which steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Train on the rows; return the seconds between the ends of steps and the peak of memory."""
    torch.set_num_threads(job["threads"])
    with Path(job["rows"]).open() as file:
        rows = Dataset.from_list([json.loads(line) for line in file])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    trainer = {"trainer": make_trainer, "trl": make_trl}[job["arm"]](job, model, rows)
    clock = Clock()
    trainer.add_callback(clock)
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text(CLEAR_PEAK)
    trainer.train()
    ends = clock.ends
    return {
        "seconds": [b - a for a, b in pairwise(ends)],
        "resident_bytes": _peak(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "versions": {name: version(name) for name in job["packages"]},
    }


def make_trainer(job: dict[str, Any], model: Any, rows: Dataset) -> Trainer:
    """Return Transformers' Trainer, with padding to the longest row of a forward pass."""
    arguments = TrainingArguments(**_arguments(job), remove_unused_columns=False)
    return Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)


def make_trl(job: dict[str, Any], model: Any, rows: Dataset) -> Trainer:
    """Return TRL's SFTTrainer."""
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    arguments = SFTConfig(**_arguments(job), gradient_checkpointing=False, max_length=None)
    return SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)


def _arguments(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": job["out"],
        "per_device_train_batch_size": job["micro_batch"],
        "gradient_accumulation_steps": job["batch"] // job["micro_batch"],
        "num_train_epochs": 1,
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "bf16": job["precision"] == "bf16",
        "use_cpu": not torch.cuda.is_available(),
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a padded batch."""
    width = max(len(row["input_ids"]) for row in rows)
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
    labels = torch.full((len(rows), width), -100)
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[i, :length] = torch.tensor(row["input_ids"])
        labels[i, :length] = torch.tensor(row["labels"])
        mask[i, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
