"""Starts a real vLLM on the CPU with a tiny model."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.engines.qwen_model import VOCAB_SIZE, make_model
from trainer.engines.vllm_client import VllmEngine
from trainer.engines.vllm_servers import VllmServers


def save_model(directory: Path, model: Any = None) -> Path:
    """Save a model and a tokenizer for its vocabulary, which vLLM requires. Return the directory."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    (model or make_model()).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(directory)
    return directory


@asynccontextmanager
async def real_vllm_engine(directory: Path, model: Any = None) -> AsyncIterator[VllmEngine]:
    """Run a server with the interpreter RSTAR_VLLM_PYTHON, which has vLLM. Yields its client. Skips the test without
    this variable."""
    if not (python := os.environ.get("RSTAR_VLLM_PYTHON", "")):
        pytest.skip("RSTAR_VLLM_PYTHON names no Python that has vLLM")
    saved = save_model(directory / "model", model)
    servers = VllmServers(python, saved, max_model_len=256, max_num_seqs=16, dtype="float32")
    async with servers.serve(1, directory / "logs") as (url,):
        yield VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=256)
