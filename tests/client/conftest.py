"""Sets retry delays of a few milliseconds for all tests of the clients."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _short_retry_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.client.endpoints.MIN_RETRY_DELAY_S", 0.001)
    monkeypatch.setattr("sandbox.client.endpoints.MAX_RETRY_DELAY_S", 0.002)
