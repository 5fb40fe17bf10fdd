"""The peak memory of a training step, counted from the storages of its tensors. It needs no GPU and no memory.

The step runs on fake tensors, which have shapes and no values: one pass that adds to gradients that exist, and the
update of the optimizer. The model, its dtypes, the adapter, gradient checkpointing and the sharding are those of the
trainer. A sharded step is that of rank 0; its process group exchanges nothing. Every operation adds the storages that
it returns, in blocks of 512 bytes as torch's allocator for CUDA does, and a storage counts until it is freed.

The count does not include: the context of CUDA, fragmentation, buffers inside kernels, and what streams keep longer
because they overlap. The kernels of TRL's head that run on GPUs are replaced by ones that only write their outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from trainer.config import ModelShape

BLOCK_BYTES = 512


def counted_peak(
    shape: ModelShape,
    tokens: int,
    dtype: str,
    *,
    gradient_checkpointing: bool,
    lora_rank: int = 0,
    ranks: int = 1,
    is_fused: bool = False,
    has_gpu_kernels: bool = True,
) -> dict[str, int]:
    """Return the peaks in bytes of a `pass` over one row of `tokens`, and of the `update` of the optimizer.

    `lora_rank`: the rank of an adapter of all linear layers; with 0 all weights are trained.
    `is_fused`: whether the optimizer is `adamw_torch_fused` instead of `adamw_torch`.
    `has_gpu_kernels`: whether TRL's head uses its kernels for GPUs.
    """
    model = _empty_model(shape, dtype, gradient_checkpointing=gradient_checkpointing, lora_rank=lora_rank)
    with _mesh(ranks) as mesh, FakeTensorMode(), _head_kernels(has_gpu_kernels), StorageCount() as count:
        _allocate(model)
        if mesh:
            _shard(model, mesh, dtype)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(list(map(_local_part, trained)), fused=is_fused, foreach=not is_fused)
        count.restart()
        optimizer.step()
        peaks = {"update": count.restart()}
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            # None is the mask of one row without padding.
            output = model(input_ids=ids, labels=ids, attention_mask={"full_attention": None}, fused_lm_head=True)
        output.log_probs.exp().sum().backward()
        return peaks | {"pass": count.restart()}


def model_config(shape: ModelShape) -> Any:
    """Return the config of a Qwen2 model or, if `shape` has a head size, of a Qwen3 model."""
    sizes = asdict(shape)
    if not shape.head_dim:
        del sizes["head_dim"]
    config = Qwen3Config(**sizes) if shape.head_dim else Qwen2Config(**sizes)
    config._attn_implementation = "sdpa"
    return config


class StorageCount(TorchDispatchMode):
    """Counts the bytes of the storages that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: Any = WeakIdKeyDictionary()
        """For each storage, a list with the bytes that are counted for it."""
        self._live_bytes = self._peak_bytes = 0
        self._fake_mode: Any = None

    def restart(self) -> int:
        """Return the peak since the last call. The peak begins anew, with the storages that are alive."""
        peak, self._peak_bytes = self._peak_bytes, self._live_bytes
        return peak

    def __enter__(self) -> StorageCount:
        self._fake_mode = active_fake_mode()
        resize = torch.UntypedStorage.resize_

        def counted_resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            self._count(storage)
            return resized

        self._resizing = patch.object(torch.UntypedStorage, "resize_", counted_resize)  # FSDP frees weights by it
        self._resizing.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it is called again for the parts
        if function is torch.ops._c10d_functional.wait_tensor.default and self._fake_mode:
            return args[0]  # a fake one would be a copy
        result = function(*args, **(kwargs or {}))
        if active_fake_mode() is self._fake_mode:  # otherwise it computes the placement of a DTensor
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    for storage in get_untyped_storages(tensor):
                        self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._sizes:
            self._sizes[storage] = size = [0]
            weakref.finalize(storage, self._change, size, 0)
        self._change(self._sizes[storage], -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES)

    def _change(self, size: list[int], num_bytes: int) -> None:
        self._live_bytes += num_bytes - size[0]
        size[0] = num_bytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)


def _empty_model(shape: ModelShape, dtype: str, *, gradient_checkpointing: bool, lora_rank: int) -> Any:
    """Return the model to train, without memory."""
    with torch.device("meta"):
        weights_dtype = getattr(torch, dtype) if lora_rank else torch.float32
        model = AutoModelForCausalLM.from_config(model_config(shape), dtype=weights_dtype)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora_rank:
            if gradient_checkpointing:
                model.enable_input_require_grads()
            options: Any = {"r": lora_rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
            model = get_peft_model(model, LoraConfig(**options))
    return model.train()


def _allocate(model: Any) -> None:
    """Replace the weights of an empty model by tensors of the active mode. Tied weights stay tied."""
    allocated: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in list(model.modules()):
        for name, empty in list(module.named_parameters(recurse=False)):
            if empty not in allocated:
                values = torch.empty(empty.shape, dtype=empty.dtype)
                allocated[empty] = torch.nn.Parameter(values, requires_grad=empty.requires_grad)
            setattr(module, name, allocated[empty])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _local_part(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return this rank's part of a parameter, with its part of the gradient. For a DTensor, torch would also compute
    the shapes of whole tensors on fake tensors, which would be counted."""
    if not isinstance(parameter, DTensor):
        return parameter
    part = torch.nn.Parameter(parameter.to_local().detach())
    part.grad = parameter.grad.to_local()
    return part


@contextmanager
def _mesh(ranks: int) -> Iterator[DeviceMesh | None]:
    """Yield a mesh of ranks that exchange nothing, or None for a single rank."""
    if ranks == 1:
        yield None
        return
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        distributed.destroy_process_group()


def _shard(model: Any, mesh: DeviceMesh, dtype: str) -> None:
    """Shard the model as accelerate does: each layer, the embeddings, and the head with the last norm."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    options: dict[str, Any] = {"mesh": mesh}
    if dtype == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in base.model.layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    embeddings = base.model.embed_tokens
    is_tied = embeddings.weight is base.lm_head.weight
    if not is_tied:
        fully_shard(embeddings, reshard_after_forward=True, **options)
    tail = [base.model.norm, *([embeddings] if is_tied else []), base.lm_head]
    fully_shard(tail, reshard_after_forward=False, **options)
    fully_shard(model, **options)


@contextmanager
def _head_kernels(has_gpu_kernels: bool) -> Iterator[None]:
    """With `has_gpu_kernels`, replace the kernels of TRL's head, which write their results into given tensors."""
    if not has_gpu_kernels:
        yield
        return

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: None

    class Triton:
        cdiv = staticmethod(lambda dividend, divisor: -(-dividend // divisor))

    replaced = {
        "_use_triton": lambda device: True,
        "_forward_kernel": Kernel(),
        "_backward_kernel": Kernel(),
        "_addmm_fp32": lambda *tensors: None,
        "triton": Triton,
    }
    with patch.multiple(chunked_logprob, create=True, **replaced):
        yield
