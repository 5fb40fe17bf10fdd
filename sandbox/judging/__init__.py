"""Judging of programs and of answers: the rules, without a server. `Program` is one program with its tests."""

from sandbox.judging.programs import Program

__all__ = ["Program"]
