"""Links log in once, and for a limited time."""

from __future__ import annotations

import os
from pathlib import Path

from cotenant.cli.mesh import login_links
from cotenant.cli.mesh.login_links import DIRECTORY, LIFE_SECONDS, mint, redeem


def test_a_link_is_redeemed_once(tmp_path: Path) -> None:
    token = mint(tmp_path)
    assert [redeem(tmp_path, "x"), redeem(tmp_path, token), redeem(tmp_path, token)] == [False, True, False]


def test_a_link_expires_and_is_removed(tmp_path: Path) -> None:
    token = mint(tmp_path)
    [path] = (tmp_path / DIRECTORY).iterdir()
    assert token not in path.name
    long_ago = path.stat().st_mtime - LIFE_SECONDS - 1
    os.utime(path, (long_ago, long_ago))
    other = mint(tmp_path)
    assert not path.exists()
    assert not redeem(tmp_path, token)
    [path] = (tmp_path / DIRECTORY).iterdir()
    os.utime(path, (long_ago, long_ago))
    assert not redeem(tmp_path, other)


def test_nobody_else_may_look_at_links(tmp_path: Path) -> None:
    mint(tmp_path)
    assert (tmp_path / login_links.DIRECTORY).stat().st_mode & 0o077 == 0
