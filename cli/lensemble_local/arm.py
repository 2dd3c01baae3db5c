"""Demo and test data: a torque-driven two-link arm in a vertical plane, different on every node.

Participants differ in gravity, masses, damping, gears, policy and in how their actions are wired
to the joints.  One arm, two engines: MuJoCo, and a numpy integrator of the same equations (same
capsule inertias, same Runge-Kutta steps), so that tests need no physics package.
Observations: sine and cosine of both joint angles, velocities over 6 rad/s.  Written as HDF5 in
the robomimic layout.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lensemble.seeds import derive

Floats: TypeAlias = NDArray[np.float64]
Engine = Literal["mujoco", "numpy"]
Advance: TypeAlias = Callable[["Arm", Floats, Floats], Floats]

STEPS = 100
INTERVAL_S = 0.05
SUBSTEPS = 5
LINK_M = 0.5
RADIUS_M = 0.03
VELOCITY_SCALE = 6.0
MAX_NODES = 64
MAX_EPISODES = 10_000
MAX_PIXELS = 512

POLICIES = ("noise", "reach", "sines", "bang")


@dataclass(frozen=True)
class Arm:
    """One embodiment.  ``wiring`` maps a recorded action to joint controls and is its own inverse.

    Gravity in m/s2, masses in kg, damping in N m s, gears in N m at control 1.
    """

    name: str
    gravity: float
    masses: tuple[float, float]
    damping: float
    gears: tuple[float, float]
    policy: str
    order: tuple[int, int] = (0, 1)
    signs: tuple[float, float] = (1.0, 1.0)

    def wired(self, controls: Floats) -> Floats:
        """Controls (n, 2) in joint order to recorded actions, and back."""
        ordered: Floats = controls[:, list(self.order)] * np.array(self.signs)
        return ordered


PARTICIPANTS = (
    Arm("p0", 9.81, (1.0, 1.0), 0.10, (6.0, 3.0), "noise"),
    Arm("p1", 3.7, (1.0, 0.5), 0.05, (4.0, 2.0), "reach", order=(1, 0)),
    Arm("p2", 9.81, (1.0, 2.0), 0.10, (9.0, 5.0), "sines", signs=(1.0, -1.0)),
    Arm("p3", 16.0, (0.7, 0.7), 0.40, (7.0, 4.0), "bang", signs=(-1.0, 1.0)),
)
UNSEEN = Arm("new", 6.5, (1.2, 0.8), 0.20, (6.0, 3.0), "mix")
PUBLIC = Arm("pub", 9.81, (1.0, 1.0), 0.15, (6.0, 3.0), "mix")


def participant(index: int, seed: int) -> Arm:
    """The arm of node ``index``: the table's four, then variations of them drawn from ``seed``."""
    base = PARTICIPANTS[index % len(PARTICIPANTS)]
    if index < len(PARTICIPANTS):
        return base
    draw = np.random.Generator(np.random.Philox(derive(seed, f"arm:{index}")))
    scale = draw.uniform(0.8, 1.25, 6).tolist()
    return replace(
        base,
        name=f"p{index}",
        gravity=base.gravity * scale[0],
        masses=(base.masses[0] * scale[1], base.masses[1] * scale[2]),
        damping=base.damping * scale[3],
        gears=(base.gears[0] * scale[4], base.gears[1] * scale[5]),
    )


# ---- physics ----


def _capsule_inertia(mass: float) -> float:
    """About the centre, across the axis, of a solid capsule of link length and radius."""
    cylinder = math.pi * RADIUS_M**2 * LINK_M
    balls = 4.0 / 3.0 * math.pi * RADIUS_M**3
    rod, caps = mass * cylinder / (cylinder + balls), mass * balls / (cylinder + balls)
    return rod * (LINK_M**2 / 12 + RADIUS_M**2 / 4) + caps * (
        2 * RADIUS_M**2 / 5 + LINK_M**2 / 4 + 3 * LINK_M * RADIUS_M / 8
    )


