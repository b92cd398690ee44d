"""The files of a run: history, checkpoints, released sums, secrets."""

TRACE = "trace.json.gz"  # of a profiled run: some of its rounds, for ui.perfetto.dev
PROFILE = "profile.json"  # where the time of these rounds goes
