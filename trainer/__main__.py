"""`python -m trainer` is `rstar-train`."""

import sys

from trainer.cli import main

sys.exit(main())
