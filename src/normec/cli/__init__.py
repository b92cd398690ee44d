"""The command line, one file a command; torch is imported only by commands that compute."""
