"""LocalEngine: what it samples depends on weights, ids and seed alone, and its log-probabilities are the trainer's."""

from __future__ import annotations

import asyncio
import functools
import random
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from trainer.engines.engine import EngineError, Generation, NonFiniteLogprobError, SamplingParams  # noqa: E402
from trainer.engines.local import LocalEngine  # noqa: E402

pytestmark = pytest.mark.asyncio
VOCABULARY = 96


def model(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    vocab_size = {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
    network = Qwen3ForCausalLM(Qwen3Config(**{**sizes, **heads, **vocab_size, **changes}))
    with torch.no_grad():  # a random model is nearly uniform: sharper, so that what it says depends on what it read
        network.model.embed_tokens.weight.mul_(3)
    return network


def prompts(count, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(3, 70))] for _ in range(count)]


async def engine_of(seed=0, **options):
    return LocalEngine(model(seed), **{"max_num_seqs": 8, "max_model_len": 256, **options})


def training_logprobs(trained, ids, temperature=1.0):
    with torch.no_grad():
        logits = trained(torch.tensor([ids])).logits[0, :-1].float() / temperature
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


async def test_a_deprecation_warning_is_logged_and_fails_no_request(caplog):
    deprecated, forward = model(), Qwen3ForCausalLM.forward

    @functools.wraps(forward)
    def warns(self, *args, **kwargs):
        warnings.warn("an argument will be removed", FutureWarning, stacklevel=2)
        return forward(self, *args, **kwargs)

    deprecated.forward = warns.__get__(deprecated)
    engine, same = LocalEngine(deprecated, max_num_seqs=8, max_model_len=256), await engine_of()
    sampling = SamplingParams(5, seed=1)
    assert (await engine.generate([1, 2, 3], sampling)).ids == (await same.generate([1, 2, 3], sampling)).ids
    assert caplog.text.count("an argument will be removed") == 1
    await engine.close()
    await same.close()


async def test_an_aborted_request_continues_with_the_same_tokens():
    engine, prompt = await engine_of(max_num_seqs=2), prompts(1)[0]
    whole = await engine.generate(prompt, SamplingParams(150, seed=1))
    ids, logprobs, pieces = (), (), 0
    while len(ids) < 150:
        names = [f"{pieces}", "another", "waiting"]
        first = SamplingParams(150 - len(ids), seed=1, request_id=names[0])
        requests = [
            (prompt + list(ids), first),
            *(([1, 2], SamplingParams(100, seed=2, request_id=name)) for name in names[1:]),
        ]
        begun = engine.computed_positions
        tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
        while engine.computed_positions < begun + 60 and not tasks[0].done():  # noqa: ASYNC110 (a thread counts them)
            await asyncio.sleep(0.001)
        await engine.abort(names)
        generation, _, waiting = await asyncio.gather(*tasks)
        ids, logprobs, pieces = ids + generation.ids, logprobs + generation.logprobs, pieces + 1
        assert generation.is_aborted == (len(ids) < 150)
        assert waiting.ids == () or not generation.is_aborted
    await engine.close()
    assert pieces > 1
    assert (ids, logprobs) == (whole.ids, whole.logprobs)


async def test_bits_do_not_depend_on_batch_slot_or_time():
    requests = [
        (ids, SamplingParams(12, top_p=0.9 if index % 3 == 0 else 1.0, seed=index))
        for index, ids in enumerate(prompts(12))
    ]
    engine = await engine_of()
    together = await asyncio.gather(*(engine.generate(*request) for request in requests))
    backwards = await asyncio.gather(*(engine.generate(*request) for request in reversed(requests)))
    alone = [await engine.generate(*requests[index]) for index in range(3)]
    await engine.close()
    assert alone == together[:3]
    assert backwards[::-1] == together
    assert len({generation.ids for generation in together}) == len(requests)


@pytest.mark.parametrize("slots", [5, 64])
async def test_every_slot_computes_the_same_bits(slots):
    """The same ids give the same bits in every slot, alone or in a batch with longer contexts."""
    engine, strangers = await engine_of(max_num_seqs=slots), await engine_of(max_num_seqs=slots)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (80,), generator=draw)
    for position, id in enumerate(ids.tolist()):
        same = engine._forward(torch.full((slots,), id), torch.full((slots,), position))
        others = torch.randint(0, VOCABULARY, (slots,), generator=draw)
        positions = torch.randint(0, 250, (slots,), generator=draw)
        others[-1], positions[-1] = id, position
        last = strangers._forward(others, positions)[-1]
        assert torch.equal(same, last.expand(slots, -1)), f"position {position}"
    await asyncio.gather(engine.close(), strangers.close())


