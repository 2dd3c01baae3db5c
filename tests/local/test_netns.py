"""The private network that everything with a real endpoint runs in."""

import socket

import pytest

from lensemble_local import netns


@pytest.mark.iroh
def test_only_loopback_is_here_and_it_is_up() -> None:
    assert netns.is_private()
    assert netns.enter() is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        pytest.raises(OSError, match="unreachable"),
    ):
        probe.connect(("192.0.2.1", 9))
