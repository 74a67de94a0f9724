"""Readiness notification to systemd, for units of type `notify` [sd_notify(3)]."""

from __future__ import annotations

import os
import socket

from cotenant.cli.outcome import note

VARIABLE = "NOTIFY_SOCKET"


def notify_ready() -> None:
    """Notify systemd once; the variable is removed so that child processes do not inherit it."""
    address = os.environ.pop(VARIABLE, "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify_socket:
            notify_socket.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            notify_socket.sendall(b"READY=1")
    except OSError as error:
        note(f"cannot notify systemd: {error.strerror}")
