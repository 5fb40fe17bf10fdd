"""Tests of `rstar-train recipe --smoke`: it runs all phases of a run with the smallest sizes, in a separate folder.

A phase is one command of a recipe (prepare, sft, filter, grpo, eval). The phases of a smoke run are forks of one server
process, which has imported the libraries once.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer import cli
from trainer.config import ConfigError, RunConfig
from trainer.config_loading import load_config
from trainer.data.sources import read_conversations, read_problems
from trainer.recipe import smoke
from trainer.recipe.phases import Phase, RecipeRun
from trainer.recipe.smoke import phase_server

CONFIGS = Path(__file__).parents[3] / "configs"


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> str:
    """Write a file of JSON lines. Returns its path."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(file)


def _load(name: str, folder: Path, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / name, {}, [f"run_dir={folder / 'run'}", *overrides])


@pytest.mark.parametrize("name", ["tiny.toml", "qwen2.5-1.5b-single-gpu.toml"])
def test_a_smoke_run_has_the_phases_and_the_model_of_the_run_with_small_sizes(name: str, tmp_path: Path) -> None:
    problems = [{"id": f"p{n}", "text": f"problem {n}", "answer": "1", "source": "s"} for n in range(100)]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    train, held_out = (_write_rows(tmp_path / f"{name}.jsonl", problems) for name in ("train", "eval"))
    chats = _write_rows(tmp_path / "chats.jsonl", [{"messages": messages}] * 100)
    data = (f"data.train={train}", f"eval.data={held_out}", f"sft.data={chats}", "data.decontaminate_against=[]")
    config = _load(name, tmp_path, *data)
    small = smoke.smoke_config(config)
    assert RecipeRun(small).phases() == RecipeRun(config).phases()
    assert small.run_dir == f"{config.run_dir}-smoke" and not Path(config.run_dir).exists()
    assert [stage.steps for stage in small.stages.values()] == [1] * len(config.stages)
    for stage in small.stages.values():
        assert (stage.problems_per_step, stage.samples_per_problem, stage.kept_per_problem) == (2, 2, 2)
        assert stage.max_response_tokens <= smoke.MAX_RESPONSE_TOKENS and stage.max_turns <= smoke.MAX_TURNS
    assert len(read_problems(*small.data.train)) == len(read_problems(*small.eval.data)) == smoke.NUM_ROWS
    assert len(read_conversations(*small.sft.data)) == smoke.NUM_ROWS
    assert (small.model, small.engines, small.hardware) == (config.model, config.engines, config.hardware)


def test_a_smoke_run_has_rows_for_every_rank(tmp_path: Path) -> None:
    sources = ("data.train=generated:512", "eval.data=generated:4", "sft.data=generated:512")
    small = smoke.smoke_config(_load("qwen3-14b-mi300x.toml", tmp_path, "data.decontaminate_against=[]", *sources))
    ranks = 8 * 8
    assert {stage.problems_per_step for stage in small.stages.values()} == {ranks}
    assert (small.sft.batch_size, small.data.train) == (4 * ranks, (f"generated:{2 * ranks}",))


def test_a_smoke_run_replaces_the_folder_of_an_earlier_one_and_not_that_of_the_run(tmp_path: Path) -> None:
    config = _load("tiny.toml", tmp_path)
    smoke.smoke_config(config)
    (tmp_path / "run").mkdir()
    for folder in (tmp_path / "run", tmp_path / "run-smoke"):
        (folder / "user_file").touch()
    small = smoke.smoke_config(config)
    assert small.data.train == small.eval.data == (f"generated:{smoke.NUM_ROWS}",)
    assert (tmp_path / "run" / "user_file").exists() and not (tmp_path / "run-smoke" / "user_file").exists()


def test_a_folder_that_is_no_smoke_run_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "run-smoke").mkdir()
    (tmp_path / "run-smoke" / "user_file").touch()
    with pytest.raises(ConfigError, match="expected the folder of an earlier smoke run"):
        smoke.smoke_config(_load("tiny.toml", tmp_path))
    assert (tmp_path / "run-smoke" / "user_file").exists()


def test_all_phases_of_a_smoke_run_share_one_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    phases: list[str] = []

    @asynccontextmanager
    async def connect(config: object) -> AsyncIterator[SimpleNamespace]:
        events.append("open")
        yield SimpleNamespace(endpoints=("http://127.0.0.1:1",))
        events.append("closed")

    def run_child(phase: object, command: list[str], lock_fd: int) -> int:
        phases.append(command[3])  # python -m trainer PHASE ...
        config = load_config(tmp_path / "run-smoke", {})
        assert config.sandbox.endpoints == ("http://127.0.0.1:1",) and events == ["open"]
        return 3  # the phase fails, so that no other one follows; the command must end with the same exit code

    monkeypatch.setattr(smoke, "connect_sandbox", connect)
    monkeypatch.setattr(smoke, "phase_server", lambda: nullcontext(run_child))
    arguments = ["recipe", str(CONFIGS / "tiny.toml"), "--run-dir", str(tmp_path / "run"), "--smoke", "--no-preflight"]
    assert cli.main(arguments) == 3
    assert (phases, events) == (["prepare"], ["open", "closed"])
    later = load_config(tmp_path / "run-smoke", {}).sandbox.endpoints
    assert later == (), "the settings of the folder name a sandbox that has ended"


