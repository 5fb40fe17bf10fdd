"""Collects episodes: one episode turn by turn, and many at once."""
