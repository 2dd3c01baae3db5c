"""Weights of a stage from every source: fetched once, verified, and refused by name."""

import os
import resource
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from msgspec.structs import replace

from lensemble import errors
from lensemble.http_ranges import Stopped
from lensemble.model_facts import tensors_for
from lensemble_coord.inference import models
from lensemble_node.worker.inference import fetch
from lensemble_node.worker.inference.cache import TENSORS, Cache
from lensemble_node.worker.inference.fetch import Order, Watch
from tests.node.range_server import Fault, Origin, serving, status, whole_file
from tests.node.stage_weights import QUICK, content, lies_there, order, parts
from tests.tiny_gguf import write_tiny


def test_a_stage_fetches_its_own_bytes_and_little_else(tmp_path: Path) -> None:
    whole = content()
    mine = (*parts(whole)[:1], *parts(whole)[5:12])
    with serving(whole) as origin:
        got = fetch.fetch(order(tmp_path, whole, mine, origin.url), QUICK)
        assert lies_there(got.path, whole, mine)
        need = sum(each.nbytes for each in mine)
        assert need <= origin.sent <= 1.02 * need
        assert len(origin.asked) == 3, "neighbours are asked for in one range"
        assert got.fetched_bytes == origin.sent - len(b"GGUF")
        got.close()
        again = fetch.fetch(order(tmp_path, whole, mine, origin.url), QUICK)
        assert (again.fetched_bytes, len(origin.asked)) == (0, 3)
        again.close()


def test_two_stages_of_a_model_share_one_file(tmp_path: Path) -> None:
    whole = content()
    every = parts(whole)
    with serving(whole) as origin:
        first = fetch.fetch(order(tmp_path, whole, every[:11], origin.url, of_all=every), QUICK)
        second = fetch.fetch(order(tmp_path, whole, every[10:], origin.url, of_all=every), QUICK)
        assert first.path == second.path
        assert lies_there(first.path, whole, every)
        assert second.fetched_bytes < sum(each.nbytes for each in every[11:]) * 1.02
        first.close()
        second.close()
    (held,) = Cache(tmp_path).held()
    assert (held.tensors, held.in_use) == (20, False)


def _flipped(origin: Origin) -> Fault:
    def answer(request: BaseHTTPRequestHandler, begin: int, end: int) -> bool:
        body = bytearray(origin.content[begin:end])
        body[len(body) // 2] ^= 1
        origin.send(request, begin, end, body=bytes(body))
        return True

    return answer


def _short(origin: Origin, nbytes: int) -> Fault:
    def answer(request: BaseHTTPRequestHandler, begin: int, end: int) -> bool:
        origin.send(request, begin, end, body=origin.content[begin:end][:nbytes])
        request.close_connection = True
        return True

    return answer


def _resized(origin: Origin) -> Fault:
    def answer(request: BaseHTTPRequestHandler, begin: int, end: int) -> bool:
        origin.send(request, begin, end, size=len(origin.content) + 1)
        return True

    return answer


def _elsewhere(origin: Origin) -> Fault:
    def answer(request: BaseHTTPRequestHandler, begin: int, end: int) -> bool:
        origin.send(request, begin + 1, end, body=origin.content[begin + 1 : end])
        return True

    return answer


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        (lambda _: [status(416)], errors.WeightsRangeRefused),
        (lambda _: [whole_file], errors.WeightsUnranged),
        (lambda _: [status(404)], errors.WeightsUnreachable),
        (lambda _: [status(401)], errors.WeightsUnreachable),
        (lambda _: [status(429, Retry_After="0")] * 3, errors.WeightsBusy),
        (lambda _: [status(429, Retry_After="3600")], errors.WeightsBusy),
        (lambda _: [status(503)] * 3, errors.WeightsBusy),
        (lambda origin: [_short(origin, 100)] * 3, errors.WeightsShort),
        (lambda origin: [_flipped(origin)], errors.WeightsDigestMismatch),
        (lambda origin: [_resized(origin)], errors.WeightsChanged),
        (lambda origin: [_elsewhere(origin)], errors.WeightsUnranged),
        (lambda _: [status(302, Location="/again")] * 9, errors.WeightsUnreachable),
        (lambda _: [status(302, Location="file:///etc/passwd")], errors.WeightsUnreachable),
    ],
)
def test_what_a_server_does_wrong_has_a_name(
    tmp_path: Path, faults: object, error: type[errors.WeightsError]
) -> None:
    whole = content()
    with serving(whole) as origin:
        origin.faults = [None, *faults(origin)]  # type: ignore[operator]  # a table of functions
        with pytest.raises(error) as raised:
            fetch.fetch(order(tmp_path, whole, parts(whole)[:3], origin.url), QUICK)
        assert type(raised.value) is error
        assert "secret" not in raised.value.message
        assert raised.value.remediation
        # What came before is kept, what was wrong is not, and the next try succeeds.
        origin.faults = []
        got = fetch.fetch(order(tmp_path, whole, parts(whole)[:3], origin.url), QUICK)
        assert lies_there(got.path, whole, parts(whole)[:3])
        got.close()


