"""Tests of the profiles that an operator defines: they are checked at the start, and calls can name them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from sandbox import wire
from sandbox.client import AsyncClient
from sandbox.errors import ConfigError, InvalidCall
from sandbox.executor.profile_choice import PROFILE_CHAIN, ProfileTree
from sandbox.local import local_service
from sandbox.settings.profiles import MAX_WARM_BYTES, OwnProfile, check_profile
from sandbox.settings.server import ExecutorConfig, ServeConfig, load
from sandbox.types import Call, Profile, Status
from tests.executor.calling import OWN_PYTHON

ML = OwnProfile("ml", "scientific", ("sklearn.linear_model", "joblib"))
DEEP = OwnProfile("deep", "ml", ("torch",))
TREE = ProfileTree((ML, DEEP))


def load_toml(text: str, directory: Path) -> ExecutorConfig:
    file = directory / "serve.toml"
    file.write_text(text, encoding="utf-8")
    return load(file, {}, {})


def test_a_profile_is_read_with_the_code_of_its_file_and_reaches_the_executors(tmp_path: Path) -> None:
    (tmp_path / "warm.py").write_text("x = 'ä'", encoding="utf-8")
    toml = '[profiles.b]\nextends = "a-1"\n[profiles.a-1]\nextends = "numeric"\nimports = ["wave"]\nwarm = "warm.py"'
    config = load_toml(toml, tmp_path)
    assert config.own_profiles == (OwnProfile("a-1", "numeric", ("wave",), "x = 'ä'"), OwnProfile("b", "a-1"))
    assert ExecutorConfig.decode(json.loads(json.dumps(config.encode()))).own_profiles == config.own_profiles


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            '[profiles.a]\nextends = "rich"',
            "profiles.a.extends: expected one of bare, numeric, symbolic, scientific, g",
        ),
        ('[profiles.a]\nextends = "verify"', "profiles.a.extends: expected one of bare"),
        ('[profiles.a]\nextends = ["bare"]', "profiles.a.extends: expected the name of a profile"),
        ('[profiles.a]\nextends = "a"', "profiles a: each extends another of them"),
        ('[profiles.a]\nextends = "b"\n[profiles.b]\nextends = "a"', "profiles a, b: each extends another of them"),
        ("[profiles.numeric]", "profiles.numeric: expected a name .* that is not built in"),
        ("[profiles.A]", "profiles.A: expected a name of lower-case letters"),
        ("[profiles.a]\nwarn = 1", r"profiles.a: expected the keys extends, imports, warm, got \['warn'\]"),
        ("[profiles]\na = 1", "profiles.a: expected the keys extends, imports, warm, got 1"),
        ('[profiles.a]\nimports = "wave"', "profiles.a.imports: expected a list of names of modules, got 'wave'"),
        ('[profiles.a]\nimports = ["os; 1"]', "profiles.a.imports: expected a list of names of modules"),
        ("[profiles.a]\nwarm = 1", "profiles.a.warm: expected the path of a Python file, got 1"),
        ('[profiles.a]\nwarm = "no.py"', r"profiles.a.warm: \S+/no.py cannot be read \(No such file"),
        ('[profiles.a]\nwarm = "a\\u0000b"', r"profiles.a.warm: '\S+/a\\x00b' cannot be read \(embedded null byte"),
        ('[profiles.a]\nwarm = "latin"', r"profiles.a.warm: \S+/latin is not UTF-8"),
        ('[profiles.a]\nwarm = "large"', f"profiles.a.warm: expected at most {MAX_WARM_BYTES} bytes"),
    ],
)
def test_a_wrong_profile_is_an_error_that_names_it(toml: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xe4")
    (tmp_path / "large").write_bytes(b"#" * (MAX_WARM_BYTES + 1))
    toml = toml if "[profiles.b]" in toml else f"{toml}\n[profiles.good]" if "[profiles]" not in toml else toml
    with pytest.raises(ConfigError, match=message):
        load_toml(toml, tmp_path)


def test_every_executor_of_a_node_gets_the_profiles_and_the_mounts() -> None:
    config = ServeConfig(own_profiles=(ML, DEEP), mounts=(("/data", "/srv/data"),), executors=2)
    for share in config.resolved(cores=4).per_executor():
        unpacker = wire.Unpacker()
        unpacker.feed(wire.pack(["configure", share.encode()]))
        ((_, settings),) = unpacker
        received = ExecutorConfig.decode(settings)
        assert (received.own_profiles, received.mounts) == ((ML, DEEP), (("/data", "/srv/data"),))


def test_profiles_as_a_list_still_choose_the_zygotes(tmp_path: Path) -> None:
    assert load_toml('profiles = ["numeric"]', tmp_path).profiles == ("numeric",)


@pytest.mark.parametrize(
    ("modules", "profile"),
    [
        ((), Profile.BARE),
        (("os", "json"), Profile.BARE),
        (("numpy",), Profile.NUMERIC),
        (("numpy", "mpmath"), Profile.SYMBOLIC),
        (("sympy", "pandas", "os"), Profile.SCIENTIFIC),
        (("sklearn",), "ml"),
        (("sklearn", "numpy", "os"), "ml"),
        (("joblib", "torch"), "deep"),
    ],
)
def test_auto_chooses_the_first_profile_with_most_of_the_imported_modules(
    modules: tuple[str, ...], profile: str
) -> None:
    assert TREE.choose("auto", frozenset(modules)) == profile


def test_a_requested_profile_is_used_whatever_the_code_imports() -> None:
    assert [TREE.choose(name, {"torch"}) for name in ("bare", "verify", "ml")] == ["bare", "verify", "ml"]


def test_a_zygote_is_forked_from_the_profile_that_it_extends() -> None:
    assert [list(TREE.ancestors(name)) for name in ("deep", "ml", "verify", "bare")] == [
        ["ml", *reversed(PROFILE_CHAIN)],
        [*reversed(PROFILE_CHAIN)],
        ["symbolic", "numeric", "bare"],
        [],
    ]


def test_larger_profiles_and_then_smaller_ones_substitute_a_profile_whose_zygote_is_down() -> None:
    assert list(TREE.substitutes("numeric")) == ["symbolic", "scientific", "bare"]
    assert list(TREE.substitutes("deep"))[:2] == ["ml", "scientific"]
    assert list(dict.fromkeys(TREE.substitutes("verify"))) == ["symbolic", "scientific", "numeric", "bare"]


def test_an_unknown_profile_of_a_call_is_refused_with_the_names() -> None:
    check_profile("ml", (ML,), "calls[3]")
    with pytest.raises(InvalidCall, match=r"calls\[3\]\.profile: expected one of auto, .*verify, ml, got 'deep'"):
        check_profile(Call("1", profile="deep").profile, (ML,), "calls[3]")


PROFILES = """
[profiles.waves]
imports = ["wave"]
warm = "warm.py"

