"""Rules of the source: who may import whom, one place that knows devices, no fixed warp size, no long file."""

from __future__ import annotations

import ast
import pathlib
import re

import sparse_bridge
from tests.api.test_imports import FILES, imports_of, reaches
from tests.each import each_of, text_of, tree_of
from tests.kernels.warp_rule import fixed_warp_sizes

PACKAGE = pathlib.Path(sparse_bridge.__file__).parent
BASE = (
    "errors.py",
    "log.py",
    "names.py",
    "policy.py",
    "refusals.py",
    "settings.py",
    "state.py",
    "tolerances.py",
    "workers.py",
)
KERNELS = sorted((PACKAGE / "kernels").rglob("*.py"))
CORE = [path for path in FILES if path.relative_to(PACKAGE).parts[0] == "core"]
WITHOUT_TRITON = (
    "sparse_bridge.kernels.runtime.generation",
    "sparse_bridge.kernels.runtime.target",
    "sparse_bridge.kernels.runtime.parts",
    "sparse_bridge.kernels.runtime.fetched",
    "sparse_bridge.kernels.runtime.uploads",
    "sparse_bridge.kernels.gemm.product",
    "sparse_bridge.kernels.gemm.narrow",
    "sparse_bridge.kernels.tiles.narrow_tile",
    "sparse_bridge.kernels.tiles.queued_tile",
    "sparse_bridge.kernels.tiles.clamps",
    "sparse_bridge.kernels.tiles.activation_numbers",
    "sparse_bridge.kernels.tiles.epilogue_bits",
    "sparse_bridge.kernels.tiles.tile",
    "sparse_bridge.kernels.tiles.tile_config",
)
MOST_LINES = 350
LONGER = {
    "native/native.c",  # one program of static functions, in parts
    "export/player/native/sparse_bridge_rt.c",  # one file that programs take
}
ADAPTERS = [path for path in FILES if "adapters" in path.relative_to(PACKAGE).parts]
DEVICE_WORDS = (
    "get_device_capability",
    "get_device_properties",
    r"torch\.version",
    r"gfx\d",
    r"\bsm_\d",
    r"[\"']cuda[\"']",
)


def name_of(path):
    return str(path.relative_to(PACKAGE))


def jit_functions(path):
    """The functions of a file that Triton compiles."""
    for node in ast.walk(tree_of(path)):
        decorators = getattr(node, "decorator_list", ())
        if any("jit" in ast.unparse(decorator) for decorator in decorators):
            yield node


def untyped(tree):
    """Functions that Python runs and of which a type is missing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any(
            "jit" in ast.unparse(decorator) or "constexpr" in ast.unparse(decorator)
            for decorator in node.decorator_list
        ):
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            bare = [one for one in taken if one and one.annotation is None and one.arg not in ("self", "cls")]
            if bare or node.returns is None:
                yield node.name


def test_no_file_is_long():
    """Stand-ins included. A file that has become short enough leaves the list of longer ones."""
    sources = (path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h", ".cpp"))
    lines = {path.relative_to(PACKAGE).as_posix(): len(text_of(path).splitlines()) for path in sources}
    assert len(lines) > 700
    longer = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert longer.keys() == LONGER, longer


def test_the_rules_see_the_kernels():
    assert sum(len(list(jit_functions(path))) for path in KERNELS) > 15
    text = "@triton.jit\ndef a(x): ...\ndef b(x) -> int: ...\ndef c(self, x: int): ...\ndef d(*, x: int) -> int: ..."
    assert list(untyped(ast.parse(text))) == ["b", "c"]


@each_of(KERNELS, name_of)
def test_what_the_host_runs_has_types(path):
    """mypy lets files with jit functions do without; it reads what has types there as strictly as elsewhere."""
    assert list(untyped(tree_of(path))) == []


@each_of(BASE)
def test_the_base_imports_nothing_of_the_package_but_itself(name):
    below = {f"sparse_bridge.{path.removesuffix('.py')}" for path in BASE}
    found = [n for n in imports_of(PACKAGE / name, True) if n.startswith("sparse_bridge")]
    assert all(reaches({n}, *below) for n in found)
    assert not reaches(imports_of(PACKAGE / name, True), "torch", "triton")


@each_of(KERNELS, name_of)
def test_kernels_stand_on_the_base_alone(path):
    base = (f"sparse_bridge.{name.removesuffix('.py')}" for name in BASE if name != "settings.py")
    allowed = (*base, "sparse_bridge.native", "sparse_bridge.kernels")
    ours = {n for n in imports_of(path, True) if n.startswith("sparse_bridge")}
    assert ours == set(reaches(ours, *allowed))


@each_of(ADAPTERS, name_of)
def test_adapters_never_reach_for_kernels(path):
    assert not reaches(imports_of(path, True), "sparse_bridge.kernels")


@each_of(CORE, name_of)
def test_the_core_imports_kernels_only_where_it_needs_them(path):
    """At import time only what needs no Triton: machines without it get this far."""
    reached = reaches(imports_of(path, False), "sparse_bridge.kernels")
    assert set(reached) == set(reaches(set(reached), *WITHOUT_TRITON))


@each_of(WITHOUT_TRITON)
def test_what_the_core_imports_needs_no_triton(name):
    path = PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")
    assert not reaches(imports_of(path, False), "triton")
    ours = set(reaches(imports_of(path, False), "sparse_bridge.kernels"))
    assert ours == set(reaches(ours, *WITHOUT_TRITON, "sparse_bridge.kernels.runtime.architectures"))


@each_of(KERNELS, name_of)
def test_one_file_knows_devices(path):
    """No vendor, generation or wave size outside `target`: those are answers of a `Target`."""
    if path.name in ("architectures.py", "target.py", "tile_config.py", "clamps.py", "narrow_tile.py"):
        return  # this is where such answers live
    source = text_of(path)
    for word in DEVICE_WORDS:
        assert not re.search(word, source), word


@each_of(KERNELS, name_of)
def test_no_warp_size_is_written_down(path):
    """Threads are counted as num_warps x target.warp_size; no instruction of one vendor."""
    assert fixed_warp_sizes(text_of(path)) == []


PRODUCTS = ("torch.mm", "torch.addmm", "torch.matmul", "torch.nn.functional.linear", "F.linear")
OURS = [path for path in FILES if "offline_compile" not in path.parts]  # it looks for such words


def plain_products(path):
    """Products of many rows that go to BLAS directly. `rows.t() @ rows` sums over them instead."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            if not ast.unparse(node.left).endswith(".t()"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in PRODUCTS:
            yield ast.unparse(node)


