"""The theory compared with runs: plans for configured problems, and bounds compared with measurements."""
