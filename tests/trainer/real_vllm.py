"""Starts a real vLLM on the CPU with the tiny model of `test_local`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.trainer.engines.test_local import VOCAB_SIZE, make_model
from trainer.engines.vllm_client import VllmEngine
from trainer.engines.vllm_servers import VllmServers


def save_model(directory: Path) -> Path:
    """Save the model and a tokenizer for its vocabulary, which vLLM requires. Return the directory."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    make_model().save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(directory)
    return directory


@asynccontextmanager
async def real_vllm_engine(python: str, directory: Path) -> AsyncIterator[VllmEngine]:
    """Run a server with the interpreter `python`, which has vLLM. Yields its client."""
    servers = VllmServers(python, save_model(directory / "model"), max_model_len=256, max_num_seqs=16, dtype="float32")
    async with servers.serve(1, directory / "logs") as (url,):
        yield VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=256)
