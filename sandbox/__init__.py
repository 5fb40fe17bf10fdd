"""Hostile, model-written Python, run isolated and fast. The types here are the service's whole vocabulary."""

from sandbox.types import Call, CallError, Limits, Outcome, Profile, Result, Status, Usage, Verdict

__all__ = ["Call", "CallError", "Limits", "Outcome", "Profile", "Result", "Status", "Usage", "Verdict"]
