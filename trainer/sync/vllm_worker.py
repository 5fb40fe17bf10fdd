"""A vLLM worker extension: it loads weights from the trainer with checks, and makes reloading work on a CPU. It runs in
vLLM's own environment, so it may import nothing but vLLM, torch, and `weight_group` from its own directory.

When a model is first loaded on a CPU, vLLM packs weights for its kernels. `reload_weights` reports success, but leaves
old packed weights of linear layers, and weights of experts that are not packed. So this module switches the packing of
linear layers off, and packs experts after each load.
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
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
from vllm.platforms import current_platform

vllm._custom_ops._supports_onednn = False  # before the model is loaded

logger = init_logger("vllm.rstar_worker")  # only vLLM's own loggers print

EMPTY_REPORT: dict[str, Any] = {"checksums": {}, "missing": [], "differing": []}

if current_platform.is_cpu():
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    setup_kernel = UnquantizedFusedMoEMethod._setup_kernel

    def setup_kernel_and_pack(method: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_reload = method.moe_kernel is not None
        setup_kernel(method, layer=layer, w13=w13, w2=w2)
        if is_reload:  # vLLM itself packs only at the first load
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel_and_pack


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
            model,
            lambda checked: worker.reload_weights(weights_iterator=checked),
            tensors,
            lambda: _unfinished_modules(model),
        )
    except Exception:
        with set_current_vllm_config(worker.vllm_config):  # drop what is loaded, or the next call would mix it in
            finalize_layerwise_reload(model, worker.model_config)
        raise
    not_compared = ", ".join(sorted(getattr(model, "not_compared", ["all"]))) or "none"
    logger.info("Loaded %d tensors; parameters not compared with them: %s", len(report["checksums"]), not_compared)
    if worker.model_config.quantization:  # scales are computed, not loaded
        report["missing"] = []
    worker._load_report = report
    return report


def _unfinished_modules(model: Any) -> list[str]:
    """Return the modules of which some elements, but not all, have been loaded."""
    infos = {name: get_layerwise_info(module) for name, module in model.named_modules()}
    return [name for name, info in infos.items() if 0 < info.load_numel < (info.load_numel_total or 0)]
