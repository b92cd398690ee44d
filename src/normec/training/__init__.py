"""The training loop: `train`, the round, its metrics, its budget and its state."""
