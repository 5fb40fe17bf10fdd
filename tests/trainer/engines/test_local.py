"""Tests of `LocalEngine`. Its samples depend only on weights, ids and seed. Its log-probabilities equal those of the
trainer."""

from __future__ import annotations

import asyncio
import random
import resource
import threading
import warnings
from concurrent.futures import Future

import numpy
import pytest

from tests.trainer.engines.qwen_model import (
    EXPERTS_MODELS,
    VOCAB_SIZE,
    make_any_model,
    make_model,
    trainer_logprobs,
)
from trainer.engines.engine import EngineCapacity, EngineError, Generation, SamplingParams, TurnError
from trainer.engines.local import LocalEngine
from trainer.engines.local_attention import Chunk

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

pytestmark = pytest.mark.asyncio


def random_prompts(count, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(3, 70))] for _ in range(count)]


async def make_engine(seed=0, model=None, **options):
    return LocalEngine(model or make_model(seed), **{"max_num_seqs": 8, "max_model_len": 256, **options})


@pytest.mark.parametrize("architecture", ["qwen3", *EXPERTS_MODELS])
async def test_samples_do_not_depend_on_the_batch_the_slot_or_the_order(architecture):
    requests = [
        (ids, SamplingParams(12, top_p=0.9 if index % 3 == 0 else 1.0, seed=index))  # mixed within a batch
        for index, ids in enumerate(random_prompts(12))
    ]
    engine = await make_engine(model=make_any_model(architecture))
    together = await asyncio.gather(*(engine.generate(*request) for request in requests))
    in_reverse = await asyncio.gather(*(engine.generate(*request) for request in reversed(requests)))
    alone = [await engine.generate(*requests[index]) for index in range(3)]
    await engine.close()
    assert alone == together[:3]
    assert in_reverse[::-1] == together
    assert len({generation.ids for generation in together}) == len(requests)


@pytest.fixture
def set_num_threads():
    num_threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("architecture", ["qwen3", *EXPERTS_MODELS])
async def test_a_token_has_the_same_bits_in_passes_of_all_sizes(architecture, num_threads, dtype, set_num_threads):
    """The end of a context is computed token by token and alone, then in chunks of random sizes beside the chunks of
    other contexts. It crosses the border of two blocks of torch's attention, at position 512."""
    set_num_threads(num_threads)
    start, length, num_slots, rng = 500, 530, 7, random.Random(0)
    ids = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    engine = LocalEngine(make_any_model(architecture).to(dtype), max_num_seqs=num_slots, max_model_len=length)
    for slot in range(num_slots):
        engine._forward([Chunk(slot, 0, start)], [ids[:start]], [])
    expected = [engine._forward([Chunk(3, i, 1)], [ids[i : i + 1]], [0]) for i in range(start, length)]
    slot, position = 5, start
    while position < length:
        sizes = {other: rng.choice([1, 1, 2, 9]) for other in range(num_slots) if rng.random() < 0.7}
        sizes[slot] = min(rng.choice([1, 2, 7, 20]), length - position)
        starts = {other: rng.randrange(start) for other in sizes} | {slot: position}
        chunks = [Chunk(other, starts[other], sizes[other]) for other in sorted(sizes)]
        chunk_ids = [ids[chunk.start : chunk.start + chunk.num_tokens] for chunk in chunks]
        first_row = sum(size for other, size in sizes.items() if other < slot)
        logits = engine._forward(chunks, chunk_ids, range(first_row, first_row + sizes[slot]))
        expected_logits = torch.cat(expected[position - start :][: sizes[slot]])
        assert torch.equal(logits, expected_logits), f"{sizes[slot]} tokens at {position} beside {sizes}"
        position += sizes[slot]
    await engine.close()


