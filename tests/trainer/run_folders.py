"""Writes run folders that look like real ones: random episodes from a seed, RoC's selection, and all metrics."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer.episodes import metrics, roc
from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus, Turn
from trainer.runs.run_folder import RunFolder

KEPT_PER_PROBLEM = 4
SAMPLES_PER_PROBLEM = 2 * KEPT_PER_PROBLEM
STAGE_STEPS = {"sft": 6, "rl1": 8, "rl2": 4}
"""The number of training steps by stage."""
VOCAB_SIZE = 384

_NAME_ERROR = (
    'Traceback (most recent call last):\n  File "<call>", line 3, in <module>\n    print(totl)\n'
    "NameError: name 'totl' is not defined"
)


def write_run(
    path: Path, *, seed: int = 0, problems_per_step: int = 2, stage_steps: dict[str, int] = STAGE_STEPS
) -> RunFolder:
    """Write a run of SFT and two RL stages in which the model improves."""
    folder, rng = RunFolder(path), random.Random(seed)
    folder.bind_config({"model": "tiny", "seed": seed, "stages": list(stage_steps)})
    step, total = 0, sum(stage_steps.values())
    for stage, steps in stage_steps.items():
        for _ in range(steps):
            step += 1
            if stage == "sft":
                row = {"loss": 3 / step, "learning_rate": 5e-6, "grad_norm": 1.0, "sampled_tokens": 4096, "step_s": 0.5}
                folder.append_metrics({"step": step, "stage": stage, **row})
            else:
                ids = [f"p{step}-{number}" for number in range(problems_per_step)]
                write_step(folder, step, stage, [group(rng, id, skill=step / total) for id in ids])
    folder.write_summary({"stages": [
        {"name": name, "accuracy": 0.5 + 0.1 * i, "accuracy_interval": [0.4, 0.9],
         "tool_error_ratio": 0.4 - 0.1 * i, "one_answer": 0.8, "seconds": 60.0}
        for i, name in enumerate(stage_steps)
    ]})  # fmt: skip
    return folder


def write_step(folder: RunFolder, step: int, stage: str, groups: Sequence[Sequence[Episode]]) -> None:
    """Select half of each group with RoC, and write the episodes and the metrics of the step."""
    rng = random.Random(step)
    selected = [roc.resample_on_correct(group, len(group) // 2, mode="paper", rng=rng) for group in groups]
    reasons = [roc.selection_reasons(group, indices) for group, indices in zip(groups, selected, strict=True)]
    folder.write_episodes(step, stage, groups, selected, reasons)
    folder.append_metrics({"step": step, "stage": stage, **metrics_row(groups, selected)})


def metrics_row(groups: Sequence[Sequence[Episode]], selected: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return a value for every metric. Metrics that do not follow from episodes have invented values."""
    in_loss = [
        indices if roc.has_signal(group, indices) else [] for group, indices in zip(groups, selected, strict=True)
    ]
    seconds = {"step_s": 4.5, "rollout_s": 3.2, "weight_sync_s": 0.1, "optimize_s": 1.1, "overhead_cpu_s": 0.05}
    training = {"loss": 0.02, "grad_norm": 0.4, "logprob_diff_mean": 4e-4, "learning_rate": 1e-5, "weight_version": 3}
    return dict.fromkeys(metrics.METRICS, 0.5) | metrics.step_metrics(groups, in_loss) | training | seconds


def group(rng: random.Random, problem_id: str, *, skill: float) -> list[Episode]:
    """Return the episodes of a problem."""
    seed = rng.random()
    return [
        episode(random.Random(f"{seed} {sample}"), problem_id, sample, skill=skill)
        for sample in range(SAMPLES_PER_PROBLEM)
    ]


def episode(rng: random.Random, problem_id: str, sample: int, *, skill: float) -> Episode:
    """Return a random episode with one or two tool calls and an answer, or one that reached a limit or failed.

    `skill` from 0 to 1 raises the rates of correct answers, valid calls and single answers.
    """
    a, b = (random.Random(f"{problem_id} {factor}").randrange(10, 99) for factor in "ab")
    problem = Problem(problem_id, f"What is {a} × {b}? Give an integer < 10000.", str(a * b), "generated")
    draft = Episode(problem, sample, tuple(range(40)), duration_s=1.25)
    for calls_left in range(rng.randrange(1, 3), -1, -1):
        calls = (_tool_call(rng, a, b, skill),) if calls_left else ()
        is_correct = rng.random() < 0.3 + 0.6 * skill
        answer = str(a * b if is_correct else a * b + 1)
        text = f"<reason>Multiply {a} by {b}.</reason>\n"
        for call in calls:
            request = json.dumps({"name": call.name, "arguments": call.arguments})
            text += f"<tool_call>\n{request}\n</tool_call>"
        if not calls:
            text += f"<answer>\\boxed{{{answer}}}</answer>"
        start, length = len(draft.response_ids), rng.randrange(20, 90)
        ids, logprobs = _random_ids(rng, length), [-rng.random() for _ in range(length)]
        draft.append_sampled(ids, logprobs, weight_version=3)
        draft.turns.append(
            Turn(
                start,
                len(draft.response_ids),
                text,
                calls,
                engine="local",
                weight_version=3,
                generate_s=length / 100,
                tool_s=sum(call.duration_s for call in calls),
            )
        )
        if calls:
            draft.append_observation(_random_ids(rng, rng.randrange(8, 30)))
    draft.stop_reason, draft.answer, draft.reward = StopReason.FINISHED, answer, float(is_correct)
    draft.answer_blocks = 1 if rng.random() < 0.5 + skill / 2 else 2
    chance = rng.random()
    if chance < 0.06:
        stop_reason = StopReason.TOKEN_LIMIT if chance < 0.03 else StopReason.TURN_LIMIT
        return replace(draft, stop_reason=stop_reason, answer=None, answer_blocks=0, reward=0.0)
    if chance < 0.12:
        return replace(draft, stop_reason=StopReason.UNAVAILABLE, reward=None, answer=None, error="no engine is left")
    return draft


def _random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def _tool_call(rng: random.Random, a: int, b: int, skill: float) -> ToolCall:
    """Return a call that is malformed (probability 10 %), timed out (5 %) or valid (5 % plus `skill`). Any other
    call ends with a NameError."""
    name, code = "execute_python_code_with_standard_io", f"# the product\ntotal = {a} * {b}\nprint('is', total)\n"
    chance = rng.random()
    if chance < 0.1:
        return ToolCall("", "", ToolCallStatus.MALFORMED, "Expecting ',' delimiter: line 1 column 9 (char 8)")
    if chance < 0.15:
        endless_loop = {"code": "while True: pass", "input": ""}
        return ToolCall(name, endless_loop, ToolCallStatus.TIMEOUT, "Timed out after 4 s.", 4.0)
    if chance < 0.2 + skill:
        return ToolCall(name, {"code": code, "input": "3 4\n"}, ToolCallStatus.OK, f"is {a * b}\n", 0.012)
    misspelled = {"code": code.replace("total)", "totl)"), "input": ""}
    return ToolCall(name, misspelled, ToolCallStatus.ERROR, _NAME_ERROR, 0.015, is_truncated=True)
