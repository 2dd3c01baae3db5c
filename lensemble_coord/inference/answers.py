"""Answers to what ``lensemblectl`` asks about models."""

from collections.abc import AsyncGenerator
from functools import partial

import msgspec
import trio

from lensemble.ctl import replies, requests
from lensemble.errors import OperatorError
from lensemble.stage_chunk import Sampling
from lensemble_coord.inference import run_status, staging, trace
from lensemble_coord.inference.model_run import ModelRun
from lensemble_coord.inference.orchestrator import Orchestrator
from lensemble_coord.inference.request import Answer, Pause, Token
from lensemble_coord.inference.run_rows import Wish
from lensemble_coord.inference.tokens import Message

WATCH_PAUSE_S = 0.1
"""Shortest pause between two statuses of one watcher."""


class ModelAnswers:
    """One method for each request; ``answer`` is what the control socket calls."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def answer(self, request: requests.OfModels) -> AsyncGenerator[replies.Reply, None]:
        """The replies to ``request``, one after the other."""
        match request:
            case requests.ProvisionModel():
                return self._provision(request)
            case requests.Prompt():
                return self._prompt(request)
            case _:
                return self._once(request)

    async def _once(self, request: requests.OfModels) -> AsyncGenerator[replies.Reply, None]:
        match request:
            case requests.PlanModel():
                yield await self._plan(request)
            case requests.ModelRuns():
                live = map(run_status.run, self._orchestrator.runs.values())
                waiting, over = self._orchestrator.waiting(), self._orchestrator.over
                yield replies.ModelRunList(runs=(*live, *waiting, *over))
            case requests.TraceRun():
                yield await trace.trace(self._orchestrator.find(request.run), request.last)
            case requests.InspectRun():
                yield await self._inspect(request.run)
            case requests.StopRun() | requests.TeardownRun():
                yield await self._end(request)
            case _:
                raise OperatorError(f"{type(request).__name__} has an answer of its own")

    async def _plan(self, request: requests.PlanModel) -> replies.Reply:
        here, wish = self._orchestrator, _wish(request)
        if request.measure or here.config.measure_links:
            model, plan, unmeasured = await here.plan_measured(wish)
            return run_status.plan(model, plan, here.around.paths, unmeasured)
        return run_status.plan(*await here.plan(wish), here.around.paths)

    async def _inspect(self, beginning: str) -> replies.Reply:
        run = self._orchestrator.look(beginning)
        if isinstance(run, replies.ModelRunStatus):
            return run
        if staging.takes_requests(run.state):
            await run.watch.ask()
        return run_status.run(run)

    async def _end(self, request: requests.StopRun | requests.TeardownRun) -> replies.Reply:
        run = self._orchestrator.look(request.run)
        if isinstance(run, replies.ModelRunStatus):
            return run if run.outcome else await self._orchestrator.give_up(run, request.reason)
        await self._orchestrator.end(run, request)
        while not run.over:
            await run.changed.wait()
        return run_status.run(run)

    def _wish(self, request: requests.ProvisionModel) -> Wish:
        config = self._orchestrator.config
        most = request.max_replacements
        return msgspec.structs.replace(
            _wish(request),
            replaces=(request.on_fault or config.on_fault) == "replace",
            most=config.max_replacements if most is None else most,
        )

    async def _provision(
        self, request: requests.ProvisionModel
    ) -> AsyncGenerator[replies.Reply, None]:
        measure = request.measure or self._orchestrator.config.measure_links
        run = await self._orchestrator.provision(self._wish(request), measure=measure)
        if request.detach:
            yield run_status.run(run)
            return
        try:
            while True:
                changed = run.changed
                yield run_status.run(run)
                if run.over or run.takes_requests:
                    return
                await changed.wait()
                await trio.sleep(WATCH_PAUSE_S)
        finally:
            if not run.takes_requests:
                run.stop("who asked for it left")

    async def _prompt(self, request: requests.Prompt) -> AsyncGenerator[replies.Reply, None]:
        run = self._orchestrator.find(request.run)
        prompt = await trio.to_thread.run_sync(partial(_tokens, run, request))
        sampling = Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            repeat_penalty=request.repeat_penalty,
            seed=request.seed,
        )
        asked = run.begin(prompt, sampling, request.max_tokens, request.stop)
        try:
            async for piece in asked.pieces:
                match piece:
                    case Token(token, log_probability, text):
                        yield replies.TokenText(
                            token=token, log_probability=log_probability, text=text
                        )
                    case Pause():
                        yield run_status.paused(run, piece)
                    case Answer():
                        yield run_status.answered(run, piece)
        finally:
            asked.cancel()


def _wish(request: requests.PlanModel | requests.ProvisionModel) -> Wish:
    """What is asked for, without what is done when a stage is lost."""
    return Wish(
        request.model, request.ctx, request.sessions, request.rows, request.split, request.fetch
    )


def _tokens(run: ModelRun, request: requests.Prompt) -> tuple[int, ...]:
    tokenizer = run.model.tokenizer
    if request.turns:
        return tokenizer.chat([Message(each.role, each.content) for each in request.turns])
    return tokenizer.encode(request.text)