async def test_logprobs_equal_the_trainers():
    model, engine = make_model(), await make_engine()
    prompt = random_prompts(1)[0]
    for temperature in (1.0, 0.6):
        generation = await engine.generate(prompt, SamplingParams(24, temperature=temperature, seed=3))
        ids = [*prompt, *generation.ids]
        expected = trainer_logprobs(model, ids, temperature)[len(prompt) - 1 :]
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)
    assert await engine.logprobs(ids) == pytest.approx(trainer_logprobs(model, ids), abs=1e-4)
    await engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3"])
async def test_logprobs_equal_the_trainers_in_each_architecture_and_dtype(architecture, dtype):
    """In bfloat16 both round their activations, so their log-probabilities differ by rounding."""
    model = make_model(architecture=architecture).to(dtype)
    engine = LocalEngine(make_model(architecture=architecture).to(dtype), max_num_seqs=8, max_model_len=256)
    prompt = random_prompts(1)[0]
    generation = await engine.generate(prompt, SamplingParams(100, seed=3))
    expected = trainer_logprobs(model, [*prompt, *generation.ids])[len(prompt) - 1 :]
    differences = torch.tensor(generation.logprobs) - torch.tensor(expected)
    assert differences.square().mean().sqrt() < (1e-4 if dtype == torch.float32 else 0.05)
    assert generation == await engine.generate(prompt, SamplingParams(100, seed=3))
    await engine.close()


async def test_the_cache_takes_memory_only_for_contexts_that_were_computed():
    """The cache of 64 sequences of 65,536 tokens would take 4 GiB."""
    engine = await make_engine(max_num_seqs=64, max_model_len=65_536, seed=0)
    await engine.generate([1, 2, 3], SamplingParams(100, seed=1))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await asyncio.gather(*(engine.generate([seed, 2, 3], SamplingParams(100, seed=seed)) for seed in range(64)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 << 10
    await engine.close()


class OneDevice(TorchDispatchMode):
    """Raises an error for an operation on tensors that are not all on `device`. Copies between devices are allowed, and
    so are numbers of the CPU (tensors without dimensions), as in torch."""

    def __init__(self, device):
        super().__init__()
        self.device, self.num_operations = torch.device(device), 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, results)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in tensors if tensor.dim()}
        is_copy = operation in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if not is_copy and devices - {self.device}:
            raise AssertionError(f"{operation} has tensors on {devices}, not only on {self.device}")
        self.num_operations += 1
        return results


@pytest.fixture
def meta_engine_class(monkeypatch):
    """Return `LocalEngine` with `OneDevice` in its passes. Tensors on `meta` have no values, so all are read as 0. Only
    tensors of such an engine must be read."""

    def zeros(tensor):
        return numpy.zeros(tensor.shape, dtype=float if tensor.is_floating_point() else int).tolist()

    class MetaEngine(LocalEngine):
        num_operations = 0

        def _step(self):
            with OneDevice("meta") as mode:
                super()._step()
            self.num_operations += mode.num_operations

    monkeypatch.setattr(torch.Tensor, "tolist", zeros)
    return MetaEngine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen3", *EXPERTS_MODELS])
