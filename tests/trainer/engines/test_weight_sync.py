"""Weights reach engines by each way, and a sync that did not work is seen."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import random
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from tests.trainer.engines.test_local import VOCABULARY, model, training_logprobs  # noqa: E402
from tests.trainer.fake_vllm import FakeVllm  # noqa: E402
from tests.trainer.real_vllm import real  # noqa: E402
from trainer.engines import weight_sync  # noqa: E402
from trainer.engines.engine import EngineError, SamplingParams  # noqa: E402
from trainer.engines.local import LocalEngine  # noqa: E402
from trainer.engines.pool import EnginePool  # noqa: E402
from trainer.engines.vllm_client import VllmEngine  # noqa: E402
from trainer.engines.weight_sync import (  # noqa: E402
    BOUNDS,
    FileWeightStore,
    NcclTransfer,
    SyncProbe,
    WeightSyncError,
    load_by_engine,
)
from trainer.scheduling.scheduler import Scheduler  # noqa: E402

VLLM = os.environ.get("RSTAR_VLLM_PYTHON", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    return folder


def local(name="local", seed=0):
    return LocalEngine(model(seed), name=name, max_num_seqs=4, max_model_len=128)


async def take(engine, folder):
    """Load a saved model as vLLM does: tied weights are stored once."""
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    await engine.load_weights(
        {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, engine.weight_version + 1
    )


def test_the_probe_scores_like_the_model_for_any_weights(folder):
    probe = SyncProbe(folder)
    for seed in (0, 1):
        trained = model(seed)
        scores = probe.expected_logprobs(trained.state_dict()).logprobs.tolist()
        for sequence, logprobs in zip(probe.sequences, scores, strict=True):
            assert logprobs == pytest.approx(training_logprobs(trained, sequence), abs=1e-5)
    assert all(parameter.is_meta for parameter in probe._model.parameters())


@pytest.mark.asyncio
async def test_engines_in_this_process_copy_the_trainers_tensors(folder):
    async with EnginePool(
        [local("a"), local("b")], transfer=load_by_engine, scheduler=Scheduler(256), probe=SyncProbe(folder)
    ) as pool:
        trained = model(1)
        assert await pool.sync_weights(trained.state_dict()) == 1
        with torch.no_grad():  # the trainer goes on: the engine has copies
            trained.model.norm.weight.mul_(2)
        async with pool.open_episode(group="a", max_context_tokens=256) as handle:
            generation = await handle.generate([1, 2, 3], SamplingParams(8, seed=0))
        expected = training_logprobs(model(1), [1, 2, 3, *generation.ids])[2:]
        assert generation.logprobs == pytest.approx(expected, abs=1e-3)
        assert await pool.sync_weights(trained.state_dict()) == 2
        assert await pool.sync_weights(trained.state_dict(), 40) == 40
        async with pool.open_episode(group="a", max_context_tokens=256) as handle:
            assert (await handle.generate([1, 2, 3], SamplingParams(8, seed=0))).weight_version == 40


@pytest.mark.asyncio
async def test_servers_load_weights_from_a_directory_that_lasts_until_newer_ones_are_checked(
    folder, tmp_path, monkeypatch
):
    behind, there = local(), []

    async def taking(engine, path):
        assert path.is_absolute(), "the server may run in another directory"
        there.append(sorted(each.name for each in path.parent.iterdir()))
        await take(engine, path)

    monkeypatch.chdir(tmp_path)
    keep = FileWeightStore(Path("weights"))
    for killed in ("v000001", "v000700"):  # of runs that were killed
        (tmp_path / "weights" / killed).mkdir(parents=True)
    async with FakeVllm(behind, load=taking).serve() as url:
        engine = VllmEngine(url, vocab_size=VOCABULARY, max_model_len=256)
        async with EnginePool(
            [engine], transfer=load_by_engine, store=keep, scheduler=Scheduler(256), probe=SyncProbe(folder)
        ) as pool:
            for version, seed in enumerate((1, 2), 1):
                assert await pool.sync_weights(model(seed).state_dict()) == engine.weight_version == version
                scores = await engine.logprobs([1, 2, 3])
                assert scores == pytest.approx(training_logprobs(model(seed), [1, 2, 3]), abs=1e-3)
                assert [each.name for each in (tmp_path / "weights").iterdir()] == [f"v{version:06d}"]
    assert there == [["v000001", "v000700"], ["v000001", "v000002"]]
    assert list((tmp_path / "weights").iterdir()) == []
    await behind.close()


@pytest.mark.asyncio
async def test_stored_weights_have_the_engines_dtype(tmp_path):
    """The weights are rounded as the engines would round them, which halves the file."""
    trained = model(1)
    kept = await FileWeightStore(tmp_path, "bfloat16").save(trained.state_dict(), 1)
    saved = load_file(kept / "model.safetensors")
    assert saved.keys() == dict(trained.named_parameters()).keys()
    for name, parameter in trained.named_parameters():
        assert torch.equal(saved[name], parameter.to(torch.bfloat16))


@pytest.mark.asyncio
@pytest.mark.parametrize("keep", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", ""])
async def test_a_weight_that_did_not_arrive_is_detected(folder, keep):
    """The weights whose names contain `keep` stay old, as after an incomplete reload. '' keeps all of them."""

    async def partly(engines, weights, version):
        (engine,) = engines
        old = engine._model.state_dict()
        mixed = {name: old[name] if name.startswith(keep) else tensor for name, tensor in weights.items()}
        await engine.load_weights(mixed, version)
        return [None]

    trained = model(0)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.05)
    async with EnginePool([local()], transfer=partly, scheduler=Scheduler(256), probe=SyncProbe(folder)) as pool:
        with pytest.raises(WeightSyncError, match=r"within \S+ of the trainer's .* got a difference of \d"):
            await pool.sync_weights(trained.state_dict())


class Scoring:
    """An engine that scores with a model in the given dtype and with other attention kernels than the trainer's."""

    name, weight_version = "scoring", 1

    def __init__(self, scoring, dtype):
        self.model = copy.deepcopy(scoring).to(getattr(torch, dtype))
        self.model.set_attn_implementation("eager")

    async def logprobs(self, ids):
        return training_logprobs(self.model, ids)


