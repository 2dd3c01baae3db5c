"""The coordinator's page in a real browser, beside real daemons."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.browser import PROGRAM, Page, browser
from tests.e2e.federation import Federation, federation, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(PROGRAM is None, reason="there is no chromium here"),
]
PHONE = (390, 844)


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def members(tmp_path: Path, address: str) -> Iterator[Federation]:
    with federation(tmp_path, 2, coordinator={"metrics": {"address": address}}) as made:
        yield made


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    place = tmp_path / "browser"
    place.mkdir()
    with browser(place) as made:
        yield made


def sees(page: Page, text: str) -> None:
    until(f"the page says {text!r}", lambda: text in page.text())


def test_the_page_follows_the_federation_and_fits_a_phone(
    members: Federation, address: str, page: Page, tmp_path: Path
) -> None:
    page.sized(*PHONE)
    page.open(f"http://{address}/")
    sees(page, "node-1")
    sees(page, "No round has closed yet")
    members.run(3)
    members.wait_closed(2)
    sees(page, "Round 2 is closed")
    until("its curves are drawn", lambda: page.value("document.querySelectorAll('svg').length"))
    assert page.value("document.documentElement.scrollWidth") == PHONE[0]
    members["node-1"].kill()
    sees(page, "no heartbeat for")
    sees(page, "away")
    members.coordinator.kill()
    sees(page, "the coordinator does not answer")
    members.start("coordinator")
    sees(page, "live")
    problems = [each for each in page.errors if "ERR_" not in each]
    assert problems == [], problems
    for width in (PHONE[0], 1280):
        page.sized(width, 900, dark=width == PHONE[0])
        page.picture(tmp_path / f"page-{width}.png")


def test_what_a_node_calls_itself_is_only_text(
    members: Federation, address: str, page: Page
) -> None:
    page.open(f"http://{address}/")
    sees(page, "node-0")
    # The policy holds back any script that is not the page's own file.
    script = """(() => {
        const inline = document.createElement("script");
        inline.text = "window.ran = true";
        document.head.append(inline);
        return Boolean(window.ran);
    })()"""
    assert page.value(script) is False


def test_only_this_machine_is_answered(members: Federation, address: str) -> None:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 5) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 421")
