"""The settings of a run: declared once, read from files, flags and assignments."""
