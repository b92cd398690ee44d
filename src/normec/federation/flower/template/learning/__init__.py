"""A federation: what is learned (task), and the two ends that learn it (server, client)."""
