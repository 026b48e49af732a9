"""The matrix of versions, runnable on one machine: `nox -l`, `nox -s oldest newest lint`.

    pip install nox
    nox -s oldest            # the oldest releases that are supported, a short meaningful part
    nox -s newest            # the newest that the index has, the whole suite
    nox -s "pairs(torch='2.6')"
    nox -s gpu               # in an environment that has the GPU's own torch already
    nox -s release           # sdist and wheel, checked away from the checkout; `-- dist` keeps them
    nox -s sbom -- dist FILE # what an installation of the wheel brings
    nox -s site              # the documentation, and whether its search finds what readers ask

Python versions that are not installed are passed over (`--error-on-missing-interpreters` insists).
torch's CPU builds come from its own index; NOX_TORCH names another requirement and index:
`NOX_TORCH="torch==2.13.0"`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "oldest", "newest"]

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
# torch -> (Triton that its GPU builds bring, numpy, newest Python with wheels of it)
PAIRS = {
    "2.4": ("3.0.0", "numpy<2", "3.12"),
    "2.5": ("3.1.0", "numpy<2", "3.12"),
    "2.6": ("3.2.0", "numpy<2.3", "3.13"),
    "2.7": ("3.3.1", "numpy<2.3", "3.13"),
    "2.8": ("3.4.0", "numpy", "3.13"),
    "2.9": ("3.5.1", "numpy", "3.14"),
    "2.10": ("3.6.0", "numpy", "3.14"),
    "2.13": ("3.7.1", "numpy", "3.14"),
    "2.14": ("3.8.0", "numpy", "3.14"),
    "2.15": ("3.9.0", "numpy", "3.14"),
}
INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = os.environ.get("NOX_TORCH", f"torch --index-url {INDEX}").split()
ROOT = Path(__file__).parent
OF_SDIST = ["tests/docs/test_pages.py", "tests/docs/test_figures.py", "tests/demo/test_points.py"]
ARCHIVES = (".whl", ".tar.gz")
TOOLS = ["pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "matplotlib>=3.7"]
# Every kernel compiled, layers in plain torch, all three frameworks: minutes on two cores.
SHORT = [
    "tests/kernels/test_old_triton.py",
    "tests/core/test_conv.py",
    "tests/core/test_maps.py",
    "tests/core/test_pool.py",
    "tests/core/test_self_check.py",
    "tests/core/test_rocm.py",
    "tests/core/test_device.py",
    "tests/api",
    "tests/adapters/spconv/test_functional.py",
    "tests/adapters/torchsparse/test_conv.py",
    "tests/adapters/minkowski/test_convolutions.py",
]


def _install(session: nox.Session, torch: str) -> None:
    triton, numpy, newest = PAIRS[torch]
    version = str(session.python or "3.10")
    if tuple(map(int, version.split("."))) > tuple(map(int, newest.split("."))):
        session.skip(f"torch {torch} has no wheels for Python {version}")
    session.install(f"torch=={torch}.*", "--index-url", INDEX)
    session.install(f"triton=={triton}", numpy, *TOOLS)
    session.install("--no-deps", "-e", ".")
    session.install("rich>=13", "filelock>=3.12")


@nox.session(python=PYTHONS)
@nox.parametrize("torch", list(PAIRS))
def pairs(session: nox.Session, torch: str) -> None:
    """One release of torch with its Triton, on every Python."""
    _install(session, torch)
    session.run("python", "-m", "pytest", "-q", "-n", "auto", *(session.posargs or SHORT))


@nox.session(python="3.10")
def oldest(session: nox.Session) -> None:
    """The lower ends of the ranges in pyproject.toml."""
    _install(session, next(iter(PAIRS)))
    session.run("python", "-m", "pytest", "-q", "-n", "auto", *(session.posargs or SHORT))


@nox.session(python=["3.12", "3.13", "3.14"])
def newest(session: nox.Session) -> None:
    """What an installation gets today: the README's own command."""
    session.install(*TORCH)
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "-n", "auto", *session.posargs)


