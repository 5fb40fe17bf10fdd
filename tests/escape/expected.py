"""What attacks get at the weaker levels, and why that cannot be helped there.

Each line is a test that must fail: the day an attack stops succeeding, this table has to change. docs/isolation.md says
the same in prose.
"""

from __future__ import annotations

EXPECTED: dict[str, dict[str, str]] = {}
"""Target, then test (as pytest names it, less the target) -> reason."""


def reason(target: str, test: str) -> str | None:
    return EXPECTED.get(target, {}).get(test)
