"""The node's configuration, and the file that ships it."""

import re
from pathlib import Path

import pytest

from lensemble.config import commented, load, validate
from lensemble.errors import ConfigError
from lensemble_node.config import TITLE, NodeConfig

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_shipped_file_lists_every_key_at_its_default(tmp_path: Path) -> None:
    text = (CONFIGS / "node.toml").read_text()
    assert text == commented(NodeConfig, TITLE), "run `make configs`"
    active = tmp_path / "node.toml"
    active.write_text(re.sub(r"(?m)^#(?=[a-z_]+ = )", "", text))
    silent = tmp_path / "silent.toml"
    silent.write_text("")
    assert load(active, NodeConfig) == load(silent, NodeConfig)
    for table, field in NodeConfig.model_fields.items():
        assert re.search(rf"(?m)^(#{table} = |\[{table}\])", text)
        for key in getattr(field.annotation, "model_fields", {}):
            assert f"\n#{key} = " in text


def test_the_loopback_file_loads() -> None:
    config = load(CONFIGS / "loopback" / "node.toml", NodeConfig)
    assert config.socket_path == config.state_dir / "ctl.sock"


@pytest.mark.parametrize(
    ("tree", "part"),
    [
        ({"coordinator": {"id": "a" * 64}}, "both id and addresses"),
        ({"coordinator": {"id": "A" * 64, "addresses": ["127.0.0.1:1"]}}, "coordinator.id"),
        ({"coordinator": {"id": "a" * 64, "addresses": ["host:1"]}}, "not an IP address"),
        ({"listen": {"reconnect_backoff_s": 60.0}}, "reconnect_backoff_max_s"),
        ({"worker": {"restart_backoff_s": 60.0}}, "restart_backoff_max_s"),
        ({"worker": {"niceness": -1}}, "worker.niceness = -1"),
        ({"data": {"pth": "x"}}, "did you mean `path`?"),
        ({"expected_config_hash": "zz"}, "expected_config_hash"),
    ],
)
def test_what_is_refused(tree: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(tree, NodeConfig, path=Path("node.toml"))
    assert part in caught.value.message
