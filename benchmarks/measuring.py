"""What every benchmark needs: time, memory, spread, the machine, and child processes.

A figure of memory is that of a process of its own: `run_child` starts one, which prints its result
as JSON on the last line of its standard output.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "out"
PEERS_PYTHON = OUT / "peers-venv" / "bin" / "python"
SAMPLE_SECONDS = 0.02
CLEAR_PEAK = "5"  # to /proc/self/clear_refs: VmHWM starts again from what is resident now


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, least and greatest of repeated measurements, and the values themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, Any]:
    """Return the spread of a[i] / b[i]: neighbours in time, so that a slow minute hits both."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call took, and its result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def memory(name: str) -> int:
    """Return a figure of this process in bytes: VmHWM, VmRSS or RssAnon; 0 where there is none."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    for line in status.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


class MemoryPeak:
    """The most memory that a process held while the context was open, in bytes.

    Attributes:
        anonymous: greatest RssAnon of the samples: memory that the system cannot take back.
        resident: VmHWM, the mapped pages of files included.
        before: RssAnon when the context was opened.
    """

    def __enter__(self) -> MemoryPeak:
        clear = Path("/proc/self/clear_refs")
        if clear.exists():
            clear.write_text(CLEAR_PEAK)
        self.anonymous = self.before = memory("RssAnon")
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.anonymous = max(self.anonymous, memory("RssAnon"))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._sampler.join()
        self.anonymous = max(self.anonymous, memory("RssAnon"))
        self.resident = memory("VmHWM")

    def facts(self) -> dict[str, int]:
        """Return the figures in bytes."""
        return {
            "anonymous_bytes": self.anonymous,
            "resident_bytes": self.resident,
            "anonymous_bytes_before": self.before,
        }


def run_child(
    module: str, job: Mapping[str, Any], *, threads: int | None = None, peer: bool = False
) -> dict[str, Any]:
    """Run a module of this folder in a process of its own and return the JSON it prints last.

    Args:
        module: its name; `main` of it takes the job as its one argument, JSON.
        job: what to measure.
        threads: of OpenMP and BLAS; None for the machine's choice.
        peer: run it in the peers' venv.

    Raises:
        RuntimeError: the process failed; its output is in the message.
    """
    here = Path(__file__).parent
    python = str(PEERS_PYTHON) if peer else sys.executable
    command = (
        [python, str(here / f"{module}.py")] if peer else [python, "-m", f"benchmarks.{module}"]
    )
    ended = subprocess.run(
        [*command, json.dumps(job)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=child_environment(threads),
        check=False,
    )
    if ended.returncode != 0:
        raise RuntimeError(
            f"{module} failed on {job}:\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}"
        )
    return json.loads(ended.stdout.strip().splitlines()[-1])


def child_environment(threads: int | None) -> dict[str, str]:
    """Return the environment of a child, with the threads of OpenMP and BLAS where given."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    if threads is not None:
        kept |= {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return kept


def has_peers() -> bool:
    """Return whether the peers' venv is there; say so if not."""
    if PEERS_PYTHON.is_file():
        return True
    tell(f"peers are left out, since there is no {PEERS_PYTHON}: run `make bench`")
    return False


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge the figures: processor, memory, system, load."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        named = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        processor = named[0].split(":", 1)[1].strip() if named else processor
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor,
        "cores": processors(),
        "memory_bytes": pages,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of the packages that are there."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def save(name: str, result: Mapping[str, Any], *, out: Path = OUT) -> Path:
    """Write a benchmark's result to `out/NAME.json`, with the machine it ran on."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    whole = {"machine": machine(), "date": time.strftime("%Y-%m-%d %H:%M"), **result}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path


def tell(*words: object) -> None:
    """Print a line of progress at once."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)
