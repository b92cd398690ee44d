"""The theory held against runs: plans for configured problems, bounds against measurements."""