async def test_all_tensors_of_a_pass_are_on_the_device_of_the_model(meta_engine_class, architecture, dtype):
    """`meta` is a device without a machine. The engine samples, scores, cuts off the tail of a distribution, continues
    a cached prefix, and loads weights from the CPU."""
    model = make_any_model(architecture).to(dtype)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = meta_engine_class(model.to("meta"), max_num_seqs=4, max_model_len=600)
    prompt = random_prompts(1)[0]
    requests = [([*prompt, 1, seed], SamplingParams(4, top_p=0.9 if seed else 1.0, seed=seed)) for seed in range(6)]
    generations = await asyncio.gather(*(engine.generate(*request) for request in requests), engine.logprobs(prompt))
    computed_before = engine.computed_positions
    await engine.generate([*prompt, 1, 0, *generations[0].ids], SamplingParams(3, seed=1))
    assert engine.computed_positions - computed_before == 3, "the prefix was not taken from the cache"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
        await engine.load_weights(weights, 1)
    assert (await engine.generate(*requests[0])).weight_version == 1
    tensors = [*engine._cache._layers.values(), *engine._model.parameters(), *engine._model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert engine.num_operations > 1000
    await engine.close()


async def test_on_a_gpu_an_engine_has_the_slots_whose_memory_fits_at_once(meta_engine_class):
    """Each position takes 1 KiB. A slot has room for a multiple of 512 positions, which is how attention reads it."""
    engine = meta_engine_class(make_model().to("meta"), max_num_seqs=8, max_model_len=600, max_cache_bytes=3500 << 10)
    assert (await engine.capacity()) == EngineCapacity(3 * 600, 3)
    await asyncio.gather(*(engine.generate([seed, *range(9)], SamplingParams(590, seed=seed)) for seed in range(5)))
    assert sum(layer.nbytes for layer in engine._cache._layers.values()) == 3 * 1024 << 10
    await engine.close()
    with pytest.raises(ValueError, match=r"values of max_model_len=600 tokens, .*; lower engines.max_model_len"):
        meta_engine_class(make_model().to("meta"), max_model_len=600, max_cache_bytes=1023 << 10)


async def test_requests_wait_for_memory_and_sample_the_same_tokens():
    """The cache has room for two requests of 70 positions and 30 tokens. Eight run, with contexts of other lengths
    before and after them."""
    requests = [([seed, *range(69)], SamplingParams(30, seed=seed)) for seed in range(8)]
    requests += [([7], SamplingParams(length, seed=length)) for length in (1, 180, 5, 199)]
    engine, small_engine = await make_engine(), await make_engine(max_model_len=200, max_cache_bytes=200 * 1024)
    expected = await asyncio.gather(*(engine.generate(*request) for request in requests))
    assert await asyncio.gather(*(small_engine.generate(*request) for request in requests)) == expected
    assert (await small_engine.capacity()).kv_tokens == 200
    await asyncio.gather(engine.close(), small_engine.close())


async def test_too_little_memory_for_one_request_is_refused_before_the_start():
    with pytest.raises(ValueError, match=r"values of max_model_len=256 tokens, .*; lower engines.max_model_len"):
        await make_engine(max_cache_bytes=255 * 1024)


async def test_a_cached_prefix_changes_no_bit():
    engine, engine_without_cache = await make_engine(max_num_seqs=2), await make_engine(max_num_seqs=2)
    prompt = random_prompts(1)[0]
    first = await engine.generate(prompt, SamplingParams(30, seed=1))
    context = [*prompt, *first.ids, 5, 6, 7]
    computed_before = engine.computed_positions
    second = await engine.generate(context, SamplingParams(30, seed=2))
    # The last sampled id and two of the three new ones fill the cache; the third yields the first of 30 samples.
    assert engine.computed_positions - computed_before == 3 + 30
    assert second == await engine_without_cache.generate(context, SamplingParams(30, seed=2))
    await asyncio.gather(engine.close(), engine_without_cache.close())


async def test_prompts_that_begin_with_the_same_ids_compute_them_once():
    """The common ids need two passes. Each prompt has five ids of its own, and each request samples three ids."""
    engine, engine_without_cache = [await make_engine(max_model_len=720) for _ in range(2)]
    common_ids = [index % VOCAB_SIZE for index in range(700)]
    requests = [([*common_ids, *[seed] * 5], SamplingParams(3, seed=seed)) for seed in range(8)]
    are_submitted = threading.Event()
    engine._inbox.put((Future(), are_submitted.wait))  # the engine's thread finds all requests at once
    tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
    await asyncio.sleep(0)
    are_submitted.set()
    generations = await asyncio.gather(*tasks)
    # The third id of a request is sampled and not computed.
    assert engine.computed_positions == len(common_ids) + len(requests) * (5 + 2)
    assert generations[7] == await engine_without_cache.generate(*requests[7])
    await asyncio.gather(engine.close(), engine_without_cache.close())


async def test_sampling_follows_the_distribution():
    model, engine = make_model(), await make_engine(max_num_seqs=64)
    prompt = random_prompts(1)[0]
    generations = await asyncio.gather(*(engine.generate(prompt, SamplingParams(1, seed=seed)) for seed in range(2000)))
    with torch.no_grad():
        probabilities = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([generation.ids[0] for generation in generations]), minlength=VOCAB_SIZE)
    expected = probabilities * len(generations)
    is_frequent = expected > 5  # the usual condition for a chi-squared test
    chi_squared = ((counts - expected) ** 2 / expected)[is_frequent].sum().item()
    assert is_frequent.sum() > 5
    assert chi_squared < 2 * is_frequent.sum().item() + 20  # loose, and the seeds are fixed, so the test is never flaky
    await engine.close()


