"""The manifests of examples/kubernetes fit each other, the command line and the settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollfeed.cli.main import build_parser
from rollfeed.config.load import validate_settings

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], dict[str, Any]]:
    found = [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    named = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(named) == len(found) == 7
    return named


def pods(objects: dict[tuple[str, str], dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (kind, each["spec"]["template"]) for (kind, _), each in objects.items() if "template" in each.get("spec", {})
    ]


def settings_of(objects: Any) -> Any:
    text = objects["ConfigMap", "rollfeed-run"]["data"]["run.toml"]
    return validate_settings(tomllib.loads(text), where="run.yaml")


def test_commands_of_rollfeed_are_there_with_their_flags(objects: Any) -> None:
    commands = [
        [*container["command"], *container["args"]]
        for _, template in pods(objects)
        for container in template["spec"]["containers"]
    ]
    ours = [words[1:] for words in commands if words[0] == "rollfeed"]
    assert sorted(words[0] for words in ours) == ["run", "serve"]
    for words in ours:
        build_parser(words[0]).parse_args(words)


def test_addresses_are_those_of_the_pods(objects: Any) -> None:
    servers = objects["StatefulSet", "rollfeed-servers"]
    assert (objects["Service", servers["spec"]["serviceName"]]["spec"]["clusterIP"]) == "None"
    [container] = servers["spec"]["template"]["spec"]["containers"]
    [port] = [each["containerPort"] for each in container["ports"]]
    name, service = servers["metadata"]["name"], servers["spec"]["serviceName"]
    expected = [f"http://{name}-{index}.{service}:{port}" for index in range(servers["spec"]["replicas"])]
    assert list(settings_of(objects).engine.sglang.workers) == expected
    [router] = objects["Deployment", "rollfeed-router"]["spec"]["template"]["spec"]["containers"]
    arguments = build_parser("serve").parse_args([*router["command"][1:], *router["args"]])
    assert arguments.workers == expected
    assert [{"name": "http", "containerPort": arguments.port}] == router["ports"]
    shown = objects["ConfigMap", "rollfeed-run"]["data"]["run.toml"].split('router = "')[1].split('"')[0]
    assert urlsplit(shown).port == arguments.port
    assert ("Service", urlsplit(shown).hostname) in objects


def test_services_find_their_pods_and_volumes_are_there(objects: Any) -> None:
    templates = [template for _, template in pods(objects)]
    for kind, name in objects:
        if kind != "Service":
            continue
        spec = objects[kind, name]["spec"]
        matched = [each for each in templates if spec["selector"].items() <= each["metadata"]["labels"].items()]
        assert len(matched) == 1
        assert spec["ports"][0]["port"] == matched[0]["spec"]["containers"][0]["ports"][0]["containerPort"]
    for template in templates:
        volumes = {each["name"]: each for each in template["spec"].get("volumes", [])}
        for container in template["spec"]["containers"]:
            assert {each["name"] for each in container.get("volumeMounts", [])} == volumes.keys()
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in objects
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in objects


def test_servers_are_not_killed_while_they_are_paused(objects: Any) -> None:
    [server] = objects["StatefulSet", "rollfeed-servers"]["spec"]["template"]["spec"]["containers"]
    assert "httpGet" not in server["livenessProbe"]
    assert "readinessProbe" not in server or objects["Service", "rollfeed-servers"]["spec"]["publishNotReadyAddresses"]


def test_weights_and_the_run_are_where_all_pods_reach_them(objects: Any) -> None:
    settings = settings_of(objects)
    job = objects["Job", "rollfeed-run"]["spec"]["template"]["spec"]
    shared = {
        mount["mountPath"]
        for spec in (job, objects["StatefulSet", "rollfeed-servers"]["spec"]["template"]["spec"])
        for mount in spec["containers"][0]["volumeMounts"]
        if mount["name"] == "shared"
    }
    assert shared == {"/shared"}
    out = job["containers"][0]["args"][-1]
    for path in (settings.engine.sglang.weights_folder, settings.model.checkpoint, out):
        assert path.startswith("/shared/")
