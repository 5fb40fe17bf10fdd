"""A tiny model with random weights that has memorised one conversation with a tool call, in the format of Qwen3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import get_training_chat_template, qwen3_instruct_2507_chat_template

MAX_TRAINING_STEPS = 400
LOSS_WHEN_LEARNT = 2e-3
"""Mean loss of a token at which a sampled completion is nearly always the memorised one."""


def write_tool_calling_model(model_dir: Path, messages: list[dict[str, Any]], tools: list[Callable[..., Any]]) -> None:
    """Write a model and its tokenizer that continue the first message of `messages` with the assistant's messages."""
    tokenizer = _tokenizer(messages, tools)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=2048,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        _memorise(model, tokenizer, messages, tools)
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)


def _tokenizer(messages: list[dict[str, Any]], tools: list[Callable[..., Any]]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=qwen3_instruct_2507_chat_template)
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    bpe.train_from_iterator([text] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=qwen3_instruct_2507_chat_template,
        clean_up_tokenization_spaces=False,
    )


def _memorise(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[Callable[..., Any]],
) -> None:
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=get_training_chat_template(tokenizer),
        return_assistant_tokens_mask=True,
        return_dict=True,
        return_tensors="pt",
    )
    ids, mask = encoded["input_ids"], torch.as_tensor(encoded["assistant_masks"]).reshape(1, -1)
    labels = torch.where(mask.bool(), ids, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(MAX_TRAINING_STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        if loss.item() < LOSS_WHEN_LEARNT:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the conversation was not memorised: loss {loss.item():.4f}")
