"""Tests of the field `figures`: the figures of pyplot that are open at the end of the code are returned as PNG."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.types import Call, Result, Status
from tests.executor.calling import Caller, executor

PLOT = "import matplotlib.pyplot as plt\n"


@pytest.fixture(scope="module")
def plotting(guest_python: Path) -> Iterator[Caller]:
    with executor(guest_python) as caller:
        if caller.run("import matplotlib", memory_mb=1024).status is not Status.OK:
            pytest.skip("the guest runtime has no matplotlib")
        yield caller


def run(caller: Caller, code: str, **more: object) -> Result:
    return caller.run(code, **{"figures": True, "timeout_s": 60, "memory_mb": 1024, **more})


def png_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a PNG, from its header."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_open_figures_are_returned_in_the_order_of_their_numbers(plotting: Caller) -> None:
    code = PLOT + (
        "for size in (2, 3, 4):\n    plt.figure(figsize=(size, 1), dpi=100)\n    plt.plot([1, 2])\n"
        "plt.close(2)\nplt.show()"
    )
    result = run(plotting, code)
    assert (result.status, result.missing_files, result.truncated) == (Status.OK, (), ())
    assert {name: png_size(data) for name, data in result.files.items()} == {
        "figure-1.png": (200, 100),
        "figure-2.png": (400, 100),
    }


def test_figures_are_returned_after_an_error_or_exit(plotting: Caller) -> None:
    for end in ("1/0", "import sys\nsys.exit(3)"):
        result = run(plotting, f"{PLOT}plt.plot([1])\n{end}")
        assert (result.status, set(result.files)) == (Status.ERROR, {"figure-1.png"})


def test_code_without_pyplot_has_no_figures(guest: Caller) -> None:
    result = guest.run("import sys\n'matplotlib' in sys.modules", figures=True)
    assert (result.status, result.value, result.files, result.missing_files) == (Status.OK, "False", {}, ())


def test_figures_are_returned_only_if_they_are_requested(plotting: Caller) -> None:
    code = PLOT + "plt.plot([1])\nopen('a', 'w')\nNone"
    assert run(plotting, code, figures=False).files == {}
    assert set(run(plotting, code, figures=False, return_files=("*",)).files) == {"a"}


def test_a_figure_never_replaces_a_returned_file(plotting: Caller) -> None:
    code = PLOT + "plt.plot([1])\nplt.figure()\nopen('figure-1.png', 'w').write('own')\nNone"
    result = run(plotting, code, return_files=("*.png", "figure-3.png"))
    assert result.files["figure-1.png"] == b"own"
    assert set(result.files) == {"figure-1.png", "figure-2.png", "figure-4.png"}
    assert result.missing_files == ("figure-3.png",)


def test_more_figures_than_a_call_may_return_are_reported(plotting: Caller) -> None:
    code = (
        PLOT + "import warnings\nwarnings.simplefilter('ignore')\nfor _ in range(21): plt.figure(figsize=(1, 1))\nNone"
    )
    result = run(plotting, code)
    assert (result.status, len(result.files), result.truncated) == (Status.OK, 20, ("files",))


def test_figures_that_do_not_fit_are_reported_and_files_come_first(plotting: Caller) -> None:
    code = PLOT + "plt.plot([1])\nopen('big', 'wb').truncate((1 << 20) - 100)\nNone"
    result = run(plotting, code, return_files=("big",), disk_mb=1)
    assert (result.status, set(result.files), result.truncated) == (Status.OK, {"big"}, ("files",))


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        ("plt.gcf().savefig = None", "TypeError"),
        ("import sys\ndef fail(*a, **k): sys.exit(5)\nplt.gcf().savefig = fail", "SystemExit: 5"),
        ("plt.title('$')\nplt.title(r'$\\\\frac$')", "ValueError"),
    ],
)
def test_a_figure_that_cannot_be_rendered_leaves_the_status(plotting: Caller, break_it: str, error: str) -> None:
    result = run(plotting, f"{PLOT}plt.plot([1])\n{break_it}\nplt.figure()\n5")
    assert (result.status, result.value, result.error) == (Status.OK, "5", None)
    assert set(result.files) == {"figure-1.png"}, "the second figure is rendered"
    assert f"figure 1 was not rendered: {error}" in result.stderr


def test_code_that_replaces_pyplot_leaves_the_status(guest: Caller) -> None:
    for fake in (
        "5",
        "type('P', (), {'get_fignums': lambda: 1 / 0})",
        "type('P', (), {'get_fignums': lambda: ['x', None]})",
    ):
        result = guest.run(f"import sys\nsys.modules['matplotlib.pyplot'] = {fake}\n7", figures=True)
        assert (result.status, result.value, result.files) == (Status.OK, "7", {})


def test_rendering_counts_against_the_time_limit(guest: Caller) -> None:
    code = (
        "import sys\nclass Plot:\n    @staticmethod\n    def get_fignums(): return [1]\n"
        "    @staticmethod\n    def figure(number):\n        while True: pass\n"
        "sys.modules['matplotlib.pyplot'] = Plot"
    )
    assert guest.run(code, figures=True, timeout_s=0.5).status is Status.TIMEOUT


def test_forged_figures_are_bounded_and_only_returned_if_they_are_requested(guest: Caller) -> None:
    code = (
        "import os, struct\nfor i in range(100):\n"
        "    try: os.write(4, struct.pack('<IQ', 2**32 - 1, 2) + b'%02d' % i)\n"
        "    except OSError: break\nos._exit(0)"
    )
    forged = {f"figure-{number}.png": b"%02d" % (number - 1) for number in range(1, 21)}
    assert guest.run(code, figures=True).files == forged
    assert guest.run(code, return_files=("a",)).files == {}
    assert guest.run(code).files == {}


def test_figures_of_a_batch_are_those_of_each_call(plotting: Caller) -> None:
    from sandbox.types import Limits

    codes = [f"{PLOT}for _ in range({n}): plt.figure(figsize=(1, 1))\nNone" for n in (2, 0, 1)]
    calls = [Call(code, figures=True, limits=Limits(timeout_s=60, memory_mb=1024)) for code in codes]
    assert [len(result.files) for result in plotting.run_all(calls)] == [2, 0, 1]
