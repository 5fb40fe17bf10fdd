"""Loaded by vLLM's workers, in vLLM's own environment: nothing but vLLM may be imported here.

On a CPU vLLM packs the weights of its linear layers for oneDNN when it first loads them. `reload_weights` then answers
that all is well and leaves a mix of old and new. Without the packing a reload is whole.
"""

from __future__ import annotations

import vllm._custom_ops

vllm._custom_ops._supports_onednn = False  # before the model is loaded


class Worker:
    """What `--worker-extension-cls` wants. Nothing is added: importing this module is the effect."""