async def test_top_p_drops_the_tail_and_renormalizes():
    model, engine = make_model(), await make_engine()
    prompt = random_prompts(1)[0]
    generations = await asyncio.gather(
        *(engine.generate(prompt, SamplingParams(1, top_p=0.5, seed=seed)) for seed in range(200))
    )
    with torch.no_grad():
        probabilities = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    top_ids = order[: int((ordered.cumsum(-1) < 0.5).sum()) + 1].tolist()
    assert {generation.ids[0] for generation in generations} <= set(top_ids)
    logprobs = (probabilities / probabilities[top_ids].sum()).log()
    for generation in generations:
        assert generation.logprobs[0] == pytest.approx(logprobs[generation.ids[0]].item(), abs=1e-4)
    await engine.close()


async def test_generation_ends_after_a_stop_id():
    engine, prompt = await make_engine(), random_prompts(1)[0]
    whole = await engine.generate(prompt, SamplingParams(12, seed=4))
    assert (len(whole.ids), whole.has_stop_token) == (12, False)
    stop_id = whole.ids[4]
    stopped = await engine.generate(prompt, SamplingParams(12, stop_ids=(stop_id,), seed=4))
    end = whole.ids.index(stop_id) + 1
    assert stopped == Generation(whole.ids[:end], whole.logprobs[:end], True, "local", 0)
    await engine.close()


async def test_new_weights_change_the_version_and_clear_the_prefix_cache(tmp_path):
    engine, other = await make_engine(), make_model(seed=1)
    prompt = random_prompts(1)[0]
    before = await engine.generate(prompt, SamplingParams(8, seed=0))
    await engine.load_weights(other.state_dict(), 7)
    after = await engine.generate(prompt, SamplingParams(8, seed=0))
    assert (before.weight_version, after.weight_version) == (0, 7)
    assert await engine.logprobs(prompt) == pytest.approx(trainer_logprobs(other, prompt), abs=1e-4)
    make_model(seed=2).save_pretrained(tmp_path)
    await engine.load_weights(tmp_path, 8)
    assert await engine.logprobs(prompt) == pytest.approx(trainer_logprobs(make_model(seed=2), prompt), abs=1e-4)
    await engine.close()


async def test_loading_weights_while_a_request_runs_is_an_error():
    engine = await make_engine()
    running = asyncio.create_task(engine.generate([1], SamplingParams(40, seed=0)))
    await engine.logprobs([1, 2])  # returns after the other request has started
    with pytest.raises(RuntimeError, match="await them"):
        await engine.load_weights(make_model().state_dict(), 1)
    assert len((await running).ids) == 40
    await engine.close()


async def test_weights_can_be_loaded_right_after_all_requests_are_cancelled():
    engine, weights = await make_engine(max_num_seqs=2), make_model().state_dict()
    for version in range(5):
        running = [asyncio.create_task(engine.generate([1], SamplingParams(255, seed=seed))) for seed in range(4)]
        while not engine._running:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await engine.load_weights(weights, version)
    await engine.close()


