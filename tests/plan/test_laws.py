"""The laws that keep planning instant and the two halves apart, checked on the source itself.

Run by pytest; ruff enforces some of them while one types. golden/options.txt holds the list of options.
Must never import what it checks, except for the list of options.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.schema import option_types
from tests.plan import goldens
from tests.plan.asking import ROOT

LAUNCHER = sorted((ROOT / "launcher").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").rglob("*.py"))
FRONT_DOOR = ROOT / "launch.py"


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[str]:
    """Dotted name of everything the file imports, at any depth; `from a import b` is a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(packages: set[str], files: list[Path]) -> set[str]:
    """The files that import one of `packages`."""
    return {name(path) for path in files if {module.split(".")[0] for module in imported(path)} & packages}


def attributes(path: Path) -> set[str]:
    """Every `name.attribute` of the file."""
    nodes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)]
    return {f"{node.value.id}.{node.attr}" for node in nodes if isinstance(node.value, ast.Name)}


# --- imports ---------------------------------------------------------------------------------------------------------


def test_there_is_something_to_check() -> None:
    assert len(LAUNCHER) > 20 and len(RECIPES) > 20


def test_the_control_plane_never_imports_torch_and_its_like() -> None:
    assert importers({"torch", "deepspeed", "transformers", "numpy", "recipes"}, [FRONT_DOOR, *LAUNCHER]) == set()


def test_hydra_omegaconf_and_rich_stay_in_their_files() -> None:
    assert importers({"hydra"}, [*LAUNCHER, *RECIPES]) == {"launcher/cli.py", "launcher/compose.py"}
    assert importers({"omegaconf"}, [*LAUNCHER, *RECIPES]) == {"launcher/cli.py", "launcher/compose.py"}
    shown = {"launcher/render.py", "launcher/show_plan.py", "recipes/shared/progress.py"}
    assert importers({"rich"}, [*LAUNCHER, *RECIPES]) == shown


def test_recipes_take_from_the_launcher_only_what_the_plan_needs() -> None:
    allowed = {"plan", "rundir", "schema", "errors"}
    taken: dict[str, set[str]] = {}
    for path in RECIPES:
        for module in imported(path):
            if module.split(".")[0] == "launcher":
                taken.setdefault(module.split(".")[1], set()).add(name(path))
    assert {module: files for module, files in taken.items() if module not in allowed} == {}


def test_workers_never_see_yaml() -> None:
    assert importers({"yaml", "hydra", "omegaconf"}, RECIPES) == set()


# --- processes and the environment -----------------------------------------------------------------------------------

STARTERS = re.compile(r"os\.(system|popen|fork|forkpty|posix_spawnp?|spawn\w+|exec\w+)$")
ENVIRONMENT = {f"os.{what}" for what in ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")}


def test_only_run_supervise_and_remote_start_processes() -> None:
    """And the probe, on the host that it looks at: nvidia-smi."""
    files = [*LAUNCHER, *RECIPES]
    starters = {f"launcher/{part}.py" for part in ("run", "supervise", "remote", "onhost/probe")}
    assert importers({"subprocess", "multiprocessing", "pty"}, files) == starters
    assert {name(path) for path in files if any(map(STARTERS.match, attributes(path)))} == set()


def test_only_env_touches_the_environment_in_the_control_plane() -> None:
    assert {name(path) for path in [FRONT_DOOR, *LAUNCHER] if attributes(path) & ENVIRONMENT} == {"launcher/env.py"}
    assert not {name(path) for path in LAUNCHER if ENVIRONMENT & set(imported(path))}


def test_only_the_worker_and_the_process_group_touch_the_environment_in_the_data_plane() -> None:
    touching = {name(path) for path in RECIPES if attributes(path) & ENVIRONMENT}
    assert touching <= {"recipes/worker.py", "recipes/shared/distributed.py"}


def test_commands_are_never_shell_strings() -> None:
    for path in [*LAUNCHER, *RECIPES]:
        for node in ast.walk(tree(path)):
            assert not (isinstance(node, ast.keyword) and node.arg == "shell"), f"{name(path)}: shell="


# --- no work at import -----------------------------------------------------------------------------------------------

PURE = {"Path", "resolve", "with_name", "compile", "getLogger", "frozenset", "uint64", "getattr", "lower", "items"}
PATH_LINES = {"launch.py": "sys.path.insert(0, ", "recipes/worker.py": "sys.path[0] = "}


def test_package_files_are_empty() -> None:
    for path in [*LAUNCHER, *RECIPES]:
        assert path.name != "__init__.py" or path.read_text() == "", name(path)


@pytest.mark.parametrize("path", [FRONT_DOOR, *LAUNCHER, *RECIPES], ids=name)
def test_importing_does_no_work(path: Path) -> None:
    for node in tree(path).body:
        where, text = f"{name(path)}:{node.lineno}", ast.unparse(node)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if text.startswith(PATH_LINES.get(name(path), "\0")):
            continue
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) in ("__name__ == '__main__'", "TYPE_CHECKING"), where
            continue
        assert isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign), f"{where}: {text}"
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                called = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
                assert called in PURE, f"{where}: {called}() at import"


# --- documentation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [p for p in (*LAUNCHER, *RECIPES) if p.name != "__init__.py"], ids=name)
def test_a_module_says_what_it_makes_who_calls_it_and_what_it_must_never_do(path: Path) -> None:
    text = ast.get_docstring(tree(path)) or ""
    sentences = [sentence for sentence in re.split(r"(?<=[.;:])\s+|\n+", text) if sentence.strip()]
    assert len(sentences) >= 3, text
    assert "Must never" in text
    assert text.splitlines()[0].endswith("."), "the first line is a sentence of its own"


def documented_fields() -> dict[str, dict[str, str | None]]:
    """{class of schema.py: {field: the text beneath it}}."""
    classes: dict[str, dict[str, str | None]] = {}
    for node in tree(ROOT / "launcher" / "schema.py").body:
        if isinstance(node, ast.ClassDef):
            fields = classes.setdefault(node.name, {})
            for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(statement, ast.AnnAssign):
                    assert statement.value is None, f"{ast.unparse(statement)}: defaults live in conf/"
                    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    fields[ast.unparse(statement.target)] = str(after.value.value) if documented else None
    return classes


def documented_options() -> dict[str, str | None]:
    """{dotted option: the text beneath it in schema.py}."""
    classes = documented_fields()
    options = {}
    for option in option_types():
        section, _, field = option.rpartition(".")
        owner = f"{section.capitalize()}Section" if section else "RunConfig"
        options[option] = classes[owner][field]
    return options


def test_every_option_is_explained_beneath_its_field() -> None:
    for option, text in documented_options().items():
        assert text and text.endswith("."), f"{option}: one sentence under it in launcher/schema.py"
        assert "\n" not in text, option


def test_the_list_of_options_is_the_committed_one() -> None:
    """A new option is defended in the change that adds it."""
    kinds, texts = option_types(), documented_options()
    goldens.compare("options.txt", "".join(f"{option}: {kinds[option]}\n    {texts[option]}\n" for option in kinds))


def test_no_option_is_connected_to_nothing() -> None:
    used: set[str] = set()
    for path in [*LAUNCHER, *RECIPES]:
        if name(path) != "launcher/schema.py":
            used |= {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    assert [option for option in option_types() if option.rpartition(".")[2] not in used] == []
