"""Figures, and HTML pages about runs, comparisons, sweeps and checks of the theory."""
