"""The tools of an episode and the checker of its answer, both in the sandbox. Only this package imports `sandbox`."""
