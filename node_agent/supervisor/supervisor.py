"""Runs one attempt's processes on one node and outlives the agent that started it.

Forked by the zygote (`zygote.py`) or, without one, started as `python -I -S supervisor.py DIRECTORY LOCK_FD`. It
imports the files beside it by their bare names, without the package, so that it stays small: there is one per attempt.
Theory of operation:

- It holds the lock that the agent acquired on the attempt's directory, so that a free lock means a dead supervisor.
- It is a subreaper, each task is a session, and each task is in its control group if there is one: every process that a
  task leaves behind is found as a child or in the group, and killed before the end is reported.
- All relevant state is in the state file before it is reported. The agent is notified by a datagram; a lost datagram
  costs nothing, because the agent also waits for this process to end and then reads the file.
- SIGTERM means "read the stop order and carry it out". A second one may shorten the grace period.

It does one thing at a time in one loop around `poll`, and sleeps while nothing happens.
"""

from __future__ import annotations

import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cotenant.node_agent.supervisor.loop import Supervisor
else:
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from loop import Supervisor

COMMAND = (sys.executable, "-I", "-S")  # what runs this file
DESCRIPTORS_MAX = 65536


def main(directory: str, lock_descriptor: int, home: object = None) -> None:
    """Run the attempt whose spec is in `directory`; `home` is the group for supervisors if this process is in it."""
    os.set_inheritable(lock_descriptor, False)
    os.closerange(lock_descriptor + 1, DESCRIPTORS_MAX)  # descriptors that a library of the agent left open
    os.chdir(directory)
    with open("spec", "rb") as file:
        spec = marshal.load(file)  # both ends run the same interpreter; needs no import
    if spec.get("home") == home:
        spec["home"] = None
    restore_descriptor_limit(spec.get("descriptors_max"))
    Supervisor(spec).run()


def restore_descriptor_limit(soft: object) -> None:
    """Restore the soft limit that the agent started with: the agent raised its own, and jobs inherit it."""
    now, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if isinstance(soft, int) and soft < now:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
