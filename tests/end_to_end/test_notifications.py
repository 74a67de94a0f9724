"""A notification reaches its receiver although the queue is killed between the end of the job and the delivery."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.core.model.lifecycle import Phase

KEY = b"0123456789abcdef"


class Receiver:
    """An HTTP server that does not answer until it may."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.may_answer = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                at, digest = (part.partition("=")[2] for part in self.headers["Cotenant-Signature"].split(","))
                assert digest == hmac.new(KEY, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
                receiver.bodies.append(json.loads(body))
                if receiver.may_answer.wait(0.0):
                    self.send_response(204)
                    self.end_headers()
                else:
                    receiver.may_answer.wait(60.0)

            def log_message(self, *args: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/s3cret"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.may_answer.set()
    receiver.server.shutdown()


def test_kill_9_between_the_end_of_a_job_and_the_delivery_loses_no_notification(
    tmp_path: Path, receiver: Receiver
) -> None:
    (tmp_path / "key").write_bytes(KEY)
    config = tmp_path / "mesh.toml"
    config.write_text(f'[notifications]\nsigning_key_file = "{tmp_path / "key"}"\nallow_networks = "127.0.0.0/8"\n')
    (tmp_path / "mesh").mkdir()
    mesh = Mesh(tmp_path / "mesh", "--gpus", "fake:1", "--config", str(config))
    try:
        mesh.start()
        job_id = mesh.cli.submit("--cpus", "1", "--name", "bert", "--notify", receiver.url, "--", "true")
        mesh.client.wait_for(job_id, Phase.SUCCEEDED)
        until(lambda: bool(receiver.bodies), "a notification")
        mesh.kill()
        receiver.may_answer.set()
        before = len(receiver.bodies)
        mesh.start()
        until(lambda: len(receiver.bodies) > before, "the notification again")
        assert {(one["id"], one["event"], one["name"]) for one in receiver.bodies} == {(job_id, "succeeded", "bert")}
        until(lambda: "succeeded, to 127.0.0.1" in mesh.cli("explain", job_id).out, "its event")
        for command in ("show", "explain"):
            assert "s3cret" not in mesh.cli(command, job_id, "--json").out
        assert "s3cret" not in mesh.log.read_text()
    finally:
        mesh.close()
