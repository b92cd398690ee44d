"""Suggested settings compared with tuned ones and with the usual ones of each method."""
