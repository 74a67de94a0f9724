"""The scheduling cycle: order, admission, placement sessions, preemption, reservations. Pure."""
