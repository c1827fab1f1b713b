"""The arms of a comparison: different optimizers for the token embeddings.

In every arm AdamW updates all other parameters, and everything else in a run is the same. An arm is
a small class: its fields are its options in a recipe, with types that hold their bounds, and its
one method builds its optimizer. torch is imported only then, as listing recipes does not need it.
To add one, write the class and add it to :data:`ARMS`; another rule for the embeddings alone is a
function in :mod:`coupled_adam.lab.table_rules` instead.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from coupled_adam.errors import UsageError, did_you_mean, prefixed_usage_error
from coupled_adam.fields import Beta, NotNegative, Positive, Share, checked, require
from coupled_adam.lab.sections import Training

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from coupled_adam.optim.param_groups import ParamGroups


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
"""How an arm's label shows its options, in this order; it leaves out others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm of a comparison.

    lr_factor: the learning rate of the token embeddings, relative to that of all other parameters.
    lr: the learning rate of all parameters; null means the training's.
    """

    name: ClassVar[str]  # in labels
    optimizer: str  # in a recipe; each class narrows it to its own
    lr_factor: Positive = 1.0
    lr: Positive | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        # An empty dict is the default of rule_options.
        defaults: dict[str, Any] = {
            f.name: {} if callable(f.default_factory) else f.default
            for f in dataclasses.fields(self)
        }
        return {name: value for name, value in vars(self).items() if value != defaults[name]}

    @property
    def label(self) -> str:
        """The arm's name in tables and figures, and its options."""
        options = self.options
        shown = [show(options[option]) for option, show in _SHOWN.items() if option in options]
        return ", ".join([self.name, *shown])

    def rate(self, training: Training) -> float:
        """The learning rate of all parameters except the embeddings."""
        return training.lr if self.lr is None else self.lr

    def build_optimizer(self, model: "nn.Module", training: Training) -> "Optimizer":
        """Create the arm's optimizer for the trainable parameters of a model."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ArmWithBetas(Arm):
    """An arm whose embeddings may have other betas than the rest.

    beta1, beta2: the betas of the token embeddings; null takes the optimizer's own, or the
        training's for adamw, coupled_adam and muon.
    """

    beta1: Beta | None = None
    beta2: Beta | None = None

    def for_embeddings(self, training: Training, betas: tuple[float, float]) -> dict[str, Any]:
        """The embeddings' rate and betas, which are ``betas`` by default."""
        # Either may be left out.
        own = self.beta1, self.beta2
        options: dict[str, Any] = {
            "betas": tuple(usual if beta is None else beta for beta, usual in zip(own, betas))
        }
        if self.lr_factor is not None:
            options["lr"] = self.lr_factor * self.rate(training)
        return options


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWArm(_ArmWithBetas):
    """AdamW for all parameters.

    embedding_weight_decay: the weight decay of all embeddings except learned positions that decay
        like other matrices (``training.decay_positions``).
    """

    name = "AdamW"
    optimizer: Literal["adamw"] = "adamw"
    embedding_weight_decay: NotNegative = 0.0

    def build_optimizer(self, model: "nn.Module", training: Training) -> "Optimizer":
        """Create torch's AdamW with the groups that Coupled Adam has."""
        from torch.optim import AdamW

        embeddings = self.for_embeddings(training, training.betas)
        decay = self.embedding_weight_decay
        groups = _param_groups(model, training, embeddings, embedding_weight_decay=decay)
        # torch's AdamW has no such option. The groups are the same, so decay and rates are, too.
        for group in groups:
            del group["coupled"]
        return AdamW(groups, self.rate(training), training.betas, training.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoupledAdamArm(_ArmWithBetas):
    """Coupled Adam for the token embeddings, to which its options apply.

    embedding_weight_decay: as for adamw.
    second_moment_scale: the factor 2^-n of Sec. 6.1.
    row_exponent: from 0, one step size for all tokens, to 1, one for each; beyond the paper.
    zero_sum: whether updates leave the mean embedding in its place; beyond the paper.
    couple: which of the two embedding matrices of an untied model are coupled.
    """

    name = "Coupled Adam"
    optimizer: Literal["coupled_adam"] = "coupled_adam"
    embedding_weight_decay: NotNegative = 0.0
    second_moment_scale: Positive = 1.0
    row_exponent: Share = 0.0
    zero_sum: bool = False
    couple: Literal["both", "input", "output"] = "both"

    def build_optimizer(self, model: "nn.Module", training: Training) -> "Optimizer":
        """Create CoupledAdamW, in which the chosen matrices are coupled."""
        from coupled_adam import CoupledAdamW

        names = ("second_moment_scale", "row_exponent", "zero_sum")
        embeddings = self.for_embeddings(training, training.betas)
        embeddings |= {name: getattr(self, name) for name in names}
        options = {"embedding_weight_decay": self.embedding_weight_decay, "couple": self.couple}
        groups = _param_groups(model, training, embeddings, **options)
        return CoupledAdamW(groups, self.rate(training), training.betas, training.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanArm(_ArmWithBetas):
    """``coupled_adam.LEAN``, which keeps no matrix of state for the token embeddings.

    lr_factor: as for all arms; null derives it from the number of steps.
    """

    name = "LEAN"
    optimizer: Literal["lean"] = "lean"
    lr_factor: Positive | None = None  # type: ignore[assignment]

    def build_optimizer(self, model: "nn.Module", training: Training) -> "Optimizer":
        """Create CoupledAdamW with LEAN's options for the embeddings."""
        from coupled_adam import LEAN, CoupledAdamW

        options = self.for_embeddings(training, LEAN["betas"])
        steps = training.total_steps if self.lr_factor is None else None
        groups = _param_groups(model, training, LEAN | options, steps=steps)
        return CoupledAdamW(groups, self.rate(training), training.betas, training.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGDArm(Arm):
    """SGD with momentum 0.9 for the token embeddings (Algorithm 2)."""

    name = "SGD"
    optimizer: Literal["sgd"] = "sgd"
    lr_factor: Positive = dataclasses.field()  # there is no usual one

    def build_optimizer(self, model: "nn.Module", training: Training) -> "Optimizer":
        """Create an AdamW that uses SGD for the group of the token embeddings."""
        # The paper's arm has its own name; its rule is one of the table rules.
        rule = TableRuleArm(rule="sgd", lr_factor=self.lr_factor, lr=self.lr)
        return rule.build_optimizer(model, training)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRuleArm(_ArmWithBetas):
    """Another rule for the token embeddings.

    rule: its name in ``coupled_adam.lab.table_rules``, such as ember or adafactor.
    rule_options: options of the rule that differ from its defaults.
    """

    name = "Rule"
    optimizer: Literal["table_rule"] = "table_rule"
    rule: str
    # A dict has no hash, by which a data frame groups arms.
    rule_options: dict[str, bool | float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raise UsageError for a rule, or an option of it, that does not exist."""
        # Imported here, since it imports torch: only recipes with such an arm take the time.
        from coupled_adam.lab.table_rules import RULES

        require(self.rule in RULES, f"rule={self.rule}: {did_you_mean(self.rule, RULES)}")
        has = RULES[self.rule].options
        for option in self.rule_options:
            hint = did_you_mean(option, has, f"{self.rule} has no options")
            require(option in has, f"rule_options.{option} is not an option of {self.rule}: {hint}")

    @property
    def label(self) -> str:
        """The rule's name, and the options."""
        options = [f"{key} {value:g}" for key, value in self.rule_options.items()]
        return ", ".join([super().label.replace(self.name, self.rule, 1), *options])

    def build_optimizer(self, model: "nn.Module", training: Training) -> "Optimizer":
        """Create an AdamW that uses the rule for the group of the token embeddings."""
        from coupled_adam.lab.table_rules import RULES, TableRuleAdamW

        rule = RULES[self.rule]
        embeddings = self.for_embeddings(training, rule.betas)
        groups = _param_groups(model, training, embeddings)
        # The groups of the embeddings, which would be coupled, get the rule instead.
        for group in groups:
            if group.pop("coupled"):
                group |= {"rule": self.rule, **rule.options, **self.rule_options}
        return TableRuleAdamW(groups, self.rate(training), training.betas, training.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonArm(_ArmWithBetas):
    """Muon for the hidden matrices, another optimizer for the embeddings, AdamW for the rest.

    Muon's updates are as large as AdamW's, so that one learning rate suits both. Muon never updates
    learned positions. LEAN for the embeddings is ``{optimizer: muon, row_exponent: 0.75, zero_sum:
    true, beta1: 0, beta2: 0.99}``.

    coupled: whether Coupled Adam updates the token embeddings; if not, AdamW does.
    row_exponent, zero_sum: as for coupled_adam.
    """

    name = "Muon"
    optimizer: Literal["muon"] = "muon"
    coupled: bool = True
    row_exponent: Share = 0.0
    zero_sum: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for options that do not fit together."""
        if not self.coupled and (self.row_exponent or self.zero_sum):
            raise ValueError("row_exponent and zero_sum need coupled=true")

    @property
    def label(self) -> str:
        """The label, with the optimizer of the embeddings."""
        others = "Coupled Adam" if self.coupled else "AdamW"
        return super().label.replace("Muon", f"Muon with {others}", 1)

    def build_optimizer(self, model: "nn.Module", training: Training, **groups: Any) -> "Optimizer":
        """Create :class:`coupled_adam.MuonWithCoupledAdam`, with more of its ``groups``."""
        from coupled_adam import MuonWithCoupledAdam

        names = ("lr_factor", "row_exponent", "zero_sum")
        embeddings = {name: getattr(self, name) for name in names}
        embeddings["betas"] = self.for_embeddings(training, training.betas)["betas"]
        decay = training.weight_decay
        positions = _positions(model, decay if training.decay_positions else 0.0)
        # Positions are added below as a group of AdamW's, with or without the weight decay.
        optimizer = MuonWithCoupledAdam(
            model,
            self.rate(training),
            embeddings=embeddings,
            exclude=positions["params"],
            weight_decay=decay,
            betas=training.betas,
            eps=training.eps,
            **groups,
        )
        if positions["params"]:
            optimizer.add_param_group(positions)
        # Without Coupled Adam the embeddings keep their group, which AdamW then updates.
        for group in optimizer.param_groups:
            group["coupled"] = self.coupled and group.get("coupled", False)
        return optimizer


ARMS: dict[str, type[Arm]] = {
    arm.optimizer: arm for arm in (AdamWArm, CoupledAdamArm, LeanArm, SGDArm, TableRuleArm, MuonArm)
}
"""The classes of arms, by the value of ``optimizer`` in a recipe."""


def arms_from(plain: Mapping[str, Any]) -> dict[str, Arm]:
    """Create the arms of a recipe from their plain options, which may be lists of values.

    An arm with lists becomes one arm for each combination of their values. These are numbered, as
    in lean-1 and lean-2, since a run's folder is named after its arm. Raises UsageError if an
    option is unknown or has a wrong value, or two arms have one name.
    """
    arms: dict[str, Arm] = {}
    for name, options in plain.items():
        if not isinstance(options, dict):
            raise UsageError(
                f"arms.{name}={options!r} must be an optimizer and its options, such as "
                "{optimizer: lean, lr_factor: 4}"
            )
        # Lists of values are arms for all their combinations.
        lists = {key: choices for key, choices in options.items() if isinstance(choices, list)}
        if empty := [key for key, choices in lists.items() if not choices]:
            raise UsageError(f"arms.{name}.{empty[0]}=[] must have at least one value")
        for number, combination in enumerate(itertools.product(*lists.values()), 1):
            arm = f"{name}-{number}" if lists else name
            if arm in arms:
                raise UsageError(f"arms: two would be called {arm}: rename one of them")
            # The optimizer, which may come from a list, names the class that checks the options.
            values = {**options, **dict(zip(lists, combination))}
            optimizer = values.get("optimizer")
            if str(optimizer) not in ARMS:
                raise UsageError(
                    f"arms.{name}.optimizer={optimizer!r} must be one of {', '.join(ARMS)}; "
                    f"rules are arms as {{optimizer: table_rule, rule: {optimizer or 'NAME'}}}"
                )
            with prefixed_usage_error(f"arms.{name}: ", UsageError):
                arms[arm] = checked(ARMS[str(optimizer)], values)
    return arms


def _param_groups(
    model: "nn.Module", training: Training, embeddings: Mapping[str, Any], **options: Any
) -> "ParamGroups":
    """The groups of :func:`coupled_adam.param_groups`; positions decay if the training says so."""
    from coupled_adam import param_groups

    decay = training.weight_decay
    if not training.decay_positions:
        return param_groups(model, embeddings, weight_decay=decay, **options)
    # Learned positions are embeddings, too, which do not decay unless they are taken out.
    positions = _positions(model, decay)
    options["exclude"] = positions["params"]
    groups = param_groups(model, embeddings, weight_decay=decay, **options)
    if positions["params"]:
        groups.append(positions)
    return groups


def _positions(model: "nn.Module", weight_decay: float) -> dict[str, Any]:
    """A group of the trained embeddings of anything but tokens."""
    from torch import nn

    from coupled_adam import embedding_parameters

    # Whatever is left over, since architectures name their positions differently.
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    weights -= {*embedding_parameters(model).values()}
    named = {name: p for name, p in model.named_parameters() if p in weights and p.requires_grad}
    names = {"params": [*named.values()], "param_names": [*named]}
    return {**names, "coupled": False, "weight_decay": weight_decay}
