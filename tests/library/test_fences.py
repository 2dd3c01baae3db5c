"""Every message of the protocol says whose it is and of when, or is listed here with the reason."""

from typing import get_args

import pytest

from lensemble.wire import circle, codec, fence, messages, stages
from tests.library.message_examples import example

BEFORE_A_SESSION = {messages.Join, messages.Refused}
"""The first word of a node, and the answer to a word that was not heard."""

OF_A_SESSION = {
    messages.Welcome,
    messages.Leave,
    messages.Provision,
    messages.Provisioned,
    messages.Teardown,
    messages.TornDown,
    messages.EdgeLost,
    stages.Inventory,
    stages.BurstExpect,
    stages.BurstSend,
    stages.BurstReady,
    stages.BurstTaken,
    stages.BurstRefused,
    circle.Circle,
    circle.MemberNote,
}
"""Fenced by federation and epoch; no round and no run is meant."""

KINDS = sorted(
    {*get_args(messages.FromNode), *get_args(messages.FromCoordinator)}, key=lambda k: k.__name__
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_carries_the_fence_of_what_it_is_about(kind: type) -> None:
    if kind in BEFORE_A_SESSION:
        return
    assert issubclass(kind, fence.Fenced), f"{kind.__name__} could be of any session"
    of_more = issubclass(kind, fence.OfRound | fence.OfRun)
    assert of_more or kind in OF_A_SESSION, f"{kind.__name__} could be of any round or run"
    fields = set(kind.__struct_fields__)
    assert {"federation", "epoch"} <= fields
    if issubclass(kind, fence.OfRound):
        assert {"round", "attempt"} <= fields


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_of_every_message_passes_the_codec(kind: type) -> None:
    made = example(kind)
    payload = codec.encode(made)
    if kind in get_args(messages.FromNode):
        assert codec.decode_from_node(payload) == made
    else:
        assert codec.decode_from_coordinator(payload) == made
