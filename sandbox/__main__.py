"""`python -m sandbox` runs the command `rstar-sandbox`."""

import sys

from sandbox.commands.main import main

sys.exit(main())
