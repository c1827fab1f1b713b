"""The arms of a comparison: different optimizers for the token embeddings.

In every arm AdamW updates all other parameters, and everything else in a run is the same. An arm is
a small class whose fields are its options in a recipe, with types that hold their bounds; to add
one, write the class and add it to :data:`OPTIMIZERS`. torch is imported only when an optimizer is
created, as checking and listing recipes does not need it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from coupled_adam.fields import Beta, NotNegative, Positive, Share, require
from coupled_adam.lab.sections import Training

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from coupled_adam.optim.param_groups import ParamGroups


def expanded(arms: Mapping[str, Any]) -> dict[str, Any]:
    """Arms whose options have one value each, from arms whose options may be lists of values.

    An arm with lists becomes one arm for each combination of their values. These are numbered, as
    in lean-1 and lean-2, since a run's folder is named after its arm.

    Raises:
        UsageError: a list is empty, or a numbered arm has the name of another arm.
    """
    single: dict[str, Any] = {}
    for name, options in arms.items():
        pairs = options.items() if isinstance(options, dict) else ()
        lists = {key: values for key, values in pairs if isinstance(values, list)}
        for key, values in lists.items():
            require(values, f"arms.{name}.{key}=[] must have at least one value")
        number = math.prod(map(len, lists.values()))
        require(number <= 1000, f"arms.{name} has lists for {number:,} arms: at most 1,000 can be")
        for number, combination in enumerate(itertools.product(*lists.values()), 1):
            copy = f"{name}-{number}" if lists else name
            require(copy not in single, f"arms: two would be called {copy}: rename one of them")
            single[copy] = {**options, **dict(zip(lists, combination))} if lists else options
    return single


_SHOWN: dict[str, Callable[[Any], str]] = {
    "second_moment_scale": lambda scale: f"n = {-math.log2(scale):g}",
    "row_exponent": "a = {:g}".format,
    "zero_sum": "zero-sum".format,
    "couple": "{} only".format,
    "lr_factor": "f = {:g}".format,
    "embedding_weight_decay": "decay {:g}".format,
    "beta1": "beta1 {:g}".format,
    "beta2": "beta2 {:g}".format,
    "lr": "lr {:g}".format,
}
"""How the options are shown in an arm's label, in this order; others are not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm of a comparison.

    lr_factor: the learning rate of the token embeddings, relative to that of all other parameters.
    lr: the learning rate of all parameters; null means the training's.
    """

    name: ClassVar[str]
    lr_factor: Positive = 1.0
    lr: Positive | None = None

    @property
    def label(self) -> str:
        """The arm's name in tables and figures, and the options that differ from their defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {option: getattr(self, option) for option in _SHOWN if option in defaults}
        shown = [_SHOWN[key](value) for key, value in values.items() if value != defaults[key]]
        return ", ".join([self.name, *shown])

    def rate(self, training: Training) -> float:
        """The learning rate of all parameters except the embeddings."""
        return training.lr if self.lr is None else self.lr

    def optimizer(self, model: "nn.Module", training: Training) -> "Optimizer":
        """Create the arm's optimizer for the trainable parameters of a model."""
        from coupled_adam import CoupledAdamW

        groups = self.groups(model, training)
        return CoupledAdamW(groups, self.rate(training), training.betas, training.eps)

    def embeddings(self, training: Training) -> dict[str, Any]:
        """The options of the token embeddings alone, as in :func:`coupled_adam.param_groups`."""
        return {"lr": self.lr_factor * self.rate(training)}

    def groups(self, model: "nn.Module", training: Training, **options: Any) -> "ParamGroups":
        """The groups of :func:`coupled_adam.param_groups`; positions decay if they are to."""
        from coupled_adam import param_groups

        decay, embeddings = training.weight_decay, self.embeddings(training)
        if not training.decay_positions:
            return param_groups(model, embeddings, weight_decay=decay, **options)
        positions = _positions(model, decay)
        options["exclude"] = positions["params"]
        groups = param_groups(model, embeddings, weight_decay=decay, **options)
        if positions["params"]:
            groups.append(positions)
        return groups


