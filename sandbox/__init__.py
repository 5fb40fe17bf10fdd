"""A batched, sandboxed executor of untrusted Python code. This package exports the types of calls and results."""

from sandbox.types import Call, CallError, Limits, Outcome, Profile, Result, Status, Usage, Verdict

__all__ = ["Call", "CallError", "Limits", "Outcome", "Profile", "Result", "Status", "Usage", "Verdict"]
