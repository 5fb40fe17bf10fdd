"""Limits torch to one thread: on a busy machine, two threads that wait for each other take a hundred times as long."""

import os

from trainer.cli import SILENCING_VARIABLES

os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in SILENCING_VARIABLES:
    os.environ.setdefault(name, "1")
