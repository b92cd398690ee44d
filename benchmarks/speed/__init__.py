"""The project's own benchmark: a floor, our engines, a hand-written loop and other libraries, side by side."""
