"""The files of a run: lock, history, checkpoints, released sums, secrets, tags."""

TRACE = "trace.json.gz"  # of a profiled run: some of its rounds, for ui.perfetto.dev
PROFILE = "profile.json"  # where the time of these rounds goes
