"""Coupled Adam in Hugging Face's ``Trainer`` and in the trainers that are built on it.

The callback that logs the measures of the embeddings is
:class:`coupled_adam.embeddings.transformers.EmbeddingMeasures`.
"""

import ast
import contextlib
import copy
import difflib
import functools
import inspect
import re
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils.versions import require_version

from coupled_adam.deepspeed import couple
from coupled_adam.optim.core import Core
from coupled_adam.optim.coupled_adam import CoupledAdamW
from coupled_adam.optim.lean import Rate
from coupled_adam.optim.options import refuse_unknown
from coupled_adam.optim.param_groups import GROUP_OPTIONS, embedding_options, subgroups

# Older ones do not call a factory with the model.
require_version("transformers>=5.3", "coupled_adam.transformers: pip install -U transformers")

# "lr_factor" is among them as **LEAN has it, to be refused by CoupledAdamW if it is a number.
_OPTIONS = GROUP_OPTIONS | {"lr_factor", *inspect.signature(CoupledAdamW).parameters}
_OPTIONS -= {"params", "groups"}


def use_coupled_adam(trainer: Trainer, **options: Any) -> None:
    """Let a trainer train with Coupled Adam: the same line for every subclass of ``Trainer``.

    Call it before ``trainer.train()``. The optimizer that ``args.optim`` names keeps all parameters
    but the token embeddings. Options are those of :class:`CoupledAdamWFactory`, and
    ``steps="auto"`` is the number of steps that the trainer will take. When training begins, it is
    checked that the trainer has taken the optimizer.

    Raises:
        TypeError: if ``trainer`` is none, or an option, here or in ``args.optim_args``, is unknown.
        ValueError: if the trainer has an optimizer already, an option is out of range, or
            ``args.optim`` updates parameters in the backward pass, makes more than one optimizer of
            the model, or is another than torch's AdamW beside DeepSpeed.
        RuntimeError: in ``train()``, if the trainer makes an optimizer of its own nevertheless.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"trainer must be a Trainer, not {type(trainer).__name__}: of a model make the "
            "optimizer itself, CoupledAdamW(model, ...)"
        )
    if trainer.optimizer is not None:
        raise ValueError(
            "the trainer has an optimizer already: call use_coupled_adam before train(), and leave "
            "out optimizers="
        )
    # What is mistyped need not wait for the first step: an optimizer of next to nothing refuses it.
    given = _options_of(trainer.args, options)
    nothing = nn.Embedding(2, 2, _weight=torch.ones(2, 2))  # which draws no random numbers
    # The other options of groups name what the model must have, and are checked when there is one.
    later = GROUP_OPTIONS - {"embeddings", "steps"} | {"core"}
    now = {name: x for name, x in given.items() if name not in later}
    CoupledAdamW(nothing, **(now | {"steps": 1} if now.get("steps") == "auto" else now))
    if "core" not in given:
        _named_core(trainer.args, trainer.model, trainer)
    # Trainer calls what it takes for a class, and what it gets with the model.
    factory: Any = functools.partial(CoupledAdamWFactory, trainer)
    trainer.optimizer_cls_and_kwargs = (factory, options)
    trainer.add_callback(_IsTaken(trainer, given.get("steps") == "auto"))


class CoupledAdamWFactory:
    """An optimizer factory that builds ``CoupledAdamW(param_groups(model), ...)``.

    Pass it to a trainer in the place of an optimizer's class::

        factory = (CoupledAdamWFactory, {"args": args, "embeddings": "lean"})
        Trainer(model, args, optimizer_cls_and_kwargs=factory, ...)

    Args:
        trainer: the trainer, of which :func:`use_coupled_adam` tells it; without one its arguments
            are to be given, and ``steps="auto"`` needs their ``max_steps``.
    """

    def __init__(self, trainer: Trainer | None = None) -> None:
        self.trainer = trainer

    def __call__(
        self,
        model: nn.Module,
        args_by_position: TrainingArguments | None = None,
        /,
        args: TrainingArguments | None = None,
        **options: Any,
    ) -> CoupledAdamW:
        """Build the optimizer of a model.

        Args:
            model: the trainer's model.
            args_by_position, args: the trainer's arguments, of which the learning rate, the betas,
                epsilon, the weight decay, ``optim`` and ``optim_args`` are used. The latter are
                options in text, ``optim_args="embeddings=lean,steps=auto"``, also of ``optim``.
                Some trainers give them by position, and then also by name.
            options: those of :class:`coupled_adam.CoupledAdamW`, which go before ``args``.

        Raises:
            TypeError: if there is neither ``args`` nor ``lr``, or if an option is unknown.
            ValueError: as it does; or if ``steps="auto"`` and the number is not known.
        """
        args = args or args_by_position or getattr(self.trainer, "args", None)
        if args is None and "lr" not in options:
            raise TypeError(
                "the trainer does not tell an optimizer factory its learning rate: write "
                "use_coupled_adam(trainer), or give {'args': training_arguments} or 'lr'"
            )
        options = _options_of(args, options)
        if options.get("steps") == "auto":
            options["steps"] = _steps(self.trainer, args)
        if args is not None:
            options.setdefault("core", _named_core(args, model, self.trainer))
        optimizer = CoupledAdamW(model, **options)
        # A trainer that resumes loads DeepSpeed's checkpoint before it tells that training begins.
        if self.trainer is not None and self.trainer.is_deepspeed_enabled:
            optimizer.register_load_state_dict_pre_hook(lambda *_: _couple_loaded(self.trainer))
        return optimizer


def _named_core(args: TrainingArguments, model: Any, trainer: Trainer | None) -> Core | None:
    """What makes the optimizer that ``args.optim`` names; None for torch's AdamW."""
    # AdamW's updates of the core are CoupledAdamW's own, to the bit.
    if args.optim in ("adamw_torch", "adamw_torch_fused"):
        return None
    is_of_model = any(word in args.optim for word in ("layerwise", "lomo"))
    if not is_of_model:
        args = copy.copy(args)
        theirs = {k: x for k, x in _options_in(args.optim_args).items() if k not in _OPTIONS}
        args.optim_args = ",".join(f"{name}={value}" for name, value in theirs.items())
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        is_of_model = not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer))
    if is_of_model or (trainer is not None and trainer.is_deepspeed_enabled):
        problem = "is for whole models" if is_of_model else "has not been tried with DeepSpeed"
        raise ValueError(
            f"optim={str(args.optim)!r} {problem}, and cannot leave the embeddings to Coupled "
            "Adam: choose optim='adamw_torch', or for Muon see docs/beside.md"
        )
    # GaLore and APOLLO have options for some of the parameters.
    own_options = {p: group for group in options.pop("params", ()) for p in group["params"]}

    def core(groups: list[dict[str, Any]]) -> Any:
        made = []
        for group in groups:
            group.setdefault("weight_decay", args.weight_decay)
            for subgroup in subgroups(group, lambda _, p: id(own_options.get(p))).values():
                special = own_options.get(subgroup["params"][0], {})
                made.append({**special, **subgroup})
        optimizer = kind(made, **options)
        if "bitsandbytes" in kind.__module__ and options.get("optim_bits") == 8:
            # As Trainer does: tables, here of positions, have 32 bits.
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    optimizer.mng.register_module_override(module, "weight", {"optim_bits": 32})
        return optimizer

    return core


