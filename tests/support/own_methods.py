"""Methods as users write them: each overrides another function, and they have no, one or two states of their own."""

from __future__ import annotations

import normec

from ..federation.methods.my_method import Clip21SGDM
from .overriding_methods import Counting, Forgetful, Rotated, Signs, Started, Still, Stubborn

ALL: dict[str, normec.Method] = {
    "no state": Signs(),
    "two states": Clip21SGDM(),
    "states of any shape": Counting(),
    "commit": Stubborn(0.1, 0.3),
    "absent": Forgetful(0.1, 0.3),
    "client_init": Started(0.1, 0.3),
    "server_step": Still(0.1, 0.3),
    "message": Rotated(0.1, 0.3),
}
