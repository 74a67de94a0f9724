"""Command prefixes that run a command as an unprivileged user, even if Python is in root's home."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

USER = 64123  # has no entry anywhere
FRESH_MOUNTS = ("unshare", "--mount", "--propagation=private", "sh", "-c")
# Makes an interpreter in root's home, as pyenv installs it, visible to the command, and to nothing else.
OPEN_PYTHON = (
    f'p={sys.base_prefix}; h=$p; while [ $h != / ] && [ -n "$(find $h -maxdepth 0 -perm -o=x)" ]; do '
    "h=$(dirname $h); done; if [ $h != / ]; then mount --rbind $p /mnt && mount -t tmpfs -o mode=755 none $h && "
    "mkdir -p $p && mount --rbind /mnt $p || exit 9; fi; "
)
BECOME = f'exec setpriv --reuid={USER} --regid={USER} --clear-groups --inh-caps=-all "$@"'
AS_USER = (*FRESH_MOUNTS, OPEN_PYTHON + BECOME, "sh")
# A process whose root is not that of its mount namespace may not make user namespaces.
WITHOUT_NAMESPACES = (*FRESH_MOUNTS, OPEN_PYTHON + "mount --rbind / /opt && cd /opt && " + BECOME.replace(
    "exec ", "exec chroot /opt "), "sh")  # fmt: skip


def need_another_user() -> None:
    """Skip, with the reason, if nothing can be started as another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can start something as another user")
    if subprocess.run([*AS_USER, sys.executable, "-c", "import cotenant"], check=False).returncode:
        pytest.skip(f"{sys.executable} cannot be run by other users of this machine")