@each_of([*CORE, *ADAPTERS], name_of)
def test_products_of_many_rows_go_through_one_file(path):
    """ROCm computes more than 2^19 rows of fp32 wrongly; `core.rocm` takes them in parts."""
    if path.name == "rocm.py":
        assert len(list(plain_products(path))) >= 3, "the rule sees them"
    elif path.name != "self_check_problems.py":  # on the CPU
        assert list(plain_products(path)) == []


# What runs on NVIDIA alone; everything else of `torch.cuda` exists under ROCm too.
CUDA_ONLY = re.compile(
    r"inline_asm|load_inline|cpp_extension|libdevice|__nv_|__shfl|__ballot|mma\.sync|cp\.async"
    r"|\b(cupy|numba|pycuda|pynvml|cudart|nvtx|nvrtc|ptx)\b",
    re.IGNORECASE,
)


@each_of(OURS, name_of)
def test_nothing_on_the_path_is_for_one_vendor(path):
    """Names and strings of the code itself; prose may speak of them."""
    tree = tree_of(path)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    words = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.append(node.id)
        elif isinstance(node, ast.Attribute):
            words.append(node.attr)
        elif isinstance(node, ast.alias):
            words.append(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words += [] if id(node) in docs else re.findall(r"[\w.]+", node.value)
    assert [word for word in words if CUDA_ONLY.search(word)] == []


@each_of(CORE, name_of)
def test_the_core_asks_no_vendor_questions(path):
    """`kernels.target` does; `rocm` and `known_faults` know faults of releases."""
    if path.name in ("rocm.py", "known_faults.py"):
        return  # faults of one vendor
    source = text_of(path)
    for word in DEVICE_WORDS[:-1]:
        assert not re.search(word, source), word


RELEASES = r"triton\.__version__|\bVERSION\b\[?|(hasattr|getattr)\((triton|tl|torch)\b"


@each_of([*KERNELS, *CORE], name_of)
def test_releases_are_told_apart_in_one_file(path):
    """Releases: `triton_compat`, `torch_compat`; whether there is a Triton at all: `target`."""
    found = re.search(RELEASES, text_of(path))
    if path.name in ("triton_compat.py", "torch_compat.py", "target.py"):
        assert found, "the rule sees them"
    else:
        assert not found


@each_of(FILES, name_of)
def test_pinned_memory_is_the_hosts(path):
    """Whatever the default device of a program is, of which torch pins nothing."""
    source = text_of(path)
    for call in re.findall(r"torch\.\w+\([^()]*(?:\([^()]*\)[^()]*)*pin_memory=[^()]*\)", source):
        assert 'device="cpu"' in call, call
    assert source.count("pin_memory=") == len(re.findall(r'device="cpu", pin_memory=', source))


def calling_themselves(tree):
    """Functions inside of functions that call themselves: each is a cycle of references, which keeps what it closes
    over until the garbage collector comes, such as a scene's memory."""
    found = []
    for outer in ast.walk(tree):
        for inner in ast.walk(outer) if isinstance(outer, ast.FunctionDef) else ():
            if isinstance(inner, ast.FunctionDef) and inner is not outer:
                names = (node.id for node in ast.walk(inner) if isinstance(node, ast.Name))
                found += [inner.name] if inner.name in names else []
    return found


def test_no_inner_function_calls_itself():
    text = "def f():\n    def g(n):\n        return g(n - 1)\n    return g"
    assert calling_themselves(ast.parse(text)) == ["g"]
    paths = sorted(PACKAGE.rglob("*.py"))
    assert [path.name for path in paths if calling_themselves(tree_of(path))] == []


def test_the_rule_of_vendors_sees_their_words():
    for word in ("tl.inline_asm_elementwise", "torch.cuda.cudart", "import cupy", "libdevice.exp"):
        assert CUDA_ONLY.search(word)
    for word in ("cudart_version", "torch.cuda.current_device", "ptx_words"):
        assert not CUDA_ONLY.search(word)


def test_text_of_users_keeps_its_colons():
    """`:car:` is a path or a name, no picture."""
    roots = [PACKAGE, *(PACKAGE.parent / name for name in ("benchmarks", "compat"))]
    calls = [
        (path, line) for root in roots for path in root.rglob("*.py") for line in path.read_text("utf-8").splitlines()
    ]
    consoles = [(path, line) for path, line in calls if re.search(r"\bConsole\(", line)]
    assert consoles and [one for one in consoles if "emoji=False" not in one[1]] == []
