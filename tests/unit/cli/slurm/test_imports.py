"""What Slurm's commands import: they are called by the hundred."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from cotenant.deferred import defer_pure_protobuf
defer_pure_protobuf()
import cotenant.cli.slurm.{command}
from cotenant.v1.job_pb2 import Job
assert Job.FromString(Job(id="a").SerializeToString()).id == "a"
print("google.protobuf.text_format" in sys.modules)
from google.protobuf.internal import python_message
print(python_message.__name__, callable(python_message.GeneratedProtocolMessageType))
print("google.protobuf.text_format" in sys.modules)
"""


def test_the_implementation_of_protobuf_in_python_is_imported_when_it_is_used() -> None:
    words = [sys.executable, "-c", SCRIPT.format(command="squeue")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["False", "google.protobuf.internal.python_message True", "True"]
