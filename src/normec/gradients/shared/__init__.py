"""One forward and one data-gradient pass for all clients; weight gradients and statistics client by client."""

from .apart import refuse_foreign_code
from .engine import Shared
from .rules import NoRule

__all__ = ["NoRule", "Shared", "refuse_foreign_code"]
