"""Gives the trainer's weights to engines, and checks that they have arrived.

There are two transfers:
- `transfers.load_by_engine` makes each engine load the weights itself: from tensors in this process, or from the
  directory in which `weight_store.FileWeightStore` keeps them. This works everywhere.
- `broadcast.BroadcastTransfer` sends the weights through torch.distributed: by gloo, or from GPU to GPU by NCCL (RCCL
  on AMD). The transfer by NCCL has not run on a GPU yet.

vLLM servers get the tensors that `save_pretrained` would write, under the same names (`saved_tensors`). A mixture of
experts has other names and shapes in memory. A local engine is a model of the same class as the trainer's, so it gets
the state dict.

There are two checks:
- Checksums, at each sync with `engines.sync_check = "checksum"` and at each broadcast. Each worker of a server computes
  the checksum of each tensor that it has received or read, and this process compares it with the tensor that it has
  sent. So a missed step, a file of another step, and changed or exchanged tensors are detected. The worker also names
  the parameters that it has not loaded, and compares the parameters of each layer with the layer's tensors
  (`weight_group.checked_load`). A layer that a worker changes while it loads it cannot be compared, as with tensor
  parallelism or packed experts; then the counts of loaded elements are the evidence that it has loaded all tensors. A
  local engine needs no checksums: it copies each tensor of the state dict or raises an error.
- The sync probe (`probe`), at each sync with `engines.sync_check = "probe"`, and at the first sync with "checksum".

`vllm_worker` and `weight_group` run in vLLM's own environment as well, and import nothing of this project.
"""