PHASES = """
import sys
from trainer.recipe.phases import Phase
from trainer.recipe.smoke import phase_server
folder, trainer = sys.argv[1], [sys.executable, "-m", "trainer"]
unused_lock_fd = 0  # the forks of the server do not use the lock of the run folder
with phase_server() as run_phase, open(f"{folder}/lock", "w") as lock:
    print(run_phase(Phase("show"), [*trainer, "--version"], unused_lock_fd), flush=True)
    print(run_phase(Phase("sft"), [*trainer, "sft", f"{folder}/no.toml"], unused_lock_fd), flush=True)
    # The command of a launcher (such as torchrun) runs as a new process, which inherits the lock.
    print(run_phase(Phase("grpo"), ["sh", "-c", "exit 3"], lock.fileno()), flush=True)
"""


def path_pattern(path: str) -> str:
    """Return the regular expression of the files that a path in docs/runs.md stands for."""
    pattern = re.sub("NAME|MODEL", "[^/]+", re.escape(path).replace("step_N", r"step_\d+"))
    return f"{pattern}.+" if path.endswith("/") else pattern


@pytest.mark.slow
@pytest.mark.usefixtures("needs_isolation")
def test_the_files_of_a_run_folder_are_those_that_the_documents_list(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    page = (CONFIGS.parent / "docs/runs.md").read_text(encoding="utf-8").partition("## Files")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*) \| .* \| (.*) \|$", page, re.MULTILINE)
    documented = {path: written for paths, written in rows for path in re.findall("`(.*?)`", paths)}
    arguments = ["--run-dir", str(tmp_path / "run"), "--smoke", "--set", "storage.save_entropies=true"]
    assert cli.main(["recipe", str(CONFIGS / "tiny.toml"), *arguments]) == 0
    folder = tmp_path / "run-smoke"
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    patterns = {path: re.compile(path_pattern(path)) for path in documented}
    assert [file for file in files if not any(pattern.fullmatch(file) for pattern in patterns.values())] == []
    always = [path for path, written in documented.items() if written.startswith("always")]
    assert len(always) > 10
    assert [path for path in always if not any(patterns[path].fullmatch(file) for file in files)] == []


@pytest.mark.slow
def test_the_phases_of_a_smoke_run_are_forks_of_one_process(tmp_path: Path) -> None:
    """A new interpreter runs the phases, because an interpreter has one such process, which keeps its first output."""
    pytest.importorskip("trl")
    command = [sys.executable, "-c", PHASES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    version, *exit_codes = done.stdout.splitlines()
    assert version.startswith("rstar-train ") and exit_codes == ["0", "2", "3"], done
    assert "no.toml: cannot be read" in done.stderr


@pytest.mark.slow
def test_a_server_that_is_stopped_first_stops_its_running_phase(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    config = tmp_path / "config.toml"
    os.mkfifo(config)  # the phase waits for its configuration
    command = [sys.executable, "-m", "trainer", "sft", str(config)]
    with ThreadPoolExecutor(1) as pool:
        with phase_server() as run_phase:
            pool.submit(run_phase, Phase("sft"), command, 0)  # 0 for the lock's descriptor, which no fork uses
            writing = os.open(config, os.O_WRONLY)  # waits until the phase reads
        with pytest.raises(BrokenPipeError):  # no process reads the pipe any more: the phase has ended
            os.write(writing, b"x")
    os.close(writing)


@pytest.mark.slow
def test_a_recipe_that_is_killed_ends_its_running_phase(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    config = tmp_path / "config.toml"
    os.mkfifo(config)  # the phase waits for its configuration
    code = (
        "import sys\nfrom trainer.recipe.phases import Phase\nfrom trainer.recipe.smoke import phase_server\n"
        "with phase_server() as run_phase:\n"
        "    run_phase(Phase('sft'), [sys.executable, '-m', 'trainer', 'sft', sys.argv[1]], 0)"
    )
    with subprocess.Popen([sys.executable, "-c", code, config], cwd=CONFIGS.parent) as recipe:
        writing = os.open(config, os.O_WRONLY)  # waits until the phase reads
        recipe.kill()
    ended = select.poll()
    ended.register(writing, 0)  # an error is always reported: no process reads the pipe any more
    assert ended.poll(120_000)
    os.close(writing)
