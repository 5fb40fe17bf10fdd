"""Records the answers of a server of SandboxFusion, and the scores that verl's reward function computes with it.

    python -m tests.gateway.compat.record_sandbox_fusion URL VERL_CHECKOUT

The answers of the committed file are those of SandboxFusion 469de08 without isolation. Its `sandbox-runtime` was Python
3.13.0 with ipykernel 7, so that its tracebacks are those of the Python that this server's tests run.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.gateway.compat.sandbox_fusion_programs import REQUESTS, comparable, scored_programs

ANSWERS = Path(__file__).with_name("sandbox_fusion_answers.json")
TIMEOUT_S = 3
"""Limit of each test case. It is long enough for SandboxFusion to start an interpreter on a loaded machine."""


def post(url: str, body: Any) -> Any:
    """Send a request, and return the decoded answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


@functools.cache
def import_reward(checkout: Path) -> ModuleType:
    """Import `verl.utils.reward_score.sandbox_fusion` from a checkout, without the rest of verl."""
    name = "verl_sandbox_fusion"
    path = checkout / "verl/utils/reward_score/sandbox_fusion/__init__.py"
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(path.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def scores(checkout: Path, url: str, concurrency: int) -> list[float]:
    """Return verl's score of each of `scored_programs`."""
    reward, semaphore = import_reward(checkout), threading.Semaphore(concurrency)

    def score(program: tuple[str, str, Any]) -> float:
        _, completion, cases = program
        value: float = reward.compute_score(f"{url}/run_code", semaphore, 1024, completion, cases, timeout=TIMEOUT_S)[0]
        return value

    with ThreadPoolExecutor(concurrency) as threads:
        return list(threads.map(score, scored_programs()))


def main() -> None:
    """Write `ANSWERS`."""
    url, checkout = sys.argv[1:]
    answers = {name: comparable(post(url + route, body)) for name, (route, body) in REQUESTS.items()}
    record = {"answers": answers, "scores": scores(Path(checkout), url, concurrency=2)}
    ANSWERS.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
