"""The tiny model: a Qwen3 of the sizes `TINY_SHAPE` with random weights, and a tokenizer for the generated problems.

The model learns to use a tool within minutes on two cores. `write_tiny_model` writes a folder that transformers' Auto
classes and vLLM can load. Equal seeds give equal models. The tokenizer is byte-level, so it can encode any text. Each
digit is a token. Merges may cross word boundaries, so each fixed part of a tool call takes only one or two tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer.config import TINY_SHAPE
from trainer.data import synthetic

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = tuple(f"<{slash}{name}>" for name in ("tool_call", "tool_response", "reason", "answer") for slash in ("", "/"))
MAX_POSITIONS = 4096
NUM_CONVERSATIONS = 2000
"""Generated conversations from which the tokenizer learns its merges."""


def write_tiny_model(model_dir: Path, seed: int = 0, conversations: Sequence[synthetic.Messages] | None = None) -> None:
    """Write model and tokenizer into `model_dir`. The tokenizer learns its merges from `conversations`; by default they
    are those of the generated problems."""
    if conversations is None:
        conversations = synthetic.conversations(NUM_CONVERSATIONS, seed, fault_seed=seed)
    tokenizer = _tokenizer(conversations)
    config = Qwen3Config(
        **{**asdict(TINY_SHAPE), "vocab_size": len(tokenizer)},
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.08,  # about 1 / sqrt(128); with the default 0.02 it learns to copy numbers much later
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)


def _tokenizer(conversations: Sequence[synthetic.Messages]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    bpe.decoder = decoders.ByteLevel()
    # All tags are special tokens, so that `ChatFormat` keeps them out of untrusted text.
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_SHAPE.vocab_size,
        special_tokens=[PAD, START, END, *TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(conversations), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        model_max_length=MAX_POSITIONS,
        extra_special_tokens=[START, *TAGS],
        clean_up_tokenization_spaces=False,
    )


def _texts(conversations: Sequence[synthetic.Messages]) -> Iterator[str]:
    """Yield conversations split as `ChatFormat` encodes them: the text between tags, and the other messages."""
    between = re.compile("|".join(map(re.escape, TAGS)))
    yield from ("\n", f"system\n{synthetic.SYSTEM_PROMPT}", "user\n", "assistant\n") * len(conversations)
    for messages in conversations:
        for message in messages:
            yield from between.split(message["content"])
