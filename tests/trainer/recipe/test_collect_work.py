"""Tests of what a worker of a collection opens: engines that other processes use too."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers")

from tests.trainer.collection.hosts import wait_for  # noqa: E402
from tests.trainer.fake_vllm import FakeVllm  # noqa: E402
from trainer.config import EnginesConfig, RunConfig  # noqa: E402
from trainer.data.tiny_model import write_tiny_model  # noqa: E402
from trainer.engines.local import LocalEngine  # noqa: E402
from trainer.recipe.collect_work import HostSpec, _open_pool  # noqa: E402
from trainer.sync.probe import SyncProbe  # noqa: E402


@pytest.mark.parametrize("has_collected_weights", [True, False])
@pytest.mark.asyncio
async def test_a_worker_uses_a_server_only_with_the_weights_of_the_collection(
    tmp_path: Path, has_collected_weights: bool
) -> None:
    """A server that restarts has the weights of its own command line, which may be others."""
    write_tiny_model(tmp_path, seed=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = SyncProbe(tmp_path).expected_logprobs(model.state_dict())
    if not has_collected_weights:
        torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight)
    server = FakeVllm(LocalEngine(model, max_model_len=128))
    async with server.serve() as url:
        engines = EnginesConfig(kind="vllm", endpoints=(url,))
        spec = HostSpec(RunConfig(engines=engines), tmp_path, tmp_path, False, share=1.0, expected_logprobs=expected)
        async with _open_pool(spec) as pool:
            (state,) = pool.engine_states.values()
            if has_collected_weights:
                await wait_for(lambda: state.is_up)
            else:
                await wait_for(lambda: "expected log-probabilities within" in state.down_reason)
                assert not state.is_up
    await server.engine.close()
