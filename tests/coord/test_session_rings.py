"""What a session holds of the coordinator's arena, and how long it waits for it."""

import pytest
import trio

from lensemble.edge.arena import PAGE_BYTES, Arena
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import EdgeFault
from lensemble.ids import EdgeId, NodeId
from lensemble.transport.ends import ArenaLeases
from lensemble_coord.training import session

SPECS = [
    EdgeSpec(EdgeId(each), NodeId("a" * 64), NodeId("b" * 64), PAGE_BYTES, 1) for each in (1, 2)
]


async def test_a_session_says_why_it_gets_no_rings(autojump_clock: object) -> None:
    leases = ArenaLeases(Arena.create(3 * PAGE_BYTES))
    async with session.leased(leases, *SPECS):
        began = trio.current_time()
        with pytest.raises(EdgeFault, match=r"within 30 s: raise `edges\.arena_bytes`"):
            async with session.leased(leases, *SPECS):
                pass
        assert trio.current_time() - began == pytest.approx(session.LEASE_WITHIN_S)
        assert leases.arena.leased_bytes() == 2 * PAGE_BYTES
    assert leases.arena.leased_bytes() == 0
