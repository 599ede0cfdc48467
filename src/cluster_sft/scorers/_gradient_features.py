"""Projected gradients of rows at every checkpoint of a warm-up: what LESS compares.

Rows, longest first, are cut into groups whose gradients are in memory at once. A group is computed
whole by one process: gradients in forward passes of the launch settings' size, preconditioned and
projected together, scaled to unit length. Results lie in memory-mapped arrays in the scratch
folder, a folder a checkpoint, and are marked done; a killed run continues from the marks.

Legend: N rows, B rows of a group, D trainable parameters, k dimensions of the projection.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from cluster_sft import inference, launching, models
from cluster_sft.adapters import add_adapter, load_weights
from cluster_sft.artifacts import write_json
from cluster_sft.checkpoints import MOMENTS, WEIGHTS
from cluster_sft.costs import peak_resident_bytes
from cluster_sft.errors import UserError
from cluster_sft.heads import IGNORED
from cluster_sft.partial_results import Results, Writer
from cluster_sft.proxy import unknown_head
from cluster_sft.scorers._projection import Transform, project
from cluster_sft.scorers._row_gradients import RowGradients
from cluster_sft.token_batches import TokenStore, build_batch, open_tokens
from cluster_sft.workload import micro_batches

if TYPE_CHECKING:
    from cluster_sft.params import Launch

ARRAYS = ("features", "norm")
# Of gradients that are projected together: the more, the less often the matrix is made.
GROUP_BYTES = {"cpu": 1 << 30, "cuda": 1 << 34}
GROUP_ROWS = 64  # more would save little of the projection, and lose more in a kill
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam, in the warm-up and in the features


def compute_features(
    job: Mapping[str, Any], *, columns: int, checkpoints: int, launch: Launch
) -> tuple[list[Results], dict[str, Any]]:
    """Compute the features of every row of a token store, or the rest of them after a kill.

    Args:
        job: `label`, `model`, `dtype`, `lora` (of `adapters.add_adapter`), `folders` of the
            checkpoints, `gradient`, `seed` of the projection, `scratch` and `tokens`.
        columns: k.
        checkpoints: how many.
        launch: processes and the size of forward passes.

    Returns:
        Of every checkpoint features (N, k) float16, of unit length, and the gradients' lengths
        norm (N,) float32, not finite where a gradient is not; and facts: peak memory, whether the
        head is known, seconds spent before an interruption.
    """
    scratch = Path(job["scratch"])
    lengths = open_tokens(Path(job["tokens"])).lengths
    shapes = {
        "features": ((len(lengths), columns), np.float16),
        "norm": ((len(lengths),), np.float32),
    }
    results = []
    for number in range(checkpoints):
        folder = _folder(scratch, number)
        folder.mkdir(parents=True, exist_ok=True)
        results.append(Results.create(folder, shapes))
    earlier = inference.run_workers(
        "cluster_sft.scorers._gradient_features",
        {
            **job,
            "columns": columns,
            "checkpoints": checkpoints,
            "micro_batch": launch.micro_batch,
            "batch_tokens": launch.batch_tokens,
        },
        work,
        launch=launch,
        total=checkpoints * int(lengths.sum()),
        done=lambda: sum(int(lengths[r.done.astype(bool)].sum()) for r in results),
    )
    assert all(r.done.all() for r in results), "a group was given to no process"
    facts = inference.worker_facts(scratch, launch.processes)
    return results, {**facts, "earlier_seconds": earlier}


def work(job: dict[str, Any], *, rank: int, on_flush: Callable[[], None] = lambda: None) -> None:
    """Compute every unfinished group whose number is `rank` modulo the job's processes.

    Raises:
        UserError: the device is out of memory.
    """
    scratch = Path(job["scratch"])
    store = open_tokens(Path(job["tokens"]))
    device = models.pick_device("auto", rank=rank)
    results = [Results.open(_folder(scratch, i), ARRAYS) for i in range(job["checkpoints"])]
    groups = row_groups(store.lengths, job["size"], device.type)[rank :: job["processes"]]
    todo = [[rows for rows in groups if not r.done[rows].all()] for r in results]
    facts: dict[str, Any] = {"exact_head": True}
    if any(todo):
        writers = [Writer(r, on_flush) for r in results]
        try:
            facts = _compute(job, store, todo, writers, device)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{job['label']}: {device} is out of memory; lower launch.micro_batch or "
                "launch.batch_tokens"
            ) from error
    facts["peak_memory_bytes"] = peak_resident_bytes()
    write_json(scratch / f"worker-{rank}.json", facts)


def row_groups(lengths: np.ndarray, size: int, kind: str) -> list[np.ndarray]:
    """Cut rows, longest first, into groups, for D = `size` on devices of a kind."""
    rows = max(1, min(GROUP_ROWS, GROUP_BYTES[kind] // (4 * size)))
    order = np.argsort(-lengths, kind="stable")
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def adam_direction(m: Tensor, v: Tensor) -> Transform:
    """Return the step that Adam would take with a row's gradient g: LESS (Xia et al., 2024).

    m' = b1 m + (1 - b1) g and v' = b2 v + (1 - b2) g^2 give m' / sqrt(v' + 1e-8): without bias
    correction, and with epsilon under the root, as the authors' code has it.

    Args:
        m: (D,) first moments.
        v: (D,) second moments.
    """

    def direction(g: Tensor, part: slice) -> Tensor:
        first = BETAS[0] * m[part] + (1 - BETAS[0]) * g
        second = BETAS[1] * v[part] + (1 - BETAS[1]) * g.square()
        return first / (second + EPSILON).sqrt()

    return direction


def _compute(
    job: Mapping[str, Any],
    store: TokenStore,
    todo: Sequence[Sequence[np.ndarray]],
    writers: Sequence[Writer],
    device: torch.device,
) -> dict[str, Any]:
    """Compute the groups that each checkpoint lacks; return what was found out about the model."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = models.load_model(job["model"], dtype=job["dtype"], device=device)
    add_adapter(model, **job["lora"])
    # Of a fresh adapter half the gradients are 0, on which the ways to them cannot be told apart.
    load_weights(model, Path(job["folders"][-1]) / WEIGHTS)
    gradients = RowGradients(model, build_batch(store, _sample(store)).to(device))
    assert gradients.size == job["size"], "the adapter is not that of the warm-up"
    if not gradients.batched:
        print(f"{job['label']}: layers mix the rows of a batch; one backward pass a row")
    longest = max(len(rows) for groups in todo for rows in groups)
    buffer = torch.empty((longest, gradients.size), device=device)
    for folder, groups, writer in zip(job["folders"], todo, writers, strict=True):
        if groups:
            load_weights(model, Path(folder) / WEIGHTS)
            transform = _transform(job["gradient"], Path(folder), gradients)
        for rows in groups:
            found = _gradients_of(gradients, store, rows, job, buffer[: len(rows)])
            writer.write(rows, _project(found, job, transform), None)
        writer.flush()
    facts: dict[str, Any] = {"exact_head": gradients.exact_head}
    if not gradients.exact_head:
        facts["line"] = unknown_head(model)
    return facts


