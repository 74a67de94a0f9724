"""Relieves the victims on one node: which attempts to throttle, how far, and for how long.

Theory of operation. It is never certain which job slows down which, so it is tried: the suspect with the most evidence
against it is throttled, and the victim watched for two windows. If it regains its loss, or a fifth of it and more than
noise explains, the suspect is **proven** and throttled by one more rung as long as the victim is still below its
baseline. If not, the suspect is released, left alone for five minutes, and the next one is tried.

Two suspects that each saturate the shared resource hide each other: what one is denied, the other takes. So if the
trial of every suspect showed nothing and the victim is still slowed down, the two with the most evidence are throttled
**together**, then three, up to a limit. A proven suspect that can only be throttled further by a suspension counts as
the first of them: noise alone may have pointed at it. If the victim regains half of its loss they are proven; then each
is released once, the one with the least evidence first, because it may have had no part. If not, all are released, and
left alone for longer.

When nothing is left to try, the job has simply become slower: its rate is the baseline from then on.

Throttles are relaxed rung by rung, each after a minute in which no job was slowed down and memory was calm. If that
slows a job down again within three minutes, the rung is restored, without a trial, and the next wait is twice as long.
Attempts that were released completely are remembered for five more minutes.

All applied throttles can be read from the windows themselves, so a new instance without memory, after a restart,
resumes from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cotenant.core.policy.protocols import FREE, Directive, NodeWindow
from cotenant.policies.coda_eliminator.ladder import cores_each, first_rung, rungs, strongest_rung
from cotenant.policies.coda_eliminator.node_state import NodeState, Victim
from cotenant.policies.coda_eliminator.suspects import Attempt, Suspect, ranked
from cotenant.policies.coda_eliminator.thresholds import THRESHOLDS, Thresholds
from cotenant.policies.coda_eliminator.throttled_jobs import Hold, ThrottledJobs, Trial

RELAPSE_SECONDS = 180.0  # a slowdown this soon after a throttle was relaxed is caused by that
TRIAL_WINDOWS_MAX = 6  # of a trial with more noise
STALE_WINDOWS = 12  # a trial that takes longer has failed
ADOPT_WINDOWS = 12  # a fall without a cause becomes the baseline after a minute
GAIN_MIN = 0.2  # of the loss; smaller gains are no relief
TOGETHER_GAIN_MIN = 0.5  # of the loss, if several attempts are throttled
PATIENCE = 10.0  # waits, after which a rung is relaxed even if memory is not calm


@dataclass(slots=True)
class Relief:
    """The victims and suspects of one node, and the throttles in force."""

    thresholds: Thresholds = THRESHOLDS
    state: NodeState = field(init=False)
    throttled: ThrottledJobs = field(init=False)
    trial: Trial | None = None
    silent: dict[Attempt, float] = field(
        default_factory=dict
    )  # suspects whose trials showed nothing, and the evidence against them
    healthy_since: float = math.inf
    calm_since: float = math.inf

    def __post_init__(self) -> None:
        self.state, self.throttled = NodeState(self.thresholds), ThrottledJobs(self.thresholds)

    def judge(self, window: NodeWindow) -> Sequence[Directive]:
        """Return what to do now; at most one directive for each attempt."""
        if window.now <= self.state.last:
            return ()
        throttled = self.throttled
        throttled.directives = {}
        self.state.update(window, throttled=throttled.any_proven())
        throttled.forget(self.state.cpu, window.now)
        throttled.adopt(self.state.cpu, window)
        throttled.resend(self.state.cpu, window)
        self._drop_trial(window.now)
        throttled.limit_suspensions(window)
        if self.state.cpu:
            self._note_calm(window)
            self._advance_trial(window)
            if self.trial is None and (victims := self.state.victims()):
                self._relieve(victims[0], window)
            elif self.trial is None:
                self._relax(window)
        else:
            for one in self.state.victims():
                self._accept(one)
        return tuple(throttled.directives[id] for id in sorted(throttled.directives))

    def _note_calm(self, window: NodeWindow) -> None:
        """Note since when no job seems slowed down, and since when memory is calm as well."""
        used = self.state.bandwidth_percent(window)
        began = window.now - window.seconds
        self.healthy_since = min(self.healthy_since, began) if self.state.healthy() else math.inf
        calm = used is None or used < self.thresholds.bandwidth_calm_percent
        self.calm_since = min(self.calm_since, began) if calm else math.inf

    # ---- effect of a change

    def _drop_trial(self, now: float) -> None:
        """End a trial with an attempt that has left or cannot be throttled; other attempts on trial are released."""
        trial = self.trial
        if trial is None or all(id in self.throttled.holds for id in trial.suspects):
            return
        self.trial = None
        for id in trial.suspects:
            if id in self.throttled.holds and not self.throttled.holds[id].proven:
                self.throttled.release(id, now, "another attempt that was throttled together with it is gone")

    def _advance_trial(self, window: NodeWindow) -> None:
        trial = self.trial
        if trial is None:
            return
        holds, victim = {id: self.throttled.holds[id] for id in trial.suspects}, self.state.steady.get(trial.victim)
        if trial.victim[0] not in self.state.gpu_jobs:
            self.trial = None
            for id, hold in holds.items():
                if not hold.proven:
                    why = f"{trial.victim[0]}, for which it was throttled, is gone"
                    self.throttled.set(id, hold, -1, window.now, why)
            return
        if victim and all(self.state.cpu[id].throttle == hold.throttle for id, hold in holds.items()):
            trial.windows += 1
            trial.below += victim.baseline.below(victim.baseline.last)
        elif window.now - trial.began > STALE_WINDOWS * window.seconds:
            self._end_trial(trial, window)
            return
        else:
            return
        if all(hold.proven for hold in holds.values()):
            self._watch_proven(trial, victim, window)
        else:
            self._watch_trial(trial, victim, window)

    def _watch_trial(self, trial: Trial, victim: Victim, window: NodeWindow) -> None:
        """Decide whether the attempts on trial slow down the victim."""
        noise = victim.baseline.noise
        gain, together = trial.loss - trial.left, len(trial.throttled_with) > 1
        unsure = noise * math.sqrt(1 / trial.windows + 1 / max(1, trial.loss_windows))
        needed = max((TOGETHER_GAIN_MIN if together else GAIN_MIN) * trial.loss, 1.28 * unsure)
        enough = max(self.thresholds.look_windows, min(TRIAL_WINDOWS_MAX, math.ceil((2.5 * noise / trial.loss) ** 2)))
        doubt = unsure
        if together and gain < needed:  # releasing all of them is final: no other suspect is left to try
            enough, doubt = TRIAL_WINDOWS_MAX, 2 * unsure
        if trial.windows < enough and abs(gain - needed) < doubt:
            return
        if gain < needed:
            self._end_trial(trial, window)
            return
        for id in trial.suspects:
            hold = self.throttled.holds[id]
            hold.proven, hold.untested = True, together
            self.throttled.cleared.pop(id, None)
            others = _with_others(id, trial.throttled_with)
            hold.reason = (
                f"{trial.victim[0]} gained {max(0.0, gain):.0%} of its baseline when this was throttled{others}"
            )
        self._watch_proven(trial, victim, window)

    def _end_trial(self, trial: Trial, window: NodeWindow) -> None:
        """Release suspects whose trial showed nothing, and try the next, or more of them together."""
        self.trial = None
        if all(self.throttled.holds[id].proven for id in trial.suspects):
            return
        lost = f"{trial.victim[0]} is still {max(0.0, trial.left):.0%} below its baseline"
        for id in trial.suspects:
            self.silent.setdefault(id, self.throttled.holds[id].score)
            others = _with_others(id, trial.throttled_with)
            self.throttled.release(id, window.now, f"throttling it{others} had no effect: {lost}")
        victim = self.state.steady.get(trial.victim)
        if victim is None:
            return
        if not trial.throttled_with and self._start_trial(victim, trial.loss, trial.loss_windows, trial.began, window):
            return
        if not self._start_joint_trial(victim, trial, window):
            self._accept(victim)

    def _watch_proven(self, trial: Trial, victim: Victim, window: NodeWindow) -> None:
        """Throttle further while the victim is still slowed down; done when it is not, within the noise."""
        unsure = victim.baseline.noise / math.sqrt(trial.windows)
        running = any(0 <= hold.rung < hold.gentlest for hold in self.throttled.holds.values() if hold.proven)
        if trial.left - unsure > self.thresholds.slowdown and (
            running or trial.windows >= self.thresholds.look_windows
        ):
            self.trial = None  # one window alone never suspends an attempt
            self._deepen(victim, trial.left, trial.windows, window, trial)
        elif trial.windows >= self.thresholds.look_windows:
            self.trial = None

    # ---- actions

    def _relieve(self, victim: Victim, window: NodeWindow) -> None:
        """Relieve a victim if a resource of the node is short."""
        self.silent.clear()
        baseline = victim.baseline
        start = window.now - (baseline.fallen.windows - 1) * window.seconds
        known = next((one for one in self._recent(window.now)), None)
        if known is not None:
            self._restore(known, victim, window)
            return
        pressure = self.state.pressure(window) or self.state.onset
        if self.throttled.any_proven():
            self._deepen(victim, baseline.slowdown, baseline.fallen.windows, window)
        elif pressure:
            loss, windows = baseline.slowdown, baseline.fallen.windows
            if not self._start_trial(victim, loss, windows, start, window, pressure):
                self._accept(victim)
        elif baseline.fallen.windows >= ADOPT_WINDOWS:
            self._accept(victim)

    def _recent(self, now: float) -> list[Attempt]:
        """Return the attempts that were relaxed recently, the last one first."""
        found = [
            (-hold.returned, id) for id, hold in self.throttled.holds.items() if now - hold.returned <= RELAPSE_SECONDS
        ]
        return [id for _, id in sorted(found)]

    def _restore(self, id: Attempt, victim: Victim, window: NodeWindow) -> None:
        """Restore a throttle that was relaxed too early."""
        hold = self.throttled.holds[id]
        hold.wait = min(self.thresholds.calm_seconds_max, 2 * hold.wait)
        hold.returned = -math.inf
        why = f"{victim.describe()} since it was given more"
        loss, windows = victim.baseline.slowdown, victim.baseline.fallen.windows
        rung = hold.before
        if rung == len(hold.ladder) - 1 and not self.throttled.may_suspend(id, window.now):
            rung = hold.gentlest
        if rung > hold.rung:
            self._throttle(id, hold, rung, victim, (loss, windows), window, why)
        else:
            victim.baseline.fallen.clear()

    def _deepen(
        self, victim: Victim, loss: float, windows: int, window: NodeWindow, trial: Trial | None = None
    ) -> None:
        """Throttle proven attempts further; then try others, alone and together; only then suspend or move one."""
        proven = [(hold.since, id) for id, hold in self.throttled.holds.items() if hold.proven and hold.rung >= 0]
        running = sorted(
            (since, id) for since, id in proven if self.throttled.holds[id].rung < self.throttled.holds[id].gentlest
        )
        if running:
            id = running[-1][1]
            hold = self.throttled.holds[id]
            why = f"{victim.attempt.job_id} is still {loss:.0%} below its baseline"
            self._throttle(id, hold, hold.rung + 1, victim, (loss, windows), window, why)
            return
        start = window.now - (windows - 1) * window.seconds
        if self._start_trial(victim, loss, windows, start, window):
            return
        if trial is not None and self._start_joint_trial(victim, trial, window):
            return
        for _, id in sorted(proven, reverse=True):
            hold = self.throttled.holds[id]
            if hold.rung == hold.gentlest and self.throttled.may_suspend(id, window.now):
                why = f"{victim.attempt.job_id} is still {loss:.0%} below its baseline, and nothing gentler is left"
                self._throttle(id, hold, hold.rung + 1, victim, (loss, windows), window, why)
                return
            if hold.rung == hold.gentlest and window.now - hold.moving > self.thresholds.cleared_seconds:
                hold.moving = window.now
                why = f"{victim.attempt.job_id} is still {loss:.0%} below its baseline beside it: it should move"
                self.throttled.set(id, hold, hold.rung, window.now, why, move=True)
                return
        self._accept(victim)

    def _start_trial(
        self, victim: Victim, loss: float, windows: int, start: float, window: NodeWindow, pressure: str = ""
    ) -> bool:
        """Start the trial of the next suspect; False if none is left."""
        free = [one for id, one in self.state.cpu.items() if self.throttled.may_be_tried(id, window.now)]
        all_cores = sum(attempt.cores or attempt.cores_used for attempt in window.attempts)
        for suspect in ranked(self.state.usages, free, start, window.seconds, all_cores):
            id = suspect.attempt.job_id, suspect.attempt.number
            ladder = rungs(suspect.attempt, window)
            rung = first_rung(ladder, loss)
            if ladder[rung].throttle.suspended and not self.throttled.may_suspend(id, window.now):
                continue
            hold = Hold(ladder, cores_each(suspect.attempt), -1, FREE, self.thresholds.calm_seconds, window.now)
            hold.score, self.throttled.holds[id] = suspect.score, hold
            self._throttle(id, hold, rung, victim, (loss, windows), window, _reason(victim, loss, suspect, pressure))
            return True
        return False

    def _start_joint_trial(self, victim: Victim, trial: Trial, window: NodeWindow) -> bool:
        """Start a joint trial of one suspect more than before, the strongest; False if there are too few."""
        partners = [id for id, hold in self.throttled.holds.items() if hold.proven and hold.rung >= 0]
        many = max(len(trial.throttled_with), 1, len(partners)) + 1
        unsure = victim.baseline.noise / math.sqrt(max(1, trial.windows))
        if not trial.windows or trial.left - unsure <= self.thresholds.slowdown:
            return False  # it may have recovered by now
        tried = sorted((-score, id) for id, score in self.silent.items() if self._may_be_throttled(id, window))
        if not len(tried) + len(partners) >= many <= self.thresholds.suspects_together_max:
            return False
        suspects = tuple(id for _, id in tried[: many - len(partners)])
        throttled_with = (*partners, *suspects)
        slowed = f"{victim.attempt.job_id} is {max(0.0, trial.left):.0%} below its baseline"
        each = "each alone" if many == 2 else "fewer of them"
        for id in suspects:
            ladder = rungs(self.state.cpu[id], window)
            hold = Hold(ladder, cores_each(self.state.cpu[id]), -1, FREE, self.thresholds.calm_seconds, window.now)
            hold.score, self.throttled.holds[id] = self.silent[id], hold
            why = f"on trial{_with_others(id, throttled_with)}, as {slowed} and throttling {each} had no effect"
            self._throttle(id, hold, strongest_rung(ladder), victim, (trial.loss, trial.loss_windows), window, why)
        self.trial = Trial(
            victim.id, suspects, trial.loss, trial.loss_windows, began=window.now, throttled_with=throttled_with
        )
        return True

    def _may_be_throttled(self, id: Attempt, window: NodeWindow) -> bool:
        """Return whether a suspect is present, free, and may be throttled to the rung of a joint trial."""
        if id not in self.state.cpu or self.throttled.is_throttled(id):
            return False
        ladder = rungs(self.state.cpu[id], window)
        return not ladder[strongest_rung(ladder)].throttle.suspended or self.throttled.may_suspend(id, window.now)

    def _accept(self, victim: Victim) -> None:
        """Accept a victim's present rate: no cause was found."""
        victim.baseline.adopt()

    def _relax(self, window: NodeWindow) -> None:
        """Relax one rung after a long enough calm, or if the victim is gone.

        An attempt that was only proven with others is released completely first, the one with the least evidence before
        the others.
        """
        throttled = [(id, hold) for id, hold in self.throttled.holds.items() if hold.rung >= 0]
        for id, hold in sorted(throttled, key=lambda one: (*_relax_order(one[1]), one[0])):
            if not self.state.gpu_jobs or (hold.victim and hold.victim[0] not in self.state.gpu_jobs):
                self._relax_to(id, hold, -1, window.now, "the job that it slowed down is gone")
                continue
            healthy = window.now - max(self.healthy_since, hold.since)
            calm = window.now - max(self.calm_since, self.healthy_since, hold.since)
            if hold.untested and healthy >= hold.wait:
                why = f"no job was slowed down for {healthy:.0f} s, and it may have had no part in it"
            elif calm >= hold.wait or (healthy > 0 and window.now - hold.since >= PATIENCE * hold.wait):
                why = f"no job was slowed down for {healthy:.0f} s"
            else:
                continue
            self._relax_to(id, hold, -1 if hold.untested else hold.rung - 1, window.now, why)
            hold.untested = False
            self.healthy_since = self.calm_since = window.now
            return

    def _relax_to(self, id: Attempt, hold: Hold, rung: int, now: float, why: str) -> None:
        hold.before, hold.returned = hold.rung, now
        self.throttled.set(id, hold, rung, now, why)
        for one in self.state.steady.values():
            one.baseline.fallen.clear()

    def _throttle(
        self,
        id: Attempt,
        hold: Hold,
        rung: int,
        victim: Victim,
        lost: tuple[float, int],
        window: NodeWindow,
        why: str,
    ) -> None:
        """Throttle an attempt for a victim, and watch the effect."""
        hold.victim = victim.id
        self.throttled.set(id, hold, rung, window.now, why, victim=victim.attempt.job_id, slowdown=lost[0])
        self.trial = Trial(victim.id, (id,), *lost, began=window.now)
        victim.baseline.fallen.clear()


def _relax_order(hold: Hold) -> tuple[bool, float]:
    """Return the sort key of an attempt for being relaxed: smaller is sooner."""
    return not hold.untested, hold.score if hold.untested else hold.since


def _with_others(id: Attempt, suspects: tuple[Attempt, ...]) -> str:
    """Return the names of the attempts that are throttled together with this one; "" if there are none."""
    others = " and ".join(job_id for job_id, number in suspects if (job_id, number) != id)
    return f" together with {others}" if others else ""


def _reason(victim: Victim, loss: float, suspect: Suspect, pressure: str) -> str:
    slowed = victim.describe() if victim.baseline.fallen.windows else f"{victim.attempt.job_id} is {loss:.0%} too slow"
    return f"on trial, as {slowed}, {pressure + ', and ' if pressure else 'and of this job '}{suspect.why}"
