"""The environment `qa`: a question with attached files. The public scoring rule of the benchmark GAIA
(`trainer.episodes.exact_match`) decides whether an answer is right.

The files are in the working directory of each of the model's Python calls. The calls share no state.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from pydantic import Field
from pydantic.dataclasses import dataclass

from sandbox.errors import InvalidCall
from sandbox.tool import TOOL_SCHEMA
from sandbox.types import Call
from trainer.config import STRICT
from trainer.environments.environment import Environment, EnvironmentFailure, InitialState, parse_options
from trainer.environments.services import Services
from trainer.episodes.episode import Episode, Problem, ToolCall
from trainer.episodes.reward import exact_match_reward
from trainer.episodes.turn_parser import ToolCallRequest

MAX_FILES_MB = 64
"""Maximum size of all files of a problem together, in MiB. Each Python call sends them to the sandbox."""


@dataclass(frozen=True, config=STRICT)
class QaOptions:
    level: int | None = None
    """Level of the problem in its data set. Reports have a row for each level (`trainer.recipe.pass_at_k`)."""
    files: tuple[str, ...] = ()
    """Paths of attached files on this machine."""
    texts: dict[str, str] = Field(default_factory=dict)
    """Attached text files: name to content."""
    answer_is_hidden: bool = False
    """Whether the right answer is unknown. Every answer then has the reward 0, and no report counts the episode."""

    def __post_init__(self) -> None:
        names = [*self.texts, *(Path(path).name for path in self.files)]
        if len(set(names)) < len(names):
            raise ValueError(f"expected files and texts with different names, got {names}")


class QaEnvironment(Environment):
    needs_sandbox = True
    options_type = QaOptions
    instructions = (
        "The answer is a number, as few words as possible, or a comma-separated list of these, in plain text without "
        "LaTeX. Write numbers without thousands separators, and without units unless the question asks for them."
    )

    def __init__(self, services: Services, options: QaOptions) -> None:
        super().__init__(services, options)
        self._tool = services.required_sandbox.python_tool
        self._files: dict[str, bytes] = {}

    @classmethod
    def prompt(cls, problem: Problem) -> str:
        options = parse_options(cls, problem.options)
        names = ", ".join([*options.texts, *(Path(path).name for path in options.files)])
        attached = f"Attached files, in the working directory of your Python code: {names}\n\n" if names else ""
        return f"{problem.text}\n\n{attached}{cls.instructions}"

    async def reset(self, problem: Problem) -> InitialState:
        self._files = await asyncio.to_thread(_read_files, self.options)
        return InitialState(self.prompt(problem), (TOOL_SCHEMA,))

    async def step(self, action: ToolCallRequest) -> ToolCall:
        return await self._tool.call(action.name, action.arguments, files=self._files)

    async def score(self, episode: Episode) -> float | None:
        reward = exact_match_reward(episode)
        if reward is not None and self.options.answer_is_hidden:
            return 0.0
        return reward


def _read_files(options: QaOptions) -> dict[str, bytes]:
    """Return the content of all attached files by name. Raises `EnvironmentFailure`."""
    files, paths = {name: text.encode() for name, text in options.texts.items()}, [*map(Path, options.files)]
    try:
        size_mb = math.ceil((sum(map(len, files.values())) + sum(path.stat().st_size for path in paths)) / (1 << 20))
        if size_mb > MAX_FILES_MB:
            raise EnvironmentFailure(f"expected files of at most {MAX_FILES_MB} MiB, got {size_mb} MiB")
        files |= {path.name: path.read_bytes() for path in paths}
        Call("", files=files)  # raises `InvalidCall` if a call may not have these files
    except OSError as error:
        raise EnvironmentFailure(f"{error.filename}: cannot be read ({error.strerror})") from error
    except InvalidCall as error:
        raise EnvironmentFailure(str(error)) from error
    return files
