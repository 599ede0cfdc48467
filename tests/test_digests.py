"""Digests: what changes a key and what does not."""

from __future__ import annotations

import os

import pytest

from cluster_sft import digests


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in miniature: a imports b; c is apart; strategies is a registry."""
    root = tmp_path / "cluster_sft"
    (root / "strategies").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "a.py").write_text(
        '"""Doc."""\nfrom typing import TYPE_CHECKING\nfrom cluster_sft import b\n'
        "if TYPE_CHECKING:\n    from cluster_sft import c\n\ndef f():\n    return b.X\n"
    )
    (root / "b.py").write_text("X = 1\n")
    (root / "c.py").write_text("Y = 1\n")
    (root / "strategies" / "__init__.py").write_text("")
    (root / "strategies" / "one.py").write_text("from cluster_sft import strategies\n")
    (root / "strategies" / "two.py").write_text("Z = 1\n")
    monkeypatch.setattr(digests, "PACKAGE", root)
    return root


@pytest.mark.parametrize(
    ("name", "old", "new", "changes"),
    [
        ("a.py", "return b.X", "return b.X + 1", True),
        ("a.py", "return b.X", "return b.X  # why", False),
        ("a.py", "Doc.", "Other words.", False),
        ("b.py", "X = 1", "X = 2", True),
        ("c.py", "Y = 1", "Y = 2", False),
    ],
)
def test_code_digest_follows_code_and_imports_only(package, name, old, new, changes):
    before = digests.code_digest(["a"])
    path = package / name
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(1, 1))
    assert (digests.code_digest(["a"]) != before) is changes


def test_code_digest_of_one_strategy_does_not_cover_another(package):
    before = digests.code_digest(["strategies.one"])
    (package / "strategies" / "two.py").write_text("Z = 2\n")
    assert digests.code_digest(["strategies.one"]) == before


def test_file_digest_after_same_size_edit_is_another(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "CHUNK", 1)
    path, cache = tmp_path / "x", tmp_path / "work" / "digests"
    cache.parent.mkdir()
    path.write_bytes(b"aa")
    first = digests.file_digest(path, cache)
    assert digests.file_digest(path, cache) == first and list(cache.iterdir())
    path.write_bytes(b"ab")
    assert digests.file_digest(path, cache) == digests.bytes_digest(path) != first


def test_tree_digest_sees_names_and_bytes(tmp_path):
    (tmp_path / "a").write_text("1")
    first = digests.tree_digest(tmp_path, tmp_path / "no")
    (tmp_path / "a").rename(tmp_path / "b")
    assert digests.tree_digest(tmp_path, tmp_path / "no") != first


def test_digest_is_independent_of_key_order():
    assert digests.digest({"a": 1, "b": [2]}) == digests.digest({"b": [2], "a": 1})


@pytest.mark.parametrize("place", [0, 19 << 20, 65 << 20])
def test_sampled_digest_sees_a_matrix_that_changed_anywhere_in_the_weights(tmp_path, place):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(70 << 20)
    before = digests.sampled_digest(tmp_path, tmp_path / "no")
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"x" * (5 << 20))
    assert digests.sampled_digest(tmp_path, tmp_path / "no") != before
