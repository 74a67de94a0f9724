"""Generates docs/replicas.md from the routing table: `make docs`."""

from __future__ import annotations

from pathlib import Path

from cotenant.leadership.routing_table import ROUTES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "replicas.md"

TEXT = """\
# Several processes of each service

Every service can run as any number of processes (replicas). They share their state in etcd and elect a leader; no
replica is configured as the first.

```
cotenant serve queue     --store etcd://e1:2379,e2:2379,e3:2379 --listen 0.0.0.0:7070 --address 10.0.0.5 …
cotenant serve queue     --store etcd://e1:2379,e2:2379,e3:2379 --listen 0.0.0.0:7070 --address 10.0.0.6 …
cotenant serve placement --store etcd://e1:2379,e2:2379,e3:2379 --listen 0.0.0.0:7071 --address 10.0.0.5 …
cotenant serve placement --store etcd://e1:2379,e2:2379,e3:2379 --listen 0.0.0.0:7071 --address 10.0.0.6 …
```

The dots stand for `--endpoints`, the [addresses of the other services](#addresses), and for `--tls-ca`, `--tls-cert`
and `--tls-key`, the [certificates](security.md#certificates), or `--insecure` on a network that you trust. `--address`
is the address at which other replicas reach this process. The default is the address of `--listen`, or the host name
if the process listens on all addresses. Without certificates all processes need the same token (`COTENANT_TOKEN`).

## Leader election

Queue, placement and predictor each elect a leader: the replica that holds the key of the service in etcd
(`queue/leader`, `placement/leader`, `predictor/leader`) under a lease of two seconds. Only the leader decides and
writes. Each of its transactions compares the revision of that key (a fencing token), so a leader that was partitioned,
paused or replaced cannot write, however late it resumes.

- **Killed** (`kill -9`, a power failure): the lease expires, and another replica becomes leader after 1.3 to 2.5 s,
  with the records already in memory. Running jobs are not affected. Calls wait for the new leader for up to five
  seconds.
- **Stopped** (SIGTERM, Ctrl-C): the leader releases its lease, and another replica becomes leader at once. Use this
  for a rolling restart or upgrade: stop a process, start its successor, wait until it reports that it serves, then
  continue with the next process.
- **Paused or partitioned** for longer than its lease: the process detects this, discards its leader state and becomes a
  follower. It does not exit. Its connections stay open while it is paused. Its clients and watchers switch to another
  replica within twelve seconds, when keep-alive pings are not answered; clients behind a replica that forwards calls
  switch one second after another replica has become leader. Set `lost_after` to at least half a minute, because agents
  switch in the same way, and a thousand agents reconnect one after another.
- **Overloaded**: it keeps its lease, because a separate thread renews the lease while the event loop is late, and
  answers slowly; a new leader would first have to read all records and then be as slow. A leader whose event loop
  makes no progress for ten seconds is replaced. Each process reports its loop lag (`cotenant.loop.delay`) and logs
  `loop_stalled` for a lag of half a second or more. A commit that etcd answers late costs a new leadership term and
  nothing else: agents stay connected, and placement does not declare a node lost while it was not listening itself.
- **etcd is unavailable**: no leader is elected and nothing is written. Reads continue; writes fail with UNAVAILABLE
  and a retry delay; jobs keep running and agents stay connected. Agent reports and pending writes are kept in memory
  and written when etcd is back. (A leader that may have been replaced disconnects its agents every third of
  `lost_after`, so that they find the new leader.) See [survival](survival.md) for jobs that must not keep running on
  their own.

`cotenant up` with etcd runs all three elected services in one process. It takes part in elections like any other
replica, with leases of five seconds, and does not start if another mesh or service is the leader in that etcd: after
eight seconds it reports which one, and where. While etcd is unavailable it continues as replicas do. If its leases
expire in that time, it reports this and starts over at the same address once it is elected again; if another process
has become leader, it exits.

A store with a single process (SQLite, memory) has one process of each service, which is leader immediately, also after
`kill -9`; a second process is refused because the store is in use.

`cotenant replicas` lists all replicas: state, leadership term, the store revision up to which each follower has read,
and release.

```console
$ cotenant replicas
SERVICE    ADDRESS        STATE    TERM  SEEN  RELEASE  LEADER, OR WHAT IS WRONG
placement  10.0.0.5:7071  follows   842   917  0.1.0    10.0.0.6:7071
placement  10.0.0.6:7071  leads     842     -  0.1.0    10.0.0.6:7071
queue      10.0.0.5:7070  leads      12     -  0.1.0    10.0.0.5:7070
queue      10.0.0.6:7070  follows    12   921  0.1.0    10.0.0.5:7070
```

## How it is

`cotenant status` summarizes the whole mesh: processes and leader of each service, members of etcd as the services see
them, nodes, jobs, releases and certificates. Below the summary it lists every problem with a remedy: a process or an
etcd member that is away, a lost etcd majority, a service without a leader, a node that is unhealthy or whose agent is
away, a certificate that [is due](security.md#when-they-run-out), a process or an agent with another release than most;
and [what is slow but alive](#slow-but-alive). The exit status is 0 without problems, 1 with problems and 3 if no
service answers, so a timer can run it; `--json` has all details.

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

Processes and agents measure themselves over the last 30 s, and `status` reports a part that stays slow for more than a
moment ([why these figures](adr/0076-slow-parts-are-named-by-sustained-figures.md)):

| problem | condition | remedy |
|---|---|---|
| `queue a:7070: its event loop was behind by 1.2 s …` | 1 s or more in two of three 10 s windows | a CPU of its own |
| `store: it takes 420 ms to answer …` | the median is 100 ms or more | etcd's disks |
| `gpu-1: its agent is late: last heard 6s ago …` | two heartbeats are missed | the node's load, network |
| `queue a:7070: its clock is 86,400 s ahead` | more than 2 s from the median | chrony |
| `gpu-1: it cannot resolve queue.mesh: …` | for 12 s | the machine's name servers |

`--json` has the figures of each process under `processes`; they are null for a process of an older release:

| key | meaning |
|---|---|
| `loop_lag.longest_seconds`, `.median_seconds` | delays of the event loop |
| `loop_lag.behind_share` | the sum of the delays as a share of the time |
| `loop_lag.windows_behind` | how many of three 10 s windows had a delay of 1 s or longer |
| `store_latency.median_seconds`, `.longest_seconds`, `.calls` | response time of the store, or null |
| `clock_offset_seconds` | how far its wall clock is ahead of the machine that runs `status` |
| `clock_error_seconds` | the uncertainty of that offset: half of the round trip |

`cotenant nodes --json` has `loop_lag`, `silence_seconds` and `heartbeat_seconds` of each agent, and
`clock_offset_seconds` relative to placement's clock.

## Which replica answers

A call can go to any replica. A replica forwards calls that need the leader: the bytes of the request, the metadata
with the caller's token, the remaining deadline, and streams in both directions. If the leader dies during a forwarded
call, the replica retries the call if nothing was done yet or a retry is harmless; other calls, and streams, end with
UNAVAILABLE, and the caller resumes them. If there is no leader for five seconds, a call fails with UNAVAILABLE, the
reason `NO_LEADER` and a retry delay.

Answers from stored records carry the trailer `cotenant-revision`: the store revision up to which the replica has read.
Calls by users who are limited to some tenants are always answered by the leader, which knows the tenant hierarchy.

{table}

Any replica answers `ListJobs` for phases of ended jobs.

In the health protocol a replica is SERVING as long as a call would be answered, by it or by another replica.

## One address is enough

Every process answers every call of the public API (`cotenant.v1`). A call for a service that it does not serve is
routed: the process authenticates the caller, checks its roles and limits, and passes the call on to one of that
service's `--endpoints`, as a follower passes calls to its leader. Streams are cancelled in both directions, and a slow
reader slows down the answering service. So `--endpoint queue.mesh:7070`, or the address of any other service, is enough
for every command and every client; a direct address saves a hop.

- Give every `cotenant serve` the same `--endpoints` with all four services, as `deploy/` does. A call for a service
  that is missing there fails with UNAVAILABLE and the reason `SERVICE_ADDRESS_UNKNOWN`, one for a service that is down
  with `SERVICE_UNREACHABLE`.
- A call is routed once. A process that receives a routed call for a service that it does not serve refuses it with
  `MISROUTED`: the caller's endpoints name a wrong address.
- Agents' streams and calls between services are not routed (`NOT_SERVED_HERE`).
- Reflection lists what can be called. The health protocol covers only what a process serves itself: for other services
  `Check` answers NOT_FOUND, so a probe never mistakes one service for another. So `cotenant health` needs the address
  of each service; `cotenant status` needs one.
- `ProcessService`, `PolicyService` and `ContentionService` answer for one process. The metadata `cotenant-to` names it:
  a service (`queue`), or an address from the `endpoints` that `GetProcess` returns, for example
  `grpcurl -H 'cotenant-to: 10.0.0.6:7073' …`. `cotenant status`, `replicas`, `policies`, `top` and `incidents` use it
  for all processes that the asked one knows.

## Addresses

`--endpoints`, `--endpoint` and `COTENANT_ENDPOINT` take a list of the replicas of a service, or a name that resolves to
several addresses:

```
--endpoints 'queue=10.0.0.5:7070|10.0.0.6:7070,placement=10.0.0.5:7071|10.0.0.6:7071'
--endpoints 'queue=queue.mesh:7070,placement=placement.mesh:7071'
```

Calls are distributed round-robin over all replicas; with a list, only over replicas that report SERVING. Names are
resolved again: names in a list every five seconds (new calls use the new addresses, calls in progress stay where they
are), a single name when a connection to it fails. While the name server is unavailable, the known addresses stay in
use.

## Predictors and contention

All predictors on one etcd have the same data: the leader takes observations and writes what it learns; the followers
read it and give the same answers, so estimates are spread over all replicas and continue during an election.
Predictors are not sharded by model: [why, and what a replica
costs](adr/0027-one-predictor-observes-others-follow-the-store.md): about 90 MiB with 100,000 finished jobs, and 10 µs
of CPU time for each observation that the leader takes.

Contention keeps samples and incidents of a node in memory, so the agent of a node sends them to a single replica,
chosen by the node's name (rendezvous hashing), or to the next replica in its order while the first is away. The agent
returns within a minute or two after the first replica is back, once nothing on the node is throttled, because a
replica without the node's history starts without baselines. The replicas are the listed ones, or all addresses of a
name, such as a headless service in Kubernetes; names are resolved before each stream and once a minute, so replicas
can be added, removed and moved to other addresses. `cotenant top` and `cotenant incidents` query all replicas and
merge the answers. A gRPC client has to query each replica for its nodes, at its address or with `cotenant-to`.

## Throughput

`benchmarks/cluster.py` runs one process of each service, an etcd of three members and all agents, simulated, on one
machine. Jobs of two seconds, started as fast as possible, on two otherwise idle cores:

| agents, of 8 GPUs | 100 | 300 | 1,000 |
|---|---|---|---|
| job starts per second (1,000: for a minute) | 380 | 585 | 504 |
| raw transactions per second of the same etcd | 4,288 | 5,574 | 4,182 |
| CPU time per job, ms: all | 4.1 | 2.8 | 3.4 |
| queue | 1.5 | 1.1 | 1.3 |
| etcd, all three | 1.0 | 0.6 | 0.8 |
| placement | 0.8 | 0.6 | 0.7 |
| agents and callers | 0.6 | 0.4 | 0.5 |
| predictor | 0.1 | 0.1 | 0.1 |
| latency of a submission at 50 per second, ms: p50, p99 | 8, 30 | 7, 29 | 10, 34 |
| store size per running job, bytes | 616 | 620 | 590 |
| peak memory of the largest service, MiB | 138 | 142 | 301 |

With 1,000 agents, 80,615 jobs were known at the end, and a page of 100 of them took 4.6 ms. A hundred watchers missed
nothing. On two cores where everything took two and a half times as long, also raw transactions (1,573 per second), the
mesh started 247 jobs per second with 7.4 ms of CPU time each, answered 99 % of submissions within 47 ms, and returned
a page of 77,617 jobs in 19 ms. On an overloaded machine everything slows down alike: with ten times as many other
processes as cores, and 18 ms of CPU time per job, 1,000 agents had 23 job starts per second, and no leader lost its
lease.

`benchmarks/overload.py` disturbs such clusters, with two processes of each service and a `lost_after` of half a
minute: three times the jobs that can be started, eight busy processes, the loss of etcd's leader, and a pause of the
leading placement, or of both, for longer than `lost_after`. Its bars: no node is declared lost while its agent is
there, the leader changes only if the leader was paused, no job that has begun is started again, every acknowledged job
runs, and the job start rate recovers within ten seconds. On two cores shared with twenty to thirty other runnable
processes, with a `lost_after` of twenty seconds, the seconds until 80 % of the previous job start rate:

| agents | 100 | 300 | 1,000 |
|---|---|---|---|
| three times the jobs | 0.5 | 0 | 0 and 3.5 |
| eight busy processes | 0.3 | 1.5 | 0.5 |
| etcd's leader killed | 0 | 0 | 0 |
| the leading placement paused for 25 s | 0 | 0.5 | 0 and 16 |
| both placements paused for 25 s | 1.3 | 4 | 11 and 42 |

With up to 300 agents everything recovered within ten seconds. With 1,000 agents the result varies. After a run in
which a pause cost up to 57 lost parts of jobs and up to 20 restarted jobs, three things changed: a leader's lease is
kept alive from its election on, clients leave a paused leader after twelve seconds instead of fifteen, and
`lost_after` is half a minute in the benchmark. Two runs since then lost nothing and started nothing twice; recovery
took 0 and 69 s after the pause of the leader, and 8 and 19 s after the pause of both, with varying other load. So the
bar of ten seconds is missed for pauses with 1,000 agents, and we have not isolated which change ended the losses. On
machines that may be overloaded like that, keep the default `lost_after` of five minutes.

## Versions

Every record carries its schema version. A process that reads a record with a newer version, or a damaged record, exits
with an error that names the key, and releases its leadership; it changes nothing. Within a schema, fields are only
added, and old and new versions of the services work side by side. A version without elections that is still running is
fenced as soon as a newer one becomes leader.
"""


def table() -> str:
    """Return the table of calls and the replicas that answer them."""
    lines = ["| service | call | answered by |", "|---|---|---|"]
    for path, route in ROUTES.items():
        service, name = path.rpartition(".")[2].split("/")
        lines.append(f"| {service} | {name} | {route.value} |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    return TEXT.format(table=table())


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"   wrote {PAGE.relative_to(PAGE.parent.parent)}")
