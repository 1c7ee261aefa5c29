"""The direction of imports: a room of `service/` imports only rooms below it, and `models` by its exports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.project import ROOT

# From top to bottom. A room may import the rooms below it, and none above.
ORDER = (
    "service.__main__",
    "service.bench",
    "service.processes",
    "service.server",
    "service.app",
    "service.routes",
    "service.page",
    "service.chat",
    "service.pipeline",
    "service.embedder",
    "service.http",
    "service.intake",
    "service.fetching",
    "service.images",
    "service.handoff",
    "service.engine",
    "service.queue",
    "service.answers",
    "service.metrics",
    "service.config",
    "service.errors",
    "models",
)
# The same within `service.processes`.
ORDER_OF_PROCESSES = (
    "service.processes.supervisor",
    "service.processes.api_server",
    "service.processes.device",
    "service.processes.wire",
)


def place(name: str, order: tuple[str, ...]) -> int | None:
    """The index of a module's room in the order, counted from the top. None if the order does not have it."""
    found = [index for index, room in enumerate(order) if name == room or name.startswith(f"{room}.")]
    return found[0] if found else None


def upward_imports(name: str, source: str) -> list[str]:
    """The imports of a module from rooms above its own."""
    package = name.rpartition(".")[0]
    found = []
    for order in (ORDER, ORDER_OF_PROCESSES):
        own = place(name, order)
        for imported_name in imported(source, package):
            its = place(imported_name, order)
            if own is not None and its is not None and its < own:
                found.append(f"{name} is below {order[its]} and must not import {imported_name}")
    return found


def imported(source: str, package: str) -> Iterator[str]:
    """Full names of all modules that a module in `package` imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            # In `from models import encoder`, `encoder` may be a module or an exported name.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def exported(package: Path) -> set[str]:
    """Names in the `__all__` of a package."""
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def violations(source: str, package: str, models_exports: set[str]) -> list[str]:
    """The forbidden imports between `models`, `service` and `tests`."""
    top = package.split(".")[0]
    allowed = {"models", *(f"models.{name}" for name in models_exports)}
    found = []
    for name in imported(source, package):
        to = name.split(".")[0]
        if top == "models" and to == "service":
            found.append(f"models must not import service: {name}")
        if top == "service" and to == "models" and name not in allowed:
            found.append(f"service must import only exported names of models: {name}")
        if top in ("models", "service") and to == "tests":
            found.append(f"models and service must not import tests: {name}")
    return found


def modules(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


def module_name(path: Path) -> str:
    """The full name, such as `service.queue.batcher`. A package has the name of its folder."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", [*modules("models"), *modules("service")], ids=lambda path: path.stem)
def test_models_service_and_tests_import_in_one_direction(path: Path) -> None:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    assert violations(path.read_text(), package, exported(ROOT / "models")) == []


@pytest.mark.parametrize("path", modules("service"), ids=module_name)
def test_no_room_imports_a_room_above_it(path: Path) -> None:
    assert upward_imports(module_name(path), path.read_text()) == []


@pytest.mark.parametrize("path", modules("service"), ids=module_name)
def test_every_module_has_a_place_in_the_order(path: Path) -> None:
    name = module_name(path)
    assert place(name, ORDER) is not None or name == "service"


@pytest.mark.parametrize(
    ("name", "source", "num_violations"),
    [
        ("service.queue.batcher", "from service.engine.engine import Engine", 2),
        ("service.engine.engine", "from service.queue.batcher import Batcher", 0),
        ("service.errors", "import service.metrics", 1),
        ("service.images.tiff", "def f():\n    from service.pipeline import Pipeline", 2),
        ("service.answers.arrays", "from ..intake import options", 2),
        ("service.processes.wire.link", "from service.processes.device import dispatcher", 2),
        ("service.processes.device.dispatcher", "from service.processes.wire.link import Link", 0),
        ("service.config.settings", "from service import errors", 0),
    ],
)
def test_upward_import_is_found(name: str, source: str, num_violations: int) -> None:
    assert len(upward_imports(name, source)) == num_violations


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=module_name)
def test_no_test_imports_a_test_or_conftest(path: Path) -> None:
    package = module_name(path).rpartition(".")[0]
    names = [name for name in imported(path.read_text(), package) if name.startswith("tests.")]
    assert [name for name in names if re.search(r"\.(test_\w+|conftest)\b", name)] == []


def test_all_modules_are_checked() -> None:
    assert ROOT / "service/pipeline.py" in modules("service")
    assert ROOT / "service/routes/embed.py" in modules("service")
    assert ROOT / "models/encoder.py" in modules("models")
    assert "VisionEncoder" in exported(ROOT / "models")


@pytest.mark.parametrize(
    ("package", "source", "num_violations"),
    [
        ("service", "from models import Replica", 0),
        ("service", "from models import Replica, encoder", 1),
        ("service", "import models", 0),
        ("service", "import models.encoder", 1),
        ("service", "from models.encoder import VisionEncoder", 2),
        ("service.routes", "from models import secret", 1),
        ("service", "def f():\n    import models.encoder", 1),
        ("service", "if TYPE_CHECKING:\n    from models import encoder", 1),
        ("service", "from service.models import x", 0),
        ("service", "from .models import x", 0),
        ("service", "import modelscope", 0),
        ("models", "import service", 1),
        ("models", "from service.errors import ApiError", 2),
        ("models", "from ..service import errors", 2),
        ("models", "from models.encoder import VisionEncoder", 0),
        ("models", "from . import encoder", 0),
        ("models", "import tests.conftest", 1),
        ("service", "from tests import conftest", 2),
        ("service.routes", "from ..engine import Engine", 0),
        ("tests", "from service.app import create_app\nimport models.encoder", 0),
    ],
)
def test_forbidden_import_is_found(package: str, source: str, num_violations: int) -> None:
    assert len(violations(source, package, {"Replica", "VisionEncoder"})) == num_violations
