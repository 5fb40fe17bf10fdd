"""The command line `rstar-sandbox`."""
