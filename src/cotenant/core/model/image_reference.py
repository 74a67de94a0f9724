"""References to container images: what a job may name, and why a reference is invalid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from cotenant.core.model.field_limits import Limit, shown
from cotenant.core.model.limits import PATH_LENGTH_MAX

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class ImageKind(StrEnum):
    """Where an image is."""

    DIRECTORY = "dir"  # an unpacked root file system
    OCI_LAYOUT = "oci"  # a directory with an OCI image layout


class InvalidReference(ValueError):
    """A text is no reference to an image, for this reason."""


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image on a node's file systems; without a tag, the only one of its layout."""

    kind: ImageKind
    path: str
    tag: str = ""


def parse_reference(text: str) -> ImageReference:
    """Return what a text refers to.

    >>> parse_reference("oci:/images/train:v1").tag, parse_reference("dir:/images/root").path
    ('v1', '/images/root')

    Raises:
        InvalidReference: the text is no reference.
    """
    kind, colon, place = text.partition(":")
    if not colon or kind not in list(ImageKind):
        raise InvalidReference(f"must be dir:DIR or oci:DIR[:TAG], not {shown(text)}")
    tag = ""
    if kind == ImageKind.OCI_LAYOUT and ":" in place:
        place, _, tag = place.rpartition(":")
        if not _TAG.fullmatch(tag):
            raise InvalidReference(f"has an invalid tag: {shown(tag)}")
    if not place.startswith("/"):
        raise InvalidReference(f"must have an absolute path, not {shown(place)}")
    if "\0" in place or any(part == ".." for part in place.split("/")):
        raise InvalidReference(f"must have a path without '..' and NUL bytes, not {shown(place)}")
    if len(place) > PATH_LENGTH_MAX:
        raise InvalidReference(f"has a path of {len(place)} characters; {PATH_LENGTH_MAX} are allowed at most")
    return ImageReference(ImageKind(kind), place, tag)


def _reason(text: str) -> str:
    if not text:
        return ""
    try:
        parse_reference(text)
    except InvalidReference as error:
        return str(error)
    return ""


IMAGE = Limit("be dir:DIR or oci:DIR[:TAG], with an absolute path", _reason)
