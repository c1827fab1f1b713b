"""Coupled Adam in Hugging Face's ``Trainer`` and in the trainers that are built on it.

The callback that logs the measures of the embeddings is
:class:`coupled_adam.embeddings.transformers.EmbeddingMeasures`.
"""

import ast
import contextlib
import inspect
import re
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

from coupled_adam.errors import did_you_mean
from coupled_adam.optim.coupled_adam import CoupledAdamW
from coupled_adam.optim.param_groups import embedding_options, param_groups

_GROUP_OPTIONS = {*inspect.signature(param_groups).parameters} - {"model", "weight_decay"}
"""The options that go to param_groups; the weight decay is the optimizer's."""
# "lr_factor" is among the arguments only to be refused, with a message, by CoupledAdamW.
_OPTIONS = _GROUP_OPTIONS | {*inspect.signature(CoupledAdamW).parameters} - {"params"}


def use_coupled_adam(trainer: Trainer, **options: Any) -> None:
    """Let a trainer train with Coupled Adam: the same line for every subclass of ``Trainer``.

    Call it before ``trainer.train()``. Options are those of :class:`CoupledAdamWFactory`.

    Raises:
        TypeError: if an option, here or in the trainer's ``optim_args``, is unknown.
        ValueError: if the trainer has an optimizer already, ``optim_args`` is no list of options,
            ``embeddings`` is unknown, or an option of the optimizer is out of range.
    """
    if trainer.optimizer is not None:
        raise ValueError(
            "the trainer has an optimizer already: call use_coupled_adam before train(), and leave "
            "out optimizers="
        )
    # What is mistyped need not wait for the first step: an optimizer of next to nothing refuses it.
    given = _options_of(trainer.args, options)
    nothing = param_groups(nn.Embedding(2, 2), given.get("embeddings", "coupled"))
    # The options of groups name what the model must have, and are checked when there is one.
    CoupledAdamW(nothing, **{name: given[name] for name in given if name not in _GROUP_OPTIONS})
    factory: Any = CoupledAdamWFactory  # which Trainer takes, though it asks for an optimizer
    trainer.optimizer_cls_and_kwargs = (factory, {"args": trainer.args, **options})


class CoupledAdamWFactory:
    """An optimizer factory that builds ``CoupledAdamW(param_groups(model), ...)``.

    Pass it to a trainer in the place of an optimizer's class::

        factory = (CoupledAdamWFactory, {"args": args, "embeddings": "lean"})
        Trainer(model, args, optimizer_cls_and_kwargs=factory, ...)
    """

    def __call__(
        self, model: nn.Module, args: TrainingArguments | None = None, **options: Any
    ) -> CoupledAdamW:
        """Build the optimizer of a model.

        Args:
            model: the trainer's model.
            args: the trainer's arguments, of which the learning rate, the betas, epsilon, the
                weight decay, ``optim`` (whether it is fused) and ``optim_args`` are used. The
                latter are options in text: ``optim_args="embeddings=lean,amsgrad=True"``.
            options: options of :class:`coupled_adam.CoupledAdamW`, and of
                :func:`coupled_adam.param_groups`. They take precedence over ``args``.

        Raises:
            TypeError: if there is neither ``args`` nor ``lr``, or if an option is unknown.
            ValueError: as the two raise it, or if ``optim_args`` is no list of options.
        """
        # Trainer gives a factory the model and its options alone; so args are one of the options.
        if args is None and "lr" not in options:
            raise TypeError(
                "the trainer does not tell an optimizer factory its learning rate: write "
                "use_coupled_adam(trainer), or give {'args': training_arguments} or 'lr'"
            )
        options = _options_of(args, options)
        group_options = {name: options.pop(name) for name in _GROUP_OPTIONS if name in options}
        return CoupledAdamW(param_groups(model, **group_options), **options)


def _options_of(args: TrainingArguments | None, options: dict[str, Any]) -> dict[str, Any]:
    """All options, those of the trainer first; TypeError or ValueError if one is unknown."""
    if args is not None:
        options = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
            # None, not False, lets CoupledAdamW choose as it does without a trainer.
            "fused": True if args.optim == "adamw_torch_fused" else None,
            **_options_in(args.optim_args or ""),
            **options,
        }
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(
                f"{name}={options[name]!r} is no option of CoupledAdamW or param_groups: "
                f"{did_you_mean(name, sorted(_OPTIONS))}"
            )
    embedding_options(options.get("embeddings", "coupled"))
    return options


def _options_in(text: str) -> dict[str, Any]:
    """The options in ``optim_args``, with the values as in Python, or as text."""
    options: dict[str, Any] = {}
    # Values may have commas, too, as betas=(0.9, 0.95), but after those comes no name with an =.
    for option in filter(None, re.split(r",+(?=\w+=|$)", text.replace(" ", ""))):
        name, _, value = option.partition("=")
        if not value:
            raise ValueError(f"optim_args={text!r} must be options such as embeddings=lean")
        options[name] = value
        with contextlib.suppress(SyntaxError, ValueError):  # a word, such as lean
            options[name] = ast.literal_eval(value)
    return options