[profiles.colours]
extends = "waves"
imports = ["colorsys"]
"""
WARM = "import fractions\nimport wave\nwave.warmed = fractions.Fraction(1, 3)"
PROBE = "import sys\nprint([name in sys.modules for name in ('wave', 'colorsys')], sys.modules['wave'].warmed)\n"


@pytest.mark.usefixtures("needs_isolation")
def test_calls_over_http_run_in_the_profiles_of_the_toml_file(tmp_path: Path) -> None:
    (tmp_path / "warm.py").write_text(WARM)
    (tmp_path / "serve.toml").write_text(PROFILES)
    arguments = ("--config", str(tmp_path / "serve.toml"), "--python", OWN_PYTHON, "--profiles", "bare")

    async def main() -> None:
        async with local_service((*arguments, "--zygote-pools", "1")) as url, AsyncClient(url) as client:
            waves = await client.execute(PROBE, profile="waves")
            chosen = await client.execute(f"{PROBE}import colorsys")
            assert [waves.stdout, chosen.stdout] == ["[True, False] 1/3\n", "[True, True] 1/3\n"]
            assert (await client.execute("import sys\n'wave' in sys.modules")).value == "False"
            good, bad = await client.run_batch(["1", Call("1", profile="waves2")])
            assert (good.status, bad.status) == (Status.OK, Status.INVALID)
            assert bad.error is not None
            assert bad.error.message.endswith("verify, waves, colours, got 'waves2'")
            async with aiohttp.ClientSession() as session, session.get(f"{url}/openapi.json") as response:
                schema = await response.json()
            assert schema["components"]["schemas"]["Profile"]["enum"] == [*Profile, "waves", "colours"]

    asyncio.run(main())


@pytest.mark.usefixtures("needs_isolation")
@pytest.mark.parametrize(
    ("warm", "reason"),
    [
        ("x = 1\n1 / 0", "warm-up code, line 2: ZeroDivisionError: division by zero"),
        ("x = (", "warm-up code, line 1: SyntaxError"),
        ("import sys\nsys.exit(0)", "warm-up code, line 2: SystemExit: 0"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()", "expected one thread"),
        ("", "import nowhere: ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_a_profile_that_cannot_be_loaded_ends_the_start_with_one_line(warm: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "warm.py").write_text(warm)
    imports = "" if warm else 'imports = ["nowhere"]\n'
    (tmp_path / "serve.toml").write_text(f'[profiles.broken]\n{imports}warm = "warm.py"')
    arguments = ("--config", str(tmp_path / "serve.toml"), "--python", OWN_PYTHON, "--profiles", "bare", "--port", "0")
    command = [sys.executable, "-m", "sandbox", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("rstar-sandbox: ")]
    assert len(errors) == 1
    assert f"profile broken: {reason}" in errors[0]
