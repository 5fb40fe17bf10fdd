"""The trainer on one GPU, in parts, each in a process of its own with a time limit.

    python -m bench.gpu --minutes 10 --json          # on a GPU: CUDA or ROCm
    python -m bench.gpu --cpu --json                 # the same code on a CPU, with small sizes

| part     | shows                                                                                               |
|----------|-----------------------------------------------------------------------------------------------------|
| loss     | the loss and the gradients are those of TRL, in float32 and bfloat16                                |
| memory   | peak memory against the resource plan, tokens per second, the share of the card's matrix peak        |
| engine   | the local engine's tokens per second, and its log-probabilities against the trainer's                |
| recipe   | the tiny recipe, resumed after kill -9; a pretrained model that learns the Python tool               |
| training | device placement, bfloat16, sharding, checkpoints and their sizes, LoRA                              |
| vllm     | weight sync by file and by broadcast, a mixture of experts, sleep mode, where vLLM is installed      |

The parts run in this order, and the file `--out` gets the result after each of them. So a run that is cut off leaves
what it has found. A check that fails, a part that crashes and a part that exceeds its limit are findings: the next part
runs all the same. Nothing needs a network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.gpu_parts.__main__ import last_lines
from bench.gpu_parts.check import Settings
from bench.harness import arguments, command, requirements
from bench.harness.tables import Block, Result, Table

PARTS = {"loss": 60, "memory": 120, "engine": 50, "recipe": 240, "training": 100, "vllm": 200}
"""Seconds that each part may take in a run of `DEFAULT_MINUTES`, if so many are left. Longer and shorter runs have
limits in proportion."""
DEFAULT_MINUTES = 10.0
DEVICE_LIMIT_S = 120.0
"""Seconds within which the device must answer. The first import of torch may take a minute."""
STOP_TIMEOUT_S = 5.0
"""Seconds from SIGTERM to SIGKILL. A part stops its sandbox and its servers on SIGTERM."""
PACKAGES = ("torch", "transformers", "accelerate", "trl", "datasets", "peft", "pydantic", "trio", "aiohttp", "pyarrow")
VLLM_PYTHON = "RSTAR_VLLM_PYTHON"
OUT = Path("runs/gpu.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Return exit code 1 if a check does not hold or a part did not end."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("gpu", __doc__, "python", "isolation")
    minutes = f"for all parts together (default: {DEFAULT_MINUTES:g})"
    parser.add_argument("--minutes", type=arguments.seconds, default=DEFAULT_MINUTES, help=minutes)
    parser.add_argument("--parts", type=arguments.names_of(PARTS), default=tuple(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, with small sizes")
    parser.add_argument("--pretrained", type=Path, metavar="DIR", help="folder of a pretrained model for the recipe")
    parser.add_argument("--vllm", metavar="PYTHON", help=f"Python with vLLM (default: ${VLLM_PYTHON}, or this Python)")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="folder of wheels to list with their sizes")
    parser.add_argument("--out", type=Path, default=OUT, help=f"file for the result after each part (default: {OUT})")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.pretrained and not (args.pretrained / "config.json").is_file():
        raise command.Misuse(f"--pretrained {args.pretrained}: expected the folder of a model, with a config.json")
    if missing := [name for name in PACKAGES if not find_spec(name)]:
        raise command.BenchFailed(
            f"expected the packages of the extra `train`, but {', '.join(missing)} cannot be imported; "
            "pip install '.[train]', or bring the wheels that docs/gpu.md lists"
        )
    is_installed = [sys.executable, "-I", "-c", "import sandbox, trainer"]  # as the sandbox starts its own processes
    if subprocess.run(is_installed, stderr=subprocess.DEVNULL, check=False).returncode:
        raise command.BenchFailed(f"{sys.executable}: expected the project to be installed; pip install --no-deps .")
    give_up_at = perf_counter() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        settings = Settings(
            folder=folder,
            device="cpu" if args.cpu else "cuda",
            pretrained=str(args.pretrained.absolute()) if args.pretrained else "",
            vllm=args.vllm or os.environ.get(VLLM_PYTHON) or (sys.executable if find_spec("vllm") else ""),
            python=args.python or sys.executable,
            isolation=args.isolation,
        )
        device = _device(settings)
        wheels = {file.name: file.stat().st_size for file in sorted(args.wheels.glob("*.whl"))} if args.wheels else {}
        result: dict[str, Any] = {"device": device, "minutes": args.minutes, "wheels": wheels, "parts": {}}
        card = {name: device[name] for name in ("card", "memory_gb", "gpus")}
        for part in args.parts:
            limit_s = min(PARTS[part] * args.minutes / DEFAULT_MINUTES, give_up_at - perf_counter())
            print(f"gpu: {part}, at most {limit_s:.0f} s", file=sys.stderr, flush=True)
            result["parts"][part] = run_part(f"bench.gpu_parts.{part}", Settings(**asdict(settings) | card), limit_s)
            about = {"command": arguments.command_line(_parser(), args), "machine": command.machine()}
            _write(args.out, {"bench": "gpu", **summarize(result), **about})
    return summarize(result)


def _device(settings: Settings) -> dict[str, Any]:
    """Return the finding about the device. Raises `BenchFailed` if it cannot be used."""
    part = run_part("bench.gpu_parts.device", settings, DEVICE_LIMIT_S)
    (device,) = part["checks"] or [{"holds": False, "reason": part["error"]}]
    if device["holds"] is False:
        raise command.BenchFailed(f"no GPU: {device['reason']}; --cpu runs the same code on the CPU")
    return dict(device)


@dataclass(frozen=True, slots=True)
class _Ended:
    """How the process of a part ended."""

    how: str
    """"done", "time limit" or "exit code N"."""
    output: str


def run_part(module: str, settings: Settings, limit_s: float) -> dict[str, Any]:
    """Run the part in `module` for at most `limit_s` seconds.

    Return how it ended, its seconds and CPU seconds, the findings of its checks and, if it did not end by itself, the
    last lines of its output.
    """
    if limit_s <= 0:
        return {"ended": "not started", "seconds": 0.0, "cpu_s": 0.0, "checks": [], "error": "--minutes are used up"}
    folder = Path(tempfile.mkdtemp(dir=settings.folder))
    file, started_at, cpu_s_before = folder.with_suffix(".jsonl"), perf_counter(), command.children_cpu_s()
    file.touch()
    settings_json = json.dumps({**asdict(settings), "folder": str(folder)})
    ended = _run([sys.executable, "-m", "bench.gpu_parts", module, settings_json, str(file)], limit_s)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    checks = [row for row in rows if "holds" in row]
    if len(rows) > 2 * len(checks):  # the last check has started and not ended
        checks.append({**rows[-1], "holds": False, "reason": f"the part ended during this check: {ended.how}"})
    error = "" if ended.how == "done" else last_lines(ended.output)
    seconds, cpu_s = perf_counter() - started_at, command.children_cpu_s() - cpu_s_before
    return {
        "ended": ended.how, "seconds": round(seconds, 1), "cpu_s": round(cpu_s, 1), "checks": checks, "error": error,
    }  # fmt: skip


def _run(part: Sequence[str], limit_s: float) -> _Ended:
    """Run a command in a process group of its own, and stop the group at the limit."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(part, stdout=log, stderr=subprocess.STDOUT, process_group=0)
        try:
            exit_code = process.wait(limit_s)
            how = "done" if exit_code == 0 else f"exit code {exit_code}"
        except subprocess.TimeoutExpired:
            how = "time limit"
        finally:
            _stop(process)
        log.seek(0)
        return _Ended(how, log.read().decode("utf-8", "replace"))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End all processes of the group: by SIGTERM, and after `STOP_TIMEOUT_S` by SIGKILL."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with its requirements: every check holds, and every part ends by itself."""
    checks = [check for part in result["parts"].values() for check in part["checks"]]
    counts = {
        "checks that do not hold": sum(check["holds"] is False for check in checks),
        "parts that did not end by themselves": sum(part["ended"] != "done" for part in result["parts"].values()),
    }
    return {**result, "requirements": requirements.none_of(counts)}


