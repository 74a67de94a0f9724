"""Runs one attempt's processes on one node and outlives the agent that started it.

Started as `python -I -S supervisor.py DIRECTORY LOCK_FD`; it imports the files beside it but not the package, so
that it stays small: there is one per attempt. Theory of operation:

- It holds the lock that the agent took on the attempt's directory, so that "the lock is free" means "it is dead".
- It is a subreaper, each task is a session, and each task is in its control group where there are any: whatever a
  task leaves behind is still found, as a child or in the group, and killed before the end is reported.
- Everything worth knowing is in the state file before anyone is told of it. The agent is told by a datagram; a lost
  one costs nothing, since the agent also waits for this process to end and reads the file then.
- SIGTERM means "read the stop order and obey it". A second one may shorten the grace.

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


def main(directory: str, lock_descriptor: int) -> None:
    """Run the attempt whose spec stands in `directory`."""
    os.set_inheritable(lock_descriptor, False)
    os.closerange(lock_descriptor + 1, 65536)  # whatever a library of the agent left open across exec
    os.chdir(directory)
    with open("spec", "rb") as file:
        spec = marshal.load(file)  # both ends are the same interpreter, and it is there without an import
    restore_descriptor_limit(spec.get("descriptors_max"))
    Supervisor(spec).run()


def restore_descriptor_limit(soft: object) -> None:
    """Restore the soft limit that the agent started with: the agent raised its own, and jobs inherit it."""
    now, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if isinstance(soft, int) and soft < now:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
