"""Plugins come from installed distributions; the tests install real ones (metadata and a module) into a folder."""

import sys
from pathlib import Path

import pytest

from clawq.errors import DuplicatePlugin, PluginError, PluginLoadFailed, PluginNotFound
from clawq.plugins import GROUPS, installed, load, names


def install(folder: Path, distribution: str, entry_points: dict[str, str], **modules: str) -> None:
    """Put a distribution with these `clawq.environments` entry points and modules into a folder."""
    metadata = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    lines = [f"{name} = {target}" for name, target in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[clawq.environments]", *lines]) + "\n")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_installed_plugin_is_found_by_name_and_loaded_when_used(site: Path) -> None:
    install(site, "acme-hands", {"acme": "acme_found:plugin"}, acme_found="plugin = 'the plugin'")
    assert "acme" in names("environments")
    assert "acme_found" not in sys.modules
    assert load("environments", "acme") == "the plugin"


def test_a_broken_neighbour_stops_nobody_and_its_error_is_the_cause_when_it_is_used(site: Path) -> None:
    install(site, "fine", {"fine": "fine_one:plugin"}, fine_one="plugin = 1")
    install(site, "broken", {"broken": "broken_one:plugin"}, broken_one="raise RuntimeError('no simulator here')")
    assert load("environments", "fine") == 1
    with pytest.raises(PluginLoadFailed, match=r"broken_one:plugin of broken 1\.2.*no simulator here") as caught:
        load("environments", "broken")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("target", "text"),
    [("absent_module:plugin", ""), ("no_attribute:plugin", "other = 1"), ("leaver:plugin", "import sys; sys.exit(3)")],
)
def test_a_plugin_that_cannot_be_imported_is_a_load_failure(site: Path, target: str, text: str) -> None:
    module = target.partition(":")[0]
    install(site, "odd", {"odd": target}, **({module: text} if text else {}))
    with pytest.raises(PluginLoadFailed, match="odd"):
        load("environments", "odd")


def test_an_unknown_name_is_answered_with_the_known_and_the_nearest(site: Path) -> None:
    install(site, "acme", {"shadow-hand": "m:p", "allegro": "m:p"})
    with pytest.raises(PluginNotFound, match=r"allegro.*shadow-hand.*Did you mean 'shadow-hand'\?"):
        load("environments", "shadow-hnd")


def test_a_name_of_two_distributions_is_refused_only_when_used(site: Path) -> None:
    install(site / "a", "one", {"same": "same_one:plugin", "other": "same_one:plugin"}, same_one="plugin = 1")
    install(site / "b", "two", {"same": "same_two:plugin"}, same_two="plugin = 2")
    sys.path[:0] = [str(site / "a"), str(site / "b")]
    try:
        assert load("environments", "other") == 1
        assert [plugin.duplicate for plugin in installed("environments") if plugin.name == "same"] == [True, True]
        with pytest.raises(DuplicatePlugin, match=r"one 1\.2 and two 1\.2"):
            load("environments", "same")
    finally:
        del sys.path[:2]


def test_one_distribution_seen_twice_on_the_path_is_no_duplicate(site: Path) -> None:
    for folder in ("a", "b"):
        install(site / folder, "one", {"same": "seen_twice:plugin"}, seen_twice="plugin = 1")
    sys.path[:0] = [str(site / "a"), str(site / "b")]
    try:
        assert load("environments", "same") == 1
    finally:
        del sys.path[:2]


def test_an_unknown_group_is_a_plugin_error() -> None:
    with pytest.raises(PluginError, match=r"environments, algorithms, tasks"):
        names("enviroments")


def test_every_group_lists_what_clawq_itself_registers() -> None:
    assert {"sac", "td3"} <= set(names("algorithms"))
    assert {"jsonl", "tensorboard"} <= set(names("metric_writers"))
    for group in GROUPS:
        assert names(group) == sorted({plugin.name for plugin in installed(group)})
