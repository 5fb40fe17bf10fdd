"""GRPO with a Python tool: two steps of TRL's GRPOTrainer on one problem.

    rstar-sandbox serve &
    python examples/trl_grpo.py [MODEL]

MODEL is a folder or a model of the hub whose chat template has tools.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from sandbox.integrations.trl import PythonEnvironment

PROBLEM = {"prompt": [{"role": "user", "content": "What is 12**3 + 30? Use Python."}], "answer": "1758"}
SHOWN = ("reward", "tools/call_frequency", "tools/failure_frequency")


def reward(completions, answer, environments, **_):
    """Give 1 for the right answer, and 0.1 for each call whose code ended as ok."""
    return [
        float(right in messages[-1]["content"]) + 0.1 * sum(result.status == "ok" for result in environment.results)
        for messages, right, environment in zip(completions, answer, environments, strict=True)
    ]


def main(model="Qwen/Qwen3-0.6B"):
    with tempfile.TemporaryDirectory() as run_dir:
        config = GRPOConfig(
            run_dir, max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=512,
            temperature=0.7, max_tool_calling_iterations=2, logging_steps=1, save_strategy="no", report_to="none",
            bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        rows = Dataset.from_list([PROBLEM] * 8)
        trainer = GRPOTrainer(model, reward, config, rows, environment_factory=PythonEnvironment)
        trainer.train()
        for row in trainer.state.log_history[:2]:
            print({name: round(row[name], 3) for name in SHOWN})


if __name__ == "__main__":
    main(*sys.argv[1:])
