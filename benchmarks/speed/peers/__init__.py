"""Other libraries, one a file, each doing the same round: n clients, one gradient each, bounded messages, one step."""
