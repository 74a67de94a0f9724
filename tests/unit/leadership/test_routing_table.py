"""The routing table covers the API and matches the docs page."""

from __future__ import annotations

from tools.replicas import PAGE, page

from cotenant.leadership.routing_table import ROUTES, Route
from cotenant.services.queue.api.follower_reads import QueueReader


def test_a_follower_of_the_queue_answers_what_the_table_says() -> None:
    assert set(QueueReader()._answers) == {path for path, route in ROUTES.items() if route is Route.ENDED}


def test_the_replicas_page_matches_the_table() -> None:
    assert PAGE.read_text() == page(), "make docs"
