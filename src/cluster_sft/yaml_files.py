"""Read YAML files that people edit: YAML 1.2, and faults in one line with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from cluster_sft.errors import UserError


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML 1.2 mapping, so that `1e-5` is a number here as it is for DVC.

    Raises:
        UserError: no such file, not YAML, a key twice, or no mapping at the top.
    """
    try:
        value = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = getattr(error, "problem", None) or str(error)
        raise UserError(f"{where}: not valid YAML ({what})") from error
    except (OSError, ValueError) as error:  # a folder, no permission, a NUL in its name
        raise UserError(f"{path}: cannot be read ({error}); name a YAML file") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must be a mapping of keys, got {type(value).__name__}")
    return value
