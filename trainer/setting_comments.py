"""The comments of the settings in `trainer.config`, which describe them for people.

The reference page of all settings and the files of `rstar-train init` have their descriptions from here.
"""

from __future__ import annotations

import inspect
import io
import tokenize

from trainer.config import RunConfig


def setting_comments(cls: type) -> dict[str, str]:
    """Return the comment of each setting of a dataclass of `trainer.config`, those of its base classes included."""
    return {name: text for base in reversed(cls.__mro__[:-1]) for name, text in _field_comments(base).items()}


def _field_comments(cls: type) -> dict[str, str]:
    """Return the comments at the fields of a class: the lines above a field and the one beside it. A comment below a
    field continues the field's comment if it begins with a small letter."""
    if cls.__module__ != RunConfig.__module__:
        return {}
    comments: dict[str, str] = {}
    above, last, name = "", "", ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        text = token.string.removeprefix("# ")
        if token.type == tokenize.NAME and token.line.strip().startswith(f"{token.string}:") and token.start[1] == 4:
            name = last = token.string
            comments[name], above = above, ""
        elif token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            if last and text[:1].islower():
                comments[last] += f" {text}"
            else:
                above, last = f"{above} {text}".strip(), ""
        elif token.type == tokenize.COMMENT and name:
            comments[name] = f"{comments[name]} {text}".strip()
    return comments
