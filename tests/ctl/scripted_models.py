"""What a scripted coordinator says about models."""

from collections.abc import AsyncGenerator

import msgspec
import trio

from lensemble.ctl import replies, requests
from lensemble.errors import ContextLengthExceeded, PlanInfeasible, WeightsError

RUN = "3f2a" * 4
NODES = (("node-a", "3f" * 32), ("node-b", "a0" * 32))
FAULT = replies.FaultStatus(
    code="worker_fault", reason="the worker was killed by SIGKILL", stage=1, node=NODES[1][1],
    name="node-b", remediation="Look at its memory.", stderr=("first word", "last\x1b[31m word"),
)  # fmt: skip
HOPS = (
    replies.PlannedHop(before="", after="node-a", rtt_ms=1.5, rtt_age_s=0.2, mbit_s=420.0,
                       rate="seen", rate_age_s=200.0),
    replies.PlannedHop(before="node-a", after="node-b", rtt_ms=3.0, rtt_age_s=4.0, mbit_s=9.475,
                       rate="measured", rate_age_s=12.0),
    replies.PlannedHop(before="node-b", after=""),
)  # fmt: skip
PLAN = replies.ModelPlan(
    model="tiny", architecture="llama", layers=4, file_bytes=205_000, engine="tinygrad 0.14.0",
    ctx=256, sessions=1, rows=32,
    stages=tuple(
        replies.PlannedStage(
            node=node, name=name, first=2 * index, last=2 * index + 2, weights_bytes=400_000,
            cache_bytes=100_000, planned_bytes=158_000_000, required_bytes=174_000_000,
            have_bytes=8_000_000_000,
        )
        for index, (name, node) in enumerate(NODES)
    ),
    unused=(replies.UnusedNode(node="b7" * 32, name="node-c", reason="2 nodes are enough"),),
    link_ms=4.5, chunk_ms=20.25, hops=HOPS,
)  # fmt: skip


def _stage(index: int, phase: str, done: int = 0, total: int = 0) -> replies.RunStage:
    name, node = NODES[index]
    return replies.RunStage(
        index=index, node=node, name=name, first=2 * index, last=2 * index + 2, phase=phase,
        done=done, total=total, planned_bytes=158_000_000, resident_bytes=151_000_000,
        fetched_bytes=102_000, seconds=6.2, chunks=12, compute_ms=3.2,
    )  # fmt: skip


READY = replies.ModelRunStatus(
    run=RUN, run_epoch=1, model="tiny", digest="9c" * 32, architecture="llama",
    engine="tinygrad 0.14.0", state="provisioned", takes_requests=True, layers=4, ctx=256,
    sessions=1, rows=32, stages=(_stage(0, "ready"), _stage(1, "ready")), since_s=8.0,
    finished={"stop": 2}, tokens=31, tokens_per_s=12.5, trip_ms=80.0, hop_ms=0.4,
    hops=HOPS,
    requests=(replies.SessionStatus(slot=0, phase="decoding", prompt_tokens=9, tokens=3,
                                    elapsed_s=0.3),),
)  # fmt: skip
REPLACED = msgspec.structs.replace(
    READY, run_epoch=2, on_fault="replace",
    replacements=(
        replies.Replacement(
            run_epoch=1, reason=FAULT.reason, fault=FAULT, dropped=NODES[1][1],
            dropped_name="node-b", cleared_s=0.2, planned_s=0.3, ready_s=7.1,
        ),
        replies.Replacement(run_epoch=2, reason="node-c is drained: a new disk"),
    ),
)  # fmt: skip
FETCHING = msgspec.structs.replace(
    READY, state="provisioning", takes_requests=False,
    stages=(_stage(0, "fetching", 10_000, 50_000), _stage(1, "asked")),
)  # fmt: skip
FAULTED = msgspec.structs.replace(
    READY, state="torn down", takes_requests=False, outcome="faulted", reason=FAULT.reason,
    fault=FAULT, teardown="clean", requests=(),
)  # fmt: skip
UNCLEAN = msgspec.structs.replace(
    FAULTED, outcome="stopped", fault=None, teardown="timed out",
    complaints=("no word within 10 s from stage 1",),
)  # fmt: skip


