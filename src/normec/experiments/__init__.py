"""The lab: a configuration becomes a run on disk; runs become comparisons."""
