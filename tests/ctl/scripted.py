"""A daemon without rounds: answers the control socket from a script, for tests of both its ends.

Run as a program it serves one socket until it is told to end: ``python scripted.py PATH``.
"""

import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import trio
from msgspec.structs import replace

from lensemble.ctl import replies, requests, server
from lensemble.errors import FaultToleranceExceeded, OperatorError
from tests.ctl import scripted_models

GREETING = replies.Greeting(daemon="coordinator", name="lab", version="0.1.0", ctl_version=1)
NODE = "3f" * 32
DIGEST = "9c12ab34" * 8

ROUND = replies.RoundStatus(
    index=4,
    attempt=0,
    state="collecting",
    reason="waiting for 1 of 3 updates (2 arrived, quorum 2)",
    since_s=12.4,
    deadline_in_s=588.0,
    waiting_on=("gripper-2",),
    quorum=2,
    bound=3,
    arrived=2,
)
PARTICIPANTS = (
    replies.ParticipantStatus(
        name="arm-berlin", node=NODE, connected=True, activity="sent update", step=50, steps=50,
        last_seen_s=0.4, rtt_ms=0.31, path="127.0.0.1:40112", epoch=1, contributions=4,
        epsilon=4.377,
    ),
    replies.ParticipantStatus(
        name="gripper-2", node="a0" * 32, connected=True, activity="training", step=31, steps=50,
        last_seen_s=0.9, rtt_ms=12.0, path="[2001:db8:1:2:3:4:5:6]:40113", epoch=2,
        contributions=3, refused={"round": 2}, last_reason="connection lost in round 2",
    ),
    replies.ParticipantStatus(
        name="a-name-as-long-as-names-may-be-sixty-four-characters-in-all-1234",
        node="b7" * 32, connected=False, activity="lost", last_seen_s=73.0, epoch=1,
        last_reason="silent for 3.0 s",
    ),
)  # fmt: skip
SUMMARY = replies.RoundSummary(
    index=3, attempt=0, contributors=("arm-berlin", "gripper-2"), digest=DIGEST, seconds=2.31,
    closed_unix_s=1_700_000_000.0, update_norm=0.184,
)  # fmt: skip
STATUS = replies.CoordinatorStatus(
    name="lab", node=NODE, version="0.1.0", addresses=("127.0.0.1:7707", "[::1]:7707"),
    uptime_s=192.0, federation="5e" * 16, workload="arm", config_hash="77" * 32, digest=DIGEST,
    aggregation="plain: the coordinator sees each update", round=ROUND,
    run=replies.RunStatus(run="77ab", rounds=5, closed=3, remaining=2, elapsed_s=7.0),
    last_round=SUMMARY, participants=PARTICIPANTS,
    edges=(replies.EdgeStatus(id=7, peer="gripper-2", direction="rx", state="faulted", bytes=912,
                              fault="connection lost"),),
    refused={"unknown_peer": 1, "ctl:malformed": 2},
    storage=replies.StorageStatus(state_dir="/srv/lab/state", records=4, checkpoints=5,
                                  checkpoint_bytes=512_000_000, free_bytes=20_000_000_000),
)  # fmt: skip
DETAIL = replies.RoundDetail(
    round=SUMMARY, prior_digest="1b" * 32, momentum_digest="2c" * 32, field_sum_digest="3d" * 32,
    config_hash="77" * 32, record_hash="4e" * 32, previous_record_hash="5f" * 32,
    contributors=(
        replies.Contributor(name="arm-berlin", node=NODE, dataset_root="6a" * 32),
        replies.Contributor(name="gripper-2", node="a0" * 32, dataset_root="7b" * 32),
    ),
    dropped={"cell-9": "no update before the collect timeout"},
)  # fmt: skip


def _checkpoint() -> replies.CheckpointEntry:
    return replies.CheckpointEntry(
        round=3, digest=DIGEST, bytes=123_456_789, path="/nonexistent/checkpoint", verifiable=True
    )


