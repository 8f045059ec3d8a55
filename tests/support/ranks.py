"""Processes that run a test's functions as the ranks of a process group, kept from test to test."""

import contextlib
import datetime
import functools
import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import wait

PATIENCE = 60.0  # seconds; then whoever still waits is ended
AFTER_ERROR = 5.0  # for the other ranks
STEP = 20.0  # of a collective

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed.tensor", "hotrow.distributed", "hotrow.kernels.cpu.rows"]
)


class RankError(Exception):
    """What a rank raised, with its traceback."""


class Ranks:
    """As many processes, each of which waits for a function to run."""

    def __init__(self, count):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = _context.Pipe()
            arguments = rank, count, port, theirs
            process = _context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *arguments):
        """`function(*arguments)` on every rank; what each returns."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = self.answers()
        for answer in answers:
            if isinstance(answer, RankError):
                self.close()
                raise answer
        return answers

    def answers(self):
        """Of each rank, what it returned, or the error; EOFError if it is dead."""
        found, left = {}, dict(enumerate(self.pipes))
        while left:
            errors = [error for error in found.values() if isinstance(error, RankError)]
            ready = wait(left.values(), AFTER_ERROR if errors else PATIENCE)
            if not ready:
                self.close()
                raise RankError(f"ranks {list(left)} still wait; the others: {errors}")
            for rank, pipe in list(left.items()):
                if pipe in ready:
                    del left[rank]
                    try:
                        found[rank] = pipe.recv()
                    except EOFError as error:
                        found[rank] = error
        return [found[rank] for rank in range(len(self.pipes))]

    def close(self):
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        _kept.pop(len(self.processes), None)


_kept = {}


def ranks(count):
    """The processes of this number, begun when first asked for."""
    if count not in _kept:
        _kept[count] = Ranks(count)
    return _kept[count]


def close_all():
    """End all that were kept."""
    for each in list(_kept.values()):
        each.close()


def serve(rank, count, port, pipe):
    """A rank's process: run what comes."""
    import torch
    import torch.distributed as dist

    from hotrow.conversion import resting

    torch.set_num_threads(1)
    resting.LEAST = 0  # as in the tests' own process
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    timeout = datetime.timedelta(seconds=STEP)
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
def line(count):
    """The mesh of all ranks; one a process, as torch keeps its groups."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (count,))
