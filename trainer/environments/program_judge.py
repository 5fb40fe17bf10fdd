"""The judge of programs: runs a program against tests in the sandbox."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sandbox.client import AsyncClient
from sandbox.errors import InvalidCall, ServiceError
from sandbox.types import Limits

logger = logging.getLogger(__name__)


class ProgramJudge:
    """Judges programs through `client`, each within `limits`. A program's own limits take precedence."""

    def __init__(self, client: AsyncClient, limits: Limits) -> None:
        self._client, self._limits = client, limits

    async def reward(self, program: Mapping[str, Any], *, partial: bool) -> float | None:
        """Return the reward of a program, as `AsyncClient.rewards` does. If the sandbox does not answer, the reward is
        None. Raises nothing but cancellation."""
        try:
            limits = {**asdict(self._limits), **program.get("limits", {})}
            (reward,) = await self._client.rewards([{**program, "limits": limits}], partial=partial)
        except ServiceError as error:
            logger.warning("a program could not be judged: %s", error)
            return None
        except InvalidCall as error:  # the model's code is invalid, for example too long; the options were checked
            logger.warning("a program is no valid call: %s", error)
            return 0.0
        return reward
