"""The tensorview stand-in, attribute by attribute beside the real cumm where it is installed."""

from __future__ import annotations

import copy
import pickle
import time

import numpy as np
import pytest
import torch

from sparse_bridge.adapters.spconv.upstream import _tv_tensor
from sparse_bridge.adapters.spconv.upstream import tensorview as tv

NUMPY_DTYPES = ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]


@pytest.fixture
def real():
    module = pytest.importorskip("cumm.tensorview")
    if "sparse_bridge" in (getattr(module, "__file__", "") or ""):
        pytest.skip("a stand-in answers the import")
    return module


def test_constants_and_members_match_cumm(real):
    for name in tv.__all__:
        if isinstance(getattr(tv, name), int):
            assert getattr(tv, name) == getattr(real, name), name
    members = real.gemm.Activation.__members__
    assert {n: m.value for n, m in members.items()} == {n: m.value for n, m in tv.Activation.__members__.items()}
    for name in NUMPY_DTYPES:
        array = np.zeros(2, name)
        assert tv.from_numpy(array).dtype == real.from_numpy(array).dtype
    for code in (tv.float16, tv.int64, tv.custom80):
        assert tv.tvdtype_itemsize(code) == real.tvdtype_itemsize(code)
    for code in (*real.ALL_TV_TENSOR_DTYPES, tv.unknown):
        assert tv.tvdtype_bitsize(code) == real.tvdtype_bitsize(code)
    for name in ("ALL_TV_TENSOR_DTYPES", "NPDTYPE_TO_TENSOR_MAP", "TENSOR_TO_NPDTYPE_MAP"):
        assert getattr(tv, name) == getattr(real, name), name
    assert tv.check_cuda_error() is real.check_cuda_error() is None
    if not torch.cuda.is_available():
        assert tv.get_compute_capability() == real.get_compute_capability() == (-1, -1)
    assert tv.CUDAKernelTimer(True).enable is real.CUDAKernelTimer(True).enable is True
    for module in (tv, real):
        with pytest.raises(AttributeError):
            module.CUDAKernelTimer(True).enable = False
        timer = module.KernelTimer(True, False).get_cpp_object()
        assert isinstance(timer, module.CUDAKernelTimer)
        with pytest.raises(AssertionError):
            module.KernelTimer(False).get_cpp_object()


@pytest.mark.parametrize("name", ["f4", "i8", "u4", "bool"])
def test_joined_tensors_match_cumm(real, name):
    parts = [np.arange(6).reshape(2, 3).astype(name), np.ones((1, 3), name)]
    joined = [m.cat_first_axis([m.from_numpy(part) for part in parts]) for m in (tv, real)]
    assert joined[0].dtype == joined[1].dtype
    np.testing.assert_array_equal(joined[0].numpy(), joined[1].numpy())
    wrong = [[], [parts[0], parts[1].astype("f8")], [parts[0], parts[0].T], [np.zeros((), name)]]
    for arrays in wrong:
        with pytest.raises(tv.TvArgumentError, match="cannot join"):
            tv.cat_first_axis([tv.from_numpy(np.ascontiguousarray(a)) for a in arrays if a.ndim])
    wide = tv.from_torch(torch.ones(2, 2, dtype=torch.bfloat16))
    assert tv.cat_first_axis([wide, wide[:1]]).shape == [3, 2]


def frozen(module):
    """What can be done to memory that is for reading alone."""
    fixed = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    held = module.from_numpy(fixed.copy())
    fixed.flags.writeable = False
    seen = []
    for made in (held.get_readonly(), held.get_readonly()[1:], module.from_numpy(fixed)):
        changes = (lambda t: t.zero_(), lambda t: t.fill_float_(1), lambda t: t.fill_int_(1), lambda t: t.copy_(t))
        for change in changes:
            with pytest.raises(RuntimeError):
                change(made)
        copied = made.clone()
        seen += [made.is_readonly(), made.numpy().tolist(), copied.is_readonly()]
        seen += [made.T.is_readonly(), made.view([-1]).is_readonly(), copied.zero_().shape]
    same = held.get_readonly().byte_pointer() == held.byte_pointer()
    return seen, same, held.is_readonly(), module.zeros([2]).is_readonly()


