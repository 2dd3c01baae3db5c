"""The machine that drives outer rounds, seen from the coordinator.

::

    Closed -> Open -> Collecting -> Aggregating -> Aligning -> Committing -> Closed
                |         |             |             |           |
                +---------+-------------+-------------+-----------+-> Aborted -> Open, attempt + 1

A masked round passes through ``Sharing`` between ``Open`` and ``Collecting``, and through
``Unmasking`` between ``Collecting`` and ``Aggregating``; once its sum is revealed, a commit that
fails is tried again in place, since to collect again would reveal another sum.

Only ``Committing -> Closed`` moves the global digest.  The contributors are fixed when
``Collecting`` is left: later states have them and no way to add one.  Every peer's word carries the
(round, attempt) it was said for; a word for another one is refused and the state does not move.

``transition`` is in ``dispatch``.  From there a reader goes to the state in question (``opening``,
``sharing``, ``collecting``, ``unmasking``, ``committing``), to ``attempts`` for what begins and
ends one, to ``members`` for who comes and goes, to ``hearing`` for what is refused, and to
``verdicts`` for who counts.
"""

from lensemble_coord.training.outer_round.actions import (
    PHASE_TIMERS,
    Action,
    AnnounceAbort,
    AnnounceClose,
    AskAlso,
    BeginCollect,
    Commit,
    DeriveSum,
    Diagnose,
    DropUpdate,
    FinishRun,
    OfferState,
    OpenRound,
    Refuse,
    RequestUnmask,
    SendRoster,
    Timer,
)
from lensemble_coord.training.outer_round.attempts import STOPPING_CODES
from lensemble_coord.training.outer_round.committing import UNUSABLE_SUMS
from lensemble_coord.training.outer_round.dispatch import transition
from lensemble_coord.training.outer_round.events import (
    AbortAsked,
    Advanced,
    BlobArrived,
    Committed,
    Declined,
    Diagnosed,
    Event,
    FromPeer,
    FromWork,
    Holding,
    MemberLost,
    MemberReady,
    MemberRests,
    Progressed,
    RoundsAsked,
    SharesSent,
    StepFailed,
    SumDerived,
    UnmaskAnswered,
    UpdateAnnounced,
)
from lensemble_coord.training.outer_round.reasons import MAX_REASONS
from lensemble_coord.training.outer_round.states import (
    Aborted,
    Aggregating,
    Aligning,
    Binding,
    Closed,
    Collecting,
    Committing,
    Contribution,
    Dropped,
    Ground,
    InFlight,
    Open,
    RoundState,
    Rules,
    Sharing,
    State,
    Unmasking,
    public_state,
)
from lensemble_coord.training.outer_round.verdicts import (
    Waiting,
    awaited,
    may_send,
    outstanding,
    participants,
    waiting,
)

__all__ = [
    "MAX_REASONS",
    "PHASE_TIMERS",
    "STOPPING_CODES",
    "UNUSABLE_SUMS",
    "AbortAsked",
    "Aborted",
    "Action",
    "Advanced",
    "Aggregating",
    "Aligning",
    "AnnounceAbort",
    "AnnounceClose",
    "AskAlso",
    "BeginCollect",
    "Binding",
    "BlobArrived",
    "Closed",
    "Collecting",
    "Commit",
    "Committed",
    "Committing",
    "Contribution",
    "Declined",
    "DeriveSum",
    "Diagnose",
    "Diagnosed",
    "DropUpdate",
    "Dropped",
    "Event",
    "FinishRun",
    "FromPeer",
    "FromWork",
    "Ground",
    "Holding",
    "InFlight",
    "MemberLost",
    "MemberReady",
    "MemberRests",
    "OfferState",
    "Open",
    "OpenRound",
    "Progressed",
    "Refuse",
    "RequestUnmask",
    "RoundState",
    "RoundsAsked",
    "Rules",
    "SendRoster",
    "SharesSent",
    "Sharing",
    "State",
    "StepFailed",
    "SumDerived",
    "Timer",
    "UnmaskAnswered",
    "Unmasking",
    "UpdateAnnounced",
    "Waiting",
    "awaited",
    "may_send",
    "outstanding",
    "participants",
    "public_state",
    "transition",
    "waiting",
]
