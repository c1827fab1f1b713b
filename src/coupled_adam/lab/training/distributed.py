"""Training with several processes, which torchrun or SLURM's srun has started."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from coupled_adam.errors import TrainingError, UsageError

T = TypeVar("T")


def launcher() -> ClusterEnvironment | None:
    """The launcher that started this process as one of several; None for a single process."""
    if TorchElasticEnvironment.detect():
        environment: ClusterEnvironment = TorchElasticEnvironment()
    elif SLURMEnvironment.detect():
        # A preempted job is sent SIGTERM, see Checkpoints; SLURM requeues it by itself.
        environment = SLURMEnvironment(auto_requeue=False)
    else:
        return None
    return environment if environment.world_size() > 1 else None


def world_size() -> int:
    """The number of processes inside :func:`process_group`; otherwise 1."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, counted from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def nodes() -> int:
    """The number of machines, each of which runs the same number of processes."""
    if world_size() == 1:
        return 1
    if TorchElasticEnvironment.detect():
        return world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ.get("SLURM_NNODES", "1"))


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the processes in one group, with NCCL for ``device="cuda"`` and gloo otherwise.

    Raises:
        UsageError: if the device is one of several GPUs, which the launcher shares out.
        TrainingError: if a process does not come, has ended, or has not answered, each within
            torch's time limit.
    """
    environment = launcher()
    if environment is None:
        yield
        return
    if ":" in device:
        raise UsageError(f"--device {device} is for one process: each of several has its own GPU")
    # Which torchrun has set, and srun has not.
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    if device == "cuda":
        torch.cuda.set_device(environment.local_rank())
    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            rank=environment.global_rank(),
            world_size=environment.world_size(),
        )
        yield
    except RuntimeError as error:
        # gloo has no class of its own for a peer that is gone.
        if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
            raise
        raise TrainingError(
            "another process of this run has ended or hangs (see its last output); the last "
            "checkpoint is kept, continue with --resume"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; every rank must call this."""
    if world_size() == 1:
        return flag
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # where the backend reduces
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())


def on_every_rank(function: Callable[[], T]) -> T:
    """Call a function on every rank, and return this rank's own result.

    Raises:
        UsageError: on every rank, if the function raises it on any.
    """
    result: T | None = None
    failure: str | None = None
    try:
        result = function()
    except UsageError as error:
        failure = str(error)
    failures = [failure] * world_size()
    if len(failures) > 1:
        dist.all_gather_object(failures, failure)
    for number, message in enumerate(failures):
        if message is not None:
            raise UsageError(f"process {number}: {message}" if number else message)
    return cast(T, result)


def on_rank_zero(function: Callable[[], T]) -> T:
    """Call a function on rank 0 only; every rank gets its result.

    Raises:
        UsageError: on every rank, if the function raises it.
        TrainingError: on the other ranks, if the function raises any other exception; they do not
            wait for rank 0.
    """
    if world_size() == 1:
        return function()
    result: T | None = None
    failure: Exception | None = None
    # Rank 0 broadcasts an outcome in any case, or the others would wait until they time out.
    try:
        if rank() == 0:
            result = function()
    except UsageError as error:
        failure = UsageError(str(error))
    except BaseException as error:
        failure = TrainingError(f"rank 0 failed: {error}")
        raise
    finally:
        outcome = [(result, failure)]
        dist.broadcast_object_list(outcome)
    result, failure = outcome[0]
    if failure is not None:
        raise failure
    return cast(T, result)
