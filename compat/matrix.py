"""The matrix as data: which model runs with which data, dtype and size, and what is known to fail.

`compat/matrix/<framework>.toml` holds one `[[model]]` table per model:

    [[model]]
    number = 1                          # of the model list; 0: smoke list
    name = "SECOND"                     # unique
    framework = "spconv"                # spconv, torchsparse or minkowski
    module = "compat.models.spconv.second"
    preset = "kitti"                    # of compat.scenes
    features = 4                        # channels of the input
    # and where they differ from the defaults:
    dimension = 3
    batch_size = 2                      # at every size; default: that of the size
    options = { width = 16 }            # arguments of the module's build()
    dtypes = ["float32"]                # of parameters and features
    sizes = ["tiny", "small", "full"]
    tolerances = { float32 = 1e-3 }     # RMS error relative to the reference's RMS, per dtype
    train = true                        # false: inference only
    profile = "1.4"                     # of enable(), for torchsparse
    environment = { SPARSE_BRIDGE_RULES = "shared_keys" }    # of the processes that run it
    also = ["minkowski"]                # other frameworks that the model imports
    without_gradient = ["head.unused"]  # prefixes of parameters that the model itself leaves out

    [[model.expect]]                    # strict: a check that passes although listed is a failure
    check = "autocast_fp16"
    outcome = "unsupported"             # or "fail"
    reason = "..."
    device = "cuda"                     # these four narrow it down; left out: any
    dtype = "float32"
    mode = "standin"
    size = "small"
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import importlib
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparse_bridge.adapters import base
from sparse_bridge.errors import SettingError

from . import scenes

__all__ = ["CHECKS", "DTYPES", "FRAMEWORKS", "MATRIX", "Cell", "Expect", "Model", "cells", "load"]

MATRIX = pathlib.Path(__file__).with_name("matrix")
# The frameworks that there are models for.
FRAMEWORKS = tuple(name for name in base.ADAPTERS if (MATRIX.with_name("models") / name / "__init__.py").exists())
DTYPES = ("float32", "float16", "bfloat16", "float64")
DEVICES = ("cpu", "cuda")
MODES = ("standin", "patch", "auto")
CHECKS = (
    "import",
    "construct",
    "forward",
    "backward",
    "step",
    "autocast_fp16",
    "autocast_bf16",
    "eval",
    "tiny",
    "state_dict",
    "copy",
    "ddp",
    "native",
    "reference",
)


@dataclasses.dataclass(frozen=True)
class Expect:
    """A check that is known not to pass, and why; None matches anything."""

    check: str
    outcome: str
    reason: str
    device: str | None = None
    dtype: str | None = None
    mode: str | None = None
    size: str | None = None

    def __post_init__(self) -> None:
        _one_of("expect.check", self.check, CHECKS)
        _one_of("expect.outcome", self.outcome, ("fail", "unsupported"))
        _one_of("expect.device", self.device, (None, *DEVICES))
        _one_of("expect.dtype", self.dtype, (None, *DTYPES))
        _one_of("expect.mode", self.mode, (None, *MODES))
        _one_of("expect.size", self.size, (None, *scenes.SIZES))

    def applies(self, check: str, cell: Cell, mode: str) -> bool:
        """Whether it speaks of this check of the cell; mode: how the framework was answered."""
        wanted = (self.check, self.device, self.dtype, self.size)
        found = (check, cell.device, cell.dtype, cell.size)
        pairs = zip((*wanted, self.mode), (*found, mode), strict=True)
        return all(want in (None, have) for want, have in pairs)


@dataclasses.dataclass(frozen=True)
class Model:
    """One model of the matrix; the fields are those of the file format above."""

    number: int
    name: str
    framework: str
    module: str
    preset: str
    features: int
    dimension: int = 3
    batch_size: int | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtypes: Sequence[str] = ("float32",)
    sizes: Sequence[str] = scenes.SIZES
    tolerances: Mapping[str, float] = dataclasses.field(default_factory=dict)
    train: bool = True
    profile: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    also: Sequence[str] = ()
    without_gradient: Sequence[str] = ()
    expect: Sequence[Expect] = ()

    def __post_init__(self) -> None:
        _one_of("framework", self.framework, FRAMEWORKS)
        _one_of("preset", self.preset, scenes.PRESETS)
        for name in (*self.dtypes, *self.tolerances):
            _one_of("dtypes", name, DTYPES)
        for size in self.sizes:
            _one_of("sizes", size, scenes.SIZES)
        for other in self.also:
            _one_of("also", other, FRAMEWORKS)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a model: the unit that has a process of its own."""

    model: Model
    device: str
    dtype: str
    mode: str
    size: str

    @property
    def title(self) -> str:
        return f"{self.model.name} ({self.device}, {self.dtype}, {self.mode}, {self.size})"


def load(folder: pathlib.Path = MATRIX) -> list[Model]:
    """All models of a folder of TOML files, by framework and number.

    Raises:
        SettingError: a file does not follow the format; names file and model.
    """
    toml = _toml()
    models: list[Model] = []
    for path in sorted(folder.glob("*.toml")):
        for table in toml.loads(path.read_text()).get("model", []):
            try:
                expect = tuple(Expect(**entry) for entry in table.pop("expect", []))
                models.append(Model(**table, expect=expect))
            except (TypeError, ValueError) as error:
                raise SettingError(f"{path.name}, model {table.get('name')!r}: {error}") from None
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingError(f"model names occur twice: {', '.join(twice)}; expected unique names.")
    return sorted(models, key=lambda m: (FRAMEWORKS.index(m.framework), m.number or 99, m.name))


def cells(
    models: Iterable[Model],
    frameworks: Sequence[str] = (),
    names: Sequence[str] = (),
    device: str = "cpu",
    dtypes: Sequence[str] = (),
    modes: Sequence[str] = ("auto",),
    size: str = "small",
) -> list[Cell]:
    """The cells to run; an empty selection means all that the models list.

    names: numbers, names or shell patterns of them, in any case.

    Raises:
        SettingError: nothing matches.
    """
    chosen = [
        Cell(model, device, dtype, mode, size)
        for model in models
        if (not frameworks or model.framework in frameworks)
        and (not names or any(_matches(model, name) for name in names))
        and size in model.sizes
        for dtype in model.dtypes
        if not dtypes or dtype in dtypes
        for mode in modes
    ]
    if not chosen:
        raise SettingError(
            f"no model matches frameworks {list(frameworks)}, models {list(names)}, dtypes "
            f"{list(dtypes)}, size {size!r}; `compat --list` shows what there is."
        )
    return chosen


def _matches(model: Model, name: str) -> bool:
    wanted = name.lower()
    module = model.module.rpartition(".")[2]
    return name == str(model.number) or any(fnmatch.fnmatch(text.lower(), wanted) for text in (model.name, module))


def _one_of(what: str, value: object, known: Iterable[object]) -> None:
    if value not in known:
        names = ", ".join(str(one) for one in known if one is not None)
        raise ValueError(f"{what} is {value!r}; expected one of {names}.")


def _toml() -> Any:
    for name in ("tomllib", "tomli"):  # the second for Python 3.10
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise SettingError("the matrix is in TOML, which Python 3.10 reads with `pip install tomli`.")
