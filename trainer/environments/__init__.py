"""Environments: the tools of an episode, and its score. Only this package imports `sandbox`."""
