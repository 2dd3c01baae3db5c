"""The coordinator as a blocking object, with a node as a real process."""

from pathlib import Path

from lensemble import identity
from lensemble.state_dir import IDENTITY_NAME
from lensemble.transport.iroh_driver import IrohDriver
from lensemble_coord.config import AdmissionSection, CoordinatorConfig, RoundsSection
from lensemble_coord.facade import Coordinator
from lensemble_coord.training.outer_round import RoundState
from lensemble_local.processes import Daemon, started

ADDRESS = "127.0.0.1:7719"


def test_rounds_run_from_a_script_and_go_on_in_a_second_run(tmp_path: Path) -> None:
    (tmp_path / "workload.toml").write_text('[task]\nkind = "noop"\nparameters = 100\n')
    for name in ("hub", "node"):
        (tmp_path / name).mkdir(mode=0o700)
    hub = identity.load_or_create(tmp_path / "hub" / IDENTITY_NAME)
    node = identity.load_or_create(tmp_path / "node" / IDENTITY_NAME)
    config = CoordinatorConfig(
        state_dir=tmp_path / "hub",
        workload=tmp_path / "workload.toml",
        admission=AdmissionSection(allow=(node.node,)),
        rounds=RoundsSection(aggregation="plain", min_participants=1, max_attempts=50),
    )
    place = tmp_path / "node.toml"
    place.write_text(
        f'state_dir = "node"\n[coordinator]\nid = "{hub.node}"\naddresses = ["{ADDRESS}"]\n'
        "[share]\nplain = true\n[listen]\nreconnect_backoff_max_s = 0.5\n"
    )
    daemon = Daemon(
        "node", "lensemble_node", place, tmp_path / "node" / "ctl.sock", tmp_path / "node.log"
    )
    first = Coordinator(config, transport=IrohDriver(hub, (ADDRESS,)))
    start = first.global_state()
    assert (start.round_index, first.round_state()) == (0, RoundState.CLOSED)
    with started([daemon]):
        first.run(2)
        assert first.round_state() is RoundState.CLOSED
        after = first.global_state()
        assert after.round_index == 2
        assert after.digest != start.digest
        second = Coordinator(config, transport=IrohDriver(hub, (ADDRESS,)))
        second.run(1)
        assert second.global_state().round_index == 3
