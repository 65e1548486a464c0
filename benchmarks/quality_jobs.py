"""Runs the jobs of benchmarks/quality.py, one after the other or in processes beside each other."""

import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

Rows = list[dict[str, Any]]
# A function that yields rows, each with the name of their file, and what it is called with
Job = tuple[Callable[..., Iterable[tuple[str, Rows]]], tuple[Any, ...]]
Add = Callable[[str, Rows], None]


def _failed(job: Job, why: str) -> None:
    print(f"failed: {job[0].__name__} {job[1]}: {why}", flush=True)


def run_alone(work: list[Job], add: Add, end: float) -> None:
    """One job after the other; one that fails is printed, and the others go on. None begins after the time `end`."""
    for job in work:
        if time.perf_counter() > end:
            _failed(job, "out of time")
            continue
        try:
            for file, rows in job[0](*job[1]):
                add(file, rows)
        except Exception as error:
            _failed(job, f"{type(error).__name__}: {error}")


def _work(rows_to: multiprocessing.connection.Connection, job: Job, threads: int) -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    for item in job[0](*job[1]):
        rows_to.send(item)


def run_beside(work: list[Job], add: Add, end: float, count: int) -> None:
    """Up to `count` jobs at a time, each in a process; at the time `end` those still running are stopped.

    Each process has a pipe of its own: one that crashes or is stopped costs the others nothing.
    """
    context = multiprocessing.get_context("spawn")
    waiting, running = list(work), {}
    while (waiting or running) and time.perf_counter() < end:
        while waiting and len(running) < count:
            job = waiting.pop(0)
            rows_from, rows_to = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(rows_to, job, max(1, torch.get_num_threads() // count)))
            process.daemon = True
            process.start()
            rows_to.close()
            running[rows_from] = process, job
        for rows_from in multiprocessing.connection.wait(list(running), max(0.0, end - time.perf_counter())):
            try:
                add(*rows_from.recv())  # type: ignore[union-attr]
            except EOFError:
                process, job = running.pop(rows_from)
                process.join()
                if process.exitcode:
                    _failed(job, f"exit code {process.exitcode}")
    for process, _ in running.values():
        process.kill()
    for job in [*(job for _, job in running.values()), *waiting]:
        _failed(job, "out of time")
