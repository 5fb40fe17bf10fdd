"""Supervised fine-tuning on TRL's `SFTTrainer`: conversations to a model that knows the tool's format.

Invariants:
- What is trained on are the very tokens that an episode would have: `chat.encode` makes them, TRL templates nothing.
- Only what the assistant says has loss.
- The same seed gives the same order of conversations, after a resume too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, Sequence

from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig as TrlSFTConfig
from trl import SFTTrainer

from trainer.config import ConfigError, SftConfig
from trainer.episodes.chat_format import ChatFormat
from trainer.training.context import OneGpu, Progress, Trained, Training, latest, ranks, steps_of, usable

Messages = Sequence[Mapping[str, str]]
SORTED = 50
"""Batches whose conversations are sorted by length together."""


def train_sft(sft: SftConfig, training: Training, *, conversations: Iterable[Messages], chat: ChatFormat) -> Trained:
    """Train on `conversations`, from the newest whole checkpoint if there is any.

    Conversations over `sft.max_length` tokens are left out, and those in which the assistant says nothing; how many is
    printed. Raises `ConfigError` where none is left, or the batch does not fit.
    """
    pairs = [chat.encode_conversation(messages) for messages in conversations]
    short = [pair for pair in pairs if len(pair[0]) <= sft.max_length]
    encoded = [pair for pair in short if any(pair[1])]
    if ranks(training.hardware).is_main_process:
        print(
            f"sft: {len(pairs)} conversations, {len(encoded)} kept, {len(pairs) - len(short)} longer than "
            f"max_length={sft.max_length} tokens, {len(short) - len(encoded)} in which the assistant says nothing",
            file=sys.stderr,
        )
    if not encoded:
        raise ConfigError(f"sft: expected conversations of at most max_length={sft.max_length} tokens, got none")
    order = by_length([len(ids) for ids, _ in encoded], sft.batch, sft.epochs, training.seed)
    args = _Arguments(
        **training.arguments(sft, rows=sft.batch),
        num_train_epochs=1,  # `order` has them all
        train_sampling_strategy="sequential",
        max_length=sft.max_length,
        lr_scheduler_type="cosine",
        warmup_steps=sft.warmup,
    )
    start = latest(training.out / "checkpoints")
    if ranks(training.hardware).is_main_process:
        training.record.truncate_after(training.first_step + (steps_of(start) if start else 0))
    with usable(training.model):
        trainer = SFTTrainer(
            model=str(training.model),
            args=args,
            train_dataset=Dataset.from_dict(
                {"input_ids": [encoded[i][0] for i in order], "assistant_masks": [encoded[i][1] for i in order]}
            ),
            processing_class=AutoTokenizer.from_pretrained(training.model),
            callbacks=[Progress(training, offset=training.first_step)],
        )
    return training.run(trainer, start)


class _Arguments(OneGpu, TrlSFTConfig):  # type: ignore[misc]
    """TRL's own, for one GPU."""


def by_length(lengths: Sequence[int], batch: int, epochs: float, seed: int) -> list[int]:
    """Which conversation comes when: every time through in a new order, with those of like length in a batch.

    Padding to the longest of a batch would cost as much again as what it pads. Only blocks of `SORTED` batches are
    sorted, and their batches come in random order. What does not fill a batch waits for another time through.
    """
    rng = random.Random(seed)
    wanted = max(1, round(len(lengths) * epochs / batch)) * batch
    order: list[int] = []
    while len(order) < wanted:
        once = rng.sample(range(len(lengths)), len(lengths))
        once = once[: max(batch, len(once) // batch * batch)]
        blocks = [once[at : at + batch * SORTED] for at in range(0, len(once), batch * SORTED)]
        alike = [i for block in blocks for i in sorted(block, key=lengths.__getitem__)]
        batches = [alike[at : at + batch] for at in range(0, len(alike), batch)]
        order += [i for some in rng.sample(batches, len(batches)) for i in some]
    return order[:wanted]
