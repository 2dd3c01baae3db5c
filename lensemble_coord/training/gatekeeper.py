"""Has global states tested on public data, and remembers what was found.

With ``alert`` a state is tested in the background once it is committed; with ``reject`` before.  A
test that cannot be made (the program dies, is late, talks nonsense) is an event and an alert, and
the round goes on as if there were none.
"""

from collections import deque
from collections.abc import Sequence

import msgspec
import trio

from lensemble.errors import EvaluationError, LedgerIntegrityError, StorageError
from lensemble.ids import Digest
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training import gate_program, public_gate
from lensemble_coord.training.gate_program import PROGRAM, GateProcess
from lensemble_coord.training.journal import Journal
from lensemble_coord.training.public_gate import Bounds, Figures
from lensemble_coord.training.record import GENESIS_ROUND
from lensemble_coord.training.store import Store

EVALUATED = "gate.evaluated"
MAX_WAITING = 16
"""States that wait to be tested; the oldest is let go when there are more."""

MAX_REMEMBERED = 256
MAX_FAULTS = 5
"""Failures in a row after which no more is tried until the daemon starts again."""

PAUSE_S = 1.0
PAUSE_MAX_S = 60.0


class Verdict(msgspec.Struct, frozen=True):
    """What a test of one round's state found; ``alarms`` are sentences.

    ``refusal`` is why it is not adopted, empty if it is.
    """

    round: int
    digest: Digest
    figures: Figures
    alarms: tuple[str, ...] = ()
    refusal: str = ""


class _Paused(EvaluationError):
    """Nothing was tried: the program failed a moment ago, or too often."""


class _Waiting(msgspec.Struct, frozen=True):
    round: int
    digest: Digest
    prior: Digest


