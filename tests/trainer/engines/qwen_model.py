"""Random models of two layers, and the log-probabilities that the trainer computes with them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402
from transformers import (  # noqa: E402
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 96


def make_model(seed: int = 0, architecture: str = "Qwen3", **changes: Any) -> PreTrainedModel:
    """Return a model whose weights follow from `seed`. `changes` are fields of its configuration."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    vocabulary = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": True}
    config_class, model_class = (getattr(transformers, architecture + suffix) for suffix in ("Config", "ForCausalLM"))
    model: PreTrainedModel = model_class(config_class(**{**sizes, **heads, **vocabulary, **changes}))
    with torch.no_grad():  # a random model samples almost uniformly; larger logits make the context matter
        model.model.embed_tokens.weight.mul_(3)
    return model


def make_experts_model(name: str, seed: int = 0) -> Any:
    """Return a random mixture of four experts, of which each token uses two. `name` is "qwen3_moe" or "mixtral"."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
    experts = {"num_experts_per_tok": 2, "initializer_range": 0.2}  # large, so that every expert matters
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts, num_local_experts=4))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **heads, **experts, num_experts=4, moe_intermediate_size=32, norm_topk_prob=True)
    )


EXPERTS_MODELS = ("qwen3_moe", "mixtral")


def make_any_model(architecture: str, seed: int = 0) -> Any:
    return make_model(seed) if architecture == "qwen3" else make_experts_model(architecture, seed)


def trainer_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return the log-probability of each of `ids[1:]` from one forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
        logprobs: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return logprobs
