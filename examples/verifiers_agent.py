"""One rollout of verifiers with the Python tool, on any OpenAI-compatible server.

rstar-sandbox serve &
python examples/verifiers_agent.py MODEL http://127.0.0.1:8000/v1
"""

import asyncio
import sys

import verifiers.v1 as vf

from sandbox.integrations.verifiers import PythonTask


class SumTask(PythonTask):
    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        """Give 1 for an answer with the right number."""
        return float("1758" in trace.last_reply)


async def main(model, base_url):
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    runtime = vf.SubprocessConfig()  # the harness only talks to the model; the code runs in the sandbox
    config = vf.AgentConfig(model=model, client=client, harness={"id": "null"}, runtime=runtime, max_turns=4)
    task = SumTask(vf.TaskData(prompt="What is 12**3 + 30? Use Python."))
    async with vf.make_agent(config) as agent:
        trace = await agent.run(task)
    print({"ok": trace.ok, "reward": trace.reward, "last_reply": trace.last_reply})
    return trace


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
