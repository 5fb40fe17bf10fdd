"""Checks the manifests against the published schemas, and writes the parts of these that the manifests use.

    python docker/kuberay/schemas.py CRDS KUBERNETES

- CRDS is helm-chart/kuberay-operator/crds of a release of github.com/ray-project/kuberay.
- KUBERNETES is a directory of Kubernetes' JSON schemas with local references, such as v1.34.0-local-strict in the
  package kubernetes-validate.

The whole schemas are megabytes, so the repository has only schemas.json, with which the tests check the manifests. A
field that the manifests do not use yet is an error in the tests until this script has found it in the whole schema.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent
EXTRACT = DIRECTORY / "schemas.json"
KEPT_KEYWORDS = ("type", "enum", "required", "pattern", "minimum", "maximum", "minItems", "anyOf", "oneOf")
Schema = dict[str, Any]


def manifests() -> Iterator[dict[str, Any]]:
    """Yield the objects of all manifests."""
    import yaml

    for file in sorted(DIRECTORY.glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text(encoding="utf-8"))


def name_of(manifest: Mapping[str, Any]) -> str:
    """Return the name of a manifest's schema in the extract."""
    return f"{manifest['apiVersion']} {manifest['kind']}"


def used_part(schema: Schema, values: list[Any], definitions: Mapping[str, Schema], path: str) -> Schema:
    """Return the part of `schema` that applies to `values`, which all stand at `path`. Raises `KeyError` for a field
    that the schema does not have."""
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    part = {keyword: schema[keyword] for keyword in KEPT_KEYWORDS if keyword in schema}
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        part["items"] = used_part(schema["items"], items, definitions, f"{path}[]")
    fields: dict[str, list[Any]] = {}
    for value in values:
        for name, field in value.items() if isinstance(value, dict) else ():
            fields.setdefault(name, []).append(field)
    if isinstance(schema.get("additionalProperties"), dict):  # a map with any keys
        entries = [entry for of_key in fields.values() for entry in of_key]
        part["additionalProperties"] = used_part(schema["additionalProperties"], entries, definitions, f"{path}.*")
    elif fields and path != "metadata":  # the API server itself checks the metadata of a custom resource
        known = schema.get("properties", {})
        part |= {"properties": {}, "additionalProperties": False}
        for name, of_name in sorted(fields.items()):
            child_path = f"{path}.{name}".lstrip(".")
            if name not in known:
                raise KeyError(f"{child_path}: the schema has no such field")
            part["properties"][name] = used_part(known[name], of_name, definitions, child_path)
    return part


def extract(crds: Path, kubernetes: Path) -> dict[str, Schema]:
    """Return the used part of each schema by `name_of`."""
    import yaml

    whole: dict[str, Schema] = {}
    for file in crds.glob("*.yaml"):
        spec = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]
        for version in spec["versions"]:
            whole[f"{spec['group']}/{version['name']} {spec['names']['kind']}"] = version["schema"]["openAPIV3Schema"]
    definitions = json.loads((kubernetes / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
    by_name: dict[str, list[Any]] = {}
    for manifest in manifests():
        by_name.setdefault(name_of(manifest), []).append(manifest)
    for name in by_name.keys() - whole.keys():
        version, kind = name.split()
        group = version.partition("/")[0].removesuffix(".k8s.io")
        file = "-".join([kind.lower(), *dict.fromkeys([group, version.rpartition("/")[2]])])
        whole[name] = json.loads((kubernetes / f"{file}.json").read_text(encoding="utf-8"))
    return {name: used_part(whole[name], values, definitions, "") for name, values in sorted(by_name.items())}


def main() -> None:
    from jsonschema import Draft7Validator

    schemas = extract(*map(Path, sys.argv[1:]))
    for manifest in manifests():
        Draft7Validator(schemas[name_of(manifest)]).validate(manifest)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(schema)}" for name, schema in schemas.items())
    EXTRACT.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{len(schemas)} kinds are valid; wrote {EXTRACT}")


if __name__ == "__main__":
    main()
