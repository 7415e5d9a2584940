"""A process that holds a claim, or a slot, until it is killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Says so when it has it, then waits to be ended.
_CODE = """
import sys
from clawq.transport.claims import Claim
from clawq.transport.client import connect
from clawq.transport.keys import RunKeys
from clawq.transport.stream import StreamWriter
url, tag, what = sys.argv[1:]
client, keys = connect(url), RunKeys(tag)
if what.startswith("slot:"):
    StreamWriter.open(client, keys, what.removeprefix("slot:"), "one that is killed", 600.0).send(1, b"x")
else:
    Claim.take(client, keys.claim(what), "one that is killed", 600.0)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_until_killed(data_url: str, tag: str, what: str) -> Iterator[None]:
    """While this lasts a process holds that claim (of a slot: `slot:NAME`, with one entry sent); then it is killed."""
    words = [sys.executable, "-c", _CODE, data_url, tag, what]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield
        process.kill()
