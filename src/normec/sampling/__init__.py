"""Sampling of clients and records, and the random streams that every choice is based on."""
