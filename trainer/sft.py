"""Supervised fine-tuning on TRL's `SFTTrainer`: conversations to a model that knows the tool's format.

Invariants:
- What is trained on are the very tokens that an episode would have: `chat.encode` makes them, TRL templates nothing.
- Only what the assistant says has loss.
- The same seed gives the same order of conversations, after a resume too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig as TrlSFTConfig
from trl import SFTTrainer

from trainer.config import ConfigError, SftConfig
from trainer.progress import Progress, Record, Trained, arguments, finish, latest, quiet, ranks, steps_of

Messages = Sequence[Mapping[str, str]]
STAGE = "sft"


class Chat(Protocol):
    def encode(self, messages: Messages) -> tuple[list[int], list[int]]: ...


@quiet()
def train_sft(
    sft: SftConfig,
    *,
    model: Path,
    conversations: Iterable[Messages],
    chat: Chat,
    out: Path,
    record: Record,
    seed: int,
    first_step: int = 0,
    dtype: str = "float32",
    is_checkpointing: bool = False,
    is_sharded: bool = False,
) -> Trained:
    """Train `model`'s folder on `conversations` into `out`/model, from `out`'s newest whole checkpoint if any.

    Conversations over `sft.max_length` tokens are left out. Raises `ConfigError` where none is left, or the batch does
    not fit.
    """
    world = ranks().num_processes
    passes, rest = divmod(sft.batch, sft.micro_batch * world)
    if rest:
        raise ConfigError(
            f"sft: batch={sft.batch} on {world} ranks: expected a multiple of ranks x micro_batch={sft.micro_batch}; "
            "change one of them"
        )
    encoded = [pair for pair in map(chat.encode, conversations) if len(pair[0]) <= sft.max_length and any(pair[1])]
    if not encoded:
        raise ConfigError(f"sft: expected conversations of at most max_length={sft.max_length} tokens, got none")
    start = latest(out / "checkpoints")
    if ranks().is_main_process:
        record.rewind(first_step + (steps_of(start) if start else 0))
    args = TrlSFTConfig(
        **arguments(
            out,
            seed=seed,
            dtype=dtype,
            save_steps=sft.save_steps,
            is_sharded=is_sharded,
            is_checkpointing=is_checkpointing,
        ),
        num_train_epochs=sft.epochs,
        per_device_train_batch_size=sft.micro_batch,
        gradient_accumulation_steps=passes,
        max_length=sft.max_length,
        learning_rate=sft.lr,
        lr_scheduler_type="cosine",
        warmup_steps=sft.warmup,
    )
    trainer = SFTTrainer(
        model=str(model),
        args=args,
        train_dataset=Dataset.from_dict(
            {"input_ids": [ids for ids, _ in encoded], "assistant_masks": [mask for _, mask in encoded]}
        ),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Progress(STAGE, record=record, offset=first_step)],
    )
    return finish(trainer, out, start)
