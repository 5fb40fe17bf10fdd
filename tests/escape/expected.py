"""What attacks get at the weaker levels, and why that cannot be helped there.

Each line is a test that must fail: the day an attack stops succeeding, this table has to change. docs/isolation.md says
the same in prose.
"""

from __future__ import annotations

LOCKS = "files that all calls share can be locked, for as long as a call runs: one bit, between two that both want it"
EVERYWHERE = {
    "test_letter_to_a_call_at_the_same_time[a lock on a file]": LOCKS,
    "test_letter_to_a_call_at_the_same_time[a lock on a device]": LOCKS,
}
"""At every level; sqlite and others need locks, and a filter cannot see which file is meant."""

EXPECTED: dict[str, dict[str, str]] = {}
"""Target, then test (as pytest names it, less the target) -> reason."""


def reason(target: str, test: str) -> str | None:
    return EXPECTED.get(target, {}).get(test) or EVERYWHERE.get(test)
