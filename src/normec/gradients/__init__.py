"""How all clients' gradients are computed; every engine gives what the loop, the reference, gives."""

from __future__ import annotations

from .choice import choose
from .engine import Block, Engine, upload

__all__ = ["Block", "Engine", "choose", "upload"]
