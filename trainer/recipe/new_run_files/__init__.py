"""The Python files that `rstar-train init` copies into a new folder."""
