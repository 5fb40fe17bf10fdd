"""Tests of the broadcast of weights, here by gloo between processes. Every bit arrives, and a receiver that fails does
not block the other receivers."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from tests.trainer.engines.qwen_model import (  # noqa: E402
    EXPERTS_MODELS,
    VOCAB_SIZE,
    make_any_model,
    make_model,
    trainer_logprobs,
)
from tests.trainer.real_vllm import real_vllm_engine  # noqa: E402
from trainer.engines.engine import EngineError  # noqa: E402
from trainer.engines.vllm_client import VllmEngine  # noqa: E402
from trainer.sync import weight_group  # noqa: E402
from trainer.sync.broadcast import BroadcastTransfer  # noqa: E402

TIMEOUT_S = 1.5


@pytest.fixture
def small_buckets(monkeypatch):
    """Let a model take several buckets, as in the receivers' processes."""
    monkeypatch.setattr(weight_group, "BUCKET_BYTES", 2**14)


@asynccontextmanager
async def receivers(directory, *faults):
    """Run a receiver process for each of `faults`. Yields their clients and the files that they write."""
    files = [directory / f"{number}.pt" for number in range(len(faults))]
    script = Path(__file__).with_name("weight_receiver.py")
    repository = Path(__file__).parents[3]
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, str(script), str(file), *filter(None, [fault]), stdout=PIPE,
            env={**os.environ, "PYTHONPATH": str(repository)},
        )
        for file, fault in zip(files, faults, strict=True)
    ]  # fmt: skip
    engines = []
    try:
        for process, fault in zip(processes, faults, strict=True):
            port = int(await process.stdout.readline())
            url = f"http://127.0.0.1:{port}"
            engines.append(VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=256, name=fault or f"e{port}"))
        yield engines, files
    finally:
        for engine in engines:
            await engine.close()
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


def assert_equal(file, model, dtype):
    """Compare the received tensors with those of a saved model: for example, a tied tensor is sent once."""
    received, directory = torch.load(file), file.parent / "saved"
    model.save_pretrained(directory)
    saved = load_file(directory / "model.safetensors")
    assert received.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(received[name], tensor.to(dtype)), name


@pytest.mark.asyncio
async def test_every_bit_reaches_all_processes_at_each_sync(tmp_path, small_buckets):
    async with receivers(tmp_path, "", "") as (engines, files):
        for version, architecture in enumerate(("qwen3", "qwen3", *EXPERTS_MODELS), 1):
            model = make_any_model(architecture, version)
            transfer = BroadcastTransfer("gloo", make_any_model(architecture), "bfloat16", timeout_s=TIMEOUT_S)
            assert await transfer(engines, model.state_dict(), version) == [None, None]
            assert [engine.weight_version for engine in engines] == [version] * 2
            for file in files:
                assert_equal(file, model, torch.bfloat16)


def test_a_bucket_has_at_most_its_size_or_one_tensor():
    tensors = [("a", torch.ones(4)), ("b", torch.ones(2, 3)), ("c", torch.ones(100)), ("d", torch.ones(1))]
    buckets = [[name for name, _ in bucket] for bucket in weight_group.buckets(tensors, 40)]
    assert buckets == [["a", "b"], ["c"], ["d"]]
    assert list(weight_group.buckets([], 40)) == []


@pytest.mark.parametrize("fault", ["dies", "hangs"])
@pytest.mark.asyncio
async def test_a_receiver_that_dies_or_never_joins_fails_alone_and_in_bounded_time(tmp_path, small_buckets, fault):
    """The request of an engine that does not join ends after 3 timeouts."""
    async with receivers(tmp_path, "", fault) as (engines, files):
        model, started_at = make_model(1), time.monotonic()
        transfer = BroadcastTransfer("gloo", model, "float32", timeout_s=TIMEOUT_S)
        errors = await transfer(engines, model.state_dict(), 1)
        assert time.monotonic() - started_at < 5 * TIMEOUT_S
        assert isinstance(errors[1], EngineError)
        assert fault in str(errors[1])
        assert errors[0] is None
        assert_equal(files[0], model, torch.float32)


@pytest.mark.asyncio
async def test_a_receiver_of_other_bits_fails(tmp_path, small_buckets):
    async with receivers(tmp_path, "", "changes") as (engines, _):
        transfer = BroadcastTransfer("gloo", make_model(), "float32", timeout_s=TIMEOUT_S)
        errors = await transfer(engines, make_model(1).state_dict(), 1)
        assert errors[0] is None
        assert "tensors that were sent, got others for model.norm.weight" in str(errors[1])
        assert [engine.weight_version for engine in engines] == [1, 0]


@pytest.mark.asyncio
async def test_a_real_vllm_scores_like_the_trainer_after_every_broadcast(tmp_path):
    async with real_vllm_engine(tmp_path) as engine:
        transfer = BroadcastTransfer("gloo", make_model(), "float32", timeout_s=30)
        for version in (1, 2):
            model = make_model(version)
            assert await transfer([engine], model.state_dict(), version) == [None]
            scores = await engine.logprobs([1, 2, 3, 4])
            assert scores == pytest.approx(trainer_logprobs(model, [1, 2, 3, 4]), abs=1e-3)
        wrong = {"model.norm.weight": torch.ones(7)}
        (error,) = await transfer([engine], {**model.state_dict(), **wrong}, 3)
        assert isinstance(error, EngineError)
        assert await transfer([engine], model.state_dict(), 4) == [None]
        assert await engine.logprobs([1, 2, 3, 4]) == pytest.approx(scores, abs=1e-5)
        await engine.close()
