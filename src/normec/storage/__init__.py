"""A run's folder: history, checkpoints, noisy sums, secrets."""
