"""Silences the progress bars and warnings of the training libraries, as the command line does."""

import os

from trainer.cli import SILENCING_VARIABLES

for name in SILENCING_VARIABLES:
    os.environ.setdefault(name, "1")
