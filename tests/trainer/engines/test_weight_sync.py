"""Tests of weight syncs, the transfer of new weights to the engines.

Each kind of transfer brings the weights to the engines. The sync probe, a fixed set of token sequences that trainer and
engine score, detects wrong weights and tolerates rounding.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from tests.trainer.engines.qwen_model import VOCAB_SIZE, make_model, trainer_logprobs  # noqa: E402
from tests.trainer.fake_vllm import FakeVllm  # noqa: E402
from tests.trainer.real_vllm import real_vllm_engine  # noqa: E402
from trainer.engines import weight_sync  # noqa: E402
from trainer.engines.engine import EngineError, SamplingParams  # noqa: E402
from trainer.engines.local import LocalEngine  # noqa: E402
from trainer.engines.pool import EnginePool  # noqa: E402
from trainer.engines.vllm_client import VllmEngine  # noqa: E402
from trainer.engines.weight_sync import (  # noqa: E402
    BOUNDS,
    FileWeightStore,
    SyncProbe,
    WakingTransfer,
    WeightSyncError,
    load_by_engine,
)
from trainer.scheduling.scheduler import Scheduler  # noqa: E402

VLLM_PYTHON = os.environ.get("RSTAR_VLLM_PYTHON", "")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(directory)
    return directory


def make_engine(name="local"):
    return LocalEngine(make_model(), name=name, max_num_seqs=4, max_model_len=128)


def make_pool(engines, model_dir, **options):
    defaults = {"transfer": load_by_engine, "scheduler": Scheduler(256), "probe": SyncProbe(model_dir)}
    return EnginePool(engines, **{**defaults, **options})


def open_episode(pool):
    return pool.open_episode(group="a", max_context_tokens=256)


async def load_saved_model(engine, directory):
    """Load a saved model as vLLM does: tied weights are stored once."""
    weights = load_file(directory / "model.safetensors")
    assert "lm_head.weight" not in weights
    tied_weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    await engine.load_weights(tied_weights, engine.weight_version + 1)


def test_the_probe_scores_like_the_model_for_any_weights(model_dir):
    probe = SyncProbe(model_dir)
    for seed in (0, 1):
        model = make_model(seed)
        scores = probe.expected_logprobs(model.state_dict()).logprobs.tolist()
        for sequence, logprobs in zip(probe.sequences, scores, strict=True):
            assert logprobs == pytest.approx(trainer_logprobs(model, sequence), abs=1e-5)
    assert all(parameter.is_meta for parameter in probe._model.parameters()), "the probe must not hold weights"


@pytest.mark.asyncio
async def test_engines_in_this_process_copy_the_trainers_tensors(model_dir):
    async with make_pool([make_engine("a"), make_engine("b")], model_dir) as pool:
        model = make_model(1)
        assert await pool.sync_weights(model.state_dict()) == 1
        with torch.no_grad():  # a later change of the trainer's weights must not reach the engines
            model.model.norm.weight.mul_(2)
        async with open_episode(pool) as handle:
            generation = await handle.generate([1, 2, 3], SamplingParams(8, seed=0))
        expected = trainer_logprobs(make_model(1), [1, 2, 3, *generation.ids])[2:]
        assert generation.logprobs == pytest.approx(expected, abs=1e-3)
        assert await pool.sync_weights(model.state_dict()) == 2
        assert await pool.sync_weights(model.state_dict(), 40) == 40
        async with open_episode(pool) as handle:
            assert (await handle.generate([1, 2, 3], SamplingParams(8, seed=0))).weight_version == 40


@pytest.mark.asyncio
async def test_servers_load_weights_from_a_directory_that_lasts_until_newer_ones_are_checked(
    model_dir, tmp_path, monkeypatch
):
    server_engine, directories_at_load = make_engine(), []

    async def record_and_load(engine, path):
        assert path.is_absolute(), "the server may have another working directory"
        directories_at_load.append(sorted(directory.name for directory in path.parent.iterdir()))
        await load_saved_model(engine, path)

    monkeypatch.chdir(tmp_path)
    store_dir = tmp_path / "weights"
    for version_of_killed_run in ("v000001", "v000700"):
        (store_dir / version_of_killed_run).mkdir(parents=True)
    async with FakeVllm(server_engine, load=record_and_load).serve() as url:
        engine = VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=256)
        async with make_pool([engine], model_dir, store=FileWeightStore(Path("weights"))) as pool:
            for version, seed in enumerate((1, 2), 1):
                assert await pool.sync_weights(make_model(seed).state_dict()) == engine.weight_version == version
                scores = await engine.logprobs([1, 2, 3])
                assert scores == pytest.approx(trainer_logprobs(make_model(seed), [1, 2, 3]), abs=1e-3)
                assert [directory.name for directory in store_dir.iterdir()] == [f"v{version:06d}"]
    assert directories_at_load == [["v000001", "v000700"], ["v000001", "v000002"]]
    assert list(store_dir.iterdir()) == []
    await server_engine.close()


@pytest.mark.asyncio
async def test_stored_weights_have_the_engines_dtype(tmp_path):
    """The weights are rounded to the dtype of the engines, so the file has half the size."""
    model = make_model(1)
    directory = await FileWeightStore(tmp_path, "bfloat16").save(model.state_dict(), 1)
    stored = load_file(directory / "model.safetensors")
    assert stored.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(stored[name], parameter.to(torch.bfloat16))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "lost_prefix",
    ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", ""],
    ids=["a norm", "a matrix", "all weights"],
)
async def test_a_weight_that_did_not_arrive_is_detected(model_dir, lost_prefix):
    """The weights whose names start with `lost_prefix` stay old, as after an incomplete reload."""

    async def transfer_incompletely(engines, weights, version):
        (engine,) = engines
        old = engine._model.state_dict()
        mixed = {name: old[name] if name.startswith(lost_prefix) else tensor for name, tensor in weights.items()}
        await engine.load_weights(mixed, version)
        return [None]

    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    async with make_pool([make_engine()], model_dir, transfer=transfer_incompletely) as pool:
        with pytest.raises(WeightSyncError, match=r"within \S+ of the trainer's .* got a difference of \d"):
            await pool.sync_weights(model.state_dict())


class ScoringEngine:
    """An engine that scores with a model in the given dtype and with other attention kernels than the trainer's."""

    name, weight_version = "scoring", 1

    def __init__(self, model, dtype):
        self.model = copy.deepcopy(model).to(getattr(torch, dtype))
        self.model.set_attn_implementation("eager")

    async def logprobs(self, ids):
        return trainer_logprobs(self.model, ids)


