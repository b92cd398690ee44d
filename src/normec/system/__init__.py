"""The operating system: files that are whole or absent, processes and signals."""
