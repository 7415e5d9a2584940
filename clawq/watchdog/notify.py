"""systemd's notify protocol, as far as a watchdog needs it: a datagram to the socket that NOTIFY_SOCKET names.

With `Type=notify` and `WatchdogSec=` in its unit, systemd ends and restarts a watchdog that does not send WATCHDOG=1
in time. Without systemd nothing is sent.
"""

import contextlib
import os
import socket


def notify(text: str) -> bool:
    """Send `READY=1`, `WATCHDOG=1`, `STOPPING=1` or `STATUS=...`; whether somebody was there to be told."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        # A leading @ stands for the zero byte of an abstract socket.
        to.sendto(text.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
        return True
    return False


__all__ = ["notify"]
