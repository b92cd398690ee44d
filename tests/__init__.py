"""The tests. They compute in one thread, because a forked child hangs once its parent's OpenMP has started others."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
