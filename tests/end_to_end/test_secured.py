"""Separate processes and users that authenticate by certificates."""

from __future__ import annotations

import json
import os
import pwd
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.commands import COTENANT, Cli, Outcome, environment_of
from tests.end_to_end.dashboard_client import Http
from tests.end_to_end.waiting import until
from tests.support.etcd_server import free_ports

from cotenant.security.certificates import Authority
from cotenant.security.subjects import Subject

SERVICES = ("placement", "predictor", "contention", "queue")
SUBMITTER = "nobody"  # a user that each machine has, and no system account


class Lab:
    """Four services and an agent, each with its own certificate."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory / "certs")
        self.authority.create()
        ports = dict(zip(SERVICES, free_ports(len(SERVICES)), strict=True))
        self.endpoints = ",".join(f"{name}=127.0.0.1:{port}" for name, port in ports.items())
        self.cli = Cli(environment_of(directory, COTENANT_STATE_DIR=str(directory / "state")))
        self.serving = ExitStack()
        for name, port in ports.items():
            self.start(name, *self.shown(f"service/{name}", "127.0.0.1"), "--listen", f"127.0.0.1:{port}")
        self.start("agent", *self.shown("agent/n1"), "--node", "n1", "--gpus", "fake:1")

    def start(self, service: str, *flags: str) -> None:
        log = self.directory / f"{service}.log"
        process = self.cli.start("serve", service, "--endpoints", self.endpoints, *flags, log=log)
        self.serving.callback(process.terminate)

    def shown(self, subject: str, *names: str) -> tuple[str, ...]:
        issued = self.authority.issue(Subject.parse(subject), names)
        files = ("--tls-ca", self.authority.cert_path, "--tls-cert", issued.path, "--tls-key", issued.key_path)
        return tuple(map(str, files))

    def by(self, subject: str, *words: str, code: int = 0) -> Outcome:
        return self.at(self.endpoints, subject, *words, code=code)

    def at(self, endpoint: str, subject: str, command: str, *rest: str, code: int = 0) -> Outcome:
        return self.cli(command, "--endpoint", endpoint, *self.shown(subject), *rest, code=code)

    def has_a_node(self) -> bool:
        arguments = ("nodes", "--endpoint", self.endpoints, *self.shown("operator/ann"))
        ended = subprocess.run([COTENANT, *arguments], env=self.cli.environment, capture_output=True, text=True)
        return "n1" in ended.stdout


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    with made.serving:
        yield made


def test_a_cluster_with_certificates_serves_only_known_subjects(lab: Lab) -> None:
    eve, bob = f"user/{SUBMITTER}?tenants=a", "user/bob?tenants=b"
    until(lab.has_a_node, "node")
    reported = lab.by(eve, "submit", "--tenant", "a", "--gpus", "1", "--wait", "--", "id", "-u")
    uid = pwd.getpwnam(SUBMITTER).pw_uid if os.geteuid() == 0 else os.geteuid()
    assert reported.out.splitlines()[-1] == str(uid)
    assert lab.by(bob, "jobs", "--all").out == ""
    assert "NOT_YOUR_TENANT" in lab.by(bob, "submit", "--tenant", "a", "--", "true", code=1).err
    assert "ROLE_MAY_NOT" in lab.by(bob, "drain", "n1", code=1).err
    assert "TLS" in lab.cli("jobs", "--endpoint", lab.endpoints, code=3).err
    for endpoint in (one.partition("=")[2] for one in lab.endpoints.split(",")):  # one address is enough
        assert "succeeded" in lab.at(endpoint, eve, "jobs", "--all").out
        assert lab.at(endpoint, bob, "jobs", "--all").out == ""
        assert "ROLE_MAY_NOT" in lab.at(endpoint, bob, "drain", "n1", code=1).err
        assert lab.at(endpoint, "operator/ann", "status").out.count("1 of 1 serving") == len(SERVICES)
    check_dashboard(lab)
    check_gateway(lab)
    audit = lab.cli("audit").out
    assert all(word in audit for word in ("CreateJob", SUBMITTER, "DrainNode", "ROLE_MAY_NOT", "agent/n1"))


def check_gateway(lab: Lab) -> None:
    """It serves HTTPS, shows the mesh its certificate, and calls as its callers, never as itself."""
    (port,) = free_ports(1)
    made = lab.cli("tokens", "create", "--role", "viewer", "--name", "gil", "--tenant", "a").out.split()[-1]
    own = (*lab.shown("service/gateway", "127.0.0.1"), "--allow-origin", "https://portal.example")
    lab.start("gateway", *own, "--listen", f"127.0.0.1:{port}")
    base, log = f"https://127.0.0.1:{port}", lab.directory / "gateway.log"
    until(lambda: f"gateway serves at {base}/" in log.read_text(), "the gateway serves")
    trusted = ssl.create_default_context(cafile=str(lab.authority.cert_path))

    def call(path: str, token: str = "") -> tuple[int, dict[str, Any], Any]:
        headers = {"authorization": f"Bearer {token}", "origin": "https://portal.example"} if token else {}
        request = urllib.request.Request(base + path, headers=headers)
        try:
            with urllib.request.urlopen(request, context=trusted) as answer:
                return answer.status, json.loads(answer.read()), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), error.headers

    status, answer, headers = call("/v1/jobs", made)
    assert (status, [job["spec"]["tenant"] for job in answer["jobs"]]) == (200, ["a"])
    assert headers["access-control-allow-origin"] == "https://portal.example"
    assert call("/v1/jobs")[0] == call("/v1/jobs", "x" * 43)[0] == 401
    drained = urllib.request.Request(
        f"{base}/v1/nodes/n1:drain", b"{}", {"authorization": f"Bearer {made}", "content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(drained, context=trusted)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{base}/openapi.json", context=ssl.create_default_context())


def check_dashboard(lab: Lab) -> None:
    """It serves HTTPS, and calls as its readers: never by its own certificate, which may do anything."""
    (port,) = free_ports(1)
    made = lab.cli("tokens", "create", "--role", "viewer", "--name", "vic", "--tenant", "a").out.split()[-1]
    lab.start("web", *lab.shown("service/web", "127.0.0.1"), "--listen", f"127.0.0.1:{port}", "--address", "127.0.0.1")
    log = lab.directory / "web.log"
    base = f"https://127.0.0.1:{port}"
    until(lambda: f"web serves at {base}/" in log.read_text(), "the dashboard serves")
    assert "token=" not in log.read_text()  # nobody logs in with the mesh's token
    browser = Http(base, ssl.create_default_context(cafile=str(lab.authority.cert_path)))
    for wrong in ("x" * 43, made[:-1]):
        assert browser("/login", {"csrf": browser.csrf("/login"), "token": wrong})[0] == 403
    browser.log_in(made)
    [cookie] = [one for one in browser.jar if "login" not in one.name]
    assert (cookie.secure, cookie.name) == (True, f"__Host-cotenant-{port}")
    rows = next(data["rows"] for name, data in browser.events("/events/jobs") if name == "jobs" and data["rows"])
    assert [(row["tenant"], row["phase"]) for row in rows] == [("a", "succeeded")]
    assert browser("/", Host="evil.example")[0] == 421