def _couple_loaded(trainer: Any) -> None:
    """Couple the matrices of an engine whose model has been loaded, and its optimizer not yet."""
    # So that its partitions hold the parameters, by which couple finds them.
    trainer.deepspeed.optimizer.refresh_fp32_params()
    couple(trainer.deepspeed)


def _steps(trainer: Trainer | None, args: TrainingArguments | None) -> int:
    """How many optimizer steps a trainer takes, by its arguments or its data."""
    if args is not None and args.max_steps > 0:
        return args.max_steps
    if trainer is None:
        raise ValueError(
            "steps='auto' needs max_steps in the training arguments, or use_coupled_adam(trainer): "
            "give the number of optimizer steps, steps=10_000"
        )
    *_, steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    return int(steps)


class _IsTaken(TrainerCallback):
    """Refuses to train with another optimizer than the one that was asked for; logs its factor."""

    def __init__(self, trainer: Trainer, has_auto_steps: bool) -> None:
        self.trainer = trainer
        self.has_auto_steps = has_auto_steps

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Look through the wrappers of accelerate and others, which have what they wrap."""
        innermost = optimizer
        while not isinstance(innermost, CoupledAdamW) and hasattr(innermost, "optimizer"):
            innermost = innermost.optimizer
        if not isinstance(innermost, CoupledAdamW):
            raise RuntimeError(
                f"{type(self.trainer).__name__} makes its own optimizer, "
                f"{type(innermost).__name__}, and did not take Coupled Adam. Leave out "
                "use_coupled_adam, and before train() write\n"
                "    trainer.optimizer = CoupledAdamWFactory()(model, args, embeddings=...)\n"
                "or build it in the trainer's create_optimizer"
            )
        if self.trainer.is_deepspeed_enabled:
            couple(self.trainer.deepspeed)
        # With auto_find_batch_size it is the optimizer of an attempt with fewer steps.
        if self.has_auto_steps and state.global_step == 0:
            _set_steps(innermost, state.max_steps, self.trainer.lr_scheduler)
        factors = {g["initial_lr_factor"] for g in innermost.param_groups if "lr_factor_from" in g}
        for factor in factors:
            self.trainer.log({"embedding_lr_factor": factor})


def _set_steps(optimizer: CoupledAdamW, steps: int, schedule: Any) -> None:
    """Give LEAN's groups the rate of another number of steps, before the first one."""
    for number, group in enumerate(optimizer.param_groups):
        before = Rate.in_group(group) if "lr_factor_from" in group else None
        if before and before.steps not in (None, steps):
            rate = before.with_steps(steps)
            ratio = rate.factor / before.factor
            group |= {name: ratio * group[name] for name in ("lr", "initial_lr") if name in group}
            group |= {"initial_lr_factor": rate.factor, "lr_factor_from": rate.source}
            schedule.base_lrs[number] = group["initial_lr"]


