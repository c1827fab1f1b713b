"""Training with several processes, which torchrun or SLURM's srun has started."""

import datetime
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from coupled_adam.errors import TrainingError, UsageError, on_all_ranks
from coupled_adam.files import duration, waiting
from coupled_adam.lab.recipe import differences

T = TypeVar("T")
PATIENCE = 600.0
"""How long the processes of a run wait for each other at its start, in seconds."""


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
def process_group(device: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Join the processes in one group, with NCCL for ``device="cuda"`` and gloo otherwise.

    Before that, every process compares its ``settings``, plain values and dicts of them, with those
    of the others, so that none waits for something that another will not do.

    Raises:
        UsageError: in every process, if their settings differ.
        TrainingError: if a process does not come within ten minutes, or if another one has ended or
            has not answered within torch's time limit.
    """
    environment = launcher()
    if environment is None:
        yield
        return
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    if device == "cuda":
        torch.cuda.set_device(environment.local_rank())
    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=_agreed(environment, {"device": device, **settings}),
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


def _agreed(environment: ClusterEnvironment, settings: Mapping[str, Any]) -> Any:
    """The store through which the processes meet, when all are there with the same settings."""
    own_rank, number = environment.global_rank(), environment.world_size()
    place = f"{environment.main_address}:{environment.main_port}"
    peers = "the other process" if number == 2 else f"the other {number - 1} processes"
    go_on = waiting(f"{peers} of this run, at {place}", PATIENCE)
    store = _store(environment, go_on, place)

    def wait_for(keys: list[str]) -> None:
        """Wait until every process has set its key; they are in the order of ranks."""
        while not store.check(keys):
            if not go_on():
                missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                raise TrainingError(
                    f"of the {number} processes of this run, {', '.join(missing)} did not come "
                    f"within {duration(PATIENCE)} (see their last output)"
                )

    store.set(f"settings of {own_rank}", json.dumps(settings))
    # Nothing is compared before all are there, so that all processes report the same difference.
    wait_for([f"settings of {rank}" for rank in range(number)])
    first, *later = (json.loads(store.get(f"settings of {rank}")) for rank in range(number))
    different = ", ".join(
        f"{key}={expected!r} in process 0, {value!r} in process {rank}"
        for rank, values in enumerate(later, 1)
        for key, (expected, value) in differences(first, values).items()
    )
    if different:
        # The store may be in process 0, and would end with it before the others have read it.
        store.set(f"{own_rank} has read", "")
        if own_rank == 0:
            wait_for([f"{rank} has read" for rank in range(number)])
        raise on_all_ranks(
            UsageError(
                f"the processes of this run were started differently ({different}): "
                "start all of them with the same command"
            )
        )
    return store


def _store(environment: ClusterEnvironment, go_on: Callable[[], bool], place: str) -> Any:
    """The store at the main address, which torchrun or else the first process serves."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = environment.global_rank() == 0 and not agents
    address = environment.main_address, environment.main_port, environment.world_size()
    timeout = datetime.timedelta(seconds=min(PATIENCE, 30))
    while True:
        try:
            return TCPStore(*address, serves, timeout, wait_for_workers=False)
        except dist.DistError as error:
            if serves:
                reason = f"no other process can be waited for at {place}: {error}"
                raise TrainingError(reason) from None
        # The process that serves it may come later than this one.
        if not go_on():
            raise TrainingError(
                f"the first process of this run could not be reached at {place} within "
                f"{duration(PATIENCE)} (see its last output)"
            )


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; every rank must call this."""
    if world_size() == 1:
        return flag
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # where the backend reduces
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


def on_every_rank(function: Callable[[], T]) -> T:
    """Call a function on every rank, and return this rank's own result.

    Raises:
        UsageError: on every rank, if the function raises it on any.
    """
    failure = result = None
    try:
        result = function()
    except UsageError as error:
        failure = str(error)
    for number, message in enumerate(all_gather(failure)):
        if message is not None:
            raise on_all_ranks(UsageError(f"process {number}: {message}" if number else message))
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
        failure = on_all_ranks(UsageError(str(error)))
    except BaseException as error:
        failure = on_all_ranks(TrainingError(f"rank 0 failed: {error}"))
        raise
    finally:
        outcome = [(result, failure)]
        dist.broadcast_object_list(outcome)
    result, failure = outcome[0]
    if failure is not None:
        raise failure
    return cast(T, result)
