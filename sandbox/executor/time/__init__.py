"""The time of a running call: its virtual clock, the samples of its processes, and their priority."""
