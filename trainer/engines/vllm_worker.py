"""A vLLM worker extension: it receives weights from the trainer, and makes `reload_weights` work on a CPU. It runs in
vLLM's own environment, so it may import nothing but vLLM, torch, and `weight_group` from its own directory.

When a model is first loaded on a CPU, vLLM packs the weights of linear layers for oneDNN. After that, `reload_weights`
reports success but leaves a mix of old and new weights. Without the packing, `reload_weights` replaces all weights. So
this module switches the packing off.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import vllm._custom_ops
import weight_group
from torch.distributed import TCPStore
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

vllm._custom_ops._supports_onednn = False  # before the model is loaded


class Worker:
    """The methods that vLLM's worker gets by `--worker-extension-cls`. /collective_rpc calls them on each worker."""

    def join_weight_store(self, host: str, port: int, timeout_s: float) -> None:
        self._weight_store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))

    def receive_weights(self: Any, first_rank: int, size: int, backend: str, timeout_s: float) -> None:
        tensors = weight_group.receive(self._weight_store, first_rank + self.rank, size, backend, timeout_s)
        try:
            self.reload_weights(weights_iterator=tensors)
        except Exception:
            with set_current_vllm_config(self.vllm_config):  # drop what is loaded, or the next call would mix it in
                finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
            raise
        finally:
            for _ in tensors:  # if loading fails, receive the rest too, since the other receivers need this rank
                pass