@pytest.mark.parametrize(
    "faults",
    [
        lambda _: [status(429, Retry_After="0"), status(503)],
        lambda origin: [_short(origin, 20_000), _short(origin, 7)],
        lambda _: [status(302, Location="/elsewhere")],
        lambda _: [status(429, Retry_After="Sun, 06 Nov 1994 08:49:37 GMT")],
    ],
)
def test_what_passes_is_waited_for(tmp_path: Path, faults: object) -> None:
    whole = content()
    mine = parts(whole)[:4]
    with serving(whole) as origin:
        origin.faults = [None, *faults(origin)]  # type: ignore[operator]  # a table of functions
        got = fetch.fetch(order(tmp_path, whole, mine, origin.url), QUICK)
        assert lies_there(got.path, whole, mine)
        assert got.fetched_bytes <= 1.02 * sum(each.nbytes for each in mine)
        got.close()


def test_nobody_there_is_unreachable(tmp_path: Path) -> None:
    whole = content()
    with serving(whole) as origin:
        url = origin.url
    with pytest.raises(errors.WeightsUnreachable, match="refused"):
        fetch.fetch(order(tmp_path, whole, parts(whole), url), QUICK)


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "http://", "http://me:pw@host/f", "http://host:x/", "http://a/b c"]
)
def test_what_is_no_address_is_refused(tmp_path: Path, url: str) -> None:
    whole = content()
    with pytest.raises(errors.WeightsUnreachable) as raised:
        fetch.fetch(order(tmp_path, whole, parts(whole), url), QUICK)
    assert "pw" not in raised.value.message


def test_a_silent_server_is_given_up(tmp_path: Path) -> None:
    whole = content(nbytes=200_000)
    watch = replace(QUICK, patience=replace(QUICK.patience, tries=1, silence_s=0.3))
    with serving(whole) as origin:
        origin.hold_after = 0
        with pytest.raises(errors.WeightsUnreachable, match="silent"):
            fetch.fetch(order(tmp_path, whole, parts(whole, nbytes=200_000), origin.url), watch)


def test_a_stop_ends_a_silent_fetch(tmp_path: Path) -> None:
    whole = content(nbytes=200_000)
    every = parts(whole, nbytes=200_000)
    with serving(whole) as origin:
        origin.hold_after = 1_000_000
        came = [0]
        watch = replace(
            QUICK,
            progress=lambda _phase, done, _total: came.append(done),
            should_stop=lambda: came[-1] >= 1_000_000,
        )
        with pytest.raises(Stopped):
            fetch.fetch(order(tmp_path, whole, every, origin.url), watch)
        origin.hold_after = None
        origin.go_on.set()
        got = fetch.fetch(order(tmp_path, whole, every, origin.url), QUICK)
        assert got.fetched_bytes <= 4_000_000 * 1.001 - came[-1], "an ordered stop keeps what came"
        got.close()


