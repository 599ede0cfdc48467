"""The arms of the training benchmark that are ours: the stage, and one step's memory.

Called with a job as JSON, each in a process of its own; prints the result as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from benchmarks import measuring
from cluster_sft import models, training
from cluster_sft.artifacts import read_json
from cluster_sft.batching import Step
from cluster_sft.objective import RowLoss
from cluster_sft.params import Launch
from cluster_sft.stage_params import TrainParams
from cluster_sft.training_loop import TRAIN_LOG, read_log
from cluster_sft.training_rows import TrainingRows, collate, make_plan, read_rows
from cluster_sft.workload import MicroBatch, split_step

PLANS = 5  # repetitions of what takes but milliseconds
TURNS = 2  # in which every pass is compared; even, so that each loss is first as often


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Run one arm and return what was measured."""
    torch.set_num_threads(job["threads"])
    arms = {"stage": run_stage, "plan": run_plan, "weighting": run_weighting, "step": run_step}
    return arms[job["arm"]](job)


def run_stage(job: dict[str, Any]) -> dict[str, Any]:
    """Run the stage; a step lasts from the end of the one before to its own, all included."""
    out, scratch = Path(job["out"]), Path(job["scratch"])
    for folder in (out, scratch):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    training.run(
        params_of(job),
        dataset=Path(job["dataset"]),
        subset=Path(job["subset"]),
        out=out,
        scratch=scratch,
        launch=Launch(threads=job["threads"], micro_batch=job["micro_batch"]),
    )
    log = read_log(out / TRAIN_LOG)
    ends = step_ends(out / "tensorboard")
    return {
        "seconds": [b - a for a, b in pairwise(ends)],
        "tokens": [entry["tokens"] for entry in log],
        "losses": [entry["loss"] for entry in log],
        "resident_bytes": read_json(out / "summary.json")["peak_memory_bytes"],
    }


def step_ends(folder: Path) -> list[float]:
    """Return the times at which the steps' losses reached TensorBoard, by step."""
    found = {}
    for path in sorted(folder.iterdir()):
        for event in EventFileLoader(str(path)).Load():
            if any(value.tag == "train/loss" for value in event.summary.value):
                found[event.step] = event.wall_time
    return [found[step] for step in sorted(found)]


def run_plan(job: dict[str, Any]) -> dict[str, Any]:
    """Time what batches and weights cost beside the steps: the plan, and every step's shares."""
    params = params_of(job)
    rows = read_rows(Path(job["dataset"]), Path(job["subset"]), weights=params.weights)
    plan = make_plan(rows.selection, params)

    def shares() -> None:
        for step in make_plan(rows.selection, params):
            passes_of(step, rows, job)

    write_rows(Path(job["rows"]), rows, params)
    return {
        "steps": len(plan),
        "rows": len(rows.selection.ids),
        "seconds_per_step": [measuring.timed(shares)[0] / len(plan) for _ in range(PLANS)],
    }


def passes_of(step: Step, rows: TrainingRows, job: dict[str, Any]) -> list[MicroBatch]:
    """Return a step's forward passes in one process."""
    (share,) = split_step(
        step,
        lengths=rows.lengths_N,
        n_tokens=rows.n_tokens_N,
        processes=1,
        loss_reduction=params_of(job).loss_reduction,
        micro_batch=job["micro_batch"],
        batch_tokens=Launch().batch_tokens,
    )
    return share


def run_weighting(job: dict[str, Any]) -> dict[str, Any]:
    """Time passes with the weighted loss and with the plain mean of the rows' losses, in turns.

    Both run in one process on the same rows one after the other, and which is first alternates:
    what separates two processes is larger than what is measured.
    """
    params, device = params_of(job), models.pick_device("auto")
    rows = read_rows(Path(job["dataset"]), Path(job["subset"]), weights=params.weights)
    plan = make_plan(rows.selection, params)
    loss = RowLoss(models.load_model(job["model"], dtype="fp32", device=device).train())

    def seconds(micro: MicroBatch, *, weighted: bool) -> float:
        started = time.perf_counter()
        with autocast(job, device):
            losses = loss(*collate(rows, micro.rows, device=device))
        if weighted:
            total = (torch.from_numpy(micro.coefficients).to(losses) * losses).sum()
        else:
            total = losses.mean()
        total.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    passes = [micro for step in plan for micro in passes_of(step, rows, job)]
    seconds(passes[0], weighted=True)
    found = []
    for turn in range(TURNS):
        for i, micro in enumerate(passes):
            first = (turn + i) % 2 == 0
            took = {w: seconds(micro, weighted=w) for w in (first, not first)}
            found.append(took[True] / took[False])
    return {"ratios": found}


def write_rows(path: Path, rows: TrainingRows, params: TrainParams) -> None:
    """Write the rows in the order of the plan, for trainers that take them as they come."""
    with path.open("w") as file:
        for step in make_plan(rows.selection, params):
            for positions, _ in step:
                for i in positions:
                    ids, labels = rows.input_ids[i].tolist(), rows.labels[i].tolist()
                    file.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")


def run_step(job: dict[str, Any]) -> dict[str, Any]:
    """Return the peak of memory of one forward and backward pass, on top of weights and gradients.

    A small pass goes first: what stays allocated after any pass, gradients first of all, is no
    cost of the pass that is measured.
    """
    device = models.pick_device("auto")
    model = models.load_model(job["model"], dtype="fp32", device=device).train()
    loss = RowLoss(model, full_logits=job["loss"] == "full")

    def step(rows: int, tokens: int) -> None:
        ids = torch.randint(3, model.config.vocab_size, (rows, tokens), device=device)
        mask = torch.ones_like(ids)
        with autocast(job, device):
            if job["loss"] == "model":
                value = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            else:
                value = loss(ids, mask, ids).sum() / ids.numel()
        value.backward()

    step(1, 8)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds, _ = measuring.timed(lambda: step(job["rows"], job["tokens"]))
        return {"seconds": seconds, "bytes": torch.cuda.max_memory_allocated() - before}
    with measuring.MemoryPeak() as peak:
        seconds, _ = measuring.timed(lambda: step(job["rows"], job["tokens"]))
    return {"seconds": seconds, "bytes": peak.anonymous - peak.before}


def autocast(job: dict[str, Any], device: torch.device) -> torch.autocast:
    """Return the context of a forward pass, as the stage has it."""
    enabled = models.arithmetic(job["precision"], device) == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def params_of(job: dict[str, Any]) -> TrainParams:
    """Return the stage's parameters for a job."""
    return TrainParams(
        model=job["model"],
        workers=job["workers"],
        weights=job["weights"],
        batches="stratified",
        global_batch_size=job["batch"],
        epochs=1,
        learning_rate=job["learning_rate"],
        loss_reduction="token",
        precision=job["precision"],
    )


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
