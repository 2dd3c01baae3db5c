"""What the daemon starts: loads the packages that serve HTTP only where something is served."""

from collections.abc import Mapping

import trio

from lensemble.errors import ConfigError
from lensemble.logs import logger
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.http.parts import Parts

INSTALL = "pip install 'lensemble[http]'"


async def serve(
    config: CoordinatorConfig,
    parts: Parts,
    *,
    task_status: trio.TaskStatus[Mapping[str, str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve what ``config`` asks for until cancelled; starts with the bound addresses.

    Without the packages the API is refused, and figures are left out with a warning: rounds do not
    depend on who watches them.

    Raises:
        ConfigError: the API is asked for and its packages are not installed; or as ``surfaces``.
    """
    if not config.http.enabled and not config.metrics.address:
        task_status.started({})
        return
    try:
        from lensemble_coord.http import surfaces  # noqa: PLC0415 - packages of an extra
    except ImportError as error:
        if config.http.enabled:
            raise ConfigError(
                f"http.enabled needs the package {error.name}, which is not installed", INSTALL
            ) from error
        logger("http").warning("metrics.unavailable", package=error.name or "", remedy=INSTALL)
        task_status.started({})
        return
    await surfaces.serve(config, parts, task_status=task_status)