def test_a_changed_file_without_digests_starts_again(tmp_path: Path) -> None:
    old, new = content(seed=1, nbytes=200_000), content(seed=2, nbytes=200_000)
    every = parts(old, nbytes=200_000, digests=False)
    with serving(old) as origin:
        origin.hold_after = 1_000_000
        came = [0]
        watch = replace(
            QUICK,
            progress=lambda _phase, done, _total: came.append(done),
            should_stop=lambda: came[-1] >= 1_000_000,
        )
        with pytest.raises(Stopped):
            fetch.fetch(order(tmp_path, old, every, origin.url), watch)
        origin.hold_after, origin.content, origin.etag = None, new, '"second"'
        origin.go_on.set()
        got = fetch.fetch(order(tmp_path, old, every, origin.url), QUICK)
        assert lies_there(got.path, new, every)
        got.close()


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    whole = content()
    mine = (*parts(whole)[:2], *parts(whole)[5:7])
    with serving(whole) as origin:

        def change(_request: BaseHTTPRequestHandler, _begin: int, _end: int) -> bool:
            origin.etag = '"second"'
            return False

        origin.faults = [None, None, change]
        with pytest.raises(errors.WeightsChanged, match="changed while"):
            fetch.fetch(order(tmp_path, whole, mine, origin.url), QUICK)


FETCH = """
import sys, msgspec
from pathlib import Path
from lensemble_node.worker.inference import fetch
order = msgspec.json.decode(sys.stdin.buffer.read(), type=fetch.Order,
                            dec_hook=lambda kind, text: kind(text))
def progress(phase, done, total):
    print(phase, done, flush=True)
try:
    fetch.fetch(order, fetch.Watch(progress=progress)).close()
except Exception as error:
    print(error.code, flush=True)
"""


def _start(wanted: Order) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", FETCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(wanted, enc_hook=str))
    child.stdin.close()
    return child


@pytest.mark.parametrize("share", [0.5, 0.93])
def test_killed_half_way_little_is_fetched_twice(tmp_path: Path, share: float) -> None:
    sizes = {"tensors": 4, "nbytes": 4_000_000}
    whole = content(**sizes)
    every = parts(whole, **sizes)
    total = sum(each.nbytes for each in every)
    with serving(whole) as origin:
        origin.hold_after = int(total * share)
        child = _start(order(tmp_path, whole, every, origin.url))
        assert origin.held.wait(60)
        assert child.stdout is not None
        received = 0
        while received < origin.sent * 0.99:
            received = int(child.stdout.readline().split()[1])
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        origin.hold_after = None
        origin.go_on.set()
        got = fetch.fetch(order(tmp_path, whole, every, origin.url), QUICK)
        assert lies_there(got.path, whole, every)
        twice = (got.fetched_bytes - (total - received)) / total
        print(f"killed at {received / total:.1%}, fetched twice {twice:.2%}")
        assert twice <= 0.05
        got.close()


def test_what_a_crash_left_damaged_is_fetched_once_more(tmp_path: Path) -> None:
    sizes = {"tensors": 4, "nbytes": 400_000}
    whole = content(**sizes)
    every = parts(whole, **sizes)
    with serving(whole) as origin:
        came = [0]
        watch = replace(
            QUICK,
            progress=lambda _phase, done, _total: came.append(done),
            should_stop=lambda: came[-1] > 500_000,
        )
        origin.hold_after = 700_000
        with pytest.raises(Stopped):
            fetch.fetch(order(tmp_path, whole, every, origin.url), watch)
        origin.hold_after = None
        origin.go_on.set()
        (there,) = tmp_path.glob(f"*/{TENSORS}")
        with there.open("r+b") as file:  # one byte of a whole tensor, one of a part
            for at in (every[0].offset + 7, every[1].offset + 7):
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1]))
        got = fetch.fetch(order(tmp_path, whole, every, origin.url), QUICK)
        assert lies_there(got.path, whole, every)
        assert got.fetched_bytes > 1_600_000 - 400_000, "the damaged beginning came again"
        got.close()


def test_a_journal_with_torn_lines_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = content()
    every = parts(whole)
    with serving(whole) as origin:
        fetch.fetch(order(tmp_path, whole, every, origin.url), QUICK).close()
        (there,) = tmp_path.glob("*/journal")
        text = there.read_bytes()
        for cut in range(0, len(text), 97):
            there.write_bytes(text[:cut])
            got = fetch.fetch(order(tmp_path, whole, every, origin.url), QUICK)
            assert lies_there(got.path, whole, every)
            got.close()
            assert there.read_bytes()[:cut] == text[:cut]