def _gradients_of(
    gradients: RowGradients,
    store: TokenStore,
    rows: np.ndarray,
    job: Mapping[str, Any],
    out: Tensor,
) -> Tensor:
    """Write the gradients of a group's rows, which lie longest first, into out (B, D)."""
    parts = micro_batches(
        store.lengths[rows], micro_batch=job["micro_batch"], batch_tokens=job["batch_tokens"]
    )
    for part in parts:
        # Of rows that lie longest first a part is a slice.
        batch = build_batch(store, rows[part]).to(out.device)
        gradients(batch, out[part[0] : part[-1] + 1])
    return out


def _project(
    gradients: Tensor, job: Mapping[str, Any], transform: Transform | None
) -> tuple[Tensor, Tensor]:
    """Return unit features (B, k) float16 and the gradients' lengths (B,) float32, on the host."""
    norm = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
    found = project(gradients, columns=job["columns"], seed=job["seed"], transform=transform)
    length = torch.linalg.vector_norm(found, dim=1, keepdim=True)
    unit = found / length.clamp(min=torch.finfo(torch.float64).tiny)
    return unit.half().cpu(), norm.float().cpu()


def _transform(gradient: str, folder: Path, gradients: RowGradients) -> Transform | None:
    """Return what is done to a gradient before it is projected."""
    if gradient == "sgd":
        return None
    if gradient == "sign":
        return lambda g, part: g.sign()
    device = gradients.model.device
    moments = []
    for name in MOMENTS:
        found = load_file(folder / f"{name}.safetensors")
        moments.append(torch.cat([found[n].flatten() for n in gradients.trained]).to(device))
    return adam_direction(*moments)


def _sample(store: TokenStore) -> np.ndarray:
    """Return a short row and one of about median length, of those that supervise something."""
    order = np.argsort(store.lengths, kind="stable")
    middle = len(order) // 2
    found = [_first_supervised(store, order), _first_supervised(store, order[middle:])]
    rows = sorted({row for row in found if row is not None})
    if not rows:
        raise UserError("no row supervises a token; prepare the data again")
    return np.asarray(rows)


def _first_supervised(store: TokenStore, rows: np.ndarray) -> int | None:
    for row in rows:
        labels = store.labels[store.offsets[row] + 1 : store.offsets[row + 1]]
        if (labels != IGNORED).any():
            return int(row)
    return None


def _folder(scratch: Path, number: int) -> Path:
    return scratch / f"checkpoint-{number}"


if __name__ == "__main__":
    launching.work(lambda job: work(job, rank=int(os.environ.get("RANK", "0"))))
