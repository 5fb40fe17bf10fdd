"""A small assembler for classic BPF: instructions with named jump targets in, the kernel's 8-byte form out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS: a 32-bit word of the seccomp_data at k
AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
IF_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
MAX_JUMP = 255
"""A conditional jump's reach, in instructions, and only forwards."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """`yes` and `no` name a conditional jump's targets, None being the next instruction; `label` names this one."""

    code: int
    k: int
    yes: str | None = None
    no: str | None = None
    label: str | None = None


def assemble(instructions: Sequence[Instruction]) -> bytes:
    """The program as the kernel takes it. A target that is missing, behind, or too far is a mistake of the caller's."""
    places = {one.label: place for place, one in enumerate(instructions) if one.label is not None}

    def distance(here: int, target: str | None) -> int:
        steps = 0 if target is None else places[target] - here - 1
        assert 0 <= steps <= MAX_JUMP, f"jump from {here} to {target}: {steps} instructions"
        return steps

    return b"".join(
        struct.pack("<HBBI", one.code, distance(here, one.yes), distance(here, one.no), one.k)
        for here, one in enumerate(instructions)
    )
