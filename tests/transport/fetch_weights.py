"""A process that fetches weights until it has seen the last version, and checks every one by its content (C22)."""

import json
import sys
import time

from clawq.errors import WeightsCorrupt
from clawq.transport.client import connect
from clawq.transport.keys import RunKeys
from clawq.transport.weights import WeightsReader


def main() -> None:
    """argv: URL, tag, last version. Prints one line of JSON."""
    url, tag, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
    reader = WeightsReader(connect(url), RunKeys(tag))
    version, fetched, mixed, corrupt, backward = 0, 0, [], [], 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while version < last:
        try:
            weights = reader.fetch_newer(version)
        except WeightsCorrupt as error:
            corrupt.append(str(error))
            break
        if weights is None:
            time.sleep(0.001)  # an actor steps its envs in between
            continue
        backward += weights.version <= version
        version, fetched = weights.version, fetched + 1
        values = {float(value) for array in weights.arrays.values() for value in (array.min(), array.max())}
        if values != {float(version)} or weights.updates != version or weights.metadata != {"version": version}:
            mixed.append([version, sorted(values)])
    seen = {"version": version, "fetched": fetched, "mixed": mixed, "corrupt": corrupt, "backward": backward}
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
