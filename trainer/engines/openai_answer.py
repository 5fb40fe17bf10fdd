"""The answers of an OpenAI-compatible server: their JSON, the alignment of their log-probabilities, and Retry-After."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

REPLACEMENT = "\ufffd"
"""The character that decoders put in place of incomplete characters. A token whose text has it cannot be identified by
its text."""
LOGPROB_TOLERANCE = 1e-3

Logprob = Annotated[float, Field(lt=LOGPROB_TOLERANCE, allow_inf_nan=False)]


class _Token(BaseModel, strict=True):
    token: str
    logprob: Logprob
    id: NonNegativeInt | None = None


class _Logprobs(BaseModel, strict=True):
    """Either `content`, or the two lists."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[Logprob] | None = None


class Choice(BaseModel, strict=True):
    text: str | None
    """Some servers send null if the content filter has removed the text."""
    finish_reason: str
    logprobs: Any = None
    """Log-probabilities in any form. `_Logprobs` checks them when they are used. If they are invalid, they count as
    unknown."""
    token_ids: list[NonNegativeInt] | None = None


class Completion(BaseModel, strict=True):
    choices: tuple[Choice]


def aligned_logprobs(choice: Choice, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[float] | None:
    """Return the log-probability of each id. None if the server's tokens are not exactly these ids.

    If the server gives no id for a token, the token is compared by its text. A text that is only a part of a character
    never matches.
    """
    try:
        given = _Logprobs.model_validate(choice.logprobs)
    except ValidationError:
        return None
    tokens: Sequence[int | str]
    if given.content is not None:
        tokens = [token.token if token.id is None else token.id for token in given.content]
        logprobs = [token.logprob for token in given.content]
    else:
        tokens, logprobs = choice.token_ids or given.tokens or [], given.token_logprobs or []
    if not len(tokens) == len(logprobs) == len(ids):
        return None
    pairs = zip(tokens, ids, strict=True)
    is_aligned = all(token == id or (token == decode([id]) and REPLACEMENT not in str(token)) for token, id in pairs)
    return logprobs if is_aligned else None


def retry_after_s(value: str) -> float | None:
    """Parse the header Retry-After: seconds, or a date. Return None if it is neither."""
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # TypeError: a date without a time zone
        return None
