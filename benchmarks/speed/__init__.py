"""The speed benchmark: the cost of a round, compared with a lower bound, a hand-written loop and other libraries."""
