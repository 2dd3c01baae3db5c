"""Tells figures over HTTP, where that is asked for and its packages are there."""

from collections.abc import Callable

import trio

from lensemble.ctl import replies
from lensemble.logs import logger


async def serve(
    status: Callable[[], replies.NodeStatus],
    address: str,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Tell what ``status`` says at ``address`` until cancelled, or nothing where that is empty.

    Starts with the bound address.  Without the packages a warning is all that comes of it: a node
    works whoever watches it.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if not address:
        task_status.started("")
        return
    try:
        from lensemble_node import figures  # noqa: PLC0415 - packages of an extra
    except ImportError as error:
        remedy = "pip install 'lensemble[http]'"
        logger("http").warning("metrics.unavailable", package=error.name or "", remedy=remedy)
        task_status.started("")
        return
    await figures.serve(status, address, task_status=task_status)
