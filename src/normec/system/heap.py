"""The C library's heap, told to keep what is freed.

glibc maps every large block afresh and gives it back when freed; a training step on a CPU frees its activations every
round, and the pages must be zeroed and faulted in again: 10 to 20 % of a convolutional net's time. The setting is the
whole process's, so it is made by processes that are ours (the `normec` command), not by the library.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM, _MMAP, _MOST = -1, -3, 2**30


def keep_freed_memory() -> None:
    """Blocks up to 1 GiB stay with the process; nothing happens where the C library is another one."""
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP, _MOST)
        library.mallopt(_TRIM, _MOST)
