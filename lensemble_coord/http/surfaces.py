"""Serves what the configuration asks for: the API, and figures beside it or by themselves."""

from collections.abc import Mapping
from functools import partial

import trio

from lensemble import loop_lag
from lensemble.logs import logger
from lensemble.web import figures as web_figures
from lensemble.web import serving
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.http import keys, page
from lensemble_coord.http.app import Front
from lensemble_coord.http.figures import Figures
from lensemble_coord.http.parts import Parts


async def serve(
    config: CoordinatorConfig,
    parts: Parts,
    *,
    task_status: trio.TaskStatus[dict[str, str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; starts with the bound addresses, by ``http`` and ``metrics``.

    Raises:
        ConfigError: an address cannot be bound, or a file of keys not be read.
    """
    log = logger("http")
    front: Front | None = None

    def requests() -> Mapping[tuple[str, int], int]:
        return {} if front is None else front.answered

    with loop_lag.watching() as lag:
        figures = Figures(parts, lag, requests)
        bound: dict[str, str] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(figures.follow)
            if config.http.enabled:
                known = await trio.to_thread.run_sync(keys.read, config.http.api_keys)
                told = partial(web_figures.text, figures.collect)
                front = Front(parts.orchestrator, known, told, config.http.max_requests)
                bound["http"] = await nursery.start(
                    serving.serve, front, config.http.address, "http.address"
                )
            if config.metrics.address:
                bound["metrics"] = await nursery.start(
                    serving.serve,
                    page.app(parts, figures.collect),
                    config.metrics.address,
                    "metrics.address",
                )
            for what, address in bound.items():
                log.info("http.serving", what=what, address=address)
            task_status.started(bound)
            await trio.sleep_forever()
