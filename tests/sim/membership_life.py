"""Lives of memberships, and what must hold in each: who is alive is not called dead, and so on."""

import math
import random

import msgspec

from lensemble.membership.machine import Membership
from lensemble.membership.profiles import WAN, Profile
from lensemble.wire.membership import Standing
from tests.sim.membership_swarm import Host, Machine, Swarm, Weather

WEATHER = {
    "lan": Weather(delay_s=0.001, jitter_s=0.0005, loss=0.01),
    "wan": Weather(delay_s=0.3, jitter_s=0.15, loss=0.05),
    "relay": Weather(delay_s=0.3, jitter_s=0.15, loss=0.05),
}
EXPECTED_S = {"lan": 7.0, "wan": 15.0, "relay": 40.0}
"""The first detection that the profiles promise on average, where round trips are short."""

PROBED_WITHIN = 7
"""Intervals after which a dead member was probed by somebody: else by 1 chance in e**7."""

SETTLING, CUT, HEALED_WITHIN, QUIET, FAREWELL = 10, 22, 150, 15, 16
"""In intervals.  Who has missed a farewell and all that tell of it learns it when it suspects the
leaver and is corrected: after a turn through eight members, a probe and a suspicion.
"""


def first_bound(profile: Profile, weather: Weather) -> float:
    """Seconds from a crash until somebody knows: to be probed, twice without answer, suspected."""
    longest_rtt = 2 * (weather.delay_s + weather.jitter_s)
    answers = 2 * profile.probe_timeout(longest_rtt)
    return PROBED_WITHIN * profile.interval_s + answers + profile.suspicion_s


def all_bound(profile: Profile, weather: Weather, size: int) -> float:
    """The same until all know: each that knows tells about two in an interval."""
    return first_bound(profile, weather) + profile.interval_s * math.ceil(math.log(size, 3))


class Life(msgspec.Struct):
    """What was measured in one life; times in seconds, None if it did not come about."""

    size: int
    seed: int
    first_s: float | None = None
    all_s: float | None = None
    restart_s: float | None = None
    heal_s: float | None = None
    rate: float = 0.0
    """Messages sent, by each member in each second of a calm time."""
    false_deaths: int = 0
    largest: int = 0
    trace: int = 0
    messages: int = 0
    broken: list[str] = msgspec.field(default_factory=list)


def live(
    seed: int, size: int, profile: Profile = WAN, machine: Machine = Membership, calm: int = 30
) -> Life:
    """A calm time, a crash, a restart, a partition and its end.

    Args:
        seed: of all that is drawn.
        size: members.
        profile: of all.
        machine: what makes the machines.
        calm: intervals without any event.
    """
    weather, step = WEATHER[profile.name], profile.interval_s
    swarm = Swarm(seed, size, profile, weather, machine)
    life = Life(size, seed)
    swarm.run(SETTLING * step)
    before = swarm.messages
    swarm.run(calm * step)
    life.rate = (swarm.messages - before) / (calm * step * size)
    _crash(swarm, life, all_bound(profile, weather, size))
    _part(swarm, life)
    life.broken += _raised_for_nothing(swarm)
    life.largest, life.trace, life.messages = swarm.largest, swarm.trace, swarm.messages
    return life


def _crash(swarm: Swarm, life: Life, bound: float) -> None:
    victim, step = swarm.hosts[swarm.draw.randrange(life.size)], swarm.profile.interval_s
    began = swarm.now
    swarm.crash(victim)
    known = swarm.until(lambda: swarm.all_hold(victim, Standing.DEAD), bound)
    times = [seen.at - began for seen in swarm.deaths(began) if seen.change.node == victim.node]
    life.first_s = min(times, default=None)
    if known:
        life.all_s = max(times)
    else:
        life.broken.append(f"a death is not known to all after {bound:.1f} s")
    life.false_deaths += len(swarm.deaths(0.0)) - len(times)
    began = swarm.now
    swarm.restart(victim, swarm.hosts)
    if swarm.until(lambda: swarm.all_hold(victim, Standing.ALIVE), bound):
        life.restart_s = swarm.now - began
    else:
        life.broken.append(f"a restarted member is not alive for all after {bound:.1f} s")
    swarm.run(SETTLING * step)
    life.false_deaths += len(swarm.deaths(began))
    if life.false_deaths:
        life.broken.append(f"{life.false_deaths} times a member that lives was held for dead")


