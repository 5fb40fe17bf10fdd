"""A process that takes part in broadcasts as a vLLM server with one worker does, and saves the received weights.

    weight_receiver.py FILE [dies|hangs|changes]

It prints its port. With "dies" the process ends after its first tensor. With "hangs" it never joins the group. With
"changes" a bit of a tensor changes on the way.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from aiohttp import web
from torch.distributed import TCPStore

from trainer.sync import weight_group

weight_group.BUCKET_BYTES = 2**14  # so small that the weights take several buckets


async def main(file: str, fault: str = "") -> None:
    stores: list[TCPStore] = []

    def receive(first_rank: int, size: int, backend: str, timeout_s: float) -> dict[str, Any]:
        received = {}
        for name, tensor in weight_group.receive(stores[-1], first_rank, size, backend, timeout_s):
            if fault == "dies":
                os._exit(1)
            if fault == "changes" and name == "model.norm.weight":
                tensor.view(torch.uint8)[0] ^= 1
            received[name] = tensor.clone()
        torch.save(received, file)
        checksums = {name: weight_group.checksum(tensor) for name, tensor in received.items()}
        return {"checksums": checksums, "missing": [], "differing": []}

    async def call(request: web.Request) -> web.Response:
        body: Any = await request.json()
        options, report = body["kwargs"], None
        if body["method"] == "join_weight_store":
            timeout = timedelta(seconds=options["timeout_s"])
            stores.append(TCPStore(options["host"], options["port"], is_master=False, timeout=timeout))
        elif fault == "hangs":
            await asyncio.Event().wait()
        else:
            try:
                report = await asyncio.to_thread(receive, **options)
            except RuntimeError as error:
                return web.json_response({"error": str(error)}, status=500)
        return web.json_response({"results": [report]})

    async def reset(_: web.Request) -> web.Response:
        return web.json_response({"success": True})

    app = web.Application()
    app.add_routes([web.post("/collective_rpc", call), web.post("/reset_prefix_cache", reset)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
