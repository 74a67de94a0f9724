"""Each queue policy in a few naive lines, for `oracle.replay`; a new policy adds one function and one row to `ARMS`.

A function gets the present jobs, the time and the ended jobs, and returns the jobs in order, without those that it
gives up. `WEIGHT` is each tenant's weight.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from math import inf

from tests.unit.simulator.oracle import service

GPUS, CORES = 4, 9
WEIGHT = {"ann": 1.0, "bob": 1.0, "cat": 1.0}
QUANTUM = 12  # a power of two of it is a whole number of seconds for any job's size, and so are the thresholds below
THRESHOLDS = (12, 48)
STARVED_SECONDS, KNOB = 20, 2
HISTORY_MIN = 3
CADENCE, FIRST_LEVEL, HOLD = 5, 3, 2  # seconds, seconds of a GPU, levels


def doubled(amount):
    """Return the largest of 0, QUANTUM, 2 QUANTUM, 4 QUANTUM… that is at most an amount."""
    return max([0, *(QUANTUM * 2**k for k in range(12) if QUANTUM * 2**k <= amount + 1e-9)])


def rest(job):
    return job.work - job.done if job.known else doubled(job.done)


def fifo(here, now, history):
    return sorted(here, key=lambda job: job.number)


def sjf(here, now, history):
    return sorted(here, key=lambda job: (not job.known, job.work if job.known else 0, job.number))


def srtf(here, now, history):
    return sorted(here, key=lambda job: (rest(job), job.number))


def srsf(here, now, history):
    return sorted(here, key=lambda job: (rest(job) * (job.gpus or job.cores / 3), job.number))


def las(here, now, history, patience=lambda job: inf):
    def level(job):
        if not job.runs and job.done and now - job.since >= patience(job):
            job.forgiven = job.done  # only its next run counts
            return 0
        had = service(job) * (1 - job.forgiven / job.done) if job.done and job.runs else service(job)
        return sum(had + 1e-9 >= threshold for threshold in THRESHOLDS)

    return sorted(here, key=lambda job: (level(job), not job.runs, job.number))


def las_that_starves_nobody(here, now, history):
    return las(here, now, history, patience=lambda job: min(STARVED_SECONDS, KNOB * job.done))


def gittins(here, now, history):
    past = [service(job) for job in history]

    def index(had):
        left = [whole - had for whole in past if whole > had + 1e-9]
        spans = [end - had for end in (QUANTUM * 2**k for k in range(12)) if end > had]
        paid = [sum(x <= span + 1e-9 for x in left) / sum(min(x, span) for x in left) for span in spans if left]
        return round(max(paid, default=0) if len(past) >= HISTORY_MIN else 0, 9)

    worth = {had: index(had) for had in {doubled(service(job)) for job in here}}
    return sorted(here, key=lambda job: (-worth[h := doubled(service(job))], h, not job.runs, job.number))


def drf(here, now, history):
    def before(job):
        mine = [x for x in here if x.tenant == job.tenant and (not x.runs, x.number) < (not job.runs, job.number)]
        return max(sum(x.gpus for x in mine) / GPUS, sum(x.cores for x in mine) / CORES) / WEIGHT[job.tenant]

    return sorted(here, key=lambda job: (before(job), job.number))


def edf(here, now, history):
    return sorted(here, key=lambda job: (min(job.deadline, 1e18), job.number))


def swaf(here, now, history):
    def key(job):
        allowance = job.deadline - now - (job.work - job.done if job.known else job.done)
        if job.deadline == inf or job.runs:
            return 1, 0.0, job.number
        return (0, allowance, job.number) if allowance >= 0 else (2, 0.0, job.number)

    return sorted(here, key=key)


def swaf_that_drops(here, now, history):
    saved = [job for job in here if job.runs or job.deadline - now >= (job.work - job.done if job.known else job.done)]
    return swaf(saved, now, history)


def units(job):
    return 15 * job.gpus or 5 * job.cores


def at_tick(job, now):
    return job.done - min(now % CADENCE, job.done - job.before) if job.runs else job.done


def voted(votes, one):
    """Return the rank of one value among many, ties averaged."""
    return sum(vote < one for vote in votes) + (1 + sum(vote == one for vote in votes)) / 2


def borda(here, now, history):
    def need(job, had):
        return abs((job.work if job.known else 0) - had) * units(job)

    def level(job):
        needs = need(job, at_tick(job, now))
        return max(0, sum(needs >= 15 * FIRST_LEVEL * 2**k for k in range(30)) - HOLD * job.runs)

    needs = {job.number: need(job, job.before if job.runs else job.done) for job in here}
    came = [job.came for job in here]
    votes = {job.number: voted(needs.values(), needs[job.number]) + voted(came, job.came) for job in here}
    return sorted(here, key=lambda job: (level(job), not job.runs, votes[job.number], job.number))


def borda_of_the_paper(here, now, history):
    had = {job.number: at_tick(job, now) * units(job) for job in here}
    left = {job.number: job.work * units(job) - had[job.number] for job in here if job.known}

    def score(job):
        lists = [had, left] if job.known else [had, had]
        return sum(voted(votes.values(), votes[job.number]) for votes in lists)

    def level(job):
        return sum(score(job) >= share * 2 * len(here) for share in (0.25, 0.5))

    return sorted(here, key=lambda job: (level(job), not job.runs, score(job), job.number))


def optimus(here, now, history):
    def score(job):
        had = at_tick(job, now)
        return (job.work - had if job.known else doubled(had)) * max(job.gpus / GPUS, job.cores / CORES)

    return sorted(here, key=lambda job: (job.came > now - now % CADENCE, score(job), job.number))


PREEMPTIVE, STRICT = {"preemptive": True, "strict": False}, {"preemptive": False, "strict": True}
BACKFILL = {"preemptive": False, "strict": False}
_QUANTUM, _LEVELS = {"quantum_seconds": f"{QUANTUM}"}, {"thresholds": ",".join(map(str, THRESHOLDS))}

ARMS = [  # (policy, its options, the naive order, and the naive scheduler's treatment)
    ("fifo", {"mode": "strict"}, fifo, STRICT),
    ("fifo", {"mode": "backfill"}, fifo, BACKFILL),
    ("sjf", {"mode": "strict"}, sjf, STRICT),
    ("sjf", {"mode": "backfill"}, sjf, BACKFILL),
    ("srtf", _QUANTUM, srtf, PREEMPTIVE),
    ("srsf", _QUANTUM, srsf, PREEMPTIVE),
    ("las", _LEVELS, las, PREEMPTIVE),
    (
        "las",
        {**_LEVELS, "starvation_seconds": f"{STARVED_SECONDS}", "promote_knob": f"{KNOB}"},
        las_that_starves_nobody,
        PREEMPTIVE,
    ),
    ("gittins", {"quantum_gpu_seconds": f"{QUANTUM}", "history_min": f"{HISTORY_MIN}"}, gittins, PREEMPTIVE),
    (
        "borda-mlfq",
        {
            "variant": "expected",
            "cadence_seconds": f"{CADENCE}",
            "level_seconds": f"{FIRST_LEVEL}",
            "hold_levels": f"{HOLD}",
            "error": "0",
        },
        borda,
        PREEMPTIVE,
    ),
    ("borda-mlfq", {"cadence_seconds": f"{CADENCE}", "variant": "literal"}, borda_of_the_paper, PREEMPTIVE),
    ("optimus", {"interval_seconds": f"{CADENCE}", **_QUANTUM}, optimus, PREEMPTIVE),
    ("drf", {"mode": "backfill"}, drf, BACKFILL),
    ("drf", {"mode": "strict"}, drf, STRICT),
    ("drf", {"preemptive": "true"}, drf, PREEMPTIVE),
    ("edf", {}, edf, STRICT),
    ("edf", {"mode": "backfill"}, edf, BACKFILL),
    ("swaf", {"lost": "tail"}, swaf, BACKFILL),
    ("swaf", {"lost": "tail", "mode": "strict"}, swaf, STRICT),
    ("swaf", {"lost": "drop"}, swaf_that_drops, BACKFILL),
    ("swaf", {"lost": "drop", "mode": "strict"}, swaf_that_drops, STRICT),
]
