"""What Slurm answers: its JSON, and the lines of scontrol."""

from __future__ import annotations

from collections.abc import Iterator

from tests.unit.services.slurm.pictures import NOW, newer_text, sample
from tests.verification.fuzz.targets import Prepared, Target

from cotenant.node_agent.slurm.step_groups import variables_of
from cotenant.services.slurm import node_choice
from cotenant.services.slurm.acting import default_cpus_per_gpu
from cotenant.services.slurm.commands import pairs_of, site_factors_of
from cotenant.services.slurm.core_choice import RunHistory, TableRules, found_cpus, kind_in, table_text
from cotenant.services.slurm.messages import job_message, node_message
from cotenant.services.slurm.output_progress import DEFAULT, ProgressPatterns
from cotenant.services.slurm.planning import scene_of
from cotenant.services.slurm.reader import BadAnswer, read
from cotenant.services.slurm.records import Picture, SlurmNode

WORDS = (
    b'"job_id": ',
    b'"nodes": "n[1-3]"',
    b'"infinite": true',
    b'"array_task_string": "0-9:2%3"',
    b"null",
    b"-1",
    b"1e99",
)


NODE = SlurmNode("n1", cores=16, gpus=4, partitions=frozenset({"main"}))


def targets() -> Iterator[Target]:
    """Yield the targets."""
    seeds = [text.encode() for name in ("squeue", "sinfo") for text in (sample(name), newer_text(name))]
    yield Target("Slurm's answers", lambda directory: Prepared(_answer, seeds, WORDS), (BadAnswer,))
    line = b"JobId=17 JobName=a JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0"
    yield Target("lines of scontrol", lambda directory: Prepared(_line, (line,)))
    history = b'{"version": 1, "kinds": [[0, "main", 1, "train", {"1": [0.01, 0.01], "2": [0.02]}]]}'
    yield Target("Slurm's run times", lambda directory: Prepared(_history, (history,), WORDS), (ValueError,))
    row = b"0\tmain\t1\ttrain\t6\t1\t90\t6 cores: more cores gain less"
    table = b"cotenant-cores\t1\t1795839360\t600\t0\t0\t0\n" + row + b"\nend\n"
    yield Target("the table of cores", lambda directory: Prepared(_table, (table,), (b"\t", b"end", b"\xc2\xb2")))
    output = b"Epoch [2/4], step 50/100 loss 0.1\n 25%|##  | 25/100 [00:05<00:15,  5.00it/s]\n"
    yield Target("output of Slurm's jobs", lambda directory: Prepared(_output, (output,), (b"/", b"\r", b"step ")))
    lists = b'{"version": 1, "excluded": {"17": ["n1", "n2"]}}'
    yield Target("lists of excluded nodes", lambda directory: Prepared(_lists, (lists,), WORDS), (ValueError,))
    variables = b"SLURM_JOB_UID=1000\0SLURM_GPUS_ON_NODE=2\0SLURM_JOB_NUM_NODES=1\0SLURM_JOB_NAME=train\0"
    yield Target("variables of Slurm's jobs", lambda directory: Prepared(_variables, (variables,), (b"=", b"\0")))


def _answer(data: bytes) -> None:
    """Whatever is read can be planned and shown."""
    reading = read(data)
    nodes = {node.name: node for node in (reading.nodes or read(sample("sinfo")).nodes)}
    picture = Picture(NOW, nodes, {job.id: job for job in reading.jobs})
    scene = scene_of(picture, NOW, {})
    for job in picture.jobs.values():
        job_message(job, scene.specs[job.id], picture, NOW, None)
    for node in nodes.values():
        node_message(node, picture, NOW)


def _line(data: bytes) -> None:
    text = data.decode(errors="replace")
    pairs_of(text)
    site_factors_of(text)
    default_cpus_per_gpu(text)


def _history(data: bytes) -> None:
    """Whatever is loaded gives a table that the script takes, and survives its own file."""
    history = RunHistory.load(data)
    choices = history.choices(Picture(NOW, {"n1": NODE}), 8)
    assert all(1 <= choice.cpus <= NODE.cores for choice in choices)
    assert table_text(choices, TableRules(), NOW).count("\n") == len(choices) + 2
    assert RunHistory.load(history.dump()).dump() == history.dump()


def _table(data: bytes) -> None:
    assert all(cpus >= 0 for cpus in found_cpus(data.decode(errors="replace"), NOW).values())


def _lists(data: bytes) -> None:
    lists = node_choice.load(data)
    assert node_choice.load(node_choice.dump(lists)) == lists


def _variables(data: bytes) -> None:
    kind_in(variables_of(data))


PATTERNS = ProgressPatterns([DEFAULT])


def _output(data: bytes) -> None:
    found = PATTERNS.find(data.decode(errors="replace"))
    assert found is None or found.share is None or 0 <= found.share <= 1
