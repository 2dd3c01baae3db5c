"""What the tables look like, at the widths that people have."""

from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType

from lensemble.ctl import replies
from lensemblectl import render, render_members
from tests.ctl import scripted

NODE = replies.NodeStatus(
    name="arm-1", node="3f" * 32, version="0.1.0", addresses=("127.0.0.1:40112",), uptime_s=12.0,
    state_dir="/srv/arm-1/state",
    link=replies.LinkStatus(
        state="waiting", reason="no answer from 192.0.2.1:7707", coordinator="a0" * 32, name="lab",
        addresses=("192.0.2.1:7707",), attempt=3, next_attempt_in_s=4.2,
    ),
    round=replies.NodeRoundStatus(
        index=4, attempt=1, activity="training", reason="", since_s=3.0, step=31, steps=50
    ),
    worker=replies.WorkerStatus(state="busy", pid=812, restarts=1, rss_bytes=254_000_000),
    dataset=replies.DatasetStatus(
        path="/srv/arm-1.hdf5", root="6a" * 32, episodes=40, steps=8000
    ),
    contributions=4, last_contribution=3, refused={"frame": 1}, alerts=("worker restarted",),
)  # fmt: skip


def printed(shown: RenderableType, width: int) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False, markup=False, emoji=False).print(shown)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_coordinator_fits_and_cuts_nothing_but_names_and_addresses(width: int) -> None:
    text = printed(render.coordinator(scripted.STATUS, width), width)
    assert all(len(line) <= width for line in text.splitlines())
    for part in ["training 31/50", "<1 ms", "12 ms", "73s", "127.0.0.1:40112", "9 min 48 s left"]:
        assert part in text
    assert ("ROUNDS  STATE BY  NODE" in text) == (width >= render.WIDE_COLUMNS)


def test_a_blob_on_its_way_leaves_room_at_80_columns() -> None:
    sending = replace(
        scripted.PARTICIPANTS[0], activity="sending update", bytes=12_300_000, total_bytes=10**8
    )
    text = printed(render.coordinator(replace(scripted.STATUS, participants=(sending,)), 80), 80)
    assert "sending update 12.3 MB/100 MB" in text
    assert "<1 ms" in text


def test_nobody_has_joined() -> None:
    text = printed(render.coordinator(replace(scripted.STATUS, participants=()), 80), 80)
    assert "`lensemblectl invite` makes a ticket" in text


def test_a_node_lists_its_stages_and_what_it_offers() -> None:
    stages = (
        replies.StageStatus(
            run="0123456789abcdef", run_epoch=1, stage=0, stages=2, model="SmolLM2-135M", first=0,
            last=15, phase="live", since_s=9, pid=4711, bytes=10**9, rss_bytes=312_000_000, ctx=512,
            sessions=1, computed=1234, last_step_ms=31.4,
        ),
        replies.StageStatus(
            run="fedcba9876543210", run_epoch=1, stage=1, stages=2, model="SmolLM2-135M", first=15,
            last=30, phase="fetching", since_s=1, done=42, total=100, bytes=400_000_000,
        ),
    )  # fmt: skip
    hosting = replies.HostingStatus(
        memory_bytes=8 * 10**9, taken_bytes=10**9, engine="tinygrad 0.14.0 CPU", links=("b" * 64,)
    )
    text = printed(render.node(replace(NODE, hosting=hosting, stages=stages)), 90)
    for part in [
        "1 GB of 8 GB taken, tinygrad 0.14.0 CPU, linked to 1 node",
        "0123456789abcdef    1/2  0:15    live           312 MB    1234  31 ms  4711  SmolLM2-135M",
        "fetching 42 %",
    ]:
        assert part in text
    none = replies.HostingStatus(memory_bytes=0, taken_bytes=0, reason="no C compiler")
    assert "none: no C compiler" in printed(render.node(replace(NODE, hosting=none)), 90)


