"""What the learner leaves with its link while Redis is slow."""

from typing import Any

import numpy as np

from clawq.core import Control
from clawq.programs.link import Link, Outgoing, Wires
from clawq.transport.claims import Claim
from clawq.transport.control import ControlRecord
from clawq.transport.keys import RunKeys
from clawq.transport.weights import WeightsPublisher, WeightsReader


def test_weights_that_an_evaluation_wants_are_sent_whatever_comes_after(data_client: Any, run_keys: RunKeys) -> None:
    keys, nothing = run_keys, None
    claim = Claim.take(data_client, keys.claim("learner"), "test", 60)
    ControlRecord(data_client, keys, claim).write(stop=False, window_bytes=1, config_epoch=1)
    publisher = WeightsPublisher(data_client, keys, claim)
    wires: Any = Wires(claim, publisher, nothing, nothing, nothing, nothing, nothing, nothing, nothing)  # type: ignore[arg-type]
    link = Link(wires, Control(head=0, stop=False, window_bytes=1, config_epoch=1), 1)
    for version, pin in ((1, None), (2, "wanted-training"), (3, None), (4, "wanted-training"), (5, None), (6, None)):
        link.publish(Outgoing(version, {"w": np.array([version])}, version, {}, pin))
    link._send_weights()
    for version in range(7, 12):
        link.publish(Outgoing(version, {"w": np.array([version])}, version, {}))
        link._send_weights()
    reader = WeightsReader(data_client, keys)
    assert publisher.pins() == {"wanted-training": 4}
    np.testing.assert_array_equal(reader.fetch(4).arrays["w"], [4])
    assert reader.head() == 11
    assert not link._weights
