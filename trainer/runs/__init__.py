"""The run folder: writing, reading, showing it, and mirroring its metrics to trackers."""
