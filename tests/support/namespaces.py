"""A machine of its own for a process, as far as the network goes: a network namespace whose line can be cut (root)."""

import itertools
import os
import shutil
import subprocess
import uuid

_NUMBERS = itertools.count()


def can_make() -> bool:
    """Whether this user may make network namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"clawq-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        _do("ip", "netns", "del", name)
    return made


class Namespace:
    """A namespace with one line to here.

    Attributes:
        address: of this side, where servers must listen for whoever is in it.
        prefix: words before a command that is to run in it.
    """

    def __init__(self) -> None:
        # One of 16 384 nets of four addresses below 10.231, another one for each process and call.
        first = (os.getpid() * 4 + next(_NUMBERS)) % 16_384 * 4
        self._name, self._line = f"clawq-{uuid.uuid4().hex[:8]}", f"cq{uuid.uuid4().hex[:8]}"
        self.address, there = (f"10.231.{(first + side) // 256}.{(first + side) % 256}" for side in (1, 2))
        self.prefix = ("ip", "netns", "exec", self._name)
        _do("ip", "netns", "add", self._name)
        _do("ip", "link", "add", self._line, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        _do("ip", "addr", "add", f"{self.address}/30", "dev", self._line)
        _do("ip", "link", "set", self._line, "up")
        for words in (
            ("addr", "add", f"{there}/30", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _do(*self.prefix, "ip", *words)

    def cut(self) -> None:
        """From now on all packets vanish, in both directions, without a word."""
        _do("tc", "qdisc", "replace", "dev", self._line, "root", "blackhole")
        _do(*self.prefix, "tc", "qdisc", "replace", "dev", "eth0", "root", "blackhole")

    def mend(self) -> None:
        """After `cut`."""
        _do("tc", "qdisc", "del", "dev", self._line, "root")
        _do(*self.prefix, "tc", "qdisc", "del", "dev", "eth0", "root")

    def close(self) -> None:
        """Take it away; who was in it must have ended."""
        subprocess.run(["ip", "link", "del", self._line], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self._name], capture_output=True, check=False)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
