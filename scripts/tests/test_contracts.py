"""The import contracts hold, and each of them would notice an import that goes up."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import lenses
import pytest

grimp = pytest.importorskip("grimp")
layers = pytest.importorskip("importlinter.contracts.layers")

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS = {options["name"]: options for options in OPTIONS["contracts"]}


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph(*OPTIONS["root_packages"], cache_dir=None)


def kept(options, graph) -> bool:
    # import-linter reads every option as text, also from TOML.
    texts = {name: str(value) if isinstance(value, bool) else value for name, value in options.items()}
    contract = layers.LayersContract(options["name"], {"root_packages": OPTIONS["root_packages"]}, texts)
    return contract.check(graph, verbose=False).kept


def rooms(options, layer: str) -> list[str]:
    """The modules of one layer, by full name: siblings are written ``a | b``, an optional one in parentheses."""
    containers = [f"{container}." for container in options.get("containers", [])] or [""]
    names = [name.strip().strip("()") for name in layer.replace(":", "|").split("|")]
    return [container + name for container in containers for name in names]


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_is_kept_and_notices_an_import_that_goes_up(name, graph):
    options = CONTRACTS[name]
    assert options["type"] == "layers"
    assert kept(options, graph)
    for higher, lower in zip(options["layers"], options["layers"][1:], strict=False):
        importer, imported = rooms(options, lower)[0], rooms(options, higher)[0]
        assert {importer, imported} <= graph.modules, "a layer of the contract is no module"
        graph.add_import(importer=importer, imported=imported)
        try:
            assert not kept(options, graph), f"{importer} -> {imported} went unnoticed"
        finally:
            graph.remove_import(importer=importer, imported=imported)


@pytest.mark.parametrize("package", OPTIONS["root_packages"])
def test_every_package_has_a_contract_inside(package):
    assert [each for each in CONTRACTS.values() if package in each.get("containers", [])]


def test_no_lens_may_import_another():
    packages = {manifest.entry_point.partition(".")[0] for manifest in lenses.manifests().values()}
    (between_packages,) = [each for each in CONTRACTS.values() if "containers" not in each]
    assert set(rooms(between_packages, between_packages["layers"][0])) == packages


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def table_below(heading: str) -> dict[str, str]:
    """The first cell of each row, without its code marks, and the second."""
    section = ARCHITECTURE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", section, re.MULTILINE))


def test_the_page_on_architecture_has_the_rooms_of_the_contracts():
    for package, cell in table_below("The rooms of each package").items():
        (layers_of,) = [c["layers"] for c in CONTRACTS.values() if c.get("containers") == [package]]
        shown = [" | ".join(re.findall(r"`(\w+)`", layer)) for layer in cell.split("·")]
        assert shown == [layer for layer in reversed(layers_of) if layer != "__main__"], package


def test_the_files_that_a_call_goes_through_are_there():
    sources = [ROOT / "scripts", ROOT / "shared" / "src", *ROOT.glob("framework-internals/*/src")]
    sources += ROOT.glob("framework-internals/*/src/*")
    calls = table_below("Following a call")
    assert len(calls) == 6
    for call, cell in calls.items():
        for file in re.findall(r"`([\w/]+\.py)`", cell):
            assert any((source / file).is_file() for source in sources), f"{call}: {file}"


@pytest.mark.parametrize("package", OPTIONS["root_packages"])
def test_a_folder_of_a_package_has_at_most_twelve_entries(package):
    root = next(ROOT.glob(f"*/src/{package}"), None) or next(ROOT.glob(f"framework-internals/*/src/{package}"))
    for folder in (root, *(path.parent for path in root.rglob("__init__.py"))):
        entries = {path.name for path in folder.iterdir()} - {"__init__.py", "__main__.py", "py.typed", "templates"}
        entries -= {"__pycache__"}
        assert len(entries) <= 12, f"{folder}: {sorted(entries)}"


@pytest.mark.parametrize("sources", sorted(ROOT.glob("framework-internals/*/csrc")), ids=lambda path: path.parent.name)
def test_a_folder_of_kernels_has_at_most_twelve_entries(sources):
    for folder in (sources, *(path for path in sources.rglob("*") if path.is_dir())):
        entries = {path.name for path in folder.iterdir()} - {"README.md"}
        assert len(entries) <= 12, f"{folder}: {sorted(entries)}"
