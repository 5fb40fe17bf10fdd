"""`python -m trainer` is `rstar-train`."""

import sys

from trainer.cli import main

if __name__ == "__main__":  # a process of `multiprocessing` imports this file under another name
    sys.exit(main())
