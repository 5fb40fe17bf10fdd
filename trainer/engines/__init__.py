"""Engines that generate turns: one in this process, vLLM servers over HTTP, and the pool that uses several of them."""
