"""Network policies and pod security of the manifests, checked against the code's table of callers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from tests.repository.test_deploy import BASE, OBJECTS, SERVICES, WORKLOADS, containers, named
from tests.support.paths import ROOT

from cotenant.cli.mesh.settings import read_settings
from cotenant.rpc.endpoints import Endpoints, addresses_of, host_and_port
from cotenant.security.permissions import ROLES, Role

SERVICES_FOLDER = ROOT / "services"
HOSTS = {  # the processes that serve each gRPC service
    "JobService": ("queue",),
    "ArrayService": ("queue",),
    "TenantService": ("queue",),
    "FolderService": ("queue",),
    "SecretService": ("queue",),
    "ScheduleService": ("queue",),
    "NodeService": ("placement",),
    "PlacementService": ("placement",),
    "AgentService": ("placement",),
    "PredictorService": ("predictor",),
    "ObservationService": ("predictor",),
    "AdviceService": ("predictor",),
    "ContentionService": ("contention",),
    "SampleService": ("contention",),
    "ProcessService": ("queue", "placement", "predictor"),
    "PolicyService": tuple(SERVICES),
}
VIA_PLACEMENT = (  # agents have no other connection; it routes their calls
    "/cotenant.v1.FolderService/ReadChunks",
    "/cotenant.v1.SecretService/ReadSecrets",
)
ETCD = {"client": 2379, "peer": 2380, "metrics": 2381}
PEOPLE = {Role.VIEWER, Role.USER, Role.TENANT_ADMIN, Role.OPERATOR}


@dataclass(frozen=True, eq=False)
class Peer:
    """An end of a connection: a pod, or a peer without labels that no selector matches, as a host-network pod."""

    name: str
    namespace: str = ""
    labels: Mapping[str, str] | None = None


def _pods() -> Iterator[Peer]:
    for one in OBJECTS:
        if one["kind"] in WORKLOADS:
            template, name = one["spec"]["template"], one["metadata"]["name"]
            on_host = template["spec"].get("hostNetwork", False)
            yield Peer(name, one["metadata"]["namespace"], None if on_host else template["metadata"]["labels"])


PODS = {pod.name: pod for pod in _pods()}
STRANGER = Peer("stranger", "default", {"app.kubernetes.io/name": "queue", "cotenant/control-plane": "true"})
PROMETHEUS = Peer("prometheus", "watching", {})
OUTSIDE = Peer("outside")
NAMESPACES = {"watching": {"cotenant/watches": "true"}}


def called_by(*roles: Role) -> set[str]:
    """Return the services that callers with these roles may call."""
    methods = (method for method, rule in ROLES.items() if rule.scopes.keys() & set(roles))
    return {
        host
        for method in methods
        for host in (("placement",) if method in VIA_PLACEMENT else HOSTS[method.split("/")[1].rpartition(".")[2]])
    }


# What NetworkPolicies say [Kubernetes' reference, NetworkPolicySpec] -----------------------------------------


def may_reach(source: Peer, target: Peer, port: int, policies: list[dict[str, Any]]) -> bool:
    """Return whether a connection is allowed: egress of the source and ingress of the target."""
    return _allowed("Egress", source, target, port, policies) and _allowed("Ingress", target, source, port, policies)


def _allowed(direction: str, pod: Peer, other: Peer, port: int, policies: list[dict[str, Any]]) -> bool:
    """Return whether a direction is allowed: a pod without policies allows all; otherwise any policy may allow it."""
    selecting = [
        policy["spec"]
        for policy in policies
        if pod.labels is not None
        and policy["metadata"]["namespace"] == pod.namespace
        and direction in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], pod.labels)
    ]
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), ())]
    return not selecting or any(
        _lets(rule, pod, other, port, "from" if direction == "Ingress" else "to") for rule in rules
    )


def _lets(rule: dict[str, Any], pod: Peer, other: Peer, port: int, side: str) -> bool:
    ports = rule.get("ports", [])
    if ports and not any(one["port"] == port and one.get("protocol", "TCP") == "TCP" for one in ports):
        return False
    return side not in rule or any(_is_peer(peer, pod, other) for peer in rule[side])


def _is_peer(peer: dict[str, Any], pod: Peer, other: Peer) -> bool:
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    if other.labels is None:
        return False
    if "namespaceSelector" in peer:
        if not _selects(peer["namespaceSelector"], NAMESPACES.get(other.namespace, {})):
            return False
    elif other.namespace != pod.namespace:
        return False
    return _selects(peer.get("podSelector", {}), other.labels)


def _selects(selector: dict[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    assert all(one["operator"] == "In" for one in selector.get("matchExpressions", ()))
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())
    )


POLICIES = [one for one in OBJECTS if one["kind"] == "NetworkPolicy"]


def needed() -> set[tuple[Peer, Peer, int]]:
    """Return each connection that the mesh makes: by the table of roles, to the store, and among etcd's members."""
    paths = {
        (PODS[caller], PODS[service], SERVICES[service])
        for caller in SERVICES
        for service in called_by(Role.SERVICE) | {caller}  # and its own leader
    }
    paths |= {(PODS["agent"], PODS[service], SERVICES[service]) for service in called_by(Role.AGENT)}
    paths |= {(OUTSIDE, PODS[service], SERVICES[service]) for service in called_by(*PEOPLE)}
    paths |= {(PODS[service], PODS["etcd"], ETCD["client"]) for service in with_store()}
    paths |= {(PODS["etcd"], PODS["etcd"], ETCD[port]) for port in ("client", "peer")}
    return paths | {(PROMETHEUS, PODS["etcd"], ETCD["metrics"])}


