"""One rank of the test pool: waits for calls on a pipe, runs them, sends back what they return."""

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Function:
    """A top-level function, by where another process finds it."""

    module: str
    qualname: str
    path: str

    @staticmethod
    def of(function: Callable[..., Any]) -> "Function":
        """Raises `ValueError` for lambdas and functions inside functions."""
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__}: ranks can only run top-level functions")
        path = function.__code__.co_filename
        return Function(function.__module__, function.__qualname__, path)

    def load(self) -> Callable[..., Any]:
        """The function, from its module; by path where the name leads to no module."""
        found: Any = _import(self.module, self.path)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return found


def _import(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Call:
    """What a worker is asked to do: `function(*args)` as one rank of a process group.

    Attributes:
        group: name of the process group, new whenever the old one must not be used again.
        arguments: the pickled arguments. They stay bytes until the function's module is loaded,
            so that classes of a test file can be among them.
    """

    function: Function
    arguments: bytes
    group: str
    world_size: int


@dataclass(frozen=True)
class Reply:
    """How a call ended: a pickled result, or the text of an error."""

    result: bytes | None = None
    error: str = ""


@dataclass(frozen=True)
class Home:
    """What a worker is born with: its rank, the store's port, the file for stacks."""

    rank: int
    port: int
    stacks: str
    timeout_s: float


def main(pipe: Connection, home: Home) -> None:
    """Serve calls until the pipe closes."""
    # Inductor would start compile processes of its own.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)
    stacks = open(home.stacks, "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    timeout = timedelta(seconds=home.timeout_s)
    store = dist.TCPStore("127.0.0.1", home.port, is_master=False, timeout=timeout)
    group = ""
    while True:
        try:
            call: Call = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        if call.group != group:
            _join(dist.PrefixStore(call.group, store), home, call.world_size)
            group = call.group
        pipe.send_bytes(pickle.dumps(_run(call)))


def _join(store: dist.Store, home: Home, world_size: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    timeout = timedelta(seconds=home.timeout_s)
    dist.init_process_group(
        "gloo", store=store, rank=home.rank, world_size=world_size, timeout=timeout
    )


def _run(call: Call) -> Reply:
    random.seed(0)
    torch.manual_seed(0)
    try:
        function = call.function.load()
        result = function(*pickle.loads(call.arguments))
        return Reply(result=pickle.dumps(result))
    except BaseException:
        return Reply(error=traceback.format_exc())
    finally:
        # Tests must not see each other's compiled code, settings, or dead models' memory.
        torch._dynamo.reset()
        gc.collect()
