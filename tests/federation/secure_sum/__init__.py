"""Tests of the secure sum without a network."""
