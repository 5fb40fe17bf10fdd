"""Decides which engine runs which turn, and when. Pure: no clock, no I/O, no tasks."""
