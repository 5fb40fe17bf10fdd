"""Fine-tuning learns what the assistant says, and goes on where it stopped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP  # noqa: E402

from tests.trainer.sampling import QUIET_LIBRARIES, model_folder  # noqa: E402
from trainer.config import ConfigError, SftConfig  # noqa: E402
from trainer.data import synthetic  # noqa: E402
from trainer.episodes import chat_format  # noqa: E402
from trainer.runs.run_folder import RunFolder  # noqa: E402
from trainer.training import sft  # noqa: E402
from trainer.training.context import TrainedModel, TrainingContext  # noqa: E402

SFT = SftConfig(
    epochs=2,
    learning_rate=3e-3,
    warmup_ratio=0.1,
    batch_size=4,
    micro_batch_size=2,
    max_conversation_tokens=512,
    save_steps=2,
)


pytestmark = QUIET_LIBRARIES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _on_one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where sums have one order, whatever the machine has, and threads do not wait for each other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(
    model: Path, folder: Path, record: RunFolder, *, conversations: int = 12, config: SftConfig = SFT
) -> TrainedModel:
    talks = synthetic.conversations(conversations, 1, fault_seed=1)
    own = chat_format.rstar2_format(AutoTokenizer.from_pretrained(model), tools=[], system_prompt="Use Python.")
    training = TrainingContext(model, folder / "stages/sft", record, seed=5)
    return sft.train_sft(config, training, conversations=talks, chat_format=own)


def weights(folder: Path) -> dict[str, Any]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_the_loss_falls_and_an_interrupted_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stopping(RunFolder):
        """Stops in the second epoch, after its first step."""

        def append_metrics(self, row: Mapping[str, Any]) -> None:
            super().append_metrics(row)
            if row["step"] == 5:
                raise KeyboardInterrupt

    whole, broken = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "broken")
    expected = train(model, whole.path, whole)
    with pytest.raises(KeyboardInterrupt):
        train(model, broken.path, Stopping(broken.path))
    actual = train(model, broken.path, broken)
    assert "missing keys" not in caplog.text, "a tied weight is there under its first name"

    rows = list(whole.read_metrics())
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and {row["stage"] for row in rows} == {"sft"}
    assert min(row["learning_rate"] for row in rows) > 0, "no step is lost to a warm-up from 0"
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert list(broken.read_metrics()) == rows
    ours, theirs = weights(actual.model), weights(expected.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert AutoTokenizer.from_pretrained(actual.model).eos_token == "<|im_end|>"


def test_only_tokens_of_the_assistant_are_in_the_loss(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    compute_loss = sft.SFTTrainer.compute_loss

    def spy(self: Any, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        seen.append({name: tensor.clone() for name, tensor in inputs.items()})
        return compute_loss(self, model, inputs, *args, **more)

    monkeypatch.setattr(sft.SFTTrainer, "compute_loss", spy)
    train(
        model,
        tmp_path,
        RunFolder(tmp_path),
        conversations=4,
        config=SftConfig(epochs=1, batch_size=4, micro_batch_size=4),
    )
    (inputs,) = seen
    own = chat_format.rstar2_format(AutoTokenizer.from_pretrained(model), tools=[], system_prompt="Use Python.")
    expected = sorted(own.encode_conversation(talk) for talk in synthetic.conversations(4, 1, fault_seed=1))
    pairs = zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), inputs["attention_mask"].tolist(), strict=True)
    trained = []
    for ids, labels, attended in pairs:
        length = sum(attended)
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
        trained.append((ids[:length], [int(label != -100) for label in labels[:length]]))
    assert sorted(trained) == expected


def test_conversations_that_are_too_long_are_left_out(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"at most max_conversation_tokens=16, got none"):
        train(
            model,
            tmp_path,
            RunFolder(tmp_path),
            config=SftConfig(batch_size=4, micro_batch_size=4, max_conversation_tokens=16),
        )


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_pass_has_the_planned_rows_and_dropped_ones_are_counted(
    gradient_checkpointing: bool,
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = chat_format.rstar2_format(AutoTokenizer.from_pretrained(model), tools=[], system_prompt="Use Python.")
    lengths = sorted(len(own.encode_conversation(talk)[0]) for talk in synthetic.conversations(12, 1, fault_seed=1))
    config = replace(SFT, epochs=1, gradient_checkpointing=gradient_checkpointing, max_conversation_tokens=lengths[8])
    assert lengths[8] < lengths[9]
    passes: list[tuple[int, int]] = []
    compute_loss, forward = sft.SFTTrainer.compute_loss, Qwen3MLP.forward
    computed = 0

    def spy(self: Any, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        passes.append(tuple(inputs["input_ids"].shape))
        return compute_loss(self, model, inputs, *args, **more)

    def counted(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal computed
        computed += 1
        return forward(self, *args, **more)

    monkeypatch.setattr(sft.SFTTrainer, "compute_loss", spy)
    monkeypatch.setattr(Qwen3MLP, "forward", counted)
    train(model, tmp_path, RunFolder(tmp_path), config=config)
    assert "sft: 12 conversations: 9 kept, 3 longer than max_conversation_tokens=" in capsys.readouterr().err
    assert {rows for rows, _ in passes} == {config.micro_batch_size}
    assert max(length for _, length in passes) <= config.max_conversation_tokens
    assert computed == 2 * len(passes) * (2 if gradient_checkpointing else 1), (
        "each layer, and once more in the backward pass"
    )


def test_a_model_without_weights_is_a_wrong_setting(tmp_path: Path, model: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigError, match=rf"model {bare}: .*no file named"):
        train(bare, tmp_path, RunFolder(tmp_path))


def test_rows_of_similar_length_share_a_batch_and_no_row_is_dropped() -> None:
    lengths = [(7 * number) % 101 for number in range(1000)]
    order = sft.length_grouped_order(lengths, 8, 2.0, seed=1)
    assert (
        order == sft.length_grouped_order(lengths, 8, 2.0, seed=1) != sft.length_grouped_order(lengths, 8, 2.0, seed=2)
    )
    assert sorted(order) == sorted([*range(1000)] * 2)
    firsts = [lengths[i] for i in order[::8]]
    assert firsts != sorted(firsts)
    padded = sum(8 * max(lengths[i] for i in order[at : at + 8]) for at in range(0, len(order), 8))
    assert padded < 1.1 * 2 * sum(lengths)


@pytest.mark.parametrize(
    ("count", "batch", "epochs", "steps"), [(10, 4, 1, 2), (3, 4, 2, 2), (10, 4, 3, 8), (9, 4, 0.1, 1)]
)
def test_epochs_become_whole_steps(count: int, batch: int, epochs: float, steps: int) -> None:
    assert len(sft.length_grouped_order([1] * count, batch, epochs, seed=0)) == steps * batch
