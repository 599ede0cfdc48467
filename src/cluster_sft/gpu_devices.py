"""The GPUs of this machine and which of them CUDA_VISIBLE_DEVICES leaves, without touching CUDA.

A process that asks CUDA itself has read CUDA_VISIBLE_DEVICES for good. `nvidia-smi` tells as much.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIG = "MIG-"
LISTED = re.compile(r"^\s*(?:GPU (\d+):|MIG ).*\(UUID: ([^)\s]+)\)", re.MULTILINE)
KERNEL = Path("/proc/driver/nvidia/gpus")  # a folder a GPU, named by its bus
DEVICES = Path("/dev")
UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", re.MULTILINE)
MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
SECONDS = 60  # the driver of many GPUs may have to wake up first


@dataclass(frozen=True)
class Gpu:
    """A GPU: its number in the order of buses, its UUID, and the UUIDs of its MIG slices."""

    number: int
    uuid: str
    slices: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """Return the UUID of what CUDA computes on when told this GPU: its first slice, if any."""
        return self.slices[0] if self.slices else self.uuid


def find_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs of this machine that PyTorch can use; [] for a PyTorch for CPUs."""
    found = _ask_driver()
    if found:
        import torch

        return found if torch.version.cuda else []
    return found


def visible_gpus(visible: str | None, gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES leaves: UUID -> its name there.

    As CUDA reads it: numbers, UUIDs or the start of one, up to the first that names no GPU; twice
    the same leaves none. A number is nvidia-smi's, also where GPUs of several models are mixed and
    CUDA by itself would count the fastest first.

    Args:
        visible: the value; None if it is not set, for all GPUs, or the slices of those that have
            any.
        gpus: of the machine.
    """
    if visible is None:
        whole = {gpu.uuid: str(gpu.number) for gpu in gpus if not gpu.slices}
        return whole | {part: part for gpu in gpus for part in gpu.slices}
    found: dict[str, str] = {}
    for name in map(str.strip, visible.split(",")):
        uuid = _uuid_of(name, gpus)
        if uuid is None:
            break
        if uuid in found:
            return {}
        found[uuid] = name
    return found


def _uuid_of(name: str, gpus: Sequence[Gpu]) -> str | None:
    """Return the UUID of what a name stands for; None if for nothing, or for several."""
    if name.isdecimal():
        matches = [gpu.first for gpu in gpus if gpu.number == int(name)]
    elif name.startswith(MIG):
        matches = [part for gpu in gpus for part in gpu.slices if part.startswith(name)]
    else:
        matches = [gpu.first for gpu in gpus if name and gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def read_listing(text: str) -> list[Gpu]:
    """Return the GPUs that the output of `nvidia-smi -L` lists."""
    found: list[Gpu] = []
    for number, uuid in LISTED.findall(text):
        if number:
            found.append(Gpu(int(number), uuid))
        else:
            last = found.pop()
            found.append(Gpu(last.number, last.uuid, (*last.slices, uuid)))
    return found


def _ask_kernel() -> list[Gpu]:
    """Return the GPUs with a device file here, of those that the driver tells the kernel of.

    Until the driver is initialised their UUIDs are not known; their buses tell them apart as well.
    """
    found: list[Gpu] = []
    for path in sorted(KERNEL.glob("*/information")):
        text = path.read_text()
        minor, uuid = MINOR.search(text), UUID.search(text)
        if minor and (DEVICES / f"nvidia{minor[1]}").exists():
            found.append(Gpu(len(found), uuid[1] if uuid else f"GPU-{path.parent.name}"))
    return found


def _ask_driver() -> list[Gpu]:
    try:
        told = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except FileNotFoundError:  # a container with the driver's libraries alone
        return _ask_kernel()
    except (OSError, subprocess.TimeoutExpired):
        return []
    return read_listing(told.stdout) if told.returncode == 0 else []
