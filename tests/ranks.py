"""Pools of processes for the tests marked `dist`: each is started once a session and runs many functions.

A test calls `on_ranks(function, world_size, *args)`: `function(rank, *args)` runs on each rank of a process group
that is initialized (gloo on the CPU), and the list of what the ranks returned comes back. `function` is one that a
test module defines at its top level, so that it can be pickled; arguments and results travel by pickle too.
"""

import atexit
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_pools: dict[tuple[int, str], "RankPool"] = {}


class RankDied(RuntimeError):
    """A process ended while it ran a function; `code` is its exit code, negative for a signal."""

    def __init__(self, rank: int, world_size: int, code: int | None) -> None:
        super().__init__(f"rank {rank} of {world_size} died with exit code {code}")
        self.code = code


class RankPool:
    """`world_size` processes in one process group."""

    def __init__(self, world_size: int, backend: str) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, backend, port, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        """What `function(rank, *args)` returned on each rank; the first error of a rank is raised here."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            left = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready = wait(left, timeout)
            if not ready:
                missing = sorted(set(range(len(self.pipes))) - set(results))
                raise TimeoutError(f"ranks {missing} have not answered within {timeout} s; answered: {results}")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failed, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError) as error:
                    self.processes[rank].join(10)
                    raise RankDied(rank, len(self.pipes), self.processes[rank].exitcode) from error
                if failed:
                    raise RuntimeError(f"rank {rank} of {len(self.pipes)} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", timeout: float = 120
) -> list[Any]:
    """Run `function(rank, *args)` on `world_size` ranks; a pool in which something failed is not used again."""
    try:
        return _run(function, world_size, args, backend, timeout)
    except RankDied as error:
        # On a busy machine gloo of torch 2.13 corrupts the heap now and then where several of its worker threads run at
        # a time, without qsub too: all_gather_into_tensor of two plain tensors, then wait_tensor of both, in a loop,
        # ends in "malloc(): unaligned tcache chunk detected" in gloo's UnboundBuffer. Any other death is ours.
        if error.code not in (-signal.SIGABRT, -signal.SIGSEGV):
            raise
        print(f"{error}; once more, in new processes", file=sys.stderr)
        return _run(function, world_size, args, backend, timeout)


def _run(
    function: Callable[..., Any], world_size: int, args: tuple[Any, ...], backend: str, timeout: float
) -> list[Any]:
    key = (world_size, backend)
    if key not in _pools:
        _pools[key] = RankPool(world_size, backend)
    try:
        return _pools[key].run(function, args, timeout)
    except BaseException:
        _pools.pop(key).close()
        raise


@atexit.register
def _close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _serve(rank: int, world_size: int, backend: str, port: int, pipe: Connection) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["LOCAL_RANK"] = str(rank)
    faulthandler.enable()  # a rank that dies of a signal tells where
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    os.chdir(tempfile.gettempdir())
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            answer = (False, function(rank, *args))
        except BaseException:
            answer = (True, traceback.format_exc())
        pipe.send(answer)
