"""`python -m sandbox` runs the command `rstar-sandbox`."""

import sys

from sandbox.cli import main

sys.exit(main())