def _positions(model: "nn.Module", weight_decay: float) -> dict[str, Any]:
    """A group of the trained tables of embeddings that are not of tokens."""
    from torch import nn

    from coupled_adam import embedding_parameters

    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    tables -= {*embedding_parameters(model).values()}
    named = {name: p for name, p in model.named_parameters() if p in tables and p.requires_grad}
    names = {"params": [*named.values()], "param_names": [*named]}
    return {**names, "coupled": False, "weight_decay": weight_decay}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWArm(Arm):
    """AdamW for all parameters.

    embedding_weight_decay: the weight decay of all embeddings, but not of learned positions that
        have the recipe's (``training.decay_positions``).
    beta1, beta2: the betas of the token embeddings; null means the training's.
    """

    name = "AdamW"
    embedding_weight_decay: NotNegative = 0.0
    beta1: Beta | None = None
    beta2: Beta | None = None

    def embeddings(self, training: Training) -> dict[str, Any]:
        """The rate and the betas."""
        own = self.beta1, self.beta2
        betas = tuple(usual if b is None else b for b, usual in zip(own, training.betas))
        return {**super().embeddings(training), "betas": betas}

    def groups(self, model: "nn.Module", training: Training, **options: Any) -> "ParamGroups":
        """The groups, with the embeddings' weight decay."""
        decay = {"embedding_weight_decay": self.embedding_weight_decay}
        return super().groups(model, training, **decay, **options)

    def optimizer(self, model: "nn.Module", training: Training) -> "Optimizer":
        """Create torch's AdamW with the groups that Coupled Adam has."""
        from torch.optim import AdamW

        groups = self.groups(model, training)
        for group in groups:
            del group["coupled"]
        return AdamW(groups, self.rate(training), training.betas, training.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoupledAdamArm(AdamWArm):
    """Coupled Adam for the token embeddings, which are those that the other options are about.

    second_moment_scale: the factor 2^-n of Sec. 6.1.
    row_exponent: 0 to 1: how far each token has a step size of its own; beyond the paper.
    zero_sum: whether the updates leave the mean of the embeddings where it is; beyond the paper.
    couple: which of the two embedding matrices of an untied model are coupled.
    """

    name = "Coupled Adam"
    second_moment_scale: Positive = 1.0
    row_exponent: Share = 0.0
    zero_sum: bool = False
    couple: Literal["both", "input", "output"] = "both"

    optimizer = Arm.optimizer

    def embeddings(self, training: Training) -> dict[str, Any]:
        """AdamW's options, and Coupled Adam's own."""
        names = ("second_moment_scale", "row_exponent", "zero_sum")
        return super().embeddings(training) | {name: getattr(self, name) for name in names}

    def groups(self, model: "nn.Module", training: Training, **options: Any) -> "ParamGroups":
        """AdamW's groups, in which the chosen matrices are coupled."""
        return super().groups(model, training, couple=self.couple, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanArm(Arm):
    """The variant that keeps no matrix of state for the token embeddings, ``coupled_adam.LEAN``."""

    name = "LEAN"
    lr_factor: Positive = 2.0

    def embeddings(self, training: Training) -> dict[str, Any]:
        """LEAN's options, with the arm's rate."""
        from coupled_adam import LEAN

        return LEAN | {"lr_factor": self.lr_factor}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGDArm(Arm):
    """SGD with momentum 0.9 for the token embeddings (Algorithm 2)."""

    name = "SGD"
    lr_factor: Positive = dataclasses.field()  # there is no usual one

    def optimizer(self, model: "nn.Module", training: Training) -> "Optimizer":
        """Create an AdamW that uses SGD for the group of the token embeddings."""
        from coupled_adam.lab.embedding_sgd import EmbeddingSGD

        groups = self.groups(model, training)
        for group in groups:
            if group.pop("coupled"):
                group["momentum"] = 0.9
        return EmbeddingSGD(groups, self.rate(training), training.betas, training.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonArm(Arm):
    """Muon for the hidden matrices, and Coupled Adam or AdamW for everything else.

    Muon's updates are as large as AdamW's, so that one learning rate suits both. Learned positions
    are never Muon's.

    coupled: whether the token embeddings have Coupled Adam; if not, they have AdamW.
    row_exponent, zero_sum: as for coupled_adam.
    """

    name = "Muon"
    coupled: bool = True
    row_exponent: Share = 0.0
    zero_sum: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for options that do not fit together."""
        if not self.coupled and (self.row_exponent or self.zero_sum):
            raise ValueError("row_exponent and zero_sum need coupled=true")

    @property
    def label(self) -> str:
        """The label, with what has the other matrices."""
        others = "Coupled Adam" if self.coupled else "AdamW"
        return super().label.replace("Muon", f"Muon with {others}", 1)

    def optimizer(self, model: "nn.Module", training: Training, **groups: Any) -> "Optimizer":
        """Create :class:`coupled_adam.MuonWithCoupledAdam`, with more of its ``groups``."""
        from coupled_adam import MuonWithCoupledAdam

        names = ("lr_factor", "row_exponent", "zero_sum")
        decay = training.weight_decay
        positions = _positions(model, decay if training.decay_positions else 0.0)
        optimizer = MuonWithCoupledAdam(
            model,
            self.rate(training),
            embeddings={name: getattr(self, name) for name in names},
            exclude=positions["params"],
            weight_decay=decay,
            betas=training.betas,
            eps=training.eps,
            **groups,
        )
        if positions["params"]:
            optimizer.add_param_group(positions)
        for group in optimizer.param_groups:
            group["coupled"] = self.coupled and group.get("coupled", False)
        return optimizer


OPTIMIZERS: dict[str, type[Arm]] = {
    "adamw": AdamWArm,
    "coupled_adam": CoupledAdamArm,
    "lean": LeanArm,
    "sgd": SGDArm,
    "muon": MuonArm,
}
"""The arms' classes, by the value of ``optimizer`` in a recipe."""
