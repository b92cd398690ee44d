"""Optional packages, imported where they are used and asked for in one line where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import UsageError


def needed(module: str, extra: str) -> Any:
    """Import `module`, or say which extra of this package brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{module.split('.')[0]} is needed here and is not installed; pip install 'normec[{extra}]'"
        ) from error
