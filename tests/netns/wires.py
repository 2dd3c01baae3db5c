"""A network of hosts inside this process: one namespace and one TUN device for each.

It does what a switch with ``tc netem`` on every port would, and needs no kernel module for it: each
direction of each port has a delay with jitter, a chance of loss, a rate, a queue of bounded length
and a cut.  Packets of one direction keep their order, as they do under netem with a rate.

Run as a program: the hosts on the command line as ``name=address``, then one JSON object a line on
standard input, each answered by a line.  The namespaces live as long as this process.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

CLONE_NEWNET = 0x4000_0000
TUNSETIFF = 0x4004_54CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
DEVICE = "net0"
MTU = 1500
QUEUE_PACKETS = 1000
"""netem's own limit; one direction drops what comes beyond it."""

BATCH = 64
ADDRESS = slice(12, 20)
"""Source and destination in an IPv4 header."""


class Direction:
    """One way through one port."""

    def __init__(self, chance: random.Random) -> None:
        self.delay_s = self.jitter_s = self.loss = 0.0
        self.bytes_per_s = 0.0
        self.cut = False
        self.queued = 0
        self.passed = self.dropped = 0
        self._chance = chance
        self._last = 0.0

    def set(self, delay_ms: float, jitter_ms: float, loss: float, mbit_s: float, cut: bool) -> None:
        self.delay_s, self.jitter_s = delay_ms / 1e3, jitter_ms / 1e3
        self.loss, self.bytes_per_s, self.cut = loss, mbit_s * 1e6 / 8, cut

    def due(self, now: float, size: int) -> float | None:
        """When a packet that comes now is through; None if it never is."""
        lost = self.cut or self.queued >= QUEUE_PACKETS or self._chance.random() < self.loss
        if lost:
            self.dropped += 1
            return None
        swing = self.jitter_s * (2 * self._chance.random() - 1)
        at = max(self._last, now + self.delay_s + swing)
        self._last = at + (size / self.bytes_per_s if self.bytes_per_s else 0.0)
        self.passed += 1
        return self._last


class Port:
    """A host's namespace, its device, and both ways between it and the switch."""

    def __init__(self, name: str, address: str, seed: int) -> None:
        self.name = name
        self.address = address
        self.up = Direction(random.Random(f"{seed}:{name}:up"))
        self.down = Direction(random.Random(f"{seed}:{name}:down"))
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "no network namespace")
        self.namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(
            self.device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI)
        )
        for words in (
            "link set lo up",
            f"addr add {address}/24 dev {DEVICE}",
            f"link set {DEVICE} up mtu {MTU} txqueuelen {QUEUE_PACKETS}",
        ):
            subprocess.run(["ip", *words.split()], check=True)


class Switch:
    """Passes packets between ports by their addresses, which it learns from what they send."""

    def __init__(self, ports: list[Port]) -> None:
        self._ports = {port.name: port for port in ports}
        self._known = {packed(port.address): port for port in ports}
        self._waiting: list[tuple[float, int, Port, Direction, bytes]] = []
        self._taken = 0
        self._poll = select.poll()
        self._by_fd = {port.device: port for port in ports}
        for fd in (0, *self._by_fd):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> None:
        """Pass packets and obey until standard input ends."""
        while True:
            for fd, _ in self._poll.poll(self._patience_ms()):
                if fd == 0 and not self._obey():
                    return
                if fd != 0:
                    self._take(self._by_fd[fd])
            self._deliver()

    def _patience_ms(self) -> float | None:
        if not self._waiting:
            return None
        return max(0.0, (self._waiting[0][0] - time.monotonic()) * 1e3)

    def _obey(self) -> bool:
        line = sys.stdin.buffer.raw.readline()
        if not line:
            return False
        order: dict[str, Any] = json.loads(line)
        port = self._ports[order.pop("port")]
        for way, terms in order.items():
            getattr(port, way).set(**terms)
        facts = {way: getattr(port, way) for way in ("up", "down")}
        say({way: [each.passed, each.dropped] for way, each in facts.items()})
        return True

    def _take(self, port: Port) -> None:
        for packet in packets(port.device):
            source, target = packet[ADDRESS][:4], packet[ADDRESS][4:]
            if packet[0] >> 4 != 4 or target[0] >= 224:
                continue
            self._known[source] = port
            other = self._known.get(target)
            if other is not None:
                self._pass(port.up, packet, other)

    def _pass(self, way: Direction, packet: bytes, to: Port) -> None:
        due = way.due(time.monotonic(), len(packet))
        if due is not None:
            way.queued += 1
            self._taken += 1
            heapq.heappush(self._waiting, (due, self._taken, to, way, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, to, way, packet = heapq.heappop(self._waiting)
            way.queued -= 1
            if way is not to.down:
                self._pass(to.down, packet, to)
                continue
            try:
                os.write(to.device, packet)
            except OSError:
                # The device is down or full: a packet lost.
                way.dropped += 1


def packets(device: int) -> Iterator[bytes]:
    for _ in range(BATCH):
        try:
            packet = os.read(device, 1 << 16)
        except BlockingIOError:
            return
        if len(packet) >= ADDRESS.stop:
            yield packet


def packed(address: str) -> bytes:
    return bytes(int(part) for part in address.split("."))


def say(facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    seed, *hosts = sys.argv[1:]
    ports = [Port(*host.split("="), int(seed)) for host in hosts]
    say({port.name: f"/proc/{os.getpid()}/fd/{port.namespace}" for port in ports})
    Switch(ports).run()


if __name__ == "__main__":
    main()
