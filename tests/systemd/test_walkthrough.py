"""The walkthrough of docs/, command by command, on two hosts with a wire between them."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.systemd.host import ROOM, Host, booted, connect, install, refusal

PAGE = ROOM / "docs" / "walkthrough.md"
ADDRESSES = {"hub": "192.0.2.1", "lab": "192.0.2.2"}
ELSEWHERE = "make install-system"
"""Takes packages from the network, of which there is none; the test installs this tree instead."""

TICKET = re.compile(r"lensemble1:\S+")

pytestmark = [pytest.mark.e2e, pytest.mark.iroh]


class Command(NamedTuple):
    host: str
    text: str


def commands() -> Iterator[Command]:
    """Those of the page, in order."""
    page = PAGE.read_text(encoding="utf-8")
    for where, block in re.findall(
        r"^```console (\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    ):
        for line in block.replace("\\\n", " ").splitlines():
            for host in ADDRESSES if where == "both" else (where,):
                yield Command(host, line)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, Host]]:
    reason = refusal()
    if reason:
        pytest.skip(reason)
    places = [tmp_path / name for name in ADDRESSES]
    for place in places:
        place.mkdir()
    with booted(places[0], apart=True) as hub, booted(places[1], apart=True) as lab:
        connect(hub, lab, (ADDRESSES["hub"], ADDRESSES["lab"]))
        for index, (name, host) in enumerate({"hub": hub, "lab": lab}.items()):
            prepare(host, name, index)
        yield {"hub": hub, "lab": lab}


def prepare(host: Host, name: str, index: int) -> None:
    """What a host has before the page begins, and what its first command would have done."""
    install(host)
    host.run("ln", "-s", "/opt/lensemble/bin/lensemblectl", "/opt/lensemblectl")
    made = ("--nodes", str(index + 1), "--episodes", "8", "--engine", "numpy")
    host.run(sys.executable, "-m", "lensemble_local.arm", "--out", "/srv/data", *made)
    host.run(
        "install", "-D", "-m", "644", f"/srv/data/node{index}.h5", f"/srv/lensemble/{name}.hdf5"
    )


def test_the_page_leads_from_a_clone_to_a_federation(hosts: dict[str, Host]) -> None:
    ticket = ""
    for host, text in commands():
        if text == ELSEWHERE:
            continue
        said = hosts[host].run(
            "sh", "-ec", f"PATH=/opt/lensemble/bin:$PATH; {text}".replace("TICKET", ticket)
        )
        if found := TICKET.search(said):
            ticket = found[0]
        if " run " in text:
            assert "completed: 3 rounds closed" in said, said
        if " members " in text:
            assert "lab-arm" in said, said
    assert hosts["lab"].shown("lensemble-node", "ActiveState") == "inactive"
