"""The arms of the embedding benchmark: one measurement in a process of its own.

Every arm has the weights in memory before its clock starts and its peak of memory is counted: what
is compared is the work on the data. Loading is timed beside it.

Legend: B rows, T positions, H hidden size.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks import measuring
from cluster_sft import embedding, models
from cluster_sft.artifacts import read_json, read_table
from cluster_sft.heads import CHUNK_ROWS
from cluster_sft.params import Launch
from cluster_sft.partial_results import Results
from cluster_sft.stage_params import EmbedParams
from cluster_sft.token_batches import build_batch, open_tokens, pack_tokens, plan_batches

NAIVE_ROWS = 8


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Run one arm and return its seconds and memory."""
    torch.set_num_threads(job["threads"])
    out = Path(job["out"])
    shutil.rmtree(out, ignore_errors=True)
    (out / "scratch").mkdir(parents=True)
    device = models.pick_device("auto")
    loading, model = measuring.timed(
        lambda: models.load_model(job["model"], dtype=job["dtype"], device=device)
    )
    arm = {"floor": run_floor, "stage": run_stage, "naive": run_naive, "worker": run_worker}
    return {"load_seconds": loading, **arm[job["arm"]](job, model, out)}


@torch.inference_mode()
def run_floor(job: dict[str, Any], model: PreTrainedModel, out: Path) -> dict[str, Any]:
    """Run the bare model over ready-made batches, and its head on supervised positions."""
    body, head = model.base_model, model.get_output_embeddings()
    pack_tokens(Path(job["dataset"]) / "dataset.parquet", out)
    store = open_tokens(out)
    plan = plan_batches(store.lengths, job["batch_tokens"])
    batches = [build_batch(store, plan.rows(i)).to(model.device) for i in range(len(plan))]
    size = CHUNK_ROWS[model.device.type]

    def work() -> None:
        for batch in batches:
            hidden = body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
            for rows in hidden.flatten(0, 1)[batch.positions].split(size):
                head(rows)
        _finish(model)

    with measuring.MemoryPeak() as peak:
        seconds, _ = measuring.timed(work)
    return {"seconds": seconds, "padding_share": plan.padding, "batches": len(plan), **peak.facts()}


def run_stage(job: dict[str, Any], model: PreTrainedModel, out: Path) -> dict[str, Any]:
    """Run the stage, from the tokenised table to the array on disk."""
    embedding.models.load_model = lambda *_, **__: model
    with measuring.MemoryPeak() as peak:
        seconds, _ = measuring.timed(
            lambda: embedding.run(
                EmbedParams(model=job["model"], dtype=job["dtype"]),
                dataset=Path(job["dataset"]),
                out=out,
                scratch=out / "scratch",
                launch=Launch(threads=job["threads"], batch_tokens=job["batch_tokens"]),
            )
        )
    summary = read_json(out / "summary.json")
    facts = {name: summary[name] for name in ("n", "tokens", "padding_share", "supervised_tokens")}
    return {"seconds": seconds, **facts, **peak.facts()}


@torch.inference_mode()
def run_naive(job: dict[str, Any], model: PreTrainedModel, out: Path) -> dict[str, Any]:
    """Do what a short script does: 8 rows in file order, padded, all logits, log-softmax."""
    with measuring.MemoryPeak() as peak:
        seconds, found = measuring.timed(lambda: _naive(job, model, out))
    return {"seconds": seconds, "n": len(found), **peak.facts()}


def _naive(job: dict[str, Any], model: PreTrainedModel, out: Path) -> np.ndarray:
    columns = ["source_row", "input_ids", "labels"]
    rows = read_table(Path(job["dataset"]), "dataset.parquet", columns)
    order = rows["source_row"].arg_sort().to_numpy()
    tokens, labels = rows["input_ids"].to_list(), rows["labels"].to_list()
    parts = []
    for low in range(0, len(order), NAIVE_ROWS):
        some = order[low : low + NAIVE_ROWS]
        width = max(len(tokens[i]) for i in some)
        ids, wanted, mask = (torch.full((len(some), width), fill) for fill in (0, -100, 0))
        for at, i in enumerate(some):
            ids[at, : len(tokens[i])] = torch.tensor(tokens[i])
            wanted[at, : len(tokens[i])] = torch.tensor(labels[i])
            mask[at, : len(tokens[i])] = 1
        ids, wanted, mask = (x.to(model.device) for x in (ids, wanted, mask))
        hidden = model.base_model(
            input_ids=ids, attention_mask=mask, use_cache=False
        ).last_hidden_state[:, :-1]
        log_probs = torch.log_softmax(model.get_output_embeddings()(hidden).float(), dim=-1)
        target = wanted[:, 1:]
        chosen = (target != -100).float()
        own = log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        factor = (own.exp() - 1) * chosen / chosen.sum(1, keepdim=True)
        proxy = torch.einsum("bt,bth->bh", factor, hidden.float())
        parts.append(torch.nn.functional.normalize(proxy, dim=1).half().cpu().numpy())
    found = np.concatenate(parts)[np.argsort(order)]
    np.save(out / "embeddings.npy", found)
    return found


def run_worker(job: dict[str, Any], model: PreTrainedModel, out: Path) -> dict[str, Any]:
    """Be one of several processes of the stage; start when all of them have loaded."""
    embedding.models.load_model = lambda *_, **__: model
    print("ready", flush=True)
    sys.stdin.readline()
    part = {name: job[name] for name in ("model", "dtype", "batch_tokens", "processes", "scratch")}
    part |= {
        "label": "embed",
        "tokens": job["scratch"],
        "arrays": list(embedding.result_arrays(0, 0)),
    }
    with measuring.MemoryPeak() as peak:
        seconds, _ = measuring.timed(lambda: embedding.work(part, rank=job["rank"]))
    return {"seconds": seconds, **peak.facts()}


def prepare_scratch(dataset: Path, scratch: Path, *, width: int) -> None:
    """Make the scratch folder that processes of the stage share."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    pack_tokens(dataset / "dataset.parquet", scratch)
    rows = len(open_tokens(scratch).lengths)
    Results.create(scratch, embedding.result_arrays(rows, width))


def _finish(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
