"""What a caller may see and change of jobs and tenants: all of it, or its own tenants' part.

To whom a tenant belongs, those that belong to it do too. A job of another tenant is not there: its id is not found, it
is in no list, and where a reason names it, the words "another tenant's job" stand in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from cotenant.codec import errors
from cotenant.core.model.job import TENANT_DEFAULT
from cotenant.security.identity import Identity, caller, denied, meant_tenant, scope
from cotenant.security.permissions import Scope
from cotenant.security.redaction import without_others
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

OWN_FIELDS = frozenset({"spec", "allocations", "candidates"})  # they name nothing of others
PARENTS_MAX = 16
NEAR_MAX = 1_000


class View:
    """One call's view. What it has found out of tenants it keeps, so that a long list costs little."""

    def __init__(self, state: State) -> None:
        self._state, self._identity, self._scope = state, caller(), scope()
        self._tenants: dict[str, bool] = {}
        self._found_at = state.tenants_changed
        self.everything = self._identity.tenants is None

    @property
    def key(self) -> str:
        """What tells this view's lists from those of callers of other tenants."""
        tenants = self._identity.tenants
        return "" if tenants is None else ",".join(sorted(tenants))

    def sees_tenant(self, tenant: str) -> bool:
        """Whether a tenant is one of the caller's, or belongs to one."""
        if self.everything:
            return True
        if self._found_at != self._state.tenants_changed:  # a watch may last for long
            self._found_at = self._state.tenants_changed
            self._tenants.clear()
        if (known := self._tenants.get(tenant)) is None:
            known = self._tenants[tenant] = self._of_ours(tenant)
        return known

    def _of_ours(self, tenant: str) -> bool:
        for _ in range(PARENTS_MAX):
            if tenant in (self._identity.tenants or ()):
                return True
            if tenant not in self._state.tenants or not (tenant := self._state.tenants[tenant][0].parent):
                break
        return False

    def sees(self, record: Record) -> bool:
        """Whether a job is of one of the caller's tenants."""
        return self.everything or self.sees_tenant(record.spec.tenant)

    def knows(self, thing_id: str) -> bool:
        """Whether there is such a job or array, for this caller."""
        if not self._state.gates.known(thing_id):
            return False  # also what is being forgotten at this moment
        record = self._record(thing_id)
        return self.everything or (record is not None and self.sees(record))

    def near(self) -> list[str]:
        """The newest ids of jobs, and those of arrays, that the caller may be reminded of."""
        newest = [*self._state.ids[-NEAR_MAX:], *self._state.gates.arrays]
        return newest if self.everything else [one for one in newest if not self._hidden(one)]

    def _record(self, thing_id: str) -> Record | None:
        """A job, or the first of an array."""
        array = self._state.gates.arrays.get(thing_id)
        return self._state.records.get(array.first if array else thing_id)

    # What may be done ----------------------------------------------------------------------------------------

    def job(self, job_id: str) -> Record:
        """Return a job that the caller may see, and, where the call changes it, change.

        Raises:
            Problem: NOT_FOUND, FAILED_PRECONDITION for an array, PERMISSION_DENIED where it is somebody else's.
        """
        record = self._record(job_id)
        if record is None or not self.sees(record):
            raise errors.not_found("job", job_id, near=self.near())
        if array := self._state.gates.arrays.get(job_id):
            raise errors.failed_precondition(
                "IS_ARRAY", f"{job_id} is an array of {array.count} jobs; name one of them, such as {array.first}"
            )
        return self.owned(record)

    def owned(self, record: Record) -> Record:
        """Return a job, unless the call changes it and it is not the caller's to change.

        Raises:
            Problem: PERMISSION_DENIED.
        """
        self._check_owner(record)
        return record

    def array(self, array_id: str) -> Array | None:
        """Return an array that the caller may change; None where there is none that it may see.

        Raises:
            Problem: PERMISSION_DENIED where it is somebody else's.
        """
        array = self._state.gates.arrays.get(array_id)
        if array is None or not self.sees(record := self._state.records[array.first]):
            return None
        self._check_owner(record)
        return array

    def _check_owner(self, record: Record) -> None:
        owner = record.job.submitter
        if self._scope is Scope.OWN_JOBS and owner != self._identity.name:
            raise denied("NOT_YOUR_JOB", f"job {record.id} is {owner}'s; a tenant-admin of its tenant may change it")

    def tenant_of(self, message: job_pb2.JobSpec) -> job_pb2.JobSpec:
        """Return the spec of a job to be submitted, with the caller's tenant where it names none and that is plain.

        Raises:
            Problem: PERMISSION_DENIED for a tenant that is not the caller's.
        """
        tenant = meant_tenant(message.tenant)
        self.check_tenant(tenant)
        if not message.tenant and tenant != TENANT_DEFAULT:
            spec = job_pb2.JobSpec()
            spec.CopyFrom(message)
            spec.tenant = tenant
            message = spec
        return message

    def check_tenant(self, tenant: str) -> None:
        """Refuse a tenant that is not the caller's.

        Raises:
            Problem: PERMISSION_DENIED.
        """
        if not self.sees_tenant(tenant):
            raise not_yours(self._identity, tenant)

    # What is told --------------------------------------------------------------------------------------------

    def message(self, record: Record, *, phases: bool = False) -> job_pb2.Job:
        """A job as this caller sees it."""
        message = self._state.message(record, phases=phases)
        self.redact(message)
        return message

    def redact(self, message: Message) -> None:
        """Take out of a message whatever names other tenants' jobs."""
        if not self.everything:
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
                kept = [self._words(one) for one in value if not self._hidden(one)]
                del value[:]
                value.extend(kept)
            elif field.type == FieldDescriptor.TYPE_STRING:
                setattr(message, field.name, self._words(value))

    def _redact_inner(self, field: FieldDescriptor, value: Any) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return  # numbers by name
        many: Iterable[Message] = value if field.is_repeated else (value,)
        for one in many:
            self._redact(one)

    def _hidden(self, thing_id: str) -> bool:
        record = self._record(thing_id)
        return record is not None and not self.sees(record)

    def _words(self, text: str) -> str:
        return without_others(text, self._name_of_hidden)

    def _name_of_hidden(self, thing_id: str) -> str | None:
        record = self._record(thing_id)
        return None if record is None or self.sees(record) else record.spec.name


def not_yours(identity: Identity, tenant: str) -> errors.Problem:
    """The tenant is none of the caller's."""
    yours = ", ".join(sorted(identity.tenants or ())) or "none"
    return denied("NOT_YOUR_TENANT", f"tenant {tenant!r} is not one of {identity.name}'s, which are: {yours}")
