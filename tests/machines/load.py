"""Loads a running server and checks every result. A step returns an empty text, or what does not hold.

python -m tests.machines.load STEP    # of STEPS, for the server of a container whose network this container shares
"""

from __future__ import annotations

import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from sandbox.client import Client, ServiceError
from sandbox.types import Result, Status

TOKEN = "machine"
URL = "http://127.0.0.1:8642"
WAIT_S = 600
"""Seconds to wait for the server, since the cores of a machine may be emulated."""
RUNNING = "running"
"""The line after which the step `stop` waits for its caller to stop the server."""
MAX_SLEEPERS = 500
BOMBS = 4
SLEEP_UNTIL_CANCELLED = {"code": "import time; time.sleep(10_000)", "limits": {"timeout_s": 3600}}
SLEEP = {"code": "import time; time.sleep(2); print('slept')", "limits": {"timeout_s": 300}}
FORK_STORM = {
    "code": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "limits": {"timeout_s": 3, "processes": 64},
}
FORK_AND_ALLOCATE = {
    "code": "import os, time\nfor _ in range(64):\n    try:\n        if os.fork() == 0: break\n"
    "    except OSError: break\nheld = bytearray(b'x') * (8 << 20)\ntime.sleep(3)",
    "limits": {"timeout_s": 60, "processes": 64, "memory_mb": 128},
}
"""The processes of this call hold 512 MiB together. At an isolation level that lets no call fork, the call has one
process and ends with `ok`."""
FORK_ONCE = {"code": "import os\nif os.fork() == 0: os._exit(0)\nos.wait()[1]", "limits": {"timeout_s": 60}}
OTHERS: Sequence[dict[str, Any]] = [
    *({"code": f"print({n})\n{n} ** 2", "limits": {"timeout_s": 60}} for n in range(40)),
    *({"code": "import time; time.sleep(0.5); 7", "limits": {"timeout_s": 60}} for _ in range(10)),
    *[FORK_ONCE] * 20,
    {"code": "while True: pass", "limits": {"timeout_s": 0.2}},
    {"code": "kept = []\nwhile True: kept.append(bytes(1 << 20))", "limits": {"timeout_s": 60, "memory_mb": 64}},
]
"""Calls whose results must not change, whatever runs beside them."""


def answer() -> str:
    """Wait until the server is ready. It must answer 20 calls."""
    wait_until_ready()
    with client() as server:
        results = server.run_batch([{"code": f"print({n})"} for n in range(20)])
    wrong = [result for n, result in enumerate(results) if result.stdout != f"{n}\n"]
    return f"wrong results: {wrong}" if wrong else ""


def crowd() -> str:
    """Sleeping calls in all long slots, at most 500, and a fork storm change no other result."""
    with client() as server:
        sleepers = [server.submit(SLEEP_UNTIL_CANCELLED) for _ in range(min(MAX_SLEEPERS, count("long_slots")))]
        wait(lambda: count("running_long") == len(sleepers))
        problem = _changed_beside(server, FORK_STORM, {Status.TIMEOUT, Status.ERROR})
        ended = [sleeper.result() for sleeper in sleepers if sleeper.done()]
        for sleeper in sleepers:
            sleeper.cancel()
        wait(lambda: count("running") == 0)
    return problem or (f"sleeping calls ended: {ended}" if ended else "")


def forks() -> str:
    """Eight calls that fork 64 times and allocate, at once, change no other result."""
    with client() as server:
        return _changed_beside(server, FORK_AND_ALLOCATE, {Status.MEMORY_LIMIT, Status.KILLED, Status.OK, Status.ERROR})


def _changed_beside(server: Client, bomb: dict[str, Any], statuses: set[Status]) -> str:
    """Run `OTHERS` alone and beside bombs. Return which results differ, or that a bomb has none of the statuses."""
    alone = list(map(_verdict, server.run_batch(OTHERS)))
    bombs = [server.submit(bomb) for _ in range(BOMBS)]
    beside = list(map(_verdict, server.run_batch(OTHERS)))
    changed = [f"{before} became {after}" for before, after in zip(alone, beside, strict=True) if before != after]
    unexpected = [_verdict(result) for result in (bomb.result() for bomb in bombs) if result.status not in statuses]
    return "; ".join([*changed, *(f"a bomb got {verdict}" for verdict in unexpected)])


def _verdict(result: Result) -> tuple[str, ...]:
    return result.status, result.stdout, result.value or "", result.error.message if result.error else ""


def stop(stop_server: Callable[[], object]) -> str:
    """Stop the server while it runs calls. Each running call gets its result. A call that waits, or arrives too late,
    gets its result, the error `Stopped`, or a `ServiceError`."""
    with client() as server:
        running = [server.submit(SLEEP) for _ in range(16)]
        wait(lambda: count("running") == len(running))
        late = [server.submit(SLEEP) for _ in range(200)]
        stop_server()
        outcomes, late_outcomes = Counter(map(_outcome, running)), Counter(map(_outcome, late))
    if outcomes != {Status.OK: len(running)}:
        return f"running calls: {dict(outcomes)}"
    unclear = late_outcomes.keys() - {Status.OK, "Stopped", "ServiceError"}
    return f"calls that came late: {dict(late_outcomes)}" if unclear else ""


def _outcome(call: Future[Result]) -> str:
    try:
        result = call.result()
    except ServiceError:
        return "ServiceError"
    return result.error.type if result.status is Status.UNAVAILABLE and result.error else result.status


STEPS: dict[str, Callable[[], str]] = {
    "answer": answer,
    "crowd": crowd,
    "forks": forks,
    "stop": lambda: stop(lambda: print(RUNNING, flush=True)),
}


def client() -> Client:
    return Client(URL, token=TOKEN)


def count(name: str) -> int:
    """Return the sum of a metric over all executors."""
    request = urllib.request.Request(f"{URL}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        metrics = str(response.read(), "utf-8")
    return sum(map(int, re.findall(rf"^rstar_sandbox_executor_{name}\{{.*\}} (\d+)\.0$", metrics, re.MULTILINE)))


def wait_until_ready() -> None:
    def is_ready() -> bool:
        with client() as server:
            return server.ready()

    wait(is_ready)


def wait(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not within {WAIT_S} s")
        time.sleep(0.5)


if __name__ == "__main__":
    raise SystemExit(STEPS[sys.argv[1]]() or 0)
