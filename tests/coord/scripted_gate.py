"""A testing program that says what its plan says: ``python scripted_gate.py PLAN ...``.

The plan is a JSON list; each request takes the next entry (the last one again and again): a dict
is answered as it is, ``sleep`` answers nothing, ``die`` ends with status 3, any other text is said
as it is.  Every request is written to ``PLAN.asked``, and every start to ``PLAN.started``.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    plan_file = Path(sys.argv[1])
    with plan_file.with_suffix(".started").open("a") as started:
        started.write(f"{os.getpid()}\n")
    asked_file = plan_file.with_suffix(".asked")
    print('{"ready": 1}', flush=True)
    for line in sys.stdin:
        with asked_file.open("a") as asked:
            asked.write(line)
        count = len(asked_file.read_text().splitlines())
        plan = json.loads(plan_file.read_text())
        entry = plan[min(count, len(plan)) - 1]
        if entry == "sleep":
            time.sleep(600)
        if entry == "die":
            sys.exit("out of luck")
        print(json.dumps(entry) if isinstance(entry, dict) else entry, flush=True)


if __name__ == "__main__":
    main()
