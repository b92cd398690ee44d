"""The operating system: files, processes and signals."""
