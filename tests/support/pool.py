"""run_ranks: run a function on several ranks, in worker processes that outlive a test.

Starting a process that imports torch takes seconds, so the workers are started once, when they are
first needed, and serve every test of the session. They are replaced when a call leaves them in a
state that no later test should meet: a rank that hangs, dies, or waits for one that raised.
"""

import atexit
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support import worker

MAX_RANKS = 4
TIMEOUT_S = 120.0
# After one rank raised, the others get this long to end by themselves before they are replaced.
GRACE_S = 3.0


class RankFailed(AssertionError):
    """A rank raised; the message holds its rank and its traceback.

    Attributes:
        rank: the rank that failed first.
        tracebacks: those of all ranks that failed, by rank.
    """

    def __init__(self, rank: int, tracebacks: dict[int, str]) -> None:
        super().__init__(f"rank {rank} failed:\n{tracebacks[rank]}")
        self.rank = rank
        self.tracebacks = tracebacks


class RanksTimedOut(AssertionError):
    """Ranks did not return in time; the message holds what each of them was doing."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Run `function(*args)` on ranks 0 to `world_size` - 1 and return their results in rank order.

    On each rank the default process group is gloo, of exactly this size, with one thread. Dynamo is
    reset and torch is seeded with 0 between calls.

    Args:
        function: defined at the top level of a module or test file.
        args: sent by value, as the results are: plain tensors, numbers, dataclasses.
        timeout_s: after so many seconds the workers are killed and replaced.

    Raises:
        RankFailed: a rank raised or died.
        RanksTimedOut: a rank neither returned nor raised in time.
    """
    return _pool.run(function, world_size, args, timeout_s)


def renew_group() -> None:
    """Let the next call meet in a new process group.

    For tests that leave ranks with different numbers of collectives or rendezvous behind them.
    """
    _pool.group = ""


def close() -> None:
    """End all workers."""
    _pool.stop()


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path


@dataclass
class _Pool:
    workers: list[_Worker] = field(default_factory=list)
    store: dist.TCPStore | None = None
    groups: int = 0
    group: str = ""
    world_size: int = 0

    def run(
        self, function: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size={world_size}: expected 1 to {MAX_RANKS}")
        call = worker.Function.of(function), pickle.dumps(args)
        self._start(world_size)
        if not self.group or self.world_size != world_size:
            self.groups += 1
            self.group, self.world_size = f"group{self.groups}", world_size
        message = pickle.dumps(worker.Call(*call, self.group, world_size))
        for rank in range(world_size):
            self.workers[rank].pipe.send_bytes(message)
        try:
            return self._results(world_size, timeout_s)
        except BaseException:
            self.group = ""
            raise

    def _start(self, count: int) -> None:
        if any(not w.process.is_alive() for w in self.workers):
            self.stop()
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = get_context("spawn")
        for rank in range(len(self.workers), count):
            here, there = context.Pipe()
            handle, stacks = tempfile.mkstemp(prefix=f"zgraph-test-rank{rank}-")
            os.close(handle)
            home = worker.Home(rank, self.store.port, stacks, TIMEOUT_S)
            process = context.Process(target=worker.main, args=(there, home), daemon=True)
            process.start()
            there.close()
            self.workers.append(_Worker(process, here, Path(stacks)))

    def _results(self, world_size: int, timeout_s: float) -> list[Any]:
        """Replies of all ranks; on failure, replace workers that would not serve a next call."""
        replies: dict[int, worker.Reply] = {}
        failed: list[int] = []
        deadline = time.monotonic() + timeout_s
        try:
            while len(replies) < world_size:
                waiting = {self.workers[r].pipe: r for r in range(world_size) if r not in replies}
                ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for pipe in ready:
                    rank = waiting[pipe]
                    replies[rank] = self._receive(rank)
                    if replies[rank].result is None:
                        failed.append(rank)
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        except BaseException:  # an interrupt: nobody will read what the ranks still send
            self.stop()
            raise
        missing = [rank for rank in range(world_size) if rank not in replies]
        stacks = self._stacks(missing) if missing and not failed else ""
        if missing or any(not w.process.is_alive() for w in self.workers):
            self.stop()
        if failed:
            raise RankFailed(failed[0], {rank: replies[rank].error for rank in failed})
        if missing:
            raise RanksTimedOut(f"ranks {missing} did not return in {timeout_s:g} s\n{stacks}")
        return [pickle.loads(replies[rank].result or b"") for rank in range(world_size)]

    def _receive(self, rank: int) -> worker.Reply:
        try:
            return pickle.loads(self.workers[rank].pipe.recv_bytes())
        except (EOFError, OSError):
            process = self.workers[rank].process
            process.join(GRACE_S)
            return worker.Reply(error=f"the process died with exit code {process.exitcode}")

    def _stacks(self, ranks: list[int]) -> str:
        """What these ranks are doing now."""
        for rank in ranks:
            pid = self.workers[rank].process.pid
            if pid is not None and self.workers[rank].process.is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        texts = [f"rank {rank}:\n{self.workers[rank].stacks.read_text()}" for rank in ranks]
        return "\n".join(texts)

    def stop(self) -> None:
        for item in self.workers:
            item.pipe.close()
            item.process.kill()
        for item in self.workers:
            item.process.join()
            item.stacks.unlink(missing_ok=True)
        self.workers.clear()
        self.group = ""


_pool = _Pool()
atexit.register(close)
