"""``lensemblectl report`` over state directories that hold a real ledger."""

import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lensemble.workload import NoopTask, Privacy, Workload
from lensemble_coord.training import record as records
from lensemble_coord.training.manifest import begin_run
from lensemble_report.__main__ import main
from lensemble_report.history import read
from lensemble_report.page import guarantees
from tests.coord.history import NODES, History

SMALL = Workload(name="small", root_seed=3, task=NoopTask(parameters=500))
HOSTILE = '<script>alert(1)</script>" onload="x$\\frac{&\x00\u202e'
FIGURES = {
    "finite": True,
    "std": 0.91,
    "probe_r2": 0.83,
    "latent_error": 0.25,
    "state_error": 0.5,
    "dimension": 5.0,
}
DRIFT = {"drift_before": 0.2, "drift_after": 0.1, "rms_degrees": 9.0, "max_degrees": 20.0}


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page, as a browser would take them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def event(name: str, round_index: int, **fields: Any) -> dict[str, Any]:
    return {"event": name, "round": round_index, **fields}


def told(round_index: int, **node: Any) -> list[dict[str, Any]]:
    """The events of one round, as a coordinator writes them."""
    figures = {**FIGURES, **DRIFT, "std": 0.5 + round_index}
    return [
        event("round.diagnosed", round_index, mean_update_l2=2.5, field_use=0.1),
        *(
            event("round.node", round_index, node=each.node, bytes_down=1000, bytes_up=2000, **node)
            for each in NODES
        ),
        event("round.closed", round_index, open_s=0.5, collecting_s=2.0, left_out="dora (timeout)"),
        event("gate.evaluated", round_index, digest="d", **figures, alarms=HOSTILE),
    ]


def begun(place: Path, workload: Workload = SMALL) -> History:
    made = History(place / "state", workload)
    for number, each in enumerate(NODES):
        made.ledger.admit(each.node, HOSTILE if number == 1 else f"node-{number}", "config")
    return made


