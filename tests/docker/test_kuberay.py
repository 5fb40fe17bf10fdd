"""Tests of the manifests in docker/kuberay/. They need no Kubernetes cluster: they check the manifests by schemas, and
by rules of KubeRay 1.6.2."""

from __future__ import annotations

import copy
import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.settings.server import load
from trainer import cli

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")

REPOSITORY = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(REPOSITORY / "docker/kuberay/schemas.py"))
SCHEMAS: dict[str, Any] = json.loads(SCRIPT["EXTRACT"].read_text())
MANIFESTS: list[dict[str, Any]] = list(SCRIPT["manifests"]())
BY_KIND = {manifest["kind"]: manifest for manifest in MANIFESTS}
RAY_CLUSTER = BY_KIND["RayCluster"]["spec"]
RAY_JOB = BY_KIND["RayJob"]["spec"]
CLUSTERS = [RAY_CLUSTER, RAY_JOB["rayClusterSpec"]]
GATEWAY = BY_KIND["Deployment"]["spec"]["template"]


def errors(manifest: dict[str, Any]) -> list[str]:
    """Return what the schema of a manifest's kind finds wrong."""
    validator = jsonschema.Draft7Validator(SCHEMAS[SCRIPT["name_of"](manifest)])
    return [error.message for error in validator.iter_errors(manifest)]


def ray_pods(cluster: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the pod templates of a Ray cluster."""
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        yield group["template"]


ALL_PODS = [*(pod for cluster in CLUSTERS for pod in ray_pods(cluster)), GATEWAY, RAY_JOB["submitterPodTemplate"]]


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}"
)
def test_manifest_is_valid_by_the_published_schema(manifest: dict[str, Any]) -> None:
    assert errors(manifest) == []


def test_a_misspelt_field_a_wrong_type_and_a_wrong_value_are_errors() -> None:
    misspelt, wrong_type, wrong_value = (copy.deepcopy(BY_KIND["RayCluster"]) for _ in range(3))
    misspelt["spec"]["authOption"] = misspelt["spec"].pop("authOptions")
    wrong_type["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    wrong_value["spec"]["authOptions"]["mode"] = "tokens"
    assert "'authOption' was unexpected" in errors(misspelt)[0]
    assert errors(wrong_type) == ["0 is not of type 'string'"]
    assert "'tokens' is not one of ['disabled', 'token']" in errors(wrong_value)[0]
    del misspelt["spec"]["headGroupSpec"]
    assert "'headGroupSpec' is a required property" in errors(misspelt)


def test_ray_has_the_locked_version() -> None:
    pinned = re.search(r"^ray==(\S+)", (REPOSITORY / "requirements/kuberay.txt").read_text(), re.MULTILINE)
    assert pinned
    assert [cluster["rayVersion"] for cluster in CLUSTERS] == [pinned[1]] * 2


@pytest.mark.parametrize("cluster", CLUSTERS, ids=["service", "collect"])
def test_ray_cluster_has_token_authentication_and_a_head_without_cpus(cluster: dict[str, Any]) -> None:
    assert cluster["authOptions"]["mode"] == "token"
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in cluster["workerGroupSpecs"]:
        # KubeRay refuses a group without both limits if its autoscaler is off.
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert "num-cpus" not in group["rayStartParams"], "KubeRay takes the container's limit"
        assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]


@pytest.mark.parametrize("pod", ALL_PODS)
def test_pods_have_no_rights_and_no_credentials_of_kubernetes(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "a Service rstar-sandbox would set RSTAR_SANDBOX_PORT"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("pod", ALL_PODS)
def test_a_network_policy_selects_every_pod(pod: dict[str, Any]) -> None:
    policies = [manifest["spec"] for manifest in MANIFESTS if manifest["kind"] == "NetworkPolicy"]
    selected = [p for p in policies if p["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()]
    assert any("Ingress" in policy["policyTypes"] for policy in selected)


def test_gateway_is_a_ray_node_of_the_cluster_and_knows_its_token() -> None:
    (container,) = GATEWAY["spec"]["containers"]
    assert container["command"][0] == "bash"
    (script,) = container["args"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    head = (
        f"{BY_KIND['RayCluster']['metadata']['name']}-head-svc:6379"  # the name that KubeRay gives the head's Service
    )
    assert f"ray start --address={head} --num-cpus=0" in script
    flags = shlex.split(script.splitlines()[-1])
    assert flags[:3] == ["exec", "rstar-sandbox", "serve"]
    environ = {variable["name"]: variable for variable in container["env"]}
    token = environ["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert token == {"name": RAY_CLUSTER["authOptions"]["secretName"], "key": "auth_token"}
    settings = {name: entry["value"] for name, entry in environ.items() if name.startswith("RSTAR_")}
    del settings["RSTAR_SANDBOX_TOKEN_FILE"]  # the file exists only in the container
    config = load(None, settings, {"cluster": flags[flags.index("--cluster") + 1]})
    assert config.ray_address == head
    assert GATEWAY["spec"]["terminationGracePeriodSeconds"] > config.drain_s


def test_job_continues_its_collection_and_stops_its_cluster() -> None:
    program, *arguments = shlex.split(RAY_JOB["entrypoint"])
    assert program == "rstar-train"
    args = cli._parser().parse_args(arguments)
    assert (args.command, args.config, args.run_dir) == (cli.collect, Path("/config/collect.toml"), "/runs/collect")
    assert (RAY_JOB["submissionMode"], RAY_JOB["shutdownAfterJobFinishes"]) == ("K8sJobMode", True)
    assert RAY_JOB["backoffLimit"] > 0
    (head,) = RAY_JOB["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {mount["mountPath"] for mount in head["volumeMounts"]} == {"/config", "/runs"}
