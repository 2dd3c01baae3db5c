"""What masking costs: whole rounds masked and plain in turn, mask streams, and more participants.

``python benchmarks/masking.py [--megabytes 100] [--nodes 4] [--pairs 2] [--json]`` prints a table,
and one JSON object as the last line.  Its ``masked_over_plain`` is the median over pairs of the
seconds of a masked round over those of a plain one, both of real processes over QUIC in one run.
"""

import argparse
import json
import statistics

import mask_streams
import rounds

from lensemble_local import netns

NEIGHBOURS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=100, help="of float32 parameters")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="of each federation, after one more")
    parser.add_argument("--pairs", type=int, default=2, help="of a plain and a masked federation")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    options = parser.parse_args()
    open_network = netns.enter()
    pairs = []
    for number in range(options.pairs):
        # In turn, and the other way round each time: a machine that drifts favours neither.
        kinds = ("plain", "masked") if number % 2 == 0 else ("masked", "plain")
        found = {
            kind: rounds.measure(options.megabytes, options.nodes, options.rounds, kind)["seconds"]
            for kind in kinds
        }
        pairs.append(found)
        if not options.json:
            print(f"plain {found['plain']:g} s, masked {found['masked']:g} s a round")
    parameters = options.megabytes * rounds.MEGABYTE // 4
    streams = mask_streams.measure_streams(parameters, NEIGHBOURS)
    attempts = {size: mask_streams.measure_attempt(size) for size in mask_streams.SIZES}
    mask = streams[f"mask, {NEIGHBOURS} neighbours"]
    result = {
        "masked_over_plain": round(
            statistics.median(each["masked"] / each["plain"] for each in pairs), 3
        ),
        "seconds_per_round": {
            kind: statistics.median(each[kind] for each in pairs) for kind in ("plain", "masked")
        },
        "megabytes": options.megabytes,
        "nodes": options.nodes,
        "mask_gb_per_s": round((NEIGHBOURS + 1) * 4 * parameters / mask / 1e9, 2),
        "copy_gb_per_s": round(4 * parameters / streams["copy"] / 1e9, 2),
        "masks_per_participant": {size: each["masks"] for size, each in attempts.items()},
        "private_network": open_network is None,
    }
    if not options.json:
        for size, costs in attempts.items():
            print(f"n={size:<4}", *(f"{name} {cost:<9.4g}" for name, cost in costs.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
