"""Measures the virtual time of running calls, and sets the CPU priority of their processes."""
