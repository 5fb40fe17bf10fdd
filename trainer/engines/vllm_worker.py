"""A vLLM worker extension: it loads weights from the trainer with checks, and makes reloading work on a CPU. It runs in
vLLM's own environment, so it may import nothing but vLLM, torch, and `weight_group` from its own directory.

When a model is first loaded on a CPU, vLLM packs the weights of linear layers for oneDNN. After that, `reload_weights`
reports success but leaves a mix of old and new weights. Without the packing, `reload_weights` replaces all weights. So
this module switches the packing off.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import vllm._custom_ops
import weight_group
from torch.distributed import TCPStore
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

vllm._custom_ops._supports_onednn = False  # before the model is loaded

EMPTY_REPORT: dict[str, Any] = {"checksums": {}, "missing": [], "differing": []}


class Worker:
    """The methods that vLLM's worker gets by `--worker-extension-cls`. /collective_rpc calls them on each worker. Those
    that load weights return the report of `weight_group.checked_load`."""

    def last_load_report(self) -> dict[str, Any]:
        """Return the report of the last load, or an empty one if the worker has no weights that were loaded so."""
        return getattr(self, "_load_report", EMPTY_REPORT)

    def join_weight_store(self, host: str, port: int, timeout_s: float) -> None:
        self._weight_store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))

    def receive_weights(self: Any, first_rank: int, size: int, backend: str, timeout_s: float) -> dict[str, Any]:
        tensors = weight_group.receive(self._weight_store, first_rank + self.rank, size, backend, timeout_s)
        try:
            return _load(self, tensors)
        finally:
            for _ in tensors:  # if loading fails, receive the rest too, since the other receivers need this rank
                pass

    def load_saved_weights(self: Any, directory: str) -> dict[str, Any]:
        files = sorted(map(str, Path(directory).glob("*.safetensors")))
        return _load(self, safetensors_weights_iterator(files, False))


def _load(worker: Any, tensors: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    model, worker._load_report = worker.model_runner.get_model(), EMPTY_REPORT
    try:
        report: dict[str, Any] = weight_group.checked_load(
            model, lambda checked: worker.reload_weights(weights_iterator=checked), tensors
        )
    except Exception:
        with set_current_vllm_config(worker.vllm_config):  # drop what is loaded, or the next call would mix it in
            finalize_layerwise_reload(model, worker.model_config)
        raise
    if worker.model_config.quantization:  # scales are computed, not loaded
        report["missing"] = []
    worker._load_report = report
    return report
