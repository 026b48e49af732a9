"""Names and shapes of the sparse layers in published checkpoints, and whether a file has them."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import DataTypeError, SettingError, ShapeError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
# Where output channels, kernel and input channels of a convolution are kept, by spconv's version.
LAYOUTS = {"KRSC": "spconv 2.2 or later", "RSKC": "spconv 2.0 or 2.1", "RSCK": "spconv 1.x"}
_FIRST = 3  # faults that an error names


def _norm(name: str, width: int) -> Iterator[tuple[str, Shape]]:
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{part}", (width,)


def _conv(name: str, c_in: int, c_out: int, kernel: Shape = (3, 3, 3)) -> tuple[str, Shape]:
    return f"{name}.weight", (c_out, *kernel, c_in)


def _unit(name: str, c_in: int, c_out: int, kernel: Shape = (3, 3, 3)) -> Iterator[tuple[str, Shape]]:
    """A convolution and its norm, the first two of a sequence."""
    yield _conv(f"{name}.0", c_in, c_out, kernel)
    yield from _norm(f"{name}.1", c_out)


def second() -> dict[str, Shape]:
    """OpenPCDet's SECOND: the sparse backbone, for points with an intensity."""
    shapes = [*_unit("backbone_3d.conv_input", 4, 16), *_unit("backbone_3d.conv1.0", 16, 16)]
    for stage, (c_in, c_out) in enumerate([(16, 32), (32, 64), (64, 64)], 2):
        shapes += _unit(f"backbone_3d.conv{stage}.0", c_in, c_out)
        for number in (1, 2):
            shapes += _unit(f"backbone_3d.conv{stage}.{number}", c_out, c_out)
    return dict([*shapes, *_unit("backbone_3d.conv_out", 64, 128, (3, 1, 1))])


def _residual(name: str, c_in: int, c_out: int, project: str) -> Iterator[tuple[str, Shape]]:
    """Two convolutions with norms, and a 1x1x1 one called `project` where widths differ."""
    for number, width in ((1, c_in), (2, c_out)):
        yield _conv(f"{name}.conv{number}", width, c_out)
        yield from _norm(f"{name}.bn{number}", c_out)
    if c_in != c_out:
        yield from _unit(f"{name}.{project}", c_in, c_out, (1, 1, 1))


_ENCODER, _DECODER, _BLOCKS = (32, 64, 128, 256), (256, 128, 96, 96), (2, 3, 4, 6)
_HALF = (2, 2, 2)


def spunet() -> dict[str, Shape]:
    """Pointcept's SpUNet-v1m1 for ScanNet: colours and normals in, 20 classes out."""
    top = "backbone"
    shapes = [*_unit(f"{top}.conv_input", 6, 32, (5, 5, 5))]
    widths = (32, *_ENCODER)
    for stage, (c_in, c_out) in enumerate(itertools.pairwise(widths)):
        shapes += _unit(f"{top}.down.{stage}", c_in, c_out, _HALF)
        for block in range(_BLOCKS[stage]):
            shapes += _residual(f"{top}.enc.{stage}.block{block}", c_out, c_out, "proj")
    coarse = _ENCODER[-1]
    for step, width in enumerate(_DECODER):
        stage = len(_DECODER) - 1 - step
        shapes += _unit(f"{top}.up.{stage}", coarse, width, _HALF)
        for block in range(2):
            c_in = width if block else width + widths[stage]
            shapes += _residual(f"{top}.dec.{stage}.block{block}", c_in, width, "proj")
        coarse = width
    shapes += [_conv(f"{top}.final", coarse, 20, (1, 1, 1)), (f"{top}.final.bias", (20,))]
    return dict(shapes)


