"""Measurements of normec and its peers. They use the public API and are not part of the wheel."""
