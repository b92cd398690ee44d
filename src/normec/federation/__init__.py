"""Real parties: each keeps its data, memory and ledger to itself, and enforces its own privacy.

Here is the protocol without a network: what travels (`wire`), what a party allows (`policy`) and does (`party`), and
what the server does (`coordinator`).
"""