def _options_of(args: TrainingArguments | None, options: dict[str, Any]) -> dict[str, Any]:
    """All options, those of the trainer first; TypeError or ValueError if one is unknown."""
    if args is not None:
        text = _options_in(args.optim_args)
        options = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
            # None, not False, lets CoupledAdamW choose as it does without a trainer.
            "fused": True if args.optim == "adamw_torch_fused" else None,
            **{name: text[name] for name in text if not _is_theirs(name, args)},
            **options,
        }
    refuse_unknown(options, _OPTIONS, "CoupledAdamW")
    embedding_options(options.get("embeddings", "coupled"))
    return options


def _is_theirs(name: str, args: TrainingArguments) -> bool:
    """Whether a name in ``optim_args`` is an option of ``args.optim``, and no typing error."""
    if args.optim in ("adamw_torch", "adamw_torch_fused"):
        return False
    return not difflib.get_close_matches(name, _OPTIONS, cutoff=0.8)


def _options_in(text: str | None) -> dict[str, Any]:
    """The options in ``optim_args``, with the values as in Python, or as text."""
    options: dict[str, Any] = {}
    # Values may have commas, too, as betas=(0.9, 0.95), but after those comes no name with an =.
    for option in filter(None, re.split(r",+(?=\w+=|$)", (text or "").replace(" ", ""))):
        name, _, value = option.partition("=")
        if not value:
            raise ValueError(f"optim_args={text!r} must be options such as embeddings=lean")
        options[name] = value
        with contextlib.suppress(SyntaxError, ValueError):  # a word, such as lean
            options[name] = ast.literal_eval(value)
    return options
