"""Tests of bench.gpu: a failure of a part is a finding, and the other parts run; bad input is one line; the pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.gpu_parts.check import Settings, Skipped
from bench.report import ROOT, read_results
from tests.bench import gpu_faults
from tests.bench.conftest import RefusedArguments, RunBenchmark

FAULTS = gpu_faults.__name__
DEVICE = {"holds": None, "card": "fails measures", "memory_gb": 1.0, "gpus": 0, "versions": {"torch": "9.9"}}
LONG_S = 300.0
"""Seconds that no part here needs, on a slow machine either."""


def settings(tmp_path: Path, checks: str = "", **changes: Any) -> Settings:
    return Settings(folder=str(tmp_path), device="cpu", card=checks, **changes)


def test_a_check_that_raises_or_is_skipped_is_a_finding_and_the_next_check_runs(tmp_path: Path) -> None:
    part = gpu.run_part(FAULTS, settings(tmp_path, "fails skips measures"), LONG_S)
    assert (part["ended"], part["error"]) == ("done", "")
    failed, skipped, measured = part["checks"]
    assert failed["check"] == "fails" and failed["holds"] is False
    assert failed["reason"].endswith("ValueError: the kernel is wrong") and "in fail" in failed["reason"]
    assert (skipped["holds"], skipped["reason"]) == (None, "needs 99.0 GB")
    assert (measured["holds"], measured["ratio"], measured["no_number"]) == (True, 0.5, None)


def test_a_part_that_crashes_keeps_its_findings_and_the_end_of_its_output(tmp_path: Path) -> None:
    part = gpu.run_part(FAULTS, settings(tmp_path, "measures crashes fails"), LONG_S)
    assert part["ended"] == "exit code 3"
    assert part["error"] == "the driver is lost"
    assert [check["holds"] for check in part["checks"]] == [True, False]
    assert part["checks"][1]["reason"] == "the part ended during this check: exit code 3"


def test_a_part_that_cannot_be_imported_is_a_finding(tmp_path: Path) -> None:
    part = gpu.run_part("tests.bench.no_such_part", settings(tmp_path), LONG_S)
    assert part["ended"] == "exit code 1" and part["checks"] == []
    assert "No module named 'tests.bench.no_such_part'" in part["error"]


def test_a_part_that_hangs_is_stopped_at_its_limit(tmp_path: Path) -> None:
    """The limit grows until the part has had the time to start, so that the test does not depend on the machine."""
    limit_s = 2.0
    part: dict[str, Any] = {"checks": []}
    while not part["checks"]:
        part = gpu.run_part(FAULTS, settings(tmp_path, "hangs"), limit_s)
        limit_s *= 2
    assert part["ended"] == "time limit"
    assert [check["reason"] for check in part["checks"]] == ["the part ended during this check: time limit"]


@pytest.fixture
def faulty_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the parts by ones of `gpu_faults`, and return the file for the result."""
    monkeypatch.setattr(gpu, "PARTS", {"loss": 60, "memory": 60})
    monkeypatch.setattr(gpu, "_device", lambda settings: DEVICE)
    run_part = gpu.run_part
    monkeypatch.setattr(gpu, "run_part", lambda module, settings, limit_s: run_part(FAULTS, settings, limit_s))
    return tmp_path / "result.json"


