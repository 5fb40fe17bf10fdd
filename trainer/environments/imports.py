"""Imports the classes and functions of the user that a setting or a problem names as `package.module:name`."""

from __future__ import annotations

import importlib
from typing import Any


def import_named(path: str) -> Any:
    """Return what `package.module:name` names. Raises `ImportError` with the reason if that is impossible."""
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f"cannot be imported ({error})") from error
    except Exception as error:  # of the module's own code
        raise ImportError(f"cannot be imported ({type(error).__name__}: {error})") from error
