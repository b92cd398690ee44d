"""The files of a run: history, checkpoints, released sums, secrets."""
