"""A vLLM worker extension that makes `reload_weights` work on a CPU. It runs in vLLM's own environment, so it may
import nothing but vLLM.

vLLM packs the weights of linear layers for oneDNN when a model is first loaded on a CPU. `reload_weights` then reports
success and leaves a mix of old and new weights. Without the packing it replaces all weights.
"""

from __future__ import annotations

import vllm._custom_ops

vllm._custom_ops._supports_onednn = False  # before the model is loaded


class Worker:
    """The class that `--worker-extension-cls` requires. It adds nothing: importing this module has the effect."""
