"""JAX under test: eight virtual CPU devices. The flags count only before the first JAX import.

Torch and numpy under test, here and in what tests start: one thread. Test processes share the
cores; where threads wait for each other on a busy core, torch takes up to six times as long.

Hypothesis under test: no example is too slow, for machines are busy.

Ctrl-C under test: what tests start hears it, also where the shell that started them ignores it.
"""

import gc
import logging
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests import preloaded
from tests.cost import (  # noqa: F401 (hooks of pytest's)
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_xdist_make_scheduler,
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Tests compile much and compute little: without LLVM's optimiser and XLA's fusion emitters
        # a program compiles in a fifth of the time.
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
    ]
)
# libtpu compiles in a third of the time, to programs of nearly the same memory.
os.environ["JAX_EXEC_TIME_OPTIMIZATION_EFFORT"] = "-1.0"
for library in ("OMP", "OPENBLAS"):  # read when torch and numpy are first imported
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of a shell's job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Generator[None]:
    """A command that is called in this process sets logging up, on a stream that ends with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def preload_server() -> None:
    """`tests.preloaded.Program` has vLLM imported."""
    preloaded.serve()


@pytest.fixture(scope="session")
def forked_engines(preload_server: None) -> Generator[None]:
    """Engines that tests start fork their processes from the server."""
    with preloaded.engines_forked():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules stay: looking for garbage among them would be a third of the time of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that count what is left at the end would complain
