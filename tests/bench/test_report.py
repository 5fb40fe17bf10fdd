"""Tests of bench.report, which writes the tables of the committed results into the documents, and detects a difference.

`RESULTS` are invented results with the fields that tables need. `EXPECTED` has, for each result, parts of its tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import report, roc, scaling
from bench.harness.command import BenchFailed
from bench.harness.requirements import none_of

MACHINE = {
    "cpu": "Z80",
    "cores": 2,
    "kernel": "6.1",
    "load": [0.5],
    "commit": "abc",
    "date": "2026-01-02T03:04:05",
}
LOAD = {"calls": 45000, "calls_per_s": 321.4, "cpu_ms": 3.21, "latency_ms": {"p50": 1.5, "p90": 2.0, "p99": 140_000.0}}
POINTS = {"p50": 5.0, "p90": 60.5, "p99": 200.0}

MEAN_HALF = {"mean": 0.5, "sd": 0.1}
ROC_ROW = dict.fromkeys((*roc.MEASURES, *roc.COSTS), MEAN_HALF)

RESULTS: dict[str, dict[str, Any]] = {
    "burst": {
        "burst": LOAD, "steady": LOAD, "lost": 1, "doubled": 2, "mismatched": 3, "ratio": 0.95,
        "memory_mb": {"idle": 600, "peak": 1400}, "requirements": none_of({"lost": 1, "doubled": 2}),
    },
    "burst-loops": {
        "command": "python -m bench.burst --loops 0.01", "loops": 0.01, "loop_s": 1.0,
        "burst": {**LOAD, "short_ms": POINTS}, "steady": {**LOAD, "short_ms": {"p50": 7.0, "p90": 8.0, "p99": 9.0}},
        "lost": 0, "doubled": 0, "mismatched": 0, "ratio": 1.0, "memory_mb": {"idle": 600, "peak": 1400},
    },
    "mixed": {
        "traffic": {"rate": 9.5, "without_loops": {"short_ms": POINTS}, "with_loops": {"short_ms": POINTS, "loops": 6}},
        "loops": {"loops": 40, "baseline_ms": POINTS, "arriving_ms": POINTS, "under_loops_ms": POINTS},
    },
    "mixed-tenants": {
        "command": "python -m bench.mixed --parts tenants",
        "tenants": {"sleeping": 1000, "alone_ms": POINTS, "beside_ms": {"p50": 7.0, "p90": 8.0, "p99": 9.0}},
    },
    "invariance": {
        "calls": 100, "known": 40, "loops": 5, "load": 4, "changed": [{}], "misjudged": ["a", "b"], "unstable": ["c"],
        "corpus": {"from": "snippets.jsonl", "calls": 60},
    },
    "gpu": {
        "device": {"card": "Tesla", "memory_gb": 80.0, "versions": {"torch": "2.9", "vllm": None}},
        "wheels": {"trl-1.16.0-py3-none-any.whl": 948_205}, "requirements": none_of({"checks that do not hold": 1}),
        "parts": {
            "loss": {"ended": "done", "seconds": 12.3, "cpu_s": 20.0, "checks": [
                {"check": "float32", "holds": True, "gradient_error": 1.5e-7, "kernel": "triton"},
                {"check": "bfloat16", "holds": False, "reason": "Traceback\nValueError: a | b"},
            ]},
            "vllm": {"ended": "time limit", "seconds": 60.0, "cpu_s": 9.0, "checks": [
                {"check": "sleep mode", "holds": None, "reason": "no vLLM"}
            ]},
        },
    },
    "layers": {
        "profiles": {
            name: {
                "steps": {step: {"cpu_ms": ms} for step, ms in (("floor", 1.0), ("os.fork", 1.25), ("http", 1.9))},
                "ratio": ratio, "ratio_os_fork": 1.52,
            }
            for name, ratio in (("bare", 1.9), ("symbolic", 1.2))
        },
    },
    "scaling": {
        "calls": 45_000, "endless_core_s": 4500, "bytes": 900, "gateway_calls_per_core_s": 18_282,
        "executor_calls_per_core_s": 2500, "kinds": {"mix": scaling.estimate(45_000, 88.3)},
        "memory": {
            "print": {"idle_mb": 832, "call_kb": 1.52, "running_mb": 5, "total_mb": 899},
            "mix": {"idle_mb": 832, "call_kb": 2.52, "running_mb": 250, "total_mb": 1190},
        },
        "measured_on": {"burst": {"commit": "abc"}, "mixed": {"commit": "def+"}},
    },
    "leaks": {
        "calls": 4000, "warm_up": 2000, "grown": {}, "leftovers": ["a mount"],
        "snapshots": [{"calls": 1000 * n, "memory_mb": 600.0 + n} for n in range(1, 5)],
    },
    "gateway": {"batch": 64, "calls_per_s": 9876.5, "cpu_us": 101.2},
    "peers": {
        "systems": ["ours", "code-judge"],
        "kinds": {
            "print": {
                "ours": {"calls": 100, "calls_per_s": 500.0, "mismatched": 0, "unanswered": 0},
                "code-judge": {"calls": 40, "calls_per_s": 12.5, "mismatched": 1, "unanswered": 9},
            },
            "mix": {"ours": {"calls": 1, "calls_per_s": 1.0, "mismatched": 0, "unanswered": 0}},
        },
        "loads": {"burst": {"ours": {"calls": 1000, "correct": 1000, "latency_ms": {"p50": 250.0}}}},
    },
    "roc": {
        "seeds": 2, "steps": 30, "group": 8, "names": {"roc": "RoC, 2G to G", "grpo-g": "GRPO, all of G"},
        "arms": {
            "roc": {**ROC_ROW, "accuracy": {"mean": 0.85, "sd": 0.01}, "episodes": {"mean": 7680.0, "sd": 0.0},
                    "sampled_tokens": {"mean": 231373.4, "sd": 2309.2}},
            "grpo-g": {**ROC_ROW, "tool_error_ratio_correct": None},
        },
        "differences": {"grpo-g": {"accuracy": {"mean": -0.0123, "sd": 0.004}}},
    },
    "rollouts": {
        "command": "python -m bench.rollouts --engines 2", "is_simulated": False, "engines": 2, "capacity": 4096,
        "episodes": 96, "max_response_tokens": 896, "repeats": 3,
        "policies": {
            "kv": {
                "makespan_s": 20.55, "kv_makespan_ratio": 1.0,
                "preemptions": 1.0, "recomputed_tokens": 1234.0,
                "prefix_hit_rate": 0.715, "kv_use": 0.6, "idle_share": 0.05,
                "service_s": {"p50": 1.0, "p95": 8.0}, "latency_s": {"p50": 9.0, "p95": 19.0},
            },
        },
        "validation": {"kv": {"makespan": -0.05, "worst_round": 0.08, "preemptions": 1.25, "prefix_hit_rate": 0.031}},
        "requirements": [{"name": "makespan / static's", "bound": "≤ 1", "measured": 1.234, "holds": False}],
    },
}  # fmt: skip
EXPECTED = {
    "burst-loops": [
        "1 % are endless loops; each ends as `timeout` after 1 s of virtual time. "
        "p50 / p90 / p99 of the other calls: 5.0 / 60.5 / 200 ms at once, 7.0 / 8.0 / 9.0 ms in the steady load.",
        "<sub>`python -m bench.burst --loops 0.01` on",
    ],
    "burst": [
        "| all at once | 45,000 | 321 | 1.5 / 140,000 | 3.21 |",
        "1 lost, 2 doubled, 3 mismatched",
        "0.95 of the",
        "1,400 MiB at the peak.",
        "Not met: lost is 1, expected ≤ 0; doubled is 2, expected ≤ 0.",
    ],
    "mixed": [
        "| the same with 6 endless loops | 5.0 / 60.5 / 200 |",
        "| the same in the first second of 40 endless loops | 5.0 / 60.5 / 200 |",
        "| the same after that second | 5.0 / 60.5 / 200 |",
    ],
    "mixed-tenants": [
        "| one `print` after another of one tenant | 5.0 / 60.5 / 200 |",
        "| the same beside 1,000 sleeping calls of another tenant | 7.0 / 8.0 / 9.0 |",
    ],
    "invariance": [
        "100 calls alone",
        "beside 5 endless loops and 4 busy",
        "1 statuses or outputs changed; 1 calls that differ from themselves are left out",
        "60 of the calls are a corpus (snippets.jsonl); 40 need",
        "2 misjudged",
    ],
    "gpu": [
        "Tesla, 80 GB free; torch 2.9.\n",
        "| loss | 12 | 20 | done |\n| vllm | 60 | 9 | time limit |",
        "| loss: float32 | yes | gradient error 1.5e-07; kernel triton |",
        "| loss: bfloat16 | **no** | ValueError: a / b |",
        "| vllm: sleep mode | - | no vLLM |",
        "| trl-1.16.0 | 948 |",
        "Not met: checks that do not hold is 1, expected ≤ 0.",
    ],
    "layers": [
        "| bare | 1.00 | 1.25 | 1.90 | 1.90× | 1.52× |",
        "At most 1.6 times fork, run and exit by os.fork: all; by the cheapest fork: all but bare.",
    ],
    "scaling": [
        "the mix of real traffic: 88.3 ms of CPU per call, 3,974 core seconds",
        "| all at once | 45,000 | 3,974 | 40.5 |",
        "| over 60 s | 750 | 67 | 0.7 |",
        "832 MiB without calls, 1.5 KiB per call of `print(1 + 1)` in flight, 899 MiB in total (5 of it",
        "and 2.5 KiB per call of the mix of real traffic in flight, 1,190 MiB in total (250 of it",
        "an executor's 2,500 of `print(1 + 1)`;",
        "at these commits: burst of abc, mixed of def+.",
        "they need 4,500 further core seconds",
    ],
    "leaks": ["that grew during 4,000 calls", ": nothing (memory by +2.0 MiB to 604)", "after its end: a mount."],
    "gateway": ["9,876 calls/s, 101 µs"],
    "roc": [
        "| RoC, 2G to G | 0.850 ± 0.010 | 0.500 ± 0.100 | 0.500 ± 0.100 | 0.500 ± 0.100 |",
        "| 7,680 ± 0 | 231,373 ± 2,309 | 0.500 ± 0.100 |",
        "| GRPO, all of G | 0.500 ± 0.100 | - |",
        "| RoC less GRPO, all of G | -0.012 ± 0.004 | - |",
        "2 seeds, 30 steps, G = 8",
    ],
    "rollouts": [
        "vLLM on the CPU: 2 engines of 4,096 tokens, 96 episodes of at most 896 tokens",
        "tokens. Medians of 3 rounds.",
        "| `kv` | 20.6 | 1.00 | 1 | 1,234 | 0.71 | 0.60 | 0.05 | 1.0 / 8.0 | 9.0 / 19.0 |",
        "| `kv` | -5.0% | +8.0% | 1.25× | +3.1 |",
        "| makespan / static's | ≤ 1 | 1.23 | **no** |",
        "<sub>`python -m bench.rollouts --engines 2` on",
    ],
    "peers": [
        "| `print(1 + 1)` | 500 | 12.5 (25.0 %) |",
        "| the mix of real traffic | 1.0 | - |",
        "| 1,000 `print`, 256 at once | 100.0 % (0.25) | - |",
        "Not running there: SandboxFusion, ScaleBox.",
    ],
}


def test_the_documents_have_the_tables_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().err


def test_every_committed_result_has_a_table() -> None:
    for name, result in report.read_results(report.RESULTS).items():
        assert result["bench"] == name.partition("-")[0]
        assert f"python -m bench.{result['bench']}" in report.table_of(name, result)


@pytest.mark.parametrize("name", RESULTS)
def test_a_table_has_the_values_of_its_result(name: str) -> None:
    text = report.table_of(name, {**RESULTS[name], "machine": MACHINE})
    for part in EXPECTED[name]:
        assert part in text
    assert text.endswith("on 2 cores of Z80, Linux 6.1, load 0.5 at its end; commit abc, 2026-01-02</sub>\n")


def test_only_text_between_the_markers_changes() -> None:
    block_without_result = "<!-- numbers: burst -->\n<!-- /numbers -->\n"
    text = f"before\n<!-- numbers: gateway -->\nold\n<!-- /numbers -->\nafter\n{block_without_result}"
    results = {"gateway": {**RESULTS["gateway"], "machine": MACHINE}}
    filled = report.filled(text, results)
    assert filled.startswith("before\n<!-- numbers: gateway -->\nOne gateway process") and "old" not in filled
    assert filled.endswith(f"</sub>\n<!-- /numbers -->\nafter\n{block_without_result}")
    assert report.filled(filled, results) == filled


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<!-- numbers: nonsense -->\n<!-- /numbers -->", "'nonsense'"),
        ("<!-- numbers: gateway -->\nno end", "after each"),
        ("<!-- numbers: gateway --> in a line <!-- /numbers -->", "after each"),
    ],
)
def test_a_block_that_no_benchmark_fills_is_refused(text: str, error: str) -> None:
    with pytest.raises(BenchFailed, match=error):
        report.filled(text, {})


def test_a_difference_fails_the_check_and_is_removed_by_writing_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results_dir = tmp_path / "results"
    results_dir.mkdir()
    (results_dir / "gateway.json").write_text(
        json.dumps({"bench": "gateway", **RESULTS["gateway"], "machine": MACHINE})
    )
    (tmp_path / "README.md").write_text("<!-- numbers: gateway -->\n<!-- /numbers -->\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", results_dir)
    assert report.main(["--check"]) == 1
    assert "README.md: differs from bench/results" in capsys.readouterr().err
    assert report.main(["--tables", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["differ"] == ["README.md"]
    assert report.main(["--check"]) == 0
    assert "9,876 calls/s" in (tmp_path / "README.md").read_text()


def test_every_plot_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[bench]')")
    assert report.main(["--plots", str(tmp_path), "--json"]) == 0
    files = json.loads(capsys.readouterr().out.splitlines()[-1])["plots"]
    assert files and all(Path(file).read_bytes().startswith(b"\x89PNG") for file in files)


def test_the_summary_follows_the_results() -> None:
    results = report.read_results(report.RESULTS)
    text = "<!-- numbers: summary -->\n<!-- /numbers -->\n"
    assert "20,000 calls during 293 kills: 0 lost" in report.filled(text, results)  # as in results/chaos.json
    results["chaos"] = {**results["chaos"], "calls": 5, "lost": 3}
    assert "5 calls during 293 kills: 3 lost" in report.filled(text, results)
    del results["burst"]
    assert report.filled(text, results) == text  # a summary without all of its results stays empty
