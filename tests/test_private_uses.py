"""Each private name of a library that the product uses is there, in the form that we rely on.

`make lint` (SLF001 and PLC2701) finds every such use; its `noqa` says why there is no public way. A
row here turns red, with an update of the library, before a run does.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import forkserver, popen_forkserver, process
from pathlib import Path

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler

ROOT = Path(__file__).parents[1]
PRODUCT = ("runspec", "learner_jax", "bridge", "broadcast", "sampler", "verify")
SERVER = {"_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"}


def parameters(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters)


def jax_cudnn() -> None:
    private = import_module("jax._src.cudnn.fused_attention_stablehlo")
    given = {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type", "qkv_layout"}
    assert given <= parameters(private.dot_product_attention)
    assert private.MaskType.PADDING_CAUSAL


def jax_compilation_cache() -> None:
    private = import_module("jax._src.compilation_cache")
    assert "_cache" in private._get_cache.__code__.co_names  # read at each compilation


def jax_cache_interface() -> None:
    interface = import_module("jax._src.compilation_cache_interface").CacheInterface
    assert interface.__abstractmethods__ == {"get", "put"}
    assert set(interface.__annotations__) == {"_path"}


def aiohttp_factory() -> None:
    async def made_by() -> object:
        async with aiohttp.TCPConnector() as connector:
            return connector._factory()

    assert isinstance(asyncio.run(made_by()), ResponseHandler)
    assert "_factory" in aiohttp.TCPConnector._create_direct_connection.__code__.co_names


def vllm_call_utility() -> None:
    # Read, not imported: the import takes ten seconds.
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0], "v1/engine/core_client.py").read_text()
    tree = ast.parse(source)
    client = next(n for n in ast.walk(tree) if getattr(n, "name", "") == "AsyncMPClient")
    call = next(n for n in ast.walk(client) if getattr(n, "name", "") == "_call_utility_async")
    assert isinstance(call, ast.AsyncFunctionDef) and call.args.vararg is not None
    assert [arg.arg for arg in call.args.args] == ["self", "method"]
    assert [arg.arg for arg in call.args.kwonlyargs] == ["engine"]


def python_fork_server() -> None:
    assert isinstance(forkserver._forkserver, forkserver.ForkServer)
    assert forkserver.ensure_running.__self__ is forkserver._forkserver
    assert set(vars(forkserver.ForkServer())) >= SERVER


def python_process_config() -> None:
    assert isinstance(process.current_process()._config, dict)
    assert "tempdir" in inspect.getsource(import_module("multiprocessing.util").get_temp_dir)


def python_popen() -> None:
    assert "_Popen" in process.BaseProcess.start.__code__.co_names
    assert "process_obj" in parameters(popen_forkserver.Popen)


USES: list[tuple[str, set[str], Callable[[], None]]] = [
    ("learner_jax/attention/cudnn.py", {"_src"}, jax_cudnn),
    ("learner_jax/compile_cache.py", {"_src", "_cache"}, jax_compilation_cache),
    ("learner_jax/compile_cache.py", {"_src"}, jax_cache_interface),
    ("runspec/core/http_client.py", {"_factory"}, aiohttp_factory),
    ("sampler/engine/engine_process.py", {"_call_utility_async"}, vllm_call_utility),
    ("sampler/engine/processes.py", {"_forkserver", *SERVER}, python_fork_server),
    ("sampler/engine/processes.py", {"_config"}, python_process_config),
    ("sampler/engine/processes.py", {"_Popen"}, python_popen),  # overridden, which lint allows
]
"""File, private names of a library in it, what must be true of them."""


@pytest.mark.parametrize("use", USES, ids=[use[2].__name__ for use in USES])
def test_a_private_name_is_as_we_use_it(
    use: tuple[str, set[str], Callable[[], None]],
) -> None:
    file, names, holds = use
    text = (ROOT / file).read_text(encoding="utf-8")
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
    holds()


def test_every_use_that_lint_lets_pass_has_a_row() -> None:
    known = {(file, name) for file, names, _ in USES for name in names}
    found = set()
    for path in (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            code, _, codes = line.partition("# noqa:")
            if "SLF001" in codes or "PLC2701" in codes:
                names = re.findall(r"\.(_\w+)", code.removeprefix("self._"))
                named = {name for name in names if f"self.{name}" not in code}
                assert named, line
                found |= {(path.relative_to(ROOT).as_posix(), name) for name in named}
    assert found == known - {("sampler/engine/processes.py", "_Popen")}