def _acceleration(arm: Arm, state: Floats, controls: Floats) -> Floats:
    """Joint accelerations (n, 2) of ``state`` (n, 4): angles from hanging down, then velocities."""
    first, second, speed1, speed2 = state.T
    mass1, mass2 = arm.masses
    centre = LINK_M / 2
    cross = mass2 * LINK_M * centre
    inertia2 = _capsule_inertia(mass2) + mass2 * centre**2
    inertia1 = _capsule_inertia(mass1) + mass1 * centre**2 + mass2 * LINK_M**2
    cosine, sine = np.cos(second), np.sin(second)
    m11 = inertia1 + inertia2 + 2 * cross * cosine
    m12 = inertia2 + cross * cosine
    outer = mass2 * centre * arm.gravity * np.sin(first + second)
    inner = (mass1 * centre + mass2 * LINK_M) * arm.gravity * np.sin(first)
    torque1 = arm.gears[0] * controls[:, 0] - arm.damping * speed1 - inner - outer
    torque2 = arm.gears[1] * controls[:, 1] - arm.damping * speed2 - outer
    torque1 = torque1 + cross * sine * (2 * speed1 * speed2 + speed2**2)
    torque2 = torque2 - cross * sine * speed1**2
    determinant = m11 * inertia2 - m12**2
    return np.stack(
        [
            (inertia2 * torque1 - m12 * torque2) / determinant,
            (m11 * torque2 - m12 * torque1) / determinant,
        ],
        axis=1,
    )


def advance_numpy(arm: Arm, state: Floats, controls: Floats) -> Floats:
    """One interval of ``state`` (n, 4) under constant ``controls`` (n, 2): Runge-Kutta substeps."""
    step = INTERVAL_S / SUBSTEPS

    def slope(at: Floats) -> Floats:
        return np.concatenate([at[:, 2:], _acceleration(arm, at, controls)], axis=1)

    for _ in range(SUBSTEPS):
        k1 = slope(state)
        k2 = slope(state + step / 2 * k1)
        k3 = slope(state + step / 2 * k2)
        k4 = slope(state + step * k3)
        state = state + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return state


_XML = """
<mujoco>
  <option timestep="{step}" integrator="RK4" gravity="0 0 -{gravity}">
    <flag contact="disable"/>
  </option>
  <worldbody>
    <body>
      <joint name="first" type="hinge" axis="0 -1 0" damping="{damping}"/>
      <geom type="capsule" fromto="0 0 0 0 0 -{link}" size="{radius}" mass="{mass1}"/>
      <body pos="0 0 -{link}">
        <joint name="second" type="hinge" axis="0 -1 0" damping="{damping}"/>
        <geom type="capsule" fromto="0 0 0 0 0 -{link}" size="{radius}" mass="{mass2}"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="first" gear="{gear1}" ctrllimited="true" ctrlrange="-1 1"/>
    <motor joint="second" gear="{gear2}" ctrllimited="true" ctrlrange="-1 1"/>
  </actuator>
</mujoco>
"""


def mujoco_engine(arm: Arm) -> Advance:
    """``advance_numpy`` by MuJoCo, from the extra ``demo``."""
    import mujoco  # noqa: PLC0415  # an extra; only this engine needs it

    text = _XML.format(
        step=INTERVAL_S / SUBSTEPS,
        gravity=arm.gravity,
        damping=arm.damping,
        link=LINK_M,
        radius=RADIUS_M,
        mass1=arm.masses[0],
        mass2=arm.masses[1],
        gear1=arm.gears[0],
        gear2=arm.gears[1],
    )
    model = mujoco.MjModel.from_xml_string(text)
    data = mujoco.MjData(model)

    def advance(_: Arm, state: Floats, controls: Floats) -> Floats:
        after = np.empty_like(state)
        for row in range(len(state)):
            data.qpos[:], data.qvel[:] = state[row, :2], state[row, 2:]
            data.ctrl[:] = controls[row]
            mujoco.mj_step(model, data, SUBSTEPS)
            after[row, :2], after[row, 2:] = data.qpos, data.qvel
        return after

    return advance


# ---- policies ----


@dataclass(frozen=True)
class _Plan:
    """All random choices of one episode, drawn before it runs."""

    start: Floats
    open_loop: Floats
    targets: Floats
    reach: bool


