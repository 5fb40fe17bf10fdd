"""The directory from which engines load weights."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer.engines.engine import Weights
from trainer.engines.vllm_client import CHECKSUMS_FILE
from trainer.sync import weight_group
from trainer.sync.saved_tensors import saved_tensors

MAX_FILE_BYTES = 2**32
"""Size of a file of `FileWeightStore`, unless the tensors of one layer take more. The rounded copies of its tensors are
in memory until it is written."""


class FileWeightStore:
    """Stores weights as safetensors, in one subdirectory of `directory` per version.

    `model`: a model of the class of the trained one, loaded from the same folder; its weights are not used.
    `dtype`: the engines' dtype, to which weights are rounded.
    `has_checksums`: whether engines compare the checksums of the tensors.
    """

    def __init__(self, directory: Path, model: Any, dtype: str = "float32", *, has_checksums: bool = True) -> None:
        self._directory = directory.absolute()  # servers may have other working directories
        self._model, self._dtype, self._has_checksums = model, getattr(torch, dtype), has_checksums

    async def save(self, weights: Weights, version: int) -> Path:
        """Write the weights. Return their directory, which lasts until `delete_others`."""
        directory = self._directory / f"v{version:06d}"
        await asyncio.to_thread(self._write, directory, weights)
        return directory

    async def delete_others(self, keep: Path | None) -> None:
        """Delete all versions but `keep`, also those of an earlier run that was killed."""
        for directory in await asyncio.to_thread(list, self._directory.glob("v*")):
            if directory != keep:
                await asyncio.to_thread(shutil.rmtree, directory)

    def _write(self, directory: Path, weights: Weights) -> None:
        shutil.rmtree(directory, ignore_errors=True)  # a killed run may have left it
        directory.mkdir(parents=True)
        checksums: dict[str, int] = {}

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in saved_tensors(self._model, weights, self._dtype):
                if self._has_checksums:
                    checksums[name] = weight_group.checksum(tensor)
                yield name, tensor.cpu()

        for number, bucket in enumerate(weight_group.buckets(tensors(), MAX_FILE_BYTES), 1):
            save_file(dict(bucket), directory / f"model-{number:05d}.safetensors")
        if self._has_checksums:
            (directory / CHECKSUMS_FILE).write_text(json.dumps(checksums), encoding="utf-8")
