"""Hostile, model-written Python, run isolated and fast. The types here are the service's whole vocabulary."""

from sandbox.types import Call, CallError, Limits, Profile, Result, Status, Usage

__all__ = ["Call", "CallError", "Limits", "Profile", "Result", "Status", "Usage"]
