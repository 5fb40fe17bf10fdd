"""Tests of the engines, the weight transfer and the chat format that a phase opens."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")
load_file = pytest.importorskip("safetensors.torch").load_file

from tokenizers import Tokenizer, models  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

from tests.trainer.fake_vllm import FakeVllm  # noqa: E402
from tests.trainer.recipe.small_runs import STEP_TIMEOUT_S, copy_run, small_config  # noqa: E402
from tests.trainer.sampling import QUIET_LIBRARIES, model_folder  # noqa: E402
from trainer import cli  # noqa: E402
from trainer.config import ConfigError  # noqa: E402
from trainer.engines.local import LocalEngine  # noqa: E402
from trainer.environments.python_tool import TOOL_SCHEMA  # noqa: E402
from trainer.json_files import read_json, write_json  # noqa: E402
from trainer.recipe import rollout_session  # noqa: E402
from trainer.recipe.phases import RecipeRun  # noqa: E402
from trainer.sync.transfers import WakingTransfer  # noqa: E402

pytestmark = QUIET_LIBRARIES


def test_a_rollout_has_the_prompt_with_which_data_are_prepared_and_sft_trains(tmp_path: Path) -> None:
    config, model = small_config(tmp_path, "model.system_prompt="), model_folder(tmp_path / "model")
    prompt = rollout_session.load_chat_format(config, model).encode_prompt("1 + 1?")
    assert rollout_session.chat_formats(config, model)((TOOL_SCHEMA,)).encode_prompt("1 + 1?") == prompt


@pytest.mark.parametrize(
    ("file", "eos", "more"),
    [
        ("generation_config.json", [9, 7], (9, 7)),
        ("generation_config.json", 9, (9,)),
        ("config.json", [9, 7], (9, 7)),
        ("", None, ()),
    ],
)
def test_every_end_token_of_the_model_ends_a_turn(tmp_path: Path, file: str, eos: Any, more: tuple[int, ...]) -> None:
    """The end tokens of a model may be others than those of its tokenizer."""
    config, model = small_config(tmp_path), model_folder(tmp_path / "model")
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    assert rollout_session.load_chat_format(config, model).stop_ids == (end,)
    (model / "generation_config.json").unlink()
    content = read_json(model / "config.json") if file == "config.json" else {}
    (model / "config.json").unlink()
    if file:
        write_json(model / file, {**(content or {}), "eos_token_id": eos})
    assert rollout_session.load_chat_format(config, model).stop_ids == (end, *more)


@pytest.mark.asyncio
async def test_vllm_servers_load_weights_from_absolute_paths_that_stay_while_the_pool_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = model_folder(tmp_path / "model")
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(model), max_num_seqs=16, max_model_len=96)
    paths: list[Path] = []

    async def load_saved(engine: LocalEngine, path: Path) -> None:
        paths.append(path)
        weights = load_file(path / "model-00001.safetensors")
        # The file has a tied weight once, under its first name.
        await engine.load_weights({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, 0)

    async with FakeVllm(engine, load=load_saved).serve() as url:
        sets = ["run_dir=run", "engines.kind=vllm", f"engines.endpoints={url}", "engines.max_down_s=77"]
        async with rollout_session.open_engine_pool(small_config(tmp_path, *sets), model, Path("run")) as pool:
            assert paths == [tmp_path / "run/weights/v000000"]
            assert paths[0].exists(), "a server that restarts loads them again"
            assert pool._all_down_timeout_s == 77, "episodes wait for a restart (engines.max_down_s)"
    assert not paths[0].exists()
    await engine.close()


@pytest.mark.asyncio
async def test_a_gpu_that_the_machine_does_not_have_is_refused_before_the_local_engine_starts(tmp_path: Path) -> None:
    model, config = model_folder(tmp_path / "model"), small_config(tmp_path, "engines.device=cuda:64")
    with pytest.raises(ConfigError, match=r"engines\.device: expected the GPU cuda:64 here, got \d+ GPUs; set"):
        async with rollout_session.open_engine_pool(config, model, tmp_path):
            pass


@pytest.mark.parametrize(
    ("sync_check", "probes", "has_checksums"),
    [("checksum", "once", True), ("probe", "at each sync", False), ("off", "never", False)],
)
@pytest.mark.asyncio
async def test_sync_check_chooses_between_checksums_and_the_probe(
    tmp_path: Path, sync_check: str, probes: str, has_checksums: bool
) -> None:
    model = model_folder(tmp_path / "model")
    config = small_config(tmp_path, f"engines.sync_check={sync_check}", "engines.probe_tolerance=3")
    async with rollout_session.open_engine_pool(config, model, tmp_path) as pool:
        assert probes == ("never" if not pool.probe else "once" if pool._probes_once else "at each sync")
        assert pool.probe is None or pool.probe._tolerance == 3
    servers = replace(config, engines=replace(config.engines, kind="vllm"))
    assert rollout_session._weight_transfer(servers, tmp_path, None)["store"]._has_checksums == has_checksums


@pytest.mark.parametrize(("weight_sync", "transfer"), [("file", "function"), ("gloo", "BroadcastTransfer")])
def test_engines_are_woken_before_their_weights_are_sent_only_with_sleep_mode(
    tmp_path: Path, weight_sync: str, transfer: str
) -> None:
    sets = ["engines.kind=vllm", f"engines.weight_sync={weight_sync}", "hardware.gpus_per_node=1"]
    plain = rollout_session._weight_transfer(small_config(tmp_path, *sets), tmp_path, None)
    waking = rollout_session._weight_transfer(small_config(tmp_path, *sets, "engines.sleep_mode=true"), tmp_path, None)
    assert type(plain["transfer"]).__name__ == type(waking["transfer"]._transfer).__name__ == transfer
    assert isinstance(waking["transfer"], WakingTransfer)
    assert [options["store"] is not None for options in (plain, waking)] == [weight_sync == "file"] * 2


@pytest.mark.parametrize("sleep_mode", [False, True])
def test_a_stage_puts_its_engines_to_sleep_only_with_sleep_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep_mode: bool
) -> None:
    pool = SimpleNamespace(sleep=lambda: None)
    sandbox = SimpleNamespace(python_tool=None, answer_checker=SimpleNamespace(verify=None))

    @contextlib.asynccontextmanager
    async def yield_value(value: Any) -> AsyncIterator[Any]:
        yield value

    monkeypatch.setattr(rollout_session, "connect_sandbox", lambda config: yield_value(sandbox))
    monkeypatch.setattr(rollout_session, "open_engine_pool", lambda *arguments: yield_value(pool))
    monkeypatch.setattr(rollout_session, "load_chat_format", lambda *arguments: None)
    sets = ["engines.kind=vllm", "hardware.gpus_per_node=1", f"engines.sleep_mode={str(sleep_mode).lower()}"]
    with rollout_session.open_rollout(RecipeRun(small_config(tmp_path, *sets)), tmp_path) as rollouts:
        assert rollouts.sleep is (pool.sleep if sleep_mode else None)


def _without_chat_tokens(folder: Path) -> Path:
    """Write a tokenizer without Qwen's chat tokens and without a chat template."""
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("chat", ["rstar2", "tokenizer"])
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda folder: folder / "no" / "model", "no/model"),
        (_without_chat_tokens, "<.im_start.>|chat template"),
    ],
)
def test_an_unusable_model_is_an_error_of_one_line(
    model: Any, reason: str, chat: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_config(tmp_path)
    sets = ["--set", f"model.path={model(tmp_path / 'bad')}", "--set", f"model.chat_format={chat}"]
    assert cli.main(["prepare", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "run"), *sets]) == 2
    *progress, line = capsys.readouterr().err.splitlines()
    assert all(text.startswith("preflight: checks ") for text in progress)
    assert re.match(f"rstar-train: model {tmp_path}/bad.*({reason})", line)


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_a_model_that_the_local_engine_cannot_run_is_an_error_that_names_vllm(
    tuned_run: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = copy_run(tuned_run, tmp_path / "run"), tmp_path / "sliding"
    shutil.copytree(tuned_run.stage_dir("sft") / "model", model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config | {"use_sliding_window": True, "sliding_window": 8}))
    capsys.readouterr()
    assert cli.main(["eval", str(run.dir), "--run-dir", str(run.dir), "--model", str(model)]) == 2
    assert re.match(rf"rstar-train: model {model}: .*use vLLM$", capsys.readouterr().err.splitlines()[-1])
