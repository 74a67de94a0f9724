"""Relieves the victims on one node: whom to hold back, how far, for how long.

Theory of operation. Nobody knows for sure who hurts whom, so it is tried: the suspect that most speaks against is held
back, and the victim watched for two windows. If it gains what it lost, or a fifth of that and more than noise explains,
the suspect is **proven** and held a rung lower as long as the victim is still below its baseline. If not, the suspect
gets all back, is left alone for five minutes, and the next one is tried.

Two that each saturate what they share hide each other: what one is denied, the other takes. So when the trial of every
suspect brought nothing and the victim is still hurt, the two that most speak against are held back **together**, then
three, up to a limit. One that was proven, and cannot be held lower but by a suspension, counts as the first of them: it
may have been noise that spoke against it alone. If the victim regains half of what it lost they are proven; then each
gets all back once, the one that least speaks against first, for it may have had no part in it. If not, all are freed,
and left alone for longer.

When nothing is left to try, the job has simply become slower: that is its baseline from then on.

What is held is given back rung by rung, each after a minute in which nobody was hurt and the memory was calm. Does that
hurt again within three minutes, the rung is restored, without a trial, and the next wait is twice as long. What was
given back altogether is kept in mind for five more minutes.

Everything that is applied can be read off the windows themselves, so one who knows nothing yet, after a restart, takes
it up from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cotenant.core.policy.protocols import FREE, Directive, NodeWindow
from cotenant.policies.coda_eliminator.ladder import cores_each, first_rung, rungs, telling_rung
from cotenant.policies.coda_eliminator.node_state import Victim, Watch
from cotenant.policies.coda_eliminator.suspects import Attempt, Suspect, ranked
from cotenant.policies.coda_eliminator.thresholds import LIMITS, Limits
from cotenant.policies.coda_eliminator.throttled_jobs import Held, Hold, Look

RELAPSE_SECONDS = 180.0  # who is hurt so soon after something was given back is hurt by that
LOOK_WINDOWS_MAX = 6  # of a trial where noise hides more
STALE_WINDOWS = 12  # a look that takes longer saw nothing
ADOPT_WINDOWS = 12  # a fall that nobody made is a minute later what the job is now
GAIN_MIN = 0.2  # of the loss; less is no relief
TOGETHER_GAIN_MIN = 0.5  # of the loss, where several are held back for it
PATIENCE = 10.0  # waits, after which a rung is given back though the memory is not calm


@dataclass(slots=True)
class Relief:
    """One node's victims, suspects, and what is done about them."""

    limits: Limits = LIMITS
    watch: Watch = field(init=False)
    held: Held = field(init=False)
    look: Look | None = None
    silent: dict[Attempt, float] = field(
        default_factory=dict
    )  # whose trials brought nothing, and what spoke against it
    well_since: float = math.inf
    calm_since: float = math.inf

    def __post_init__(self) -> None:
        self.watch, self.held = Watch(self.limits), Held(self.limits)

    def judge(self, window: NodeWindow) -> Sequence[Directive]:
        """Say what to do now; one directive for an attempt at most."""
        if window.now <= self.watch.last:
            return ()
        held = self.held
        held.said = {}
        self.watch.see(window, held=held.any_proven())
        held.forget(self.watch.cpu, window.now)
        held.take_up(self.watch.cpu, window)
        held.remind(self.watch.cpu, window)
        self._drop_look(window.now)
        held.limit(window)
        if self.watch.cpu:
            self._note_calm(window)
            self._look_on(window)
            if self.look is None and (victims := self.watch.victims()):
                self._relieve(victims[0], window)
            elif self.look is None:
                self._give_back(window)
        else:
            for one in self.watch.victims():
                self._let_be(one)
        return tuple(held.said[id] for id in sorted(held.said))

    def _note_calm(self, window: NodeWindow) -> None:
        """Note since when nobody seems hurt, and since when the memory is calm too."""
        used = self.watch.bandwidth_percent(window)
        began = window.now - window.seconds
        self.well_since = min(self.well_since, began) if self.watch.well() else math.inf
        calm = used is None or used < self.limits.bandwidth_calm_percent
        self.calm_since = min(self.calm_since, began) if calm else math.inf

    # ---- what a change brought

    def _drop_look(self, now: float) -> None:
        """End a look at somebody who has left, or cannot be held; who is on trial with that one is free again."""
        look = self.look
        if look is None or all(id in self.held.holds for id in look.suspects):
            return
        self.look = None
        for id in look.suspects:
            if id in self.held.holds and not self.held.holds[id].proven:
                self.held.let_go(id, now, "another that was held back together with it is not there any more")

    def _look_on(self, window: NodeWindow) -> None:
        look = self.look
        if look is None:
            return
        holds, victim = {id: self.held.holds[id] for id in look.suspects}, self.watch.steady.get(look.victim)
        if look.victim[0] not in self.watch.gpu_jobs:
            self.look = None
            for id, hold in holds.items():
                if not hold.proven:
                    why = f"{look.victim[0]}, for whom it was held back, has gone"
                    self.held.set(id, hold, -1, window.now, why)
            return
        if victim and all(self.watch.cpu[id].throttle == hold.throttle for id, hold in holds.items()):
            look.windows += 1
            look.below += victim.baseline.below(victim.baseline.last)
        elif window.now - look.began > STALE_WINDOWS * window.seconds:
            self._end_trial(look, window)
            return
        else:
            return
        if all(hold.proven for hold in holds.values()):
            self._watch_proven(look, victim, window)
        else:
            self._watch_trial(look, victim, window)

    def _watch_trial(self, look: Look, victim: Victim, window: NodeWindow) -> None:
        """Decide whether those on trial are the ones."""
        noise = victim.baseline.noise
        gain, together = look.loss - look.left, len(look.held_with) > 1
        unsure = noise * math.sqrt(1 / look.windows + 1 / max(1, look.loss_windows))
        needed = max((TOGETHER_GAIN_MIN if together else GAIN_MIN) * look.loss, 1.28 * unsure)
        enough = max(self.limits.look_windows, min(LOOK_WINDOWS_MAX, math.ceil((2.5 * noise / look.loss) ** 2)))
        doubt = unsure
        if together and gain < needed:  # to free them all is for long: nobody else is left to try
            enough, doubt = LOOK_WINDOWS_MAX, 2 * unsure
        if look.windows < enough and abs(gain - needed) < doubt:
            return
        if gain < needed:
            self._end_trial(look, window)
            return
        for id in look.suspects:
            hold = self.held.holds[id]
            hold.proven, hold.untested = True, together
            self.held.cleared.pop(id, None)
            others = _with_others(id, look.held_with)
            hold.told = f"{look.victim[0]} gained {max(0.0, gain):.0%} of its baseline when this was held back{others}"
        self._watch_proven(look, victim, window)

    def _end_trial(self, look: Look, window: NodeWindow) -> None:
        """Let suspects go whose trial brought nothing, and try the next, or more of them together."""
        self.look = None
        if all(self.held.holds[id].proven for id in look.suspects):
            return
        lost = f"{look.victim[0]} is {max(0.0, look.left):.0%} below its baseline all the same"
        for id in look.suspects:
            self.silent.setdefault(id, self.held.holds[id].score)
            others = _with_others(id, look.held_with)
            self.held.let_go(id, window.now, f"holding it back{others} brought nothing: {lost}")
        victim = self.watch.steady.get(look.victim)
        if victim is None:
            return
        if not look.held_with and self._try_next(victim, look.loss, look.loss_windows, look.began, window):
            return
        if not self._try_together(victim, look, window):
            self._let_be(victim)

    def _watch_proven(self, look: Look, victim: Victim, window: NodeWindow) -> None:
        """Go lower while the victim is still hurt; done when it is not, as far as noise lets one see."""
        unsure = victim.baseline.noise / math.sqrt(look.windows)
        running = any(0 <= hold.rung < hold.gentlest for hold in self.held.holds.values() if hold.proven)
        if look.left - unsure > self.limits.slowdown and (running or look.windows >= self.limits.look_windows):
            self.look = None  # one window alone lets nobody stand still
            self._deepen(victim, look.left, look.windows, window, look)
        elif look.windows >= self.limits.look_windows:
            self.look = None

    # ---- what is done

    def _relieve(self, victim: Victim, window: NodeWindow) -> None:
        """Do something for a victim, if anything on the node is short."""
        self.silent.clear()
        baseline = victim.baseline
        start = window.now - (baseline.fallen.windows - 1) * window.seconds
        known = next((one for one in self._recent(window.now)), None)
        if known is not None:
            self._restore(known, victim, window)
            return
        pressure = self.watch.pressure(window) or self.watch.onset
        if self.held.any_proven():
            self._deepen(victim, baseline.slowdown, baseline.fallen.windows, window)
        elif pressure:
            loss, windows = baseline.slowdown, baseline.fallen.windows
            if not self._try_next(victim, loss, windows, start, window, pressure):
                self._let_be(victim)
        elif baseline.fallen.windows >= ADOPT_WINDOWS:
            self._let_be(victim)

    def _recent(self, now: float) -> list[Attempt]:
        """List those to whom something was given back just now, the last one first."""
        found = [(-hold.returned, id) for id, hold in self.held.holds.items() if now - hold.returned <= RELAPSE_SECONDS]
        return [id for _, id in sorted(found)]

    def _restore(self, id: Attempt, victim: Victim, window: NodeWindow) -> None:
        """Take back what was given back, for it hurt."""
        hold = self.held.holds[id]
        hold.wait = min(self.limits.calm_seconds_max, 2 * hold.wait)
        hold.returned = -math.inf
        why = f"{victim.told()} since it was given more"
        loss, windows = victim.baseline.slowdown, victim.baseline.fallen.windows
        rung = hold.before
        if rung == len(hold.ladder) - 1 and not self.held.may_stand(id, window.now):
            rung = hold.gentlest
        if rung > hold.rung:
            self._hold(id, hold, rung, victim, (loss, windows), window, why)
        else:
            victim.baseline.fallen.clear()

    def _deepen(self, victim: Victim, loss: float, windows: int, window: NodeWindow, look: Look | None = None) -> None:
        """Hold the proven ones lower; then try others, alone and with these; only then let one stand still or move."""
        proven = [(hold.since, id) for id, hold in self.held.holds.items() if hold.proven and hold.rung >= 0]
        running = sorted((since, id) for since, id in proven if self.held.holds[id].rung < self.held.holds[id].gentlest)
        if running:
            id = running[-1][1]
            hold = self.held.holds[id]
            why = f"{victim.attempt.job_id} is still {loss:.0%} below its baseline"
            self._hold(id, hold, hold.rung + 1, victim, (loss, windows), window, why)
            return
        start = window.now - (windows - 1) * window.seconds
        if self._try_next(victim, loss, windows, start, window):
            return
        if look is not None and self._try_together(victim, look, window):
            return
        for _, id in sorted(proven, reverse=True):
            hold = self.held.holds[id]
            if hold.rung == hold.gentlest and self.held.may_stand(id, window.now):
                why = f"{victim.attempt.job_id} is still {loss:.0%} below its baseline, and nothing gentler is left"
                self._hold(id, hold, hold.rung + 1, victim, (loss, windows), window, why)
                return
            if hold.rung == hold.gentlest and window.now - hold.moving > self.limits.cleared_seconds:
                hold.moving = window.now
                why = f"{victim.attempt.job_id} is still {loss:.0%} below its baseline beside it: it should move"
                self.held.set(id, hold, hold.rung, window.now, why, move=True)
                return
        self._let_be(victim)

    def _try_next(
        self, victim: Victim, loss: float, windows: int, start: float, window: NodeWindow, pressure: str = ""
    ) -> bool:
        """Put the next suspect on trial; False: there is none left."""
        free = [one for id, one in self.watch.cpu.items() if self.held.may_be_tried(id, window.now)]
        all_cores = sum(attempt.cores or attempt.cores_used for attempt in window.attempts)
        for suspect in ranked(self.watch.usages, free, start, window.seconds, all_cores):
            id = suspect.attempt.job_id, suspect.attempt.number
            ladder = rungs(suspect.attempt, window)
            rung = first_rung(ladder, loss)
            if ladder[rung].throttle.suspended and not self.held.may_stand(id, window.now):
                continue
            hold = Hold(ladder, cores_each(suspect.attempt), -1, FREE, self.limits.calm_seconds, window.now)
            hold.score, self.held.holds[id] = suspect.score, hold
            self._hold(id, hold, rung, victim, (loss, windows), window, _reason(victim, loss, suspect, pressure))
            return True
        return False

    def _try_together(self, victim: Victim, look: Look, window: NodeWindow) -> bool:
        """Put one suspect more than before on trial together, the strongest; False: there are not enough."""
        partners = [id for id, hold in self.held.holds.items() if hold.proven and hold.rung >= 0]
        many = max(len(look.held_with), 1, len(partners)) + 1
        unsure = victim.baseline.noise / math.sqrt(max(1, look.windows))
        if not look.windows or look.left - unsure <= self.limits.slowdown:
            return False  # it may be well by now
        tried = sorted((-score, id) for id, score in self.silent.items() if self._may_be_held(id, window))
        if not len(tried) + len(partners) >= many <= self.limits.suspects_together_max:
            return False
        suspects = tuple(id for _, id in tried[: many - len(partners)])
        held_with = (*partners, *suspects)
        hurt = f"{victim.attempt.job_id} is {max(0.0, look.left):.0%} below its baseline"
        each = "each alone" if many == 2 else "fewer of them"
        for id in suspects:
            ladder = rungs(self.watch.cpu[id], window)
            hold = Hold(ladder, cores_each(self.watch.cpu[id]), -1, FREE, self.limits.calm_seconds, window.now)
            hold.score, self.held.holds[id] = self.silent[id], hold
            why = f"on trial{_with_others(id, held_with)}, as {hurt} and holding {each} back brought nothing"
            self._hold(id, hold, telling_rung(ladder), victim, (look.loss, look.loss_windows), window, why)
        self.look = Look(victim.id, suspects, look.loss, look.loss_windows, began=window.now, held_with=held_with)
        return True

    def _may_be_held(self, id: Attempt, window: NodeWindow) -> bool:
        """Whether a suspect is there, free, and may be brought to the rung of a trial with others."""
        if id not in self.watch.cpu or self.held.is_held(id):
            return False
        ladder = rungs(self.watch.cpu[id], window)
        return not ladder[telling_rung(ladder)].throttle.suspended or self.held.may_stand(id, window.now)

    def _let_be(self, victim: Victim) -> None:
        """Take a victim for what it is now: nobody is found who hurts it."""
        victim.baseline.adopt()

    def _give_back(self, window: NodeWindow) -> None:
        """Give one rung back where all has been well for long enough, or the victim has gone.

        Who was proven with others only gets all back first, the one that least spoke against before the others.
        """
        held = [(id, hold) for id, hold in self.held.holds.items() if hold.rung >= 0]
        for id, hold in sorted(held, key=lambda one: (*_turn(one[1]), one[0])):
            if not self.watch.gpu_jobs or (hold.victim and hold.victim[0] not in self.watch.gpu_jobs):
                self._return(id, hold, -1, window.now, "the job that it hurt has gone")
                continue
            well = window.now - max(self.well_since, hold.since)
            calm = window.now - max(self.calm_since, self.well_since, hold.since)
            if hold.untested and well >= hold.wait:
                why = f"nobody was hurt for {well:.0f} s, and it may have had no part in it"
            elif calm >= hold.wait or (well > 0 and window.now - hold.since >= PATIENCE * hold.wait):
                why = f"nobody was hurt for {well:.0f} s"
            else:
                continue
            self._return(id, hold, -1 if hold.untested else hold.rung - 1, window.now, why)
            hold.untested = False
            self.well_since = self.calm_since = window.now
            return

    def _return(self, id: Attempt, hold: Hold, rung: int, now: float, why: str) -> None:
        hold.before, hold.returned = hold.rung, now
        self.held.set(id, hold, rung, now, why)
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
        self.held.set(id, hold, rung, window.now, why, victim=victim.attempt.job_id, slowdown=lost[0])
        self.look = Look(victim.id, (id,), *lost, began=window.now)
        victim.baseline.fallen.clear()


def _turn(hold: Hold) -> tuple[bool, float]:
    """Say when it is a held one's turn to be given something back: smaller is sooner."""
    return not hold.untested, hold.score if hold.untested else hold.since


def _with_others(id: Attempt, suspects: tuple[Attempt, ...]) -> str:
    """Name those with whom an attempt is held back; nothing where it is the only one."""
    others = " and ".join(job_id for job_id, number in suspects if (job_id, number) != id)
    return f" together with {others}" if others else ""


def _reason(victim: Victim, loss: float, suspect: Suspect, pressure: str) -> str:
    hurt = victim.told() if victim.baseline.fallen.windows else f"{victim.attempt.job_id} is {loss:.0%} too slow"
    return f"on trial, as {hurt}, {pressure + ', and ' if pressure else 'and of this job '}{suspect.why}"
