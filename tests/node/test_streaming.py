"""A data set several times the memory of the process that trains on it."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

ROOT = Path(__file__).parents[2]
SIDE, EPISODES, ROWS = 64, 50, 1000
RAW_BYTES = EPISODES * ROWS * SIDE * SIDE * 3
LIMIT_BYTES = 160 << 20


def columns(episode: int) -> dict[str, np.ndarray]:
    draw = np.random.Generator(np.random.Philox(episode))
    shades = (np.arange(ROWS) % 200).astype(np.uint8)
    return {
        "pixels": np.broadcast_to(shades[:, None, None, None], (ROWS, SIDE, SIDE, 3)),
        "state": draw.normal(size=(ROWS, 4)).astype(np.float32),
        "action": draw.normal(size=(ROWS, 2)).astype(np.float32),
    }


SHAPES = {"pixels": (SIDE, SIDE, 3), "state": (4,), "action": (2,)}


def flat(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        for key, shape in SHAPES.items():
            file.create_dataset(
                key, (EPISODES * ROWS, *shape), "u1" if key == "pixels" else "f4",
                chunks=(20, *shape), compression="lzf",
            )  # fmt: skip
        for episode in range(EPISODES):
            for key, values in columns(episode).items():
                file[key][episode * ROWS : (episode + 1) * ROWS] = values
        file["ep_len"] = np.full(EPISODES, ROWS)
        file["ep_offset"] = np.arange(EPISODES) * ROWS
    return path


def chunked(path: Path) -> Path:
    root = zarr.open_group(str(path), mode="w", zarr_format=2)
    data = root.create_group("data")
    for key, shape in SHAPES.items():
        dtype = "u1" if key == "pixels" else "f4"
        data.create_array(key, shape=(EPISODES * ROWS, *shape), dtype=dtype, chunks=(100, *shape))
    for episode in range(EPISODES):
        for key, values in columns(episode).items():
            data[key][episode * ROWS : (episode + 1) * ROWS] = values
    ends = (np.arange(EPISODES) + 1) * ROWS
    root.create_group("meta").create_array("episode_ends", data=ends)
    return path


@pytest.mark.soak
def test_what_is_larger_than_memory_is_trained_on_and_committed_to(tmp_path: Path) -> None:
    roots = set()
    for path in (flat(tmp_path / "d.h5"), chunked(tmp_path / "z")):
        done = subprocess.run(
            [sys.executable, "-m", "tests.node.draw_under_limit", str(path), str(LIMIT_BYTES)],
            cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        print(path.name, told, f"data {RAW_BYTES >> 20} MiB, limit {LIMIT_BYTES >> 20} MiB")
        assert told["grown"] < LIMIT_BYTES < RAW_BYTES // 3
        roots.add(told["root"])
    assert len(roots) == 1
