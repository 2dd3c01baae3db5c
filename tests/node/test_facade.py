from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from lensemble import blob, identity
from lensemble.errors import AdmissionRefused, ConfigError, ContractViolation, GaugeError
from lensemble.transport.driver import PeerAddress
from lensemble.wire import messages
from lensemble.workload import layout
from lensemble_node.facade import Participant
from tests.node.scripted import COORDINATOR, WORKLOAD, Session, Stage, stage


def participant(s: Stage) -> Participant:
    config = s.config()
    config.state_dir.mkdir(exist_ok=True)
    who = identity.load_or_create(config.state_dir / "identity.key")
    return Participant(config, participant_id=who.node, transport=s.network.driver(who.node))


async def welcome_next(s: Stage) -> None:
    session = await s.session()
    flat = session.digest
    await session.welcome(last=messages.LastRecord(round=-1, digest=flat, contributors=()))


async def test_a_participant_joins_and_releases_what_its_worker_would(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        one = participant(s)
        s.nursery.start_soon(welcome_next, s)
        state = await one.introduce(PeerAddress(COORDINATOR, s.driver.addresses()))
        assert (state.round_index, state.config_hash) == (0, WORKLOAD.digest)
        released = one.local_round(state, state.sketch_seed)
        again = one.local_round(state, state.sketch_seed)
        assert released.digest == again.digest
        assert released.field.dtype == np.uint32
        assert released.field.shape == (layout(WORKLOAD).size,)
        words = memoryview(released.field.tobytes())
        assert blob.update_digest(layout(WORKLOAD), [words]) == released.digest
        # The daemon's worker, on the same directory and round, sends the very same bytes.
        await s.start_node()
        session = await s.joined()
        assert np.array_equal(await session.whole_round(), released.field)


async def test_a_seed_or_state_of_another_round_is_refused(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        one = participant(s)
        s.nursery.start_soon(welcome_next, s)
        state = await one.introduce(PeerAddress(COORDINATOR, s.driver.addresses()))
        with pytest.raises(GaugeError, match="sketch seed"):
            one.local_round(state, state.sketch_seed + 1)
        foreign = msgspec.structs.replace(state, config_hash="0" * 64)
        with pytest.raises(ContractViolation, match="this participant joined"):
            one.local_round(foreign, state.sketch_seed)


async def test_a_refusal_is_raised(tmp_path: Path) -> None:
    async def refuse(s: Stage) -> None:
        session: Session = await s.session()
        await session.hear(messages.Join)
        await session.say(messages.Refused(code="no", reason="not on the list", final=True))

    async with stage(tmp_path) as s:
        one = participant(s)
        s.nursery.start_soon(refuse, s)
        with pytest.raises(AdmissionRefused, match="not on the list"):
            await one.introduce(PeerAddress(COORDINATOR, s.driver.addresses()))


def test_another_identity_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with stage(tmp_path) as s:
            config = s.config()
            config.state_dir.mkdir()
            driver = s.network.driver(COORDINATOR)
            with pytest.raises(ConfigError, match="identity"):
                Participant(config, participant_id=COORDINATOR, transport=driver)

    trio.run(run)
