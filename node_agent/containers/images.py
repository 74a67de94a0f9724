"""Images as a node finds them."""

from __future__ import annotations

from cotenant.core.model.image_reference import parse_reference
from cotenant.node_agent.containers.container_config import Image


def image_of(reference: str) -> Image | None:
    """Return the image that a job refers to; None if it has none."""
    if not reference:
        return None
    return Image(parse_reference(reference).path, of_user=True)
