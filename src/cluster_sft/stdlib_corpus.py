"""The embedded corpus: documented functions of Python's own standard library.

Each function becomes a request, worded from its signature and docstring, and its source code
without the docstring as the answer. The library's files are parsed and never imported, so the
corpus depends on the interpreter's version and on nothing else.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster_sft.errors import UserError

# Tests, third-party packages, and programs that come along with the library.
SKIPPED = {
    "__pycache__",
    "__phello__",
    "dist-packages",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}
REQUESTS = (
    "Write a Python function `{signature}` for the module `{module}`.\n\n{doc}",
    "Implement `{signature}` in Python. It should do the following:\n\n{doc}",
    "{doc}\n\nWrite the Python function `{signature}` that does this.",
    "Complete the body of this function of `{module}`:\n\ndef {signature}:\n\n{doc}",
    "How is `{name}` of Python's `{module}` implemented? Its documentation says:\n\n{doc}",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def rows(root: Path | None = None) -> list[dict[str, Any]]:
    """Return the corpus as rows {id, instruction, output, category}, sorted by module and line.

    Args:
        root: the library's directory; the running interpreter's by default.

    Raises:
        UserError: it holds no source code.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = [row for path in sorted(root.rglob("*.py")) for row in _file_rows(path, root)]
    if not found:
        raise UserError(
            f"{root}: this Python's standard library comes without source code, which "
            "`corpus: python-stdlib` needs; use another interpreter or set data.source to a file"
        )
    return found


def _file_rows(path: Path, root: Path) -> Iterator[dict[str, Any]]:
    relative = path.relative_to(root).with_suffix("")
    parts = [p for p in relative.parts if p != "__init__"]
    if SKIPPED.intersection(relative.parts):
        return
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return  # templates and files in historic encodings, not part of the library proper
    lines = source.split("\n")
    for name, function in _functions(tree, ""):
        if answer := _code(function, lines):
            module = ".".join(parts)
            yield {
                "id": f"{module}:{name}:{function.lineno}",
                "instruction": _request(function, name, module),
                "output": answer,
                "category": parts[0],
            }


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Yield documented functions and methods, outermost ones only, in the file's order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            if ast.get_docstring(child):
                yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _code(function: Function, lines: list[str]) -> str:
    """Return the function's own source lines without its docstring; "" if nothing else is in it."""
    body = function.body[1:]
    doc = function.body[0]
    assert doc.end_lineno is not None and function.end_lineno is not None
    # A docstring that shares a line with code cannot be cut out by lines.
    if not body or doc.lineno == function.lineno or body[0].lineno == doc.end_lineno:
        return ""
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    kept = lines[first - 1 : doc.lineno - 1] + lines[doc.end_lineno : function.end_lineno]
    code = textwrap.dedent("\n".join(kept)).strip("\n")
    try:
        ast.parse(code)
    except SyntaxError:
        return ""  # a string inside reaches into the margin, so that the code cannot be dedented
    return code


def _request(function: Function, name: str, module: str) -> str:
    doc = ast.get_docstring(function) or ""
    head = doc.split("\n\n")[0].strip()
    chosen = hashlib.sha256(f"{module} {name} {head}".encode()).digest()[0] % len(REQUESTS)
    signature = f"{function.name}({ast.unparse(function.args)})"
    return REQUESTS[chosen].format(signature=signature, module=module, name=name, doc=head)
