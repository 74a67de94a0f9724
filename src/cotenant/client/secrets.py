"""A secret of a tenant as the Python API shows it: everything but its value."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from cotenant.client.errors import BadField, InvalidArgument
from cotenant.client.times import moment
from cotenant.core.model.secrets import secret_name_error, value_error
from cotenant.v1.secret_service_pb2 import Secret as SecretMessage
from cotenant.v1.secret_service_pb2 import SetSecretRequest


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret, without its value, which nobody reads again but the nodes that run jobs that name it."""

    name: str
    tenant: str
    size_bytes: int
    created: datetime | None
    updated: datetime | None
    updated_by: str


def secret_of(message: SecretMessage) -> Secret:
    """Return a secret as the queue knows it."""
    return Secret(
        name=message.name,
        tenant=message.tenant,
        size_bytes=message.size_bytes,
        created=moment(message, "create_time"),
        updated=moment(message, "update_time"),
        updated_by=message.updater,
    )


def set_request(name: str, value: str | bytes, tenant: str) -> SetSecretRequest:
    """Return the request that sets a secret.

    Raises:
        InvalidArgument: names the name, the value or both, without anything of the value.
    """
    data = value.encode(errors="surrogateescape") if isinstance(value, str) else value
    found = (BadField("name", secret_name_error(name)), BadField("value", value_error(data)))
    if wrong := tuple(one for one in found if one.description):
        raise InvalidArgument("; ".join(map(str, wrong)), fields=wrong)
    return SetSecretRequest(tenant=tenant, name=name, value=data)