def with_store() -> set[str]:
    """Return the services that open the store."""
    return {name for name in SERVICES if "open_store(" in (SERVICES_FOLDER / name / "__main__.py").read_text()}


def test_the_table_of_hosts_has_every_grpc_service() -> None:
    assert {method.split("/")[1].rpartition(".")[2] for method in ROLES} == set(HOSTS)
    assert called_by(Role.AGENT) == {"placement", "contention"}
    assert called_by(*PEOPLE) == set(SERVICES)
    assert with_store() == set(SERVICES) - {"contention"}


def test_needed_connections_are_allowed_and_etcd_accepts_no_others() -> None:
    paths = needed()
    blocked = {(a.name, b.name, port) for a, b, port in paths if not may_reach(a, b, port, POLICIES)}
    assert blocked == set()
    peers = {*PODS.values(), STRANGER, PROMETHEUS, OUTSIDE}
    too_much = {
        (one.name, port)
        for one in peers
        for port in ETCD.values()
        if (one, PODS["etcd"], port) not in paths and may_reach(one, PODS["etcd"], port, POLICIES)
    }
    assert too_much == set()
    others = (port for port in range(1, 10_000) if port not in SERVICES.values())
    assert not any(may_reach(OUTSIDE, PODS["queue"], port, POLICIES) for port in others)


def test_a_policy_that_blocks_or_allows_too_much_is_detected() -> None:
    etcd = next(index for index, one in enumerate(POLICIES) if one["metadata"]["name"] == "etcd")
    closed, opened = deepcopy(POLICIES), deepcopy(POLICIES)
    del closed[etcd]["spec"]["egress"][0]
    assert not may_reach(PODS["etcd"], PODS["etcd"], ETCD["peer"], closed)
    opened[etcd]["spec"]["ingress"].append({"from": [{"namespaceSelector": {}}], "ports": [{"port": 2379}]})
    assert may_reach(STRANGER, PODS["etcd"], ETCD["client"], opened)
    assert not may_reach(OUTSIDE, PODS["etcd"], ETCD["client"], opened)


# Where others are --------------------------------------------------------------------------------------------


def flags_of(container: dict[str, Any]) -> dict[str, str]:
    words = (str(word).removeprefix("--").partition("=") for word in container["args"] if str(word).startswith("--"))
    return {name: value for name, _, value in words}


