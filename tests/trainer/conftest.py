"""One thread for torch: two that wait for each other on a machine that is busy take a hundred times as long."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
