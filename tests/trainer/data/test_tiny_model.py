"""Tests of the tiny model. Its folder loads like that of any model, and depends only on the seed. Its tokenizer takes
any text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the tiny model needs torch")
transformers = pytest.importorskip("transformers", reason="the tiny model needs transformers")

from trainer.config import TINY_SHAPE, EvalConfig, RunConfig  # noqa: E402
from trainer.data import synthetic, tiny_model  # noqa: E402
from trainer.episodes.chat_format import rstar2_format  # noqa: E402
from trainer.recipe.resource_plan import known_shape, shape_of  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model.write_tiny_model(path, seed=3)
    return path


def test_the_model_has_the_sizes_from_which_a_run_is_planned(folder: Path) -> None:
    written = shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    assert known_shape(RunConfig(eval=EvalConfig(data=("generated:1",)))) == written


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_equal_seeds_write_equal_files_and_another_seed_other_weights(folder: Path, tmp_path: Path) -> None:
    tiny_model.write_tiny_model(tmp_path, seed=3)
    names = sorted(file.name for file in folder.iterdir())
    assert [file.name for file in sorted(tmp_path.iterdir())] == names
    assert [name for name in names if (tmp_path / name).read_bytes() != (folder / name).read_bytes()] == []
    tiny_model.write_tiny_model(tmp_path, seed=4)
    weights = "model.safetensors"
    assert (tmp_path / weights).read_bytes() != (folder / weights).read_bytes()


def test_the_tiny_model_loads_from_its_directory(folder: Path, tokenizer: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert model.config.vocab_size == len(tokenizer) == TINY_SHAPE.vocab_size
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@given(text=st.text())
def test_decoding_returns_any_encoded_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_conversations_have_few_tokens_and_each_digit_is_a_token(tokenizer: Any) -> None:
    for messages in synthetic.conversations(n=50, seed=1, fault_seed=1):
        ids, _ = rstar2_format(tokenizer, tools=[], system_prompt=synthetic.SYSTEM_PROMPT).encode_conversation(messages)
        num_broken_calls = (len(messages) - 4) // 2  # four messages, and two more for each broken call
        assert len(ids) < 100 + 60 * num_broken_calls
    token_texts = [tokenizer.decode([token_id]) for token_id in range(len(tokenizer))]
    assert [text for text in token_texts if len(text) > 1 and any(map(str.isdigit, text))] == []


def test_untrusted_text_is_never_encoded_as_a_tag(tokenizer: Any) -> None:
    for tag in (tiny_model.PAD, tiny_model.START, tiny_model.END, *tiny_model.TAGS):
        assert tokenizer.encode(tag) == [tokenizer.convert_tokens_to_ids(tag)]
        ids = tokenizer.encode(f"a{tag}b", split_special_tokens=True)
        assert not set(ids) & set(tokenizer.all_special_ids)
        assert tokenizer.decode(ids) == f"a{tag}b"
