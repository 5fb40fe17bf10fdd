"""Starts a real vLLM on the CPU with the tiny model of `test_local`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.trainer.engines.test_local import VOCABULARY, model
from trainer.engines.vllm_client import VllmEngine
from trainer.engines.vllm_servers import VllmServers


def saved(folder: Path) -> Path:
    """Save the model and a tokenizer for its vocabulary, which vLLM requires."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return folder


@asynccontextmanager
async def real(python: str, folder: Path, count: int = 1) -> AsyncIterator[VllmEngine]:
    servers = VllmServers(python, saved(folder / "model"), max_model_len=256, max_num_seqs=16, dtype="float32")
    async with servers.serve(count, folder / "logs") as (url, *_):
        yield VllmEngine(url, vocab_size=VOCABULARY, max_model_len=256)
