"""Reproduction of "Smoothed Normalization for Efficient Distributed Private Optimization"."""
