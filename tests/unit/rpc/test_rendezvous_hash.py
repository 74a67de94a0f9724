"""Names are spread over replicas, and few of them move when replicas change."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cotenant.rpc.rendezvous_hash import ranked

ADDRESSES = st.lists(st.text("abc:1", min_size=1), min_size=2, max_size=8, unique=True)


@given(name=st.text(), addresses=ADDRESSES, place=st.integers(0, 7))
def test_without_one_replica_all_names_keep_their_order_of_the_others(
    name: str, addresses: list[str], place: int
) -> None:
    gone = addresses[place % len(addresses)]
    left = [address for address in addresses if address != gone]
    assert ranked(name, left) == [address for address in ranked(name, addresses) if address != gone]


def test_names_are_spread_evenly_also_those_of_a_lost_replica() -> None:
    addresses = [f"10.0.0.{number}:7073" for number in range(4)]
    orders = [ranked(f"node-{number}", addresses) for number in range(4000)]
    firsts = Counter(order[0] for order in orders)
    assert all(900 < firsts[address] < 1100 for address in addresses)
    seconds = Counter(order[1] for order in orders if order[0] == addresses[0])
    assert all(270 < seconds[address] < 400 for address in addresses[1:])
