"""``lensemblectl doctor``: each thing that can be wrong is named, with its next step."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from lensemble import identity
from lensemble.ctl import replies
from lensemble.transport.iroh_driver import IrohDriver
from lensemblectl.app import answer
from lensemblectl.doctor import daemon, examination, machine, network, place
from lensemblectl.doctor.finding import Finding
from lensemblectl.doctor.knock import knock
from tests.ctl.scripted import STATUS

NOW = 1_700_000_000.0
CPU_BUILD = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA_BUILD = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
GPU = (Path("/dev/nvidiactl"),)
USER = os.geteuid()


@pytest.fixture
def node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert answer(["init", "node", str(tmp_path / "arm"), "--no-data"]) == 0
    capsys.readouterr()
    return tmp_path / "arm"


def only(found: Iterator[Finding], about: str) -> Finding:
    """The one finding about it; each must say what to do unless all is well."""
    every = list(found)
    assert all(each.remedy for each in every if each.outcome != "ok"), every
    (one,) = (each for each in every if each.about == about)
    return one


def test_a_fresh_node_has_no_problem(node: Path) -> None:
    found = list(examination.findings(node, 1.0))
    assert [each for each in found if each.outcome == "problem"] == []
    assert {"configuration", "state directory", "identity"} <= {each.about for each in found}


def test_the_verdict_is_the_exit_status(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["doctor", "--socket", str(node)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    (node / "state" / "identity.key").chmod(0o644)
    assert answer(["doctor", "--socket", str(node), "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (problem,) = (line for line in lines if line["outcome"] == "problem")
    assert problem["about"] == "identity"
    assert problem["remedy"] == f"chmod 600 {node}/state/identity.key"


def test_a_key_that_the_configuration_does_not_know_is_named(node: Path) -> None:
    with (node / "node.toml").open("a", encoding="utf-8") as file:
        file.write("nonsense = 3\n")
    found = only(examination.findings(node, 1.0), "configuration")
    assert found.outcome == "problem"
    assert "log.nonsense" in found.said


def test_a_daemon_that_is_not_there_is_a_note(node: Path) -> None:
    found = only(examination.findings(node, 1.0), "control socket")
    assert (found.outcome, "no such socket" in found.said) == ("note", True)


def test_a_state_directory_that_everybody_may_enter_is_a_problem(node: Path) -> None:
    (node / "state").chmod(0o755)
    found = only(place.look(node / "state"), "state directory")
    assert (found.outcome, found.remedy) == ("problem", f"chmod o-rwx {node}/state")


@pytest.mark.skipif(USER != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_named(node: Path) -> None:
    os.chown(node / "state" / "identity.key", 12345, -1)
    found = only(place.look(node / "state"), "state directory")
    assert found.outcome == "problem"
    assert "identity.key" in found.said
    assert "user 12345" in found.said


def test_a_state_directory_that_may_not_be_read_says_as_whom_to_look(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = only(place.look(tmp_path / "file" / "state"), "state directory")
    assert found.outcome == "problem"
    assert "Not a directory" in found.said


@pytest.mark.parametrize(
    ("free", "outcome"), [(1 << 20, "problem"), (1 << 30, "note"), (1 << 40, "ok")]
)
def test_low_disk_is_told_from_full(free: int, outcome: str) -> None:
    assert place.room(free, Path("/srv")).outcome == outcome


def test_a_clock_behind_the_newest_file_is_a_problem() -> None:
    found = machine.clock(NOW + 3600, NOW, 0)
    assert (found.outcome, "3600 s behind" in found.said) == ("problem", True)
    assert machine.clock(NOW, NOW, machine.NTP_ERROR).outcome == "note"
    assert machine.clock(NOW, NOW, 0).outcome == "ok"


def test_a_build_without_the_gpu_that_is_there_is_a_problem() -> None:
    found = machine.torch(CPU_BUILD, GPU)
    assert found.outcome == "problem"
    assert "2.13.0+cpu" in found.said
    assert "/dev/nvidiactl" in found.said
    assert machine.torch(CUDA_BUILD, GPU).outcome == "ok"
    assert machine.torch(CPU_BUILD, ()).outcome == "ok"
    assert machine.torch(None, ()).outcome == "problem"


def test_too_few_descriptors_are_a_problem() -> None:
    assert machine.descriptors(1024).outcome == "problem"
    assert machine.descriptors(65_536).outcome == "ok"


def test_another_release_of_the_daemon_is_a_problem() -> None:
    old = replies.Greeting(daemon="node", name="arm", version="0.0.9", ctl_version=1)
    found = daemon.version(old)
    assert found.outcome == "problem"
    assert "0.0.9" in found.said


def test_whom_a_coordinator_refused_is_told() -> None:
    found = only(daemon.coordinator(STATUS), "refused")
    assert found.outcome == "note"


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where datagrams vanish, as behind a firewall."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_a_port_that_drops_udp_is_a_problem_that_names_the_port(silent: str) -> None:
    (found,) = network.coordinator([silent])
    assert found.outcome == "problem"
    assert f"UDP port {silent.rpartition(':')[2]}" in found.remedy


def test_a_port_on_which_nobody_listens_is_told_from_a_firewall() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    (found,) = network.coordinator([f"127.0.0.1:{port}"])
    assert found.outcome == "problem"
    assert "nobody listens" in found.said


def test_an_address_without_a_route_is_told_so() -> None:
    (found,) = network.coordinator(["192.0.2.1:7707"])
    assert found.outcome == "problem"
    assert "no route" in found.said


@pytest.mark.iroh
async def test_an_endpoint_answers_a_knock(tmp_path: Path, silent: str) -> None:
    who = identity.load_or_create(tmp_path / "identity.key")
    driver = IrohDriver(who, ("127.0.0.1:0",), heartbeat_s=1, heartbeat_timeout_s=3)
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        (address,) = driver.addresses()
        assert await trio.to_thread.run_sync(knock, address) == "quic"
        # One way that works makes the other a thing to know of.
        found = await trio.to_thread.run_sync(lambda: [*network.coordinator([address, silent])])
        outcomes = [each.outcome for each in found]
        assert outcomes == ["ok", "note"]
        nursery.cancel_scope.cancel()


def test_the_ticket_that_a_node_joined_by_names_where_to_knock(node: Path) -> None:
    text = {
        "coordinator": "ab" * 32,
        "addresses": ["192.0.2.1:7707"],
        "federation": "",
        "invite": "",
    }
    (node / "state" / "coordinator.json").write_text(json.dumps(text))
    found = only(examination.findings(node, 1.0), "coordinator")
    assert "192.0.2.1:7707" in found.said
