"""The coordinator's configuration, and the file that ships it."""

import re
from pathlib import Path

import pytest

from lensemble.config import commented, load, validate
from lensemble.errors import ConfigError
from lensemble_coord.config import TITLE, CoordinatorConfig, EdgesSection

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_shipped_file_lists_every_key_at_its_default(tmp_path: Path) -> None:
    text = (CONFIGS / "coord.toml").read_text()
    assert text == commented(CoordinatorConfig, TITLE), "run `make configs`"
    active = tmp_path / "coord.toml"
    active.write_text(re.sub(r"(?m)^#(?=[a-z_]+ = )", "", text))
    silent = tmp_path / "silent.toml"
    silent.write_text("")
    assert load(active, CoordinatorConfig) == load(silent, CoordinatorConfig)
    for table, field in CoordinatorConfig.model_fields.items():
        assert re.search(rf"(?m)^(#{table} = |\[{table}\])", text)
        for key in getattr(field.annotation, "model_fields", {}):
            assert f"\n#{key} = " in text


def test_the_loopback_file_loads() -> None:
    config = load(CONFIGS / "loopback" / "coord.toml", CoordinatorConfig)
    assert config.workload.resolve() == CONFIGS / "workloads" / "arm.toml"


def test_the_socket_is_in_the_state_directory_unless_named() -> None:
    assert CoordinatorConfig(state_dir=Path("/s")).socket_path == Path("/s/ctl.sock")
    named = validate({"ctl": {"socket": "/run/x.sock"}}, CoordinatorConfig, path=Path("f"))
    assert named.socket_path == Path("/run/x.sock")


@pytest.mark.parametrize(
    ("tree", "part"),
    [
        ({"rounds": {"min_participants": 2}}, "allow_two_party"),
        ({"rounds": {"aggregation": "tee"}}, "rounds.aggregation"),
        ({"rounds": {"min_participants": 9, "max_participants": 4}}, "admits no quorum of 9"),
        ({"rounds": {"retry_backoff_s": 60}}, "retry_backoff_max_s"),
        ({"listen": {"heartbeat_s": 2.0}}, "two heartbeats"),
        ({"listen": {"addresses": []}}, "listen.addresses"),
        ({"listen": {"addresses": ["localhost:1"]}}, "not an IP address"),
        ({"listen": {"addresses": ["127.0.0.1"]}}, "host:port"),
        ({"listen": {"addresses": ["::1:7707"]}}, "brackets"),
        ({"listen": {"addresses": ["127.0.0.1:70000"]}}, "host:port"),
        ({"listen": {"addresses": ["127.0.0.1:1", "127.0.0.2:2"]}}, "more than one IPv4"),
        ({"admission": {"allow": ["abc"]}}, "admission.allow.0"),
        ({"edges": {"slots": 64, "capacity_bytes": 1 << 26}}, "more than arena_bytes"),
        ({"edges": {"capacity_bytes": 100}}, "neither 0 nor at least 4096"),
        ({"name": ""}, "name"),
        ({"log": {"level": "loud"}}, "log.level"),
    ],
)
def test_what_is_refused(tree: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(tree, CoordinatorConfig, path=Path("coord.toml"))
    assert part in caught.value.message


def test_the_quorum_is_the_larger_bound() -> None:
    tree = {"rounds": {"min_participants": 2, "secure_agg_threshold": 5}}
    assert validate(tree, CoordinatorConfig, path=Path("c")).rounds.quorum == 5


@pytest.mark.parametrize(
    ("edges", "nodes", "chunk_bytes"),
    [
        ({}, 4, 1 << 20),
        ({}, 64, 1 << 20),
        ({}, 65, 1 << 19),
        ({}, 4096, 1 << 18),
        ({"arena_bytes": 1 << 24}, 8, 1 << 19),
        ({"capacity_bytes": 5000}, 4, 5000),
    ],
)
def test_chunks_are_large_where_few_nodes_share_the_memory(
    edges: dict[str, int], nodes: int, chunk_bytes: int
) -> None:
    assert EdgesSection.model_validate(edges).chunk_bytes(nodes) == chunk_bytes