def reference_of(folder, dtype, layers):
    model(num_hidden_layers=layers).save_pretrained(folder)
    return SyncProbe(folder, dtype)


def sharper(seed, layers, factor):
    """Return a random model with larger weights, so that its layers matter more and its logits round more."""
    generation = model(seed, num_hidden_layers=layers)
    with torch.no_grad():
        for name, parameter in generation.named_parameters():
            if "norm" not in name:
                parameter.mul_(factor)
    return generation


@pytest.mark.asyncio
@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("dtype", BOUNDS)
async def test_rounding_alone_passes_the_check(tmp_path, dtype, layers):
    """The largest of these differences is far below the bound, as 10,000 models showed
    (`trainer.engines.weight_sync`)."""
    probe, draw, worst = reference_of(tmp_path, dtype, layers), random.Random(0), 0.0
    for seed in range(12):
        trained = sharper(seed, layers, 1 + seed % 4)
        probe.sequences = [
            draw.choices(range(VOCABULARY), k=weight_sync.PROBE_TOKENS) for _ in range(weight_sync.NUM_PROBES)
        ]
        expected = probe.expected_logprobs(trained.state_dict())
        engine = Scoring(trained, dtype)
        await probe.check(engine, expected)
        scores = torch.tensor([await engine.logprobs(sequence) for sequence in probe.sequences], dtype=torch.float64)
        worst = max(worst, weight_sync._rms(scores - expected.logprobs) / expected.rounding / BOUNDS[dtype])
    assert 0 < worst < 0.75


@pytest.mark.asyncio
@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("dtype", BOUNDS)
async def test_a_stale_or_exchanged_layer_is_detected(tmp_path, dtype, layers):
    """Each layer, and each matrix alone, as it was before the training; each layer that misses a step that a higher
    learning rate makes; each pair of layers exchanged."""
    probe = reference_of(tmp_path, dtype, layers)
    trained, before = model(1, num_hidden_layers=layers), model(2, num_hidden_layers=layers).state_dict()
    right = copy.deepcopy(trained.state_dict())
    expected = probe.expected_logprobs(right)
    of = [[name for name in right if f"layers.{layer}." in name] for layer in range(layers)]
    wrong = [{name: before[name] for name in names} for names in of]
    wrong += [{name: before[name]} for names in of for name in names if "proj" in name]
    step = {"float32": 1e-4, "bfloat16": 2e-3}[dtype]
    draw = torch.Generator().manual_seed(0)
    for names in of:
        steps = {name: step * torch.randn(right[name].shape, generator=draw).sign() for name in names}
        wrong.append({name: right[name] - steps[name] for name in names})
    for one, other in itertools.combinations(of, 2):
        wrong.append({a: right[b] for a, b in [*zip(one, other, strict=True), *zip(other, one, strict=True)]})
    assert len(wrong) == layers * 9 + layers * (layers - 1) // 2
    await probe.check(Scoring(trained, dtype), expected)
    for some in wrong:
        trained.load_state_dict({**right, **some})
        with pytest.raises(WeightSyncError, match="it has other weights"):
            await probe.check(Scoring(trained, dtype), expected)


