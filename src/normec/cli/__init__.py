"""The command line, one file per command; only commands that compute import torch."""
