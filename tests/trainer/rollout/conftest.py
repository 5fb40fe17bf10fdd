from __future__ import annotations

import pytest

from tests.trainer.fakes import qwen_tokenizer
from trainer.episodes.chat_format import ChatFormat, rstar2_format


@pytest.fixture(scope="session")
def chat_format() -> ChatFormat:
    return rstar2_format(qwen_tokenizer(), tools=[], system_prompt="Be brief.")
