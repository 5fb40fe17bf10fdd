"""The device and the versions of the libraries. It is the first part, since the others need its finding."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bench.gpu_parts.check import Checks, Finding, Settings

PACKAGES = ("torch", "triton", "transformers", "trl", "accelerate", "datasets", "peft", "vllm")


def checks(settings: Settings) -> Checks:
    return {"device": lambda: _device(settings.device)}


def _device(device: str) -> Finding:
    import torch

    versions = {name: _version(name) for name in PACKAGES}
    found: dict[str, Any] = {"versions": versions, "cuda": torch.version.cuda, "rocm": torch.version.hip}
    if device == "cpu":
        from sandbox.machine import memory_available

        return {"holds": None, "card": "", "gpus": 0, "memory_gb": round(memory_available() / 1e9, 1), **found}
    if not torch.cuda.is_available():
        return {"holds": False, "reason": "torch can use no GPU", **found}
    name = torch.cuda.get_device_name(0)
    (torch.ones(8, device="cuda") + 1).sum().item()  # the first kernel: an unusable driver fails here
    free, _ = torch.cuda.mem_get_info()
    return {"holds": True, "card": name, "gpus": torch.cuda.device_count(), "memory_gb": round(free / 1e9, 1), **found}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