def make_probe(directory, dtype, num_layers):
    """Return a probe for a model of `num_layers`, whose configuration is saved in `directory`."""
    make_model(num_hidden_layers=num_layers).save_pretrained(directory)
    return SyncProbe(directory, dtype)


def make_sharper_model(seed, num_layers, factor):
    """Return a random model with larger weights, so that its layers matter more and its logits round more."""
    model = make_model(seed, num_hidden_layers=num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(factor)
    return model


@pytest.mark.asyncio
@pytest.mark.parametrize("num_layers", [2, 4])
@pytest.mark.parametrize("dtype", BOUNDS)
async def test_rounding_alone_passes_the_check(tmp_path, dtype, num_layers):
    """The largest difference is at most 0.71 of the bound for 10,000 models (`trainer.engines.weight_sync`)."""
    probe, rng, max_ratio = make_probe(tmp_path, dtype, num_layers), random.Random(0), 0.0
    for seed in range(4):
        model = make_sharper_model(seed, num_layers, factor=1 + seed)
        probe.sequences = [
            rng.choices(range(VOCAB_SIZE), k=weight_sync.PROBE_TOKENS) for _ in range(weight_sync.NUM_PROBES)
        ]
        expected = probe.expected_logprobs(model.state_dict())
        engine = ScoringEngine(model, dtype)
        await probe.check(engine, expected)
        scores = torch.tensor([await engine.logprobs(sequence) for sequence in probe.sequences], dtype=torch.float64)
        bound = BOUNDS[dtype] * expected.rounding
        max_ratio = max(max_ratio, weight_sync._rms(scores - expected.logprobs) / bound)
    assert 0 < max_ratio < 0.75


@pytest.mark.asyncio
@pytest.mark.parametrize("num_layers", [2, 4])
@pytest.mark.parametrize("dtype", BOUNDS)
async def test_a_stale_or_exchanged_layer_is_detected(tmp_path, dtype, num_layers):
    """Check four kinds of wrong weights: a layer of another model, a single matrix of another model, a layer that
    misses one training step, and two layers exchanged."""
    probe = make_probe(tmp_path, dtype, num_layers)
    model = make_model(1, num_hidden_layers=num_layers)
    other = make_model(2, num_hidden_layers=num_layers).state_dict()
    weights = copy.deepcopy(model.state_dict())
    expected = probe.expected_logprobs(weights)
    names_by_layer = [[name for name in weights if f"layers.{layer}." in name] for layer in range(num_layers)]
    other_layers = [{name: other[name] for name in names} for names in names_by_layer]
    other_matrices = [{name: other[name]} for names in names_by_layer for name in names if "proj" in name]
    step_size = {"float32": 1e-4, "bfloat16": 2e-3}[dtype]  # smaller steps are not always detected
    generator = torch.Generator().manual_seed(0)
    missed_steps = [
        {
            name: weights[name] - step_size * torch.randn(weights[name].shape, generator=generator).sign()
            for name in names
        }
        for names in names_by_layer
    ]
    exchanged_layers = [
        {
            name: weights[other_name]
            for pair in zip(first, second, strict=True)
            for name, other_name in (pair, pair[::-1])
        }
        for first, second in itertools.combinations(names_by_layer, 2)
    ]
    wrong_weights = other_layers + other_matrices + missed_steps + exchanged_layers
    assert len(wrong_weights) == num_layers * (1 + 7 + 1) + num_layers * (num_layers - 1) // 2  # a layer has 7 matrices
    await probe.check(ScoringEngine(model, dtype), expected)
    for wrong in wrong_weights:
        model.load_state_dict({**weights, **wrong})
        with pytest.raises(WeightSyncError, match="it has other weights"):
            await probe.check(ScoringEngine(model, dtype), expected)


@pytest.mark.asyncio
async def test_nan_weights_of_the_trainer_are_reported_as_divergence(model_dir):
    broken_model = make_model()
    with torch.no_grad():
        broken_model.model.norm.weight.fill_(float("nan"))
    async with make_pool([make_engine()], model_dir) as pool:
        with pytest.raises(WeightSyncError, match="training has diverged"):
            await pool.sync_weights(broken_model.state_dict())


@pytest.mark.asyncio
async def test_a_server_that_cannot_load_weights_is_down_and_the_others_generate(model_dir, tmp_path):
    async def fail_to_load(engine, directory):
        raise EngineError("disk full")

    async with AsyncExitStack() as stack:
        servers = []
        for name, load in (("good", load_saved_model), ("bad", fail_to_load)):
            engine = make_engine()
            stack.push_async_callback(engine.close)
            url = await stack.enter_async_context(FakeVllm(engine, load=load).serve())
            servers.append(VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=256, name=name))
        pool = await stack.enter_async_context(make_pool(servers, model_dir, store=FileWeightStore(tmp_path)))
        assert await pool.sync_weights(make_model(1).state_dict()) == 1
        assert "disk full" in pool.engine_states["bad"].down_reason
        async with open_episode(pool) as first, open_episode(pool) as second:
            generations = await asyncio.gather(
                *(handle.generate([1], SamplingParams(2, seed=0)) for handle in (first, second))
            )
        assert [generation.engine for generation in generations] == ["good", "good"]