def test_memory_for_reading_alone_matches_cumm(real):
    assert frozen(tv) == frozen(real)


def test_memory_for_reading_alone_stays_as_it_is():
    """Wherever it is, and by whatever way it is reached."""
    for held in (tv.zeros([2, 2]), tv.from_torch(torch.zeros(2, 2, dtype=torch.bfloat16))):
        made = held.get_readonly()
        tv.to_torch(made).fill_(3)
        assert not tv.to_torch(held).any() and tv.to_torch(held).fill_(4).all()
        assert tv.to_torch(made)[0, 0] == 4
        for view in (made[0], made.T, made.unsqueeze(0), made.type_view(tv.int16, [-1])):
            assert view.is_readonly()
    with pytest.raises(ValueError, match="read-only"):
        tv.zeros([2]).get_readonly().numpy_view()[0] = 1
    for call, kind in (
        (lambda: tv.zeros([2]).gpu_address(), ValueError),
        (lambda: tv.zeros([2]).is_col_major_matrix(), ValueError),
        (lambda: _tv_tensor.output(tv.from_numpy(np.arange(3.0)[::-1])), tv.TvArgumentError),
    ):
        with pytest.raises(kind):
            call()
    assert not tv.zeros([2]).pinned()


def test_tensor_facts_match_cumm(real):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for change in (
        lambda t: t,
        lambda t: t[1],
        lambda t: t[0:1],
        lambda t: t[:, 1:2],
        lambda t: t.T,
        lambda t: t.view([3, 2]),
        lambda t: t.unsqueeze(1),
        lambda t: t.unsqueeze(0).squeeze(),
        lambda t: t.transpose(0, 1),
        lambda t: t.select(0, 1),
        lambda t: t.slice_first_axis(1, 2),
        lambda t: t.slice_axis(1, 0, 2),
        lambda t: t.clone(),
    ):
        mine, theirs = (change(m.from_numpy(array.copy())) for m in (tv, real))
        for name in ("shape", "dtype", "device", "ndim", "size", "itemsize"):
            assert getattr(mine, name) == getattr(theirs, name), name
        for name in ("is_contiguous", "bytesize", "empty", "is_readonly"):
            assert getattr(mine, name)() == getattr(theirs, name)(), name
        if mine.ndim == 2:
            assert mine.is_col_major_matrix() == theirs.is_col_major_matrix()
        assert mine.dim(0) == theirs.dim(0)
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


@pytest.mark.parametrize("name", ["zeros", "full"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, 1])
def test_factories_match_cumm(real, name, dtype):
    value = () if name == "zeros" else (3,)
    mine, theirs = (getattr(m, name)([2, 3], *value, dtype) for m in (tv, real))
    assert mine.dtype == theirs.dtype
    np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_memory_is_shared():
    array = np.zeros((2, 3), np.float32)
    wrapped = tv.from_numpy(array)
    assert np.shares_memory(wrapped.numpy_view(), array)
    assert not np.shares_memory(wrapped.numpy(), array)
    wrapped[1].fill_float_(2.5)
    assert array.tolist() == [[0] * 3, [2.5] * 3]
    wrapped.copy_(tv.full([2, 3], 4))
    assert (array == 4).all() and tv.to_torch(wrapped).data_ptr() == wrapped.byte_pointer()
    assert (np.asarray(wrapped.zero_()) == 0).all() and not array.any()
    assert wrapped[0, 0].shape == [] and wrapped.stride == [3, 1]
    source = torch.ones(3, requires_grad=True)
    assert tv.from_torch(source).byte_pointer() == source.data_ptr()
    # What torch cannot share it copies.
    assert tv.to_torch(tv.from_numpy(np.arange(3.0)[::-1])).tolist() == [2, 1, 0]
    assert tv.to_torch(tv.from_numpy(np.frombuffer(b"abc", np.uint8))).tolist() == [97, 98, 99]


def test_bfloat16_stays_a_torch_tensor():
    wrapped = tv.from_torch(torch.ones(2, 2, dtype=torch.bfloat16))
    assert wrapped.dtype == tv.bfloat16 and wrapped.device == -1 and wrapped.itemsize == 2
    assert tv.to_torch(wrapped.clone().T[0:1]).shape == (1, 2)
    with pytest.raises(tv.TvDataTypeError):
        wrapped.numpy_view()