async def test_logprobs_equal_the_trainers():
    trained, engine = model(), await engine_of()
    prompt = prompts(1)[0]
    for temperature in (1.0, 0.6):
        got = await engine.generate(prompt, SamplingParams(24, temperature=temperature, seed=3))
        expected = training_logprobs(trained, [*prompt, *got.ids], temperature)[len(prompt) - 1 :]
        assert got.logprobs == pytest.approx(expected, abs=1e-4)
    scores = await engine.logprobs([*prompt, *got.ids])
    assert scores == pytest.approx(training_logprobs(trained, [*prompt, *got.ids]), abs=1e-4)
    await engine.close()


async def test_a_cached_prefix_changes_no_bit():
    kept, fresh = await engine_of(max_num_seqs=2), await engine_of(max_num_seqs=2)
    prompt = prompts(1)[0]
    first = await kept.generate(prompt, SamplingParams(30, seed=1))
    context = [*prompt, *first.ids, 5, 6, 7]
    computed = kept.computed_positions
    second = await kept.generate(context, SamplingParams(30, seed=2))
    assert (
        kept.computed_positions - computed == 3 + 30
    )  # the last id sampled and the three after it, not the prompt again
    assert second == await fresh.generate(context, SamplingParams(30, seed=2))
    await asyncio.gather(kept.close(), fresh.close())


async def test_sampling_follows_the_distribution():
    trained, engine = model(), await engine_of(max_num_seqs=64)
    prompt = prompts(1)[0]
    drawn = await asyncio.gather(*(engine.generate(prompt, SamplingParams(1, seed=seed)) for seed in range(2000)))
    with torch.no_grad():
        probabilities = trained(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([generation.ids[0] for generation in drawn]), minlength=VOCABULARY)
    expected = probabilities * len(drawn)
    likely = expected > 5
    chi_squared = ((counts - expected) ** 2 / expected)[likely].sum().item()
    assert likely.sum() > 5
    assert chi_squared < 2 * likely.sum().item() + 20  # the seeds are fixed: this passes or fails for good
    await engine.close()


