"""Training with several processes, which torchrun or SLURM's srun has started."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from coupled_adam.errors import UsageError
from coupled_adam.lab.training.errors import TrainingError

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
        TrainingError: if another process has ended, or has not answered within torch's time limit.
    """
    environment = launcher()
    if environment is None:
        yield
        return
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    if device == "cuda":
        torch.cuda.set_device(environment.local_rank())
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        rank=environment.global_rank(),
        world_size=environment.world_size(),
    )
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
            raise
        raise TrainingError(
            "another process of this run has ended or hangs (see its last output); the last "
            "checkpoint is kept, continue with --resume"
        ) from error
    finally:
        dist.destroy_process_group()


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; every rank must call this."""
    if world_size() == 1:
        return flag
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())


def all_gather(value: T) -> list[T]:
    """The value of each rank, on every rank; every rank must call this."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank_zero(function: Callable[[], T]) -> T:
    """Call a function on rank 0 only; every rank gets its result.

    Raises:
        UsageError: on every rank, if the function raises it.
        TrainingError: on the other ranks, if the function raises any other exception; they do not
            wait for rank 0.
    """
    if world_size() == 1:
        return function()
    outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
    try:
        if rank() == 0:
            outcome = [(function(), None)]
    except UsageError as error:
        outcome = [(None, UsageError(str(error)))]
    except BaseException as error:
        outcome = [(None, TrainingError(f"rank 0 failed: {error}"))]
        raise
    finally:
        dist.broadcast_object_list(outcome)
    result, failure = outcome[0]
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
