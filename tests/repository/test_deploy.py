"""Files of deploy/, tested without a container engine; `make test-images` uses one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.paths import DEPLOY

from cotenant.cli import application as cli
from cotenant.cli.lazy import load
from cotenant.cli.mesh.settings import read_settings
from cotenant.security.certificates import read

BASE = DEPLOY / "kubernetes" / "base"
WORKLOADS = {"StatefulSet", "DaemonSet"}
OURS = {"cotenant-server", "cotenant-agent"}
IMAGE = (DEPLOY / "containers" / "Containerfile").read_text()
PROJECT = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
SERVICES = {"queue": 7070, "placement": 7071, "predictor": 7072, "contention": 7073}


def documents(path: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all(path.read_text())


OBJECTS = [one for path in sorted(BASE.glob("*.yaml")) for one in documents(path) if one["kind"] != "Kustomization"]


def named(kind: str, name: str) -> dict[str, Any]:
    found = [one for one in OBJECTS if one["kind"] == kind and one["metadata"]["name"] == name]
    assert len(found) == 1, (kind, name)
    return found[0]


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for one in OBJECTS:
        if one["kind"] in WORKLOADS:
            for container in one["spec"]["template"]["spec"]["containers"]:
                yield one["metadata"]["name"], container


# What is run ------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield every cotenant command line that a file in deploy/ runs."""
    for name, container in containers():
        if container["image"] in OURS:
            yield f"kubernetes {name}", [str(part) for part in container["args"]]
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe in container:
                    yield f"kubernetes {name} {probe}", container[probe]["exec"]["command"][1:]
    for name, service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].items():
        if service["image"].removesuffix(":local") in OURS:
            yield f"compose {name}", [str(part) for part in service["command"]]
    for unit in (DEPLOY / "systemd").glob("*.service"):
        started = re.search(r"^ExecStart=\S+ (.*)$", unit.read_text(), re.MULTILINE)
        assert started
        words = started[1].removesuffix(" $COTENANT_FLAGS").replace("%i", "queue").split()
        yield f"systemd {unit.name}", words[2:] if words[0] == "--state-dir" else words


COMMANDS = list(commands())


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[where for where, _ in COMMANDS])
def test_a_command_exists_with_its_options(where: str, words: list[str]) -> None:
    entry = next(entry for entry in cli.ENTRIES if entry.name == words[0])
    assert load(entry).make_context(entry.name, words[1:]).params


@pytest.mark.parametrize(
    "name",
    [
        "kubernetes/base/cotenant.toml",
        "kubernetes/base/agent.toml",
        "compose.toml",
        "compose-agent.toml",
        "systemd/etc/cotenant.toml",
        "systemd/etc/agent.toml",
    ],
)
def test_settings_are_valid(name: str) -> None:
    assert read_settings(DEPLOY / name)


# Kubernetes -------------------------------------------------------------------------------------------------


def test_every_object_conforms_to_the_published_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    assert len(OBJECTS) > 15
    for one in OBJECTS:
        validate.validate(one, validate.latest_version(), strict=True)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_probed_where_it_listens_and_survives_a_drain(service: str) -> None:
    port = SERVICES[service]
    workload = named("StatefulSet", service)
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert f"--listen=0.0.0.0:{port}" in container["args"]
    assert [one["containerPort"] for one in container["ports"]] == [port]
    assert named("Service", service)["spec"]["ports"][0]["port"] == port
    labels = workload["spec"]["template"]["metadata"]["labels"]
    for selects in (
        workload["spec"]["selector"]["matchLabels"],
        named("Service", service)["spec"]["selector"],
        named("PodDisruptionBudget", service)["spec"]["selector"]["matchLabels"],
        named("NetworkPolicy", "control-plane")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selects.items() <= labels.items()
    assert {"port": port} in named("NetworkPolicy", "control-plane")["spec"]["ingress"][0]["ports"]
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in workload["spec"]["template"]["spec"]["volumes"]}


def test_containers_have_least_privilege() -> None:
    for name, container in containers():
        rights = container["securityContext"]
        assert not rights.get("privileged"), name
        assert rights["capabilities"]["drop"] == ["ALL"]
        if name != "agent":
            assert not rights["allowPrivilegeEscalation"]
            assert rights["readOnlyRootFilesystem"]
            assert "add" not in rights["capabilities"]
    for one in OBJECTS:
        if one["kind"] in WORKLOADS:
            assert one["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("overlay", ["base", "lab"])
def test_an_overlay_renders_valid_objects(overlay: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl not found")
    done = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / "kubernetes" / overlay)], capture_output=True, text=True, check=False
    )
    if "unknown field" in done.stderr:
        pytest.skip("this kubectl is too old for the overlays")
    assert (done.returncode, done.stderr) == (0, "")
    rendered = [one for one in yaml.safe_load_all(done.stdout) if one]
    validate = pytest.importorskip("kubernetes_validate")
    for one in rendered:
        validate.validate(one, validate.latest_version(), strict=True)
    maps = {one["metadata"]["name"] for one in rendered if one["kind"] == "ConfigMap"}
    replicas = {}
    for one in rendered:
        if one["kind"] in WORKLOADS:
            spec = one["spec"]["template"]["spec"]
            used = {volume["configMap"]["name"] for volume in spec.get("volumes", ()) if "configMap" in volume}
            assert used <= maps
            assert all(":" in container["image"] for container in spec["containers"])
            replicas[one["metadata"]["name"]] = one["spec"].get("replicas")
    assert replicas["etcd"] == 3
    assert {replicas[name] for name in SERVICES} == {2 if overlay == "base" else 1}


