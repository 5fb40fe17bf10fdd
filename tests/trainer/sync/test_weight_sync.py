"""Tests of weight syncs, the transfer of new weights to the engines.

Each kind of transfer brings the weights to the engines. Each weight has the name that `save_pretrained` gives it.
Checksums of the tensors, or the sync probe (a fixed set of token sequences that trainer and engine score), detect wrong
weights.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from tests.trainer.engines.qwen_model import (  # noqa: E402
    EXPERTS_MODELS,
    VOCAB_SIZE,
    make_any_model,
    make_experts_model,
    make_model,
    trainer_logprobs,
)
from tests.trainer.fake_vllm import FakeVllm  # noqa: E402
from tests.trainer.real_vllm import real_vllm_engine  # noqa: E402
from trainer.engines.engine import EngineError, SamplingParams  # noqa: E402
from trainer.engines.local import LocalEngine  # noqa: E402
from trainer.engines.pool import EnginePool  # noqa: E402
from trainer.engines.vllm_client import CHECKSUMS_FILE, VllmEngine  # noqa: E402
from trainer.scheduling.scheduler import Scheduler  # noqa: E402
from trainer.sync import weight_group, weight_store  # noqa: E402
from trainer.sync.broadcast import BroadcastTransfer  # noqa: E402
from trainer.sync.probe import BOUNDS, ERROR_FACTOR, NUM_PROBES, PROBE_TOKENS, SyncProbe  # noqa: E402
from trainer.sync.saved_tensors import WeightSyncError  # noqa: E402
from trainer.sync.transfers import WakingTransfer, load_by_engine  # noqa: E402
from trainer.sync.weight_store import FileWeightStore  # noqa: E402


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(directory)
    return directory


def make_engine(name="local"):
    return LocalEngine(make_model(), name=name, max_num_seqs=4, max_model_len=128)


def make_pool(engines, **options):
    """Return a pool. Without other `options`, each engine loads the weights itself."""
    scheduler = Scheduler(max_context_tokens=256)
    return EnginePool(engines, **{"transfer": load_by_engine, "scheduler": scheduler, **options})


def make_store(directory, dtype="float32", **options):
    return FileWeightStore(directory, make_model(), dtype, **options)


def load_stored(directory):
    """Return the tensors in a directory of a `FileWeightStore` or of a saved model."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def open_episode(pool):
    return pool.open_episode(group="a", max_context_tokens=256)


