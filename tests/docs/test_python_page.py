"""Runs the sessions of docs/python.md, and compares each line of output."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.local import local_service
from trainer.rollout.loop_thread import LoopThread

PAGE = Path(__file__).parents[2] / "docs/python.md"


@pytest.fixture
def server(guest_python: object, needs_isolation: None) -> Iterator[str]:
    """The URL of a server."""
    with LoopThread() as loop_thread:
        yield loop_thread.enter(local_service(["--zygote-pools", "1"]))


@pytest.mark.slow
def test_each_session_prints_what_is_shown(server: str) -> None:
    sessions = re.findall(r"^```pycon\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    text = "\n".join(sessions).replace("http://127.0.0.1:8642", server)
    examples = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    output: list[str] = []
    failures, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=output.append)
    assert failures == 0, "".join(output)
    assert tried > 30