def test_two_workers_fetch_a_shared_tensor_once(tmp_path: Path) -> None:
    sizes = {"tensors": 4, "nbytes": 1_000_000}
    whole = content(**sizes)
    every = parts(whole, **sizes)
    with serving(whole) as origin:
        origin.hold_after = 1_500_000
        child = _start(order(tmp_path, whole, every[:3], origin.url, of_all=every))
        assert origin.held.wait(60)
        origin.hold_after = None
        seen: list[int] = []

        def progress(_phase: str, done: int, _total: int) -> None:
            seen.append(done)
            if done == every[3].nbytes:  # its own is here; the rest is the other's to fetch
                origin.go_on.set()

        mine = order(tmp_path, whole, every[2:], origin.url, of_all=every)
        got = fetch.fetch(mine, replace(QUICK, progress=progress))
        assert lies_there(got.path, whole, every[2:])
        assert got.fetched_bytes == every[3].nbytes
        got.close()
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait(60) == 0
        assert origin.sent <= 1.02 * sum(each.nbytes for each in every)


def test_what_another_worker_gave_up_is_taken_over(tmp_path: Path) -> None:
    sizes = {"tensors": 4, "nbytes": 1_000_000}
    whole = content(**sizes)
    every = parts(whole, **sizes)
    with serving(whole) as origin:
        origin.hold_after = 1_500_000
        child = _start(order(tmp_path, whole, every[:3], origin.url, of_all=every))
        assert origin.held.wait(60)
        origin.hold_after = None

        def progress(_phase: str, done: int, _total: int) -> None:
            if done >= every[3].nbytes:
                child.kill()

        mine = order(tmp_path, whole, every[2:], origin.url, of_all=every)
        got = fetch.fetch(mine, replace(QUICK, progress=progress))
        assert lies_there(got.path, whole, every[2:])
        got.close()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_a_full_disk_has_a_name_and_marks_nothing(tmp_path: Path) -> None:
    whole = content()
    every = parts(whole)
    with serving(whole) as origin:
        child = _start(order(tmp_path, whole, every, origin.url))
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        assert child.stdout is not None
        said = child.stdout.read().split()
        child.stdout.close()
        child.wait()
        assert said[-1] == b"weights_disk_full", said
        assert sum(held.tensors for held in Cache(tmp_path).held()) == 0
        got = fetch.fetch(order(tmp_path, whole, every, origin.url), QUICK)
        assert lies_there(got.path, whole, every)
        got.close()


def in_place(path: Path, cache: Path) -> Order:
    model = models.with_digests(models.read(str(path)), cache / "digests")
    return Order(
        facts=model.facts,
        manifest_digest=model.digest,
        tensors=tensors_for(model.facts, model.tensors, 1, 3),
        source="path",
        place=str(path),
        cache_dir=cache,
    )


