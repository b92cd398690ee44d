"""Texts for Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

# Every character but surrogates. `st.characters()` computes tables of Unicode at first, which takes ten seconds.
CHARACTERS = st.one_of(st.integers(0, 0x7F), st.integers(0, 0xD7FF), st.integers(0xE000, 0x10FFFF)).map(chr)
