"""Runs that look like real ones, for what reads run folders: made of real episodes, from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer.episodes import metrics, roc
from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus, Turn
from trainer.runs.run_folder import RunFolder

KEEP = 4
STAGES = {"sft": 6, "rl1": 8, "rl2": 4}
"""Steps of each."""

_TRACEBACK = 'Traceback (most recent call last):\n  File "<call>", line 3, in <module>\n    print(totl)\nNameError: {}'


def write_run(path: Path, *, seed: int = 0, problems: int = 2, stages: dict[str, int] = STAGES) -> RunFolder:
    """A run of SFT and two stages that get better."""
    folder, rng = RunFolder(path), random.Random(seed)
    folder.bind_config({"model": "tiny", "seed": seed, "stages": list(stages)})
    step, total = 0, sum(stages.values())
    for stage, steps in stages.items():
        for _ in range(steps):
            step += 1
            if stage == "sft":
                row = {"loss": 3 / step, "learning_rate": 5e-6, "grad_norm": 1.0, "sampled_tokens": 4096, "step_s": 0.5}
                folder.append_metrics({"step": step, "stage": stage, **row})
            else:
                groups = [group(rng, f"p{step}-{number}", skill=step / total) for number in range(problems)]
                write_step(folder, step, stage, groups)
    folder.write_summary({"stages": [
        {"name": name, "accuracy": 0.5 + 0.1 * i, "accuracy_interval": [0.4, 0.9],
         "tool_error_ratio": 0.4 - 0.1 * i, "one_answer": 0.8, "seconds": 60.0}
        for i, name in enumerate(stages)
    ]})  # fmt: skip
    return folder


def write_step(folder: RunFolder, step: int, stage: str, groups: Sequence[Sequence[Episode]]) -> None:
    """One step's episodes, resampled, and the numbers that follow from them."""
    rng = random.Random(step)
    kept = [roc.resample_on_correct(group, len(group) // 2, mode="paper", rng=rng) for group in groups]
    why = [roc.selection_reasons(group, some) for group, some in zip(groups, kept, strict=True)]
    folder.write_episodes(step, stage, groups, kept, why)
    folder.append_metrics({"step": step, "stage": stage, **numbers(groups, kept)})


def numbers(groups: Sequence[Sequence[Episode]], kept: Sequence[Sequence[int]]) -> dict[str, float]:
    """A plausible row of metrics with every name."""
    used = [some if roc.has_signal(group, some) else [] for group, some in zip(groups, kept, strict=True)]
    spent = {"step_s": 4.5, "rollout_s": 3.2, "weight_sync_s": 0.1, "optimize_s": 1.1, "overhead_cpu_s": 0.05}
    measured = {"loss": 0.02, "grad_norm": 0.4, "logprob_diff_mean": 4e-4, "learning_rate": 1e-5, "weight_version": 3}
    row = metrics.step_metrics(groups, used) | measured | spent
    return dict.fromkeys(metrics.METRICS, 0.5) | row


def group(rng: random.Random, problem: str, *, skill: float) -> list[Episode]:
    """The rollouts of a problem."""
    seed = rng.random()
    return [episode(random.Random(f"{seed} {sample}"), problem, sample, skill=skill) for sample in range(2 * KEEP)]


def episode(rng: random.Random, problem: str, sample: int, *, skill: float) -> Episode:
    """A rollout: some reasoning, a call or two, perhaps a broken one, an answer."""
    a, b = (random.Random(f"{problem} {factor}").randrange(10, 99) for factor in "ab")
    task = Problem(problem, f"What is {a} × {b}? Give an integer < 10000.", str(a * b), "generated")
    draft, calls_left = Episode(task, sample, tuple(range(40)), duration_s=1.25), rng.randrange(1, 3)
    while True:
        calls = (_call(rng, a, b, skill),) if calls_left else ()
        text = f"<reason>Multiply {a} by {b}.</reason>\n"
        right = rng.random() < 0.3 + 0.6 * skill
        answer = str(a * b if right else a * b + 1)
        for call in calls:
            asked = json.dumps({"name": call.name, "arguments": call.arguments})
            text += f"<tool_call>\n{asked}\n</tool_call>"
        if not calls:
            text += f"<answer>\\boxed{{{answer}}}</answer>"
        start = len(draft.response_ids)
        size = rng.randrange(20, 90)
        draft.append_sampled([rng.randrange(384) for _ in range(size)], [-rng.random() for _ in range(size)], 3)
        spent = {"generate_s": size / 100, "tool_s": sum(call.duration_s for call in calls)}
        draft.turns.append(Turn(start, len(draft.response_ids), text, calls, engine="local", weight_version=3, **spent))
        if not calls:
            break
        draft.append_observation([rng.randrange(384) for _ in range(rng.randrange(8, 30))])
        calls_left -= 1
    draft.stop_reason, draft.answer, draft.answer_blocks = (
        StopReason.FINISHED,
        answer,
        1 if rng.random() < 0.5 + skill / 2 else 2,
    )
    draft.reward = float(right)
    whole = draft
    chance = rng.random()
    if chance < 0.06:
        stop = StopReason.TOKEN_LIMIT if chance < 0.03 else StopReason.TURN_LIMIT
        return replace(whole, stop_reason=stop, answer=None, answer_blocks=0, reward=0.0)
    if chance < 0.12:
        return replace(whole, stop_reason=StopReason.UNAVAILABLE, reward=None, answer=None, error="no engine is left")
    return whole


def _call(rng: random.Random, a: int, b: int, skill: float) -> ToolCall:
    name, code = "execute_python_code_with_standard_io", f"# the product\ntotal = {a} * {b}\nprint('is', total)\n"
    chance = rng.random()
    if chance < 0.1:
        return ToolCall("", "", ToolCallStatus.MALFORMED, "Expecting ',' delimiter: line 1 column 9 (char 8)")
    if chance < 0.15:
        return ToolCall(
            name, {"code": "while True: pass", "input": ""}, ToolCallStatus.TIMEOUT, "Timed out after 4 s.", 4.0
        )
    if chance < 0.2 + skill:
        return ToolCall(name, {"code": code, "input": "3 4\n"}, ToolCallStatus.OK, f"is {a * b}\n", 0.012)
    error = _TRACEBACK.format("name 'totl' is not defined")
    broken = {"code": code.replace("total)", "totl)"), "input": ""}
    return ToolCall(name, broken, ToolCallStatus.ERROR, error, 0.015, is_truncated=True)
