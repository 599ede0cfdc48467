"""Numbers that JSON can hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def finite(value: Any) -> Any:
    """Return a value fit for JSON: numbers that are not finite become None, NumPy's become ours."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [finite(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
