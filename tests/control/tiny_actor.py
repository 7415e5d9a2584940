"""A small real actor for tests of slots: speaks the control-socket protocol, steps nothing.

TINY_ACTOR chooses how it misbehaves: hang | exit | fail | deaf (never ends) | step, send (goes on in that
phase for 1.5 s after its time) | chatty (split and garbled lines).
"""

import json
import os
import socket
import subprocess
import sys
import time

control = socket.socket(fileno=int(os.environ["CLAWQ_CONTROL_FD"]))
mode = os.environ.get("TINY_ACTOR", "")
leases = 0


def say(**message: object) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def note(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def read_line(timeout_s: float) -> dict[str, object] | None:
    control.settimeout(max(timeout_s, 0.001))
    line = b""
    try:
        while not line.endswith(b"\n"):
            byte = control.recv(1)
            if not byte:
                sys.exit(0)
            line += byte
    except TimeoutError:
        return None
    message: dict[str, object] = json.loads(line)
    return message


say(event="ready")
while True:
    lease = read_line(3600.0)
    if lease is None or lease["op"] == "end":
        continue
    leases += 1
    note(f"lease {leases}")
    if mode == "hang":
        grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
        say(event="progress", phase="step", env_steps=1)
        note(f"hanging with grandchild {grandchild.pid}")
        time.sleep(600)
    if mode == "exit":
        note("about to exit")
        os._exit(3)
    if mode == "fail":
        say(event="failed", kind="PluginNotFound", error="no such simulator")
    reason = "lease_over"
    end = time.monotonic() + float(str(lease["seconds"]))
    while time.monotonic() < end and mode != "fail":
        say(event="progress", phase="step", env_steps=1)
        if mode == "chatty":
            control.sendall(b"not json\n\n[1]\n" + b'{"event":"pro')
            time.sleep(0.05)
            control.sendall(b'gress","phase":"step","env_steps":2}\n')
        message = read_line(min(0.2, end - time.monotonic()))
        if mode != "deaf" and message is not None and message["op"] == "end":
            reason = "ended"
            break
    while mode in ("step", "send") and time.monotonic() < end + 1.5:
        say(event="progress", phase=mode, env_steps=1)
        time.sleep(0.05)
    if mode != "fail":
        say(event="done", report={"env_steps": 7, "reason": reason, "pid": os.getpid(), "leases": leases})
