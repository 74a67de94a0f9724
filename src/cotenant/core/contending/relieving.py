"""Relieves the victims on one node: whom to hold back, how far, for how long.

Theory of operation. Nobody knows for sure who hurts whom, so it is tried: the suspect that most speaks against is held
back, and the victim watched for two windows. If it gains what it lost, or a fifth of that and more than noise explains,
the suspect is **proven** and held a rung lower as long as the victim is still below its baseline. If not, the suspect
gets all back, is left alone for five minutes, and the next one is tried. When none is left the job has simply become
slower: that is its baseline from then on.

What is held is given back rung by rung, each after a minute in which nobody was hurt and the memory was calm. Does that
hurt again within three minutes, the rung is restored, without a trial, and the next wait is twice as long. What was
given back altogether is kept in mind for five more minutes.

Everything that is applied can be read off the windows themselves, so one who knows nothing yet, after a restart, takes
it up from there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cotenant.core.contending.holding import Hold, Look
from cotenant.core.contending.ladder import cores_each, first_rung, rung_of, rungs
from cotenant.core.contending.limits import LIMITS, Limits
from cotenant.core.contending.suspects import Attempt, Suspect, ranked
from cotenant.core.contending.watching import Victim, Watch
from cotenant.core.policy import FREE, Directive, NodeWindow

RELAPSE_SECONDS = 180.0  # who is hurt so soon after something was given back is hurt by that
PROBATION_SECONDS = 300.0  # whoever is free again is known for so long
ASKED_MAX = 3  # times that the agent is told the same
LOOK_WINDOWS_MAX = 6  # of a trial where noise hides more
STALE_WINDOWS = 12  # a look that takes longer saw nothing
ADOPT_WINDOWS = 12  # a fall that nobody made is a minute later what the job is now
GAIN_MIN = 0.2  # of the loss; less is no relief
PATIENCE = 10.0  # waits, after which a rung is given back though the memory is not calm


@dataclass(slots=True)
class Relief:
    """One node's victims, suspects, and what is done about them."""

    limits: Limits = LIMITS
    watch: Watch = field(init=False)
    holds: dict[Attempt, Hold] = field(default_factory=dict)
    look: Look | None = None
    cleared: dict[Attempt, tuple[float, int]] = field(default_factory=dict)  # until when, and how often it was
    stood: dict[Attempt, deque[tuple[float, float]]] = field(default_factory=dict)  # when, and seconds suspended
    well_since: float = math.inf
    calm_since: float = math.inf
    _said: dict[Attempt, Directive] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch = Watch(self.limits)

    def judge(self, window: NodeWindow) -> Sequence[Directive]:
        """Say what to do now; one directive for an attempt at most."""
        if window.now <= self.watch.last:
            return ()
        self._said = {}
        self.watch.see(window, held=any(hold.rung >= 0 and hold.proven for hold in self.holds.values()))
        self._forget(window)
        if self.watch.cpu:
            self._take_up(window)
            self._remind(window)
            self._limit(window)
            self._note_calm(window)
            self._look_on(window)
            if self.look is None and (victims := self.watch.victims()):
                self._relieve(victims[0], window)
            elif self.look is None:
                self._give_back(window)
        else:
            for one in self.watch.victims():
                self._let_be(one)
        return tuple(self._said[id] for id in sorted(self._said))

    # ---- what is known already

    def _forget(self, window: NodeWindow) -> None:
        """Let go of all who left."""
        for known in (self.holds, self.cleared, self.stood):
            for gone in known.keys() - self.watch.cpu.keys():
                del known[gone]
        for id, hold in list(self.holds.items()):
            if hold.rung < 0 and window.now - hold.since > PROBATION_SECONDS:
                del self.holds[id]
        if self.look and self.look.suspect not in self.holds:
            self.look = None

    def _take_up(self, window: NodeWindow) -> None:
        """Know those again that are held back, whoever said so."""
        for id, attempt in self.watch.cpu.items():
            if id not in self.holds and not attempt.throttle.free:
                ladder = rungs(attempt, window)
                rung = rung_of(ladder, attempt.throttle)
                self.holds[id] = Hold(
                    ladder,
                    cores_each(attempt),
                    rung,
                    attempt.throttle,
                    self.limits.calm_seconds,
                    window.now,
                    proven=True,
                    told="it was held back before",
                )

    def _remind(self, window: NodeWindow) -> None:
        """Tell the agent again what it has not done; what it cannot do is not counted on."""
        for id, hold in list(self.holds.items()):
            attempt = self.watch.cpu[id]
            if cores_each(attempt) != hold.cores and hold.rung >= 0:  # it was given other cores
                hold.ladder, hold.cores = rungs(attempt, window), cores_each(attempt)
                hold.rung = min(rung_of(hold.ladder, hold.throttle), len(hold.ladder) - 1)
            if attempt.throttle == hold.throttle:
                hold.asked = 0
            elif hold.asked < ASKED_MAX:
                hold.asked += 1
                if hold.asked > 1:
                    self._say(id, hold, hold.told)
            else:
                hold.asked, hold.throttle = 0, attempt.throttle
                hold.rung = rung_of(hold.ladder, attempt.throttle)
                if hold.rung < 0:
                    self._set(id, hold, -1, window.now, "the node cannot hold it back")
                    self._clear(id, window.now)
                    del self.holds[id]
                    if self.look and self.look.suspect == id:
                        self.look = None

    def _limit(self, window: NodeWindow) -> None:
        """Let nobody stand still for too long: it is asked to move away."""
        for id, hold in self.holds.items():
            if not hold.throttle.suspended:
                continue
            self.stood.setdefault(id, deque()).append((window.now, window.seconds))
            if self._stood_seconds(id, window.now) + window.seconds > self.limits.suspended_seconds_max:
                hold.moving = window.now
                minutes = self.limits.suspended_seconds_max / 60
                why = f"it stood still for {minutes:.3g} min, which is all it may, and should go on elsewhere"
                self._set(id, hold, hold.gentlest, window.now, why, move=True)

    def _stood_seconds(self, id: Attempt, now: float) -> float:
        spans = self.stood.get(id, deque())
        while spans and now - spans[0][0] > self.limits.suspended_within_seconds:
            spans.popleft()
        return math.fsum(seconds for _, seconds in spans)

    def _note_calm(self, window: NodeWindow) -> None:
        """Note since when nobody seems hurt, and since when the memory is calm too."""
        used = self.watch.bandwidth_percent(window)
        began = window.now - window.seconds
        self.well_since = min(self.well_since, began) if self.watch.well() else math.inf
        calm = used is None or used < self.limits.bandwidth_calm_percent
        self.calm_since = min(self.calm_since, began) if calm else math.inf

    # ---- what a change brought

    def _look_on(self, window: NodeWindow) -> None:
        look = self.look
        if look is None:
            return
        hold, victim = self.holds[look.suspect], self.watch.steady.get(look.victim)
        if look.victim[0] not in self.watch.gpu_jobs:
            self.look = None
            if not hold.proven:
                self._set(look.suspect, hold, -1, window.now, f"{look.victim[0]}, for whom it was held back, has gone")
            return
        if victim and self.watch.cpu[look.suspect].throttle == hold.throttle:
            look.windows += 1
            look.below += victim.baseline.below(victim.baseline.last)
        elif window.now - look.began > STALE_WINDOWS * window.seconds:
            self._end_trial(look, hold, window)
            return
        else:
            return
        if hold.proven:
            self._watch_proven(look, victim, window)
        else:
            self._watch_trial(look, hold, victim, window)

    def _watch_trial(self, look: Look, hold: Hold, victim: Victim, window: NodeWindow) -> None:
        """Decide whether a suspect on trial is the one."""
        noise = victim.baseline.noise
        gain = look.loss - look.left
        unsure = noise * math.sqrt(1 / look.windows + 1 / max(1, look.loss_windows))
        needed = max(GAIN_MIN * look.loss, 1.28 * unsure)
        enough = max(self.limits.look_windows, min(LOOK_WINDOWS_MAX, math.ceil((2.5 * noise / look.loss) ** 2)))
        if look.windows < enough and abs(gain - needed) < unsure:
            return
        if gain < needed:
            self._end_trial(look, hold, window)
            return
        hold.proven = True
        hold.told = f"{look.victim[0]} gained {max(0.0, gain):.0%} of its baseline when this was held back"
        self._watch_proven(look, victim, window)

    def _end_trial(self, look: Look, hold: Hold, window: NodeWindow) -> None:
        """Let a suspect go whose trial brought nothing, and try the next."""
        self.look = None
        if hold.proven:
            return
        self._clear(look.suspect, window.now)
        lost = f"{look.victim[0]} is {max(0.0, look.left):.0%} below its baseline all the same"
        self._set(look.suspect, hold, -1, window.now, f"holding it back brought nothing: {lost}")
        del self.holds[look.suspect]
        victim = self.watch.steady.get(look.victim)
        if victim and not self._try_next(victim, look.loss, look.loss_windows, look.began, window):
            self._let_be(victim)

    def _watch_proven(self, look: Look, victim: Victim, window: NodeWindow) -> None:
        """Go lower while the victim is still hurt; done when it is not, as far as noise lets one see."""
        unsure = victim.baseline.noise / math.sqrt(look.windows)
        if look.left - unsure > self.limits.slowdown:
            self.look = None
            self._deepen(victim, look.left, look.windows, window)
        elif look.windows >= self.limits.look_windows:
            self.look = None

    # ---- what is done

    def _relieve(self, victim: Victim, window: NodeWindow) -> None:
        """Do something for a victim, if anything on the node is short."""
        baseline = victim.baseline
        start = window.now - (baseline.fallen.windows - 1) * window.seconds
        known = next((one for one in self._recent(window.now)), None)
        if known is not None:
            self._restore(known, victim, window)
            return
        pressure = self.watch.pressure(window) or self.watch.onset
        if any(hold.proven and hold.rung >= 0 for hold in self.holds.values()):
            self._deepen(victim, baseline.slowdown, baseline.fallen.windows, window)
        elif pressure:
            loss, windows = baseline.slowdown, baseline.fallen.windows
            if not self._try_next(victim, loss, windows, start, window, pressure):
                self._let_be(victim)
        elif baseline.fallen.windows >= ADOPT_WINDOWS:
            self._let_be(victim)

    def _recent(self, now: float) -> list[Attempt]:
        """List those to whom something was given back just now, the last one first."""
        found = [(-hold.returned, id) for id, hold in self.holds.items() if now - hold.returned <= RELAPSE_SECONDS]
        return [id for _, id in sorted(found)]

    def _restore(self, id: Attempt, victim: Victim, window: NodeWindow) -> None:
        """Take back what was given back, for it hurt."""
        hold = self.holds[id]
        hold.wait = min(self.limits.calm_seconds_max, 2 * hold.wait)
        hold.returned = -math.inf
        why = f"{victim.told()} since it was given more"
        loss, windows = victim.baseline.slowdown, victim.baseline.fallen.windows
        rung = hold.before
        if rung == len(hold.ladder) - 1 and not self._may_stand(id, window.now):
            rung = hold.gentlest
        if rung > hold.rung:
            self._hold(id, hold, rung, victim, (loss, windows), window, why)
        else:
            victim.baseline.fallen.clear()

    def _deepen(self, victim: Victim, loss: float, windows: int, window: NodeWindow) -> None:
        """Hold the proven ones lower; then try others; only then let one stand still, or ask it to move."""
        proven = [(hold.since, id) for id, hold in self.holds.items() if hold.proven and hold.rung >= 0]
        running = sorted((since, id) for since, id in proven if self.holds[id].rung < self.holds[id].gentlest)
        if running:
            id = running[-1][1]
            hold = self.holds[id]
            why = f"{victim.attempt.job_id} is still {loss:.0%} below its baseline"
            self._hold(id, hold, hold.rung + 1, victim, (loss, windows), window, why)
            return
        start = window.now - (windows - 1) * window.seconds
        if self._try_next(victim, loss, windows, start, window):
            return
        for _, id in sorted(proven, reverse=True):
            hold = self.holds[id]
            if hold.rung == hold.gentlest and self._may_stand(id, window.now):
                why = f"{victim.attempt.job_id} is still {loss:.0%} below its baseline, and nothing gentler is left"
                self._hold(id, hold, hold.rung + 1, victim, (loss, windows), window, why)
                return
            if hold.rung == hold.gentlest and window.now - hold.moving > self.limits.cleared_seconds:
                hold.moving = window.now
                why = f"{victim.attempt.job_id} is still {loss:.0%} below its baseline beside it: it should move"
                self._set(id, hold, hold.rung, window.now, why, move=True)
                return
        self._let_be(victim)

    def _try_next(
        self, victim: Victim, loss: float, windows: int, start: float, window: NodeWindow, pressure: str = ""
    ) -> bool:
        """Put the next suspect on trial; False: there is none left."""
        free = [one for id, one in self.watch.cpu.items() if self._suspicious(id, window.now)]
        all_cores = sum(attempt.cores or attempt.cores_used for attempt in window.attempts)
        for suspect in ranked(self.watch.usages, free, start, window.seconds, all_cores):
            id = suspect.attempt.job_id, suspect.attempt.number
            ladder = rungs(suspect.attempt, window)
            rung = first_rung(ladder, loss)
            if ladder[rung].throttle.suspended and not self._may_stand(id, window.now):
                continue
            hold = Hold(ladder, cores_each(suspect.attempt), -1, FREE, self.limits.calm_seconds, window.now)
            self.holds[id] = hold
            self._hold(id, hold, rung, victim, (loss, windows), window, _reason(victim, loss, suspect, pressure))
            return True
        return False

    def _suspicious(self, id: Attempt, now: float) -> bool:
        if id in self.holds and self.holds[id].rung >= 0:
            return False
        return id not in self.cleared or self.cleared[id][0] <= now

    def _may_stand(self, id: Attempt, now: float) -> bool:
        return self._stood_seconds(id, now) + self.limits.calm_seconds <= self.limits.suspended_seconds_max

    def _let_be(self, victim: Victim) -> None:
        """Take a victim for what it is now: nobody is found who hurts it."""
        victim.baseline.adopt()

    def _clear(self, id: Attempt, now: float) -> None:
        times = self.cleared.get(id, (0.0, 0))[1]
        self.cleared[id] = (now + self.limits.cleared_seconds * 2.0 ** min(times, 4), times + 1)

    def _give_back(self, window: NodeWindow) -> None:
        """Give one rung back where all has been well for long enough, or the victim has gone."""
        held = [(hold.since, id) for id, hold in self.holds.items() if hold.rung >= 0]
        for since, id in sorted(held):
            hold = self.holds[id]
            if not self.watch.gpu_jobs or (hold.victim and hold.victim[0] not in self.watch.gpu_jobs):
                self._return(id, hold, -1, window.now, "the job that it hurt has gone")
                continue
            well = window.now - max(self.well_since, since)
            calm = window.now - max(self.calm_since, self.well_since, since)
            if calm >= hold.wait or (well > 0 and window.now - since >= PATIENCE * hold.wait):
                why = f"nobody was hurt for {well:.0f} s"
                self._return(id, hold, hold.rung - 1, window.now, why)
                self.well_since = self.calm_since = window.now
                return

    def _return(self, id: Attempt, hold: Hold, rung: int, now: float, why: str) -> None:
        hold.before, hold.returned = hold.rung, now
        self._set(id, hold, rung, now, why)
        for one in self.watch.steady.values():
            one.baseline.fallen.clear()

    def _hold(
        self,
        id: Attempt,
        hold: Hold,
        rung: int,
        victim: Victim,
        lost: tuple[float, int],
        window: NodeWindow,
        why: str,
    ) -> None:
        """Hold an attempt back for a victim, and look what that brings."""
        hold.victim = victim.id
        self._set(id, hold, rung, window.now, why, victim=victim.attempt.job_id, slowdown=lost[0])
        self.look = Look(victim.id, id, *lost, began=window.now)
        victim.baseline.fallen.clear()

    def _set(
        self,
        id: Attempt,
        hold: Hold,
        rung: int,
        now: float,
        why: str,
        *,
        victim: str = "",
        slowdown: float = 0.0,
        move: bool = False,
    ) -> None:
        hold.rung, hold.since, hold.asked, hold.told = rung, now, 0, why
        hold.throttle = hold.ladder[rung].throttle if rung >= 0 else FREE
        self._say(id, hold, why, victim=victim, slowdown=slowdown, move=move)

    def _say(
        self, id: Attempt, hold: Hold, why: str, *, victim: str = "", slowdown: float = 0.0, move: bool = False
    ) -> None:
        share = hold.ladder[hold.rung].share if hold.rung >= 0 else 1.0
        self._said[id] = Directive(
            *id,
            share=share,
            reason=why,
            throttle=hold.throttle,
            move=move,
            victim_job_id=victim or (hold.victim[0] if hold.victim else ""),
            victim_slowdown=slowdown,
        )


def _reason(victim: Victim, loss: float, suspect: Suspect, pressure: str) -> str:
    hurt = victim.told() if victim.baseline.fallen.windows else f"{victim.attempt.job_id} is {loss:.0%} too slow"
    return f"on trial, as {hurt}, {pressure + ', and ' if pressure else 'and of this job '}{suspect.why}"