async def test_cancelled_requests_free_their_slots():
    engine = await make_engine(max_num_seqs=2)
    running = [asyncio.create_task(engine.generate([1], SamplingParams(255, seed=seed))) for seed in range(10)]
    await asyncio.sleep(0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    before = engine.computed_positions
    await engine.generate([2], SamplingParams(1, seed=0))
    assert engine.computed_positions - before <= 3  # the new request, and one step of the two that ran
    await engine.close()


@pytest.mark.parametrize(
    ("ids", "sampling"),
    [([], SamplingParams(1)), ([1] * 250, SamplingParams(7)), ([1], SamplingParams(0)), ([96], SamplingParams(1))],
)
async def test_an_invalid_request_is_a_value_error_at_once(ids, sampling):
    engine = await make_engine()
    with pytest.raises(ValueError, match="expected"):
        await engine.generate(ids, sampling)
    assert (await engine.generate([1], SamplingParams(1, seed=0))).ids
    await engine.close()


async def test_nan_weights_fail_every_request_and_have_no_effect_after_valid_weights_are_loaded():
    engine, valid_engine = await make_engine(max_num_seqs=2), await make_engine(max_num_seqs=2)
    broken_model = make_model()
    with torch.no_grad():
        broken_model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    await engine.load_weights(broken_model.state_dict(), 1)
    requests = [engine.generate([1, 2, 3], SamplingParams(5, seed=seed)) for seed in range(5)]
    results = await asyncio.gather(*requests, engine.logprobs([1, 2, 3]), return_exceptions=True)
    assert [type(result) for result in results] == [TurnError] * 6
    await engine.load_weights(make_model().state_dict(), 0)
    for prompt in random_prompts(4):
        expected = await valid_engine.generate(prompt, SamplingParams(20, seed=1))
        assert await engine.generate(prompt, SamplingParams(20, seed=1)) == expected
    await asyncio.gather(engine.close(), valid_engine.close())


async def test_a_request_with_nan_logits_fails_alone_and_does_not_affect_later_requests_in_its_slot():
    """One id has an embedding of NaN. Only the request with this id fails. The other request of the batch does not."""
    valid_engine, broken_model = await make_engine(max_num_seqs=2), make_model(tie_word_embeddings=False)
    broken_model.load_state_dict(make_model().state_dict())
    prompts = [prompt[:10] for prompt in random_prompts(3)]
    sampling = SamplingParams(20, seed=1)
    expected = [await valid_engine.generate(prompt, sampling) for prompt in prompts]
    used_ids = {id for prompt, generation in zip(prompts, expected, strict=True) for id in (*prompt, *generation.ids)}
    nan_id = min(set(range(VOCAB_SIZE)) - used_ids)
    with torch.no_grad():
        broken_model.model.embed_tokens.weight[nan_id] = float("nan")
    engine = LocalEngine(broken_model, max_num_seqs=2, max_model_len=256)
    failing = engine.generate([*prompts[1] * 4, nan_id, 7], SamplingParams(9, seed=1))
    other, error = await asyncio.gather(engine.generate(prompts[0], sampling), failing, return_exceptions=True)
    assert other == expected[0]
    assert isinstance(error, TurnError)
    assert f"expected finite logits, got others at position {4 * len(prompts[1]) + 1}" in str(error)
    # The first two requests use both slots. No cached prefix of theirs overwrites the slot's old keys and values.
    later = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in reversed(prompts)))
    assert later == expected[::-1]
    await asyncio.gather(engine.close(), valid_engine.close())


async def test_close_fails_waiting_requests():
    engine = await make_engine()
    running = asyncio.create_task(engine.generate([1], SamplingParams(255, seed=0)))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await running


async def test_unsupported_attention_is_a_value_error():
    with pytest.raises(ValueError, match="use vLLM"):
        LocalEngine(make_model(layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=True))


async def test_a_sliding_window_is_refused_if_a_context_can_be_longer():
    """Configurations of Mistral have no types of layers."""
    with pytest.raises(ValueError, match="max_model_len=256 to be at most the model's sliding window of 255; lower"):
        LocalEngine(make_model(architecture="Mistral", sliding_window=255), max_model_len=256)
    await LocalEngine(make_model(architecture="Mistral", sliding_window=256), max_model_len=256).close()
