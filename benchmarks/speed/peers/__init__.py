"""Other libraries, one per module; a round has n clients with one gradient each, bounded messages, and one step."""
