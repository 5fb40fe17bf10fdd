"""An OpenEnv server for Python code, and two sessions of OpenEnv's client at once.

rstar-sandbox serve &
python examples/openenv_server.py
"""

import asyncio
import socket

import uvicorn
from openenv import GenericEnvClient

from sandbox.integrations.openenv import build_app


async def use(url):
    async with GenericEnvClient(url) as first, GenericEnvClient(url) as second:
        for session, value in ((first, 1), (second, 2)):
            await session.reset()
            await session.step({"code": f"x = {value}"})
        for session in (first, second):
            result = await session.step({"code": "print(x)"})
            print(result.observation["stdout"].strip(), await session.state())


async def main():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(build_app(), log_level="warning"))
        running = asyncio.create_task(server.serve([listener]))
        await use(f"http://127.0.0.1:{listener.getsockname()[1]}")
        server.should_exit = True
        await running


if __name__ == "__main__":
    asyncio.run(main())
