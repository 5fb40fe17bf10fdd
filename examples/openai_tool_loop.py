"""A model of any OpenAI-compatible server that calls Python in the sandbox until it answers.

rstar-sandbox serve &
OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python examples/openai_tool_loop.py MODEL "What is 2**100 % 97?"
"""

import json
import os
import sys
import urllib.request

from sandbox.client import Client
from sandbox.errors import InvalidCall
from sandbox.tool import TOOL_SCHEMA, parse_arguments, render

MAX_TURNS = 10


def complete(model, messages):
    """Return the model's next message. The package `openai` can do this too."""
    body = json.dumps({"model": model, "messages": messages, "tools": [TOOL_SCHEMA]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '-')}"}
    url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1") + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        return json.load(response)["choices"][0]["message"]


def main(model, question):
    messages = [{"role": "user", "content": question}]
    with Client(os.environ.get("RSTAR_SANDBOX_URL", "http://127.0.0.1:8642")) as client:
        for _ in range(MAX_TURNS):
            messages.append(message := complete(model, messages))
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                try:  # `render` raises a `ServiceError` if the service failed: the model never reads that
                    text = render(client.execute(parse_arguments(call["function"]["arguments"])))
                except InvalidCall as error:
                    text = str(error)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    print(messages[-1]["content"])


if __name__ == "__main__":
    main(*sys.argv[1:])
