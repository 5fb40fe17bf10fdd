"""Tests of training with an adapter of peft (few weights beside the frozen ones of a model): what engines, checkpoints
and the next stage get, and which adapters are refused."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")
pytest.importorskip("peft", reason="needs peft")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from tests.trainer.sampling import QUIET_LIBRARIES, Sampler  # noqa: E402
from tests.trainer.training.stage_run import StageRun, are_equal, load_weights  # noqa: E402
from trainer.config import ConfigError, SftConfig  # noqa: E402
from trainer.episodes.chat_format import rstar2_format  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.runs.run_folder import RunFolder  # noqa: E402
from trainer.training.adapters import MergedWeights, peft_config  # noqa: E402
from trainer.training.context import TrainingContext  # noqa: E402
from trainer.training.sft import train_sft  # noqa: E402

pytestmark = [QUIET_LIBRARIES, pytest.mark.filterwarnings("ignore::UserWarning:peft")]

LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("options", [LORA, LORA | {"use_dora": True}, {"peft_type": "IA3"}])
def test_engines_and_the_next_stage_get_plain_weights_in_which_only_adapted_layers_differ(
    tmp_path: Path, model: Path, loop_thread: LoopThread, options: dict[str, Any]
) -> None:
    """`Sampler` loads the synced weights into a plain model, as the local engine does. The log-probabilities of this
    model agree with those of the adapted model in training."""
    sampler, stage_run = Sampler(model), StageRun(tmp_path, model, loop_thread, learning_rate=1e-2, steps=3)
    trained = stage_run.run(sampler, peft=options)
    initial = load_weights(model)
    assert are_equal(sampler.syncs[0], initial), "a new adapter changes nothing"
    differing = changed(sampler.syncs[0], sampler.syncs[2])
    assert differing
    assert all(re.search(r"_proj\.weight$", name) for name in differing)
    assert differing == changed(initial, load_weights(trained.model)), "the frozen weights are exact after each sync"
    rows = list(stage_run.run_folder.read_metrics())
    assert [row["logprob_diff_mean"] < 1e-5 for row in rows] == [True] * 3
    assert not (trained.model / "adapter_config.json").exists()

    # The next stage starts from the merged weights with a new adapter and new optimizer states.
    following, next_sampler = (
        StageRun(tmp_path, trained.model, loop_thread, name="rl2", steps=1),
        Sampler(trained.model),
    )
    following.run(next_sampler, peft=options, first_step=3, optimizer_checkpoint=trained.checkpoint)
    assert are_equal(next_sampler.syncs[0], load_weights(trained.model))


def test_a_stage_with_an_adapter_resumed_after_a_failure_ends_like_an_uninterrupted_one(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    expected = StageRun(tmp_path / "whole", model, loop_thread, steps=4).run(Sampler(model), peft=LORA)

    class StopTraining(Exception):
        pass

    def fail_in_fourth_step(index: int) -> None:
        if index == 3:
            raise StopTraining

    resumed = StageRun(tmp_path / "resumed", model, loop_thread, steps=4)
    with pytest.raises(StopTraining):
        resumed.run(Sampler(model, on_collect=fail_in_fourth_step), peft=LORA)
    sampler = Sampler(model)
    actual = resumed.run(sampler, peft=LORA)
    assert len(sampler.syncs) == 2
    assert not are_equal(sampler.syncs[0], load_weights(model)), "the adapter of the checkpoint is loaded"
    assert are_equal(load_weights(actual.model), load_weights(expected.model))


def test_only_the_weights_that_are_trained_are_float32(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, dtypes = TrainingContext.train, set()

    def record(self: Any, trainer: Any, checkpoint: Path | None) -> Any:
        dtypes.update((weight.requires_grad, weight.dtype) for weight in trainer.model.parameters())
        return train(self, trainer, checkpoint)

    monkeypatch.setattr(TrainingContext, "train", record)
    stage_run = StageRun(tmp_path, model, loop_thread, learning_rate=1e-2)
    trained = stage_run.run(Sampler(model), peft=LORA, dtype="bfloat16")
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}
    # Rounding to bfloat16 changes a log-probability by less than the learning rate does.
    assert all(row["logprob_diff_mean"] < 0.02 for row in stage_run.run_folder.read_metrics())
    assert changed(load_weights(model), load_weights(trained.model))


def test_sft_trains_an_adapter_and_saves_a_plain_model(tmp_path: Path, model: Path) -> None:
    chat_format = rstar2_format(AutoTokenizer.from_pretrained(model), tools=[], system_prompt="Go.")
    conversations = [[{"role": "user", "content": "1?"}, {"role": "assistant", "content": "<reason>1</reason>"}]] * 4
    context = TrainingContext(model, tmp_path / "stages/sft", RunFolder(tmp_path), seed=1, peft=LORA)
    sft = SftConfig(batch_size=2, micro_batch_size=2, epochs=1, learning_rate=1e-2, max_conversation_tokens=96)
    trained = train_sft(sft, context, conversations=conversations, chat_format=chat_format)
    differing = changed(load_weights(model), load_weights(trained.model))
    assert differing
    assert all(re.search(r"(q|down)_proj\.weight$", name) for name in differing)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_alfa": 8}, "lora_alfa: unknown option of peft's LoraConfig; did you mean lora_alpha?"),
        ({"task_type": "SEQ_CLS"}, "task_type: expected another option of peft's LoraConfig, since the trainer sets"),
        ({"peft_type": "LORRA"}, "peft_type=LORRA: did you mean LORA?"),
        ({"target_modules": ["w_proj"]}, "Target modules .*w_proj.* not found in the base model"),
        ({"r": 0}, "`r` should be a positive integer"),
        ({"modules_to_save": ["lm_head"]}, "expected an adapter of linear layers that can be merged"),
        ({"target_modules": ["embed_tokens"]}, "expected an adapter of linear layers that can be merged"),
        (
            {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2},
            "expected an adapter of linear layers that can be merged",
        ),
    ],
)
def test_an_adapter_that_peft_rejects_or_that_cannot_be_merged_is_refused(
    model: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        peft_config(options, model)
    assert str(caught.value).startswith("model.peft: ")
    assert "\n" not in str(caught.value)


def test_the_frozen_weights_of_an_adapted_model_in_training_stay_exact_over_many_merges(model: Path) -> None:
    adapted = adapted_model(model)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    merged = dict(MergedWeights(adapted, adapted.state_dict()))
    for _ in range(20):
        assert are_equal(dict(MergedWeights(adapted, adapted.state_dict())), merged)
    assert are_equal(adapted.state_dict(), before)
    plain = AutoModelForCausalLM.from_pretrained(model)
    plain.load_state_dict(merged)
    ids = torch.arange(30).reshape(3, 10)
    assert torch.allclose(plain(ids).logits, adapted(ids).logits, atol=1e-4)
    assert changed(load_weights(model), merged)
    sharded = adapted_model(model).to("meta")  # its own tensors are not the whole ones
    assert are_equal(dict(MergedWeights(sharded, before)), merged)


def test_a_layer_is_merged_when_it_is_read_and_freed_after_that(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted, copies = adapted_model(model), list[weakref.ref[Any]]()
    monkeypatch.setattr(copy, "deepcopy", lambda *args, copy_layer=copy.deepcopy: copied(copy_layer(*args), copies))
    weights = MergedWeights(adapted, adapted.state_dict())
    assert (len(weights), copies) == (len(list(weights)), []), "a rank that reads no weight merges nothing"
    for name, weight in weights.items():
        gc.collect()
        assert sum(layer() is not None for layer in copies) == 0, "only the weight itself is kept"
        assert (weight.data_ptr() in {tensor.data_ptr() for tensor in adapted.state_dict().values()}) == (
            re.search(r"(q|down)_proj\.weight$", name) is None
        )
    assert len(copies) == 4, "two layers of the model have two adapted layers each"


def copied(layer: Any, copies: list[weakref.ref[Any]]) -> Any:
    copies.append(weakref.ref(layer))
    return layer


def adapted_model(model: Path) -> Any:
    from peft import get_peft_model

    torch.manual_seed(0)
    config = peft_config(LORA | {"init_lora_weights": False}, None)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
