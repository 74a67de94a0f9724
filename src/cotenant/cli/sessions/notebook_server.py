"""Starts JupyterLab in a job for `cotenant notebook`, and says where it serves.

Sent along as the source of `python3 -c`: it runs on nodes, with the job's Python (3.8 or newer) and nothing else. It
reads the token from its input and passes it on in a file of its own, so that neither a command line nor an environment
shows it. Once JupyterLab accepts connections, it prints a line with the port.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

READY = "cotenant notebook: port"
PAUSE_SECONDS = 0.05
NOT_FOUND = 127
LOOPBACK = "127.0.0.1"
OWN_VARIABLES = ("JUPYTER_TOKEN", "JUPYTER_TOKEN_FILE")


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as bound:
        bound.bind((LOOPBACK, 0))
        return int(bound.getsockname()[1])


def accepts(port: int) -> bool:
    """Return whether something listens on a port."""
    with socket.socket() as connecting:
        return connecting.connect_ex((LOOPBACK, port)) == 0


def main(arguments: list[str]) -> int:
    """Run JupyterLab until it ends; return its exit code."""
    token = sys.stdin.readline().strip()
    jupyter = shutil.which("jupyter")
    if not jupyter:
        print("jupyter is not on the PATH of the job", file=sys.stderr, flush=True)
        return NOT_FOUND
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # JupyterLab gets it as well, and ends
    with tempfile.TemporaryDirectory() as private:
        token_file = os.path.join(private, "token")
        descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(token)
        environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
        environment["JUPYTER_TOKEN_FILE"] = token_file
        return serve(jupyter, arguments, environment)


def serve(jupyter: str, arguments: list[str], environment: dict[str, str]) -> int:
    """Run JupyterLab on a free port, and print the port when it can be reached; return the exit code."""
    port = free_port()
    command = [jupyter, "lab", "--no-browser", f"--ip={LOOPBACK}", f"--port={port}", "--ServerApp.port_retries=0"]
    command += ["--allow-root"] if os.getuid() == 0 else []
    server = subprocess.Popen([*command, *arguments], env=environment, stdin=subprocess.DEVNULL)
    while not accepts(port):
        if server.poll() is not None:
            return int(server.returncode)
        time.sleep(PAUSE_SECONDS)
    print(READY, port, flush=True)
    code = server.wait()
    return int(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
