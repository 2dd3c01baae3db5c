"""What events tell of rounds beside their records; of early rounds they may be gone."""

import json
from collections import defaultdict

from lensemble_coord.training.ledger import Ledger

MAX_EVENTS = 4096


def of(ledger: Ledger) -> dict[int, dict[str, float]]:
    """By round: ``loss``, the mean of the nodes that share theirs, ``update_norm``, and how many
    followed ``by_sum``, with the ``bytes_saved``.
    """
    losses: defaultdict[int, list[float]] = defaultdict(list)
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for row in ledger.events_of("round.node", MAX_EVENTS):
        fields = json.loads(row.event)
        if isinstance(fields.get("loss"), float):
            losses[fields["round"]].append(fields["loss"])
    for row in ledger.events_of("round.diagnosed", MAX_EVENTS):
        fields = json.loads(row.event)
        if isinstance(fields.get("mean_update_l2"), float):
            found[fields["round"]]["update_norm"] = fields["mean_update_l2"]
    for row in ledger.events_of("round.closed", MAX_EVENTS):
        fields = json.loads(row.event)
        told = {name: fields[name] for name in ("by_sum", "bytes_saved") if name in fields}
        found[fields["round"]].update(told)
    for index, shared in losses.items():
        found[index]["loss"] = sum(shared) / len(shared)
    return found
