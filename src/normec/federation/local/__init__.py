"""A whole federation on this machine: certificates, processes and a live view."""
