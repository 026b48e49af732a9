"""What `importlib.metadata` says of stand-ins."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

import sparse_bridge

# The distribution, the framework, a profile, the version, and what is imported of it.
NAMES = [
    ("spconv", "spconv", None, "2.3.8", {"spconv"}),
    ("cumm", "spconv", None, None, {"cumm"}),
    ("torchsparse", "torchsparse", "2.1", "2.1.0", {"torchsparse"}),
    ("torchsparse", "torchsparse", "1.4", "1.4.0", {"torchsparse"}),
    ("MinkowskiEngine", "minkowski", "0.5", "0.5.4", {"MinkowskiEngine", "MinkowskiEngineBackend"}),
    ("MinkowskiEngine", "minkowski", "0.4", "0.4.3", {"MinkowskiEngine", "MinkowskiEngineBackend"}),
    ("flex_gemm", "flex_gemm", "1", "1.0.0", {"flex_gemm"}),
    ("flex_gemm", "flex_gemm", "2.0", "1.0.0", {"flex_gemm"}),
]


class Modules:
    """Finds modules as `finder` does, and no distributions."""

    def __init__(self, finder):
        self.find_spec = finder.find_spec


@pytest.fixture
def bare(monkeypatch):
    """A machine on which nothing is installed."""
    sparse_bridge.disable()
    kept = [Modules(one) if hasattr(one, "find_distributions") else one for one in sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", kept)
    for module in [one for one in sys.modules if one.partition(".")[0] in ("spconv", "cumm")]:
        monkeypatch.delitem(sys.modules, module)
    yield
    sparse_bridge.disable()


@pytest.mark.parametrize("name, framework, profile, version, imported", NAMES)
def test_versions_names_and_what_is_imported(bare, name, framework, profile, version, imported):
    def absent():
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
        assert name not in [one.metadata["Name"] for one in importlib.metadata.distributions()]

    absent()
    finders = list(sys.meta_path)
    with sparse_bridge.enable(framework, mode="standin", profile=profile):
        found = importlib.metadata.version(name)
        assert found == version or version is None
        for spelt in (name.lower(), name.replace("_", "-"), name.replace("_", ".")):
            assert importlib.metadata.version(spelt) == found
        assert importlib.metadata.metadata(name)["Name"] == name
        assert importlib.metadata.distribution(name).metadata["Version"] == found
        by_package = importlib.metadata.packages_distributions()
        assert {one for one, names in by_package.items() if name in names} == imported
        listed = [one.metadata["Name"] for one in importlib.metadata.distributions()]
        assert listed.count(name) == 1 and "MinkowskiEngineBackend" not in listed
    absent()
    assert sys.meta_path == finders


def test_an_installed_distribution_speaks_for_itself():
    """Of whatever version: a stand-in that answers its imports adds none of its name."""
    pytest.importorskip("spconv")
    before = importlib.metadata.version("spconv")
    with sparse_bridge.enable("torchsparse", "minkowski", "flex_gemm", mode="standin"):
        assert importlib.metadata.version("spconv") == before
    listed = [one.metadata["Name"] for one in importlib.metadata.distributions()]
    assert listed.count("spconv") <= 1
