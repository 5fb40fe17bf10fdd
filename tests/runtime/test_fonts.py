"""Tests of the change to matplotlib. tests/guest/test_profiles.py plots with the changed matplotlib."""

from __future__ import annotations

import pytest

from sandbox.runtime import fonts as runtime_fonts


def test_each_text_is_replaced_once() -> None:
    source = "\n".join(old for old, _ in runtime_fonts.REPLACEMENTS)
    assert runtime_fonts.patched(source) == "\n".join(new for _, new in runtime_fonts.REPLACEMENTS)


@pytest.mark.parametrize("times", [0, 2])
def test_another_version_of_matplotlib_is_refused(times: int) -> None:
    source = "\n".join(old for old, _ in runtime_fonts.REPLACEMENTS[1:])
    with pytest.raises(ValueError, match="adapt REPLACEMENTS"):
        runtime_fonts.patched(source + times * runtime_fonts.REPLACEMENTS[0][0])
