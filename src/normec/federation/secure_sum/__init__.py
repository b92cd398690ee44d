"""A sum of the parties' vectors that opens only as a whole, for a server that nobody has to trust with single vectors.

The protocol is that of Bonawitz et al. (2017) in its version against a server that lies about who dropped out: masks
between pairs of parties, a mask of each party alone, and Shamir shares of the secrets behind both. There is no network
here: `Party.answer` turns the bytes of a request into the bytes of an answer, and `Server` makes the requests and
collects the answers. docs/concepts/secure-sum.md states what is promised, against whom, and what is not.
"""
