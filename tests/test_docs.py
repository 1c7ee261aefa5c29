"""Links in the documents resolve, and the names in them exist. tests/live runs their commands."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from service import __main__ as main
from service.bench import encoder, serve
from service.config.settings import Settings
from service.errors import ERROR_CODES
from service.intake.options import OPTION_NAMES
from service.metrics import Metrics
from tests.support.project import DOCUMENTS, ROOT

API = (ROOT / "docs/api.md").read_text()


def anchors(document: Path) -> set[str]:
    """The anchors of the titles in a document: the part of a link after `#`."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path) if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_table_has_exactly_the_error_codes() -> None:
    rows = re.findall(r"^\| \d{3} \| (.+?) \|", API, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(ERROR_CODES)


def test_table_has_exactly_the_options() -> None:
    table = API.partition("### Options")[2].partition("### Form of the answer")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(OPTION_NAMES)


UNITS = {"": 1, " MiB": 2**20, " GiB": 2**30}


def test_limits_have_the_defaults_of_the_settings() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([\d,]+)( [MG]iB)?", API, re.MULTILINE)
    stated = {
        name.replace("-", "_"): int(number.replace(",", "")) * UNITS[unit] for name, number, unit in rows
    }
    limits = {name for name in Settings.model_fields if name.startswith("max_") and name != "max_pixels"}
    assert limits <= set(stated)
    assert stated == {name: Settings.model_fields[name].default for name in stated}


def test_every_setting_in_a_document_exists() -> None:
    flags_of_bench: set[str] = set()
    for bench in (encoder, serve):
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        flags_of_bench |= set(vars(parser.parse_args([])))
    for document in DOCUMENTS:
        for flag in re.findall(r"`--([a-z-]+)`", document.read_text()):
            name = flag.removeprefix("no-").replace("-", "_")
            assert name in Settings.model_fields or name in flags_of_bench, flag


def test_every_metric_is_in_the_table() -> None:
    registry = CollectorRegistry()
    Metrics(registry, ())
    for family in registry.collect():
        if family.name.startswith("vision_sidecar_"):
            name = family.name.removeprefix("vision_sidecar_") + (
                "_total" if family.type == "counter" else ""
            )
            assert f"`{name}`" in API, name


def test_every_file_in_development_md_exists() -> None:
    text = (ROOT / "docs/development.md").read_text()
    named = re.findall(r"`((?:models|service|tests|docs|deploy)/[\w./-]*)`", text)
    assert len(named) > 15
    for path in named:
        assert (ROOT / path).exists(), path


def test_every_exit_code_is_in_the_table() -> None:
    table = API.partition("| exit code |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (\d) \|", table, re.MULTILINE) == re.findall(
        r"(?<=[ :])(\d) ", main.__doc__ or ""
    )
