"""The rules that hold the parts together: what importing loads, what the layers may know, what must not be written."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

import clawq
from clawq.config_file import load_config
from clawq.plugins import GROUPS, installed, load

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("clawq/**/*.py"), *ROOT.glob("plugins/*/clawq_*/**/*.py")])
INITS = [file for file in SOURCES if file.name == "__init__.py"]
MODULES = [module.name for module in pkgutil.walk_packages(clawq.__path__, "clawq.")]
BUILT_IN = [
    (plugin.group, plugin.name)
    for group in GROUPS
    for plugin in installed(group)
    if plugin.distribution.startswith("clawq")
]

#: module -> what importing it must not load.
LIGHT = {
    "clawq": ("torch", "redis", "celery", "gymnasium", "numpy", "pydantic"),
    "clawq.core": ("torch", "redis", "celery", "gymnasium"),
    "clawq.config_file": ("torch", "redis", "celery", "gymnasium"),
    "clawq.metrics": ("torch", "redis", "celery", "gymnasium", "tensorboard"),
    "clawq.state": ("torch", "redis", "celery", "gymnasium", "pydantic"),
    "clawq.algorithms.sac": ("torch", "redis", "celery", "gymnasium"),
    "clawq.algorithms.td3": ("torch", "redis", "celery", "gymnasium"),
    "clawq.control.app": ("torch", "gymnasium", "mujoco"),
    "clawq.control.tasks": ("torch", "gymnasium", "mujoco"),
    "clawq.programs.audit": ("torch", "celery", "gymnasium"),
    "clawq.programs.probe": ("torch", "redis", "celery", "gymnasium"),
    "clawq_hands": ("torch", "redis", "celery", "gymnasium", "mujoco"),
}

#: What must not stand in the source, and why. C56 is among them.
FORBIDDEN = {
    r"^\s*(import|from) ([\w., ]+, *)?(pickle|_pickle|cloudpickle|dill|marshal|shelve|joblib)\b": (
        "pickle: nothing that is read may name code"
    ),
    r"\bpickle\.|allow_pickle\s*=\s*True": "pickle",
    r"weights_only\s*=\s*False": "torch.load with code in the file",
    r"torch\.load\((?!([^()]|\([^()]*\))*weights_only=True)|torch\.jit\.load\(": "torch.load that may run code",
    r"\bnp\.load\(|numpy\.load\(": "np.load: reads pickles, and unpacks what is small into what is huge",
    r"\b(resolve_name|pydoc|import_string|symbol_by_name)\b|\b__import__\(": "importing what a text names",
    r"^\s*from (torch|numpy|builtins|os)\b.* import .*\b(load|eval|exec|system|popen)\b": (
        "one of the above under a name that the other rules do not see"
    ),
    r"\bos\.(system|popen)\(|shell\s*=\s*True|\bsubprocess\.getoutput": "a shell",
    # Asking for a free port, and giving it back at once, is not listening.
    r"(?<!with socket\.)\bcreate_server\(|\.listen\(|\b(http\.server|socketserver|uvicorn|flask|start_http_server)\b": (
        "something that listens: SECURITY.md says that nothing does; it needs the loopback address and a token"
    ),
    r"password.*(sys\.argv|argv\s*=)": "passwords in argv, which everybody can read",
    r"\byaml\.((unsafe|full)_)?load(_all)?\(|typ=.unsafe": "YAML that makes objects",
    r"(?<![.\w])(eval|exec|compile)\(|\bbuiltins\.(eval|exec|compile)\b": "evaluating text",
    r"except( Exception| BaseException)?:\s*(#.*)?\n\s*pass\b": "swallowing whatever happens",
}


#: What the rules above must see, one line for each way to write it; and what they must let pass.
SEEN = (
    "import pickle", "    import pickle as p", "from pickle import loads", "import cloudpickle", "import dill",
    "import marshal", "import shelve", "import os, pickle", "from joblib import load", "x = pickle.loads(text)",
    "np.load(f, allow_pickle = True)", "torch.load(path, weights_only=False)", "torch.load(path)",
    "torch.load(\n    path,\n    map_location='cpu',\n)", "torch.jit.load(path)", "np.load(path)", "numpy.load(path)",
    "pkgutil.resolve_name(text)", "from pkgutil import resolve_name", "pydoc.locate(text)", "__import__(text)",
    "from kombu.utils.imports import symbol_by_name", "from torch import load",
    "from numpy import array, load", "from builtins import eval", "from os import system", "os.system(text)",
    "os.popen(text)", "subprocess.run(text, shell=True)", "subprocess.getoutput(text)",
    "socket.create_server(('', 80))", "sock.listen(5)", "import http.server", "start_http_server(9000)",
    "password = sys.argv[1]", "yaml.load(text)", "yaml.unsafe_load(text)", "yaml.full_load(text)",
    "YAML(typ='unsafe')", "eval(text)", "x = exec(text)", "compile(text, '', 'exec')", "builtins.eval(text)",
    "try:\n    x()\nexcept Exception:\n    pass", "try:\n    x()\nexcept:\n    pass",
    "except BaseException: # why\n    pass",
)  # fmt: skip
UNSEEN = (
    "actor.eval()", "re.compile(text)", "torch.compile(step)", "self.exec(x)", "evaluate(x)",
    "torch.load(f, weights_only=True)", "torch.load(\n    f,\n    map_location='cpu',\n    weights_only=True,\n)",
    "json.load(f)", "except ValueError:\n    pass", "from clawq.plugins import load", "import torch",
    "except Exception:\n    log.exception('x')",
)  # fmt: skip


def isort_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each by name: the order that ruff keeps (RUF022)."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize(("module", "heavy"), LIGHT.items())
def test_importing_a_light_module_loads_nothing_heavy(module: str, heavy: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print(*sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports_and_its_public_names_are_sorted_and_there(module: str) -> None:
    names = getattr(importlib.import_module(module), "__all__", [])
    assert list(names) == sorted(names, key=isort_order)
    assert [name for name in names if not hasattr(sys.modules[module], name)] == []


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/*.yaml")), ids=lambda file: file.name)
def test_every_shipped_configuration_loads_and_begins_with_what_to_expect(file: Path) -> None:
    config = load_config(file)
    assert file.read_text().startswith("#")
    assert file.stem == config.name.replace("-", "_")


@pytest.mark.parametrize(("group", "name"), BUILT_IN)
def test_every_built_in_plugin_loads(group: str, name: str) -> None:
    plugin = load(group, name)
    if group in {"environments", "algorithms"}:
        assert plugin.Options.model_config.get("frozen")
        assert plugin.Options.model_config.get("extra") == "forbid"


def test_every_group_that_clawq_registers_is_known() -> None:
    points = [point for found in distributions() for point in found.entry_points]
    ours = {point.group for point in points if point.group.startswith("clawq.")}
    assert ours
    assert ours <= {f"clawq.{group}" for group in GROUPS}


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_forbidden_words_are_not_in_the_source(pattern: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match.group().strip()}"
        for file in SOURCES
        for text in [file.read_text()]
        for match in re.finditer(pattern, text, flags=re.MULTILINE)
    ]
    assert found == [], FORBIDDEN[pattern]


def test_each_way_to_write_what_is_forbidden_is_seen_and_nothing_else() -> None:
    def seen(text: str) -> bool:
        return any(re.search(pattern, text, flags=re.MULTILINE) for pattern in FORBIDDEN)

    assert [text for text in SEEN if not seen(text)] == []
    assert [text for text in UNSEEN if seen(text)] == []
    needless = [rule for rule in FORBIDDEN if not any(re.search(rule, text, flags=re.MULTILINE) for text in SEEN)]
    assert needless == [], "rules that nothing above shows at work"


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_module_opens_with_what_it_is(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text())), "no module docstring"


@pytest.mark.parametrize("file", INITS, ids=lambda file: str(file.parent.name))
def test_nothing_is_computed_or_imported_in_an_init(file: Path) -> None:
    # Importing by way of __init__ is how packages come to import one another in circles.
    allowed = (ast.Expr, ast.Assign)
    assert [ast.unparse(node) for node in ast.parse(file.read_text()).body if not isinstance(node, allowed)] == []


def test_redis_keys_are_spelled_in_one_module() -> None:
    spelled = [file.relative_to(ROOT).as_posix() for file in SOURCES if re.search(r'[^"]"clawq:', file.read_text())]
    assert set(spelled) <= {"clawq/transport/keys.py"}


#: Who may import a module by a name that is not written there, and from where the name comes.
IMPORTERS = {
    "clawq/cli/main.py": "the table of commands in the same file",
    "clawq/programs/episode_files.py": "libraries of the extra `export`, named where they are needed",
    "clawq/spawning/launch.py": "argv of a process that clawq itself starts",
    "clawq/transport/server.py": "the name of an optional package",
}


def test_modules_are_imported_by_name_only_where_the_name_is_our_own() -> None:
    using = {
        file.relative_to(ROOT).as_posix()
        for file in SOURCES
        if re.search(r"\b(import_module|run_module|run_path|spec_from_file_location)\(", file.read_text())
    }
    assert using <= set(IMPORTERS)


def test_entry_points_are_loaded_in_one_module() -> None:
    loading = {file.name for file in SOURCES if re.search(r"entry_points\(|\bEntryPoint\b", file.read_text())}
    assert loading == {"plugins.py"}


def test_the_layers_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
