"""The trainer's half of the transfer by NCCL. vLLM's sender and client are fakes, since no GPU is used."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NamedTuple

import pytest

from tests.trainer.engines.qwen_model import make_model
from trainer.engines.weight_sync import NcclTransfer

torch = pytest.importorskip("torch")


@pytest.mark.asyncio
async def test_nccl_sends_each_tensor_once_over_a_communicator_per_engine(monkeypatch):
    connections, sent, unreachable = [], [], set()

    class Meta(NamedTuple):
        name: str
        dtype: object
        shape: tuple[int, ...]

    class FakeSender:
        @classmethod
        def trainer_init(cls, info, *, client, source):
            sender = cls()
            sender.url, sender.source = client, source
            connections.append((client, info["rank"], info["world_size"]))
            return sender

        def send_weights(self):
            if self.url in unreachable:
                raise ConnectionError("gone")
            assert [meta.name for meta in self.source.metadata()] == [name for name, _ in self.source]
            sent.append((self.url, [name for name, _ in self.source]))

    # The modules of vLLM that `NcclTransfer` imports.
    base, clients, nccl = ModuleType("base"), ModuleType("clients"), ModuleType("nccl_engine")
    base.ParamMeta, base.WeightSource = Meta, object
    clients.HTTPVLLMWeightSyncClient = lambda url: url
    nccl.NCCLTrainerInitInfo, nccl.NCCLTrainerWeightTransferEngine = dict, FakeSender
    for name, module in (("base", base), ("clients", clients), ("nccl_engine", nccl)):
        monkeypatch.setitem(sys.modules, f"vllm.distributed.weight_transfer.{name}", module)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)  # there is no GPU to copy to

    class Server:
        def __init__(self, name):
            self.name, self.url, self.weight_version = name, f"http://{name}", 0

        async def reset_prefix_cache(self, version):
            self.weight_version = version

    servers = [Server("a"), Server("b")]
    transfer = NcclTransfer(gpus_per_engine=2)
    model = make_model()
    for version in (1, 2):
        assert await transfer(servers, model.state_dict(), version) == [None, None]
        assert [server.weight_version for server in servers] == [version] * 2
    assert connections == [("http://a", 0, 3), ("http://b", 0, 3)]  # this process is rank 0 beside 2 GPUs
    assert sent == [(url, [name for name, _ in model.named_parameters()]) for url in ("http://a", "http://b")] * 2

    unreachable.add("http://a")
    first, second = await transfer(servers, model.state_dict(), 3)
    assert "gone" in str(first)
    assert second is None
    assert [server.weight_version for server in servers] == [2, 3]
    unreachable.clear()
    assert await transfer(servers, model.state_dict(), 4) == [None, None]
    assert connections[2:] == [("http://a", 0, 3)], "an engine that is reachable again gets a new communicator"
