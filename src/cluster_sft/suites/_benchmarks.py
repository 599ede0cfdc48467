"""Files of medical benchmarks, as their authors publish them, as rows of what lm-eval's tasks read.

On the Hub the same questions stand in columns of another name; files of that layout, such as a
downloaded Parquet file, are taken as they are. Reading keeps the file's order.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster_sft import text_files
from cluster_sft.errors import UserError, known_names

LETTERS = ("A", "B", "C", "D")
DECISIONS = ("yes", "no", "maybe")
MMLU = "mmlu_"
TASKS = ("medmcqa", "medqa_4options", "pubmedqa", f"{MMLU}SUBJECT")
Row = dict[str, Any]


def check_layout(task: str) -> None:
    """Make sure that the layout of a task's published files is known.

    Raises:
        UserError: it is not.
    """
    if task not in TASKS and not task.startswith(MMLU):
        raise UserError(
            f"data_files: the layout of task {task!r} is not known; {known_names(task, TASKS)}; "
            "for another task name the file in its task file, dataset_kwargs: {data_files: ...}"
        )


def read(task: str, path: Path) -> list[Row]:
    """Return the questions of a file in the columns that an lm-eval task reads.

    Args:
        task: medmcqa, medqa_4options, pubmedqa or mmlu_SUBJECT.
        path: `.json` (an array, an object by id, or one object a line), `.jsonl`, `.csv` without a
            header, or `.parquet`; the first three also with `.gz`.

    Raises:
        UserError: no such file, none of these kinds, an unknown task, or a row of no known layout.
    """
    check_layout(task)
    rows = list(_rows(path))
    if not rows:
        raise UserError(f"{path}: holds no questions; {task} needs at least one")
    convert = _converter(task, [row for _, row in rows], path)
    found = []
    for place, row in rows:
        try:
            found.append(convert(row))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"{path}, {place}: is no question of {task} ({type(error).__name__}: "
                f"{error}); give the file as its authors or the Hub publish it"
            ) from error
    return found


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file, each after its place in it: objects, or lists of cells for CSV."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        yield from _numbered(_parquet(path))
    elif name.endswith(".csv"):
        yield from _cells(path)
    elif name.endswith((".json", ".jsonl")):
        yield from _objects(path)
    else:
        raise UserError(f"{path}: must be .json, .jsonl, .csv or .parquet, also with .gz")


def _numbered(rows: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _parquet(path: Path) -> list[Row]:
    import polars as pl  # slow to import, and planning imports this file

    try:
        return pl.read_parquet(path).to_dicts()
    # Polars panics, beside raising its own errors, on some damaged files.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise UserError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error


def _cells(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of CSV that are not blank; those that are count too."""
    reader = csv.reader(io.StringIO(text_files.read_text(path, key="data_files"), newline=""))
    try:
        rows = list(reader)
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num}: is no CSV ({error}); repair or remove it"
        ) from error
    return ((place, cells) for place, cells in _numbered(rows) if cells)


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    text = text_files.read_text(path, key="data_files")
    starts = [line.lstrip()[:1] for line in text.split("\n") if line.strip()]
    if starts[:2] == ["{", "{"]:  # one object a line
        yield from ((f"line {number}", row) for number, row in text_files.json_lines(path, text))
    elif starts:
        whole = text_files.parse_json(path, text)
        if isinstance(whole, dict) and all(isinstance(each, dict) for each in whole.values()):
            whole = [{"id": key, **row} for key, row in whole.items()]
        yield from _numbered(whole if isinstance(whole, list) else [whole])


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be text, got {value!r}")
    value.encode()  # refuses halves of characters, which no file can hold
    return value


def _one_of(value: Any, known: Sequence[Any]) -> Any:
    # In Python True equals 1; in a file it is no answer.
    if isinstance(value, bool) or value not in known:
        raise ValueError(f"must be one of {', '.join(map(str, known))}, got {value!r}")
    return value


def _converter(task: str, rows: Sequence[Any], path: Path) -> Callable[[Any], Row]:
    if task == "medmcqa":
        return _medmcqa_from(_first_answer(rows, path))
    return {"medqa_4options": _medqa, "pubmedqa": _pubmedqa}.get(task, _mmlu)


def _first_answer(rows: Sequence[Any], path: Path) -> int:
    """Return the number of MedMCQA's first option: 1 in the authors' files, 0 on the Hub."""
    answers = [row.get("cop") for row in rows if isinstance(row, dict)]
    # A row without one is told when it is read.
    if None not in answers and (0 in answers) == (4 in answers):
        raise UserError(
            f"{path}: cannot tell whether cop counts the options from 0 or from 1, as it holds "
            f"{'both 0 and 4' if 0 in answers else 'neither 0 nor 4'}; give the whole file"
        )
    return 0 if 0 in answers else 1


def _medmcqa_from(first: int) -> Callable[[Any], Row]:
    def convert(row: Any) -> Row:
        options = {name: _text(row[name]) for name in ("opa", "opb", "opc", "opd")}
        answer = _one_of(row["cop"], range(first, first + len(LETTERS)))
        return {"question": _text(row["question"]), **options, "cop": answer - first}

    return convert


def _medqa(row: Any) -> Row:
    if "ending0" in row:
        options = [row[f"ending{i}"] for i in range(len(LETTERS))]
        answer = _one_of(row["label"], range(len(LETTERS)))
    else:
        options = [row["options"][letter] for letter in LETTERS]
        answer = LETTERS.index(_one_of(row["answer_idx"], LETTERS))
    question = _text(row["sent1"] if "sent1" in row else row["question"])
    endings = {f"ending{i}": _text(option) for i, option in enumerate(options)}
    return {"sent1": question, **endings, "label": answer}


def _pubmedqa(row: Any) -> Row:
    hub = "context" in row
    contexts = row["context"]["contexts"] if hub else row["CONTEXTS"]
    return {
        "pubid": _id(row["pubid"] if hub else row["id"]),
        "question": _text(row["question"] if hub else row["QUESTION"]),
        "context": {"contexts": [_text(each) for each in _list(contexts)]},
        "final_decision": _one_of(row["final_decision"], DECISIONS),
    }


def _id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"its id must be an integer, got {value!r}")
    return int(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"must be a list, got {value!r:.60}")
    return value


def _mmlu(row: Any) -> Row:
    if isinstance(row, dict):
        question, choices = row["question"], _list(row["choices"])
        answer = _one_of(row["answer"], range(len(LETTERS)))
    else:
        question, *choices, letter = row
        answer = LETTERS.index(_one_of(letter, LETTERS))
    if len(choices) != len(LETTERS):
        raise ValueError(f"needs {len(LETTERS)} choices, got {len(choices)}")
    return {
        "question": _text(question),
        "choices": [_text(choice) for choice in choices],
        "answer": answer,
    }
