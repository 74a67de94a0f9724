"""Telling systemd that a service serves, where its unit is of the type `notify` [sd_notify(3)]."""

from __future__ import annotations

import os
import socket

from cotenant.cli.outcome import note

VARIABLE = "NOTIFY_SOCKET"


def tell_ready() -> None:
    """Say so once; nothing that is started later finds the variable. Without one nobody wants to know."""
    address = os.environ.pop(VARIABLE, "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            told.sendall(b"READY=1")
    except OSError as error:
        note(f"systemd could not be told that this serves: {error.strerror}")
