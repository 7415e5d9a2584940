"""What of a queue's entries Celery is shown."""

from typing import Any

import pytest
from garbage import GARBAGE, message

from clawq.control.celery_settings import make_app, send_command
from clawq.control.commands import SturdyChannel
from clawq.control.messages import Call, parse_message
from clawq.control.queues import make_queue
from clawq.transport.keys import CELERY_PREFIX
from clawq.transport.server import EmbeddedRedis


class Decoding(SturdyChannel):
    """As a channel decodes bodies, without a connection."""

    def __init__(self) -> None: ...


@pytest.mark.parametrize("raw", GARBAGE, ids=range(len(GARBAGE)))
def test_what_celery_could_not_take_is_no_message(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_message(raw, Decoding())


def test_a_whole_message_is_the_call_that_it_says() -> None:
    found, call = parse_message(message(), Decoding())
    assert found["headers"]["task"] == "clawq.rollout"
    assert call == Call("clawq.rollout", "7e57", [], {})
    assert parse_message(message("body", [[1], {"a": 2}, None]), Decoding())[1].named == {"a": 2}


def test_what_is_sent_is_a_message_with_its_commands_own_id(redis_servers: EmbeddedRedis, broker_client: Any) -> None:
    queue = "clawq.test_messages"
    app = make_app(redis_servers.broker_url)
    try:
        send_command(app, "clawq.evaluate", queue, version=3)
        # As a user's program would send a task of a plugin
        later = {"countdown": 3, "expires": 9, "time_limit": 5, "shadow": "x"}
        app.send_task("mine.task", args=[1], queue=make_queue(queue), link=app.signature("mine.next"), **later)
    finally:
        app.close()
    second, first = (parse_message(broker_client.lpop(CELERY_PREFIX + queue), Decoding())[1] for _ in range(2))
    assert (first.task, first.args, first.named) == ("clawq.evaluate", [], {"version": 3})
    assert len(first.command) == 32
    assert (second.task, second.args, second.named) == ("mine.task", [1], {})


def test_only_answers_to_remote_control_go_by_unlooked_at_whatever_a_run_is_called() -> None:
    answers = "0b5e.reply.celery.pidbox"
    assert Decoding()._message(b'{"ok": "pong"}', answers) == {"ok": "pong"}
    assert Decoding()._message(b'{"ok": "pong"}', f"clawq.{answers}") is None
