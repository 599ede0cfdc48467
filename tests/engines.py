"""A small project on disk that both engines run, for the tests of the engines."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from cluster_sft.yaml_files import read_mapping

ROOT = Path(__file__).parents[1]
FILES = ("Snakefile", "dvc.yaml", ".dvcignore", ".gitignore", "params.yaml")
FOLDERS = ("workflow", "profiles", "src", "data")
OUTCOME = re.compile(r"^\s*(computed|restored|reused) results/[^/]+/([a-z]+)", re.MULTILINE)
SETTINGS = {
    "name": "tiny",
    "data.source": "data/raw.jsonl",
    "data.max_samples": None,
    "model.dtype": "fp32",
    "model.max_length": 96,
    "train.workers": 2,
    "train.global_batch_size": 4,
    "train.precision": "fp32",
    "evaluate.suites": ["heldout"],
    "launch.processes": 1,
}


class Project:
    """A working tree with the repository's code and workflow, tiny data and a tiny model."""

    timeout: float = 800  # seconds for one command

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def create(cls, root: Path, model: Path) -> Project:
        """Copy the repository's workflow into `root`, with a git and a DVC repository."""
        root.mkdir()
        for name in FOLDERS:
            if (ROOT / name).exists():
                shutil.copytree(ROOT / name, root / name)
        for name in FILES:
            shutil.copy(ROOT / name, root / name)
        project = cls(root)
        (root / "data/raw.jsonl").write_text(rows(60))
        for key, value in {**SETTINGS, "model.name": str(model)}.items():
            project.edit(key, value)
        project.call("git", "init", "-q", "-b", "main")
        project.call("git", "config", "user.email", "t@example.org")
        project.call("git", "config", "user.name", "t")
        project.call("dvc", "init", "-q")
        project.call("dvc", "config", "core.analytics", "false")
        project.call("dvc", "config", "core.check_update", "false")
        project.commit()
        return project

    def commit(self) -> None:
        self.call("git", "add", "-A")
        self.call("git", "commit", "-q", "-m", "state")

    def environment(self) -> dict[str, str]:
        shim = self.root.parent / f"bin-{self.root.name}"
        if not shim.exists():
            shim.mkdir()
            script = f'#!/bin/sh\nexec "{sys.executable}" -m cluster_sft "$@"\n'
            (shim / "cluster-sft").write_text(script)
            (shim / "cluster-sft").chmod(0o755)
        path = [str(shim), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {
            **os.environ,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": str(self.root / "src"),
            "XDG_CACHE_HOME": str(self.root.parent / "cache"),
            "HF_HUB_OFFLINE": "1",
        }

    def call(self, *command: str, status: int = 0) -> str:
        """Run a command in the project; return what it printed."""
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.timeout,
        )
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout

    def snakemake(self, *arguments: str) -> Counter[str]:
        """Run Snakemake; return what `cluster-sft run` did, counted as `outcome stage`."""
        return outcomes(self.call("snakemake", "--cores", "2", *arguments))

    def planned(self) -> set[str]:
        """Return the rules that `snakemake -n` would run."""
        text = self.call("snakemake", "-n", "--cores", "2")
        found = re.search(r"^job +count\n[- ]+\n(.*?)^total", text, re.MULTILINE | re.DOTALL)
        names = {line.split()[0] for line in found[1].splitlines() if line} if found else set()
        assert found or "Nothing to be done" in text, text
        if "unscored" in names:
            names |= {"scorer", "features", "score"}
        return names - {"all", "unscored"}

    def repro(self) -> Counter[str]:
        """Run `dvc repro`; return what `cluster-sft run` did, counted as `outcome stage`."""
        return outcomes(self.call("dvc", "repro"))

    def changed(self) -> set[str]:
        """Return the stages that `dvc repro` would run for reasons of their own."""
        found = json.loads(self.call("dvc", "status", "--json"))
        return {name.split("@")[0] for name in found}

    def edit(self, key: str, value: object) -> None:
        """Set one key of params.yaml, keeping every comment and the order of the keys."""
        path = self.root / "params.yaml"
        lines = path.read_text().splitlines()
        *sections, last = key.split(".")
        start = next(
            (i for i, line in enumerate(lines) if sections and line.startswith(f"{sections[0]}:")),
            0,
        )
        indent = "  " * len(sections)
        at = next(i for i in range(start, len(lines)) if lines[i].startswith(f"{indent}{last}:"))
        lines[at] = f"{indent}{last}: {json.dumps(value)}"
        path.write_text("\n".join(lines) + "\n")
        read_mapping(path)

    def replace(self, file: str, old: str, new: str) -> None:
        """Replace text in one file of the project."""
        path = self.root / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    def clone(self, root: Path) -> Project:
        """Clone with git, pull with DVC, and shuffle all file times."""
        self.call("git", "clone", "-q", str(self.root), str(root))
        other = Project(root)
        other.call("dvc", "pull", "-q")
        files = [p for p in root.rglob("*") if p.is_file() and ".git" not in p.parts]
        for path in files:
            time = random.Random(str(path)).randrange(10**9, 17 * 10**8)
            os.utime(path, (time, time), follow_symlinks=False)
        return other

    def copy(self, root: Path) -> Project:
        """Copy the working tree, results and engines' memory included."""
        shutil.copytree(self.root, root, symlinks=True)
        return Project(root)


def outcomes(text: str) -> Counter[str]:
    return Counter(f"{outcome} {stage}" for outcome, stage in OUTCOME.findall(text))


def rows(n: int) -> str:
    """Return n Alpaca rows as JSON lines: short tasks of a few kinds."""
    numbers = random.Random(0)
    kinds = [
        lambda a, b: (f"Add {a} and {b}.", f"{a + b}"),
        lambda a, b: (f"Count from {a % 9} in {b % 5 + 2} steps.", " ".join(["one"] * (b % 5 + 2))),
        lambda a, b: (f"Write add{a}.", f"def add{a}(x):\n    return x + {b}\n"),
    ]
    made = [kinds[i % 3](numbers.randrange(100), numbers.randrange(100)) for i in range(n)]
    return "".join(
        json.dumps({"instruction": f"{q} ({i})", "output": a}) + "\n"
        for i, (q, a) in enumerate(made)
    )
