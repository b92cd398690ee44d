"""Federations of real parties. Each party keeps its own data, memory and ledger, and enforces its own privacy.

`protocol` is the protocol without a network, `flower` runs it over Flower, and `local` runs a whole federation on one
machine.
"""
