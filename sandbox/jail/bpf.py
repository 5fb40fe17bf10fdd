"""An assembler for classic BPF: turns instructions with named jump targets into the kernel's 8-byte form."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS: load the 32-bit word at offset k of struct seccomp_data
AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
IF_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
MAX_JUMP = 255
"""Most instructions that a conditional jump can skip. Jumps only go forward."""


@dataclass(frozen=True, slots=True)
class Instruction:
    code: int
    k: int
    yes: str | None = None
    """Label to jump to if the condition holds; None means the next instruction."""
    no: str | None = None
    """Label to jump to if it does not hold."""
    label: str | None = None
    """Name of this instruction as a jump target."""


def assemble(instructions: Sequence[Instruction]) -> bytes:
    """Return the program as the kernel loads it. All jump targets must exist, at most `MAX_JUMP` instructions ahead."""
    indices = {ins.label: index for index, ins in enumerate(instructions) if ins.label is not None}

    def distance(index: int, target: str | None) -> int:
        skipped = 0 if target is None else indices[target] - index - 1
        assert 0 <= skipped <= MAX_JUMP, f"jump from {index} to {target}: {skipped} instructions"
        return skipped

    return b"".join(
        struct.pack("<HBBI", ins.code, distance(index, ins.yes), distance(index, ins.no), ins.k)
        for index, ins in enumerate(instructions)
    )
