"""What may lie in a Celery queue without being a command: bytes, JSON of any kind, messages with something missing."""

GARBAGE = (
    b"\xff\xfe\x00",
    b"no json",
    b'{"body": "e30=", "headers',
    b"null",
    b"7",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"properties": {}}',
    b'{"properties": {"delivery_tag": "x", "body_encoding": "base64"}, "body": "!", "headers": {}}',
    b'{"properties": {"delivery_tag": "x"}, "headers": {"task": "clawq.rollout"}}',
    b'{"properties": {"delivery_tag": "x"}, "headers": 3}',
)
