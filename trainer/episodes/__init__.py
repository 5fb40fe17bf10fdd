"""What an episode is, how its conversation becomes tokens, what it earns and which episodes are trained on.

Pure code: no event loop, no clock, no torch, and no import from the rest of the project.
"""
