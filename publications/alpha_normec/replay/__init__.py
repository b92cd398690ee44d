"""The replay: every cell of the paper's tables and figures by name, run, recorded, and set beside its numbers."""