@pytest.mark.asyncio
async def test_nan_weights_of_the_trainer_are_reported_as_divergence(folder):
    broken = model()
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    async with EnginePool(
        [local()], transfer=load_by_engine, scheduler=Scheduler(256), probe=SyncProbe(folder)
    ) as pool:
        with pytest.raises(WeightSyncError, match="training has diverged"):
            await pool.sync_weights(broken.state_dict())


@pytest.mark.asyncio
async def test_a_server_that_cannot_load_weights_is_down_and_the_others_generate(folder, tmp_path):
    async def refuse(engine, folder):
        raise EngineError("disk full")

    good, bad = local(), local()
    async with FakeVllm(good, load=take).serve() as one, FakeVllm(bad, load=refuse).serve() as two:
        servers = [
            VllmEngine(url, vocab_size=VOCABULARY, max_model_len=256, name=name)
            for url, name in ((one, "one"), (two, "two"))
        ]
        async with EnginePool(
            servers,
            transfer=load_by_engine,
            store=FileWeightStore(tmp_path),
            scheduler=Scheduler(256),
            probe=SyncProbe(folder),
        ) as pool:
            assert await pool.sync_weights(model(1).state_dict()) == 1
            assert "disk full" in pool.engine_states["two"].down_reason
            async with (
                pool.open_episode(group="a", max_context_tokens=256) as first,
                pool.open_episode(group="a", max_context_tokens=256) as second,
            ):
                generation = await asyncio.gather(
                    *(handle.generate([1], SamplingParams(2, seed=0)) for handle in (first, second))
                )
            assert [each.engine for each in generation] == ["one", "one"]
    await asyncio.gather(good.close(), bad.close())


@pytest.mark.asyncio
async def test_a_turn_continues_with_the_same_tokens_after_the_only_server_restarts(folder, tmp_path):
    """The restarted server has its first weights and an empty cache at the same address."""
    begun = asyncio.Event()

    class Hanging(LocalEngine):
        """Never over with a second turn."""

        turns = 0

        async def generate(self, ids, sampling):
            self.turns += sampling.max_tokens == 20  # scores take one
            if self.turns == 2:
                begun.set()
                await asyncio.Event().wait()
            return await super().generate(ids, sampling)

    async def talk(pool):
        ids, versions = [1, 2, 3], []
        async with pool.open_episode(group="a", max_context_tokens=256) as handle:
            for turn in range(3):
                generation = await handle.generate(ids, SamplingParams(20, seed=turn))
                ids, versions = [*ids, *generation.ids, 7], [*versions, generation.weight_version]
        return ids, versions

    options = {"transfer": load_by_engine, "probe": SyncProbe(folder), "scrape_interval_s": 0.05, "retry_after_s": 0.1}
    async with EnginePool([local()], scheduler=Scheduler(256), **options) as pool:
        await pool.sync_weights(model(1).state_dict(), 5)
        expected = await talk(pool)
    async with AsyncExitStack() as stack:
        first = Hanging(model(), name="first", max_num_seqs=4, max_model_len=128)
        serving = await stack.enter_async_context(AsyncExitStack())
        url = await serving.enter_async_context(FakeVllm(first, load=take).serve())
        engine = VllmEngine(url, vocab_size=VOCABULARY, max_model_len=128)
        pool = EnginePool(
            [engine], scheduler=Scheduler(256), store=FileWeightStore(tmp_path), all_down_timeout_s=300, **options
        )
        await stack.enter_async_context(pool)
        await pool.sync_weights(model(1).state_dict(), 5)
        talking = asyncio.create_task(talk(pool))
        await begun.wait()
        await serving.aclose()  # as a server that is killed: its connections are cut, and nobody listens
        while pool.engine_states[engine.name].is_up:  # noqa: ASYNC110 (a client finds out when it asks)
            await asyncio.sleep(0.01)
        assert not talking.done()
        again = local()
        await stack.enter_async_context(FakeVllm(again, load=take).serve(int(url.rpartition(":")[2])))
        assert await talking == expected == (expected[0], [5, 5, 5])
        assert again.computed_positions > 0
        await asyncio.gather(first.close(), again.close())