REFUSALS = {
    requests.Run: OperatorError(
        "a run of 5 rounds goes on", "Watch it: `lensemblectl run --attach`."
    ),
    requests.Round: OperatorError("there is no round 9", "See `lensemblectl rounds`."),
}
MEMBERS = replies.MemberList(
    name="lab",
    node="c0" * 32,
    profile="wan",
    interval_s=2.0,
    incarnation=3,
    health=1,
    members=(
        replies.MemberStatus(
            name="node-a", node="a0" * 32, state="alive", since_s=4000.0, incarnation=2,
            rtt_ms=12.4, path="direct", heard_s=0.5,
        ),
        replies.MemberStatus(
            name="a-node-with-a-long-name", node="b0" * 32, state="suspect", since_s=4.2,
            incarnation=12, rtt_ms=1450.0, path="relayed", heard_s=9.0, flaps=3,
            reason=f"no answer to probes of {'a0' * 5}, nor of {'c0' * 5}",
        ),
        replies.MemberStatus(
            name="node-c", node="d0" * 32, state="left", since_s=90_000.0, incarnation=1,
            drain="drained",
            path="none", reason="left by itself",
        ),
    ),
    refused={"note": 2},
)  # fmt: skip
FIXED: dict[type, replies.Reply] = {
    requests.Round: DETAIL,
    requests.Rounds: replies.RoundList(rounds=(SUMMARY,) * 3),
    requests.Members: MEMBERS,
    requests.Invite: replies.Invited(ticket="lensemble1:abc", uses=1, expires_in_s=86_400),
    requests.Checkpoints: replies.CheckpointList(checkpoints=(_checkpoint(),)),
    requests.CheckpointExport: replies.CheckpointLocation(checkpoint=_checkpoint()),
}


def _events(count: int) -> list[replies.EventRow]:
    return [
        replies.EventRow(
            sequence=number,
            unix_s=1_700_000_000.0 + number,
            event="round.closed",
            fields={"round": number, "contributors": 2},
        )
        for number in range(count)
    ]


def answer(request: requests.Request) -> AsyncGenerator[replies.Reply, None]:
    """The script."""
    if isinstance(request, requests.OfModels):
        return scripted_models.answer(request)
    return _drain(request) if isinstance(request, requests.Drain) else _answer(request)


async def _drain(request: requests.Drain) -> AsyncGenerator[replies.Reply, None]:
    if request.node == "nobody":
        raise OperatorError("no node 'nobody' has ever joined", "See `lensemblectl status`.")
    done = replies.DrainStatus(node="a0" * 32, name="node-b", state="drained")
    stays = ("run 3f2a stays: it ends by itself",)
    now = replace(done, state="draining", runs=("3f2a",), in_round=True, stays=stays)
    if request.undo:
        yield replace(done, state="in use")
        return
    for status in (now, now, done) if request.wait else (now,):
        yield status


async def _answer(request: requests.Request) -> AsyncGenerator[replies.Reply, None]:
    match request:
        case requests.Status():
            yield STATUS
            while request.watch:
                await trio.sleep(request.interval_s)
                yield STATUS
        case requests.Run(rounds=666) | requests.Round(index=9):
            raise REFUSALS[type(request)]
        case requests.Run() | requests.Attach():
            async for reply in _run(request):
                yield reply
        case requests.Events():
            for row in _events(request.limit):
                yield row
        case _:
            why = getattr(request, "reason", "done")
            done = replies.Done(message=f"{type(request).__name__.lower()}: {why}")
            yield FIXED.get(type(request), done)


async def _run(request: requests.Run | requests.Attach) -> AsyncGenerator[replies.Reply, None]:
    rounds = request.rounds if isinstance(request, requests.Run) else 3
    yield replies.RunStarted(run="77ab", rounds=rounds, first_round=4)
    if isinstance(request, requests.Run) and request.detach:
        return
    if rounds == 99:
        yield replies.RoundClosed(round=SUMMARY)
        yield STATUS
        await trio.sleep_forever()
    for _ in range(rounds):
        yield STATUS
        yield replies.RoundClosed(round=SUMMARY)
    short = rounds == 7
    yield replies.RunEnded(
        run="77ab", rounds=rounds, closed=rounds - short, completed=not short, digest=DIGEST,
        seconds=4.5, code=FaultToleranceExceeded.code if short else "",
        reason="OPEN: 1 more participant was needed (have 1, quorum 2)" if short else "",
        remediation=FaultToleranceExceeded.default_remediation if short else "",
    )  # fmt: skip


if __name__ == "__main__":
    trio.run(server.serve, Path(sys.argv[1]), answer, GREETING)