def test_a_file_of_the_node_is_used_where_it_lies(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    whole = path.read_bytes()
    wanted = in_place(path, tmp_path / "cache")
    seen: list[str] = []
    got = fetch.fetch(wanted, Watch(progress=lambda phase, _done, _total: seen.append(phase)))
    assert (got.path, got.fetched_bytes) == (path, 0)
    assert "verifying" in seen
    got.close()
    assert not list(tmp_path.glob(f"cache/*/{TENSORS}"))
    last = wanted.tensors[-1]
    at = last.offset + last.nbytes - 1
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(errors.WeightsDigestMismatch, match=last.name):
        fetch.fetch(wanted)
    path.write_bytes(whole + b"!")
    with pytest.raises(errors.WeightsChanged):
        fetch.fetch(wanted)
    path.unlink()
    with pytest.raises(errors.WeightsUnreachable):
        fetch.fetch(wanted)


def test_a_path_to_anything_but_the_model_is_refused_without_a_word_of_it(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    wanted = in_place(path, tmp_path / "cache")
    secret = tmp_path / "secret"
    secret.write_bytes(b"attack at dawn".ljust(path.stat().st_size))
    other = write_tiny(tmp_path / "other.gguf", layers=5)
    shown = replace(wanted.tensors[0], offset=0, nbytes=1, digest=None)
    for bad in (
        replace(wanted, place=str(secret)),
        replace(wanted, place=str(secret), tensors=(shown,)),
        replace(wanted, place=str(other)),
        replace(wanted, tensors=(shown,)),
        replace(wanted, place=str(tmp_path)),
        replace(wanted, place="/dev/zero"),
    ):
        with pytest.raises((errors.WeightsChanged, errors.WeightsUnreachable)) as raised:
            fetch.begin(bad)
        assert "attack" not in raised.value.message
        assert str(path.stat().st_size) not in raised.value.message


def test_a_url_of_no_model_is_not_read(tmp_path: Path) -> None:
    whole = b"root:x:0:0:" + content()[11:]
    with serving(whole) as origin:
        with pytest.raises(errors.WeightsChanged, match="no GGUF") as raised:
            fetch.fetch(order(tmp_path, whole, parts(whole, digests=False), origin.url), QUICK)
        assert "root" not in raised.value.message
        assert origin.sent == 4


def test_an_edge_brings_what_was_asked_for_in_order(tmp_path: Path) -> None:
    whole = content()
    every = parts(whole)
    wanted = order(tmp_path, whole, every, "", source="edge")
    intake = fetch.begin(wanted)
    assert intake.ranges == ((every[0].offset, len(whole) - every[0].offset - 16),)
    for begin, length in intake.ranges:
        for at in range(begin, begin + length, 4_096):
            intake.take(at, memoryview(whole[at : min(at + 4_096, begin + length)]))
    got = intake.finish()
    assert lies_there(got.path, whole, every)
    got.close()


@pytest.mark.parametrize("offset", [-1, 0, 9, 11, 10_017])
def test_an_edge_that_brings_something_else_is_refused(tmp_path: Path, offset: int) -> None:
    whole = content()
    every = parts(whole)
    intake = fetch.begin(order(tmp_path, whole, every, "", source="edge"))
    at = every[0].offset
    intake.take(at, memoryview(whole[at : at + 10]))
    with pytest.raises(errors.WeightsUnasked):
        intake.take(at + offset, memoryview(whole[at : at + 10]))
    with pytest.raises(errors.WeightsUnasked, match="early"):
        intake.finish()
    intake.close()


def test_the_limit_of_the_cache_prunes_what_nobody_uses(tmp_path: Path) -> None:
    first, second, third = (content(seed=seed) for seed in (1, 2, 3))
    room = 520_000

    def get(whole: bytes) -> fetch.Weights:
        return fetch.fetch(
            order(tmp_path, whole, parts(whole), origin.url, cache_bytes=room), QUICK
        )

    with serving(first) as origin:
        kept = get(first)
        origin.content, origin.etag = second, '"2"'
        get(second).close()
        origin.content, origin.etag = third, '"3"'
        get(third).close()
        names = [each.identity for each in Cache(tmp_path).held()]
        assert len(names) == 2, "the one that nobody used went"
        assert kept.path.parent.name in names, "the one in use stayed, although it is the oldest"
        origin.content, origin.etag = second, '"2"'
        tight = order(tmp_path, second, parts(second), origin.url, cache_bytes=250_000)
        with pytest.raises(errors.WeightsCacheFull):
            fetch.fetch(tight, QUICK)
        kept.close()


def test_tensors_outside_the_file_or_over_each_other_are_refused(tmp_path: Path) -> None:
    whole = content()
    one, two, *_ = parts(whole)
    for bad in (
        (one, replace(two, offset=one.offset + 1)),
        (replace(one, nbytes=len(whole)),),
        (replace(one, nbytes=0),),
    ):
        with pytest.raises(errors.ModelFileError):
            fetch.begin(order(tmp_path, whole, bad, "", source="edge"))
    assert not list(tmp_path.iterdir())


def test_digests_tell_models_with_the_same_header_apart(tmp_path: Path) -> None:
    old, new = content(seed=1), content(seed=2)
    with serving(old) as origin:
        a = fetch.fetch(order(tmp_path, old, parts(old), origin.url), QUICK)
        origin.content = new
        b = fetch.fetch(order(tmp_path, new, parts(new), origin.url), QUICK)
        assert a.path != b.path
        assert blake3(a.path.read_bytes()).digest() != blake3(b.path.read_bytes()).digest()
        a.close()
        b.close()
