"""An assembler for classic BPF: turns instructions with named jump targets into the kernel's 8-byte form."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

# Operations, with their names in linux/filter.h
LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS: load the 32-bit word at offset k of struct seccomp_data
AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
IF_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
MAX_JUMP = 255
"""Maximum number of instructions that a conditional jump skips: the kernel's format has one byte for it."""


@dataclass(frozen=True, slots=True)
class Instruction:
    code: int
    """One of the operations above."""
    k: int
    """Operand: an offset, a mask, a number to compare with, or the result."""
    yes: str | None = None
    """Label to jump to if the condition holds; None means the next instruction."""
    no: str | None = None
    """Label to jump to if the condition does not hold; None means the next instruction."""
    label: str | None = None
    """Name of this instruction as a jump target."""


def assemble(instructions: Sequence[Instruction]) -> bytes:
    """Return the program in the kernel's format. Each jump target must follow within `MAX_JUMP` instructions."""
    indices = {item.label: index for index, item in enumerate(instructions) if item.label is not None}

    def skip_count(index: int, target: str | None) -> int:
        count = 0 if target is None else indices[target] - index - 1
        assert 0 <= count <= MAX_JUMP, f"the jump from {index} to {target} skips {count} instructions"
        return count

    return b"".join(
        struct.pack("<HBBI", item.code, skip_count(index, item.yes), skip_count(index, item.no), item.k)
        for index, item in enumerate(instructions)
    )
