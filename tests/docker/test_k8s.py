"""Tests of the manifests in docker/k8s.yaml. They need no cluster: they check the manifests by the published schemas,
and by rules of this project."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from sandbox.gateway.calls.executor_handle import STOP_TIMEOUT_S
from sandbox.gateway.http.auth import PUBLIC_PATHS
from sandbox.gateway.metrics import METRICS
from sandbox.gateway.server import CLOSE_TIMEOUT_S
from sandbox.settings.server import ServeConfig, load

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

K8S = Path(__file__).parents[2] / "docker/k8s.yaml"
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all(K8S.read_text(encoding="utf-8")))
BY_KIND = {manifest["kind"]: manifest for manifest in MANIFESTS}
POD = BY_KIND["Deployment"]["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
VERSIONS = ("1.25", "1.31", "1.34")
"""Versions of Kubernetes whose schemas the manifests must match: the oldest that the file names, and later ones."""


def check(manifest: dict[str, Any], version: str) -> None:
    """Raise unless the manifest matches the schema, which allows no unknown field."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (extra dev)")
    kubernetes_validate.validate(manifest, version, strict=True)


def settings() -> ServeConfig:
    """The settings of the server in the pod, whose token file is not on this machine."""
    environ = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
    assert environ.pop("RSTAR_SANDBOX_TOKEN_FILE") == "/etc/rstar-sandbox/token"
    return load(None, {**environ, "RSTAR_SANDBOX_TOKEN": "x"}, {"host": "0.0.0.0"})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: str(manifest["kind"]))
def test_a_manifest_matches_the_published_schema(manifest: dict[str, Any], version: str) -> None:
    check(manifest, version)


@pytest.mark.parametrize(
    ("key", "value"), [("imagePulPolicy", "Always"), ("ports", [{"containerPort": "http"}]), ("env", [{"value": "x"}])]
)
def test_a_misspelt_field_a_wrong_type_and_a_missing_field_are_errors(key: str, value: object) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (extra dev)")
    wrong = copy.deepcopy(BY_KIND["Deployment"])
    wrong["spec"]["template"]["spec"]["containers"][0][key] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        check(wrong, VERSIONS[-1])


def test_a_pod_has_time_to_drain() -> None:
    grace_s = POD["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= settings().drain_s + CLOSE_TIMEOUT_S + STOP_TIMEOUT_S


def test_the_server_runs_unprivileged_at_a_level_that_needs_no_privilege() -> None:
    assert settings().isolation == "landlock"
    assert POD["spec"]["securityContext"]["runAsNonRoot"] is True
    assert POD["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_every_probe_asks_a_path_that_needs_no_token() -> None:
    for probe, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        assert CONTAINER[probe]["httpGet"] == {"path": path, "port": "http"} and path in PUBLIC_PATHS


def test_service_disruption_budget_and_autoscaler_select_the_pods_of_the_deployment() -> None:
    labels = POD["metadata"]["labels"]
    assert BY_KIND["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert BY_KIND["Service"]["spec"]["selector"] == labels
    assert BY_KIND["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    target = BY_KIND["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", BY_KIND["Deployment"]["metadata"]["name"])


def test_the_autoscaler_reads_a_metric_of_the_server() -> None:
    (metric,) = BY_KIND["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert name.removeprefix("rstar_sandbox_") in METRICS and f"seriesQuery: '{name}" in K8S.read_text(encoding="utf-8")
