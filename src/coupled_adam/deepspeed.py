"""Coupled Adam under DeepSpeed's ZeRO 1 and 2, which flatten matrices and partition them."""

from typing import Any

import torch

from coupled_adam.optim.coupled_adam import CoupledAdam
from coupled_adam.optim.flat import FlatShard


def couple(engine: Any) -> None:
    """Tell the optimizer of a DeepSpeed engine which pieces of matrices it has.

    ZeRO 1 and 2 put all parameters of a group into one vector and leave a partition of it on each
    rank, as float32 or in whatever the master weights are. Call this once, after
    ``deepspeed.initialize`` and before the first step or ``load_checkpoint``, on all ranks::

        optimizer = CoupledAdamW(param_groups(model), lr=6e-4)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        coupled_adam.deepspeed.couple(engine)

    The configuration needs ``"zero_allow_untested_optimizer": true``. Under ZeRO 0 matrices are
    whole, and nothing has to be done. Clip with DeepSpeed's ``gradient_clipping``.

    Args:
        engine: what ``deepspeed.initialize`` returns first.

    Raises:
        TypeError: if the engine's optimizer is not a :class:`coupled_adam.CoupledAdam`.
        ValueError: under ZeRO 3, with offloading or elastic checkpoints, and if
            the pieces are not where DeepSpeed says. Nothing has been changed then.
    """
    # DeepSpeed wraps the optimizer, except under ZeRO 0.
    outer = engine.optimizer
    inner = getattr(outer, "optimizer", outer)
    if not isinstance(inner, CoupledAdam):
        raise TypeError(
            f"the engine's optimizer is a {type(inner).__name__}: pass a CoupledAdamW to "
            "deepspeed.initialize(optimizer=...)"
        )
    # Of what is read below, only the stage is public: another DeepSpeed may lack the attributes
    # here, or count the offsets in _hp_mapping in another way, which _shards checks.
    stage = engine.zero_optimization_stage()
    partitions = getattr(outer, "single_partition_of_fp32_groups", None)
    if stage == 0 and partitions is None:
        return
    if stage not in (1, 2) or partitions is None or not hasattr(outer, "bit16_groups"):
        raise ValueError(
            f"cannot couple the matrices of {type(outer).__name__} with ZeRO stage {stage}: use "
            "stage 1 or 2 without bf16_optimizer, or FSDP2 (torch.distributed.fsdp.fully_shard)"
        )
    if outer.cpu_offload or outer.elastic_checkpoint:
        raise ValueError(
            "offload_optimizer and elastic_checkpoint are not supported with coupled matrices, "
            "whose pieces would lie in other buffers: leave them out of zero_optimization"
        )
    # All pieces are checked before any group is changed.
    flat_shards = [
        _shards(outer.bit16_groups[i], partitions[i], outer.real_dp_process_group[i])
        if group["coupled"]
        else None
        for i, group in enumerate(inner.param_groups)
    ]
    for group, shards in zip(inner.param_groups, flat_shards):
        if shards is not None:
            group["flat_shards"] = [shards]


def _shards(params: list[Any], partition: torch.Tensor, process_group: Any) -> list[FlatShard]:
    """Where the pieces of a group's parameters lie in this rank's partition of it, [numel]."""
    shards = []
    # DeepSpeed's "lp" (low precision) is the parameter, and "hp" (high) the master copy of it.
    for p in params:
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is None:  # this rank has nothing of it
            shards.append(FlatShard(tuple(p.shape), 0, process_group, 0, 0))
            continue
        whole, piece = mapping.lp_fragment_address, mapping.hp_fragment_address
        shard = FlatShard(tuple(p.shape), whole.start, process_group, piece.start, piece.numel)
        # Before the first step the two have the same numbers, but for rounding.
        expected = p.detach().flatten()[whole.start : whole.start + piece.numel]
        if not torch.equal(shard.view(partition).to(p.dtype), expected):
            raise ValueError(
                f"the partition does not hold the parameter of shape {list(p.shape)} where "
                "DeepSpeed says: call couple before the first step, and leave out "
                "round_robin_gradients"
            )
        shards.append(shard)
    return shards
