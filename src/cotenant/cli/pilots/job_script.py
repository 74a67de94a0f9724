"""The batch script of a pilot.

Slurm ends a job as soon as its script ends, so the script outlives SIGTERM until the agent has handed back. An agent
that was killed is started again: its jobs are still there, and the new one adopts them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from string import Template

SCRIPT = Template("""\
#!/bin/sh
# A pilot of Cotenant: `cotenant pilots` submits it, and finds it by its name.
state=$$(mktemp -d "$${TMPDIR:-/tmp}/cotenant-pilot-$$SLURM_JOB_ID-XXXXXX") || exit
asked=
trap 'asked=1; kill -TERM "$$agent" 2>/dev/null' TERM INT
while :; do
  $command --node $name-"$$SLURM_JOB_ID" --state-dir "$$state" &
  agent=$$!
  wait "$$agent"; code=$$?
  while kill -0 "$$agent" 2>/dev/null; do wait "$$agent"; code=$$?; done
  if [ -n "$$asked" ] || [ "$$code" -le 128 ]; then break; fi
  sleep 1
done
rm -rf "$$state"
exit "$$code"
""")


def job_script(name: str, command: Sequence[str]) -> str:
    """Return the script of a pilot that runs an agent.

    >>> print(job_script("pilot", ["cotenant", "serve", "agent"]).splitlines()[6].strip())
    cotenant serve agent --node pilot-"$SLURM_JOB_ID" --state-dir "$state" &
    """
    return SCRIPT.substitute(command=shlex.join(command), name=shlex.quote(name))
