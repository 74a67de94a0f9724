"""Events between parts of a service: the sender knows no receiver.

A part that receives an event subscribes in its own constructor, to which the events were passed. So the parts of a
service can be built one after the other, and none has to be changed after it was built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

Values = ParamSpec("Values")


class Event(Generic[Values]):
    """One kind of event, called like a function: its receivers are called in the order in which they subscribed."""

    __slots__ = ("_receivers",)

    def __init__(self) -> None:
        self._receivers: tuple[Callable[Values, None], ...] = ()

    def subscribe(self, receiver: Callable[Values, None]) -> None:
        """Call `receiver` at each event from now on."""
        self._receivers = (*self._receivers, receiver)

    def __call__(self, *args: Values.args, **kwargs: Values.kwargs) -> None:
        """Send the event. An error of a receiver reaches the sender."""
        for receiver in self._receivers:
            receiver(*args, **kwargs)