def _plan(arm: Arm, seed: int, label: str) -> _Plan:
    draw = np.random.Generator(np.random.Philox(derive(seed, f"arm:{arm.name}:{label}")))
    kind = POLICIES[draw.integers(len(POLICIES))] if arm.policy == "mix" else arm.policy
    start = np.concatenate([draw.uniform(-math.pi, math.pi, 2), draw.uniform(-1, 1, 2)])
    targets = np.repeat(draw.uniform(-2.5, 2.5, (STEPS // 25, 2)), 25, axis=0)
    return _Plan(start, _open_loop(kind, draw), targets, kind == "reach")


def _open_loop(kind: str, draw: np.random.Generator) -> Floats:
    match kind:
        case "noise":
            path, now = np.empty((STEPS, 2)), np.zeros(2)
            for row in path:
                now = 0.85 * now + 0.4 * draw.standard_normal(2)
                row[:] = now
            return np.clip(path, -1, 1)
        case "sines":
            time = np.arange(STEPS)[:, None] * INTERVAL_S
            rate, phase = draw.uniform(0.2, 1.2, 2), draw.uniform(0, 2 * math.pi, 2)
            waves: Floats = draw.uniform(0.4, 1.0, 2) * np.sin(2 * math.pi * rate * time + phase)
            return waves
        case "bang":
            holds = [
                np.repeat(draw.choice([-1.0, 1.0], (1, 2)), draw.integers(5, 16), axis=0)
                for _ in range(STEPS // 5)
            ]
            return np.concatenate(holds)[:STEPS]
        case _:
            return np.zeros((STEPS, 2))


def _controls(plans: list[_Plan], time: int, state: Floats) -> Floats:
    targets = np.stack([p.targets[time] for p in plans])
    error = np.remainder(targets - state[:, :2] + math.pi, 2 * math.pi) - math.pi
    reach = np.clip(1.5 * error - 0.3 * state[:, 2:], -1, 1)
    loop = np.stack([p.open_loop[time] for p in plans])
    return np.where(np.array([[p.reach] for p in plans]), reach, loop)


# ---- episodes and files ----


@dataclass(frozen=True)
class Episodes:
    """``states`` (n, STEPS + 1, 4) and recorded ``actions`` (n, STEPS, 2)."""

    states: Floats
    actions: Floats


def roll(arm: Arm, labels: list[str], *, engine: Engine, seed: int) -> Episodes:
    """One episode for each label; an episode depends on arm, seed and its label only."""
    advance = mujoco_engine(arm) if engine == "mujoco" else advance_numpy
    plans = [_plan(arm, seed, label) for label in labels]
    states = np.empty((len(plans), STEPS + 1, 4))
    actions = np.empty((len(plans), STEPS, 2))
    states[:, 0] = np.stack([p.start for p in plans])
    for time in range(STEPS):
        controls = _controls(plans, time, states[:, time])
        actions[:, time] = arm.wired(controls)
        states[:, time + 1] = advance(arm, states[:, time], controls)
    return Episodes(states, actions)


def observations(states: Floats) -> dict[str, NDArray[np.float32]]:
    """Stored columns of ``states`` (..., 4): ``angles`` (..., 4) and ``velocities`` (..., 2)."""
    sines, cosines = np.sin(states[..., :2]), np.cos(states[..., :2])
    angles = np.stack([sines[..., 0], cosines[..., 0], sines[..., 1], cosines[..., 1]], axis=-1)
    return {
        "angles": angles.astype(np.float32),
        "velocities": (states[..., 2:] / VELOCITY_SCALE).astype(np.float32),
    }


def pictures(states: Floats, side: int) -> NDArray[np.uint8]:
    """The arm drawn at each of ``states`` (n, 4): uint8 (n, side, side, 3).

    The channels are this state and the two before it, without which nothing moves in a picture.
    Lines are drawn by their distance, so that they need no graphics library.
    """
    first = np.stack([np.sin(states[:, 0]), -np.cos(states[:, 0])], axis=-1)
    both = states[:, 0] + states[:, 1]
    second = first + np.stack([np.sin(both), -np.cos(both)], axis=-1)
    axis = (np.arange(side) + 0.5) / side * 4.4 - 2.2
    cells = np.stack(np.meshgrid(axis, -axis), axis=-1).reshape(-1, 2)
    nearest = np.minimum(
        _distance(cells, np.zeros_like(first), first), _distance(cells, first, second)
    )
    shades = np.clip(1.5 - nearest / (4.4 / side), 0.0, 1.0) * 255.0
    drawn = shades.reshape(-1, side, side).astype(np.uint8)
    before = np.concatenate([drawn[:1], drawn[:-1]])
    earlier = np.concatenate([before[:1], before[:-1]])
    return np.stack([drawn, before, earlier], axis=-1)


def _distance(cells: Floats, start: Floats, end: Floats) -> Floats:
    """Of each cell (c, 2) from each segment ``start`` to ``end`` (n, 2): (n, c)."""
    along = end - start
    away = cells[None] - start[:, None]
    part = np.einsum("ncx,nx->nc", away, along) / np.square(along).sum(-1, keepdims=True)
    foot = np.clip(part, 0, 1)[..., None] * along[:, None]
    apart: Floats = np.sqrt(np.square(away - foot).sum(-1))
    return apart


def write(path: Path, arm: Arm, episodes: Episodes, engine: Engine, side: int = 0) -> None:
    """``episodes`` as a robomimic-layout HDF5 file, with pictures of ``side`` pixels if above 0."""
    import h5py  # noqa: PLC0415  # keeps the import of this module light

    columns = observations(episodes.states)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = episodes.actions.shape[0] * STEPS
        data.attrs["env_args"] = json.dumps(
            {"env_name": "two-link-arm", "type": 2, "env_kwargs": {"engine": engine, **asdict(arm)}}
        )
        for index in range(episodes.actions.shape[0]):
            demo = data.create_group(f"demo_{index}")
            demo.attrs["num_samples"] = STEPS
            actions = episodes.actions[index].astype(np.float32)
            demo.create_dataset("actions", data=actions, compression="gzip", compression_opts=1)
            mine: dict[str, NDArray[Any]] = {key: each[index] for key, each in columns.items()}
            if side:
                mine["image"] = pictures(episodes.states[index], side)
            for key, values in mine.items():
                for group, rows in (("obs", values[:-1]), ("next_obs", values[1:])):
                    demo.create_dataset(
                        f"{group}/{key}", data=rows, compression="gzip", compression_opts=1
                    )


@dataclass(frozen=True)
class Order:
    """How much data, from which engine.

    ``heldout``: episodes of each held-out file; 0: half as many as ``episodes``, at least 4.
    ``unseen`` adds ``unseen.h5`` and ``heldout-unseen.h5`` of an arm that no node has.
    ``pictures`` above 0 adds an ``image`` column of so many pixels a side.
    """

    nodes: int = 3
    episodes: int = 20
    engine: Engine = "mujoco"
    seed: int = 0
    unseen: bool = False
    pictures: int = 0
    heldout: int = 0


def make(out: Path, order: Order) -> list[Path]:
    """Write ``node<i>.h5``, ``heldout-<i>.h5``, ``public.h5`` into ``out``; answers their paths."""
    held = order.heldout or max(4, order.episodes // 2)
    arms = {f"node{i}.h5": participant(i, order.seed) for i in range(order.nodes)}
    tests = {f"heldout-{i}.h5": participant(i, order.seed) for i in range(order.nodes)}
    if order.unseen:
        arms["unseen.h5"] = tests["heldout-unseen.h5"] = UNSEEN
    jobs = [(name, arm, "train", order.episodes) for name, arm in arms.items()]
    jobs += [(name, arm, "heldout", held) for name, arm in tests.items()]
    jobs.append(("public.h5", PUBLIC, "train", order.episodes))
    out.mkdir(parents=True, exist_ok=True)
    for name, arm, split, count in jobs:
        labels = [f"{split}:{index}" for index in range(count)]
        episodes = roll(arm, labels, engine=order.engine, seed=order.seed)
        write(out / name, arm, episodes, order.engine, order.pictures)
    return [out / name for name, *_ in jobs]


def _count(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not within 1 to {most}")
        return value

    return parse


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lensemble_local.arm", description="Write trajectories of two-link arms."
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the files")
    parser.add_argument("--nodes", type=_count(MAX_NODES), default=3)
    parser.add_argument("--episodes", type=_count(MAX_EPISODES), default=20, help="per node")
    parser.add_argument("--engine", choices=("mujoco", "numpy"), default="mujoco")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unseen", action="store_true", help="also an arm that no node has")
    parser.add_argument("--pictures", type=_count(MAX_PIXELS), default=0, help="pixels a side")
    given = parser.parse_args(arguments)
    order = Order(
        given.nodes, given.episodes, given.engine, given.seed, given.unseen, given.pictures
    )
    for path in make(given.out, order):
        print(path)  # noqa: T201  # the names are this command's answer


if __name__ == "__main__":
    main()
