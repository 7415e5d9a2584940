import json
import subprocess
import sys
from typing import Any

import pytest

from clawq.specs import EnvSpec
from clawq.testing.point import PointOptions, point_spec


def test_a_log_level_that_there_is_not_is_answered_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWQ_LOG_LEVEL", "banana")
    status, answer, stderr = ask(json.dumps({"environment": {"name": "point"}}))
    assert (status, answer["kind"], stderr) == (2, "UserError", "")
    assert "CLAWQ_LOG_LEVEL='banana'" in answer["error"]


def ask(text: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "clawq.programs.probe"], input=text, capture_output=True, text=True, timeout=30
    )
    [line] = done.stdout.splitlines()
    return done.returncode, json.loads(line), done.stderr


def test_it_prints_the_spec_of_an_environment() -> None:
    status, answer, stderr = ask(json.dumps({"environment": {"name": "point", "options": {"max_episode_steps": 9}}}))
    assert status == 0
    assert EnvSpec.from_json(answer) == point_spec(PointOptions(max_episode_steps=9))
    assert stderr == ""


@pytest.mark.parametrize(
    ("request_text", "kind", "said"),
    [
        ('{"environment": {"name": "poimt"}}', "PluginNotFound", "point"),
        ('{"environment": {"name": "point", "options": {"speed": 1}}}', "ValidationError", "speed"),
        ('{"environment": {"name": "gymnasium", "options": {"id": "CartPole-v1"}}}', "UnsupportedSpace", "Discrete"),
        ("{", "JSONDecodeError", "no JSON"),
        ("[]", "UserError", "JSON object"),
    ],
)
def test_mistakes_are_answered_in_words_with_status_2(request_text: str, kind: str, said: str) -> None:
    status, answer, stderr = ask(request_text)
    assert (status, answer["kind"]) == (2, kind)
    assert said in answer["error"]
    assert "Traceback" not in stderr


def test_probing_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from clawq.programs.probe import probe\n"
        "probe({'environment': {'name': 'point'}})\n"
        "print([name for name in ('torch', 'celery', 'redis', 'mujoco') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
