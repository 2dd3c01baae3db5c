"""Puts the whole run into a private network namespace; sets the hypothesis profile."""

import os

import pytest
from hypothesis import settings

from lensemble_local import netns

settings.register_profile("dev", max_examples=100, deadline=None)
settings.register_profile("ci", max_examples=300, deadline=None, derandomize=True)
settings.register_profile("soak", max_examples=10_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

NAMESPACE = pytest.StashKey[str | None]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NAMESPACE] = netns.enter()


def pytest_report_header(config: pytest.Config) -> str:
    return f"network: {config.stash[NAMESPACE] or 'private namespace, loopback only'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    refused = config.stash[NAMESPACE]
    if refused is None:
        return
    skip = pytest.mark.skip(reason=f"real endpoints stay in a private network: {refused}")
    for item in items:
        if item.get_closest_marker("iroh") or item.get_closest_marker("e2e"):
            item.add_marker(skip)
