"""From a configuration to a run on disk, and from runs to comparisons, sweeps and tables of results."""
