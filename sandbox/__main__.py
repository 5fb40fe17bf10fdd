"""`python -m sandbox` is `rstar-sandbox`."""

import sys

from sandbox.cli import main

sys.exit(main())
