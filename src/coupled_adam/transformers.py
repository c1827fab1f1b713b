"""Coupled Adam in Hugging Face's ``Trainer`` and in the trainers that are built on it.

The callback that logs the measures of the embeddings is
:class:`coupled_adam.embeddings.transformers.EmbeddingMeasures`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coupled_adam.optim.coupled_adam import CoupledAdamW
from coupled_adam.optim.param_groups import param_groups


class CoupledAdamWFactory:
    """An optimizer factory that builds ``CoupledAdamW(param_groups(model), ...)``.

    Pass it to a trainer in place of an optimizer class::

        Trainer(model, args, optimizer_cls_and_kwargs=(CoupledAdamWFactory, {"args": args}), ...)

    The trainer hands it the model, so the token embeddings are found as in
    :func:`coupled_adam.param_groups`.
    """

    def __call__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        groups: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> CoupledAdamW:
        """Build the optimizer of a model.

        Args:
            model: the trainer's model.
            args: the trainer's arguments, of which the learning rate, the betas, epsilon and the
                weight decay are used.
            groups: options of :func:`coupled_adam.param_groups`, for the token embeddings alone:
                ``{"args": args, "groups": coupled_adam.LEAN}``.
            options: options of :class:`coupled_adam.CoupledAdamW`, which take precedence over
                ``args``.

        Raises:
            TypeError: if there is neither ``args`` nor ``lr``, or if an option is unknown.
            ValueError: as the two raise it.
        """
        if args is not None:
            from_args = {
                "lr": args.learning_rate,
                "betas": (args.adam_beta1, args.adam_beta2),
                "eps": args.adam_epsilon,
                "weight_decay": args.weight_decay,
            }
            options = {**from_args, **options}
        elif "lr" not in options:
            raise TypeError(
                "the trainer does not tell an optimizer factory its learning rate: write "
                "optimizer_cls_and_kwargs=(CoupledAdamWFactory, {'args': training_arguments}), or "
                "give 'lr' instead of 'args'"
            )
        return CoupledAdamW(param_groups(model, **groups), **options)


class GradNorm(TrainerCallback):
    """Log ``optimizer/grad_norm``, the norm before ``CoupledAdamW(max_grad_norm=)`` clips.

    Add it after the trainer has been created: ``trainer.add_callback(GradNorm(trainer))``. It logs
    whenever the trainer does.

    Args:
        trainer: the trainer, whose :meth:`log` is called.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the optimizer clips.

        Raises:
            ValueError: if it does not, and so has no norm to log.
        """
        optimizer = _unwrapped(kwargs["optimizer"])
        if getattr(optimizer, "max_grad_norm", None) is None:
            raise ValueError(
                f"GradNorm has nothing to log: the trainer's {type(optimizer).__name__} has no "
                "max_grad_norm. Give it to CoupledAdamW, or to the factory as {'args': args, "
                "'max_grad_norm': 1.0}, and set TrainingArguments(max_grad_norm=0) so that the "
                "trainer does not clip as well"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the norm of the step, if the trainer is about to log."""
        norm = _unwrapped(kwargs["optimizer"]).grad_norm
        if control.should_log and norm is not None:  # None while GradScaler has skipped all steps
            self.trainer.log({"optimizer/grad_norm": norm.item()})
            control.should_log = True  # log has withdrawn it, but the trainer is yet to log


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer in Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
