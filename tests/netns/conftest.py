"""Says why hosts cannot be made here, where they cannot."""

import os
import shutil

import pytest


def _missing() -> str:
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    for program in ("ip", "nsenter"):
        if shutil.which(program) is None:
            return f"there is no program {program}"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _missing()
    for item in items:
        if reason and item.get_closest_marker("netns"):
            item.add_marker(pytest.mark.skip(reason=f"no hosts to be made here: {reason}"))