class Gatekeeper:
    """Tests states with a program of its own; ``run`` it, then call from the same loop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        journal: Journal,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._terms = config.gate
        self._bounds = msgspec.convert(config.gate, Bounds, from_attributes=True)
        self._store = store
        self._journal = journal
        self._command = command(config, program)
        self._active = config.gate.tests and config.trains
        self._verdicts: dict[int, Verdict] = {}
        self._figures: dict[Digest, Figures] = {}
        self._waiting: deque[_Waiting] = deque()
        self._more = trio.Event()
        self._idle = trio.Event()
        self._busy = False
        self._process: GateProcess | None = None
        self._in_use = trio.Lock()
        self.weighing = False
        """Whether a round waits for a test."""
        self._faults = 0
        self._fault = ""
        self._not_before = 0.0
        self.pause_s = PAUSE_S
        """Between a first failure and the next start; doubles with each failure in a row."""
        self._nursery: trio.Nursery

    # ---- what others ask ----

    @property
    def rejects(self) -> bool:
        """Whether a state is tested before it is adopted."""
        return self._active and self._terms.mode == "reject"

    def verdict(self, round_index: int) -> Verdict | None:
        """What was found about the state of that round, if it was tested and is remembered."""
        return self._verdicts.get(round_index)

    @property
    def alerts(self) -> tuple[str, ...]:
        """What is wrong with the newest state that was tested, or with the testing."""
        newest = self._verdicts.get(max(self._verdicts, default=0))
        found: tuple[str, ...] = ()
        if newest is not None:
            where = f"round {newest.round}, public data"
            found = tuple(f"{where}: {alarm}" for alarm in newest.alarms)
        if not self._fault:
            return found
        after = f", {self._faults} times in a row; no more is tried" if self._gave_up else ""
        return (*found, f"states are not tested on public data: {self._fault}{after}")

    @property
    def _gave_up(self) -> bool:
        return self._faults >= MAX_FAULTS

    async def tested(self) -> None:
        """Wait until nothing waits to be tested."""
        while self._waiting or self._busy:
            await self._idle.wait()

    # ---- what rounds tell ----

    def committed(self, round_index: int, digest: Digest, prior: Digest) -> None:
        """A state has been adopted: have it tested when there is time, unless it was before."""
        if not self._active or self.rejects:
            return
        self._waiting.append(_Waiting(round_index, digest, prior))
        if len(self._waiting) > MAX_WAITING:
            self._skip(self._waiting.popleft().round, "newer states wait")
        self._more.set()

    def _skip(self, round_index: int, reason: str) -> None:
        self._journal.note("gate.skipped", warn=True, round=round_index, reason=reason)

    def warm(self) -> None:
        """Have the program started, so that the end of a round need not wait for it."""
        if self._active and self._process is None and not self._in_use.locked():
            self._nursery.start_soon(self._start_early)

    async def weigh(self, round_index: int, candidate: Digest, prior: Digest) -> str:
        """Why the state ``candidate`` is not to be adopted; empty if it is, or with ``alert``."""
        if not self.rejects:
            return ""
        self.weighing = True
        try:
            verdict = await self._test(_Waiting(round_index, candidate, prior))
        finally:
            self.weighing = False
        return "" if verdict is None else verdict.refusal

    # ---- running ----

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Test what is committed until cancelled; the program ends with this."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if self._active:
                await trio.to_thread.run_sync(self._remember)
                self._catch_up()
            task_status.started()
            try:
                while True:
                    await self._more.wait()
                    self._more = trio.Event()
                    while self._waiting:
                        self._busy = True
                        await self._test_kept(self._waiting.popleft())
                        self._busy = False
                    self._idle.set()
                    self._idle = trio.Event()
            finally:
                await self._end()

    async def _test_kept(self, what: _Waiting) -> None:
        if self._store.directory.checkpoint(what.digest).is_dir():
            await self._test(what)
        else:
            self._skip(what.round, "its checkpoint is no longer kept")

    def _catch_up(self) -> None:
        """The daemon may have ended between the commit of the newest state and its test."""
        tail = self._store.tail()
        if tail.prior_digest is not None and tail.next_digest not in self._figures:
            self.committed(tail.round, Digest(tail.next_digest), Digest(tail.prior_digest))

    def _remember(self) -> None:
        """What earlier runs of the daemon found; a test is worth more with something before it."""
        try:
            events = self._store.events_of(EVALUATED, MAX_REMEMBERED)
        except (StorageError, LedgerIntegrityError):
            return
        for event in events:
            verdict = decode(event.event)
            if verdict is not None:
                self._keep(verdict)

    def _keep(self, verdict: Verdict) -> None:
        if verdict.round > GENESIS_ROUND:
            self._verdicts[verdict.round] = verdict
        self._figures[verdict.digest] = verdict.figures
        while len(self._verdicts) > MAX_REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]
        while len(self._figures) > MAX_REMEMBERED:
            del self._figures[next(iter(self._figures))]

    # ---- one test ----

    async def _test(self, what: _Waiting) -> Verdict | None:
        """Test one state, and its prior if that never was; None if it cannot be."""
        async with self._in_use:
            try:
                with trio.fail_after(self._terms.timeout_s):
                    before = await self._prior_of(what)
                    figures = await self._ask(what.digest, what.prior)
            except _Paused as paused:
                self._skip(what.round, paused.message)
                return None
            except (EvaluationError, trio.TooSlowError) as error:
                await self._failed(what.round, error)
                return None
        self._faults, self._fault = 0, ""
        alarms = public_gate.judge(figures, before, self._bounds)
        refusal = public_gate.reasons(alarms) if self.rejects else ""
        texts = tuple(alarm.text for alarm in alarms)
        verdict = Verdict(what.round, what.digest, figures, texts, refusal)
        self._tell(verdict)
        return verdict

    async def _prior_of(self, what: _Waiting) -> Figures | None:
        """Figures of the state before; of a start that was never tested they are taken first."""
        known = self._figures.get(what.prior)
        if known is not None or not self._store.directory.checkpoint(what.prior).is_dir():
            return known
        figures = await self._ask(what.prior, None)
        self._tell(Verdict(what.round - 1, what.prior, figures))
        return figures

    def _tell(self, verdict: Verdict) -> None:
        self._keep(verdict)
        told = {
            name: value
            for name, value in msgspec.to_builtins(verdict.figures).items()
            if value is not None and value != ""
        }
        self._journal.note(
            EVALUATED,
            warn=bool(verdict.alarms),
            round=verdict.round,
            digest=verdict.digest,
            **told,
            alarms="; ".join(verdict.alarms),
            refusal=verdict.refusal,
        )

    async def _failed(self, round_index: int, error: EvaluationError | trio.TooSlowError) -> None:
        late = f"no answer within {self._terms.timeout_s:g} s"
        self._fault = error.message if isinstance(error, EvaluationError) else late
        self._faults += 1
        await self._end()
        pause = min(self.pause_s * 2.0 ** (self._faults - 1), PAUSE_MAX_S)
        self._not_before = trio.current_time() + pause
        self._journal.note(
            "gate.failed", warn=True, round=round_index, reason=self._fault, faults=self._faults
        )

    # ---- the program ----

    async def _ask(self, digest: Digest, prior: Digest | None) -> Figures:
        process = await self._started()
        place = self._store.directory.checkpoint
        request = {
            "state": str(place(digest).absolute()),
            "prior": "" if prior is None else str(place(prior).absolute()),
        }
        match await process.ask(msgspec.json.encode(request)):
            case gate_program.Answered(figures=figures):
                return figures
            case gate_program.Refused(refused=reason) | gate_program.Failed(failed=reason):
                raise EvaluationError(reason)
            case gate_program.Ready():
                raise EvaluationError("the testing program said twice that it is ready")

    async def _started(self) -> GateProcess:
        """The program, started if it is not, unless it failed too often or a moment ago."""
        if self._process is not None:
            return self._process
        if self._gave_up or trio.current_time() < self._not_before:
            raise _Paused(f"the testing program pauses after a failure: {self._fault}")
        process = self._process = GateProcess(self._command)
        self._nursery.start_soon(process.drain)
        match await process.hear():
            case gate_program.Ready():
                return process
            case gate_program.Failed(failed=reason):
                raise EvaluationError(reason)
            case _:
                raise EvaluationError("the testing program answered before it was asked")

    async def _start_early(self) -> None:
        async with self._in_use:
            try:
                with trio.fail_after(self._terms.timeout_s):
                    await self._started()
            except _Paused:
                return
            except (EvaluationError, trio.TooSlowError) as error:
                await self._failed(self._store.position.round, error)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()


def command(config: CoordinatorConfig, program: Sequence[str] = PROGRAM) -> list[str]:
    """The command line of the testing program."""
    gate = config.gate
    keys = [
        f"--{name}={value}"
        for name, values in (
            ("observation-key", gate.observation_keys),
            ("image-key", gate.image_keys),
            ("action-key", gate.action_keys),
        )
        for value in values
    ]
    return [
        *program,
        f"--workload={config.workload}",
        f"--data={gate.data}",
        f"--embodiment={gate.embodiment}",
        f"--format={gate.format}",
        f"--memory-bytes={gate.memory_bytes}",
        f"--niceness={gate.niceness}",
        *keys,
    ]


def decode(event: str) -> Verdict | None:
    """The verdict that an event of the journal tells; None if it tells none."""
    fields = msgspec.json.decode(event, type=dict[str, object])
    try:
        figures = msgspec.convert(fields, Figures)
        alarms, refusal = str(fields.get("alarms", "")), str(fields.get("refusal", ""))
        where = msgspec.convert(fields["round"], int)
    except (msgspec.ValidationError, KeyError):
        return None
    digest = Digest(str(fields.get("digest", "")))
    return Verdict(where, digest, figures, (alarms,) if alarms else (), refusal)
