import pytest

from .fake_gpu import FakeGpu


@pytest.fixture(scope="session")
def drivers(tmp_path_factory):
    """Both pretended drivers, loaded once: a process keeps what it has opened."""
    return {name: FakeGpu(name, tmp_path_factory.mktemp(name)) for name in ("cuda", "hip")}


@pytest.fixture
def gpu(request, drivers):
    """The pretended driver of NVIDIA's GPUs, or of the test's parameter."""
    own = drivers[getattr(request, "param", "cuda")]
    own.device()
    own.fail("")
    own.listen()
    yield own
    own.listen()
    assert own.error is None
    assert own.alive == 0  # nothing is left behind
