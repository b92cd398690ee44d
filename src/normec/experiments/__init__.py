"""Experiments: a configuration becomes a run on disk, and runs become comparisons, sweeps and tables of results."""
