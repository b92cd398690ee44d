"""Reproductions of papers. They use the public API and are not part of the wheel."""