def test_bad_arguments():
    for call in (
        lambda: tv.from_numpy([1, 2]),
        lambda: tv.from_numpy(torch.zeros(2)),
        lambda: tv.zeros(3),
        lambda: tv.to_torch(np.zeros(3)),
        lambda: tv.from_numpy(np.zeros(3, np.complex64)),
        lambda: tv.zeros([2], tv.bfloat16),
        lambda: tv.zeros([2], 55),
        lambda: tv.from_numpy(np.zeros((2, 3)).T).view([6]),
        lambda: tv.zeros([2]).copy_(tv.zeros([3])),
    ):
        with pytest.raises((tv.TvArgumentError, tv.TvDataTypeError)):
            call()


def test_activation_is_a_value():
    act = tv.Activation
    for name, member in act.__members__.items():
        assert getattr(act, name) is member and act(member.value) is member
        assert copy.deepcopy(member) is member and pickle.loads(pickle.dumps(member)) is member
        assert hash(member) == int(member) == member.value and member.name == name
    assert act.ReLU != 1 and not isinstance(act.ReLU, int) and act.ReLU != act.Sigmoid
    assert (str(act.ReLU), repr(act.ReLU)) == ("Activation.ReLU", "<Activation.ReLU: 1>")
    assert {act.None_: "none"}[act(0)] == "none"
    with pytest.raises(tv.TvArgumentError):
        act(9)


def test_activation_loads_from_a_bare_pickle():
    # Upstream's form: a blank object, then its number as the state.
    text = b"\x80\x02csparse_bridge.adapters.spconv.upstream.tensorview\nActivation\n)\x81K\x01b."
    loaded = pickle.loads(text)
    assert loaded == tv.Activation.ReLU and loaded.name == "ReLU"


def test_timers_without_a_gpu_record_nothing(capsys, fake_gpu):
    fake_gpu.has(available=False)
    timer = tv.KernelTimer(True)
    with timer.namespace("net"), timer.record("conv"):
        pass
    assert not timer.enable and timer.get_all_pair_time() == {}
    times = {"a.b.c": 1.0, "a.c": 2.0, "xb": 3.0}
    assert tv.KernelTimer.collect_by_name("b", times) == {"a.b.c": 1.0}
    plain = tv.CUDAKernelTimer(True)
    plain.push("net")
    plain.record("x")
    pair = plain.insert_pair("t", "x", "y")
    plain.pop()
    assert plain.has_pair(pair) and plain.get_all_pair_duration() == {"net.t": -1.0}
    plain.sync_all_event()
    with tv.measure_and_print("gpu"):
        pass
    assert capsys.readouterr().out == "" and tv.is_cpu_only() and tv.div_up(5, 2) == 3


def test_cpu_timers_measure(capsys):
    out = [0.0]
    with tv.measure_and_print_cpu("step", out=out):
        time.sleep(0.002)
    assert out[0] >= 2 and capsys.readouterr().out.startswith("step: ")
    with tv.measure_duration_cpu() as measured:
        time.sleep(0.002)
    assert measured.duration >= 2
    with tv.measure_duration_cpu(enable=False) as measured:
        pass
    assert measured.duration == -1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    moved = tv.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3)).cuda()
    assert moved.device == 0 and moved.dtype == tv.float32 and moved.cuda() is moved
    assert moved.gpu_address() == tv.to_torch(moved).data_ptr()
    pinned = tv.from_torch(torch.zeros(2).pin_memory())
    assert pinned.pinned() and not moved.pinned() and tv.get_compute_capability(0)[0] >= 7
    assert moved.cpu().device == -1 and moved.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert moved[1].clone().zero_().numpy().tolist() == [0, 0, 0]
    assert tv.zeros([2], np.int32, device=0).fill_int_(3).numpy().tolist() == [3, 3]
    with pytest.raises(RuntimeError):
        moved.numpy_view()
    timer = tv.KernelTimer()
    with timer.namespace("net"), timer.record("add"):
        tv.to_torch(moved).add_(1)
    assert timer.get_all_pair_time()["net.add"] >= 0
    with tv.measure_duration() as measured:
        tv.to_torch(moved).add_(1)
    assert measured.duration > 0
