"""Runs each block of docs/first-week.md in order. The server with OpenAI's API on the page is a fake one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("tensorboard")

from tests.docs.page_blocks import WrittenFile, read_blocks
from tests.trainer.fake_openai import FakeOpenAI
from tests.trainer.fakes import END
from trainer.rollout.loop_thread import LoopThread

PAGE = Path(__file__).parents[2] / "docs/first-week.md"
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture
def endpoint() -> Iterator[str]:
    """The URL of a server whose model answers 360 to every question."""
    server = FakeOpenAI(lambda *_: f"It is.</reason>\n<answer>\n\\boxed{{360}}\n</answer>{END}")
    with LoopThread() as loop_thread:
        yield loop_thread.enter(server.serve())


@pytest.mark.slow
@pytest.mark.timeout(1800)  # two minutes on a quiet machine
@pytest.mark.usefixtures("guest_python", "needs_isolation")
def test_every_block_runs_and_prints_what_is_shown(tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "configs").symlink_to(PAGE.parents[1] / "configs")
    for block in read_blocks(PAGE):
        if isinstance(block, WrittenFile):
            (tmp_path / block.name).write_text(block.text.replace(ADDRESS, endpoint), encoding="utf-8")
        else:
            block.check(tmp_path, {}, timeout_s=1800)
