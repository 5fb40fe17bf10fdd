"""The guest runtime, the Python that runs the calls: how it is built and found, its packages and fonts."""