def _part(swarm: Swarm, life: Life) -> None:
    """Two halves, or three and a thirteenth: who is where is drawn."""
    step, hosts = swarm.profile.interval_s, list(swarm.hosts)
    swarm.draw.shuffle(hosts)
    place = swarm.draw.randrange(1, life.size)
    swarm.cut(hosts[:place], hosts[place:])
    swarm.run(CUT * step)
    swarm.heal()
    began = swarm.now
    if not swarm.until(swarm.all_alive, HEALED_WITHIN * step, step / 2):
        life.broken.append("a healed partition does not end with all alive")
        return
    life.heal_s = swarm.now - began
    began = swarm.now
    swarm.run(QUIET * step)
    if not swarm.all_alive() and swarm.deaths(began):
        life.broken.append("members are held for dead again after a partition has healed")


def _raised_for_nothing(swarm: Swarm) -> list[str]:
    """Each incarnation after the first answers a doubt that somebody held, or a past life."""
    raised = dict.fromkeys((host.node for host in swarm.hosts), 1)
    for seen in swarm.seen:
        change = seen.change
        if change.after is not Standing.ALIVE or change.restarted:
            raised[change.node] = max(raised[change.node], change.incarnation + 1)
    return [
        f"{host.node[:10]} is at incarnation {host.machine.incarnation}, and doubts need no more "
        f"than {raised[host.node]}"
        for host in swarm.hosts
        if host.machine.incarnation > raised[host.node]
    ]


def limp(seed: int, size: int, profile: Profile = WAN, machine: Machine = Membership) -> Life:
    """One member runs only now and then, and one way between two others is cut.

    The slow one, whose silence is its own, must not call others dead; nor may the two.
    """
    step = profile.interval_s
    swarm = Swarm(seed, size, profile, WEATHER[profile.name], machine)
    life = Life(size, seed)
    swarm.run(SETTLING * step)
    slow = swarm.hosts[0]
    for _ in range(10):
        swarm.stop(slow)
        swarm.run(3 * step)
        swarm.go_on(slow)
        swarm.run(step / 10)
    swarm.run(SETTLING * step)
    wrong = [seen for seen in swarm.deaths() if seen.change.node != slow.node]
    if wrong:
        life.broken.append(f"a slow member had others held for dead, {len(wrong)} times")
    began = swarm.now
    swarm.deaf.add((1, 2))
    swarm.run(30 * step)
    life.false_deaths = len(wrong) + len(swarm.deaths(began))
    if swarm.deaths(began):
        life.broken.append("a way that is cut in one direction made a death")
    return life


def churn(seed: int, size: int = 8, times: int = 100, machine: Machine = Membership) -> Life:
    """So many joins, leaves and drops from the roster; nothing of the gone may stay."""
    swarm, draw = Swarm(seed, size, WAN, WEATHER["wan"], machine), random.Random(seed)
    life = Life(size, seed)
    for _ in range(times):
        guest = swarm.join()
        swarm.run(draw.uniform(0, 3) * WAN.interval_s)
        leaves = draw.random() < 0.5
        if leaves:
            swarm.leave(guest)
        else:
            swarm.crash(guest)
        swarm.run(draw.uniform(0, 8) * WAN.interval_s)
        if leaves and not swarm.all_hold(guest, Standing.LEFT):
            swarm.run(FAREWELL * WAN.interval_s)
            if not swarm.all_hold(guest, Standing.LEFT):
                life.broken.append("not all know that a leaver has left")
        swarm.forget(guest)
    swarm.run(10 * QUIET * WAN.interval_s)
    life.broken += [left for host in swarm.hosts if host.up for left in residue(swarm, host)]
    for _ in range(QUIET):
        # In such weather somebody may be under suspicion just now, and refute it.
        if swarm.all_alive():
            break
        swarm.run(WAN.interval_s)
    else:
        life.broken.append("those who stayed are not all alive after joins and leaves")
    return life


def residue(swarm: Swarm, host: Host) -> list[str]:
    """What ``host`` keeps of members that are gone, and timers beyond what the present need."""
    machine, here = host.machine, {other.node for other in swarm.hosts if other.up}
    flights = [flight.node for flight in machine._flights.values()]
    kept = {
        "members": set(machine._roll.records),
        "present": set(machine._roll.present),
        "turns": set(machine._roll._order),
        "dead": set(machine._roll._dead),
        "rumours": set(machine._voice.rumours._where),
        "probes": {*flights, *machine._probed},
        "help": {node for call in machine._helping.values() for node in (call.asker, call.target)},
        "timers": {entry.node for entry in machine._agenda._entries if entry.node},
        "accusers": {by for record in machine._roll.records.values() for by in record.accusers},
    }
    found = [
        f"{name} keep {len(nodes - here)} of the gone"
        for name, nodes in kept.items()
        if nodes - here
    ]
    timers = len(machine._agenda)
    most = 1 + 3 * len(flights) + 8 + len(machine._helping)
    if timers > most:
        found.append(f"{timers} timers, where {most} are enough")
    return found
