"""One forward and one data-gradient pass for all clients; weight gradients and statistics client by client."""

from .engine import Shared
from .rules import NoRule

__all__ = ["NoRule", "Shared"]
