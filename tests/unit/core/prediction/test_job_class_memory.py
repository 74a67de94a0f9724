"""The memory of job classes: what it answers, forgets and persists, against a list and a dictionary of records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.prediction.job_class_memory import JobClassMemory, Key

CLASSES_MAX = 3
KEYS = [(user, model, "1000", "1") for user in ("ann", "b/c") for model in ("bert", "100%")]

steps = st.lists(
    st.tuples(st.sampled_from(["get", "change", "forget", "dump", "restore", "of_model"]), st.sampled_from(KEYS)),
    max_size=30,
)


def write(key: Key, values: list[int]) -> bytes:
    return "\n".join([*key, *map(str, values)]).encode()


def read(content: bytes) -> tuple[Key, list[int]]:
    lines = content.decode().split("\n")
    return tuple(lines[:4]), [int(line) for line in lines[4:]]


def memory() -> JobClassMemory[list[int]]:
    return JobClassMemory(CLASSES_MAX, list, write, read)


@given(steps)
def test_the_classes_used_last_are_remembered_and_exactly_what_changed_is_persisted(
    steps: list[tuple[str, Key]],
) -> None:
    subject, used, values, changed = memory(), list[Key](), dict[Key, list[int]](), set[Key]()
    disk: dict[str, bytes] = {}
    for number, (step, key) in enumerate(steps):
        known = key in used
        if step == "get":
            assert subject.get(key) == (values[key] if known else None)
        elif step == "change":
            subject.change(key).append(number)
            values.setdefault(key, []).append(number)
            changed.add(key)
        elif step == "forget":
            subject.forget(key)
            changed |= {key} & set(used)
            values.pop(key, None)
        elif step == "dump":
            records = subject.dump()
            assert len(records) == len(changed)
            assert {read(one)[0] for one in records.values() if one} == {one for one in changed if one in values}
            disk |= records
            changed.clear()
        elif step == "of_model":
            found = [(one, values[one]) for one in used if one[1] == key[1]]
            assert sorted(subject.of_model(key[1])) == sorted(found)
        else:
            other = memory()
            other.change(key).append(number)
            record = other.dump()
            assert subject.restore(record) == []
            disk |= record
            values[key] = [number]
        if step in ("change", "restore") or (step == "get" and known):
            used = [*(one for one in used if one != key), key]
        used = [one for one in used if one in values]
        while len(used) > CLASSES_MAX:
            changed.add(used[0])
            del values[used.pop(0)]
        assert subject.kinds() == used
    disk |= subject.dump()
    again = memory()
    assert again.restore(disk) == []
    written = {read(one)[0]: read(one)[1] for one in disk.values() if one}
    assert {key: again.get(key) for key in again.kinds()} == written
    assert {key: value for key, value in values.items() if key in written} == written


def test_an_empty_record_forgets_its_class_and_one_that_cannot_be_read_is_named() -> None:
    subject = memory()
    for key in KEYS[:2]:
        subject.change(key).append(1)
    before = subject.dump()
    names = {read(content)[0]: name for name, content in before.items()}
    assert subject.of_model(KEYS[0][1]) == [(KEYS[0], [1])]
    assert subject.restore({names[KEYS[0]]: b"", "no/such": b"", "broken": b"\xff"}) == ["broken"]
    assert subject.kinds() == [KEYS[1]]
    assert subject.of_model(KEYS[0][1]) == []
    assert subject.dump() == {}, "what was restored is on disk already"
