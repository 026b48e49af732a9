"""Why a faster way declines a call, which the ordinary way then takes: one exception, one table.

Each reason is a member of `Why`. Its name is the code that the log, `report()` and
docs/reasons.md show: searching the sources for it finds the place that gives it. The part
before the first underscore says which way declined: GRAPH (models that graphs replay), PREFETCH
(maps), HELPER (the helper in C), FLOW (a dataflow of kernels).

What declines often in a steady program, as functions of the helper in C do, returns a value
(NotImplemented, None) and makes no exception.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator
from typing import Any

from .errors import UnsupportedError


class Verdict(enum.Enum):
    """What a reason says about the calls to come. Trials of graphs go by it."""

    FINAL = "no other input changes it"
    DIFFERENT = "something else was computed of this input; it counts once it happens again"
    UNDECIDED = "this input shows nothing; the next one may"


_FINAL, _DIFFERENT, _UNDECIDED = Verdict

_ARGUMENTS = "hand over one sparse tensor, and numbers, text, tensors, lists and dictionaries of those"
_READ_LESS = "read single entries of dictionaries; compute from features and coordinates"
_WRITE_LESS = "return new objects; adding entries to a dictionary is allowed"
_RETURN_IT = "return it instead"
_RETURNS = "return sparse tensors, their features, numbers and text"
_ROWS = "use the framework's pools and norms; run fp32 `nn.Linear` under autocast"
_ONE_STRUCTURE = "return the same structure for every input, and no numbers that follow from how many rows there are"
_OUTSIDE = "leave such operations to a part outside"
_SCALE = "nothing: a later input is tried; if none shows more, scale the weights or use bf16"
_REPORT = "report it, with the output of `python -m sparse_bridge doctor`"
_COMPILER = "see that this compiler works, or name another one in the variable `CC`"


@enum.unique
class Why(enum.Enum):
    """The reasons. text: one sentence, with fields for what is known at the call.  remedy: what a
    user can do about it; None where there is nothing."""

    # A model is not replayed: what it is given.
    GRAPH_OBJECT = "it is given a {}", _ARGUMENTS
    GRAPH_NO_TENSOR = "it is given no sparse tensor", _ARGUMENTS
    GRAPH_SEVERAL = "it is given {} sparse tensors; graphs are of one", _ARGUMENTS
    GRAPH_ATTRIBUTE = "{!r} of the {} that it is given is a {}", _ARGUMENTS
    GRAPH_TWO_PLACES = "it is given one object in two places", _ARGUMENTS
    GRAPH_NEW_KINDS = (
        "its calls are of ever new kinds: {}, {} were replayed; {}",
        "keep what changes from call to call in tensors, not in numbers, text or shapes",
    )
    GRAPH_SLOWER = (
        "replays take longer than its layers: {:.2f} ms, and {:.2f}",
        'nothing; `optimize="graphs"` replays it all the same',
    )
    GRAPH_FEATURES = "its sparse tensor has no features [N, C]", _ARGUMENTS
    GRAPH_HAS_MAPS = (
        "its layers use kernel maps or levels that its sparse tensor has from layers in front of it",
        "have one module hold all layers that share maps or levels",
    )
    GRAPH_COORDINATES = (
        "its coordinates are not int32 [N, 1 + D] on the device of its features",
        "hand over such coordinates",
    )
    GRAPH_ROWS = (
        "it is given no rows, or other numbers of features and coordinates",
        "hand over a row of each per site",
    )
    GRAPH_DUPLICATES = (
        "two of its rows have the same coordinates, or one lies outside of its grid",
        "merge such rows, or leave them out, in front of the model",
        _UNDECIDED,
    )
    GRAPH_BATCH_ITEMS = (
        "it computes over batch items, of which one has no rows, or which are those of other tensors, too",
        "leave out empty batch items; have a manager of their own for other tensors",
        _UNDECIDED,
    )
    # Where, and how it is called.
    GRAPH_DEVICE = "its features are not on a GPU", "move model and input to a GPU"
    GRAPH_MEMORY = (
        "memory is limited, and graphs have memory of their own",
        "call the model outside of `memory_limit`",
    )
    GRAPH_NO_ROOM = (
        "the GPU has no memory for a graph beside what the program uses at once",
        "use smaller batches, or nothing: layers run one by one",
        _DIFFERENT,
    )
    GRAPH_RANKS = "{} is spread over ranks", "nothing: models under DistributedDataParallel are replayed"
    GRAPH_OBSERVED = "{} looks at what runs", "nothing: it is replayed again without"
    GRAPH_NESTED = "a graph is being captured around it", "nothing: what is around it is replayed as one"
    GRAPH_HOOKS = (
        "a module or parameter of it has hooks, a buffer a gradient, or it trains where none are recorded",
        "take the hooks off, and call `.eval()` for inference",
    )
    GRAPH_OTHER_MODE = (
        "gradients are recorded in one part of it, and not in another",
        "nothing: its parts are replayed",
    )
    GRAPH_STEP_OPEN = (
        "another step of the model waits for its backward pass",
        "go backward first, or hand over both inputs as one batch",
    )
    GRAPH_CHANGED = (
        "something that it reads has changed: {}",
        "nothing: a new graph is captured once it stays; what changes in every call belongs in a tensor",
    )
    # What it reads.
    GRAPH_READS_OBJECT = "it reads {!r}, a {}", _READ_LESS
    GRAPH_READS_ALL = "it looks at all of a dictionary that it was given", _READ_LESS
    GRAPH_READS_LIST = (
        "it looks into {!r} of an object that it is given, which need not be the same in the next call",
        _READ_LESS,
    )
    GRAPH_READS_TENSOR = (
        "it looks at {!r} of an object that it is given, a tensor that is not its features or coordinates",
        _READ_LESS,
    )
    GRAPH_LOCAL = (
        "it goes on with {!r}, a {}",
        "behind the first sparse layer, read the object inside of the layers or from `self`",
    )
    GRAPH_FOREIGN_TENSOR = (
        "it computes with a tensor of shape {} that is none of its own parameters and buffers, "
        "nor the features that it is given",
        "register the tensor as a buffer, or make it of numbers by `torch.tensor(..., device=...)`; "
        "in place of `f[mask] = 0` write `f.masked_fill(mask, 0)`",
    )
    # What it writes.
    GRAPH_WRITES_OBJECT = "it writes to a {} that it is given", _WRITE_LESS
    GRAPH_WRITES_INPUT = "it changes the sparse tensor that it is given", _WRITE_LESS
    GRAPH_TAKES_ENTRIES = "it takes entries out of a dictionary that it was given", _WRITE_LESS
    GRAPH_KEEPS_VALUES = "{} keeps something of a call in {!r}", _RETURN_IT
    GRAPH_OTHER_PARAMETER = "it puts another tensor in the place of {}", _RETURN_IT
    # What it returns.
    GRAPH_RETURNS_UNKNOWN = "it returns {!r}, which it is not given", _RETURNS
    GRAPH_RETURNS_FOREIGN = "it returns a tensor of shape {} that it did not compute", _RETURNS
    GRAPH_RETURNS_SHARED = "it returns what it is given in several places", _RETURNS
    GRAPH_OUTPUT_MEMORY = (
        "tensors that it returns share memory, with each other or with its features",
        "return copies",
    )
    GRAPH_RETURNS_OBJECT = (
        "its output holds a {}; expected sparse tensors, their features, numbers and text, in "
        "lists, tuples, dicts and objects of which each holds a sparse tensor",
        _RETURNS,
    )
    GRAPH_RETURNS_LESS = "it returns less over a padded input", _ONE_STRUCTURE
    # Which way it takes.
    GRAPH_BRANCH = "it does not always come to its sparse layers", "choose the branch outside"
    GRAPH_FRONT = "nothing shows what it did in front of its sparse layers", None, _UNDECIDED
    GRAPH_NO_GRADIENT = (
        "its output does not depend on what is trained",
        "call `.eval()` on a model that is frozen; of one that is not, freeze whole parts",
    )
    GRAPH_SEPARATE = (
        "a backward pass by one of its outputs has nothing in common with one by another",
        "give `optimize` the parts of it",
    )
    GRAPH_INNER_GRADIENT = (
        "the program looks at the gradient of an output that others are computed from",
        "nothing: such a model is trained layer by layer",
    )
    GRAPH_MOMENTUM = ("momentum=None of a batch norm counts batches on the host", "give the norm a momentum")
    GRAPH_ROWS_ON_HOST = "{} needs the number of rows on the host", _OUTSIDE
    GRAPH_NEGATIVE = (
        "a strided layer rounds coordinates below 0 towards 0, unlike others",
        "shift coordinates so that they begin at 0",
        _UNDECIDED,
    )
    GRAPH_NO_LEVEL = "a tensor of shape {} has not a row for every site of a level", _OUTSIDE
    GRAPH_MAPS_OUTSIDE = (
        "a layer outside of it uses kernel maps of a level that it does not return",
        "return that level, too, or give `optimize` the module that holds both",
    )
    GRAPH_NOT_PREFETCHED = (
        "the kernel maps that it asks for are not prefetched",
        "nothing: too few maps are asked for, or inputs are too unlike each other",
    )
    # What it does in Python besides.
    GRAPH_PROFILED = (
        "a debugger or a profiler follows this thread, so that nothing shows what the model does in Python",
        "call the model without it",
        _UNDECIDED,
    )
    GRAPH_SIDE_EFFECT = "it calls {} ({}), which a replay would not repeat", _OUTSIDE, _DIFFERENT
    GRAPH_WRITES_STATE = "it writes to {} ({}), which lasts longer than the call", _RETURN_IT, _DIFFERENT
    GRAPH_READS_STATE = (
        "it reads {} ({}), a {}, whose changes cannot be seen",
        "read numbers, text, and lists, dictionaries and objects of them",
        _DIFFERENT,
    )
    GRAPH_HOST_READ = "it takes numbers of a tensor to the host by {} ({})", _OUTSIDE, _DIFFERENT
    GRAPH_CHOOSES_BY_ROWS = "it chooses by how many rows there are: {} ({})", _OUTSIDE, _DIFFERENT
    GRAPH_FEW_ROWS = "of {} rows it computes something else than its graph of more", _OUTSIDE, _DIFFERENT
    GRAPH_LARGE_STATE = "it reads {} ({}), which holds more than {} values", "keep tables in buffers", _DIFFERENT
    GRAPH_NO_SOURCE = (
        "what {} ({}) reads and writes is not known: its source cannot be read, or has changed",
        "keep the model in a file",
        _DIFFERENT,
    )
    # What the trial over a padded input shows.
    GRAPH_BUFFER = "{} differs over a padded input", "keep no counts of rows in buffers"
    GRAPH_GRADIENT_SHAPE = "{} has another shape over a padded input", _ROWS
    GRAPH_MIXED_ROWS = (
        "it mixes rows outside its sparse layers: {} is NaN in {} rows where rows that do not exist are NaN",
        _ROWS,
    )
    GRAPH_INDEX = (
        "rows that do not exist give {} an index outside of the tensor, or a share that is not from 0 to 1",
        "look up by coordinates, or clamp indices behind `torch.nan_to_num`",
    )
    GRAPH_SLICE = (
        "{} takes a part of the rows by their numbers, or several as one, and another scene may have fewer",
        _OUTSIDE,
        _DIFFERENT,
    )
    GRAPH_MIXED_GRADIENTS = (
        "it mixes rows outside its sparse layers and batch norms: over a padded input, {} is off "
        "by {:.2e}; {:.2e} would be rounding",
        _ROWS,
        _DIFFERENT,
    )
    GRAPH_OTHER_BITS = (
        "it computes something else over a padded input: {} is off by {:.1e} of its size in {} "
        "rows; where that is rounding, an operation outside its sparse layers rounds by how many "
        "rows there are, as batched products of torch in fp32 may",
        _ROWS,
        _DIFFERENT,
    )
    GRAPH_DIFFERS = "a replay gave something else than the layers: {}", _REPORT
    GRAPH_OUTPUT_ROWS = "{} differs in {} rows over a padded input", _ROWS, _DIFFERENT
    GRAPH_OUTPUT_SHAPE = "{} is {} over a padded input", _ONE_STRUCTURE, _DIFFERENT
    GRAPH_OUTPUT_COUNT = "it returns {} tensors, and {} over a padded input", _ONE_STRUCTURE, _DIFFERENT
    GRAPH_OUTPUT_OWNER = "{} is what it was given, or over a padded input it is", _ONE_STRUCTURE, _DIFFERENT
    GRAPH_OUTPUT_VALUE = "{} is {!r}, and {!r} over a padded input", _ONE_STRUCTURE, _DIFFERENT
    GRAPH_OUTPUT_CLASS = "{} is a {}, and a {} over a padded input", _ONE_STRUCTURE, _DIFFERENT
    GRAPH_OUTPUT_SHARED = "{} is one object in several places, or is not", _ONE_STRUCTURE, _DIFFERENT
    GRAPH_OUTPUT_KEYS = "{} holds {}, and {} over a padded input", _ONE_STRUCTURE, _DIFFERENT
    GRAPH_NAN = (
        "{} is NaN in {} rows, so that a trial over a padded input shows nothing: {} ends at {:.3g}",
        _SCALE,
        _UNDECIDED,
    )
    GRAPH_INFINITE = "its outputs or gradients are not finite, which shows nothing", _SCALE, _UNDECIDED
    GRAPH_NO_SIZES = "the last input does not tell how large the levels get", None, _DIFFERENT
    GRAPH_ERROR = "the trial raised {}: {}", "see what the model raises there: the trial calls it as you do", _DIFFERENT
    GRAPH_ROCM = (
        "ROCm gives wrong data in replayed graphs now and then",
        "`SPARSE_BRIDGE_CAPTURE=always` replays them all the same",
    )

    # Maps are not queued together.
    PREFETCH_LAYER = "a layer that the last inputs came to would raise: {}"
    PREFETCH_MEMORY = "there is no memory for all maps at once", "see `out of memory` in docs/troubleshooting.md"

    # There is no helper in C.
    HELPER_OFF = "turned off by SPARSE_BRIDGE_STARTUP=native=0", "unset it"
    HELPER_NOT_BUILT = "not built yet", "nothing: it is compiled in the background"
    HELPER_PLATFORM = "it is for CPython on Linux, this is {}"
    HELPER_NO_LOCK = "this Python runs without a global lock, on which the helper relies"
    HELPER_PYTHON = "it is for Python {} to {}", "use one of these, or update the package"
    HELPER_BYTE_ORDER = "it writes parameters of kernels in little-endian order"
    HELPER_NO_COMPILER = "no C compiler is installed (gcc, clang, cc, or the variable CC)", "install one"
    HELPER_NO_HEADERS = "the headers of Python are not in {} (package python3-dev)", "install that package"
    HELPER_SLOW_COMPILER = "{} took longer than {:g} seconds", _COMPILER
    HELPER_NOT_COMPILED = "{} failed with code {}: {}", _COMPILER
    HELPER_NOT_LOADED = (
        "compiling and loading it raised {}: {}",
        "see that the compiler works and that `SPARSE_BRIDGE_CACHE_DIR` can be written",
    )
    HELPER_READS = "it reads of {} what is not there: {}", _REPORT
    HELPER_ERROR = "installing it raised {}: {}", _REPORT

    # A dataflow of kernels does not serve, and plain torch does.
    FLOW_IRREGULAR = "an offset of the kernel map meets a row more than once", "use the dataflow `auto` or `grouped`"
    FLOW_DTYPE = "kernels do not multiply {}", "convert the layer to fp32, fp16 or bf16"
    FLOW_DEVICE_DTYPE = "{} does not multiply {}", "convert the layer to fp32 or fp16"
    FLOW_DEVICE = "Triton kernels do not run on {}: {}", "see `Triton kernels do not run on` in docs/troubleshooting.md"
    FLOW_FAULT = "({}) {}", "update driver and torch, then " + _REPORT

    def __init__(self, text: str, remedy: str | None = None, verdict: Verdict = _FINAL) -> None:
        self.text, self.remedy, self.verdict = text, remedy, verdict
        self._shown = f"{text} [{self._name_}]"

    def says(self, *details: Any) -> str:
        """The sentence with these details, and the code."""
        return self._shown.format(*details) if details else self._shown


class Refusal(UnsupportedError):
    """A faster way declines a call, for one of the reasons in the table.

    why: which one. `details` go into its sentence, and are not kept.
    """

    def __init__(self, why: Why, *details: Any) -> None:
        super().__init__(why.says(*details))
        self.why = why
        if _trial.made is not None:
            _trial.made.append(self)

    @property
    def verdict(self) -> Verdict:
        """What it says about the calls to come."""
        return self.why.verdict

    def __reduce__(self) -> Any:
        return _restored, (self.why, str(self))


class _Trial(threading.local):
    made: list[Refusal] | None = None  # in `never_caught`


_trial = _Trial()


@contextlib.contextmanager
def never_caught() -> Iterator[None]:
    """In this block a program's code runs, which may take a Refusal for an error of its own and go on: it is raised at
    the end then."""
    outer, _trial.made = _trial.made, []
    made = _trial.made
    try:
        yield
        if made:
            raise made[0]
    finally:
        _trial.made = outer
        made.clear()


def _restored(why: Why, text: str) -> Refusal:
    refusal = Refusal.__new__(Refusal, text)
    refusal.why = why
    return refusal