def minkunet34() -> dict[str, Shape]:
    """mmdet3d's MinkUNet34-W32 on its spconv backend, without the head."""
    top = "backbone"
    shapes = [*_unit(f"{top}.conv_input.0", 4, 32), *_unit(f"{top}.conv_input.1", 32, 32)]
    widths = (32, *_ENCODER)
    for stage, (c_in, c_out) in enumerate(itertools.pairwise(widths)):
        shapes += _unit(f"{top}.encoder.{stage}.0", c_in, c_in, _HALF)
        for block in range(_BLOCKS[stage]):
            before = c_out if block else c_in
            shapes += _residual(f"{top}.encoder.{stage}.{1 + block}", before, c_out, "downsample")
    coarse = _ENCODER[-1]
    for step, width in enumerate(_DECODER):
        shapes += _unit(f"{top}.decoder.{step}.0", coarse, width, _HALF)
        for block in range(2):
            before = width if block else width + widths[-2 - step]
            shapes += _residual(f"{top}.decoder.{step}.1.{block}", before, width, "downsample")
        coarse = width
    return dict(shapes)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A file whose sparse layers are all there.

    keys: how many were compared.  others: keys of other layers, which the project compares.
    layout: of the convolutions' weights, one of `LAYOUTS`.
    """

    keys: int
    others: int
    layout: str


def load(path: Path, trusted: bool) -> dict[str, Shape]:
    """Shapes by key, see `tensors`."""
    return {key: tuple(value.shape) for key, value in tensors(path, trusted).items()}


def require_file(path: Path, option: str) -> None:
    """SettingError where there is none. Ask before torch is imported, which takes seconds."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "there is no such file"
        raise SettingError(f"{option} {path}: {what}; expected a file, which you download first.")


def tensors(path: Path, trusted: bool) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by key; "module." in front of keys is left out.

    trusted: unpickle whatever the file holds.
    Raises: SettingError: no such file. DataTypeError: no checkpoint, or one that holds more than
        tensors and is not trusted.
    """
    require_file(path, "--checkpoint")
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if trusted or "weights_only" not in str(error):
            raise _unreadable(path, error) from None
        raise DataTypeError(
            f"{path} holds more than tensors, or is no checkpoint. If you trust whoever made it, "
            "pass --trust: reading it may run code that it contains."
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, AttributeError, ImportError) as error:
        raise _unreadable(path, error) from None
    for name in ("model_state", "state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    items = content.items() if isinstance(content, Mapping) else ()
    weights = {str(key).removeprefix("module."): value for key, value in items if isinstance(value, torch.Tensor)}
    if not weights:
        raise DataTypeError(
            f"{path} holds a {type(content).__name__} without weights; expected a checkpoint with "
            "'model_state' or 'state_dict'."
        )
    return weights


def _unreadable(path: Path, error: BaseException) -> DataTypeError:
    words = str(error).strip().splitlines()
    reason = words[0] if words else type(error).__name__
    return DataTypeError(f"{path} is no checkpoint that torch reads ({reason}); download it again.")


def compare(stored: Mapping[str, Shape], expected: Mapping[str, Shape], what: str) -> Checked:
    """Whether a checkpoint has the sparse layers of `what`, in one layout of weights.

    Raises: ShapeError, with the number of faults and the first ones.
    """
    missing = [key for key in expected if key not in stored]
    top = next(iter(expected)).partition(".")[0] + "."
    more = [
        key for key in stored if key.startswith(top) and key not in expected and not key.endswith("num_batches_tracked")
    ]
    fitting = {key: layouts(shape, stored[key]) for key, shape in expected.items() if key in stored}
    wrong = [key for key, names in fitting.items() if not names]
    faults = [f"{len(missing)} of {len(expected)} keys are missing ({_some(missing)})"] * bool(missing)
    faults += [f"{len(wrong)} have another shape ({_shapes(wrong, stored, expected)})"] * bool(wrong)
    faults += [f"{len(more)} belong to other layers ({_some(more)})"] * bool(more)
    if not faults:
        common = [name for name in LAYOUTS if all(name in names for names in fitting.values())]
        if common:
            return Checked(len(expected), len(stored) - len(expected), common[0])
        faults = ["its weights are stored in different layouts"]
    raise ShapeError(f"these are not the weights of {what}: {'; '.join(faults)}.")


def layouts(expected: Shape, got: Shape) -> tuple[str, ...]:
    """The layouts in which weights of this shape would have the shape that was found."""
    if len(expected) != 5:
        return tuple(LAYOUTS) if got == expected else ()
    out, *kernel, channels = expected
    stored = {"KRSC": expected, "RSKC": (*kernel, out, channels), "RSCK": (*kernel, channels, out)}
    return tuple(name for name, shape in stored.items() if shape == got)


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:_FIRST]) + (", ..." if len(keys) > _FIRST else "")


def _shapes(keys: list[str], got: Mapping[str, Shape], expected: Mapping[str, Any]) -> str:
    return _some([f"{key} {list(got[key])} for {list(expected[key])}" for key in keys])
