"""The README is run: its plugins are installed and used, its commands exist, its files are there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from clawq.cli.main import cli
from clawq.config_file import load_config
from clawq.plugins import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's package, built and installed by pip from its own pyproject.toml."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for block in [*blocks("toml"), *blocks("python")]:
        name = block.partition("\n")[0].removeprefix("# ")
        if name.endswith((".py", ".toml")):
            (source / name).write_text(block)
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    words = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", str(target), str(source)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def package(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(installed))
    return installed


@pytest.fixture
def config(package: Path, tmp_path: Path) -> Any:
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: mine\nenvironment: {name: pendulum, num_envs: 3, options: {gravity: 5}}\nalgorithm: {name: cosine_td3}\n"
    )
    return load_config(file)


def test_the_environment_of_the_readme_steps_under_our_convention(config: Any) -> None:
    plugin = load("environments", "pendulum")
    env = plugin.make(plugin.Options(**config.environment.options), config.environment.num_envs)
    try:
        env.spec.check_obs(env.reset([1, 2, 3]), (3,))
        for _ in range(250):
            result = env.step(env.spec.action.to_env(np.zeros((3, 1), np.float32)))
            env.spec.check_obs(result.obs, (3,))
        assert result.reward.shape == (3,)
    finally:
        env.close()


def test_the_algorithm_of_the_readme_updates_with_its_own_schedule(config: Any) -> None:
    import torch

    from clawq.core import Batch
    from clawq.testing.point import PointOptions, point_spec

    plugin = load("algorithms", "cosine_td3")
    spec = point_spec(PointOptions())
    algorithm = plugin.make_algorithm(spec, plugin.Options(hidden=(8,)), "cpu", 0)
    obs = {key: torch.zeros(4, 2) for key in spec.obs}
    one, rows = torch.ones(4), torch.arange(4)
    metrics = algorithm.step(Batch(obs, torch.zeros(4, 2), one, one, obs, one, rows, rows, {}), progress=0.5)
    assert all(np.isfinite(value) for value in metrics.values())
    assert plugin.make_policy(spec, plugin.Options(hidden=(8,))) is not None


def test_the_task_of_the_readme_is_registered_by_a_worker(package: Path) -> None:
    from clawq.control.app import register_tasks
    from clawq.control.celery_settings import make_app, send_command

    [call] = [block for block in blocks("python") if "send_command(" in block]
    assert f"from {send_command.__module__} import send_command" in call

    app = make_app(None)
    register_tasks(app)
    assert "clawq.disk_space" in app.tasks
    assert '"clawq.disk_space"' in call


def shown_commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("clawq ")]


@pytest.mark.parametrize("words", shown_commands(), ids=" ".join)
def test_every_command_of_the_readme_is_one(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command: click.Command = cli
    context = click.Context(cli)
    rest = words[1:]
    while isinstance(command, click.Group):
        found = command.get_command(context, rest.pop(0))
        assert found is not None, words
        command = found
    # Parses the arguments and options, and runs nothing.
    command.make_context(words[-1], rest)


def test_every_file_that_the_readme_names_is_there() -> None:
    named = {*re.findall(r"configs/\w+\.yaml", README), *re.findall(r"\]\((?!http)([^)]+)\)", README)}
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert missing == []
    assert "configs/hand_reach.yaml" in named