TRACE = replies.RunTrace(
    run=RUN, run_epoch=2, model="tiny",
    stages=(
        replies.TracedStage(index=0, name="node-a", uncertain_us=150),
        replies.TracedStage(index=1, name="node-b", uncertain_us=250),
    ),
    trips=(
        replies.Trip(step=8, session=0, index=3, sent_us=0, received_us=10_000),
        replies.Trip(step=9, session=0, index=4, sent_us=10_100, received_us=20_100),
        replies.Trip(step=10, session=0, index=5, sent_us=20_200, received_us=31_000),
    ),
    visits=tuple(
        replies.Visit(
            stage=stage, step=step, rows=rows, landed_us=at + 500 + 4_700 * stage,
            began_us=at + 600 + 4_700 * stage, ended_us=at + 4_600 + 4_700 * stage,
            left_us=at + 4_650 + 4_700 * stage,
        )
        for stage in (0, 1)
        for step, rows, at in ((7, 32, -9_000), (8, 1, 0), (9, 1, 10_100))
    ),
)  # fmt: skip


def _answered(finish: str, fault: replies.FaultStatus | None = None) -> replies.Answered:
    return replies.Answered(
        run=RUN, text="", finish=finish, prompt_tokens=9, completion_tokens=3, queued_s=0.0,
        first_token_s=0.2, seconds=0.4, tokens_per_s=10.0, fault=fault,
    )  # fmt: skip


def answer(request: requests.OfModels) -> AsyncGenerator[replies.Reply, None]:
    """The script; what is asked says what comes of it."""
    match request:
        case requests.ProvisionModel():
            return _provision(request)
        case requests.Prompt():
            return _prompt(request)
        case _:
            return _once(request)


async def _once(request: requests.OfModels) -> AsyncGenerator[replies.Reply, None]:
    match request:
        case requests.PlanModel(ctx=1000):
            raise PlanInfeasible("tiny does not fit: node-a needs 2 GB, has 1 GB")
        case requests.PlanModel(measure=True):
            why = "node-a to node-b: node-b says: it is in a round"
            yield msgspec.structs.replace(PLAN, unmeasured=(why,))
        case requests.PlanModel():
            yield PLAN
        case requests.ModelRuns():
            yield replies.ModelRunList(runs=(READY, FAULTED))
        case requests.InspectRun(run="aa"):
            yield REPLACED
        case requests.TraceRun():
            yield TRACE
        case requests.InspectRun(run=run):
            yield FAULTED if run else READY
        case _:
            yield UNCLEAN if isinstance(request, requests.StopRun) else FAULTED


async def _provision(request: requests.ProvisionModel) -> AsyncGenerator[replies.Reply, None]:
    yield FETCHING
    if request.ctx == 4:
        raise WeightsError("the file is not what it was")
    if request.ctx == 130:
        await trio.sleep_forever()
    replaced = request.on_fault == "replace" and request.max_replacements == 2
    yield FAULTED if request.ctx == 5 else REPLACED if replaced else READY


async def _prompt(request: requests.Prompt) -> AsyncGenerator[replies.Reply, None]:
    said = request.turns[-1].content if request.turns else request.text
    if said == "too long":
        raise ContextLengthExceeded(257, 256)
    for number, text in enumerate(("Par", "is\n", "\x1b[31m🙂")):
        yield replies.TokenText(token=number, log_probability=-0.1, text=text)
    if said == "loss":
        yield replies.Paused(run=RUN, reason="killed by\x1b SIGKILL", name="node-b")
        yield replies.TokenText(token=3, log_probability=-0.1, text="!")
    if said == "for ever":
        await trio.sleep_forever()
    if said == "fault":
        yield _answered("faulted", FAULT)
    else:
        yield _answered("stop")
