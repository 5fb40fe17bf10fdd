"""A check of a part: what it gets, and what it returns.

A part is a module with `checks(settings)`, which returns its checks by name, in the order in which they run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Finding = dict[str, Any]
"""The figures of a check by name, and `holds`: True, False, or None for figures that have no bound. `reason` says why a
check does not hold, or why it has no bound."""
Checks = Mapping[str, Callable[[], Finding]]


class Skipped(Exception):
    """The check cannot run here. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a part gets. Its fields can be written as JSON."""

    folder: str
    """An empty folder for the files of the part."""
    device: str
    """torch's name of the device: "cpu" or "cuda", which also stands for ROCm."""
    card: str = ""
    """The name of the GPU."""
    memory_gb: float = 0.0
    """Free memory of the device in GB (10^9 bytes)."""
    gpus: int = 0
    pretrained: str = ""
    """A folder with a pretrained model, or empty."""
    vllm: str = ""
    """A Python that has vLLM, or empty."""
    python: str = ""
    """The Python in which the sandbox runs calls."""
    isolation: str = "auto"

    @property
    def path(self) -> Path:
        return Path(self.folder)

    def choose(self, gpu: Any, cpu: Any) -> Any:
        """Return the value for this device: sizes that mean something on a GPU, or small ones."""
        return cpu if self.device == "cpu" else gpu

    def require_memory(self, needed_gb: float) -> None:
        """Raise `Skipped` if the device has less free memory than this."""
        if needed_gb > self.memory_gb:
            raise Skipped(f"needs {needed_gb:.1f} GB by the resource plan; {self.memory_gb:.1f} GB are free")


def free_memory() -> None:
    """Return the memory of dropped objects to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
