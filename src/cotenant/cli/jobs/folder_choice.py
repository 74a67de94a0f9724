"""Chooses for `--upload auto`: whether a job's folder has to be uploaded, or every node is on this machine.

Nobody guesses: nodes on this machine have the folder, and of others only they can know. So where there are others, the
folder is uploaded, and the job also keeps where it was submitted from. A node that has the same folder there, by inode
and owner, starts the job in it, and any other one in a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.job_file import AUTO_UPLOAD, Draft
from cotenant.v1.node_service_pb2 import ListNodesRequest

PAGE_SIZE = 1000
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


async def choose(mesh: Mesh, drafts: Sequence[Draft]) -> list[Draft]:
    """Return the jobs with a folder to upload, or none, in place of `auto`."""
    if not any(draft.spec.upload == AUTO_UPLOAD for draft in drafts):
        return list(drafts)
    here = await _all_nodes_are_here(mesh)
    return [_chosen(draft, here) if draft.spec.upload == AUTO_UPLOAD else draft for draft in drafts]


def unchosen(drafts: Sequence[Draft]) -> list[Draft]:
    """Return the jobs without `auto`, for a check."""
    return [_chosen(draft, here=True) if draft.spec.upload == AUTO_UPLOAD else draft for draft in drafts]


def _chosen(draft: Draft, here: bool) -> Draft:
    folder = draft.spec.submit_directory
    path = folder.path if folder else "."
    return replace(draft, spec=replace(draft.spec, upload="" if here else path), keeps_folder=True)


async def _all_nodes_are_here(mesh: Mesh) -> bool:
    """Return whether all nodes of the mesh are on this machine; False if that is unknown, or there are none."""
    own = await asyncio.to_thread(_boot_id)
    if not own:
        return False
    token, found = "", False
    while True:
        page = await mesh.nodes.ListNodes(ListNodesRequest(page_size=PAGE_SIZE, page_token=token))
        if any(node.inventory.machine != own for node in page.nodes):
            return False
        found, token = found or bool(page.nodes), page.next_page_token
        if not token:
            return found


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
