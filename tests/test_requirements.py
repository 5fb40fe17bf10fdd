"""Checks the locked versions in requirements/*.txt against pyproject.toml and the documents."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = {
    "runtime": PROJECT["dependencies"],
    "test": PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["bench"] + EXTRAS["cluster"],
    "train": PROJECT["dependencies"] + EXTRAS["train"],
    "publish": PROJECT["dependencies"] + EXTRAS["publish"],
    "kuberay": PROJECT["dependencies"] + EXTRAS["kuberay"],
}
GPU_PACKAGES = re.compile(r"(torch|triton|cuda-.*|nvidia-.*)$")


def locked(name: str) -> list[tuple[Requirement, str]]:
    """Return each pinned requirement of a file with its lines."""
    text = (REPOSITORY / "requirements" / f"{name}.txt").read_text()
    blocks = re.findall(r"^(?!#).*(?:\n[ ].*)*", text, re.MULTILINE)
    return [(Requirement(block.split("\\")[0]), block) for block in blocks if block]


@pytest.mark.parametrize("name", DECLARED)
def test_every_dependency_is_locked_within_its_range(name: str) -> None:
    pins = {requirement.name: requirement for requirement, _ in locked(name)}
    for declared in map(Requirement, DECLARED[name]):
        if declared.name != "torch":  # not locked, since its build depends on the machine's GPUs
            (pin,) = pins[declared.name].specifier
            assert pin.operator == "=="
            assert declared.specifier.contains(pin.version), f"{declared}: run make lock"


@pytest.mark.parametrize("name", DECLARED)
def test_every_locked_package_has_a_hash_and_none_depends_on_a_gpu(name: str) -> None:
    for requirement, block in locked(name):
        assert "--hash=sha256:" in block, requirement
        assert not GPU_PACKAGES.match(requirement.name)


def test_all_files_lock_the_same_versions() -> None:
    versions: dict[tuple[str, str], set[str]] = {}
    for name in DECLARED:
        for requirement, _ in locked(name):
            versions.setdefault((requirement.name, str(requirement.marker)), set()).add(str(requirement.specifier))
    assert {key: specifiers for key, specifiers in versions.items() if len(specifiers) > 1} == {}


def test_the_documents_name_the_tested_versions() -> None:
    document = (REPOSITORY / "docs/training.md").read_text()
    pins = {requirement.name: str(requirement.specifier).removeprefix("==") for requirement, _ in locked("train")}
    for name in ("trl", "transformers"):
        assert f"{name} {pins[name]}" in document
