"""Which clients and records take part in a round, and the random streams behind every choice."""
