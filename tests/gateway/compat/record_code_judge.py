"""Records the answers of a code-judge.

    python -m tests.gateway.compat.record_code_judge URL

The answers of the committed file are those of code-judge fbc5293 with redis-py 6.4.0, 4 workers and its default
settings. `PYTHON_EXECUTOR_PATH` was the guest runtime's Python 3.13.0, so that its error texts are those of the Python
that this server's tests run.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.gateway.compat.code_judge_programs import DIFFERENT, SUBMISSIONS, comparable

ANSWERS = Path(__file__).with_name("code_judge_answers.json")


def post(url: str, body: Any) -> Any:
    """Send a request, and return the decoded answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def record(url: str, submissions: dict[str, Any]) -> dict[str, Any]:
    """Return for each submission the comparable answer of `/run`, checked against that of `/judge`."""
    answers = {}
    for name, submission in submissions.items():
        answer, judged = post(f"{url}/run", submission), post(f"{url}/judge", submission)
        assert all(judged[field] == answer[field] for field in ("success", "run_success", "reason")), name
        answers[name] = comparable(answer)
    return answers


def main() -> None:
    """Write `ANSWERS`."""
    (url,) = sys.argv[1:]
    different = {name: submission for name, (submission, _) in DIFFERENT.items()}
    answers = {"same": record(url, SUBMISSIONS), "different": record(url, different)}
    ANSWERS.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
