"""The embedded corpus: what becomes a row, and that nothing is executed."""

from __future__ import annotations

import ast
import shutil

import pytest

from cluster_sft import stdlib_corpus
from cluster_sft.errors import UserError

SOURCE = '''"""A module."""
raise SystemExit("imported")

class Box:
    @property
    def size(self):
        """Return the size.

        In bytes.
        """
        return self._size  # as given


async def load(path, *, retries=3):
    """Load a file."""
    return path


def bare(x):
    return x


def empty():
    """Do nothing yet."""


def odd(): "Return one."; return 1


def outer():
    """Return a function."""
    def inner():
        """Return two."""
        return 2
    return inner
'''


@pytest.fixture
def library(tmp_path):
    (tmp_path / "pkg" / "test").mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text(SOURCE)
    (tmp_path / "pkg" / "test" / "test_it.py").write_text(SOURCE)
    (tmp_path / "pkg" / "broken.py").write_text("def f(:\n")
    return tmp_path


def test_rows_documented_functions_become_requests_with_their_code(library):
    rows = stdlib_corpus.rows(library)
    assert [r["id"] for r in rows] == ["pkg:Box.size:6", "pkg:load:14", "pkg:outer:30"]
    assert rows[0]["output"] == ("@property\ndef size(self):\n    return self._size  # as given")
    assert "Return the size." in rows[0]["instruction"]
    assert "In bytes." not in rows[0]["instruction"]
    assert "load(path, *, retries=3)" in rows[1]["instruction"]


def test_rows_do_not_depend_on_the_librarys_place(library, tmp_path_factory):
    copy = shutil.copytree(library, tmp_path_factory.mktemp("elsewhere") / "lib")
    assert stdlib_corpus.rows(copy) == stdlib_corpus.rows(library)


def test_rows_library_without_sources_is_an_error(tmp_path):
    with pytest.raises(UserError, match="comes without source code"):
        stdlib_corpus.rows(tmp_path)


@pytest.fixture(scope="module")
def corpus():
    return stdlib_corpus.rows()


def test_rows_of_this_python_are_many_long_tailed_and_unique(corpus):
    assert len(corpus) > 3000
    categories = [r["category"] for r in corpus]
    assert len(set(categories)) > 120
    assert len({r["id"] for r in corpus}) == len(corpus)
    assert not any(r["category"] in ("test", "idlelib") for r in corpus)


def test_rows_answers_are_code_that_defines_the_function_asked_for(corpus):
    for row in corpus[::50]:
        (statement,) = ast.parse(row["output"]).body
        assert isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(statement) is None or len(statement.body) > 1
        assert statement.name in row["instruction"]


def test_rows_requests_are_worded_in_every_way(corpus):
    openings = {r["instruction"].split("`")[0] for r in corpus}
    assert {"Write a Python function ", "Implement ", "How is "} <= openings