async def load_saved_model(engine, directory):
    """Load a saved model as vLLM does: tied weights are stored once."""
    weights = load_stored(directory)
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
async def test_engines_in_this_process_copy_the_trainers_tensors():
    async with make_pool([make_engine("a"), make_engine("b")]) as pool:
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


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.asyncio
async def test_servers_load_weights_from_a_directory_that_lasts_until_newer_ones_are_checked(
    tmp_path, monkeypatch, has_checksums
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
        async with make_pool([engine], store=make_store(Path("weights"), has_checksums=has_checksums)) as pool:
            for version, seed in enumerate((1, 2), 1):
                assert await pool.sync_weights(make_model(seed).state_dict()) == engine.weight_version == version
                scores = await engine.logprobs([1, 2, 3])
                assert scores == pytest.approx(trainer_logprobs(make_model(seed), [1, 2, 3]), abs=1e-3)
                assert [directory.name for directory in store_dir.iterdir()] == [f"v{version:06d}"]
    assert directories_at_load == [["v000001", "v000700"], ["v000001", "v000002"]]
    assert list(store_dir.iterdir()) == []
    await server_engine.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("architecture", ["qwen3", *EXPERTS_MODELS])
async def test_stored_tensors_are_those_of_save_pretrained_in_the_engines_dtype(tmp_path, monkeypatch, architecture):
    """In memory, the experts of a layer are one tensor, and some names differ."""
    monkeypatch.setattr(weight_store, "MAX_FILE_BYTES", 2**14)  # so small that there are several files
    trained = make_any_model(architecture, seed=1)
    trained.save_pretrained(tmp_path / "saved")
    saved = load_stored(tmp_path / "saved")
    loaded = type(trained).from_pretrained(tmp_path / "saved").to("meta")  # stores how its tensors were converted
    for model in (make_any_model(architecture), loaded):
        directory = await FileWeightStore(tmp_path, model, "bfloat16").save(trained.state_dict(), 1)
        stored = load_stored(directory)
        assert len(list(directory.glob("*.safetensors"))) > 1
        assert stored.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(stored[name], tensor.to(torch.bfloat16)), name


@pytest.mark.asyncio
@pytest.mark.parametrize("architecture", EXPERTS_MODELS)
async def test_a_local_engine_scores_like_a_mixture_of_experts_after_a_training_step(architecture):
    trained = make_experts_model(architecture)
    async with make_pool([LocalEngine(make_experts_model(architecture), max_num_seqs=4, max_model_len=128)]) as pool:
        await pool.sync_weights(trained.state_dict())
        before = trainer_logprobs(trained, [1, 2, 3, 4, 5])
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained(torch.tensor([[1, 2, 3, 4, 5]]), labels=torch.tensor([[1, 2, 3, 4, 5]])).loss.backward()
        optimizer.step()
        expected = trainer_logprobs(trained, [1, 2, 3, 4, 5])
        assert expected != pytest.approx(before, abs=1e-2)
        await pool.sync_weights(trained.state_dict())
        (state,) = pool.engine_states.values()
        assert await state.engine.logprobs([1, 2, 3, 4, 5]) == pytest.approx(expected, abs=1e-4)


def test_a_checksum_of_rows_put_together_is_the_sum_of_their_checksums():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(8, 4, generator=generator), torch.randn(2, 4, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        parts = [q.to(dtype), k.to(dtype)]
        sums = [weight_group.checksum(part) for part in parts]
        difference = weight_group.checksum(torch.cat(parts)) - sum(sums)
        assert difference % 2**64 == 0
    changed = q.clone()
    changed[3, 2] = changed[3, 2].nextafter(torch.tensor(9.0))
    assert weight_group.checksum(changed) != weight_group.checksum(q)
    odd = torch.arange(7, dtype=torch.bfloat16)  # its slices have 6 bytes, but a checksum reads 8 bytes at a time
    assert weight_group.checksum(odd[1:4]) == weight_group.checksum(odd[1:4].clone()) != weight_group.checksum(odd[:3])
    assert weight_group.checksum(q.T) == weight_group.checksum(q.T.contiguous())
    assert weight_group.checksum(torch.tensor(0.0)) == 0  # less than 8 bytes, and no dimension


class FusingModel(torch.nn.Module):
    """A model of two layers. As in vLLM, the weights `q` and `k` of a layer are loaded into one parameter of the layer.

    `change` takes the name and the tensor of a weight, and returns the name and the tensor that are loaded instead. If
    it returns None, the weight is not loaded."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 16, bias=False) for _ in range(2))
        self.norm = torch.nn.LayerNorm(4, bias=False)
        self.change = lambda name, tensor: (name, tensor)

    def load_weights(self, weights):
        loaded = set()
        for pair in weights:
            if (changed := self.change(*pair)) is None:
                continue
            name, tensor = changed
            layer, _, part = name.removeprefix("layers.").partition(".")
            target = self.norm.weight if name == "norm.weight" else self.layers[int(layer)].weight
            rows = slice(None) if name == "norm.weight" else slice(*{"q": (0, 8), "k": (8, 16)}[part])
            with torch.no_grad():
                target[rows].copy_(tensor)
            loaded.add(name if name == "norm.weight" else f"layers.{layer}.weight")
        return loaded


def fusing_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"norm.weight": (4,), **{f"layers.{layer}.{part}": (8, 4) for layer in (0, 1) for part in "qk"}}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load_checked(model, weights):
    return weight_group.checked_load(model, lambda tensors: model.load_weights(tensors), weights.items())


@pytest.mark.parametrize(
    ("fault", "missing", "differing"),
    [
        (lambda name, tensor: (name, tensor), [], []),
        (lambda name, tensor: (name, tensor) if "1" not in name else None, ["layers.1.weight"], ["layer 1"]),
        (lambda name, tensor: (name, tensor) if name != "layers.1.k" else None, [], ["layer 1"]),
        (lambda name, tensor: (name.translate(str.maketrans("01", "10")), tensor), [], ["layer 0", "layer 1"]),
        # The norm belongs to no layer, which a report calls layer -1.
        (lambda name, tensor: (name, tensor + 1e-6) if "norm" in name else (name, tensor), [], ["layer -1"]),
    ],
    ids=["no fault", "a layer is skipped", "a part is skipped", "layers are exchanged", "a tensor is changed"],
)
def test_a_report_names_what_a_model_has_not_loaded(fault, missing, differing):
    model = FusingModel()
    model.change = lambda name, tensor: None
    incomplete = load_checked(model, fusing_weights(1))  # what differs in this load is still compared in later ones
    assert len(incomplete["missing"]) == 3
    model.change = lambda name, tensor: (name, tensor)
    first = load_checked(model, fusing_weights(1))
    assert (first["missing"], first["differing"]) == ([], [])
    model.change = fault
    weights = fusing_weights(2)
    report = load_checked(model, weights)
    assert (report["missing"], report["differing"]) == (missing, differing)
    assert report["checksums"] == {name: weight_group.checksum(tensor) for name, tensor in weights.items()}


def test_a_layer_that_a_model_always_changes_is_not_compared():
    """For example, a worker of a server with tensor parallelism loads a part of each tensor."""
    model = FusingModel()
    for seed, changed, differing in ((1, "0", []), (2, "0", []), (3, "", ["layer -1", "layer 1"])):
        model.change = lambda name, tensor, part=changed: (name, -tensor) if part in name else (name, tensor)
        report = load_checked(model, fusing_weights(seed))
        assert (report["missing"], report["differing"]) == ([], differing)


@pytest.mark.asyncio
async def test_a_server_that_reads_a_stale_file_gets_no_turn(tmp_path):
    """The second directory has the file of the first sync, as on a file system that shows old content."""
    directories = []

    async def load_and_go_back(engine, directory):
        directories.append(directory)
        if len(directories) == 2:
            (directory / "model-00001.safetensors").write_bytes(first_content)
        await load_saved_model(engine, directory)

    server_engine = make_engine()
    async with FakeVllm(server_engine, load=load_and_go_back).serve() as url:
        engine = VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=256)
        async with make_pool([engine], store=make_store(tmp_path), all_down_timeout_s=0) as pool:
            model = make_model(1)
            await pool.sync_weights(model.state_dict())
            first_content = (directories[0] / "model-00001.safetensors").read_bytes()
            with torch.no_grad():  # a step at a learning rate of 1e-6, in one matrix
                model.model.layers[1].mlp.up_proj.weight.add_(1e-6)
            with pytest.raises(EngineError, match=r"tensors that were sent, got others for model.layers.1.mlp.up_proj"):
                await pool.sync_weights(model.state_dict())
    await server_engine.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"missing": ["layers.0.mlp.experts.w2_weight"]}, r"weights for all parameters, got none for .*w2_weight"),
        ({"differing": ["layer 0", "layer 3"]}, "parameters equal to the tensors, got others in layer 0, layer 3"),
        ({"checksums": {}}, "tensors that were sent, got others for model.embed_tokens.weight, "),
        ({"checksums": None}, "a report of loaded weights"),
    ],
)
async def test_a_server_that_has_not_loaded_everything_is_down(tmp_path, fault, message):
    def with_fault(route, answer):
        if route == "/collective_rpc":
            return {"results": [answer["results"][0], {**answer["results"][0], **fault}]}
        return answer

    server_engine = make_engine()
    async with FakeVllm(server_engine, load=load_saved_model, change_answer=with_fault).serve() as url:
        engine = VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=256)
        async with make_pool([engine], store=make_store(tmp_path)) as pool:
            with pytest.raises(EngineError, match=message):
                await pool.sync_weights(make_model(1).state_dict())
            assert engine.weight_version == -1
    await server_engine.close()


@pytest.mark.asyncio
async def test_a_server_that_has_restarted_unnoticed_fails_its_check(tmp_path):
    server_engine = make_engine()
    server = FakeVllm(server_engine, load=load_saved_model)
    async with server.serve() as url:
        engine = VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=256)
        directory = await make_store(tmp_path).save(make_model(1).state_dict(), 1)
        await engine.load_weights(directory, 1)
        await engine.check_weights()
        server.load_report = FakeVllm(server_engine).load_report  # a new worker has loaded nothing
        with pytest.raises(EngineError, match="the tensors that were sent, got others for "):
            await engine.check_weights()
        await engine.close()
    await server_engine.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "lost_prefix",
    ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", ""],
    ids=["a norm", "a matrix", "all weights"],
)
async def test_the_probe_detects_a_weight_that_did_not_arrive(model_dir, lost_prefix):
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
    probe = SyncProbe(model_dir)
    async with make_pool([make_engine()], transfer=transfer_incompletely, probe=probe) as pool:
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
async def test_rounding_alone_passes_the_probe(tmp_path, caplog, dtype, num_layers):
    """The largest difference is at most 0.71 of the bound for 10,000 models (`trainer.sync.probe`)."""
    probe, rng, max_ratio = make_probe(tmp_path, dtype, num_layers), random.Random(0), 0.0
    for seed in range(4):
        model = make_sharper_model(seed, num_layers, factor=1 + seed)
        probe.sequences = [rng.choices(range(VOCAB_SIZE), k=PROBE_TOKENS) for _ in range(NUM_PROBES)]
        expected = probe.expected_logprobs(model.state_dict())
        engine = ScoringEngine(model, dtype)
        assert await count_warnings(probe, engine, expected, caplog) == 0
        scores = torch.tensor([await engine.logprobs(sequence) for sequence in probe.sequences], dtype=torch.float64)
        bound = BOUNDS[dtype] * expected.rounding
        max_ratio = max(max_ratio, float((scores - expected.logprobs).square().mean().sqrt()) / bound)
    assert 0 < max_ratio < 0.75


@pytest.mark.asyncio
@pytest.mark.parametrize("num_layers", [2, 4])
@pytest.mark.parametrize("dtype", BOUNDS)
async def test_the_probe_detects_a_stale_or_exchanged_layer(tmp_path, caplog, dtype, num_layers):
    """Check four kinds of wrong weights: a layer of another model, a single matrix of another model, a layer that
    misses one training step, and two layers exchanged. Small differences are warnings."""
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
    assert await count_warnings(probe, ScoringEngine(model, dtype), expected, caplog) == 0
    for wrong in wrong_weights:
        model.load_state_dict({**weights, **wrong})
        try:
            assert await count_warnings(probe, ScoringEngine(model, dtype), expected, caplog) == 1
        except WeightSyncError as error:
            assert "it has other weights" in str(error)


async def count_warnings(probe, engine, expected, caplog):
    caplog.clear()
    await probe.check(engine, expected)
    return len(caplog.records)


@pytest.mark.asyncio
async def test_a_pool_that_probes_once_detects_an_engine_that_computes_otherwise_at_the_first_sync_only(model_dir):
    class OtherEngine(LocalEngine):
        is_right = False

        async def logprobs(self, ids):
            return [logprob - (not self.is_right) for logprob in await super().logprobs(ids)]

    engine = OtherEngine(make_model(), max_num_seqs=4, max_model_len=128)
    async with make_pool([engine], probe=SyncProbe(model_dir), probes_once=True) as pool:
        for _ in range(2):
            with pytest.raises(WeightSyncError):
                await pool.sync_weights(make_model(1).state_dict())
        engine.is_right = True
        await pool.sync_weights(make_model(1).state_dict())
        engine.is_right = False
        await pool.sync_weights(make_model(2).state_dict())
        assert pool.engine_states["local"].is_up


@pytest.mark.asyncio
async def test_a_difference_above_the_bound_is_a_warning_and_one_far_above_is_an_error(model_dir, caplog):
    probe, model = SyncProbe(model_dir), make_model(1)
    expected = probe.expected_logprobs(model.state_dict())

    class ShiftedEngine(ScoringEngine):
        shift = 0.0

        async def logprobs(self, ids):
            return [logprob + self.shift for logprob in await super().logprobs(ids)]

    engine, bound = ShiftedEngine(model, "float32"), BOUNDS["float32"] * expected.rounding
    for engine.shift, num_warnings in ((0, 0), (1.5 * bound, 1), (0.9 * ERROR_FACTOR * bound, 1)):
        assert await count_warnings(probe, engine, expected, caplog) == num_warnings
    assert f"within {bound:.2g} of the trainer's" in caplog.text
    engine.shift = 1.1 * ERROR_FACTOR * bound
    with pytest.raises(WeightSyncError, match=r"times engines.probe_tolerance=1\), got a difference"):
        await probe.check(engine, expected)
    tolerant = SyncProbe(model_dir, tolerance=2 * ERROR_FACTOR)
    assert await count_warnings(tolerant, engine, expected, caplog) == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("check", ["file", "probe", "none"])
async def test_nan_weights_of_the_trainer_are_reported_as_divergence(model_dir, tmp_path, check):
    broken_model = make_model()
    with torch.no_grad():
        broken_model.model.norm.weight.fill_(float("nan"))
    options = {"file": {"store": make_store(tmp_path)}, "probe": {"probe": SyncProbe(model_dir)}, "none": {}}[check]
    async with make_pool([make_engine()], **options) as pool:
        with pytest.raises(WeightSyncError, match="training has diverged"):
            await pool.sync_weights(broken_model.state_dict())


@pytest.mark.asyncio
async def test_a_server_that_cannot_load_weights_is_down_and_the_others_generate(tmp_path):
    async def fail_to_load(engine, directory):
        raise EngineError("disk full")

    async with AsyncExitStack() as stack:
        servers = []
        for name, load in (("good", load_saved_model), ("bad", fail_to_load)):
            engine = make_engine()
            stack.push_async_callback(engine.close)
            url = await stack.enter_async_context(FakeVllm(engine, load=load).serve())
            servers.append(VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=256, name=name))
        pool = await stack.enter_async_context(make_pool(servers, store=make_store(tmp_path)))
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
async def test_a_turn_continues_with_the_same_tokens_after_the_only_server_restarts(tmp_path):
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

    async with make_pool([make_engine()]) as pool:
        await pool.sync_weights(make_model(1).state_dict(), 5)
        expected = await run_episode(pool)
    async with AsyncExitStack() as stack:
        first = EngineThatHangs(make_model(), name="first", max_num_seqs=4, max_model_len=128)
        first_server = await stack.enter_async_context(AsyncExitStack())
        url = await first_server.enter_async_context(FakeVllm(first, load=load_saved_model).serve())
        engine = VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=128)
        pool = make_pool([engine], store=make_store(tmp_path), **RESTART_OPTIONS)
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
async def test_a_sync_waits_for_the_restart_of_the_only_server(tmp_path):
    server_engine = make_engine()
    async with AsyncExitStack() as stack:
        first_server = await stack.enter_async_context(AsyncExitStack())
        url = await first_server.enter_async_context(FakeVllm(server_engine, load=load_saved_model).serve())
        engine = VllmEngine(url, vocab_size=VOCAB_SIZE, max_model_len=128)
        pool = make_pool([engine], store=make_store(tmp_path), **RESTART_OPTIONS)
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
@pytest.mark.parametrize("sync_check", ["checksum", "probe"])
async def test_a_real_vllm_scores_like_the_trainer_after_every_sync_and_sleep(tmp_path, sync_check):
    """On a CPU, vLLM's sleep mode frees no memory, but its routes answer and it holds completions back."""
    async with real_vllm_engine(tmp_path, make_model()) as engine:
        probe = SyncProbe(tmp_path / "model")
        store = make_store(tmp_path / "weights", has_checksums=sync_check == "checksum")
        options = {"store": store, "transfer": WakingTransfer(load_by_engine)}
        async with make_pool([engine], **options, probe=probe if sync_check == "probe" else None) as pool:
            for seed in (1, 2, 1):
                model = make_model(seed)
                await pool.sync_weights(model.state_dict())
                for temperature in (1.0, 0.6):
                    sampling = SamplingParams(40, temperature=temperature, seed=seed)
                    async with open_episode(pool) as handle:
                        generation = await handle.generate([1, 2, 3], sampling)
                    expected = trainer_logprobs(model, [1, 2, 3, *generation.ids], temperature)[2:]
                    assert generation.logprobs == pytest.approx(expected, abs=1e-3)
            # All layers are compared. vLLM pads the vocabulary, so the embedding has more elements than are loaded.
            log = (tmp_path / "logs/engine0.log").read_text()
            assert ("parameters not compared with them: model.embed_tokens\n" in log) == (sync_check == "checksum")
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


@pytest.mark.asyncio
@pytest.mark.parametrize("architecture", EXPERTS_MODELS)
async def test_a_real_vllm_loads_every_expert_or_names_what_is_missing(tmp_path, architecture):
    async with real_vllm_engine(tmp_path, make_experts_model(architecture)) as engine:
        store = FileWeightStore(tmp_path / "weights", make_experts_model(architecture))
        broadcast = BroadcastTransfer("gloo", make_experts_model(architecture), "float32", timeout_s=30)
        for version, transfer in enumerate((load_by_engine, load_by_engine, broadcast, broadcast), 1):
            model = make_experts_model(architecture, version)
            weights = model.state_dict()
            sent = await store.save(weights, version) if transfer is load_by_engine else weights
            assert await transfer([engine], sent, version) == [None]
            scores = await engine.logprobs([1, 2, 3, 4])
            assert scores == pytest.approx(trainer_logprobs(model, [1, 2, 3, 4]), abs=1e-3)
        await engine.check_weights()
        (file,) = (await store.save(weights, 5)).glob("*.safetensors")
        tensors, checksums = load_file(file), json.loads((file.parent / CHECKSUMS_FILE).read_bytes())
        for old, new, message in (
            (".1.input_layernorm.", None, "weights for all parameters, got none for model.layers.1.input_layernorm"),
            (".experts.2.", None, "tensors that were sent, got others for model.layers.0."),
            (".experts.2.", ".experts.9.", r"equal to the tensors, got others in .*model\.layers\.1\.\w+\.experts"),
        ):
            names = {name: name.replace(old, new or old) for name in tensors if new or old not in name}
            save_file({new_name: tensors[name] for name, new_name in names.items()}, file)
            if new:
                checksums = {new_name: checksums[name] for name, new_name in names.items()}
                (file.parent / CHECKSUMS_FILE).write_text(json.dumps(checksums))
            (error,) = await load_by_engine([engine], file.parent, 5)
            assert re.search(message, str(error)), error
            with pytest.raises(EngineError):
                await engine.check_weights()
        await engine.close()
