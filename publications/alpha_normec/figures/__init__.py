"""The paper, figure by figure: what it ran, what it printed, and what comes out here, one module a figure or table."""
