"""Whether a scorer's own training is long enough to train anything."""

from __future__ import annotations

from cluster_sft.errors import UserError


def check_steps(steps: int, *, warmup_ratio: float, rows: int, label: str, remedy: str) -> None:
    """Refuse a training of one step that has a warm-up: its only learning rate is 0.

    Args:
        steps: of the whole training.
        warmup_ratio: share of them in which the rate rises from 0.
        rows: that it trains on.
        label: the step of score.
        remedy: which parameters make it longer.

    Raises:
        UserError: it would leave the weights as they were.
    """
    if steps == 1 and warmup_ratio:
        raise UserError(
            f"{label}: {rows} rows make a single step, whose learning rate is 0; {remedy}"
        )
