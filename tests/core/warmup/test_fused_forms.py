"""What follows a layer: guessed before its first call, compiled for other scenes once known."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core.conv import kernel_products, registry
from sparse_bridge.core.conv.dataflow import LayerProduct
from sparse_bridge.core.conv.epilogue import Epilogue, Norm
from sparse_bridge.core.conv.kernel_products import GatherProduct, KernelDataflow
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.core.warmup import compilation, fused_forms
from sparse_bridge.core.warmup.product_kernels import Expected, Sizes
from sparse_bridge.kernels.runtime import precompile
from sparse_bridge.kernels.runtime.target import Target
from sparse_bridge.kernels.tiles.epilogue_bits import AFFINE, NORM, RESIDUAL

CPU, HALF = torch.device("cpu"), torch.float16
HOPPER = Target("cuda", "sm_90", 32, 132, 227 << 10, raw=True)
VECTOR = torch.ones(64, dtype=HALF)
END = Epilogue(None, "relu", 0.0, Norm(VECTOR, VECTOR, VECTOR, VECTOR, 1e-3))
BLOCK = END._replace(residual=VECTOR)


def product_of(epilogue, target=HOPPER, flow=None, device=CPU):
    weight = torch.empty(64, 27, 64, dtype=HALF)
    layer = LayerProduct(target, device, HALF, "ieee", layout_of(weight, "ovi", 1), epilogue.form)
    return GatherProduct(flow or registry.entry("masked").by_rule(), layer)


def scene(n_rows, n_offsets=27):
    return Rulebook(n_rows, n_rows, n_offsets, CPU, symmetric=True)


def inputs_of(epilogue):
    x = torch.empty((4, 64), dtype=HALF)
    return x, torch.empty(1, dtype=HALF), epilogue.vectors


@pytest.fixture
def launches(monkeypatch):
    """(kernel, constants by name, key, whether nothing waits for a lock) of every launch."""
    from sparse_bridge.kernels.runtime.launch import Kernel

    seen = []

    def launch(self, device, target, grid, args, constants, options, key):
        assert precompile.futures() is not None, "beforehand"
        free = compilation._lock.acquire(blocking=False)
        if free:
            compilation._lock.release()
        seen.append((self.name, dict(zip(self.constants, constants, strict=True)), key, free))

    monkeypatch.setattr(Kernel, "launch", launch)
    return seen


def tell(epilogue, rows=20_000, **about):
    product = product_of(epilogue, **about)
    compilation.compile_fused(product, scene(rows), 0, inputs_of(epilogue))


class TestOtherSizes:
    def test_each_form_once(self, launches):
        tell(BLOCK)
        products = [(key, held) for name, held, key, _ in launches if name == "gather_gemm"]
        assert len({key for key, _ in products}) == len(products) == len(launches) >= 2
        assert {held["BLOCK_M"] for _, held in products} == {64, 128}
        assert {held["BLOCK_N"] for _, held in products} == {32, 64}
        assert all(held["EPILOGUE"] == NORM | AFFINE | RESIDUAL for _, held in products)
        assert all(free for *_, free in launches)

    def test_the_likeliest_come_first_and_the_own_one_is_left_out(self, launches):
        tell(END, rows=40_000)  # tiles of 128 rows, as twice as many take
        first = launches[0][1]
        assert (first["BLOCK_M"], first["BLOCK_N"]) != (128, 64)

    def test_sizes_that_need_wide_offsets_are_left_out(self, launches):
        tell(END, rows=2_000_000)
        assert not any(held["WIDE"] for name, held, _, _ in launches if name == "gather_gemm")

    def test_silence(self, launches, fake_gpu):
        with settings.override(warmup=False):
            tell(END)
        tell(END, target=dataclasses.replace(HOPPER, raw=False))
        fake_gpu.has(capturing=True)
        tell(END, device=torch.device("cuda", 0))
        assert launches == []

    def test_threads(self, launches):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: tell(BLOCK), range(8)))
        assert len(launches) % 8 == 0 and precompile.dry_runs == 0

    def test_faults_stay_here(self, launches, monkeypatch, caplog):
        def broken(*_):
            raise RuntimeError("no memory")

        monkeypatch.setattr(fused_forms, "launch_over", broken)
        with caplog.at_level("DEBUG", "sparse_bridge"):
            tell(END)
        assert "no memory" in caplog.text and precompile.dry_runs == 0


class Nothing(KernelDataflow):
    """Launches nothing."""

    name, packed = "masked", True

    def view(self, rulebook, side, target):
        return None, False

    def launch(self, spec, table, n_rows, n_in):
        class Launch:
            blank = False

            def __call__(self, x, weight, vectors, y):
                return y

        return Launch()


@pytest.mark.parametrize(("epilogue", "calls"), [(END, 1), (BLOCK, 1), (Epilogue(), 0), (Epilogue(VECTOR), 0)])
def test_a_product_is_told_once(monkeypatch, epilogue, calls):
    told = []
    monkeypatch.setattr(kernel_products, "_listeners", [lambda *about: told.append(about)])
    product = product_of(epilogue, flow=Nothing())
    for rows in (20_000, 20_000, 300, 90_000):
        x = torch.empty((rows, 64), dtype=HALF)
        residual = None if epilogue.residual is None else torch.empty_like(x)
        end = epilogue._replace(residual=residual)
        product(scene(rows), 0, x, torch.empty((64, 27, 64), dtype=HALF), end)
    assert len(told) == calls and all(one[0] is product for one in told)


def test_the_warm_up_listens_once():
    before = list(kernel_products._listeners)
    kernel_products.on_first_fused(compilation.compile_fused)
    assert kernel_products._listeners == before and before.count(compilation.compile_fused) == 1


class TestGuesses:
    def expected(self, shape=(64, 27, 64), **about):
        weight = torch.empty(shape, dtype=about.pop("dtype", HALF), device="meta")
        layout = about.pop("layout", "ovi")
        held = {"epilogue": Epilogue(), "symmetric": True, **about}
        return Expected(self, weight, layout, **held)

    def forms(self, one):
        return [(end.epilogue.form.parts, end.epilogue.activation) for end in fused_forms.followed(one)]

    def test_norm_sum_and_activation(self):
        assert self.forms(self.expected()) == [(6, "relu"), (14, "relu")]
        assert self.forms(self.expected((96, 27, 64))) == [(6, "relu")]
        assert self.forms(self.expected((27, 64, 64), layout="vio")) == [(6, "relu"), (14, "relu")]
        assert self.forms(self.expected((64, 8, 64), symmetric=False)) == [(6, "relu")]
        pointwise = self.expected((1, 64, 32), layout="vio", pointwise=True)
        assert self.forms(pointwise) == [(6, None), (6, "relu")]

    def test_none_where_it_is_known_or_unlikely(self):
        assert self.forms(self.expected(trains=True)) == []
        assert self.forms(self.expected(sizes=Sizes(8, 8))) == []
        assert self.forms(self.expected(epilogue=Epilogue(VECTOR))) == []
        assert self.forms(self.expected(epilogue=END)) == []

    def test_a_container_that_ends_in_a_norm_is_added_to(self):
        normed = END._replace(activation=None)
        assert self.forms(self.expected(epilogue=normed)) == [(14, "relu")]
        assert self.forms(self.expected((96, 27, 64), epilogue=normed)) == []

    def test_only_where_layers_wait(self):
        assert not fused_forms.waits()
        with torch.no_grad():
            assert fused_forms.waits()
            with settings.override(optimize="off"):
                assert not fused_forms.waits()
        with torch.inference_mode():
            assert not fused_forms.waits()
