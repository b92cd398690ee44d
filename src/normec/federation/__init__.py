"""Federations of real parties. Each party keeps its own data, memory and ledger, and enforces its own privacy.

`protocol` is the protocol without a network, `secure_sum` adds up vectors so that only their sum can be read, `flower`
runs the protocol over Flower, and `local` runs a whole federation on one machine.
"""
