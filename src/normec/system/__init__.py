"""The operating system: files, code in files, processes, signals, and the owners of connections."""
