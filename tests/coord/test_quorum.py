from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble.ids import NodeId
from lensemble_coord.training import quorum
from lensemble_coord.training.quorum import Enough, NotYet, TooFew


def nodes(letters: str) -> frozenset[NodeId]:
    return frozenset(NodeId(letter) for letter in letters)


SETS = st.sets(st.sampled_from("abcdefg")).map(lambda s: nodes("".join(s)))


@pytest.mark.parametrize(
    ("asked", "bound", "hurry", "verdict"),
    [
        ("", "", False, NotYet("waiting for 2 more participants (have 0, quorum 2)")),
        ("", "", True, NotYet("waiting for 2 more participants (have 0, quorum 2)")),
        ("a", "a", False, NotYet("waiting for 1 more participant (have 1, quorum 2)")),
        ("a", "a", True, NotYet("waiting for 1 more participant (have 1, quorum 2)")),
        ("ab", "b", False, NotYet("waiting for 1 of 2 asked to bind (have 1, quorum 2)", ("a",))),
        (
            "cab",
            "cb",
            False,
            NotYet("waiting for 1 of 3 asked to bind (have 2, quorum 2)", ("a",), sufficient=True),
        ),
        ("cab", "cb", True, Enough(("b", "c"))),
        ("ba", "ba", False, Enough(("a", "b"))),
    ],
)
def test_to_collect(asked: str, bound: str, hurry: bool, verdict: quorum.Verdict) -> None:
    assert quorum.to_collect(2, nodes(asked), nodes(bound), hurry=hurry) == verdict


@pytest.mark.parametrize(
    ("verified", "late", "hurry", "verdict"),
    [
        ("", "abc", False, NotYet("waiting for 3 of 3 updates (have 0, quorum 2)", tuple("abc"))),
        ("ab", "c", False, NotYet("waiting for 1 of 3 updates (have 2, quorum 2)", ("c",), True)),
        ("ab", "c", True, Enough(("a", "b"))),
        ("ba", "", False, Enough(("a", "b"))),
        ("a", "", False, TooFew("only 1 of the 2 updates needed can arrive")),
        ("", "a", False, TooFew("only 1 of the 2 updates needed can arrive")),
        ("a", "bc", True, TooFew("only 1 of the 2 updates needed can arrive, 2 too late")),
        ("", "", False, TooFew("only 0 of the 2 updates needed can arrive")),
    ],
)
def test_to_aggregate(verified: str, late: str, hurry: bool, verdict: quorum.Verdict) -> None:
    assert quorum.to_aggregate(2, nodes(verified), nodes(late), hurry=hurry) == verdict


@pytest.mark.parametrize(
    ("shared", "due", "hurry", "verdict"),
    [
        (
            "",
            "cab",
            False,
            NotYet("waiting for the mask shares of 3 of 3 bound (have 0, need 2)", tuple("abc")),
        ),
        (
            "ab",
            "c",
            False,
            NotYet("waiting for the mask shares of 1 of 3 bound (have 2, need 2)", ("c",), True),
        ),
        ("ab", "c", True, Enough(("a", "b"))),
        ("ba", "", False, Enough(("a", "b"))),
        ("a", "", False, TooFew("only 1 of the 2 participants needed can exchange shares")),
        ("a", "bc", True, TooFew("only 1 of the 2 participants needed can exchange shares")),
    ],
)
def test_to_share(shared: str, due: str, hurry: bool, verdict: quorum.Verdict) -> None:
    assert quorum.to_share(2, nodes(shared), nodes(due), hurry=hurry) == verdict


NONE_OF_TWO = "only 1 of the 2 unmasking answers needed can arrive; nothing was revealed"


@pytest.mark.parametrize(
    ("answered", "due", "hurry", "verdict"),
    [
        (
            "b",
            "ca",
            False,
            NotYet(
                "waiting for the unmasking answers of 2 of 3 survivors (have 1, threshold 2)",
                tuple("ac"),
            ),
        ),
        (
            "ab",
            "c",
            False,
            NotYet(
                "waiting for the unmasking answers of 1 of 3 survivors (have 2, threshold 2)",
                ("c",),
                True,
            ),
        ),
        ("ab", "c", True, Enough(("a", "b"))),
        ("ba", "", False, Enough(("a", "b"))),
        ("a", "", False, TooFew(NONE_OF_TWO)),
        ("a", "bc", True, TooFew(NONE_OF_TWO)),
    ],
)
def test_to_unmask(answered: str, due: str, hurry: bool, verdict: quorum.Verdict) -> None:
    assert quorum.to_unmask(2, nodes(answered), nodes(due), hurry=hurry) == verdict


@pytest.mark.parametrize("decide", [quorum.to_share, quorum.to_unmask])
@given(k=st.integers(1, 8), done=SETS, others=SETS, hurry=st.booleans())
def test_masks_never_go_on_below_what_they_need(
    decide: Callable[..., quorum.Verdict],
    k: int,
    done: frozenset[NodeId],
    others: frozenset[NodeId],
    hurry: bool,
) -> None:
    due = others - done
    possible = len(done) + (0 if hurry else len(due))
    match decide(k, done, due, hurry=hurry):
        case TooFew():
            assert possible < k
        case Enough(nodes=chosen):
            assert list(chosen) == sorted(done)
            assert len(done) >= k
            assert hurry or not due
        case NotYet(on=on, sufficient=sufficient):
            assert not hurry
            assert possible >= k
            assert list(on) == sorted(due)
            assert sufficient == (len(done) >= k)


@given(k=st.integers(1, 8), asked=SETS, bound=SETS, hurry=st.booleans())
def test_to_collect_goes_on_exactly_with_a_quorum(
    k: int, asked: frozenset[NodeId], bound: frozenset[NodeId], hurry: bool
) -> None:
    verdict = quorum.to_collect(k, asked, bound, hurry=hurry)
    goes_on = len(bound) >= k and (hurry or asked <= bound)
    assert isinstance(verdict, Enough) == goes_on
    if isinstance(verdict, Enough):
        assert list(verdict.nodes) == sorted(bound)
    else:
        assert set(verdict.on) == asked - bound
        assert verdict.sufficient == (len(bound) >= k)
        assert list(verdict.on) == sorted(verdict.on)


@given(k=st.integers(1, 8), verified=SETS, others=SETS, hurry=st.booleans())
def test_to_aggregate_never_gives_up_what_can_still_succeed(
    k: int, verified: frozenset[NodeId], others: frozenset[NodeId], hurry: bool
) -> None:
    late = others - verified
    verdict = quorum.to_aggregate(k, verified, late, hurry=hurry)
    possible = len(verified) + (0 if hurry else len(late))
    match verdict:
        case TooFew():
            assert possible < k
        case Enough(nodes=chosen):
            assert list(chosen) == sorted(verified)
            assert len(verified) >= k
            assert hurry or not late
        case NotYet(on=on):
            assert not hurry
            assert possible >= k
            assert set(on) == late


@given(SETS, SETS, SETS, st.integers(0, 8))
def test_counts_alone_say_that_a_round_waits_only_where_names_do(
    expected: frozenset[NodeId], settled: frozenset[NodeId], gone: frozenset[NodeId], need: int
) -> None:
    have = (settled & expected) - gone
    due = expected - have - gone
    if quorum.surely_waits(need, len(have), len(expected) - len(gone)):
        for decide in (quorum.to_share, quorum.to_unmask, quorum.to_aggregate):
            assert isinstance(decide(need, have, due, hurry=False), NotYet)
