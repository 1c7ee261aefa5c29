"""The direction of imports: service → models, through `models/__init__.py` only, and never back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.project import ROOT


def imported(source: str, package: str) -> Iterator[str]:
    """Full names of all modules that a module in `package` imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            # `from models import encoder` may name a module as well as what it exports.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def exported(package: Path) -> set[str]:
    """Names in the `__all__` of a package."""
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def violations(source: str, package: str, models_exports: set[str]) -> list[str]:
    """What a module may not import."""
    top = package.split(".")[0]
    allowed = {"models", *(f"models.{name}" for name in models_exports)}
    found = []
    for name in imported(source, package):
        to = name.split(".")[0]
        if top == "models" and to == "service":
            found.append(f"models may not know service: {name}")
        if top == "service" and to == "models" and name not in allowed:
            found.append(f"service may use what models exports only: {name}")
        if top in ("models", "service") and to == "tests":
            found.append(f"nothing may need tests: {name}")
    return found


def modules(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("path", [*modules("models"), *modules("service")], ids=lambda path: path.stem)
def test_no_import_turns_back(path: Path) -> None:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    assert violations(path.read_text(), package, exported(ROOT / "models")) == []


def test_all_modules_are_looked_at() -> None:
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
def test_the_check_finds_what_it_is_for(package: str, source: str, num_violations: int) -> None:
    assert len(violations(source, package, {"Replica", "VisionEncoder"})) == num_violations
