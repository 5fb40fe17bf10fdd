"""Tests of the settings: precedence of the sources, refused values, and error messages."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from sandbox.errors import ConfigError
from sandbox.settings.server import DEFAULT_MAX_LIMITS, SETTINGS, ExecutorConfig, ServeConfig, load


def _write_toml(directory: Path, text: str) -> Path:
    file = directory / "serve.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_without_sources_all_settings_have_their_defaults() -> None:
    assert load(None, {}, {}) == ServeConfig()


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = _write_toml(tmp_path, "port = 1\nslots = 1\nzygote_pools = 1\n")
    config = load(file, {"RSTAR_SANDBOX_SLOTS": "2", "RSTAR_SANDBOX_ZYGOTE_POOLS": "2"}, {"zygote_pools": "3"})
    assert (config.port, config.slots, config.zygote_pools) == (1, 2, 3)


def test_every_source_accepts_every_type_of_setting(tmp_path: Path) -> None:
    values = {"queue_timeout_s": "5", "profiles": "bare, numeric", "max_memory_mb": "100", "isolation": "landlock"}
    expected = ServeConfig(
        queue_timeout_s=5.0,
        profiles=("bare", "numeric"),
        max_limits=replace(DEFAULT_MAX_LIMITS, memory_mb=100),
        isolation="landlock",
    )
    environ = {f"RSTAR_SANDBOX_{name.upper()}": text for name, text in values.items()}
    file = _write_toml(
        tmp_path,
        'queue_timeout_s = 5\nprofiles = ["bare", "numeric"]\nmax_memory_mb = 100\nisolation = "landlock"\n',
    )
    assert load(None, environ, {}) == load(None, {}, values) == load(file, {}, {}) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "http"}, "--port: expected a whole number from 0 to 65535, got 'http'"),
        ({"port": "65536"}, "--port: expected a whole number from 0 to 65535, got 65536"),
        ({"drain_s": "nan"}, "--drain-s: expected a number from 0 to 1000000, got nan"),
        (
            {"isolation": "docker"},
            "--isolation: expected one of auto, nsjail, namespaces, landlock, none, got 'docker'",
        ),
        ({"profiles": "bare,bare"}, "--profiles: expected a list of bare, numeric, symbolic, scientific"),
        ({"profiles": ""}, "--profiles: expected a list of"),
        ({"host": ""}, "--host: expected text, got ''"),
        ({"max_disk_mb": "0"}, "--max-disk-mb: expected a whole number from 1 to"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_expected(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {}, flags)
    assert str(caught.value).startswith(message)


def test_an_unknown_name_is_refused_in_every_source(tmp_path: Path) -> None:
    file = _write_toml(tmp_path, "prot = 1\n")
    with pytest.raises(ConfigError, match=r"serve\.toml: prot: unknown setting; did you mean port\?"):
        load(file, {}, {})
    with pytest.raises(ConfigError, match=r"RSTAR_SANDBOX_PROT: unknown setting; did you mean port\?"):
        load(None, {"RSTAR_SANDBOX_PROT": "1"}, {})


@pytest.mark.parametrize(
    ("table", "advice"),
    [
        ('[mount]\n"/data" = "x"\n', "mount: unknown setting; did you mean [mounts]?"),
        ('[profile.ml]\nimports = ["sklearn"]\n', "profile: unknown setting; did you mean [profiles.NAME]?"),
        ("[server]\nport = 1\n", "; the tables of the TOML file are [mounts], [profiles.NAME]"),
    ],
)
def test_a_table_with_a_typo_gets_the_name_of_the_table(tmp_path: Path, table: str, advice: str) -> None:
    file = _write_toml(tmp_path, table)
    with pytest.raises(ConfigError) as caught:
        load(file, {}, {})
    assert str(caught.value).startswith(f"{file}: ") and str(caught.value).endswith(advice)


def test_a_table_cannot_be_set_in_the_environment() -> None:
    with pytest.raises(ConfigError, match=r"RSTAR_SANDBOX_MOUNTS: is the table \[mounts\] of the TOML file"):
        load(None, {"RSTAR_SANDBOX_MOUNTS": "/data"}, {})


def test_toml_values_must_have_the_right_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"port: expected a whole number from 0 to 65535, got '1'"):
        load(_write_toml(tmp_path, 'port = "1"\n'), {}, {})
    with pytest.raises(ConfigError, match=r"port: expected a whole number from 0 to 65535, got True"):
        load(_write_toml(tmp_path, "port = true\n"), {}, {})


@pytest.mark.parametrize("text", ["port =", "\x00"])
def test_a_file_with_invalid_toml_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"serve\.toml: is not TOML"):
        load(_write_toml(tmp_path, text), {}, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load(tmp_path / "none.toml", {}, {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "sandbox.internal"])
def test_a_host_beyond_loopback_requires_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        load(None, {}, {"host": host})
    assert load(None, {"RSTAR_SANDBOX_TOKEN": "secret"}, {"host": host}).token == "secret"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_no_token(host: str) -> None:
    assert load(None, {}, {"host": host}).token is None


def test_a_token_may_come_from_a_file_and_the_higher_source_wins(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("from-file\n", encoding="utf-8")
    assert load(None, {"RSTAR_SANDBOX_TOKEN": "from-env"}, {"token_file": str(token)}).token == "from-file"
    file = _write_toml(tmp_path, f'token_file = "{token}"\n')
    assert load(file, {"RSTAR_SANDBOX_TOKEN": "from-env"}, {}).token == "from-env"


def test_a_long_token_file_is_refused_without_reading_all_of_it() -> None:
    with pytest.raises(ConfigError, match="at most 65536 characters, but /dev/zero is longer"):
        load(None, {}, {"token_file": "/dev/zero"})


@pytest.mark.parametrize("text", ["port = " + "9" * 5000, "port = " + "[" * 5000])
def test_long_numbers_and_deep_nesting_in_a_file_are_one_error_each(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not TOML"):
        load(_write_toml(tmp_path, text), {}, {})


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    with pytest.raises(ConfigError, match="is empty"):
        load(None, {}, {"token_file": str(tmp_path / "token")})


def test_the_token_is_in_no_repr_message_or_flag(tmp_path: Path) -> None:
    assert "secret" not in repr(ServeConfig(token="secret"))
    assert SETTINGS["token"].is_secret
    with pytest.raises(ConfigError) as caught:
        load(_write_toml(tmp_path, "token = 12345678\n"), {}, {})
    assert "12345678" not in str(caught.value)


def test_service_links_of_kubernetes_are_ignored() -> None:
    """Kubernetes sets such variables in every pod if a service is named rstar-sandbox."""
    links = {"RSTAR_SANDBOX_PORT": "tcp://10.0.0.1:8642", "RSTAR_SANDBOX_SERVICE_HOST": "10.0.0.1"}
    assert load(None, {**links, "RSTAR_SANDBOX_PORT_8642_TCP_PORT": "8642"}, {}) == ServeConfig()


def test_the_variable_of_clients_is_no_setting_of_the_server() -> None:
    assert load(None, {"RSTAR_SANDBOX_URL": "http://127.0.0.1:8642"}, {}) == ServeConfig()


def test_executor_settings_survive_encoding() -> None:
    config = ServeConfig(python="/usr/bin/python3", slots=4, profiles=("bare",), attempts=2)
    assert ExecutorConfig.decode(config.executor_config().encode()) == config.executor_config()
    assert ExecutorConfig.decode(ServeConfig().executor_config().encode()) == ExecutorConfig()


@pytest.mark.parametrize(
    ("cores", "settings", "expected"),
    [
        (2, {}, [(2, 32, 1)]),
        (20, {}, [(7, 107, 4), (7, 107, 3), (6, 106, 3)]),
        (2, {"executors": 3}, [(1, 11, 1), (1, 11, 1), (1, 10, 1)]),
        (64, {"slots": 3}, [(22, 1, 11), (21, 1, 11), (21, 1, 10)]),
        (64, {"cores": 4, "zygote_pools": 1, "executors": 2}, [(2, 32, 1), (2, 32, 1)]),
    ],
)
def test_executors_divide_the_capacity_of_the_server(
    cores: int, settings: dict[str, int], expected: list[tuple[int, ...]]
) -> None:
    """The defaults are one executor for every 8 cores, 16 slots per core, and a zygote pool for every 2 cores."""
    shares = ServeConfig(**settings).resolved(cores).per_executor()  # type: ignore[arg-type]
    assert [(share.cores, share.slots, share.zygote_pools) for share in shares] == expected


def test_an_executor_without_a_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="slots=2 for executors=3: expected a slot each; lower executors"):
        ServeConfig(slots=2, executors=3).resolved(8)


def test_decoded_executor_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"slots: expected a whole number from 0 to 100000, got 'many'"):
        ExecutorConfig.decode({"slots": "many"})
    with pytest.raises(ConfigError, match=r"port: unknown setting"):
        ExecutorConfig.decode({"port": 1})


def test_every_field_is_a_setting_and_every_default_is_allowed() -> None:
    config = ServeConfig()
    # `max_limits` has a setting per limit, the server itself finds the second field, and the other fields are tables of
    # the TOML file.
    no_settings = {"max_limits", "isolation_reason", "own_profiles", "mounts", "worker"}
    assert {f.name for f in fields(config)} - no_settings == {n for n in SETTINGS if not n.startswith("max_")}
    for name, setting in SETTINGS.items():
        value = (
            getattr(DEFAULT_MAX_LIMITS, name.removeprefix("max_"), None)
            if name.startswith("max_")
            else getattr(config, name)
        )
        assert value is None or setting.rule.accepts(value), name
