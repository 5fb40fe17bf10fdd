"""Weights reach engines by each way, and a sync that did not work is seen."""

from __future__ import annotations

import asyncio
import os
import sys
from types import ModuleType
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from tests.trainer.fake_vllm import FakeVllm  # noqa: E402
from tests.trainer.real_vllm import real  # noqa: E402
from tests.trainer.test_local import VOCABULARY, model, training_logprobs  # noqa: E402
from trainer.engine import EngineFailed, Sampling, VllmEngine  # noqa: E402
from trainer.local import LocalEngine  # noqa: E402
from trainer.pool import Pool  # noqa: E402
from trainer.sync import ByFile, ByNccl, Reference, SyncFailed, direct  # noqa: E402

VLLM = os.environ.get("RSTAR_VLLM_PYTHON", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    return folder


def local(name="local", seed=0):
    return LocalEngine(model(seed), name=name, slots=4, max_length=128)


async def take(engine, folder):
    """As vLLM takes a saved model: tied weights are saved once."""
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    await engine.load({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, engine.version + 1)


def test_the_reference_says_what_the_model_says_under_any_weights(folder):
    reference = Reference(folder)
    for seed in (0, 1):
        trained = model(seed)
        expected = training_logprobs(trained, reference.ids)
        assert reference.logprobs(trained.state_dict()) == pytest.approx(expected, abs=1e-5)
    assert all(parameter.is_meta for parameter in reference._model.parameters())


@pytest.mark.asyncio
async def test_engines_in_this_process_take_the_trainers_tensors(folder):
    async with Pool([local("a"), local("b")], carry=direct, most_tokens=256, reference=Reference(folder)) as pool:
        trained = model(1)
        assert await pool.sync(trained.state_dict()) == 1
        with torch.no_grad():  # the trainer goes on: the engine has copies
            trained.model.norm.weight.mul_(2)
        async with pool.seat(group="a", most_tokens=256) as seat:
            made = await seat.generate([1, 2, 3], Sampling(8, seed=0))
        expected = training_logprobs(model(1), [1, 2, 3, *made.ids])[2:]
        assert made.logprobs == pytest.approx(expected, abs=1e-3)
        assert await pool.sync(trained.state_dict()) == 2
        assert await pool.sync(trained.state_dict(), 40) == 40
        async with pool.seat(group="a", most_tokens=256) as seat:
            assert (await seat.generate([1, 2, 3], Sampling(8, seed=0))).version == 40


@pytest.mark.asyncio
async def test_servers_take_weights_from_a_folder_that_is_gone_afterwards(folder, tmp_path):
    behind = local()
    carry = ByFile(tmp_path / "weights")
    (tmp_path / "weights/v000001").mkdir(parents=True)  # of a run that was killed
    async with FakeVllm(behind, load=take).serve() as url:
        engine = VllmEngine(url, vocabulary=VOCABULARY, max_length=256)
        async with Pool([engine], carry=carry, most_tokens=256, reference=Reference(folder)) as pool:
            for version, seed in enumerate((1, 2), 1):
                assert await pool.sync(model(seed).state_dict()) == engine.version == version
                scores = await engine.logprobs([1, 2, 3])
                assert scores == pytest.approx(training_logprobs(model(seed), [1, 2, 3]), abs=1e-3)
            assert list((tmp_path / "weights").iterdir()) == []
    await behind.close()


@pytest.mark.asyncio
async def test_a_file_has_what_the_engines_compute_in(tmp_path):
    """Rounded here as they would round it themselves, at half the size."""
    saved = {}

    class Server:
        async def load(self, folder, version):
            saved.update(load_file(folder / "model.safetensors"))

    trained = model(1)
    assert await ByFile(tmp_path, "bfloat16")([Server()], trained.state_dict(), 1) == [None]
    assert saved.keys() == dict(trained.named_parameters()).keys()
    for name, parameter in trained.named_parameters():
        assert torch.equal(saved[name], parameter.to(torch.bfloat16))


@pytest.mark.asyncio
@pytest.mark.parametrize("keep", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", ""])
async def test_weights_that_did_not_all_arrive_are_seen(folder, keep):
    """`keep` stays as it was, as after a reload that left a mix of old and new; '' is all of them."""

    async def partly(engines, weights, version):
        (engine,) = engines
        old = engine._model.state_dict()
        mixed = {name: old[name] if name.startswith(keep) else tensor for name, tensor in weights.items()}
        await engine.load(mixed, version)
        return [None]

    trained = model(0)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.05)
    async with Pool([local()], carry=partly, most_tokens=256, reference=Reference(folder)) as pool:
        with pytest.raises(SyncFailed, match=r"within 0\.001 of the trainer's, got a difference of \d+\.\d+"):
            await pool.sync(trained.state_dict())


@pytest.mark.asyncio
async def test_a_server_that_cannot_load_rests_and_the_others_go_on(folder, tmp_path):
    async def refuse(engine, folder):
        raise EngineFailed("disk full")

    good, bad = local(), local()
    async with FakeVllm(good, load=take).serve() as one, FakeVllm(bad, load=refuse).serve() as two:
        servers = [
            VllmEngine(url, vocabulary=VOCABULARY, max_length=256, name=name)
            for url, name in ((one, "one"), (two, "two"))
        ]
        async with Pool(servers, carry=ByFile(tmp_path), most_tokens=256, reference=Reference(folder)) as pool:
            assert await pool.sync(model(1).state_dict()) == 1
            assert "disk full" in pool.desks["two"].why
            async with pool.seat(group="a", most_tokens=256) as first, pool.seat(group="a", most_tokens=256) as second:
                made = await asyncio.gather(*(seat.generate([1], Sampling(2, seed=0)) for seat in (first, second)))
            assert [each.engine for each in made] == ["one", "one"]
    await asyncio.gather(good.close(), bad.close())


@pytest.mark.asyncio
async def test_a_real_vllm_says_what_the_trainer_says_after_every_sync(tmp_path):
    if not VLLM:
        pytest.skip("RSTAR_VLLM_PYTHON names no Python that has vLLM")
    async with real(VLLM, tmp_path) as engine:
        reference = Reference(tmp_path / "model")
        async with Pool([engine], carry=ByFile(tmp_path / "weights"), most_tokens=256, reference=reference) as pool:
            for seed in (1, 2, 1):
                trained = model(seed)
                await pool.sync(trained.state_dict())
                for temperature in (1.0, 0.6):
                    async with pool.seat(group="a", most_tokens=256) as seat:
                        made = await seat.generate([1, 2, 3], Sampling(40, temperature=temperature, seed=seed))
                    expected = training_logprobs(trained, [1, 2, 3, *made.ids], temperature)[2:]
                    assert made.logprobs == pytest.approx(expected, abs=1e-3)
            wrong = {name: tensor * 1.05 for name, tensor in model(1).state_dict().items()}
            with pytest.raises(SyncFailed):
                await reference.check(engine, reference.logprobs(wrong))


@pytest.mark.asyncio
async def test_nccl_gives_every_engine_ranks_of_its_own_and_each_tensor_once(monkeypatch):
    """Our half of the transfer. vLLM's, sender and client, are stand-ins here: no GPU has run this yet."""
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
            self.name, self.url, self.version = name, f"http://{name}", 0

        async def renew(self, version):
            self.version = version

    servers = [Server("a"), Server("b")]
    carry = ByNccl(gpus_per_engine=2)
    trained = model()
    for version in (1, 2):
        assert await carry(servers, trained.state_dict(), version) == [None, None]
        assert [server.version for server in servers] == [version] * 2
    assert joined == [("http://a", 0, 3), ("http://b", 0, 3)]
    assert sent == [(url, [name for name, _ in trained.named_parameters()]) for url in ("http://a", "http://b")] * 2

    lost.add("http://a")
    first, second = await carry(servers, trained.state_dict(), 3)
    assert "gone" in str(first) and second is None and [server.version for server in servers] == [2, 3]
    lost.clear()
    assert await carry(servers, trained.state_dict(), 4) == [None, None]
    assert joined[2:] == [("http://a", 0, 3)], "one that is back is joined anew"
