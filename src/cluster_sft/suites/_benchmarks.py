"""Files of medical benchmarks, as their authors publish them, as rows of what lm-eval's tasks read.

On the Hub the same questions stand in columns of another name; files of that layout, such as a
downloaded Parquet file, are taken as they are. Reading keeps the file's order.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster_sft.errors import UserError, known_names

LETTERS = ("A", "B", "C", "D")
DECISIONS = ("yes", "no", "maybe")
MMLU = "mmlu_"
TASKS = ("medmcqa", "medqa_4options", "pubmedqa", f"{MMLU}SUBJECT")
Row = dict[str, Any]


def read(task: str, path: Path) -> list[Row]:
    """Return the questions of a file in the columns that an lm-eval task reads.

    Args:
        task: medmcqa, medqa_4options, pubmedqa or mmlu_SUBJECT.
        path: `.json` (an array, an object by id, or one object a line), `.jsonl`, `.csv` without a
            header, or `.parquet`; the first three also with `.gz`.

    Raises:
        UserError: no such file, none of these kinds, an unknown task, or a row of no known layout.
    """
    if task not in TASKS and not task.startswith(MMLU):
        raise UserError(
            f"data_files: the layout of task {task!r} is not known; {known_names(task, TASKS)}; "
            "for another task name the file in its task file, dataset_kwargs: {data_files: ...}"
        )
    rows = list(_rows(path))
    if not rows:
        raise UserError(f"{path}: holds no questions; {task} needs at least one")
    convert = _converter(task, rows, path)
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(convert(row))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"{path}, row {number}: is no question of {task} ({type(error).__name__}: "
                f"{error}); give the file as its authors or the Hub publish it"
            ) from error
    return found


def _rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a file: objects, or lists of cells for CSV."""
    name = path.name.removesuffix(".gz")
    try:
        if name.endswith(".parquet"):
            yield from _parquet(path)
            return
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
        if name.endswith(".csv"):
            yield from csv.reader(io.StringIO(text, newline=""))
        elif name.endswith((".json", ".jsonl")):
            yield from _objects(text)
        else:
            raise UserError(f"{path}: must be .json, .jsonl, .csv or .parquet, also with .gz")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; correct the path in data_files") from error
    # Unreadable, damaged, of another encoding, or no JSON.
    except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error


def _parquet(path: Path) -> list[Row]:
    import polars as pl  # slow to import, and planning imports this file

    try:
        return pl.read_parquet(path).to_dicts()
    # Polars panics, beside raising its own errors, on some damaged files.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(str(error)) from error


def _objects(text: str) -> Iterator[Any]:
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        yield from (json.loads(line) for line in text.split("\n") if line.strip())
        return
    if isinstance(whole, dict) and all(isinstance(each, dict) for each in whole.values()):
        yield from ({"id": key, **row} for key, row in whole.items())
    else:
        yield from whole if isinstance(whole, list) else [whole]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be text, got {value!r}")
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
    if (0 in answers) == (4 in answers):
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
        "pubid": int(row["pubid"] if hub else row["id"]),
        "question": _text(row["question"] if hub else row["QUESTION"]),
        "context": {"contexts": [_text(each) for each in _list(contexts)]},
        "final_decision": _one_of(row["final_decision"], DECISIONS),
    }


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
