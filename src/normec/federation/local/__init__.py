"""A whole federation on this machine: certificates, processes, and the progress of the run."""