RESTART_OPTIONS = {"scrape_interval_s": 0.05, "retry_after_s": 0.1, "all_down_timeout_s": 300}
"""Options of a pool whose only server is stopped and started again: short intervals, and a long time-out."""


def port_of(url):
    return int(url.rpartition(":")[2])


@pytest.mark.asyncio
async def test_a_turn_continues_with_the_same_tokens_after_the_only_server_restarts(model_dir, tmp_path):
    """The restarted server has its initial weights and an empty cache at the same address."""
    second_turn_started = asyncio.Event()
    tokens_per_turn = 20

    class EngineThatHangs(LocalEngine):
        """Generates one turn and hangs in the second."""

        num_turns = 0

        async def generate(self, ids, sampling):
            self.num_turns += sampling.max_tokens == tokens_per_turn  # the fake server also scores, with one token
            if self.num_turns == 2:
                second_turn_started.set()
                await asyncio.Event().wait()
            return await super().generate(ids, sampling)

    async def run_episode(pool):
        ids, versions = [1, 2, 3], []
        async with open_episode(pool) as handle:
            for turn in range(3):
                generation = await handle.generate(ids, SamplingParams(tokens_per_turn, seed=turn))
                ids, versions = [*ids, *generation.ids, 7], [*versions, generation.weight_version]
        return ids, versions

    async with make_pool([make_engine()], model_dir) as pool:
        await pool.sync_weights(make_model(1).state_dict(), 5)
        expected = await run_episode(pool)
    async with AsyncExitStack() as stack:
        first = EngineThatHangs(make_model(), name="first", max_num_seqs=4, max_model_len=128)
        first_server = await stack.enter_async_context(AsyncExitStack())
        url = await first_server.enter_async_context(FakeVllm(first, load=load_saved_model).serve())
        engine = VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=128)
        pool = make_pool([engine], model_dir, store=FileWeightStore(tmp_path), **RESTART_OPTIONS)
        await stack.enter_async_context(pool)
        await pool.sync_weights(make_model(1).state_dict(), 5)
        running = asyncio.create_task(run_episode(pool))
        await second_turn_started.wait()
        await first_server.aclose()  # cuts all connections and closes the port, as if the server was killed
        while pool.engine_states[engine.name].is_up:  # noqa: ASYNC110 (the pool sends no event)
            await asyncio.sleep(0.01)
        assert not running.done()
        restarted = make_engine()
        await stack.enter_async_context(FakeVllm(restarted, load=load_saved_model).serve(port_of(url)))
        assert await running == expected == (expected[0], [5, 5, 5])
        assert restarted.computed_positions > 0
        await asyncio.gather(first.close(), restarted.close())


