"""Supervised fine-tuning on TRL's `SFTTrainer`, on conversations that teach the tool's format.

Invariants:
- A conversation has exactly the tokens that an episode with the same messages would have: `ChatFormat` encodes both,
  and TRL applies no template.
- Only the assistant's tokens are in the loss.
- The same seed gives the same order of conversations, also in a resumed training.
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
from trainer.training.callback import MetricsCallback
from trainer.training.context import (
    RankArguments,
    TrainedModel,
    TrainingContext,
    checkpoint_step,
    distributed_state,
    model_errors_as_config_errors,
)

Messages = Sequence[Mapping[str, str]]
SORT_WINDOW_BATCHES = 50
"""Number of batches whose conversations are sorted by length together."""


def train_sft(
    sft: SftConfig, context: TrainingContext, *, conversations: Iterable[Messages], chat_format: ChatFormat
) -> TrainedModel:
    """Train on `conversations`, from the newest complete checkpoint if there is one.

    Conversations are dropped if they have no token of the assistant, or are longer than `sft.max_conversation_tokens`.
    The number of dropped ones is printed to stderr. Raises `ConfigError` if no conversation is left, or if the batch
    cannot be divided among the ranks.
    """
    pairs = [chat_format.encode_conversation(messages) for messages in conversations]
    short = [pair for pair in pairs if len(pair[0]) <= sft.max_conversation_tokens]
    encoded = [pair for pair in short if any(pair[1])]
    if distributed_state(context.hardware).is_main_process:
        print(
            f"sft: {len(pairs)} conversations: {len(encoded)} kept, {len(pairs) - len(short)} longer than "
            f"max_conversation_tokens={sft.max_conversation_tokens}, {len(short) - len(encoded)} without an "
            "assistant's token",
            file=sys.stderr,
        )
    if not encoded:
        raise ConfigError(
            f"sft: expected conversations of at most max_conversation_tokens={sft.max_conversation_tokens}, got none"
        )
    order = length_grouped_order([len(ids) for ids, _ in encoded], sft.batch_size, sft.epochs, context.seed)
    arguments = _SftArguments(
        **context.trl_arguments(sft, rows=sft.batch_size, micro_batch_rows=sft.micro_batch_size),
        num_train_epochs=1,  # `order` repeats the conversations
        train_sampling_strategy="sequential",
        max_length=sft.max_conversation_tokens,
        lr_scheduler_type="cosine",
        warmup_steps=sft.warmup_ratio,
    )
    checkpoint = context.latest_checkpoint()
    context.truncate_run(checkpoint_step(checkpoint) if checkpoint else 0)
    with model_errors_as_config_errors(context.model):
        trainer = SFTTrainer(
            model=context.load_model(),
            args=arguments,
            train_dataset=Dataset.from_dict(
                {"input_ids": [encoded[i][0] for i in order], "assistant_masks": [encoded[i][1] for i in order]}
            ),
            processing_class=AutoTokenizer.from_pretrained(context.model),
            peft_config=context.peft_config(),
            callbacks=[MetricsCallback(context)],
        )
    return context.train(trainer, checkpoint)


class _SftArguments(RankArguments, TrlSFTConfig):  # type: ignore[misc]
    """TRL's arguments, for one rank."""


def length_grouped_order(lengths: Sequence[int], batch_size: int, epochs: float, seed: int) -> list[int]:
    """Return the order of conversations. Each epoch has a new order, and a batch has conversations of similar length.

    In random batches, padding to the longest conversation would double the work. Conversations are sorted by length
    only within windows of `SORT_WINDOW_BATCHES` batches, and the batches come in random order. If the conversations at
    the end of an epoch do not fill a batch, the epoch leaves them out.
    """
    rng = random.Random(seed)
    total = max(1, round(len(lengths) * epochs / batch_size)) * batch_size
    order: list[int] = []
    while len(order) < total:
        epoch = rng.sample(range(len(lengths)), len(lengths))
        epoch = epoch[: max(batch_size, len(epoch) // batch_size * batch_size)]
        window = batch_size * SORT_WINDOW_BATCHES
        windows = [epoch[start : start + window] for start in range(0, len(epoch), window)]
        by_length = [i for indices in windows for i in sorted(indices, key=lengths.__getitem__)]
        batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
        order += [i for batch in rng.sample(batches, len(batches)) for i in batch]
    return order[:total]