# Releases of Triton, each under a torch of its own: the quick compile check for every GPU, and
# compiled code for two of AMD's on the emulator, with buffer operations and without.
TRITONS = ["3.6.0", "3.7.1", "3.8.0", "3.9.0"]
LANES = "tests/lanes/test_lanes.py"
ON_THE_EMULATOR = [
    f"{LANES}::test_emulated_gpu",
    f"{LANES}::test_replays_on_an_emulated_gpu",
    "tests/emulated/test_pipelined_loops.py",
]
EMULATED = [
    "tests/kernels/test_far_tensors.py",
    "tests/emulated/test_buffer_operations.py",
    "tests/core/test_self_check.py",
]


@nox.session(python="3.12")
@nox.parametrize("triton", TRITONS)
def tritons(session: nox.Session, triton: str) -> None:
    """One release of Triton. Older ones: `pairs`, which compiles every kernel."""
    torch = next(torch for torch, (its, *_) in PAIRS.items() if its == triton)
    session.install(f"torch=={torch}.*", "--index-url", INDEX)
    session.install("-e", ".[test]", f"triton=={triton}")
    session.run("python", "-m", "sparse_bridge", "doctor", "--targets", "--json")
    session.run("python", "-m", "pytest", "-q", "--slow", *ON_THE_EMULATOR)
    session.run("python", "-m", "pytest", "-q", "--slow", LANES, "-k", "interpreter")
    for arch in ("gfx942", "gfx1100"):
        environment = {"SPARSE_BRIDGE_TEST_ARCH": arch}
        session.run("python", "-m", "pytest", "-q", *EMULATED, env=environment)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests of a GPU and what `doctor` says, in the environment nox was started from."""
    session.run("python", "-m", "sparse_bridge", "doctor", "--json")
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and types."""
    session.install(*TORCH)
    session.install("-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def release(session: nox.Session) -> None:
    """Build both archives, check them, and use each where there is no checkout."""
    folder = Path(session.posargs[0] if session.posargs else session.create_tmp(), "").resolve()
    session.install("build", "twine", "pytest", "hypothesis")
    session.run("python", "-m", "build", "--outdir", str(folder))
    wheel, sdist = (max(folder.glob(f"*{kind}"), key=os.path.getmtime) for kind in ARCHIVES)
    session.run("twine", "check", "--strict", str(wheel), str(sdist))
    session.install(*TORCH)
    session.install(f"{wheel}[viz,scans]")
    with tempfile.TemporaryDirectory() as name:
        session.chdir(name)
        session.run("python", str(ROOT / "tools" / "wheel_check.py"), str(ROOT / "README.md"))
        session.run("python", "-m", "tarfile", "-e", str(sdist), name)
        session.chdir(Path(name, sdist.name.removesuffix(".tar.gz")))
        session.run("python", "-m", "pytest", "-q", *OF_SDIST)
        session.chdir(ROOT)


@nox.session
def sbom(session: nox.Session) -> None:
    """`-- DIST FILE`: the packages that the wheel in DIST brings along, as CycloneDX."""
    folder, file = (Path(word).resolve() for word in session.posargs)
    session.install(*TORCH)
    session.install(str(max(folder.glob("*.whl"), key=os.path.getmtime)))
    with tempfile.TemporaryDirectory() as name:  # the tool is not part of what it lists
        session.run("python", "-m", "venv", name)
        lister = Path(name, "bin", "python")
        session.run(str(lister), "-m", "pip", "install", "-q", "cyclonedx-bom", external=True)
        words = ("-m", "cyclonedx_py", "environment", session.virtualenv.location)
        session.run(str(lister), *words, "--output-file", str(file), external=True)


@nox.session
def site(session: nox.Session) -> None:
    """Build the documentation and ask its search what readers ask."""
    session.install(*TORCH)
    session.install(".[docs,test]")
    session.run("mkdocs", "build", "--strict", *session.posargs)
    session.run("python", "-m", "pytest", "-q", "tests/docs")