def _write(file: Path, result: Result) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(file)


def tables(result: Result) -> list[Block]:
    """The device, the time of each part, and each check with its figures."""
    device, parts = result["device"], result["parts"]
    versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items() if version)
    times = [(name, f"{part['seconds']:.0f}", f"{part['cpu_s']:.0f}", part["ended"]) for name, part in parts.items()]
    rows = [
        (f"{name}: {check['check']}", _verdict(check), _figures(check))
        for name, part in parts.items()
        for check in part["checks"]
    ]
    wheels = [(name.split("-py")[0].split("-cp")[0], f"{size / 1000:,.0f}") for name, size in result["wheels"].items()]
    return [
        f"{device['card'] or 'CPU'}, {device['memory_gb']:g} GB free; {versions}.",
        Table(("part", "seconds", "CPU seconds", "ended"), times),
        Table(("check", "holds", "measured"), rows),
        *([Table(("wheel", "kB"), wheels)] if wheels else []),
        *requirements.unmet(result),
    ]


def _verdict(check: Mapping[str, Any]) -> str:
    return {True: "yes", False: "**no**", None: "-"}[check["holds"]]


def _figures(check: Mapping[str, Any]) -> str:
    """Return the figures of a check, and the last line of the reason if there is one."""
    figures = {name: value for name, value in check.items() if name not in ("check", "holds", "reason", "seconds")}
    parts = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    ]
    reason = check.get("reason", "").splitlines()[-1:]
    return "; ".join([*parts, *reason]).replace("|", "/").replace("_", " ")


if __name__ == "__main__":
    raise SystemExit(main())
