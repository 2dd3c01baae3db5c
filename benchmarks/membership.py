"""Whether members that look after each other are right, how soon, and at what cost.

``python benchmarks/membership.py [--seeds 100] [--sizes 3,16,64,256] [--json]`` lives so many
simulated lives of each size and prints a table and one JSON object as the last line; the exit
status is 1 if a bound is broken.  Each life is a calm time, a crash, a restart, and a partition
that heals; wan is 300 +- 150 ms one way and 5 % loss.  Times are simulated, so they do not depend
on the machine that runs this.

Bounds: nobody that lives is held for dead; a death is known to somebody within 7 intervals, two
probes and a suspicion (in 19 of 20 lives), in the median within 1.5 times what the profile promises
for short round trips, and to all, in every life, within log3(n) intervals more; a healed partition
ends with all alive; 100 joins and leaves leave nothing behind; equal seeds give equal traces;
messages per member and second at each size are at most 1.25 times those at the smallest size that
has all helpers.
"""

import argparse
import functools
import gc
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lensemble.membership.profiles import PROFILES, Profile  # the simulator lies with the tests
from lensemble.wire.membership import MAX_DATAGRAM_BYTES
from tests.sim import membership_life as lives

CALM = {3: 300, 16: 300, 64: 60}
"""Intervals of calm by size: ten minutes of the wan profile for small ones."""
FLAT = 1.25
LATE = 1.5
LIMPING_UP_TO = 64
SHARE_OF_OTHERS = 5
"""Profiles other than the first take one seed of so many."""


def one(seed: int, size: int, profile: Profile) -> lives.Life:
    gc.disable()  # a life is a hundred thousand small objects and no cycle
    life = lives.live(seed, size, profile, calm=CALM.get(size, 30))
    if size <= LIMPING_UP_TO:
        limping = lives.limp(seed, size, profile)
        life.false_deaths += limping.false_deaths
        life.broken += limping.broken
    if life.largest > MAX_DATAGRAM_BYTES:
        life.broken.append(f"a datagram of {life.largest} bytes")
    return life


def churned(seed: int) -> list[str]:
    return [f"seed {seed}: {what}" for what in lives.churn(seed).broken]


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, 95th percentile and worst, of those that came about."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    late = known[min(len(known) - 1, int(0.95 * len(known)))]
    figures = {"median": statistics.median(known), "p95": late, "worst": known[-1]}
    return {name: round(value, 2) for name, value in figures.items()}


def row(found: Sequence[lives.Life], profile: Profile) -> dict[str, Any]:
    size, weather = found[0].size, lives.WEATHER[profile.name]
    return {
        "n": size,
        "seeds": len(found),
        "false_deaths": sum(life.false_deaths for life in found),
        "first_detection_s": spread([life.first_s for life in found]),
        "first_bound_s": round(lives.first_bound(profile, weather), 1),
        "all_detection_s": spread([life.all_s for life in found]),
        "all_bound_s": round(lives.all_bound(profile, weather, size), 1),
        "restart_s": spread([life.restart_s for life in found]),
        "heal_s": spread([life.heal_s for life in found]),
        "messages_per_member_s": round(statistics.fmean(life.rate for life in found), 3),
        "largest_datagram_bytes": max(life.largest for life in found),
    }


def faults(rows: Sequence[dict[str, Any]], name: str, helpers: int) -> list[str]:
    """Bounds that hold of all lives of a size together."""
    broken = []
    enough = [each["messages_per_member_s"] for each in rows if each["n"] >= helpers + 2]
    for each in rows:
        first = each["first_detection_s"]
        # Of 19 in 20 lives; the bound that holds of every life is that all know.
        if first is not None and first["p95"] > each["first_bound_s"]:
            broken.append(f"{each['n']} members: first known after {first['p95']} s")
        usual = LATE * lives.EXPECTED_S[name]
        if first is not None and first["median"] > usual:
            broken.append(f"{each['n']} members: first known after {first['median']} s on average")
        if enough and each["messages_per_member_s"] > FLAT * enough[0]:
            broken.append(f"{each['n']} members: {each['messages_per_member_s']} messages each")
    return broken


def show(rows: Sequence[dict[str, Any]], name: str) -> None:
    print(f"{name}: median (worst) in seconds")
    print(
        "    n  false  first knows      all know         restarted        healed            msgs/s"
    )
    for each in rows:
        texts = []
        for figure in ("first_detection_s", "all_detection_s", "restart_s", "heal_s"):
            value = each[figure]
            text = f"{value['median']:5.1f} ({value['worst']:.1f})" if value else "never"
            texts.append(f"{text:<16}")
        rate = each["messages_per_member_s"]
        print(
            f"{each['n']:5d}  {each['false_deaths']:5d}  {' '.join(texts)}  {rate:.2f}", flush=True
        )


def equal_traces(sizes: Sequence[int]) -> bool:
    """Whether a seed lived again is the same life, and another one another."""
    for size in sizes:
        once, again, other = (lives.live(seed, size) for seed in (1, 1, 2))
        if (once.trace, once.messages) != (again.trace, again.messages):
            return False
        if once.trace == other.trace:
            return False
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--sizes", default="3,16,64,256")
    parser.add_argument("--profiles", default="wan,lan,relay")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    return parser.parse_args()


def main() -> int:
    options, began = arguments(), time.process_time()
    sizes = [int(size) for size in options.sizes.split(",")]
    names, result, broken = options.profiles.split(","), {}, list[str]()
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        for name in names:
            profile, rows = PROFILES[name], []
            share = 1 if name == names[0] else SHARE_OF_OTHERS
            seeds = range(max(1, options.seeds // share))
            for size in sizes:
                work = functools.partial(one, size=size, profile=profile)
                found = pool.map(work, seeds, chunksize=1)
                rows.append(row(found, profile))
                broken += [
                    f"{name}, {size} members, seed {life.seed}: {what}"
                    for life in found
                    for what in life.broken
                ]
            broken += [f"{name}, {fault}" for fault in faults(rows, name, profile.helpers)]
            result[name] = rows
            if not options.json:
                show(rows, name)
        broken += [what for each in pool.map(churned, range(options.seeds)) for what in each]
    equal = equal_traces([size for size in sizes if size <= LIMPING_UP_TO] or sizes)
    if not equal:
        broken.append("equal seeds do not give equal traces")
    first = result[names[0]]
    for what in broken:
        print(f"broken: {what}", file=sys.stderr)
    print(
        json.dumps(
            {
                "profile": names[0],
                "false_deaths": {each["n"]: each["false_deaths"] for each in first},
                "detection_s": {each["n"]: each["all_detection_s"] for each in first},
                "messages_per_member_s": {
                    each["n"]: each["messages_per_member_s"] for each in first
                },
                "equal_traces": equal,
                "profiles": result,
                "broken": broken,
                "cpu_s": round(time.process_time() - began, 1),
            }
        )
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