def test_the_file_has_the_result_after_each_part(
    faulty_parts: Path, run_benchmark: RunBenchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = gpu._write

    def keep(file: Path, result: Any) -> None:
        write(file, result)
        written.append(json.loads(file.read_bytes()))

    monkeypatch.setattr(gpu, "_write", keep)
    exit_code, result = run_benchmark(gpu.main, "--cpu", "--minutes", "60", "--out", str(faulty_parts))
    assert [list(file["parts"]) for file in written] == [["loss"], ["loss", "memory"]]
    assert written[-1]["parts"] == result["parts"] and written[-1]["machine"]["cores"] > 0
    assert exit_code == 1 and result["holds"] is False
    assert {row["name"]: row["measured"] for row in result["requirements"]} == {
        "checks that do not hold": 2,
        "parts that did not end by themselves": 0,
    }
    assert written[0]["command"] == result["command"] == "python -m bench.gpu --minutes 60.0 --cpu"


def test_parts_are_not_started_once_the_minutes_are_used_up(
    faulty_parts: Path, run_benchmark: RunBenchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PARTS", {"loss": 10**9, "memory": 60})
    monkeypatch.setattr(gpu, "_device", lambda settings: {**DEVICE, "card": "hangs"})
    exit_code, result = run_benchmark(gpu.main, "--cpu", "--minutes", "0.05", "--out", str(faulty_parts))
    assert exit_code == 1
    assert [part["ended"] for part in result["parts"].values()] == ["time limit", "not started"]
    assert result["parts"]["memory"]["error"] == "--minutes are used up"


def test_a_gpu_with_too_little_memory_skips_the_check_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = pytest.importorskip("bench.gpu_parts.memory", reason="needs torch and trl", exc_type=ImportError)
    monkeypatch.setattr(memory, "random_model", lambda *_: pytest.fail("a model was made"))
    large = memory.checks(Settings(folder=str(tmp_path), device="cuda", memory_gb=40.0))
    with pytest.raises(Skipped, match=r"needs \d+\.\d GB by the resource plan; 40\.0 GB are free"):
        large["1.5B, 16384 tokens"]()


def test_the_largest_model_with_gradient_checkpointing_fits_a_card_of_80_gb_by_the_plan() -> None:
    memory = pytest.importorskip("bench.gpu_parts.memory", reason="needs torch and trl", exc_type=ImportError)
    assert memory.planned_gb(memory.SHAPES["1.5B"], memory.MAX_TOKENS, True) < 79


def test_the_operations_of_a_token_are_six_per_parameter_and_those_of_attention() -> None:
    memory = pytest.importorskip("bench.gpu_parts.memory", reason="needs torch and trl", exc_type=ImportError)
    shape = memory.SHAPES["0.1B"]
    parameters, attention = memory.num_parameters(shape), 6 * 30 * 9 * 64 * 4096  # 30 layers, 9 heads of 64
    assert memory.flops_per_token(shape, 4096) == 6 * parameters + attention


@pytest.mark.parametrize("package", ["torch", "trl"])
def test_a_missing_package_is_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = gpu.find_spec
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == package else find_spec(name))
    assert gpu.main(["--cpu"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"but {package} cannot be imported; pip install '.[train]'" in line


def test_a_machine_without_a_gpu_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main(["--out", str(tmp_path / "result.json")]) == 1
    assert capsys.readouterr().err == "gpu: no GPU: torch can use no GPU; --cpu runs the same code on the CPU\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpu", "--pretrained", "/dev"], "--pretrained /dev: expected the folder of a model, with a config.json"),
        (["--cpu", "--parts", "loss,lost"], "unknown name 'lost'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, refused_arguments: RefusedArguments) -> None:
    assert message in refused_arguments(gpu.main, *arguments)


def test_the_page_names_the_parts_and_says_whether_a_gpu_has_run_them() -> None:
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(gpu.PARTS)
    assert ("No GPU has run this yet." in page) == ("gpu" not in read_results(ROOT / "bench/results"))


def test_the_wheels_of_the_page_are_the_locked_ones() -> None:
    """requirements/gpu.txt has no hashes, since `pip download` for another Python chooses other files."""
    locked = (ROOT / "requirements/test.txt").read_text() + (ROOT / "requirements/train.txt").read_text()
    pins = [line for line in (ROOT / "requirements/gpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert pins and [pin for pin in pins if f"\n{pin} " not in locked] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("needs_isolation")
def test_all_parts_run_on_a_cpu(tmp_path: Path, run_benchmark: RunBenchmark) -> None:
    """Each check holds or has a reason, and each part ends."""
    pytest.importorskip("trl", reason="needs trl")
    out = tmp_path / "result.json"
    exit_code, result = run_benchmark(gpu.main, "--cpu", "--minutes", "60", "--out", str(out))
    assert exit_code == 0, result["requirements"]
    assert list(result["parts"]) == list(gpu.PARTS)
    for name, part in result["parts"].items():
        assert part["checks"], f"{name} has no check"
        for check in part["checks"]:
            assert check["holds"] or check["reason"], f"{name}: {check}"
