"""A model endpoint of stated latency: vLLM's routes, with a scripted model that takes a fixed time per turn.

    python -m bench.servers.model_endpoint MODEL_DIR LATENCY_S NUM_TURNS

The program prints its URL. In every turn except the last, the scripted model guesses a number in a game; the last turn
gives an answer. The endpoint replaces a real model where only the time of a turn matters. The program ends at the end
of its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

METRICS = """vllm:num_preemptions_total{engine="0"} 0
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0
vllm:prompt_tokens_total{engine="0"} 1
vllm:generation_tokens_total{engine="0"} TOKENS
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1048576"} 1
"""


class ModelEndpoint:
    def __init__(self, model_dir: str, latency_s: float, num_turns: int) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._latency_s, self._num_turns, self._tokens = latency_s, num_turns, 0
        (self._end_id,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
        call = {"name": "guess", "arguments": {"number": 1}}
        texts = (f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "<answer>\\boxed{1}</answer>")
        self._guess, self._answer = (
            [*tokenizer.encode(text, add_special_tokens=False), self._end_id] for text in texts
        )

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.get("/metrics", self._metrics),
                web.get("/health", self._health),
                web.post("/abort_requests", self._health),
            ]
        )
        return app

    async def _completions(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        await asyncio.sleep(self._latency_s)
        # The system and the user message have an end of turn each, and so have each turn and its response.
        turn = (body["prompt"].count(self._end_id) - 2) // 2
        ids = self._guess if turn < self._num_turns - 1 else self._answer
        self._tokens += len(ids)
        choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": "stop", "prompt_logprobs": None}
        return web.json_response({"choices": [choice | {"logprobs": {"token_logprobs": [-1.0] * len(ids)}}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS.replace("TOKENS", str(self._tokens)))

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})


async def _serve(endpoint: ModelEndpoint) -> None:
    runner = web.AppRunner(endpoint.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve(ModelEndpoint(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))))
