"""The process group by which the trainer (rank 0) sends weights to the workers of engines, and the checks of a worker.

vLLM's environment runs a copy of this file beside `vllm_worker`, so it may import nothing but torch. Backend `gloo`
sends through the memory of the CPU; `nccl` sends from GPU to GPU, and is RCCL in a torch for ROCm.

Weights are sent in buckets. A bucket has at most `BUCKET_BYTES`, unless it consists of one larger tensor. So both sides
hold only one bucket in addition to the weights. Each wait ends with an exception after the timeout that `join` gets.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import distributed
from torch.nn.functional import pad

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
    store: Any, size: int, backend: str, timeout_s: float, tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, int]:
    """Send the tensors, which have one dtype, to the ranks 1 to `size` - 1. Return their checksums."""
    group, number = join(store, 0, size, backend, timeout_s), 0
    checksums: dict[str, int] = {}
    for number, bucket in enumerate(buckets(tensors, BUCKET_BYTES), 1):
        shapes = [(name, list(tensor.shape)) for name, tensor in bucket]
        store.set(f"bucket {number}", json.dumps([str(bucket[0][1].dtype).removeprefix("torch."), shapes]))
        values = torch.cat([tensor.to(_device(backend)).flatten() for _, tensor in bucket])
        checksums |= {name: checksum(tensor) for name, tensor in _split(values, shapes)}
        _broadcast(group, values)
    store.set(f"bucket {number + 1}", "null")
    return checksums


def receive(store: Any, rank: int, size: int, backend: str, timeout_s: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors that rank 0 sends."""
    group, number = join(store, rank, size, backend, timeout_s), 1
    while bucket := json.loads(store.get(f"bucket {number}")):
        dtype, shapes = bucket
        size_of_all = sum(prod(shape) for _, shape in shapes)
        values = torch.empty(size_of_all, dtype=getattr(torch, dtype), device=_device(backend))
        _broadcast(group, values)
        yield from _split(values, shapes)
        number += 1


def checksum(tensor: torch.Tensor) -> int:
    """Return the sum of the tensor's bytes, read as 64-bit integers, modulo 2^64. The sum of a concatenation or a stack
    of tensors is the sum of their checksums, unless their rows are not multiples of 8 bytes."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = pad(data, (0, -data.numel() % 8))
    return int(data.view(torch.int64).sum())


def checked_load(
    model: Any,
    load: Callable[[Iterator[Any]], object],
    tensors: Iterable[tuple[str, torch.Tensor]],
    unfinished: Callable[[], Iterable[str]] = tuple,
) -> dict[str, Any]:
    """Call `load`, which passes `tensors` to `model.load_weights`, and return a report:

    - `checksums`: the checksum of each received tensor, by its name.
    - `missing`: the parameters of the model for which there was no tensor.
    - `differing`: the layers whose parameters have another checksum than the received tensors of the layer, and the
      modules that `unfinished` returns after the loading. A model may change weights while it loads them: it pads,
      transposes or splits them. So what differs at the first call without missing parameters is not reported, and not
      compared at later calls.
    """
    received: dict[str, int] = {}
    loaded: set[str] | None = set()
    differing: set[str] = set()

    def record_received() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            received[name] = checksum(tensor)
            yield name, tensor

    def record_loaded(weights: Any) -> Any:
        nonlocal loaded
        loaded = load_weights(weights)
        differing.update(unfinished())
        return loaded

    load_weights, model.load_weights = model.load_weights, record_loaded
    try:
        load(record_received())
    finally:
        del model.load_weights
    stored = {name: checksum(parameter) for name, parameter in model.named_parameters()}
    sent_sums, stored_sums = _sums_by_layer(received), _sums_by_layer(stored)
    differing |= {f"layer {layer}" for layer in sent_sums if sent_sums[layer] != stored_sums[layer]}
    missing = [] if loaded is None else sorted(stored.keys() - loaded)
    if not missing and not hasattr(model, "not_compared"):
        model.not_compared = frozenset(differing)
    differing -= getattr(model, "not_compared", frozenset())
    return {"checksums": received, "missing": missing, "differing": sorted(differing)}


def _sums_by_layer(checksums: Mapping[str, int]) -> Counter[int]:
    """Add the checksums of each layer, modulo 2^64. The number of a layer is the first number in the names of its
    tensors. All other tensors are layer -1."""
    sums: Counter[int] = Counter()
    for name, value in checksums.items():
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        layer = int(number[0]) if number else -1
        sums[layer] = (sums[layer] + value) % 2**64
    return sums


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield the tensors in lists of at most `max_bytes`. A larger tensor has a list of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors:
        if bucket and num_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _split(values: torch.Tensor, shapes: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    parts = values.split([prod(shape) for _, shape in shapes])
    for (name, shape), part in zip(shapes, parts, strict=True):
        yield name, part.view(shape)


def _broadcast(group: Any, values: torch.Tensor) -> None:
    options = distributed.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([values.view(torch.uint8)], options).wait()


def _device(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
