"""The order of tries: a host or a tenant that sends or fails much does not hold up the others."""

from __future__ import annotations

from cotenant.core.model.notification import Due, Trigger
from cotenant.services.queue.notifications.schedule import BURST, OF_HOST_MAX, Message, Schedule

HOUR = 3600.0


def message(number: int, host: str = "a.org", tenant: str = "vision") -> Message:
    return Message(f"job{number}", tenant, Due(Trigger.FAILED, 0.0, 0), f"https://{host}/x")


def filled(*messages: Message, per_minute: int = 60_000, pending_max: int = 100) -> Schedule:
    schedule = Schedule(per_minute, pending_max)
    assert all(schedule.add(one) for one in messages)
    return schedule


def test_a_host_has_only_so_many_at_once_and_others_overtake() -> None:
    slow, other = [message(number) for number in range(5)], message(9, "b.org")
    schedule = filled(*slow, other)
    taken = [schedule.take(0.0) for _ in range(OF_HOST_MAX + 1)]
    assert taken == [*slow[:OF_HOST_MAX], other]
    assert schedule.take(0.0) is None
    schedule.finish(slow[0])
    assert schedule.take(0.0) is slow[OF_HOST_MAX]


def test_a_failed_message_waits_and_is_not_lost() -> None:
    one = message(1)
    schedule = filled(one)
    assert schedule.take(0.0) is one
    assert schedule.wake_at() is None
    schedule.retry(one, 0.0, 1.0)
    assert (schedule.wake_at(), schedule.take(4.9), schedule.take(5.0)) == (5.0, None, one)
    schedule.finish(one)
    assert len(schedule) == 0
    assert schedule.take(HOUR) is None


def test_a_tenant_has_a_rate() -> None:
    messages = [message(number, f"h{number}.org") for number in range(BURST + 5)]
    schedule, sent = filled(*messages, per_minute=60), 0
    while one := schedule.take(0.0):
        schedule.finish(one)
        sent += 1
    assert sent == BURST + 1
    assert schedule.take(0.5) is None
    assert schedule.take(1.0)


def test_a_tenant_has_only_so_many_pending_and_others_are_not_concerned() -> None:
    schedule = filled(message(1), message(2), pending_max=2)
    assert not schedule.add(message(3))
    assert schedule.add(message(4, tenant="speech"))
    first = schedule.take(0.0)
    assert first
    schedule.finish(first)
    assert schedule.add(message(3))
