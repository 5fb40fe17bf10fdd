"""Tests of supervised fine-tuning (SFT): which tokens are in the loss, which conversations share a batch, and how an
interrupted training continues."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from transformers import AutoTokenizer  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP  # noqa: E402

from tests.trainer.sampling import QUIET_LIBRARIES  # noqa: E402
from tests.trainer.training.stage_run import are_equal, load_weights  # noqa: E402
from trainer.config import ConfigError, SftConfig  # noqa: E402
from trainer.data import synthetic  # noqa: E402
from trainer.episodes.chat_format import ChatFormat, rstar2_format  # noqa: E402
from trainer.runs.run_folder import RunFolder  # noqa: E402
from trainer.training import sft  # noqa: E402
from trainer.training.context import TrainedModel, TrainingContext  # noqa: E402

pytestmark = QUIET_LIBRARIES

SFT = SftConfig(
    epochs=2,
    learning_rate=3e-3,
    warmup_ratio=0.1,
    batch_size=4,
    micro_batch_size=2,
    max_conversation_tokens=512,
    save_steps=2,
)
IGNORED_LABEL = -100
"""The label of a token that is not in the loss."""


def load_chat_format(model: Path) -> ChatFormat:
    return rstar2_format(AutoTokenizer.from_pretrained(model), tools=[], system_prompt="Use Python.")


def conversations(count: int) -> list[synthetic.Messages]:
    return synthetic.conversations(count, 1, fault_seed=1)


def train(model: Path, run_folder: RunFolder, *, config: SftConfig = SFT, num_conversations: int = 12) -> TrainedModel:
    context = TrainingContext(model, run_folder.path / "stages/sft", run_folder, seed=5)
    talks, chat_format = conversations(num_conversations), load_chat_format(model)
    return sft.train_sft(config, context, conversations=talks, chat_format=chat_format)


def record_batches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list to which the tensors of each micro-batch are appended."""
    recorded: list[dict[str, Any]] = []
    compute_loss = sft.SFTTrainer.compute_loss

    def record(self: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        recorded.append({name: tensor.clone() for name, tensor in inputs.items()})
        return compute_loss(self, model, inputs, *args, **options)

    monkeypatch.setattr(sft.SFTTrainer, "compute_loss", record)
    return recorded


def test_the_loss_falls_and_an_interrupted_training_ends_like_an_uninterrupted_one(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class InterruptedRunFolder(RunFolder):
        """Interrupts the training in step 5, the second step of the second epoch."""

        def append_metrics(self, row: Mapping[str, Any]) -> None:
            super().append_metrics(row)
            if row["step"] == 5:
                raise KeyboardInterrupt

    uninterrupted, resumed = RunFolder(tmp_path / "uninterrupted"), RunFolder(tmp_path / "resumed")
    expected = train(model, uninterrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, InterruptedRunFolder(resumed.path))
    actual = train(model, resumed)
    assert "missing keys" not in caplog.text, "a tied weight is saved under its first name, and only there"

    rows = list(uninterrupted.read_metrics())
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and {row["stage"] for row in rows} == {"sft"}
    assert min(row["learning_rate"] for row in rows) > 0, "no step is lost to a warm-up from 0"
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert list(resumed.read_metrics()) == rows
    assert are_equal(load_weights(actual.model), load_weights(expected.model))
    assert AutoTokenizer.from_pretrained(actual.model).eos_token == "<|im_end|>"


def test_only_tokens_of_the_assistant_are_in_the_loss(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = record_batches(monkeypatch)
    one_step = SftConfig(epochs=1, batch_size=4, micro_batch_size=4)
    train(model, RunFolder(tmp_path), config=one_step, num_conversations=4)
    (batch,) = batches
    expected = sorted(load_chat_format(model).encode_conversation(messages) for messages in conversations(4))
    rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), batch["attention_mask"].tolist(), strict=True)
    trained = []
    for ids, labels, attention_mask in rows:
        length = sum(attention_mask)
        assert all(label in (IGNORED_LABEL, token) for token, label in zip(ids, labels, strict=True))
        trained.append((ids[:length], [int(label != IGNORED_LABEL) for label in labels[:length]]))
    assert sorted(trained) == expected


def test_training_without_a_short_enough_conversation_is_refused(tmp_path: Path, model: Path) -> None:
    config = SftConfig(batch_size=4, micro_batch_size=4, max_conversation_tokens=16)
    with pytest.raises(ConfigError, match=r"at most max_conversation_tokens=16, got none"):
        train(model, RunFolder(tmp_path), config=config)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_pass_has_the_configured_rows_and_dropped_conversations_are_counted(
    gradient_checkpointing: bool,
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat_format = load_chat_format(model)
    lengths = sorted(len(chat_format.encode_conversation(messages)[0]) for messages in conversations(12))
    assert lengths[8] < lengths[9], "so that exactly nine conversations are short enough"
    config = replace(SFT, epochs=1, gradient_checkpointing=gradient_checkpointing, max_conversation_tokens=lengths[8])
    batches, forward = record_batches(monkeypatch), Qwen3MLP.forward
    num_mlp_passes = 0

    def counted_forward(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal num_mlp_passes
        num_mlp_passes += 1
        return forward(self, *args, **options)

    monkeypatch.setattr(Qwen3MLP, "forward", counted_forward)
    train(model, RunFolder(tmp_path), config=config)
    assert "sft: 12 conversations: 9 kept, 3 longer than max_conversation_tokens=" in capsys.readouterr().err
    shapes = [batch["input_ids"].shape for batch in batches]
    assert {rows for rows, _ in shapes} == {config.micro_batch_size}
    assert max(length for _, length in shapes) <= config.max_conversation_tokens
    # Each of the model's two layers runs once per forward pass, and with checkpointing once more in the backward pass.
    assert num_mlp_passes == 2 * len(batches) * (2 if gradient_checkpointing else 1)


def test_a_model_without_weights_is_refused(tmp_path: Path, model: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigError, match=rf"model {bare}: .*no file named"):
        train(bare, RunFolder(tmp_path))


def test_rows_of_similar_length_share_a_batch_and_no_row_is_dropped() -> None:
    lengths = [(7 * number) % 101 for number in range(1000)]  # 0 to 100, evenly spread
    order = sft.length_grouped_order(lengths, 8, 2.0, seed=1)
    assert order == sft.length_grouped_order(lengths, 8, 2.0, seed=1)
    assert order != sft.length_grouped_order(lengths, 8, 2.0, seed=2)
    assert sorted(order) == sorted([*range(1000)] * 2), "two epochs"
    first_lengths = [lengths[i] for i in order[::8]]
    assert first_lengths != sorted(first_lengths), "the batches come in random order"
    padded_tokens = sum(8 * max(lengths[i] for i in order[start : start + 8]) for start in range(0, len(order), 8))
    assert padded_tokens < 1.1 * 2 * sum(lengths)


@pytest.mark.parametrize(
    ("num_conversations", "batch_size", "epochs", "steps"), [(10, 4, 1, 2), (3, 4, 2, 2), (10, 4, 3, 8), (9, 4, 0.1, 1)]
)
def test_epochs_are_rounded_to_whole_steps(num_conversations: int, batch_size: int, epochs: float, steps: int) -> None:
    order = sft.length_grouped_order([1] * num_conversations, batch_size, epochs, seed=0)
    assert len(order) == steps * batch_size
