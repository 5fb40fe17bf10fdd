"""The answer checker: compares answers in the sandbox."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sandbox.client import AsyncClient
from sandbox.errors import ServiceError
from sandbox.types import Limits, Outcome, Strictness
from trainer.episodes.reward import VerifyOutcome

logger = logging.getLogger(__name__)


class AnswerChecker:
    """Checks answers through `client`, each pair within `limits`, by the rules of `strictness` and `rounding`."""

    def __init__(
        self, client: AsyncClient, limits: Limits, strictness: str = Strictness.STRICT, rounding: bool = False
    ) -> None:
        self._client, self._limits = client, limits
        self._rules = {"strictness": strictness, "rounding": rounding}

    async def verify(self, pairs: Sequence[tuple[str, str]]) -> list[VerifyOutcome]:
        """Compare pairs (the problem's answer, the model's answer), in order. Raises nothing but cancellation.

        If the sandbox rejects a pair as `invalid`, that is a bug of the trainer. The error is logged, and the outcome
        of the pair is `UNAVAILABLE`.
        """
        try:
            verdicts = await self._client.verify(pairs, limits=self._limits, **self._rules)
        except ServiceError as error:
            logger.warning("%d answers could not be checked: %s", len(pairs), error)
            return [VerifyOutcome.UNAVAILABLE] * len(pairs)
        for verdict in verdicts:
            if verdict.outcome is Outcome.INVALID:
                logger.error("the trainer sent a malformed pair of answers: %s", verdict.message)
        return [
            VerifyOutcome.UNAVAILABLE if verdict.outcome is Outcome.INVALID else VerifyOutcome(verdict.outcome.value)
            for verdict in verdicts
        ]