# The others -------------------------------------------------------------------------------------------------


def test_compose_names_only_existing_files_and_volumes() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./secrets"):
                continue  # created by the user
            if source.startswith("."):
                assert (DEPLOY / source).exists(), (name, source)
            elif not source.startswith("/"):
                assert source in compose["volumes"], (name, source)
        for other in service.get("depends_on", ()):
            assert other in compose["services"], (name, other)
        if "build" in service:
            built = DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]
            target = service["build"].get("target")
            assert target is None or f" AS {target}\n" in built.read_text()
            assert service["image"] == f"cotenant-{target or 'etcd'}:local"


def test_the_agent_has_the_same_capabilities_everywhere() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["agent"]["cap_add"]
    (agent,) = (container for name, container in containers() if name == "agent")
    assert sorted(agent["securityContext"]["capabilities"]["add"]) == sorted(compose)


@pytest.mark.parametrize(("role", "user"), [("server", "cotenant"), ("agent", "root"), ("client", "cotenant")])
def test_an_image_has_the_locked_packages_of_its_role(role: str, user: str) -> None:
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", IMAGE, re.MULTILINE | re.DOTALL))
    assert re.findall(r"^USER (\S+)$", stages[role], re.MULTILINE) == [user]
    assert f"COPY --from={role}-packages " in stages[role]
    locked, source = (stages[f"{role}-packages"].index(text) for text in (f"-r locks/{role}.txt", "--from=wheel"))
    assert locked < source
    labels = dict(re.findall(r"org\.opencontainers\.image\.(\w+)=\"?([^\"\n]*?)\"?(?: \\)?\n", stages[role]))
    assert labels["title"] == f"cotenant-{role}"
    assert labels["licenses"] == PROJECT["license"]
    assert re.findall(r"^ARG VERSION=(.*)$", stages[role], re.MULTILINE) == [PROJECT["version"]]
    packages = {"cotenant-server", "cotenant-agent", "cotenant-etcd"}
    assert {container["image"] for _, container in containers()} == packages


def test_the_build_context_has_no_secrets() -> None:
    allowed = [line for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines() if line[:1] not in ("#", "")]
    assert allowed[0] == "*"
    assert not any(line.startswith(("!deploy", "!.")) for line in allowed)
    assert not (DEPLOY.parent / ".containerignore").exists()  # Podman would read it instead


@pytest.mark.parametrize("unit", ["cotenant@.service", "cotenant-agent.service"])
def test_a_unit_is_valid(unit: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze not found")
    text = (DEPLOY / "systemd" / unit).read_text().replace("/opt/cotenant/bin/cotenant", "/bin/true")
    (tmp_path / unit).write_text(text)
    done = subprocess.run([analyze, "verify", str(tmp_path / unit)], capture_output=True, text=True, check=False)
    warnings = [line for line in done.stderr.splitlines() if unit.partition("@")[0].partition(".")[0] in line]
    assert (done.returncode, warnings) == (0, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "say what this machine is to run"), (["agnet"], "there is no part 'agnet'")],
)
def test_install_rejects_bad_arguments_before_it_changes_anything(
    words: list[str], message: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        ["sh", str(DEPLOY / "install.sh"), *words],
        env={"PATH": "/usr/bin:/bin", "COTENANT_PREFIX": str(tmp_path / "opt")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_install_is_shorter_than_a_page() -> None:
    assert len((DEPLOY / "install.sh").read_text().splitlines()) <= 50


def test_dashboard_panels_do_not_overlap() -> None:
    for path in (DEPLOY / "grafana" / "dashboards").glob("*.json"):
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in json.loads(path.read_text())["panels"]]
        assert len(set(places)) == len(places), path.name


def test_secrets_are_created_once_for_every_part(tmp_path: Path) -> None:
    command = ["sh", str(DEPLOY / "secrets.sh"), str(tmp_path / "s"), "gpu-1"]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "COTENANT": str(Path(sys.executable).with_name("cotenant")),
    }
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nothing was issued twice
    for part in (*SERVICES, "agent-gpu-1", "operator"):
        assert sorted(path.name for path in (tmp_path / "s" / part).iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
        assert (tmp_path / "s" / part / "tls.key").stat().st_mode & 0o777 == 0o600
    for service in SERVICES:  # as clients and replicas call it, in Kubernetes and in Compose
        wanted = {f"{service}.cotenant", f"*.{service}.cotenant", service, f"{service}-1", f"{service}-2"}
        assert wanted <= set(read(tmp_path / "s" / service / "tls.crt").names)
