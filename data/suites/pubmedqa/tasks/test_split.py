"""The authors' test split of PubMedQA's labelled questions, in the columns of lm-eval's prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

PMIDS = Path(__file__).with_name("test_pmids.txt")


def select(questions: Dataset) -> Dataset:
    """Return the questions of the test split, in their order.

    Raises:
        ValueError: there is none among them.
    """
    wanted = {int(line) for line in PMIDS.read_text(encoding="utf-8").split()}
    rows = [row for row, pmid in enumerate(questions["pubid"]) if int(pmid) in wanted]
    if not rows:
        raise ValueError("holds no question of PubMedQA's test split")
    return questions.select(rows).map(
        lambda row: {"QUESTION": row["question"], "CONTEXTS": row["context"]["contexts"]}
    )