async def test_top_p_drops_the_tail_and_renormalizes():
    trained, engine = model(), await engine_of()
    prompt = prompts(1)[0]
    drawn = await asyncio.gather(
        *(engine.generate(prompt, SamplingParams(1, top_p=0.5, seed=seed)) for seed in range(200))
    )
    with torch.no_grad():
        probabilities = trained(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    kept = order[: int((ordered.cumsum(-1) < 0.5).sum()) + 1].tolist()
    assert {generation.ids[0] for generation in drawn} <= set(kept)
    mass = probabilities[kept].sum()
    for generation in drawn:
        assert generation.logprobs[0] == pytest.approx((probabilities[generation.ids[0]] / mass).log().item(), abs=1e-4)
    await engine.close()


async def test_generation_ends_after_a_stop_id():
    engine, prompt = await engine_of(), prompts(1)[0]
    got = await engine.generate(prompt, SamplingParams(12, seed=4))
    assert (len(got.ids), got.has_stop_token) == (12, False)
    stop = got.ids[4]
    again = await engine.generate(prompt, SamplingParams(12, stop_ids=(stop,), seed=4))
    end = got.ids.index(stop) + 1
    assert again == Generation(got.ids[:end], got.logprobs[:end], True, "local", 0)
    await engine.close()


async def test_new_weights_change_the_version_and_clear_the_prefix_cache(tmp_path):
    engine, other = await engine_of(), model(seed=1)
    prompt = prompts(1)[0]
    before = await engine.generate(prompt, SamplingParams(8, seed=0))
    await engine.load_weights(other.state_dict(), 7)
    after = await engine.generate(prompt, SamplingParams(8, seed=0))
    assert (before.weight_version, after.weight_version) == (0, 7)
    assert await engine.logprobs(prompt) == pytest.approx(training_logprobs(other, prompt), abs=1e-4)
    model(seed=2).save_pretrained(tmp_path)
    await engine.load_weights(tmp_path, 8)
    assert await engine.logprobs(prompt) == pytest.approx(training_logprobs(model(seed=2), prompt), abs=1e-4)
    await engine.close()


async def test_loading_weights_while_a_request_runs_is_an_error():
    engine = await engine_of()
    running = asyncio.create_task(engine.generate([1], SamplingParams(40, seed=0)))
    await engine.logprobs([1, 2])  # by now the other has begun
    with pytest.raises(RuntimeError, match="await them"):
        await engine.load_weights(model().state_dict(), 1)
    assert len((await running).ids) == 40
    await engine.close()


async def test_loading_weights_ignores_requests_cancelled_before():
    engine, weights = await engine_of(max_num_seqs=2), model().state_dict()
    for version in range(5):
        endless = [asyncio.create_task(engine.generate([1], SamplingParams(255, seed=seed))) for seed in range(4)]
        await asyncio.sleep(0)
        await engine.abort([])  # by now they have come
        for task in endless:
            task.cancel()
        await asyncio.wait(endless)
        await engine.load_weights(weights, version)
    await engine.close()


async def test_cancelled_requests_free_their_slots():
    engine = await engine_of(max_num_seqs=2)
    endless = [asyncio.create_task(engine.generate([1], SamplingParams(255, seed=seed))) for seed in range(10)]
    await asyncio.sleep(0)
    for task in endless:
        task.cancel()
    await asyncio.gather(*endless, return_exceptions=True)
    before = engine.computed_positions
    await engine.generate([2], SamplingParams(1, seed=0))
    assert engine.computed_positions - before <= 3
    await engine.close()


@pytest.mark.parametrize(
    ("ids", "sampling"),
    [([], SamplingParams(1)), ([1] * 250, SamplingParams(7)), ([1], SamplingParams(0)), ([96], SamplingParams(1))],
)
async def test_an_invalid_request_is_a_value_error_at_once(ids, sampling):
    engine = await engine_of()
    with pytest.raises(ValueError, match="expected"):
        await engine.generate(ids, sampling)
    assert (await engine.generate([1], SamplingParams(1, seed=0))).ids
    await engine.close()


async def test_nan_weights_fail_every_turn_and_have_no_effect_after_valid_weights_are_loaded():
    engine, fresh, broken = await engine_of(max_num_seqs=2), await engine_of(max_num_seqs=2), model()
    with torch.no_grad():
        broken.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    await engine.load_weights(broken.state_dict(), 1)
    requests = [engine.generate([1, 2, 3], SamplingParams(5, seed=seed)) for seed in range(5)]
    ends = await asyncio.gather(*requests, engine.logprobs([1, 2, 3]), return_exceptions=True)
    assert [type(end) for end in ends] == [NonFiniteLogprobError] * 6
    await engine.load_weights(model().state_dict(), 0)
    for prompt in prompts(4):
        expected = await fresh.generate(prompt, SamplingParams(20, seed=1))
        assert await engine.generate(prompt, SamplingParams(20, seed=1)) == expected
    await asyncio.gather(engine.close(), fresh.close())


async def test_a_turn_with_nan_logits_fails_alone_and_does_not_affect_later_turns_in_its_slot():
    """Only requests that contain the id with the NaN embedding fail, not others in the batch or later in the slot."""
    fresh, broken = await engine_of(max_num_seqs=2), model(tie_word_embeddings=False)
    broken.load_state_dict(model().state_dict())
    requests = [prompt[:10] for prompt in prompts(3)]
    expected = [await fresh.generate(ids, SamplingParams(20, seed=1)) for ids in requests]
    read = {id for ids, generation in zip(requests, expected, strict=True) for id in (*ids, *generation.ids)}
    poison = min(set(range(VOCABULARY)) - read)
    with torch.no_grad():
        broken.model.embed_tokens.weight[poison] = float("nan")
    engine = LocalEngine(broken, max_num_seqs=2, max_model_len=256)
    turn = engine.generate([*requests[1] * 4, poison, 7], SamplingParams(9, seed=1))
    ends = await asyncio.gather(engine.generate(requests[0], SamplingParams(20, seed=1)), turn, return_exceptions=True)
    assert ends[0] == expected[0]
    assert isinstance(ends[1], NonFiniteLogprobError)
    assert f"expected finite logits, got others at position {4 * len(requests[1])}" in str(ends[1])
    # The first two take both slots, and of neither is a prefix kept that would overwrite what is there.
    some = await asyncio.gather(*(engine.generate(ids, SamplingParams(20, seed=1)) for ids in reversed(requests)))
    assert some == expected[::-1]
    await asyncio.gather(engine.close(), fresh.close())


async def test_close_fails_waiting_requests():
    engine = await engine_of()
    running = asyncio.create_task(engine.generate([1], SamplingParams(255, seed=0)))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await running


async def test_unsupported_attention_is_a_value_error():
    with pytest.raises(ValueError, match="use vLLM"):
        LocalEngine(model(layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=True))