def test_a_node_says_whom_it_dials_why_and_when_again() -> None:
    text = printed(render.node(NODE), 120)
    for part in [
        "node arm-1  lensemble 0.1.0, up 12 s",
        "lab a0a0a0a0a0a0 at 192.0.2.1:7707",
        "waiting, no answer from 192.0.2.1:7707, attempt 3, next in 4.2 s",
        "busy, pid 812, 1 restart, 254 MB",
        "40 episodes, 8000 steps, root 6a6a6a6a6a6a",
        "to 4 rounds, last to round 3",
        "round 4, attempt 1: training 31/50, for 3.0 s",
        "frame 1",
        "alert: worker restarted",
    ]:
        assert part in text
    assert "shares" not in text
    assert "privacy" not in text
    kept = replies.PrivacyStatus(
        unit="participant", spent=4.377, epsilon=8.0, delta=1e-5, releases=1, rounds_left=1
    )
    counted = printed(render.node(replace(NODE, privacy=kept)), 120)
    assert "epsilon 4.377 of 8 spent at delta 1e-05, 1 round left, unit participant" in counted
    bare = replace(
        NODE, round=None, dataset=None, worker=None, link=replies.LinkStatus(state="off")
    )
    assert "`lensemblectl join TICKET` names one" in printed(render.node(bare), 80)


def test_names_are_shown_as_they_are_written() -> None:
    odd = replace(scripted.PARTICIPANTS[0], name="[bold]x[/nope] :smile:")
    text = printed(render.coordinator(replace(scripted.STATUS, participants=(odd,)), 140), 140)
    assert "[bold]x[/nope]" in text


def test_a_verdict_names_every_problem() -> None:
    report = {
        "directory": "/srv/state", "federation": "5e" * 16, "newest_round": 3, "records": 5,
        "notes": ["a note"],
        "problems": [
            {"where": "ledger.sqlite", "what": "row changed", "round": 2},
            {"where": "sums", "what": "gone", "round": None},
        ],
    }  # fmt: skip
    text = printed(render.verified(report), 120)
    assert "/srv/state: NOT sound" in text
    assert "ledger.sqlite (round 2): row changed" in text
    assert "sums: gone" in text
    assert "5 records" in text
    assert "/srv/state: sound" in printed(render.verified({**report, "problems": []}), 120)


@pytest.mark.parametrize("width", [60, 110, 200])
def test_numbers_of_a_wide_table_are_whole_and_texts_are_broken(width: int) -> None:
    table = render.listing("RUN", "MODEL", "TOKENS", "WHY")
    table.add_row("7209f9a40965bb09", "Smollm2 135M 8k Lc100K Mix1 Ep2", "123456", "killed " * 20)
    render.wrap(table, "MODEL", "WHY")
    page = StringIO()
    Console(width=width, file=page).print(table)
    words = page.getvalue().split()
    assert {"RUN", "TOKENS", "7209f9a40965bb09", "123456"} <= set(words)
    assert words.count("killed") == 20
    assert max(map(len, page.getvalue().splitlines())) <= width


@pytest.mark.parametrize("width", [80, 140])
def test_members_are_told_whole_at_80_columns(width: int) -> None:
    text = printed(Group(*render_members.table(scripted.MEMBERS)), width)
    assert all(len(line) <= width for line in text.splitlines())
    head = "lab sees 1 of 3 others alive; it probes one every 2 s (wan); it doubts itself (1 of 8)"
    assert head in text.replace("\n", " ")
    for part in [
        "a0" * 6,
        "suspect",
        "67min",
        "1450 ms",
        "relayed",
        "FLAPS",
        "25h",
        "node-c is drained",
    ]:
        assert part in text
    assert any(line.startswith("a-node-with-a-long-") for line in text.splitlines())


def test_who_knows_no_members_says_so() -> None:
    (only,) = render_members.table(replies.MemberList(name="arm-1"))
    assert "arm-1 has joined no federation" in printed(only, 80)
    alone = replies.MemberList(name="lab", profile="lan", interval_s=1.0)
    assert "no other member yet" in printed(Group(*render_members.table(alone)), 80)