def service_at(host: str, port: int) -> str:
    """Return the service of a cluster DNS name, after checking that its pods listen on the port."""
    *replica, name, namespace = host.split(".")
    service = named("Service", name)
    assert (service["metadata"]["namespace"], service["spec"]["clusterIP"]) == (namespace, "None")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert port in [one["port"] for one in service["spec"]["ports"]]
    workload = named("StatefulSet", name)
    assert workload["spec"]["serviceName"] == name
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert port in [one["containerPort"] for one in container["ports"]]
    if replica:
        number = re.fullmatch(rf"{name}-(\d+)", replica[0])
        assert number
        assert int(number[1]) < workload["spec"]["replicas"]
    return name


@pytest.mark.parametrize("part", [*SERVICES, "agent"])
def test_a_part_has_the_endpoints_of_all_services_that_it_calls(part: str) -> None:
    (container,) = (one for name, one in containers() if name == part)
    endpoints = Endpoints.parse(flags_of(container)["endpoints"])
    for service in called_by(Role.AGENT if part == "agent" else Role.SERVICE):
        (address,) = addresses_of(getattr(endpoints, service))
        assert service_at(*host_and_port(address)) == service
    if part != "agent":
        assert flags_of(container)["address"] == f"$(POD).{part}.cotenant"


def test_the_store_url_lists_the_members_of_etcd() -> None:
    scheme, _, members = read_settings(BASE / "cotenant.toml").store.partition("://")
    assert scheme == "etcd"
    assert {service_at(*host_and_port(member)) for member in members.split(",")} == {"etcd"}
    assert len(members.split(",")) == named("StatefulSet", "etcd")["spec"]["replicas"]


# What pods may do --------------------------------------------------------------------------------------------

# The restricted standard's volumes [Kubernetes' documentation, Pod Security Standards].
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def restricted_faults(pod: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of a pod under the `restricted` standard."""
    shared = pod.get("securityContext", {})
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    yield from (f"volume {one['name']}" for one in pod.get("volumes", ()) if not VOLUMES & one.keys())
    for container in pod["containers"] + pod.get("initContainers", []):
        own = {**shared, **container.get("securityContext", {})}
        sound = {
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "privileged": not own.get("privileged"),
            "runAsNonRoot": own.get("runAsNonRoot") is True and own.get("runAsUser") != 0,
            "capabilities": own.get("capabilities", {}).get("drop") == ["ALL"]
            and set(own["capabilities"].get("add", ())) <= {"NET_BIND_SERVICE"},
            "seccompProfile": own.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "ports": not any("hostPort" in port for port in container.get("ports", ())),
        }
        yield from (f"{container['name']}: {name}" for name, holds in sound.items() if not holds)


def test_pods_meet_the_security_standard_of_their_namespace() -> None:
    standards = {
        one["metadata"]["name"]: one["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for one in OBJECTS
        if one["kind"] == "Namespace"
    }
    assert standards == {"cotenant": "restricted", "cotenant-agents": "privileged"}
    for one in OBJECTS:
        if one["kind"] in WORKLOADS:
            faults = list(restricted_faults(one["spec"]["template"]["spec"]))
            assert bool(faults) is (standards[one["metadata"]["namespace"]] == "privileged"), (one["metadata"], faults)


def test_no_pod_has_access_to_the_kubernetes_api() -> None:
    kinds = {one["kind"] for one in OBJECTS}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "ServiceAccount"}
    for one in OBJECTS:
        if one["kind"] in WORKLOADS:
            assert one["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
            assert "serviceAccountName" not in one["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("kind", "name", "path", "wrong"),
    [
        ("StatefulSet", "queue", ("spec",), {"replica": 2}),
        ("DaemonSet", "agent", ("spec", "template", "spec", "containers", 0), {"readOnly": True}),
        ("NetworkPolicy", "etcd", ("spec",), {"egres": []}),
        ("PodDisruptionBudget", "etcd", ("spec",), {"minAvailable": [2]}),
    ],
)
def test_the_published_schemas_reject_unknown_fields(
    kind: str, name: str, path: tuple[str | int, ...], wrong: dict[str, Any]
) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    broken = deepcopy(named(kind, name))
    place: Any = broken
    for step in path:
        place = place[step]
    place.update(wrong)
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, validate.latest_version(), strict=True)


def test_every_file_of_the_base_is_listed() -> None:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in BASE.glob("*.yaml") if path.name != "kustomization.yaml")
