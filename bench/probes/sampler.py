"""What a server holds while it works, looked at from a thread of its own, and seldom enough that looking is no load.

To add up the memory of a tree (PSS) the kernel walks the page tables of each process in it, with a lock held that a
zygote's next fork needs. So a watch rests between two looks: `every_s`, and `REST` times as long as the last one took.
It never takes more than 2 % of one core, and says how much it took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

REST = 50
EVERY_S = 1.0

Seen = TypeVar("Seen")


class Watch(Generic[Seen]):
    """As a context manager it looks at once, again and again, and a last time; `seen` has it all, in order."""

    def __init__(self, look: Callable[[], Seen], every_s: float = EVERY_S) -> None:
        self.seen: list[Seen] = []
        self.took_s = 0.0
        """How long the looks took, all together."""
        self._look = look
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch[Seen]:
        self._see()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if kind is None:
            self._see()

    def _watch(self) -> None:
        while not self._over.wait(max(self._every_s, REST * self._last_s)):
            self._see()

    def _see(self) -> None:
        begun = time.monotonic()
        self.seen.append(self._look())
        self._last_s = time.monotonic() - begun
        self.took_s += self._last_s
