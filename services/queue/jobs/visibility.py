"""Which jobs and tenants a caller may see and change: all, or its own tenants and their descendants.

A job of another tenant does not exist for the caller: its id is not found, it is in no list, and where a reason names
it, "another tenant's job" replaces the name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from cotenant.codec import errors
from cotenant.core.model.job import TENANT_DEFAULT
from cotenant.security.identity import Identity, caller, denied, resolve_tenant, scope
from cotenant.security.permissions import Scope
from cotenant.security.redaction import redact_others
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.job_views import omit_large
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

OWN_FIELDS = frozenset({"spec", "allocations", "candidates"})  # they name nothing of other tenants
PARENTS_MAX = 16
NEAR_MAX = 1_000


class View:
    """The view of one call. Caches which tenants are visible, so that a long list is cheap."""

    def __init__(self, state: State) -> None:
        self._state, self._identity, self._scope = state, caller(), scope()
        self._tenants: dict[str, bool] = {}
        self._found_at = state.tenants_changed
        self.sees_all = self._identity.tenants is None

    @property
    def key(self) -> str:
        """Distinguishes this view's page tokens from those of other tenants' callers."""
        tenants = self._identity.tenants
        return "" if tenants is None else ",".join(sorted(tenants))

    @property
    def caller_name(self) -> str:
        """The name under which the caller submits jobs."""
        return self._identity.name

    def sees_tenant(self, tenant: str) -> bool:
        """Return whether a tenant is one of the caller's, or a descendant."""
        if self.sees_all:
            return True
        if self._found_at != self._state.tenants_changed:  # a watch may last for long
            self._found_at = self._state.tenants_changed
            self._tenants.clear()
        if (known := self._tenants.get(tenant)) is None:
            known = self._tenants[tenant] = self._is_own_tenant(tenant)
        return known

    def _is_own_tenant(self, tenant: str) -> bool:
        for _ in range(PARENTS_MAX):
            if tenant in (self._identity.tenants or ()):
                return True
            if tenant not in self._state.tenants or not (tenant := self._state.tenants[tenant][0].parent):
                break
        return False

    def sees(self, record: Record) -> bool:
        """Return whether a job belongs to a visible tenant."""
        return self.sees_all or self.sees_tenant(record.spec.tenant)

    def knows(self, thing_id: str) -> bool:
        """Return whether a job or array with that id is visible."""
        if not self._state.dependency_gate.known(thing_id):
            return False  # or is being deleted
        record = self._record(thing_id)
        return self.sees_all or (record is not None and self.sees(record))

    def similar_ids(self) -> list[str]:
        """Return the newest visible job ids and the visible array ids, for suggestions."""
        newest = [*self._state.ids[-NEAR_MAX:], *self._state.dependency_gate.arrays]
        return newest if self.sees_all else [one for one in newest if not self._hidden(one)]

    def _record(self, thing_id: str) -> Record | None:
        """Return a job, or the first of an array."""
        array = self._state.dependency_gate.arrays.get(thing_id)
        return self._state.records.get(array.first if array else thing_id)

    # Access --------------------------------------------------------------------------------------------------

    def job(self, job_id: str, array_call: str = "") -> Record:
        """Return a job that the caller may see (and change, if the call changes it).

        `array_call` is the method of ArrayService that does the same for an array, if there is one.

        Raises:
            Problem: NOT_FOUND, FAILED_PRECONDITION for an array, PERMISSION_DENIED for another submitter's job.
        """
        record = self._record(job_id)
        if record is None or not self.sees(record):
            raise errors.not_found("job", job_id, near=self.similar_ids())
        if array := self._state.dependency_gate.arrays.get(job_id):
            raise is_array(f"{job_id} is an array of {array.count} jobs", array.first, array_call)
        return self.authorize(record)

    def authorize(self, record: Record) -> Record:
        """Return a job that the caller may change, if the call changes it.

        Raises:
            Problem: PERMISSION_DENIED.
        """
        self.require_owner(f"job {record.id}", record.job.submitter)
        return record

    def sees_array(self, array: Array) -> bool:
        """Return whether an array belongs to a visible tenant, and is not being deleted."""
        if not array.ids or not self._state.dependency_gate.known(array.id):
            return False
        return self.sees_all or self.sees(self._state.records[next(iter(array.ids))])  # all have the same tenant

    def array(self, array_id: str) -> Array:
        """Return an array that the caller may see (and change, if the call changes it).

        Raises:
            Problem: NOT_FOUND, FAILED_PRECONDITION for a job, PERMISSION_DENIED for another submitter's array.
        """
        arrays = self._state.dependency_gate.arrays
        array = arrays.get(array_id)
        if array is not None and self.sees_array(array):
            self.require_owner(f"array {array_id}", self._state.records[array.first].job.submitter)
            return array
        if array is None and (record := self._state.records.get(array_id)) and self.sees(record):
            raise is_job(array_id)
        raise errors.not_found("array", array_id, near=[one.id for one in arrays.values() if self.sees_array(one)])

    def require_owner(self, what: str, owner: str) -> None:
        """Reject a change by a caller who may only change what it has submitted itself.

        Raises:
            Problem: PERMISSION_DENIED.
        """
        if self._scope is Scope.OWN_JOBS and owner != self._identity.name:
            raise denied("NOT_YOUR_JOB", f"{what} belongs to {owner}; a tenant-admin of its tenant may change it")

    def tenant_of(self, message: job_pb2.JobSpec) -> job_pb2.JobSpec:
        """Return the spec of a new job, with the caller's tenant if it names none and there is only one.

        Raises:
            Problem: PERMISSION_DENIED for a tenant that is not the caller's.
        """
        tenant = resolve_tenant(message.tenant)
        self.check_tenant(tenant)
        if not message.tenant and tenant != TENANT_DEFAULT:
            spec = job_pb2.JobSpec()
            spec.CopyFrom(message)
            spec.tenant = tenant
            message = spec
        return message

    def check_tenant(self, tenant: str) -> None:
        """Reject a tenant that is not the caller's.

        Raises:
            Problem: PERMISSION_DENIED.
        """
        if not self.sees_tenant(tenant):
            raise tenant_denied(self._identity, tenant)

    # Redaction -----------------------------------------------------------------------------------------------

    def message(self, record: Record, *, basic: bool = False) -> job_pb2.Job:
        """Return a job as this caller sees it."""
        message = self._state.message(record)
        if basic:
            omit_large(message)
        self.redact(message)
        return message

    def redact(self, message: Message) -> None:
        """Remove names of other tenants' jobs from a message."""
        if not self.sees_all:
            self._redact(message)

    def _redact(self, message: Message) -> None:
        if isinstance(message, pb.JobAhead) and self._hidden(message.job_id):
            message.ClearField("job_id")
            message.ClearField("name")
        for field, value in message.ListFields():
            if field.name in OWN_FIELDS:
                continue
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                self._redact_inner(field, value)
            elif field.type == FieldDescriptor.TYPE_STRING and field.is_repeated:
                kept = [self._redact_text(one) for one in value if not self._hidden(one)]
                del value[:]
                value.extend(kept)
            elif field.type == FieldDescriptor.TYPE_STRING:
                setattr(message, field.name, self._redact_text(value))

    def _redact_inner(self, field: FieldDescriptor, value: Any) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return  # maps hold numbers by name
        many: Iterable[Message] = value if field.is_repeated else (value,)
        for one in many:
            self._redact(one)

    def _hidden(self, thing_id: str) -> bool:
        record = self._record(thing_id)
        return record is not None and not self.sees(record)

    def _redact_text(self, text: str) -> str:
        return redact_others(text, self._name_of_hidden)

    def _name_of_hidden(self, thing_id: str) -> str | None:
        record = self._record(thing_id)
        return None if record is None or self.sees(record) else record.spec.name


def is_array(what: str, first: str, array_call: str = "") -> errors.Problem:
    """Return the error for the id of an array in a call for one job; `first` is one of the array's jobs.

    >>> is_array("0abc is an array of 2 jobs", "0abc_0", "GetArray").message
    '0abc is an array of 2 jobs; call ArrayService.GetArray, or name one of its jobs, such as 0abc_0'
    """
    call = f"call ArrayService.{array_call}, or " if array_call else ""
    return errors.failed_precondition("IS_ARRAY", f"{what}; {call}name one of its jobs, such as {first}", first=first)


def is_job(job_id: str) -> errors.Problem:
    """Return the error for the id of a job in a call for arrays."""
    return errors.failed_precondition("IS_JOB", f"{job_id} is a job, not an array; call JobService for it")


def tenant_denied(identity: Identity, tenant: str) -> errors.Problem:
    """Return the error for a tenant that is not the caller's."""
    yours = ", ".join(sorted(identity.tenants or ())) or "none"
    return denied("NOT_YOUR_TENANT", f"{identity.name} may not use tenant {tenant!r}; allowed tenants: {yours}")
