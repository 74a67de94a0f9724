"""The table of who answers what is the contract's, and what the page shows."""

from __future__ import annotations

from tests.unit.rpc.test_channel import contract
from tools.replicas import PAGE, page

from cotenant.leadership.routing_table import ROUTES, Route
from cotenant.services.queue.api.follower_reads import QueueReader


def test_the_table_names_every_method_of_the_contract_and_no_other() -> None:
    assert set(ROUTES) == {path for path, _ in contract()}


def test_what_a_follower_of_the_queue_answers_is_what_the_table_says() -> None:
    assert set(QueueReader()._answers) == {path for path, route in ROUTES.items() if route is Route.ENDED}


def test_the_page_of_replicas_is_what_the_table_says() -> None:
    assert PAGE.read_text() == page(), "make docs"
