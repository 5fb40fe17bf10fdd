"""Tests of the missing modules that a profile reports. Each is reported once. If warm-up code fails because a module is
missing, only the missing module is reported, not the failure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import sandbox
from sandbox.errors import IsolationError
from sandbox.executor import run_once
from sandbox.jail import choose_level
from sandbox.settings.server import ISOLATION_LEVELS, ExecutorConfig
from sandbox.types import Call, Limits, Profile
from tests.executor.calling import OWN_PYTHON

GUEST = Path(sandbox.__file__).parent / "guest"
LOAD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import profiles
print(json.dumps(profiles.load(sys.argv[2])))
"""


def load(python: str | Path, profile: str) -> tuple[list[str], list[str]]:
    argv = [python, "-I", "-S", "-c", LOAD, str(GUEST), profile]  # -S: without any installed packages
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    missing, problems = json.loads(done.stdout)
    return missing, problems


@pytest.mark.parametrize(
    ("profile", "missing"),
    [
        ("bare", []),
        ("numeric", ["numpy"]),
        ("scientific", ["matplotlib", "mpmath", "networkx", "numpy", "pandas", "scipy", "sympy"]),
    ],
)
def test_missing_packages_are_reported_and_cause_no_other_problem(profile: str, missing: list[str]) -> None:
    assert load(OWN_PYTHON, profile) == (missing, [])


def test_a_repeated_load_and_a_child_profile_report_the_same_missing_packages_again() -> None:
    """A zygote of profile `symbolic` is forked from a zygote that has loaded the profile `numeric`."""
    code = LOAD.replace("import profiles\n", "import profiles\nprofiles.load('numeric')\n")
    for profile, missing in (("numeric", ["numpy"]), ("symbolic", ["mpmath", "numpy", "sympy"])):
        argv = [OWN_PYTHON, "-I", "-S", "-c", code, str(GUEST), profile]
        assert json.loads(subprocess.run(argv, capture_output=True, check=True).stdout) == [missing, []]


def test_a_module_that_exists_and_cannot_be_imported_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('libopenblas.so is missing')")
    code = LOAD.replace("import profiles", f"sys.path.append({str(tmp_path)!r}); import profiles")
    done = subprocess.run([OWN_PYTHON, "-I", "-S", "-c", code, str(GUEST), "numeric"], capture_output=True, check=True)
    missing, problems = json.loads(done.stdout)
    assert (missing, problems[0]) == ([], "numeric: libopenblas.so is missing")


PLOT = """
import matplotlib.pyplot as plt
import os
plt.plot([1, 2], label="$x^2$"), plt.title("Ä"), plt.legend()
plt.savefig("plot.png")
with open("plot.png", "rb") as file:
    print(file.read(4), os.listdir(), plt.get_backend())
"""


@pytest.mark.parametrize("level", ISOLATION_LEVELS)
def test_a_plot_writes_nothing_but_its_file(guest_python: Path, level: str) -> None:
    config = _config_at(level, guest_python)
    for profile in (Profile.SCIENTIFIC, Profile.BARE):  # SCIENTIFIC's zygote has loaded matplotlib; BARE's has not
        result = run_once(Call(PLOT, profile=profile, limits=Limits(timeout_s=60)), config)
        assert (result.stdout, result.stderr) == ("b'\\x89PNG' ['plot.png'] Agg\n", "")


@pytest.mark.usefixtures("needs_isolation")
def test_a_call_that_imports_matplotlib_finds_it_loaded(guest_python: Path) -> None:
    """The imports of a code select the profile, whose zygote has loaded the modules before the code starts."""
    code = "import sys\nprint('matplotlib.pyplot' in sys.modules)\nfrom matplotlib import pyplot"
    assert run_once(Call(code), ExecutorConfig(python=str(guest_python))).stdout == "True\n"


def _config_at(level: str, python: Path) -> ExecutorConfig:
    try:
        return ExecutorConfig(python=str(python), isolation=choose_level(level).level.value)
    except IsolationError as error:
        pytest.skip(str(error))
