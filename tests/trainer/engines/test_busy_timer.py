from __future__ import annotations

from trainer.engines.busy_timer import BusyTimer


def test_overlapping_tasks_are_counted_once():
    clock = iter([1.0, 5.0, 6.0, 9.0])  # read when the first task enters and when the last one leaves
    timer = BusyTimer(lambda: next(clock))
    with timer:
        with timer:
            pass
        with timer:
            pass
    assert timer.seconds == 4.0
    with timer:
        pass
    assert timer.seconds == 7.0
