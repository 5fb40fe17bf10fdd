"""The process group by which the trainer (rank 0) sends weights to the workers of engines.

vLLM's environment runs a copy of this file beside `vllm_worker`, so it may import nothing but torch. Backend `gloo`
sends through the memory of the CPU; `nccl` sends from GPU to GPU, and is RCCL in a torch for ROCm.

Weights are sent in buckets. A bucket has at most `BUCKET_BYTES`, unless it consists of one larger tensor. So both sides
hold only one bucket in addition to the weights. Each wait ends with an exception after the timeout that `join` gets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import distributed

BUCKET_BYTES = 2**28


def join(store: Any, rank: int, size: int, backend: str, timeout_s: float) -> Any:
    """Return the process group. gloo waits here until all ranks have joined. NCCL waits in the first broadcast."""
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a timeout raises here; otherwise a watchdog ends the process
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, size, options)


def send(
    store: Any, size: int, backend: str, timeout_s: float, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Send the tensors, rounded to `dtype`, to the ranks 1 to `size` - 1."""
    shapes = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
    store.set("weights", json.dumps({"dtype": str(dtype).removeprefix("torch."), "shapes": shapes}))
    group = join(store, 0, size, backend, timeout_s)
    for bucket in _buckets(shapes, dtype):
        parts = [tensors[name].to(_device(backend), dtype).flatten() for name, _ in bucket]
        _broadcast(group, torch.cat(parts))


def receive(store: Any, rank: int, size: int, backend: str, timeout_s: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors that rank 0 sends."""
    weights = json.loads(store.get("weights"))
    dtype = getattr(torch, weights["dtype"])
    group = join(store, rank, size, backend, timeout_s)
    for bucket in _buckets(weights["shapes"], dtype):
        sizes = [prod(shape) for _, shape in bucket]
        values = torch.empty(sum(sizes), dtype=dtype, device=_device(backend))
        _broadcast(group, values)
        for (name, shape), part in zip(bucket, values.split(sizes), strict=True):
            yield name, part.view(shape)


def _buckets(shapes: Sequence[Any], dtype: torch.dtype) -> Iterator[list[Any]]:
    bucket: list[Any] = []
    num_bytes = 0
    for name, shape in shapes:
        tensor_bytes = prod(shape) * dtype.itemsize
        if bucket and num_bytes + tensor_bytes > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, shape))
        num_bytes += tensor_bytes
    yield bucket


def _broadcast(group: Any, values: torch.Tensor) -> None:
    options = distributed.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([values.view(torch.uint8)], options).wait()


def _device(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
