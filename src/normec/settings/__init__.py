"""The settings of a run: declared once, read from files, flags and assignments.

Example:
    >>> from normec.settings import make
    >>> make({"method": "clip21", "clients": 10}).clients
    10
"""

from .config import RunConfig
from .validation import load, make

__all__ = ["RunConfig", "load", "make"]
