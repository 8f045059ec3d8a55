"""Run test functions as ranks of a process group, in processes that all tests share."""

import contextlib
import datetime
import functools
import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import wait

TIMEOUT = 60.0  # seconds to wait for all ranks to answer
TIMEOUT_AFTER_ERROR = 5.0  # seconds to wait for the other ranks after an error
COLLECTIVE_TIMEOUT = 20.0
# The threads of each process group poll, and torch can't create a group again after it was
# destroyed. So start new processes before the groups of old tests slow down new tests.
MAX_RUNS = 25

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed.tensor", "hotrow.distributed", "hotrow.kernels.cpu.rows"]
)


class RankError(Exception):
    """An error on a rank, with its traceback."""


class RankProcesses:
    """A group of `count` processes that run the functions they receive."""

    def __init__(self, count):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        self.pipes, self.processes, self.run_count = [], [], 0
        for rank in range(count):
            parent_end, child_end = _context.Pipe()
            arguments = rank, count, port, child_end
            process = _context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self.pipes.append(parent_end)
            self.processes.append(process)

    def run(self, function, *arguments):
        """Run `function(*arguments)` on every rank; return all results."""
        self.run_count += 1
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = self.answers()
        for answer in answers:
            if isinstance(answer, RankError):
                self.close()
                raise answer
        return answers

    def answers(self):
        """Return the result or error of each rank, or EOFError for a rank that died."""
        results, pending = {}, dict(enumerate(self.pipes))
        while pending:
            errors = [error for error in results.values() if isinstance(error, RankError)]
            ready = wait(pending.values(), TIMEOUT_AFTER_ERROR if errors else TIMEOUT)
            if not ready:
                self.close()
                raise RankError(f"no answer from ranks {list(pending)}; other errors: {errors}")
            for rank, pipe in list(pending.items()):
                if pipe in ready:
                    del pending[rank]
                    try:
                        results[rank] = pipe.recv()
                    except EOFError as error:
                        results[rank] = error
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self):
        """Kill the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        _started.pop(len(self.processes), None)


_started = {}


def rank_processes(count):
    """Return a group of `count` processes, which up to `MAX_RUNS` calls of `run` share."""
    if count in _started and _started[count].run_count >= MAX_RUNS:
        _started[count].close()
    if count not in _started:
        _started[count] = RankProcesses(count)
    return _started[count]


def close_all():
    """Kill all processes of all groups."""
    for processes in list(_started.values()):
        processes.close()


def run_rank(rank, count, port, pipe):
    """Run the functions that this rank receives."""
    import torch
    import torch.distributed as dist

    from hotrow.conversion import sampling

    torch.set_num_threads(1)
    sampling.MIN_ENTRIES = 0  # like the `_small_one_hots` fixture in the main process
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT)
    dist.init_process_group("gloo", rank=rank, world_size=count, timeout=timeout)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            torch.manual_seed(0)
            try:
                pipe.send(function(*arguments))
            except BaseException as error:
                pipe.send(RankError(f"rank {rank}: {error!r}\n{traceback.format_exc()}"))


@functools.cache
def mesh_of_all(count):
    """Return the mesh of all ranks; create it once, because torch keeps each mesh's groups."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (count,))
