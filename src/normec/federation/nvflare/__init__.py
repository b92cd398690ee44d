"""A filter for NVIDIA FLARE that bounds a site's updates, adds noise to them, and keeps a ledger."""
