"""Training: `train`, the loop over rounds, metrics, the privacy budget, and the state of a run."""
