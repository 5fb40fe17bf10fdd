"""The programs of examples/, as modules."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def load_example(name: str) -> Any:
    """Return the module of `examples/NAME.py`, without running its `main`."""
    spec = importlib.util.spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
