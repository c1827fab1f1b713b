"""Training with several processes, which torchrun or SLURM's srun has started."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from coupled_adam.errors import LostProcessError, TrainingError, UsageError, one_line
from coupled_adam.lab.recipe import differences

T = TypeVar("T")


def launcher() -> ClusterEnvironment | None:
    """The launcher that started this process as one of several; None for a single process."""
    environment: ClusterEnvironment
    if TorchElasticEnvironment.detect():
        environment = TorchElasticEnvironment()
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


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the processes in one group, with NCCL for ``device="cuda"`` and gloo otherwise.

    Raises UsageError if the device is one of several GPUs, which the launcher shares out, and
    LostProcessError if another process has ended, or does not answer in torch's time limit.
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
    # NCCL and all_gather_object send from the current GPU, which would be the first for all.
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
        raise LostProcessError(
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


def on_every_rank(function: Callable[[], T]) -> list[T]:
    """Call a function on every rank; each gets the results of all.

    An error on any rank ends all: a UsageError on each, any other as a TrainingError on the others.
    """
    if world_size() == 1:
        return [function()]
    result: T | None = None
    own: BaseException | None = None
    shared: Exception | None = None
    try:
        result = function()
    except UsageError as error:
        shared = UsageError(f"process {rank()}: {error}" if rank() else str(error))
    except BaseException as error:  # the others must not wait for this one
        own, shared = error, TrainingError(f"rank {rank()} failed: {error}")
    # Also after an error, since all others are in this collective, or will be.
    outcomes: list[Any] = [None] * world_size()
    dist.all_gather_object(outcomes, (result, shared))
    if own is not None:
        raise own
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [result for result, _ in outcomes]


def on_rank_zero(function: Callable[[], T]) -> T:
    """Call a function on rank 0 only; every rank gets its result, or an error."""
    return on_every_rank(function if rank() == 0 else lambda: None)[0]  # type: ignore[return-value]


def check_agreement(settings: Callable[[], Mapping[str, Any]]) -> None:
    """Raise a UsageError that names the keys, on all ranks, if settings differ between ranks."""
    first, *others = on_every_rank(settings) if world_size() > 1 else [{}]
    for number, other in enumerate(others, 1):
        different = "; ".join(
            f"{key} is {one_line(there, 80)} in process 0 and {one_line(here, 80)} in {number}"
            for key, (there, here) in differences(first, other).items()
        )
        if different:
            raise UsageError(
                f"the processes of a run do not agree: {different}. Start all of them with the "
                "same command, files and versions"
            )
