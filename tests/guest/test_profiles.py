"""A missing module is reported once. The failure of warm-up code that needs it is not reported as well."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import sandbox
from tests.executor.calling import OWN_PYTHON

GUEST = Path(sandbox.__file__).parent / "guest"
LOAD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import profiles
print(json.dumps(profiles.load(sys.argv[2])))
"""


def load(python: str | Path, profile: str) -> tuple[list[str], list[str]]:
    argv = [python, "-I", "-S", "-c", LOAD, str(GUEST), profile]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    missing, problems = json.loads(done.stdout)
    return missing, problems


@pytest.mark.parametrize(
    ("profile", "missing"),
    [
        ("bare", []),
        ("numeric", ["numpy"]),
        ("scientific", ["mpmath", "networkx", "numpy", "pandas", "scipy", "sympy"]),
    ],
)
def test_missing_packages_are_reported_and_cause_no_other_problem(profile: str, missing: list[str]) -> None:
    assert load(OWN_PYTHON, profile) == (missing, [])


def test_a_module_that_exists_and_cannot_be_imported_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('libopenblas.so is missing')")
    code = LOAD.replace("import profiles", f"sys.path.append({str(tmp_path)!r}); import profiles")
    done = subprocess.run([OWN_PYTHON, "-I", "-S", "-c", code, str(GUEST), "numeric"], capture_output=True, check=True)
    missing, problems = json.loads(done.stdout)
    assert (missing, problems[0]) == ([], "numeric: libopenblas.so is missing")