@pytest.mark.asyncio
async def test_a_sync_waits_for_the_restart_of_the_only_server(folder, tmp_path):
    options = {"transfer": load_by_engine, "probe": SyncProbe(folder), "scrape_interval_s": 0.05, "retry_after_s": 0.1}
    behind = local()
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(AsyncExitStack())
        url = await serving.enter_async_context(FakeVllm(behind, load=take).serve())
        engine = VllmEngine(url, vocab_size=VOCABULARY, max_model_len=128)
        pool = EnginePool(
            [engine], scheduler=Scheduler(256), store=FileWeightStore(tmp_path), all_down_timeout_s=300, **options
        )
        await stack.enter_async_context(pool)
        await pool.sync_weights(model(1).state_dict(), 5)
        await serving.aclose()
        syncing = asyncio.create_task(pool.sync_weights(model(2).state_dict(), 6))
        while pool.weight_version == 5 or pool.scheduler.is_paused:  # noqa: ASYNC110 (no event says that none took them)
            await asyncio.sleep(0.01)
        assert not syncing.done()
        await stack.enter_async_context(FakeVllm(behind, load=take).serve(int(url.rpartition(":")[2])))
        assert await syncing == engine.weight_version == 6
        scores = await engine.logprobs([1, 2, 3])
        assert scores == pytest.approx(training_logprobs(model(2), [1, 2, 3]), abs=1e-3)
        await behind.close()


@pytest.mark.asyncio
async def test_a_real_vllm_scores_like_the_trainer_after_every_sync(tmp_path):
    if not VLLM:
        pytest.skip("RSTAR_VLLM_PYTHON names no Python that has vLLM")
    async with real(VLLM, tmp_path) as engine:
        probe = SyncProbe(tmp_path / "model")
        keep = FileWeightStore(tmp_path / "weights")
        async with EnginePool(
            [engine], transfer=load_by_engine, store=keep, scheduler=Scheduler(256), probe=probe
        ) as pool:
            for seed in (1, 2, 1):
                trained = model(seed)
                await pool.sync_weights(trained.state_dict())
                for temperature in (1.0, 0.6):
                    async with pool.open_episode(group="a", max_context_tokens=256) as handle:
                        generation = await handle.generate(
                            [1, 2, 3], SamplingParams(40, temperature=temperature, seed=seed)
                        )
                    expected = training_logprobs(trained, [1, 2, 3, *generation.ids], temperature)[2:]
                    assert generation.logprobs == pytest.approx(expected, abs=1e-3)
            wrong = {name: tensor * 1.05 for name, tensor in model(1).state_dict().items()}
            with pytest.raises(WeightSyncError):
                await probe.check(engine, probe.expected_logprobs(wrong))


@pytest.mark.asyncio
async def test_nccl_gives_every_engine_its_own_communicator_and_each_tensor_once(monkeypatch):
    """This tests the trainer's half of the transfer. vLLM's sender and client are fakes, since no GPU is used."""
    joined, sent, lost = [], [], set()

    class Meta(NamedTuple):
        name: str
        dtype: object
        shape: tuple[int, ...]

    class Sender:
        @classmethod
        def trainer_init(cls, info, *, client, source):
            sender = cls()
            sender.url, sender.source = client, source
            joined.append((client, info["rank"], info["world_size"]))
            return sender

        def send_weights(self):
            if self.url in lost:
                raise ConnectionError("gone")
            assert [meta.name for meta in self.source.metadata()] == [name for name, _ in self.source]
            sent.append((self.url, [name for name, _ in self.source]))

    base, clients, nccl = ModuleType("base"), ModuleType("clients"), ModuleType("nccl_engine")
    base.ParamMeta, base.WeightSource = Meta, object
    clients.HTTPVLLMWeightSyncClient = lambda url: url
    nccl.NCCLTrainerInitInfo, nccl.NCCLTrainerWeightTransferEngine = dict, Sender
    for name, module in (("base", base), ("clients", clients), ("nccl_engine", nccl)):
        monkeypatch.setitem(sys.modules, f"vllm.distributed.weight_transfer.{name}", module)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)

    class Server:
        def __init__(self, name):
            self.name, self.url, self.weight_version = name, f"http://{name}", 0

        async def reset_prefix_cache(self, version):
            self.weight_version = version

    servers = [Server("a"), Server("b")]
    carry = NcclTransfer(gpus_per_engine=2)
    trained = model()
    for version in (1, 2):
        assert await carry(servers, trained.state_dict(), version) == [None, None]
        assert [server.weight_version for server in servers] == [version] * 2
    assert joined == [("http://a", 0, 3), ("http://b", 0, 3)]
    assert sent == [(url, [name for name, _ in trained.named_parameters()]) for url in ("http://a", "http://b")] * 2

    lost.add("http://a")
    first, second = await carry(servers, trained.state_dict(), 3)
    assert "gone" in str(first) and second is None and [server.weight_version for server in servers] == [2, 3]
    lost.clear()
    assert await carry(servers, trained.state_dict(), 4) == [None, None]
    assert joined[2:] == [("http://a", 0, 3)], "one that is back is joined anew"