def report(place: Path, *arguments: str) -> str:
    out = place / "report.html"
    status = main([f"--state-dir={place / 'state'}", f"--out={out}", *arguments])
    assert status == 0
    return out.read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds, the last of them rejected, one attempt aborted; every figure there is."""
    place = tmp_path_factory.mktemp("report")
    made = begun(place)
    made.ledger.note([event("gate.evaluated", -1, digest="s", **{**FIGURES, "std": 0.71})])
    made.advance(2)
    refused = records.rejected(made.prepare(), f"std 9 is outside {HOSTILE}")
    made.ledger.append(refused, made.run)
    for number in range(3):
        made.ledger.note(told(number, loss=0.125 + number, epsilon=1.5 + number))
    made.ledger.begin_attempt(3, 0, made.run)
    made.ledger.end_attempt(3, 0, "aborted", "fault_tolerance_exceeded", f"1 of 2 {HOSTILE}")
    made.ledger.close()
    return place


def test_the_page_says_what_the_ledger_says(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Page(report(place, "--json"))
    said = json.loads(capsys.readouterr().out)
    assert (said["rounds"], said["verify"]) == (3, "sound")
    history = read(place / "state")
    for each in history.rounds:
        assert each.record.next_digest[:12] in page.text
        assert each.record_hash[:12] in page.text
    assert history.rounds[-1].record.next_digest in page.text
    assert history.federation in page.text
    assert history.config_hash in page.text
    for words in ("0.83", "0.25", "1.125", "left out: dora (timeout)", "3 of 3", "from 0.5"):
        assert words in page.text, words
    assert "rejected: std 9 is outside" in page.text
    assert "fault_tolerance_exceeded" in page.text
    assert "3 outer steps recomputed" in page.text
    assert history.start is not None
    assert history.start.figures.std == 0.71
    assert [each.loss for each in history.rounds] == [0.125, 1.125, 2.125]
    after = [each.figures for each in history.rounds if each.figures]
    assert [each.std for each in after] == [0.5, 1.5, 1.5], "a rejected step leaves the state"
    assert [each.drift_before for each in after] == [0.2, 0.2, None]
    assert history.rounds[0].seconds == {"open": 0.5, "collecting": 2.0}
    assert {each.bytes_up for each in history.rounds[0].nodes.values()} == {2000}
    for key in ("loss", "errors", "probe", "spread", "dimension", "drift", "angles", "norms",
                "epsilon", "contributors", "bytes", "seconds"):  # fmt: skip
        assert key in page.ids, key


def test_nothing_that_a_peer_says_becomes_markup(place: Path) -> None:
    text = report(place)
    page = Page(text)
    assert not page.tags & {"script", "img", "iframe", "link", "object", "embed", "base", "form"}
    assert not {name for name in page.attributes if name.startswith("on")}
    assert len(page.ids) == len(set(page.ids))
    assert "<script>alert(1)" in page.text
    assert "\x00" not in text
    assert "\u202e" not in text


def test_the_file_needs_nothing_beside_it(place: Path) -> None:
    text = report(place)
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text


def test_a_federation_without_rounds(tmp_path: Path) -> None:
    begun(tmp_path).ledger.close()
    page = Page(report(tmp_path))
    assert "No round has closed." in page.text
    assert "svg" not in page.tags


def test_what_is_not_known_is_said_to_be(tmp_path: Path) -> None:
    made = begun(tmp_path)
    made.advance(1)
    made.ledger.close()
    page = Page(report(tmp_path, "--no-verify"))
    assert "Verification was not asked for." in page.text
    assert "No contributor shares its loss" in page.text
    assert "No state was tested on public data" in page.text
    assert "contributors" in page.ids
    assert "probe" not in page.ids


def test_it_is_written_beside_a_running_ledger_and_of_one_run(tmp_path: Path) -> None:
    made = begun(tmp_path)
    made.advance(1)
    first = made.run
    made.ledger.end_run(first, "completed")
    made.run = begin_run(made.directory, made.ledger, 10)
    made.advance(2)
    assert [each.index for each in read(tmp_path / "state", first).rounds] == [0]
    assert [each.index for each in read(tmp_path / "state", "latest").rounds] == [1, 2]
    assert f"{made.run}" in Page(report(tmp_path, "latest")).text
    made.ledger.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nothing"], "there is no run 'nothing'"), ([], "holds no ledger.sqlite")],
)
def test_what_cannot_be_reported(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    where = place / "state" if arguments else tmp_path
    assert main([f"--state-dir={where}", f"--out={tmp_path / 'x.html'}", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Try: " in said
    assert not (tmp_path / "x.html").exists()


def test_a_damaged_directory_is_reported_and_said_to_be(tmp_path: Path) -> None:
    made = begun(tmp_path)
    made.advance(1)
    made.ledger.close()
    (weights,) = (tmp_path / "state" / "sums").iterdir()
    content = bytearray(weights.read_bytes())
    content[3] ^= 1
    weights.write_bytes(content)
    out = tmp_path / "report.html"
    assert main([f"--state-dir={tmp_path / 'state'}", f"--out={out}"]) == 1
    assert "NOT sound." in Page(out.read_text()).text


def test_a_missing_package_is_named_with_its_extra(place: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "lensemble_report", f"--state-dir={place / 'state'}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert done.returncode == 2
    assert done.stderr == (
        "Error: a report needs matplotlib, which is not installed\n"
        "Try: pip install 'lensemble[report]'\n"
    )


def test_the_guarantees_are_those_of_the_rounds(place: Path) -> None:
    history = read(place / "state")
    assert guarantees(history)[0].startswith("Updates came in the clear")
    assert "No noise" in guarantees(history)[1]
    history.workload = SMALL.model_copy(update={"privacy": Privacy(enabled=True, epsilon=3.0)})
    assert "epsilon 3" in guarantees(history)[1]
    masked = records.Masking(
        threshold=2, roster_digest="a" * 64, members=(), dealers=(), revealed_digest="b" * 64
    )
    history.rounds[0].record = msgspec.structs.replace(history.rounds[0].record, masking=masked)
    assert "in others" in guarantees(history)[0]
    for each in history.rounds:
        each.record = msgspec.structs.replace(each.record, masking=masked)
    assert guarantees(history)[0].startswith("Updates were masked")


def test_the_command_hands_over_to_the_program(place: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lensemblectl.app", "report", "--state-dir", str(place / "state"),
         "--out", str(tmp_path / "r.html"), "--no-verify", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verify"] == "not done"
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
