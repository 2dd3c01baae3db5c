"""A host of its own, run by a real systemd: process, mount, IPC and cgroup namespaces.

Its /etc, /run, /tmp, /opt, /srv and /var/lib are thrown away with it; its network is that of the
caller, which holds loopback only.  No unit of the machine below is started: the host begins with
empty targets, to which a test adds what it installs.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")
ROOM = Path(__file__).parents[2]
TARGETS = ("sysinit", "basic", "multi-user", "network-online", "time-sync", "shutdown", "umount")
UNITS = tuple(sorted((ROOM / "systemd").glob("*.service")))
START_S = 30.0
COMMAND_S = 120.0
WATCHDOG_S = 4

BOOT = r"""
set -eu
mount --make-rprivate /
for place in /tmp /run /opt /srv /var/lib; do
    test "$KEEP" = "${KEEP#"$place"/}" || continue
    mount -t tmpfs -o mode=755 tmpfs "$place"
done
mkdir -p /run/etc/upper /run/etc/work /run/units
mount -t overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work overlay /etc
mount -t tmpfs tmpfs /etc/systemd/system
umount --recursive --lazy /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for target in $TARGETS; do
    printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' "$target" \
        > "/run/units/$target.target"
done
touch /run/booted
export SYSTEMD_UNIT_PATH=/run/units:/etc/systemd/system
exec "$SYSTEMD" --system --unit=multi-user.target --log-target=null --show-status=no
"""


def refusal() -> str | None:
    """Why no host can be booted here, if so."""
    if os.geteuid() != 0:
        return "booting a host takes root"
    if not SYSTEMD.exists():
        return f"there is no {SYSTEMD}"
    return None


class Host:
    """``pid`` is its systemd, as this side sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def run(self, *command: str, check: bool = True, given: bytes = b"") -> str:
        """What ``command`` printed, run as root inside; ``given`` is its standard input."""
        done = subprocess.run(
            ("nsenter", "--target", str(self.pid), "--all", "--wd=/", *command),
            input=given,
            capture_output=True,
            timeout=COMMAND_S,
            check=False,
        )
        out, err = (each.decode(errors="replace") for each in (done.stdout, done.stderr))
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: status {done.returncode}\n{out}{err}")
        return out if check else out + err

    def write(self, path: str, text: str, mode: str = "644") -> None:
        """Make a file inside, its directories with it."""
        self.run("install", "-D", "-m", mode, "/dev/stdin", path, given=text.encode())

    def put(self, source: Path, path: str) -> None:
        """Copy a file of this side to ``path`` inside."""
        self.run("install", "-D", "-m", "644", "/dev/stdin", path, given=source.read_bytes())

    def shown(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).strip()

    def until(self, what: str, true: Callable[[], bool], within_s: float) -> None:
        """Wait for ``true``, looking every tenth of a second; the wait itself happens inside."""
        for _ in range(int(within_s * 10)):
            if true():
                return
            self.run("sleep", "0.1")
        raise AssertionError(f"{what}: not within {within_s:g} s")


@contextmanager
def booted(directory: Path, *, apart: bool = False) -> Iterator[Host]:
    """A running host; everything in it ends with the block.

    Its network is this process's, or with ``apart`` one of its own, which holds nothing yet.

    Raises:
        AssertionError: it did not come up; with what it said.
    """
    log = directory / "systemd.log"
    unshare = shutil.which("unshare") or "unshare"
    environment = {
        "PATH": os.environ["PATH"],
        "KEEP": f"{ROOM}/",
        "TARGETS": " ".join(TARGETS),
        "SYSTEMD": str(SYSTEMD),
        "container": "lensemble-test",
    }
    flags = ["--fork", "--pid", "--mount", "--ipc", "--uts", "--cgroup", "--mount-proc"]
    flags += ["--net"] if apart else []
    with log.open("wb") as out:
        outer = subprocess.Popen(
            (unshare, *flags, "--kill-child", "sh", "-c", BOOT),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        try:
            host = Host(_inner(outer, log))
            host.until(
                "the host is up",
                lambda: (
                    host.run("systemctl", "is-active", "multi-user.target", check=False).strip()
                    == "active"
                ),
                START_S,
            )
            yield host
        finally:
            outer.send_signal(signal.SIGKILL)
            outer.wait()


def _inner(outer: "subprocess.Popen[bytes]", log: Path) -> int:
    """The process that is number 1 inside, once it is systemd."""
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    for _ in range(int(START_S * 10)):
        if outer.poll() is not None:
            break
        for child in children.read_text(encoding="ascii").split():
            if Path(f"/proc/{child}/comm").read_text(encoding="ascii").strip() == "systemd":
                return int(child)
        subprocess.run(("sleep", "0.1"), check=True)
    raise AssertionError(f"the host did not begin:\n{log.read_text(errors='replace')}")


def connect(first: Host, second: Host, addresses: tuple[str, str]) -> None:
    """A wire between two hosts with networks of their own, and an address of each on it."""
    ends = ("wire-1", "wire-2")
    made = ("link", "add", "name", ends[0], "type", "veth", "peer", "name", ends[1])
    subprocess.run(("ip", *made), check=True)
    for host, end, address in zip((first, second), ends, addresses, strict=True):
        subprocess.run(("ip", "link", "set", end, "netns", str(host.pid)), check=True)
        host.run("ip", "address", "add", f"{address}/24", "dev", end)
        for each in ("lo", end):
            host.run("ip", "link", "set", each, "up")


PROGRAMS = {
    "lensemble-coord": "lensemble_coord",
    "lensemble-node": "lensemble_node",
    "lensemblectl": "lensemblectl.app",
}


def install(host: Host) -> None:
    """Put the units, and programs that run this tree, where ``make install-system`` would.

    Homes are hidden from the daemons; this tree and its interpreter may lie in one.
    """
    for name, module in PROGRAMS.items():
        text = f'#!/bin/sh\nexec {sys.executable} -P -m {module} "$@"\n'
        host.write(f"/opt/lensemble/bin/{name}", text, "755")
    host.run("make", "--silent", "-C", str(ROOM), "install-units")
    seen = f"ProtectHome=tmpfs\nBindReadOnlyPaths={ROOM} {sys.base_prefix} {sys.prefix}\n"
    for unit in UNITS:
        said = "".join(
            f"Standard{end}=append:/run/{unit.stem}.log\n" for end in ("Output", "Error")
        )
        # A watchdog of half a minute would be waited for.
        text = f"[Service]\n{seen}{said}WatchdogSec={WATCHDOG_S}\n"
        host.write(f"/etc/systemd/system/{unit.name}.d/test.conf", text)
    host.run("systemctl", "daemon-reload")
