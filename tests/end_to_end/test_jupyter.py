"""A kernel of a real JupyterLab through the forwarded URL: `make test-jupyter` installs JupyterLab and runs it."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.end_to_end.meshes import Mesh
from tests.support.paths import ROOT

JUPYTER = ROOT / ".cotenant" / "jupyter" / "bin"
START_SECONDS = 180.0

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not (JUPYTER / "jupyter-lab").exists(), reason="`make test-jupyter` installs JupyterLab"),
]

EXECUTE = """\
import json, sys, uuid, websocket
link = websocket.create_connection(sys.argv[1], timeout=120)
header = {"msg_id": uuid.uuid4().hex, "username": "", "session": "s", "msg_type": "execute_request", "version": "5.3"}
content = {"code": "import os; print(6 * 7, os.environ['CUDA_VISIBLE_DEVICES'], os.getcwd())", "silent": False}
link.send(json.dumps({"header": header, "parent_header": {}, "metadata": {}, "channel": "shell", "content": content}))
while True:
    message = json.loads(link.recv())
    if message["header"]["msg_type"] == "stream":
        print(message["content"]["text"], end="")
    if message["header"]["msg_type"] == "execute_reply":
        break
"""


class Lab:
    """JupyterLab's API behind the URL that `cotenant notebook` prints."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url, self.address, (self.token,) = url, parts.netloc, parse_qs(parts.query)["token"]

    def __call__(self, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(f"http://{self.address}/api/{path}", body)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@pytest.fixture
def lab(mesh: Mesh, tmp_path: Path) -> Iterator[Lab]:
    own = {"VIRTUAL_ENV": str(JUPYTER.parent), "PATH": f"{JUPYTER}:{mesh.cli.environment['PATH']}"}
    mesh.cli.environment |= own
    notebook = mesh.cli.start("notebook", "--gpus", "1", "--port", "0", "--json", log=tmp_path / "notebook")
    try:
        notebook.wait_for_output('"url"')
        yield Lab(json.loads("{" + notebook.said.partition("{")[2].rpartition("}")[0] + "}")["url"])
    finally:
        notebook.terminate()


def test_a_kernel_runs_code_on_the_jobs_gpu(lab: Lab) -> None:
    with urllib.request.urlopen(lab.url, timeout=60) as page:
        assert "JupyterLab" in page.read().decode()
    kernel = lab("kernels", b"{}")["id"]
    channels = f"ws://{lab.address}/api/kernels/{kernel}/channels?token={lab.token}"
    said = subprocess.run(
        [JUPYTER / "python", "-c", EXECUTE, channels], capture_output=True, text=True, timeout=START_SECONDS, check=True
    )
    assert said.stdout.startswith("42 GPU-fake-")
