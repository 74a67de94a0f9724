"""Draws docs/replicas.md from the table of routes: `make docs`."""

from __future__ import annotations

from pathlib import Path

from cotenant.leadership.routing_table import ROUTES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "replicas.md"

TEXT = """\
# Several processes of each service

Every service may run as many times as you like. What they have in common is in etcd; nobody is told which of them is
the first.

```
cotenant serve queue     --store etcd://e1:2379,e2:2379,e3:2379 --listen 0.0.0.0:7070 --address 10.0.0.5 …
cotenant serve queue     --store etcd://e1:2379,e2:2379,e3:2379 --listen 0.0.0.0:7070 --address 10.0.0.6 …
cotenant serve placement --store etcd://e1:2379,e2:2379,e3:2379 --listen 0.0.0.0:7071 --address 10.0.0.5 …
cotenant serve placement --store etcd://e1:2379,e2:2379,e3:2379 --listen 0.0.0.0:7071 --address 10.0.0.6 …
```

The dots stand for `--endpoints`, where [the other services are](#where-they-are), and for `--tls-ca`, `--tls-cert` and
`--tls-key`, [certificates](security.md#certificates), or `--insecure` on a network that you trust. `--address` is where
the other replicas reach this one; without it, that is the address of `--listen`, or the machine's name where it listens
everywhere. Without certificates all processes need the same token (`COTENANT_TOKEN`).

## Who leads

Queue, placement and predictor elect a leader each: whoever holds the service's key in etcd (`queue/leader`,
`placement/leader`, `predictor/leader`) under a lease of two seconds. Only the leader decides and writes. Each of its
transactions compares the key's revision, so that a leader which was cut off, paused or replaced writes nothing any
more, however late it wakes.

- **Killed** (`kill -9`, a power cut): its lease runs out, and another replica leads 1.3 to 2.5 s later, with the
  records in its memory already. Running jobs notice nothing. Calls wait for it, up to five seconds.
- **Asked to end** (SIGTERM, Ctrl-C): it gives the lease back, and another one leads at once. That makes a rolling
  restart or upgrade: end one, start its successor, wait until it says that it serves, and go on with the next.
- **Paused or cut off** for longer than its lease: it finds out, closes what it had built, and follows. It does not end.
  Its connections stay open meanwhile: whoever called it, or listens to it, is sent on after twelve seconds at most, by
  pings that nobody answered, and one second after another one leads where a replica passed the call on. So give
  `lost_after` no less than half a minute, for agents too are sent on by that, and a thousand of them come one after
  another.
- **Overloaded**: it keeps its lease, which a thread keeps alive while the event loop is late for everything, and is
  slow; another one would have to read everything first, and then be as late. One that comes to nothing for ten seconds
  is replaced. Each process tells by how much it is late (`cotenant.loop.delay`), and logs `loop_stalled` where that is
  half a second or more. A commit that etcd answers late costs a new term and no more: agents stay, and no node is
  taken as silent by a placement that did not come to listen.
- **etcd is away**: nobody is elected and nothing is written; reads go on, writes fail with UNAVAILABLE and when to come
  again, jobs run on and agents stay connected. What they tell meanwhile, and what was being written, is kept in memory
  and written once etcd is back (one that may have been replaced sends them away every third of `lost_after`, so that
  they find who leads); see [survival](survival.md) for jobs that must not run on alone.

`cotenant up` on an etcd is all three services in one process. It is elected like others, under leases of five seconds,
and does not start where another mesh or service leads there: after eight seconds it says which, and where. While etcd
is away it goes on as replicas do. Where its leases have run out meanwhile it says so, and begins anew at the same
address as soon as it is elected again; one that finds another leading in its place ends.

A store that one process holds (SQLite, memory) has one process of each service, which leads at once, also after
`kill -9`; a second one is told that the store is in use.

`cotenant replicas` shows all of them: who leads, under which term, how far each has followed the records, and which
release each runs.

```console
$ cotenant replicas
SERVICE    ADDRESS        STATE    TERM  SEEN  RELEASE  LEADER, OR WHAT IS WRONG
placement  10.0.0.5:7071  follows   842   917  0.1.0    10.0.0.6:7071
placement  10.0.0.6:7071  leads     842     -  0.1.0    10.0.0.6:7071
queue      10.0.0.5:7070  leads      12     -  0.1.0    10.0.0.5:7070
queue      10.0.0.6:7070  follows    12   921  0.1.0    10.0.0.5:7070
```

## How it is

`cotenant status` is the whole mesh at one look: how many processes of each service are there and who leads, the members
of etcd as the services find them, nodes, jobs, releases and certificates. Below that stands everything that is wrong,
with what helps: a process or a member that is away, a majority that is missing, a service that nobody leads, a node
whose agent is away or that is not well, a certificate that [is due](security.md#when-they-run-out), a process or an
agent of another release than most run; and [what is slow but alive](#slow-but-alive). It ends with 0 if nothing is
wrong, with 1 if something is and with 3 if nobody answers, so that a timer can call it; `--json` has all of it.

```console
$ cotenant status
queue         2 of 2 serve, 10.0.0.5:7070 leads
placement     2 of 2 serve, 10.0.0.6:7071 leads
predictor     2 of 2 serve, 10.0.0.5:7072 leads
contention    2 of 2 serve
store         2 of 3 members, e1:2379 leads, 12MiB
nodes         4 ready; 3 of 32 GPUs and 40 of 256 cores held
jobs          3 running
release       0.1.0
certificates  the next expires in 212 days
problem       store e3:2379: no answer within 1 s
              bring it back: with one more away nothing can be written
```

### Slow but alive

Processes and agents measure themselves over the last 30 s, and `status` names what is slow for longer than a moment
([why these figures](adr/0076-slow-parts-are-named-by-sustained-figures.md)):

| what is named | when | what helps |
|---|---|---|
| `queue a:7070: its event loop was behind by 1.2 s …` | 1 s or more in two of three 10 s windows | a CPU of its own |
| `store: it takes 420 ms to answer …` | the median is 100 ms or more | etcd's disks |
| `gpu-1: its agent is late: last heard 6s ago …` | two heartbeats are missed | the node's load, network |
| `queue a:7070: its clock is 86,400 s ahead` | by more than 2 s from the median | chrony |
| `gpu-1: it cannot resolve queue.mesh: …` | for 12 s | the machine's name servers |

`--json` has the figures of each process under `processes`; a process of an older release has null in their place:

| key | what it is |
|---|---|
| `loop_lag.longest_seconds`, `.median_seconds` | delays of the event loop |
| `loop_lag.behind_share` | the sum of the delays as a share of the time |
| `loop_lag.windows_behind` | in how many of three windows of 10 s a delay was 1 s or longer |
| `store_latency.median_seconds`, `.longest_seconds`, `.calls` | how long the store took to answer, or null |
| `clock_offset_seconds` | how far its wall clock is ahead of the machine that asks |
| `clock_error_seconds` | by how much that may be wrong: half of the round trip |

`cotenant nodes --json` has `loop_lag` of each agent, `silence_seconds` and `heartbeat_seconds`, and
`clock_offset_seconds`, there compared with placement's clock.

## Who answers what

Whichever replica a call reaches, it is answered. What only the leader knows is passed on to it: the request's bytes,
the metadata with the caller's token, what is left of the deadline, and streams in both directions. A call whose leader
dies is made again by the replica where nothing was done or where a repeat does no harm; other calls, and streams, end
with UNAVAILABLE, for their callers to resume. Without a leader for five seconds a call fails with UNAVAILABLE, the
reason `NO_LEADER` and a time to come again.

Answers from records carry the trailer `cotenant-revision`: the store's revision up to which the replica knew them.
People of some tenants are always answered by the leader, who knows which tenant belongs to which.

{table}

Of `ListJobs` any replica answers what asks for phases that end a job, and folds no arrays.

By the health protocol a replica is SERVING as long as a call would find somebody to answer it, there or elsewhere.

## Where they are

`--endpoints`, `--endpoint` and `COTENANT_ENDPOINT` take the replicas of a service beside each other, or a name that has
several addresses:

```
--endpoints 'queue=10.0.0.5:7070|10.0.0.6:7070,placement=10.0.0.5:7071|10.0.0.6:7071'
--endpoints 'queue=queue.mesh:7070,placement=placement.mesh:7071'
```

Calls take turns over all of them; in a list, only over those that say that they are SERVING. Names are looked up again:
those in a list every five seconds, with new calls going where they lead then and those under way staying where they
are; a single name where a connection to it fails. While the name server is away, what was known goes on.

## Predictors and contention

All predictors on one etcd know the same: the leader takes observations and writes what it learns, the others read it
and answer estimates alike, so that estimates are spread over all of them and go on while a leader is elected. They are
not divided by model: [why, and what a replica costs](adr/0027-one-predictor-observes-others-follow-the-store.md), about
90 MiB that know of 100,000 finished jobs, and 10 µs of processor for each observation that the leader takes in.

Contention keeps samples and incidents of a node in memory, so a node's agent sends them to one replica: the one that
its name chooses among those there are (rendezvous hashing), or the next one in its order while that one is away. It
goes back within a minute or two of the other's return, as soon as nothing is held back on it: a replica that comes to
know of a node begins without baselines. Replicas are those that are listed, or all addresses of one name, as of a
headless service of Kubernetes; names are looked up before each stream and once a minute, so that replicas may be
added, taken away and replaced at other addresses. `cotenant top` and `cotenant incidents` ask all of them and show
what they say as one. Whoever calls by gRPC asks each replica for its own nodes.

## How much they do

`benchmarks/cluster.py` runs one process of each service, an etcd of three members and all agents, simulated, on one
machine. On two cores with nothing beside it, jobs of two seconds, as fast as they are brought to running:

| agents, of 8 GPUs | 100 | 300 | 1,000 |
|---|---|---|---|
| jobs a second brought to running (1,000: for a minute) | 380 | 585 | 504 |
| raw transactions a second of the same etcd | 4,288 | 5,574 | 4,182 |
| processor time of a job, ms: all | 4.1 | 2.8 | 3.4 |
| queue | 1.5 | 1.1 | 1.3 |
| etcd, all three | 1.0 | 0.6 | 0.8 |
| placement | 0.8 | 0.6 | 0.7 |
| agents and callers | 0.6 | 0.4 | 0.5 |
| predictor | 0.1 | 0.1 | 0.1 |
| a submit's answer at 50 a second, ms: half, 99 of 100 | 8, 30 | 7, 29 | 10, 34 |
| store of a job that runs, bytes | 616 | 620 | 590 |
| the largest of the services' memories, MiB | 138 | 142 | 301 |

With 1,000 agents 80,615 jobs were known in the end, and a page of 100 of them took 4.6 ms. A hundred watchers missed
nothing. Two cores on which all took two and a half times as long, raw transactions too (1,573 a second), brought 247
jobs a second to running there, with 7.4 ms of processor for each, answered 99 of 100 submits within 47 ms, and gave a
page of 77,617 jobs in 19 ms. Where the machine is overloaded all of it becomes slow alike: with ten times as many other
processes as cores, and 18 ms of processor for a job, 1,000 agents had 23 jobs a second brought to running, and no
leader lost its lease.

`benchmarks/overload.py` brings trouble over such clusters, with two processes of each service and a `lost_after` of
half a minute: three times the jobs that can be brought to running, eight processes that never rest, the loss of etcd's
leader, and the halt of the placement that leads, or of both, for longer than `lost_after`. Its bars: no node is given
up whose agent is there, nobody else leads unless the leader was halted, no job that has begun is started again, each
that was acknowledged runs, and jobs are brought to running as quickly as before within ten seconds. On two cores that
had twenty to thirty other processes to run at the same time, with a `lost_after` of twenty seconds, seconds until 80 %
of the jobs a second before:

| agents | 100 | 300 | 1,000 |
|---|---|---|---|
| three times the jobs | 0.5 | 0 | 0 and 3.5 |
| eight busy processes | 0.3 | 1.5 | 0.5 |
| etcd's leader killed | 0 | 0 | 0 |
| the leading placement halted for 25 s | 0 | 0.5 | 0 and 16 |
| both placements halted for 25 s | 1.3 | 4 | 11 and 42 |

Up to 300 agents all came back within ten seconds. With 1,000 it depends: after a halt in which up to 57 parts of jobs
were given up and up to 20 jobs started again, the lease of a leader is kept alive from its election on, callers leave a
halted leader after twelve seconds in place of fifteen, and `lost_after` is half a minute there. Two runs since lost
nothing and started nothing twice; to come back took 0 and 69 s after the halt of the leader, 8 and 19 s after that of
both, beside other work that changed meanwhile. So the bar of ten seconds is missed for halts of 1,000 agents, and which
of these changes ended the losses has not been found out one by one. The default of `lost_after`, five minutes, is wise
where machines may be overloaded like that.

## Versions

Every record carries the version of its schema. A process that meets a newer one than it knows, or one that is damaged,
ends with an error that names its key and gives the lead back; it changes nothing. Within a schema fields are only
added, and old and new versions of the services work beside each other. A version without elections that still runs is
fenced as soon as a newer one leads.
"""


def table() -> str:
    """Draw who answers which call."""
    lines = ["| service | call | who answers |", "|---|---|---|"]
    for path, route in ROUTES.items():
        service, name = path.removeprefix("/cotenant.v1.").split("/")
        lines.append(f"| {service} | {name} | {route.value} |")
    return "\n".join(lines)


def page() -> str:
    """Draw the page."""
    return TEXT.format(table=table())


if __name__ == "__main__":
    PAGE.write_text(page())
