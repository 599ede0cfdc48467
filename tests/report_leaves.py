"""Leaves as the stages write them, small and made up, for tests of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from cluster_sft.artifacts import write_json, write_table
from cluster_sft.report.points import Point, Value

SIZES = (429, 346, 282, 143)
HELDOUT = 200
SCORES = {  # strategy: held-out NLL, pass@1 base, plus, lm-eval accuracy
    "base": (0.677, 0.250, 0.125, 0.26),
    "full": (0.453, 0.500, 0.375, 0.31),
    "random": (0.521, 0.375, 0.250, 0.30),
    "uniform": (0.523, 0.375, 0.250, 0.28),
    "ifd": (0.561, 0.250, 0.250, 0.27),
    "less": (0.530, 0.375, 0.250, 0.29),
    "s2l": (0.527, 0.375, 0.375, 0.30),
    "cluster": (0.537, 0.500, 0.375, 0.29),
    "k-center": (0.533, 0.375, 0.250, 0.28),
}


STEPS = {  # steps of a scorer: forward and backward passes a row, what it reads
    "ifd": {"ifd": (2, 0, "dataset")},
    "less": {
        "less-warmup": (0.2, 0.2, "dataset"),
        "less-gradients": (4, 4, "dataset"),
        "less": (0.1, 0.1, "gradients"),
    },
    "s2l": {
        "s2l-proxy": (3, 3, "dataset"),
        "s2l-trajectories": (12, 0, "dataset"),
        "s2l": (0, 0, "trajectories"),
    },
    "k-center": {"k-center": (0, 0, "embeddings")},
}
STEP_PARAMS = {
    "less-warmup": {"warmup_share": 0.05, "warmup_epochs": 4.0},
    "s2l-proxy": {"epochs": 3.0, "checkpoints": 12.0},
}
TOKENS = 85  # a row


def _leaf(path: Path, stage: str, params: dict[str, Any], inputs: tuple[str, ...] = ()) -> Path:
    path.mkdir(parents=True)
    key = f"{abs(hash_of(path.parts[-3:])):064x}"
    manifest = {"stage": stage, "key": key, "params": params, "inputs": dict.fromkeys(inputs, "")}
    write_json(path / "manifest.json", manifest)
    return path


def cost(forward: float, backward: float, seconds: float) -> dict[str, float]:
    """Return what costs.Meter writes for so many passes."""
    return {
        "forward_passes": forward,
        "backward_passes": backward,
        "tokens": forward * TOKENS,
        "seconds": seconds,
        "peak_memory_bytes": 1.5e9,
        "bytes_stored": 4096,
    }


def hash_of(parts: tuple[str, ...]) -> int:
    """Return a number that depends on nothing but the words."""
    return sum(ord(c) * 31**i for i, c in enumerate("/".join(parts)))


class Workspace:
    """A folder that leaves are made in, and points made of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.prepare = self._prepare()

    def _prepare(self) -> Path:
        leaf = _leaf(self.root / "prepare", "prepare", {"holdout": 0.1, "seed": 0.0})
        kept = sum(SIZES)
        _write_rows(leaf, "dataset.parquet", kept)
        _write_rows(leaf, "heldout.parquet", HELDOUT)
        reasons = (
            ["exact_duplicate"] * 61 + ["empty_response"] * 14 + ["prompt_fills_max_length"] * 33
        )
        frame = pl.DataFrame({"row": range(len(reasons)), "reason": reasons, "detail": ""})
        write_table(leaf, "dropped.parquet", frame)
        write_json(leaf / "summary.json", {"kept": kept, "heldout": HELDOUT})
        return leaf

    def cluster(self, *, sizes: tuple[int, ...] = SIZES, alpha: float = 1.5, seed: int = 0) -> Path:
        """Return a cluster leaf, made at the first call."""
        path = self.root / "cluster" / f"k-{len(sizes)}_alpha-{alpha}_seed-{seed}"
        if path.exists():
            return path
        k, n = len(sizes), sum(sizes)
        leaf = _leaf(path, "cluster", {"k": float(k), "alpha": alpha, "seed": float(seed)})
        summary = {
            "k": k,
            "n": n,
            "alpha": alpha,
            "seed": seed,
            "capacity": max(int(alpha * n / k), -(-n // k)),
            "sizes": list(sizes),
            "weights": [size * k / n for size in sizes],
            "inertia": 812.4,
            "n_iter": 11,
            "displaced": 23,
            "usage_at_r1": k * min(sizes) / n,
        }
        write_json(leaf / "summary.json", summary | {"cost": cost(0, 0, 2.0)})
        return leaf

    def point(
        self,
        strategy: str,
        *,
        ratio: float = 0.5,
        seed: int = 0,
        axes: dict[str, Value] | None = None,
        sizes: tuple[int, ...] = SIZES,
        alpha: float = 1.5,
        shift: float = 0.0,
        batch: int = 16,
        suites: tuple[str, ...] = ("heldout", "evalplus-small", "stdlib-mcq"),
        skip: tuple[str, ...] = (),
        scored: bool = False,
    ) -> Point:
        """Return a point with all of its leaves; `shift` is added to its held-out NLL.

        `scored`: with embeddings, and with the steps of its scorer where it has one.
        """
        axes = axes or {}
        slug = "_".join([f"{strategy}_r-{ratio}", *(f"{k}-{v}" for k, v in axes.items())])
        cluster = (
            self.cluster(sizes=sizes, alpha=alpha) if strategy not in ("base", "full") else None
        )
        select = train = None
        if strategy != "base":
            select = self._select(slug, strategy, ratio, sizes)
            train = self._train(f"{slug}/seed-{seed}", strategy, select, seed, batch, shift)
        return Point(
            strategy=strategy,
            ratio=ratio if cluster else None,
            seed=seed if train else None,
            axes=axes,
            cluster=cluster,
            select=select,
            train=train,
            evaluate={
                s: self._evaluate(f"{slug}/seed-{seed}/{s}", s, strategy, seed, shift, s in skip)
                for s in suites
            },
            prepare=self.prepare,
            embed=self.embed() if scored else None,
            scores={s: self.step(strategy, s) for s in STEPS.get(strategy, {})} if scored else {},
        )

    def embed(self) -> Path:
        """Return the leaf of embeddings."""
        path = self.root / "embed"
        if not path.exists():
            _leaf(path, "embed", {"model": "tiny"})
            write_json(path / "summary.json", {"n": 1198, "cost": cost(sum(SIZES), 0, 30.0)})
        return path

    def step(self, strategy: str, step: str) -> Path:
        """Return the leaf of a step of stage score, made at the first call."""
        path = self.root / "score" / step
        if not path.exists():
            forward, backward, reads = STEPS[strategy][step]
            _leaf(path, "score", STEP_PARAMS.get(step, {}), (reads,))
            n = sum(SIZES)
            seconds = 30.0 * (forward + 2 * backward) + 1
            write_json(path / "summary.json", {"cost": cost(forward * n, backward * n, seconds)})
            if step == "less":
                (path / "targets").mkdir()
                frame = pl.DataFrame({"id": ["target"], "subtask": None, "reason": None})
                write_table(path / "targets", "gradients.parquet", frame)
        return path

    def _select(self, slug: str, strategy: str, ratio: float, sizes: tuple[int, ...]) -> Path:
        path = self.root / "select" / slug
        if path.exists():
            return path
        leaf = _leaf(path, "select", {"strategy": strategy, "ratio": ratio, "seed": 0.0})
        m, k, n = int(ratio * min(sizes) + 0.5), len(sizes), sum(sizes)
        if strategy == "full":
            counts, budget = list(sizes), None
        elif strategy in ("cluster", "uniform"):
            counts, budget = [m] * k, m * k
        else:
            shares = np.random.default_rng([hash_of((slug,))]).multinomial(
                m * k, np.array(sizes) / n
            )
            counts, budget = shares.tolist(), m * k
        labels = np.repeat(np.arange(k), counts)
        frame = pl.DataFrame(
            {
                "id": [f"{i:05d}" for i in range(len(labels))],
                "cluster": labels,
                "distance": 0.7,
                "weight": 1.0,
                "rank": range(len(labels)),
            }
        )
        write_table(leaf, "subset.parquet", frame)
        summary = {"strategy": strategy, "rows": len(labels), "budget": budget}
        summary |= {"cost": cost(0, 0, 0.5)}
        write_json(leaf / "summary.json", summary | {"n": n, "data_share": len(labels) / n})
        return leaf

    def _train(
        self, slug: str, strategy: str, select: Path, seed: int, batch: int, shift: float
    ) -> Path:
        stratified = strategy in ("cluster", "uniform")
        params = {
            "batches": "stratified" if stratified else "random",
            "weights": "cluster" if strategy == "cluster" else "none",
            "global_batch_size": float(batch),
            "learning_rate": 1e-4,
            "seed": float(seed),
        }
        leaf = _leaf(self.root / "train" / slug, "train", params)
        rows = json.loads((select / "summary.json").read_text())["rows"]
        steps = -(-rows // batch)
        rng = np.random.default_rng([seed, hash_of((slug,))])
        end = SCORES[strategy][0] + shift
        lines = []
        for step in range(steps):
            level = end + (0.72 - end) * float(np.exp(-4 * step / steps))
            line = {
                "step": step + 1,
                "epoch": (step + 1) / steps,
                "tokens": batch * 85,
                "rows": batch,
            }
            line |= {
                "loss": level + rng.normal(0, 0.03),
                "grad_norm": 1.2,
                "lr": 1e-4,
                "seconds": 3.1,
            }
            lines.append(json.dumps(line))
        (leaf / "train_log.jsonl").write_text("\n".join(lines) + "\n")
        tokens = int(rows * (92.3 if strategy == "cluster" else 85.1)) + seed
        summary = {
            "steps": steps,
            "rows": rows,
            "train_tokens": tokens,
            "train_seconds": rows * 0.19,
            "cost": cost(rows, rows, rows * 0.19) | {"tokens": tokens, "peak_memory_bytes": 3e9},
        }
        write_json(leaf / "summary.json", summary)
        return leaf

    def _evaluate(
        self, slug: str, suite: str, strategy: str, seed: int, shift: float, skip: bool
    ) -> Path:
        leaf = _leaf(self.root / "evaluate" / slug, "evaluate", {"limit": None})
        nll, base, plus, acc = SCORES[strategy]
        kind, metrics = "heldout", []
        if suite.startswith("evalplus"):
            kind, n = "evalplus", 8
            _write_answers(leaf, base, plus, n)
            metrics = [
                _share("evalplus_base_pass1", base, n),
                _share("evalplus_plus_pass1", plus, n),
            ]
        elif suite.startswith("heldout"):
            value, stderr = _write_samples(leaf, nll + shift, seed)
            metrics = [{"name": "heldout_nll", "value": value, "stderr": stderr, "n": HELDOUT}]
        else:
            kind, metrics = "lm_eval", [_share("lm_eval_acc", acc, 100)]
        reason = "evaluate.allow_code_execution is false" if skip else None
        found = {"suite": suite, "kind": kind, "reason": reason, "details": {}}
        found |= {"status": "not run" if skip else "run", "metrics": [] if skip else metrics}
        write_json(leaf / "scores.json", found)
        return leaf


def _share(name: str, value: float, n: int) -> dict[str, Any]:
    return {"name": name, "value": value, "stderr": float(np.sqrt(value * (1 - value) / n)), "n": n}


def _write_answers(leaf: Path, base: float, plus: float, n: int) -> None:
    """Write answers of which the first ones pass: better models solve the same and more."""
    rows = [
        {"task_id": f"T/{i}", "base": _status(i < base * n), "plus": _status(i < plus * n)}
        for i in range(n)
    ]
    (leaf / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _status(passed: bool) -> str:
    return "pass" if passed else "fail"


def _write_samples(leaf: Path, level: float, seed: int) -> tuple[float, float]:
    """Write per-row losses, shared difficulty and own noise; return the ratio and its error."""
    tokens = np.random.default_rng(5).integers(20, 200, HELDOUT)
    shared = np.random.default_rng(6).gamma(6, 1 / 6, HELDOUT)
    own = np.random.default_rng([7, seed, int(level * 1e4)]).normal(0, 0.02, HELDOUT)
    nll = np.abs(level * shared / np.average(shared, weights=tokens) + own)
    total = nll * tokens
    rows = zip(range(HELDOUT), tokens, nll, strict=True)
    text = (json.dumps({"id": f"{i:04d}", "n_tokens": int(t), "nll": float(x)}) for i, t, x in rows)
    (leaf / "samples.jsonl").write_text("\n".join(text) + "\n")
    value = total.sum() / tokens.sum()
    residual = total - value * tokens
    return float(value), float(
        np.sqrt(HELDOUT / (HELDOUT - 1) * (residual**2).sum()) / tokens.sum()
    )


def _write_rows(leaf: Path, name: str, rows: int) -> None:
    frame = pl.DataFrame(
        {
            "id": [f"{'held-' * (name == 'heldout.parquet')}{i:05d}" for i in range(rows)],
            "source_id": None,
            "source_row": range(rows),
            "messages": [[{"role": "user", "content": "a"}]] * rows,
            "category": None,
            "n_prompt_tokens": 3,
            "n_response_tokens": 4,
            "input_ids": [[1]] * rows,
            "labels": [[1]] * rows,
            "record": "{}",
        }
    )
    write_table(leaf, name, frame)
