"""Lives of federations by the thousand: ``python -m tests.sim.soak --seeds N``.

A seed is the life of a federation that trains, and then one of models over nodes.  Prints schedules
a second and the violations; each violation with one line that lives it again.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from tests.sim.federation import Federation
from tests.sim.model_life import ModelLife
from tests.sim.parts import RIGHT, Parts

LAST_LINES = 200
BATCH = 25
TRANSCRIPTS = Path("sim-failures")


class Violation(msgspec.Struct, frozen=True):
    seed: int
    what: str
    transcript: str


class Result(msgspec.Struct, frozen=True):
    """Of a batch of seeds."""

    lives: int
    events: int
    rounds: int
    cpu_s: float
    violations: tuple[Violation, ...]


def reproduce(seed: int) -> str:
    return f"python -m tests.sim.soak --seeds 1 --first {seed}"


def live(seed: int, parts: Parts = RIGHT) -> tuple[Federation, Violation | None]:
    """One life of a federation; the violation it ends with, if it does."""
    federation = Federation(seed, parts)
    return federation, violation_of(federation)


def violation_of(life: Federation | ModelLife) -> Violation | None:
    """Live it; the violation it ends with, if it does."""
    try:
        life.live()
    except Exception as fault:  # noqa: BLE001 - whatever a machine raises is what is looked for
        last = traceback.extract_tb(fault.__traceback__)[-1]
        what = f"{type(fault).__name__}: {fault} ({Path(last.filename).name}:{last.lineno})"
        return Violation(life.seed, what[:600], life.world.transcript())
    return None


def dismantle(life: Federation | ModelLife) -> None:
    """Untie all of a life, so that its hundred thousand small objects need no sweep to go."""
    for part in (*life.hosts, life.world, life.checks, life):
        part.__dict__.clear()


def batch(seeds: list[int]) -> Result:
    events, rounds, began = 0, 0, time.process_time()
    violations: list[Violation] = []
    gc.disable()
    for seed in seeds:
        federation, violation = live(seed)
        events += federation.world.events
        rounds += len(federation.checks.truth) - 1
        models = ModelLife(seed)
        violations += [each for each in (violation, violation_of(models)) if each is not None]
        events += models.world.events
        dismantle(federation)
        dismantle(models)
    gc.enable()
    gc.collect()
    cpu_s = time.process_time() - began
    return Result(len(seeds), events, rounds, cpu_s, tuple(violations))


def report(violation: Violation, directory: Path) -> str:
    """The lines that are shown of a violation; the whole life is in a file."""
    directory.mkdir(exist_ok=True)
    path = directory / f"seed-{violation.seed}.txt"
    path.write_text(f"{violation.transcript}\n\n{violation.what}\n", encoding="utf-8")
    last = "\n".join(violation.transcript.splitlines()[-LAST_LINES:])
    return f"{last}\n\n{violation.what}\n{path} has the whole life; again with:\n" + reproduce(
        violation.seed
    )


def soak(seeds: list[int], processes: int) -> Iterator[Result]:
    """The results of all seeds, batch by batch."""
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    if processes == 1:
        yield from map(batch, batches)
    else:
        with ProcessPoolExecutor(processes) as pool:
            yield from pool.map(batch, batches)


def total(results: list[Result]) -> Result:
    return Result(
        sum(each.lives for each in results),
        sum(each.events for each in results),
        sum(each.rounds for each in results),
        sum(each.cpu_s for each in results),
        tuple(v for each in results for v in each.violations),
    )


def _show(result: Result, transcripts: Path) -> None:
    """What a batch has found, as soon as it is known."""
    for violation in result.violations:
        sys.stdout.write(report(violation, transcripts) + "\n\n")
        sys.stdout.write(f"seed {violation.seed}: {violation.what.splitlines()[0][:160]}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """The program; returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--transcripts", type=Path, default=TRANSCRIPTS)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    seeds = list(range(options.first, options.first + options.seeds))
    results: list[Result] = []
    # What is loaded by now stays; no sweep needs to look at it.
    gc.freeze()
    for each in soak(seeds, max(1, options.processes)):
        results.append(each)
        _show(each, options.transcripts)
    result, seconds = total(results), time.monotonic() - began
    kinds = Counter(v.what.splitlines()[0][:60] for v in result.violations)
    facts = {
        "schedules": result.lives,
        "violations": len(result.violations),
        "seconds": round(seconds, 2),
        "schedules_per_s": round(result.lives / seconds, 1),
        "schedules_per_cpu_s": round(result.lives / max(result.cpu_s, 1e-9), 1),
        "events": result.events,
        "rounds_committed": result.rounds,
        "kinds": dict(kinds),
    }
    if options.json:
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        sys.stdout.write(
            f"{facts['schedules']} schedules, {facts['violations']} violations, "
            f"{facts['schedules_per_s']} schedules/s "
            f"({facts['schedules_per_cpu_s']} a core-second), {result.events} events, "
            f"{result.rounds} rounds committed\n"
        )
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
