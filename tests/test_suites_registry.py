"""The registry: suites are folders, kinds are files, and a bad suite.yaml says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster_sft import suites
from cluster_sft.errors import UserError
from cluster_sft.suites import Rule

OWN = Path(__file__).parents[1] / "data/suites"


@pytest.mark.parametrize("name", sorted(path.name for path in OWN.iterdir()))
def test_suite_of_the_project_is_valid(name):
    spec = suites.read(OWN / name)
    assert spec["kind"] in suites.kinds()
    if name != "humaneval-mini":  # its file is the user's to put there
        assert suites.outside_files(OWN / name) == []


@pytest.mark.parametrize("kind", suites.kinds())
def test_kind_reads_only_keys_that_exist(kind):
    found = suites.get(kind)
    assert set(found.keys) <= set(Rule.__dataclass_fields__)
    assert set(found.required) <= set(found.options)
    assert suites.keys(kind) == found.keys


def test_planning_imports_neither_torch_nor_the_harnesses():
    code = (
        "import sys\nfrom pathlib import Path\nfrom cluster_sft import suites\n"
        "[suites.get(kind) for kind in suites.kinds()]\n"
        f"suites.outside_files(Path({str(OWN)!r}, 'medmcqa'))\n"
        "print([m for m in ('torch', 'transformers', 'lm_eval', 'evalplus') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_folder_with_a_suite_file_is_a_suite(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "SUITES", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/suite.yaml").write_text("kind: heldout\n")
    assert suites.names() == ["mine"]
    assert suites.kind("mine") == "heldout"
    with pytest.raises(UserError, match=r"no suite 'mime', .*did you mean 'mine'\?"):
        suites.folder("mime")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping of keys, got NoneType"),
        ("dataset: mbpp", "must be a mapping with a key `kind`"),
        ("kind: [", "not valid YAML"),
        ("kind: heldoud", r"unknown kind of suite 'heldoud'; did you mean 'heldout'\?"),
        ("kind: heldout\nlimit: 3", "unknown key 'limit'"),
        ("kind: evalplus\ndatset: mbpp", r"unknown key 'datset'; did you mean 'dataset'\?"),
        ("kind: evalplus", "kind evalplus needs the key 'dataset'"),
        ("kind: evalplus\ndataset: 3", "dataset must be text, got 3"),
        ("kind: evalplus\ndataset: mpbb", "dataset must be humaneval or mbpp, got 'mpbb'"),
        ("kind: lm_eval\ntasks: a", "tasks must be a list, got 'a'"),
        ("kind: lm_eval\ntasks: []", r"tasks must be a list of names, got \[\]"),
        ("kind: lm_eval\ntasks: [3]", r"tasks must be a list of names, got \[3\]"),
        ("kind: lm_eval\ntasks: ['']", "tasks must be a list of names"),
        ("kind: lm_eval\ntasks: [a]\nnum_fewshot: true", "num_fewshot must be an integer"),
        ("kind: lm_eval\ntasks: [a]\nnum_fewshot: -1", "num_fewshot must be at least 0, got -1"),
        ("kind: lm_eval\ntasks: [a]\ndata_files: {a: 3}", "must map tasks to files, got 'a': 3"),
        ("kind: lm_eval\ntasks: [a]\ndata_files: {a: b}", "layout of task 'a' is not known"),
        (
            "kind: lm_eval\ntasks: [a]\ndata_files: {medmcqa: b}\nnum_fewshot: 2",
            "num_fewshot must be 0, got 2",
        ),
    ],
)
def test_bad_suite_file_is_one_line_with_its_path(tmp_path, text, message):
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        suites.read(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "suite.yaml"))
    assert "\n" not in str(caught.value)


def test_folder_without_suite_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"suite\.yaml: no such file"):
        suites.read(tmp_path)