@pytest.mark.asyncio
async def test_a_sync_waits_for_the_restart_of_the_only_server(model_dir, tmp_path):
    server_engine = make_engine()
    async with AsyncExitStack() as stack:
        first_server = await stack.enter_async_context(AsyncExitStack())
        url = await first_server.enter_async_context(FakeVllm(server_engine, load=load_saved_model).serve())
        engine = VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=128)
        pool = make_pool([engine], model_dir, store=FileWeightStore(tmp_path), **RESTART_OPTIONS)
        await stack.enter_async_context(pool)
        await pool.sync_weights(make_model(1).state_dict(), 5)
        await first_server.aclose()
        syncing = asyncio.create_task(pool.sync_weights(make_model(2).state_dict(), 6))
        while pool.weight_version == 5 or pool.scheduler.is_paused:  # noqa: ASYNC110 (a failed transfer sends no event)
            await asyncio.sleep(0.01)
        assert not syncing.done()
        await stack.enter_async_context(FakeVllm(server_engine, load=load_saved_model).serve(port_of(url)))
        assert await syncing == engine.weight_version == 6
        scores = await engine.logprobs([1, 2, 3])
        assert scores == pytest.approx(trainer_logprobs(make_model(2), [1, 2, 3]), abs=1e-3)
        await server_engine.close()


@pytest.mark.asyncio
async def test_a_real_vllm_scores_like_the_trainer_after_every_sync_and_sleep(tmp_path):
    """On a CPU, vLLM's sleep mode frees no memory, but its routes answer and it holds completions back."""
    if not VLLM_PYTHON:
        pytest.skip("RSTAR_VLLM_PYTHON names no Python that has vLLM")
    async with real_vllm_engine(VLLM_PYTHON, tmp_path) as engine:
        probe = SyncProbe(tmp_path / "model")
        store = FileWeightStore(tmp_path / "weights")
        options = {"store": store, "transfer": WakingTransfer(load_by_engine)}
        async with make_pool([engine], tmp_path / "model", **options) as pool:
            for seed in (1, 2, 1):
                model = make_model(seed)
                await pool.sync_weights(model.state_dict())
                for temperature in (1.0, 0.6):
                    sampling = SamplingParams(40, temperature=temperature, seed=seed)
                    async with open_episode(pool) as handle:
                        generation = await handle.generate([1, 2, 3], sampling)
                    expected = trainer_logprobs(model, [1, 2, 3, *generation.ids], temperature)[2:]
                    assert generation.logprobs == pytest.approx(expected, abs=1e-3)
            wrong = {name: tensor * 1.05 for name, tensor in make_model(1).state_dict().items()}
            with pytest.raises(WeightSyncError):
                await probe.check(engine, probe.expected_logprobs(wrong))
            await pool.sleep()
            await engine.check_alive()
            assert await engine.is_sleeping()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await engine.logprobs([1, 2])
            await pool.sync_weights(make_model(2).state_dict())
            assert not await engine.is_sleeping()
            scores = await engine.logprobs([1, 2, 3])
            assert scores == pytest.approx(trainer_logprobs(make_model(2), [1, 2, 3]), abs=1e-3)
