"""The scan of logs finds what it is for."""

from pathlib import Path

import pytest

from tests.e2e.log_scan import faults

KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("joined by lensemble1:c2l4dGVlbiBieXRlcyBvaw", "a ticket"),
        ("state [0.12, -1.5, 3.25, 0.001, 0.5, 0.25, 2.0, 1.0]", "a list of measurements"),
        ("tensor([1, 2])", "a printed tensor"),
        (repr(bytes(range(40))), "bytes"),
        ("ab" * 65, "a long run of hex or base64"),
        (KEY.hex(), "the identity key"),
    ],
)
def test_what_must_not_be_logged_is_found(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "identity.key").write_bytes(KEY)
    (tmp_path / "daemon.log").write_text(f"{{}}\n{line}\n")
    found = faults(tmp_path / "daemon.log", tmp_path / "identity.key")
    assert any(f":2: {what}: " in each for each in found), found


def test_an_honest_log_passes(tmp_path: Path) -> None:
    (tmp_path / "daemon.log").write_text(
        f'{{"event":"round.closed","digest":"{"ab" * 32}","signature":"{"cd" * 64}","loss":0.25}}\n'
    )
    assert faults(tmp_path / "daemon.log", tmp_path / "none") == []
