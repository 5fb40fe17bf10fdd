"""The tensors that engines get: their names, their dtype, and the check that they are finite numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from trainer.engines.engine import Weights


class WeightSyncError(Exception):
    """An engine has other weights than the trainer, or the trainer's weights are not finite. The run must stop."""


def saved_tensors(model: Any, weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors that `model.save_pretrained` would write for the state dict `weights`, rounded to
    `dtype`. They are converted layer by layer, so only one layer is copied at a time. `model` may be empty.

    Raises `WeightSyncError` if a weight is not finite.
    """
    names_by_layer: dict[str, list[str]] = defaultdict(list)
    for name in weights:
        if name not in model.all_tied_weights_keys:
            layer = re.match(r".*?\.\d+\.", name)
            names_by_layer[layer[0] if layer else ""].append(name)
    for names in names_by_layer.values():
        for name, tensor in revert_weight_conversion(model, {name: weights[name] for name in names}).items():
            rounded = tensor.to(dtype).contiguous()
            check_finite(rounded, name)
            yield name, rounded


def check_finite(tensor: torch.Tensor, what: str) -> None:
    if not tensor.sum().isfinite():
        raise WeightSyncError(
            f"expected finite numbers in {what}, got others: training has diverged; continue from an earlier "
            "checkpoint with a lower learning rate or max_grad_norm"
        )
