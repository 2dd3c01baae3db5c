"""What a node tells of how far others are."""

from typing import cast

from lensemble.ids import NodeId
from lensemble.transport.driver import Link, LinkFacts
from lensemble.wire.stages import MAX_LINKED
from lensemble_node.link_figures import LinkFigures


class Wire:
    """As much of a link as is looked at."""

    def __init__(self, number: int, rtt_ms: float | None) -> None:
        self.peer = NodeId(f"{number:064x}")
        self.rtt_ms = rtt_ms

    def facts(self) -> LinkFacts:
        return LinkFacts("direct", "", self.rtt_ms, 0, 0)


def read(figures: LinkFigures, *wires: Wire) -> dict[int, int]:
    told = figures.read(cast("list[Link]", list(wires)))
    return {int(node, 16): rtt_us for node, rtt_us in told}


def test_a_link_that_was_not_measured_is_left_out() -> None:
    assert read(LinkFigures(), Wire(2, 3.0), Wire(1, None), Wire(3, 0.0)) == {2: 3000, 3: 0}


def test_a_time_is_told_again_when_it_has_moved_and_not_for_noise() -> None:
    figures = LinkFigures()
    assert read(figures, Wire(1, 20.0), Wire(2, 1.0)) == {1: 20_000, 2: 1000}
    assert read(figures, Wire(1, 24.0), Wire(2, 1.9)) == {1: 20_000, 2: 1000}
    assert read(figures, Wire(1, 26.0), Wire(2, 2.5)) == {1: 26_000, 2: 2500}
    assert read(figures, Wire(1, 22.0)) == {1: 26_000}
    assert read(figures, Wire(2, 1.5)) == {2: 1500}


def test_of_many_the_nearest_are_told_in_order_of_their_ids() -> None:
    wires = [Wire(number, float(1000 - number)) for number in range(MAX_LINKED + 5)]
    told = list(read(LinkFigures(), *wires))
    assert told == list(range(5, MAX_LINKED + 5))
