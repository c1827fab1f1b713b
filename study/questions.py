"""The runs of each question by name, with three seeds or more, except in :data:`UNFINISHED`.

All results of the arms ``a=...`` were made with the exact LEAN of November 2026: nu was the mean of
the squared gradients themselves, and all sums over rows were those of the same step. The package
has a one-pass LEAN now (:mod:`coupled_adam.optim.reference`), with other numbers. So these arms
must not get new seeds beside the old ones; "plain exact" of :mod:`study.table_rules` is the old
rule.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from coupled_adam import LEAN

from .evaluation import Extra
from .experts import balance

ADAMW: dict[str, Any] = {"optimizer": "adamw"}
COUPLED: dict[str, Any] = {"optimizer": "coupled_adam"}
ARMS: dict[str, dict[str, Any]] = {"adamw": ADAMW, "coupled": COUPLED}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kind of run.

    arm: the arm's options, as in a recipe.
    overrides: values of the recipe that differ from ``english.yaml``.
    variant: what a recipe cannot say, the "module:NAME" of a Variant in this package.
    extra: measures additional results of the trained model.
    """

    arm: Mapping[str, Any]
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    variant: str | None = None
    extra: Extra | None = None


FAST = "head:FAST"


def _variant(module: str, name: str, *numbers: float) -> str:
    """The variant of some numbers: that of 1 and 0.25 is ``NAME_1_025``."""
    words = [name, *(f"{number:g}" for number in numbers)]
    return f"{module}:{'_'.join(words).replace('.', '').upper()}"


def _scale() -> dict[str, Entry]:
    """More data for the base model, and larger models; the base run is in another question."""
    sizes = {
        "0.4M": _size(n_embd=64, n_layer=2, n_head=2, lr=5e-3),
        "1.1M": _size(n_embd=128, n_layer=3, n_head=4, lr=3e-3),
        "2.6M": _size(n_embd=192, n_layer=4, n_head=6, lr=2e-3),
    }
    points = [("0.4M", 1200), ("0.4M", 2400), ("1.1M", 600), ("2.6M", 600)]
    return {
        f"N={size} steps={steps} {arm}": Entry(options, {**sizes[size], **_steps(steps)})
        for size, steps in points
        for arm, options in ARMS.items()
    }


def _size(lr: float, **model: int) -> dict[str, Any]:
    return {"training.lr": lr, **{f"model.{key}": value for key, value in model.items()}}


def _steps(steps: int) -> dict[str, Any]:
    return {"training.steps": steps, "training.evaluate_every": steps // 6}


ROTARY: dict[str, Any] = {"model.architecture": "stablelm", "model.intermediate_size": 192}
NARROW = _size(n_embd=32, n_layer=2, n_head=1, lr=5e-3)
WIDE = _size(n_embd=128, n_layer=3, n_head=4, lr=3e-3)
"""Models of another shape, which several questions have."""


TEN_MILLION: dict[str, Any] = {
    **_size(n_embd=256, n_layer=8, n_head=8, lr=2e-3),
    "model.vocab_size": 16384,
    "model.bias": False,
    "data.max_held_out_tokens": 1_000_000,
    "training.batch_size": 64,
    "training.sequence_length": 512,
    "training.precision": "bf16-mixed",
    "training.evaluation_batches": 20,
    "training.test_batches": 30,
    **_steps(2904),
}
"""The model of the recipe 10M, and 95M tokens; about 9 for each parameter."""


def _scaled(coupled: Iterable[int], adamw: Iterable[int], **overrides: Any) -> dict[str, Entry]:
    """Scale nu by 2^-n, or AdamW's embedding learning rate by the corresponding 2^(n/2)."""
    scaled = {n: {**COUPLED, "second_moment_scale": 2.0**-n} for n in coupled}
    faster = {n: {**ADAMW, "lr_factor": 2 ** (n / 2)} for n in adamw}
    return {
        f"{arm} n={n}": Entry(options, overrides)
        for arm, factors in (("coupled", scaled), ("adamw", faster))
        for n, options in factors.items()
    }


def _between(exponents: Mapping[float, Iterable[int]], **overrides: Any) -> dict[str, Entry]:
    """Exponents a with zero-sum updates; the embeddings learn 2^(n/2) times as fast as the rest."""
    return {
        f"a={a:g} n={n}": Entry(
            {**COUPLED, "row_exponent": a, "zero_sum": True, "lr_factor": 2 ** (n / 2)}, overrides
        )
        for a, factors in exponents.items()
        for n in factors
    }


def _full(exponents: Mapping[float, Iterable[int]], **overrides: Any) -> dict[str, Entry]:
    """The same with a moment of the shape [V, H]; a = 1 is AdamW with zero-sum updates."""
    return {
        f"full a={a:g} n={n}": Entry(
            {**ADAMW, "lr_factor": 2 ** (n / 2)}, overrides, _variant("between", "ZERO_SUM", a)
        )
        for a, factors in exponents.items()
        for n in factors
    }


def _faster(factors: Mapping[str, Iterable[int]], **overrides: Any) -> dict[str, Entry]:
    """Both arms with learning rates of the embeddings that are 2^(n/2) times the core's."""
    return {
        f"{arm} n={n}": Entry({**ARMS[arm], "lr_factor": 2 ** (n / 2)}, overrides)
        for arm, ns in factors.items()
        for n in ns
    }


BETAS = tuple(itertools.product((0.0, 0.5, 0.9), (0.95, 0.99, 0.999)))
"""The betas of the embeddings that are tried; all other parameters have 0.9, 0.95."""


TriedArm = tuple[str, tuple[float, float], int]
"""An arm of :func:`_betas`, the embeddings' betas, and n."""


def _betas(settings: Iterable[TriedArm], **overrides: Any) -> dict[str, Entry]:
    """Embeddings with betas of their own that learn 2^(n/2) times as fast as the rest.

    Args:
        settings: an arm ("adamw", "coupled", or "a=..." for zero-sum updates), the betas and n.
    """
    return {
        f"{arm} {beta1:g} {beta2:g} n={n}": Entry(
            {**_arm(arm), "beta1": beta1, "beta2": beta2, "lr_factor": 2 ** (n / 2)},
            overrides,
            FAST,
        )
        for arm, (beta1, beta2), n in settings
    }


FINALISTS: tuple[TriedArm, ...] = (
    ("adamw", (0.9, 0.95), 0),
    *(("adamw", (0.9, 0.999), n) for n in (0, 1, 2)),
    *(("adamw", (0.0, 0.99), n) for n in (0, 1, 2)),
    ("adamw", (0.0, 0.999), 1),
    ("adamw", (0.0, 0.999), 2),
    *(("a=0.75", (0.0, 0.99), n) for n in (1, 2, 3)),
    ("coupled", (0.9, 0.95), 0),
)
"""After 20M tokens: AdamW as usual, with torch's beta2 and without momentum, LEAN, Coupled Adam."""

WITH_AND_WITHOUT_MOMENTUM = (
    ("adamw", (0.0, 0.999)),
    ("adamw", (0.9, 0.999)),
    ("a=0.75", (0.0, 0.99)),
    ("a=0.75", (0.9, 0.999)),
)
"""Does "no momentum" hold where a gradient is less noisy, or where there are few steps?"""


def _at_rates(
    arms: Iterable[tuple[str, tuple[float, float]]], factors: Iterable[int]
) -> list[TriedArm]:
    return [(*arm, n) for arm, n in itertools.product(arms, factors)]


def _elsewhere(factors: Iterable[int], usual_factors: Iterable[int]) -> list[TriedArm]:
    """AdamW as usual and without momentum, and LEAN: what is run with models of other shapes."""
    without_momentum = (("adamw", (0.0, 0.999)), ("a=0.75", (0.0, 0.99)))
    return [
        *_at_rates((("adamw", (0.9, 0.95)),), usual_factors),
        *_at_rates(without_momentum, factors),
    ]


def _batch(sequences: int, steps: int) -> dict[str, Any]:
    """Batches of other sizes, held-out ones included, of which there are fewer."""
    return {
        **_steps(steps),
        "training.batch_size": sequences,
        "training.warmup": min(100, steps // 6),
        "training.evaluation_batches": 25 * 32 // sequences or 1,
        "training.test_batches": 100 * 32 // sequences,
    }


RULES: dict[str, tuple[float, float]] = {
    "plain exact": (0.0, 0.99),
    "plain delayed": (0.0, 0.99),
    "plain delayed free": (0.0, 0.99),
    "half delayed": (0.0, 0.99),
    "weighted exact": (0.0, 0.99),
    "weighted delayed": (0.0, 0.99),
    "weighted delayed free": (0.0, 0.99),
    "adam zero sum": (0.0, 0.999),
    "ember free": (0.0, 0.999),
    "ember zero sum": (0.0, 0.999),
    "adafactor free": (0.0, 0.999),
    "balanced free": (0.95, 0.999),
    "balanced 0 free": (0.0, 0.999),
}
"""The rules of :mod:`study.table_rules`, with the betas of each in its paper; LEAN has five."""


def _rules(factors: Mapping[str, Iterable[int]], **overrides: Any) -> dict[str, Entry]:
    """Embeddings updated by a rule at 2^(n/2) times the core's rate, by the rule's name."""
    return {
        f"{rule} n={n}": Entry(
            {
                **ADAMW,
                "beta1": RULES[rule][0],
                "beta2": RULES[rule][1],
                "lr_factor": 2 ** (n / 2),
            },
            overrides,
            "table_rules:" + rule.replace(" ", "_").upper(),
        )
        for rule, ns in factors.items()
        for n in ns
    }


DELAYED = ("plain delayed", "half delayed", "weighted delayed")
"""Versions of LEAN that pass over the memory once; one of them became ``coupled_adam.LEAN``."""

LEANS = ("plain exact", "weighted exact", *DELAYED)


def _peers(**overrides: Any) -> dict[str, Entry]:
    """Each rule at the rates of a pilot, and AdamW with the mean removed."""
    # A frequent token's row of a matrix or column of unit norm is larger than with Adam, and all
    # of a sign's rows are.
    settings: dict[str, Iterable[tuple[float, float, int]]] = {
        "row_moment": (*((0.0, 0.99, n) for n in (4, 5, 6)), (0.0, 0.999, 4), (0.0, 0.999, 5)),
        "lion": ((0.9, 0.99, 0),),
        "sign": ((0.9, 0.95, 0),),
        "matrix": ((0.0, 0.95, 2), (0.9, 0.95, 2)),
        "rows": ((0.0, 0.95, 4), (0.9, 0.95, 4)),
        "columns": (*((0.0, 0.95, n) for n in (0, 2, 4)), (0.9, 0.95, 2)),
    }
    peers = {
        f"{rule} {beta1:g} {beta2:g} n={n}": Entry(
            {**ADAMW, "beta1": beta1, "beta2": beta2, "lr_factor": 2 ** (n / 2)},
            overrides,
            _variant("peers", rule),
        )
        for rule, tried in settings.items()
        for beta1, beta2, n in tried
    }
    without_mean = _betas([("adamw", (0.0, 0.999), 5)], **overrides)
    return peers | {
        f"centered {name}": dataclasses.replace(entry, variant="peers:CENTERED")
        for name, entry in without_mean.items()
    }


def _arm(name: str) -> dict[str, Any]:
    """The options of an arm: adamw, coupled, lean, "a=0.5" (zero-sum updates), "a=0.5 free" (not).

    An arm by the name of "lean" is the package's, in one pass; "a=0.75" was in two.
    """
    if name in ARMS:
        return ARMS[name]
    exponent, *free = name.removeprefix("a=").split()
    row_exponent = LEAN["row_exponent"] if exponent == "lean" else float(exponent)
    return {**COUPLED, "row_exponent": row_exponent, "zero_sum": not free}


def _finalists(
    settings: Mapping[str, Mapping[str, Any]],
    exponents: Mapping[float, Iterable[int]],
    factors: Mapping[str, Iterable[int]],
) -> dict[str, Entry]:
    """Adam, Coupled Adam and what is between them in other settings, whose names stand in front.

    Args:
        settings: the overrides of each setting by its name.
        exponents: by a, the n of what is between.
        factors: by arm, the n of Adam and Coupled Adam.
    """
    return {
        f"{setting} {name}": entry
        for setting, overrides in settings.items()
        for entries in (_between(exponents, **overrides), _faster(factors, **overrides))
        for name, entry in entries.items()
    }


def _core_rates() -> dict[str, Entry]:
    """Half and twice the core's rate, with the best embedding rates relative to it, and absolute.

    At a rate of 5e-3 the best n with the first seed is 9 (AdamW), 5 (Coupled Adam) and 7 (a = 0.5).
    """
    entries: dict[str, Entry] = {}
    for lr, shift in ((2.5e-3, 2), (1e-2, -2)):
        factors = {"adamw": (9, 9 + shift), "coupled": (5, 5 + shift)}
        settings = {f"lr={lr:g}": {"training.lr": lr}}
        entries |= _finalists(settings, {0.5: (7, 7 + shift)}, factors)
    return entries


def _longer_core_rates() -> dict[str, Entry]:
    """Half and twice the core's rate for 20M tokens, each with its best n at 5e-3."""
    settings = {f"lr={lr:g}": {"training.lr": lr, **_steps(9768)} for lr in (2.5e-3, 1e-2)}
    return _finalists(settings, {0.5: (2,)}, {"adamw": (0,), "coupled": (0,)})


def _other_models() -> dict[str, Entry]:
    """The same in a model that is not tied, has rotary positions, is larger, or beside Muon."""
    larger = {"1.1M": WIDE}
    settings: dict[str, dict[str, Any]] = {
        "untied": {"model.tied": False},
        "rotary": ROTARY,
        **larger,
    }
    half = {"a=0.5": {**COUPLED, "row_exponent": 0.5, "zero_sum": True}}
    muon = _beside_muon(half, (0.25, 1, 4, 16), ((1, 1), (4, 1)))
    return {
        **_finalists(settings, {0.5: (5, 7)}, {"adamw": (7, 9), "coupled": (5, 7)}),
        # In the larger model the highest n of these are the best.
        **_finalists(larger, {0.5: (9,)}, {"adamw": (11,), "coupled": (9,)}),
        **{f"muon {name}": entry for name, entry in muon.items()},
    }


def _warmup() -> dict[str, Entry]:
    """No warmup, ten steps, and the base's hundred, with one rate for all parameters."""
    settings = {f"warmup={steps}": {"training.warmup": steps} for steps in (0, 10, 100)}
    return _finalists(settings, {0.5: (0,)}, {"adamw": (0,), "coupled": (0,)})


def _beside_muon(
    arms: Mapping[str, Mapping[str, Any]],
    tied: Iterable[float],
    untied: Iterable[tuple[float, float]],
) -> dict[str, Entry]:
    """Rates of their own for the embeddings, and for the head of an untied model, beside Muon.

    Args:
        arms: their options by name.
        tied: rates of the tied matrix, relative to Muon's.
        untied: rates of the input embeddings and of the head.
    """
    models: dict[str, tuple[float, ...]] = {f"f={f:g}": (f,) for f in tied}
    models |= {f"input={f:g} head={head:g}": (f, head) for f, head in untied}
    return {
        f"{name} {arm}": Entry(
            options,
            {"training.lr": 1e-2, "model.tied": len(rates) == 1},
            _variant("muon", "MUON", *rates),
        )
        for name, rates in models.items()
        for arm, options in arms.items()
    }


def _tables_beside_muon(factors: Iterable[float]) -> dict[str, Entry]:
    """LEAN and AdamW for the embeddings beside Muon, with rates relative to Muon's.

    AdamW's betas are the best known, those of November 2026 in nanochat (0.8, 0.995 for the input
    table, 0.8, 0.96 for the head) and in modded-nanogpt (0.5, 0.95), and 0.8, 0.95, neither's.
    """
    lean = {"row_exponent": LEAN["row_exponent"], "zero_sum": True}
    betas = ((0.0, 0.999), (0.8, 0.95), (0.8, 0.995), (0.8, 0.96), (0.5, 0.95))
    tables: dict[str, dict[str, Any]] = {
        "lean": {**lean, "beta1": LEAN["betas"][0], "beta2": LEAN["betas"][1]},
        **{
            f"adamw {beta1:g} {beta2:g}": {"coupled": False, "beta1": beta1, "beta2": beta2}
            for beta1, beta2 in betas
        },
    }
    return {
        f"{name} f={factor:g}": Entry(
            {"optimizer": "muon", **options, "lr_factor": factor},
            {**_few_steps(2400), "training.lr": 1e-2},
            FAST,
        )
        for name, options in tables.items()
        for factor in factors
    }


ALTERNATIVES = (
    "centered_each_step",
    "mean_loss_0.0001",
    "mean_loss_0.01",
    "mean_loss_1",
    "z_loss",
    "soft_cap",
    "centered_at_the_end",
    "recentered_at_the_end",
)
"""What ``alternatives`` tries beside AdamW; each has a variant of its name."""

RATES = (5e-3, 2e-2)
"""The learning rates of ``alternatives``."""


def _alternatives() -> dict[str, Entry]:
    """All but both arms and lr_factor 0.25 at 5e-3, which other questions have."""
    # Weak penalties have no effect, and changes at the end do not affect the training.
    strong = ("centered_each_step", "mean_loss_1", "z_loss", "soft_cap")
    decay = {**ADAMW, "embedding_weight_decay": 0.1}
    return {
        **{
            f"lr={lr:g} {name}": Entry(ADAMW, {"training.lr": lr}, _variant("alternatives", name))
            for lr, names in zip(RATES, (ALTERNATIVES, strong))
            for name in names
        },
        **{f"lr={lr:g} weight_decay": Entry(decay, {"training.lr": lr}) for lr in RATES},
        "lr=0.02 lr_factor_0.25": Entry({**ADAMW, "lr_factor": 0.25}, {"training.lr": 2e-2}),
    }


class Setting(NamedTuple):
    """A setting of the test that was written down first.

    overrides: values of the recipe that differ from ``english.yaml``.
    tried: the two n of each arm.
    chosen: the n that LEAN's validation loss chose.
    """

    overrides: dict[str, Any]
    tried: tuple[int, int]
    chosen: int


SETTINGS: dict[str, Setting] = {
    "1.2M": Setting(_steps(600), (6, 8), 8),
    "untied": Setting({"model.tied": False, **_steps(1200)}, (4, 6), 6),
    "rotary": Setting({**ROTARY, **_steps(1200)}, (6, 8), 6),
    "H=32": Setting({**NARROW, **_steps(1200)}, (5, 7), 5),
    "16k": Setting(_batch(256, 300), (7, 8), 7),
    "64k": Setting(_batch(1024, 75), (8, 9), 8),
    "H=128": Setting({**WIDE, **_steps(1200)}, (5, 7), 7),
    "V=16384": Setting({"model.vocab_size": 16384, **_steps(1200)}, (5, 7), 7),
}


def _settings() -> dict[str, Entry]:
    """AdamW without momentum and LEAN in each setting, whose name stands in front."""
    arms = (("adamw", (0.0, 0.999)), ("lean", (0.0, 0.99)))
    return {
        f"{setting} {name}": entry
        for setting, (overrides, tried, _) in SETTINGS.items()
        for name, entry in _betas(_at_rates(arms, tried), **overrides).items()
    }


def _row_moment(n: int, overrides: Mapping[str, Any]) -> dict[str, Entry]:
    """One moment for each row, without LEAN's for each column."""
    options = {**ADAMW, "beta1": 0.0, "beta2": 0.99, "lr_factor": 2 ** (n / 2)}
    name = f"row_moment 0 0.99 n={n}"
    return {name: Entry(options, overrides, _variant("peers", "row_moment"))}


def _row_moments() -> dict[str, Entry]:
    """They have the n that LEAN's loss chose."""
    return {
        f"{setting} {name}": entry
        for setting, (overrides, _, n) in SETTINGS.items()
        for name, entry in _row_moment(n, overrides).items()
    }


def _ember_and_free() -> dict[str, Entry]:
    """LEAN without zero-sum updates at the n that its loss chose, and Ember at both n."""
    return {
        f"{setting} {name}": entry
        for setting, (overrides, tried, n) in SETTINGS.items()
        for name, entry in (
            *_betas([("lean free", (0.0, 0.99), n)], **overrides).items(),
            *_rules({"ember free": tried}, **overrides).items(),
        )
    }


def _parts_longer() -> dict[str, Entry]:
    """LEAN's parts after 20M tokens, at its n and, for the rows' moments, twice the rate."""
    overrides = _steps(9768)
    return {
        **_rules({"plain delayed free": (1,)}, **overrides),
        **_row_moment(1, overrides),
        **_row_moment(3, overrides),
    }


def rate_rule(steps: int) -> float:
    """The factor on the core's rate that is tested: 15,000 / steps, at least 1 and at most 16.

    :func:`coupled_adam.optim.lean.lean_lr_factor` may have other constants one day; these
    are what was tested.
    """
    return min(16.0, max(1.0, 15_000 / steps))


MULTIPLES = (0.25, 0.5, 1, 2, 4)
"""What the rule's factor is multiplied with, as far as it is needed to find the lowest loss."""


def _few_steps(steps: int, **overrides: Any) -> dict[str, Any]:
    """A warmup of a sixth of the steps, at most 100, and little time for evaluations."""
    return {
        "training.steps": steps,
        **overrides,
        "training.evaluate_every": steps,
        "training.test_batches": 1,
        "training.warmup": min(100, steps // 6),
    }


LINEAR_TO_ZERO = {
    "training.schedule": "wsd",
    "training.decay": 1.0,
    "training.final_lr": 0.0,
}

RATE_SETTINGS: dict[str, dict[str, Any]] = {
    "150 steps": _few_steps(150),
    "300 steps": _few_steps(300),
    "1200 steps": _few_steps(1200),
    "1k": _few_steps(2400, **_batch(16, 2400)),
    "512": _few_steps(4800, **_batch(8, 4800)),
    "core a quarter": _few_steps(300, **{"training.lr": 1.25e-3}),
    "core twice": _few_steps(600, **{"training.lr": 1e-2}),
    "linear": _few_steps(1200, **LINEAR_TO_ZERO),
    "constant": _few_steps(600, **{"training.schedule": "constant"}),
    "untied": _few_steps(300, **{"model.tied": False}),
    "rotary": _few_steps(300, **ROTARY),
    "H=32": _few_steps(300, **NARROW),
    "16k": _few_steps(75, **_batch(256, 75)),
    "H=192": _few_steps(300, **_size(n_embd=192, n_layer=4, n_head=6, lr=2e-3)),
    "4800 steps": _few_steps(4800),
    "19536 steps": _few_steps(19536),
}
"""The settings of the test of :func:`rate_rule`; another text is a question of its own."""


def _rate_rule(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Entry]:
    """AdamW without momentum and LEAN at multiples of the rule's factor."""
    arms = {
        "adamw": {**ADAMW, "beta1": 0.0, "beta2": 0.999},
        "lean": {**_arm("lean"), "beta1": 0.0, "beta2": 0.99},
    }
    return {
        f"{setting} {arm} x{multiple:g}": Entry(
            {**options, "lr_factor": multiple * rate_rule(overrides["training.steps"])},
            overrides,
            FAST,
        )
        for setting, overrides in settings.items()
        for arm, options in arms.items()
        for multiple in MULTIPLES
    }


SECOND_SETTINGS: dict[str, dict[str, Any]] = {
    "1.2M": _few_steps(600),
    "1k": _few_steps(2400, **_batch(16, 2400)),
    "2400 steps": _few_steps(2400),
    "64k": _few_steps(75, **_batch(1024, 75)),
}
"""In which LEAN's constants are chosen: the base, small batches, more steps, and few large ones."""


def _tokens_a_step(overrides: Mapping[str, Any]) -> int:
    sequences: int = overrides.get("training.batch_size", 32)
    return 64 * sequences


LEAN2 = {**COUPLED, "beta1": 0.0, "row_exponent": 0.75, "zero_sum": True}
"""The second edition without its beta2. It compares rows with the geometric mean of the columns'
second moments; the names of its runs begin with "lean2"."""

WITHOUT_MOMENTUM = {**ADAMW, "beta1": 0.0, "beta2": 0.999}
DECAY = {"embedding_weight_decay": 0.02}


def _second(overrides: Mapping[str, Any], factor: float) -> dict[str, Entry]:
    """What is tried for LEAN's second edition in a setting, at one rate.

    "first" is LEAN as it was before.
    """
    by_tokens = 0.999 ** (_tokens_a_step(overrides) / 2048)
    second = {
        "0 0.99": {"beta2": 0.99},
        "0 0.999": {},
        **({} if by_tokens == 0.999 else {"0 tokens": {"beta2": by_tokens}}),
        "0 0.999 a=0.5": {"row_exponent": 0.5},
        "0 0.999 a=1": {"row_exponent": 1.0},
        "0 0.999 free": {"zero_sum": False},
        "0 0.999 decay=0.01": {"embedding_weight_decay": 0.01},
        "0 0.999 decay=0.02": DECAY,
    }
    arms: dict[str, tuple[dict[str, Any], str]] = {
        "adamw 0 0.999": (WITHOUT_MOMENTUM, FAST),
        "adamw 0 0.999 decay=0.02": ({**WITHOUT_MOMENTUM, **DECAY}, FAST),
        "first 0 0.99": ({**WITHOUT_MOMENTUM, "beta2": 0.99}, "table_rules:PLAIN_DELAYED"),
        "weighted 0 0.999": (WITHOUT_MOMENTUM, "table_rules:WEIGHTED_DELAYED"),
        **{
            f"lean2 {name}": ({**LEAN2, "beta2": 0.999, **options}, FAST)
            for name, options in second.items()
        },
    }
    return {
        name: Entry({**options, "lr_factor": factor}, overrides, variant)
        for name, (options, variant) in arms.items()
    }


def _screening() -> dict[str, Entry]:
    """All that is tried, at the rate of :func:`rate_rule`; and a = 0.5, which failed, below it."""
    tried = {
        f"{setting} {name}": entry
        for setting, overrides in SECOND_SETTINGS.items()
        for name, entry in _second(overrides, rate_rule(overrides["training.steps"])).items()
    }
    half = "64k lean2 0 0.999 a=0.5"
    for multiple in (0.5, 0.25):
        factor = multiple * tried[half].arm["lr_factor"]
        slower = {**tried[half].arm, "lr_factor": factor}
        tried[f"{half} x{multiple:g}"] = dataclasses.replace(tried[half], arm=slower)
    return tried


FINAL_ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "lean2 0 0.99": ({**LEAN2, "beta2": 0.99}, FAST),
    "adamw 0 0.999": (WITHOUT_MOMENTUM, FAST),
    "ember free": (WITHOUT_MOMENTUM, "table_rules:EMBER_FREE"),
}
"""The optimizers of the finals without their factors, and the variants of the model."""


class Earlier(NamedTuple):
    """What is known of an optimizer in a setting before the finals.

    factor: what the validation loss chose in earlier runs; LEAN's for Ember where it has none.
    runs: the question and the name of these runs; None if there are none that have losses of
        documents (or, for LEAN, only those of its first edition), so that ``finals`` has them.
    """

    factor: float
    runs: tuple[str, str] | None = None


class FinalSetting(NamedTuple):
    """What differs from ``english.yaml``, and what is known of each of :data:`FINAL_ARMS`."""

    overrides: dict[str, Any]
    earlier: dict[str, Earlier]


def _final_setting(
    overrides: dict[str, Any], lean: float, adamw: Earlier, ember: Earlier
) -> FinalSetting:
    return FinalSetting(overrides, dict(zip(FINAL_ARMS, (Earlier(lean), adamw, ember))))


def _earlier(n: int, question: str, name: str) -> Earlier:
    return Earlier(2 ** (n / 2), (question, f"{name} n={n}"))


FINAL_SETTINGS: dict[str, FinalSetting] = {
    **{
        name: _final_setting(
            overrides,
            2 ** (n / 2),
            # AdamW's n is LEAN's in all settings but one, and Ember's in all.
            _earlier(8 if name == "16k" else n, "settings", f"{name} adamw 0 0.999"),
            _earlier(n, "ember_and_free", f"{name} ember free"),
        )
        for name, (overrides, _, n) in SETTINGS.items()
    },
    **{
        name: _final_setting(RATE_SETTINGS[name], factor, Earlier(factor), Earlier(factor))
        for name, factor in (("1k", 12.5), ("512", 6.25), ("constant", 16.0))
    },
    "2400 steps": _final_setting(
        _steps(2400),
        2**2,
        _earlier(5, "betas", "adamw 0 0.999"),
        _earlier(7, "zero_sum", "ember free"),
    ),
    "9768 steps": _final_setting(
        _steps(9768),
        2**0.5,
        _earlier(2, "betas_longer", "adamw 0 0.999"),
        _earlier(2, "one_pass_longer", "ember free"),
    ),
}


def _final(setting: FinalSetting, arm: str, multiple: float = 1.0, **changed: Any) -> Entry:
    """An arm at a multiple of its earlier factor."""
    options, variant = FINAL_ARMS[arm]
    factor = multiple * setting.earlier[arm].factor
    return Entry({**options, **changed, "lr_factor": factor}, setting.overrides, variant)


def _finals() -> dict[str, Entry]:
    """The second edition, without zero-sum updates, and with decay; AdamW with decay; Ember."""
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "lean2 0 0.99 free": ("lean2 0 0.99", {"zero_sum": False}),
        "lean2 0 0.99 decay=0.02": ("lean2 0 0.99", DECAY),
        "adamw 0 0.999 decay=0.02": ("adamw 0 0.999", DECAY),
    }
    entries: dict[str, Entry] = {}
    for name, setting in FINAL_SETTINGS.items():
        for arm, earlier in setting.earlier.items():
            if earlier.runs is None:
                entries[f"{name} {arm}"] = _final(setting, arm)
        for changed, (arm, options) in changes.items():
            entries[f"{name} {changed}"] = _final(setting, arm, **options)
    return entries


RATES_BESIDE = {"x0.5": 0.5, "x0.71": 2**-0.5, "x1.4": 2**0.5, "x2": 2.0, "x2.8": 2**1.5}
"""What the factors of the finals are multiplied with, as far as it is needed to find the best."""


def _final_rates() -> dict[str, Entry]:
    """Each optimizer of the finals at the rates beside its earlier one."""
    return {
        f"{name} {arm} {times}": _final(setting, arm, multiple)
        for name, setting in FINAL_SETTINGS.items()
        for arm in FINAL_ARMS
        for times, multiple in RATES_BESIDE.items()
    }


ADAMW_FACTORS = {
    "1.2M": 16.0,
    "untied": 8.0,
    "rotary": 8.0,
    "H=32": 8.0,
    "16k": 16.0,
    "64k": 16.0,
    "H=128": 16.0,
    "V=16384": 2**3.5,
    "1k": 12.5,
    "512": 6.25 * 2**0.5,
    "constant": 16.0,
    "2400 steps": 2**2.5,
    "9768 steps": 2.0,
}
"""What the validation loss of AdamW at 0, 0.999 has chosen in the settings of the finals."""

LEAN_FACTORS = {
    "constant": 16 / 2**0.5,
    "1.2M": 16.0,
    "H=32": 2**3.5,
    "untied": 8.0,
    "rotary": 8.0,
    "512": 6.25,
    "1k": 12.5,
    "16k": 16.0,
    "64k": 16.0,
    "2400 steps": 2**2.5,
    "H=128": 2**4.5,
    "V=16384": 2**4.5,
    "9768 steps": 2**1.5,
}
"""The same of LEAN's second edition, shortest first."""


def _rivals() -> dict[str, Entry]:
    """AdamW at 0, 0.999 and LEAN with decayed embeddings, at their best factors and beside them."""
    arms = {
        "adamw 0 0.999": (WITHOUT_MOMENTUM, ADAMW_FACTORS),
        "lean2 0 0.99": ({**LEAN2, "beta2": 0.99}, LEAN_FACTORS),
    }
    return {
        f"{setting} {arm} decay=0.02 {times}": Entry(
            {**options, **DECAY, "lr_factor": factor * multiple},
            FINAL_SETTINGS[setting].overrides,
            FAST,
        )
        for arm, (options, factors) in arms.items()
        for setting, factor in factors.items()
        for times, multiple in {"x1": 1.0, "x0.71": 2**-0.5, "x1.4": 2**0.5}.items()
    }


def _small_batches() -> dict[str, Entry]:
    """LEAN with an exponent of 0.5 in small batches, at the rates of the finals."""
    return {
        f"{name} lean2 0 0.99 a=0.5 {times}": _final(
            FINAL_SETTINGS[name], "lean2 0 0.99", multiple, row_exponent=0.5
        )
        for name in ("1k", "512")
        for times, multiple in {"x1": 1.0, **RATES_BESIDE}.items()
    }


FORMULA_SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    name: (FINAL_SETTINGS[name].overrides, factor) for name, factor in LEAN_FACTORS.items()
} | {
    f"{name} low": (FINAL_SETTINGS[name].overrides, factor)
    for name, factor in {"512": 3.125, "1.2M": 4.0, "2400 steps": 2.0}.items()
}
"""The settings of the finals, shortest first, and three of them at low rates."""

FORMULAS = tuple(
    f"{formula}{zero_sum}"
    for formula in ("limit", "relative")
    for zero_sum in ("", " later", " free")
)


def _formula() -> dict[str, Entry]:
    """LEAN's second edition with another limit, and the candidate that measures rows by columns.

    Updates sum to zero from the first step, from step 1 / (1 - beta2) on (later), or never (free).
    """
    return {
        f"{setting} {formula} {times}": Entry(
            {**WITHOUT_MOMENTUM, "beta2": 0.99, "lr_factor": factor * multiple},
            overrides,
            f"table_rules:LEAN_{formula.replace(' ', '_').upper()}",
        )
        for setting, (overrides, factor) in FORMULA_SETTINGS.items()
        for formula in FORMULAS
        for times, multiple in {"x1": 1.0, "x0.71": 2**-0.5, "x1.4": 2**0.5}.items()
    }


def _cores() -> dict[str, Entry]:
    """Optimizers of the embeddings beside an 8-bit core, at their best factors beside AdamW."""
    adamw = {**ADAMW, "beta1": 0.9, "beta2": 0.95}
    arms = {
        "adamw 0.9 0.95": (adamw, "cores:EIGHT_BIT_CORE"),
        "adamw 0 0.999": (WITHOUT_MOMENTUM, "cores:EIGHT_BIT_CORE"),
        "lean2 0 0.99": ({**LEAN2, "beta2": 0.99}, "cores:EIGHT_BIT_CORE"),
        "all 0.9 0.95": (adamw, "cores:EIGHT_BIT_ALL"),
        "all 0 0.999": (WITHOUT_MOMENTUM, "cores:EIGHT_BIT_ALL"),
    }
    return {
        f"8-bit {name} {times}": Entry(
            {**options, "lr_factor": multiple * 2**2.5}, _steps(2400), variant
        )
        for name, (options, variant) in arms.items()
        for times, multiple in {"x1": 1.0, "x0.71": 2**-0.5, "x1.4": 2**0.5}.items()
    }


def _fewest_steps() -> dict[str, Entry]:
    """LEAN's second edition at the cap of its rule for the rate, and above."""
    options, variant = FINAL_ARMS["lean2 0 0.99"]
    return {
        f"{setting} lean2 0 0.99 x{multiple}": Entry(
            {**options, "lr_factor": 16.0 * multiple}, RATE_SETTINGS[setting], variant
        )
        for setting in ("150 steps", "300 steps")
        for multiple in (1, 2, 4)
    }


def _first_page() -> dict[str, Entry]:
    """The README's lines, at the core's betas of torch and at those of most published recipes.

    "line 15000" is the line with an earlier rule for the rate, which is the same in 600 steps.
    """
    lines = {
        "adamw": (ADAMW, "first_page:BEFORE"),
        "line": ({"optimizer": "lean"}, "first_page:AFTER"),
        "line 15000": ({"optimizer": "lean"}, "first_page:AFTER_15000"),
    }
    return {
        f"{steps} steps {line} 0.9 {beta2:g}": Entry(
            options, {**_few_steps(steps), "training.betas": [0.9, beta2]}, variant
        )
        for steps in (600, 2400, 9768)
        for beta2 in (0.999, 0.95)
        for line, (options, variant) in lines.items()
        if not (steps == 600 and line == "line 15000")
    }


def _geometric() -> dict[str, Entry]:
    """The geometric mean alone, beside LEAN as it was, with the same beta2."""
    tried = _second(SECOND_SETTINGS["1.2M"], 16.0)
    return {name: tried[name] for name in ("first 0 0.99", "lean2 0 0.99", "lean2 0 0.999")}


def _widths() -> dict[str, Entry]:
    """LEAN in models that differ in nothing but their width, at rates around the best."""
    return {
        f"H={width} {name}": entry
        for width in (32, 64, 128)
        for name, entry in _betas(
            _at_rates((("lean", (0.0, 0.99)),), (4, 5, 6, 7, 8)),
            **_size(n_embd=width, n_layer=2, n_head=width // 32, lr=5e-3),
            **_steps(1200),
        ).items()
    }


QUESTIONS: dict[str, dict[str, Entry]] = {
    "learning_rate": {
        f"lr={lr:g} {arm}": Entry(options, {"training.lr": lr})
        for lr in (2.5e-3, 5e-3, 1e-2, 2e-2)
        for arm, options in ARMS.items()
    },
    "scale": _scale(),
    "scaled": {
        **_scaled((*range(-5, 0), *range(1, 6), 7, 9), (-4, -2, 2, 4, 5, 7, 9, 11)),
        "coupled lr_factor=2^2.5": Entry({**COUPLED, "lr_factor": 2**2.5}),
    },
    "scaled_longer": _scaled((3, 5, 7), (5, 7, 9), **_steps(2400)),
    "sgd": {
        f"f={factor}": Entry({"optimizer": "sgd", "lr_factor": factor})
        for factor in (1, 3, 10, 30, 60, 100, 300, 600)
    },
    "tying": {
        "untied adamw": Entry(ADAMW, {"model.tied": False}),
        **{
            f"untied coupled {which}": Entry({**COUPLED, "couple": which}, {"model.tied": False})
            for which in ("both", "input", "output")
        },
    },
    "schedules": {
        f"{schedule} {arm}": Entry(options, {"training.schedule": schedule})
        for schedule in ("constant", "wsd")
        for arm, options in ARMS.items()
    },
    "masked_lm": {
        arm: Entry(options, _steps(1200), "masked_lm:MASKED_LM") for arm, options in ARMS.items()
    },
    "experts": {
        **{arm: Entry(options, {}, "experts:EXPERTS", balance) for arm, options in ARMS.items()},
        "coupled and router": Entry(COUPLED, {}, "experts:EXPERTS_AND_ROUTER", balance),
    },
    "muon": {
        f"lr={lr:g} {arm}": Entry(options, {"training.lr": lr}, "muon:MUON_1")
        for lr in (2.5e-3, 5e-3, 1e-2, 2e-2)
        for arm, options in ARMS.items()
    },
    "muon_tables": _tables_beside_muon((0.5, 1, 2, 4, 8, 16)),
    "muon_rates": _beside_muon(ARMS, (0.25, 4, 16), itertools.product((1, 4), (0.25, 1))),
    "alternatives": _alternatives(),
    "between": {
        **_between({0.5: (6, 7, 8, 9)}),
        **_faster({"adamw": (8, 9, 10), "coupled": (5, 6, 7)}),
        **_between({0.25: (6, 7, 8), 0.75: (7, 8, 9), 1.0: (8, 9, 10)}),
        **_full({0.5: (7, 8, 9), 1.0: (8, 9, 10)}),
    },
    "between_longer": {
        # AdamW's n = 5 and Coupled Adam's n = 3 and 5 are in scaled_longer.
        **_between({0.5: (2, 3, 4, 5, 6), 0.75: (4, 5)}, **_steps(2400)),
        **_faster({"adamw": (3, 4)}, **_steps(2400)),
    },
    "between_rates": _core_rates(),
    "between_models": _other_models(),
    "paper_ratio": {
        **_between({0.5: (0, 2, 4)}, **_steps(9768)),
        **_faster({"adamw": (-2, 0, 2, 4), "coupled": (-2, 0, 2, 4)}, **_steps(9768)),
    },
    "paper_ratio_rates": _longer_core_rates(),
    "paper_ratio_longer": {
        # 48M tokens, each with its best n after 20M.
        **_between({0.5: (2,)}, **_steps(23436)),
        **_faster({"adamw": (0,), "coupled": (0,)}, **_steps(23436)),
    },
    "10M": {
        **_between({0.5: (0, 4, 7, 9)}, **TEN_MILLION),
        **_faster({"adamw": (0, 4, 7, 9), "coupled": (0, 4, 7, 9)}, **TEN_MILLION),
    },
    "betas": _betas(
        (
            *(("adamw", betas, 5) for betas in BETAS),
            ("adamw", (0.9, 0.95), 4),
            *(("adamw", (0.0, 0.999), n) for n in (4, 6)),
            *(("a=0.75", (0.0, beta2), 4) for beta2 in (0.95, 0.99, 0.999)),
            *(("a=0.75", (0.0, 0.99), n) for n in (3, 5)),
            ("a=0.5", (0.0, 0.99), 4),
            *(("coupled", (0.9, beta2), 4) for beta2 in (0.95, 0.999)),
        ),
        **_steps(2400),
    ),
    "peers": _peers(**_steps(2400)),
    # 4.9M tokens in larger batches, and the largest with as many steps as 16k-token batches take
    "batch_16k": _betas(
        _at_rates(
            itertools.product(("adamw", "a=0.75"), ((0.0, 0.99), (0.0, 0.999), (0.9, 0.999))),
            (5, 7, 9),
        ),
        **_batch(256, 300),
    ),
    "batch_64k": _betas(_at_rates(WITH_AND_WITHOUT_MOMENTUM, (9,)), **_batch(1024, 75)),
    "batch_64k_steps": _betas(_at_rates(WITH_AND_WITHOUT_MOMENTUM, (7, 9)), **_batch(1024, 300)),
    "betas_longer": _betas(FINALISTS, **_steps(9768)),
    "betas_48M": _betas((("adamw", (0.0, 0.999), 2), ("a=0.75", (0.0, 0.99), 2)), **_steps(23436)),
    "betas_H=32": _betas(_elsewhere((2,), (2,)), **NARROW, **_steps(9768)),
    "betas_H=128": _betas(_elsewhere((2,), (2,)), **WIDE, **_steps(9768)),
    "betas_V=16384": _betas(_elsewhere((2,), (2,)), **{"model.vocab_size": 16384}, **_steps(9768)),
    "betas_eps": {
        f"eps={eps:g} {name}": entry
        for eps in (1e-10, 1e-6)
        for name, entry in _betas(
            (("adamw", (0.0, 0.999), 5), ("a=0.75", (0.0, 0.99), 4)),
            **{"training.eps": eps},
            **_steps(2400),
        ).items()
    },
    "betas_untied": _betas(_elsewhere((2, 4, 6), (2, 4)), **{"model.tied": False}, **_steps(2400)),
    "betas_rotary": _betas(
        _elsewhere((2, 4, 6), (2, 4)),
        **ROTARY,
        **_steps(2400),
    ),
    "one_pass": _rules(
        {**dict.fromkeys(LEANS, (3, 4, 5)), "plain delayed": (3, 4, 5, 6)}, **_steps(2400)
    ),
    # With exact sums of the plain gradient these settings have results as betas_longer, batch_16k
    # and batch_64k.
    "one_pass_longer": _rules(
        {
            **dict.fromkeys(DELAYED, (0, 1, 2)),
            "ember free": (1, 2, 3),
            "adafactor free": (2, 3, 4),
        },
        **_steps(9768),
    ),
    "one_pass_16k": _rules(
        {
            **dict.fromkeys(DELAYED, (5, 7, 9)),
            **dict.fromkeys(("ember free", "adafactor free"), (7, 8, 9)),
        },
        **_batch(256, 300),
    ),
    "one_pass_64k": _rules(
        {
            **dict.fromkeys(DELAYED, (5, 6, 7, 8, 9)),
            **dict.fromkeys(("ember free", "adafactor free"), (7, 8, 9)),
        },
        **_batch(1024, 75),
    ),
    # AdamW with zero-sum updates, "centered", is among the peers.
    "zero_sum": _rules(
        {
            "plain delayed free": (3, 4, 5),
            "weighted delayed free": (3, 4, 5),
            "ember free": (4, 5, 6, 7),
            "ember zero sum": (4, 5, 6, 7),
        },
        **_steps(2400),
    ),
    "zero_sum_untied": {
        **_rules(
            {
                "adam zero sum": (3, 4, 5),
                "plain delayed": (3, 4, 5),
                "plain delayed free": (3, 4, 5),
                "weighted delayed": (3, 4, 5),
                "weighted delayed free": (3, 4, 5),
                "ember free": (3, 4, 5),
                "ember zero sum": (3, 4, 5),
            },
            **{"model.tied": False},
            **_steps(2400),
        )
    },
    "table_rules": _rules(
        {
            "adafactor free": (5, 7, 9),
            **dict.fromkeys(("balanced free", "balanced 0 free"), (3, 5, 7)),
        },
        **_steps(2400),
    ),
    "settings": _settings(),
    "row_moments": _row_moments(),
    "ember_and_free": _ember_and_free(),
    "parts_longer": _parts_longer(),
    "rate_rule": _rate_rule(RATE_SETTINGS),
    # Another text: run with more Wikipedia articles instead of TEXT.
    "rate_rule_wiki": _rate_rule({"wiki": _few_steps(600)}),
    "first_page": _first_page(),
    "geometric": _geometric(),
    "screening": _screening(),
    "finals": _finals(),
    "final_rates": _final_rates(),
    "rivals": _rivals(),
    "cores": _cores(),
    "small_batches": _small_batches(),
    "fewest_steps": _fewest_steps(),
    "formula": _formula(),
    "width": _widths(),
    "warmup": _warmup(),
    "switching": {
        name: Entry(ADAMW, variant=_variant("switching", name))
        for name in ("switched", "recentered_and_switched", "recentered")
    },
}
"""The runs by question. Both arms of the base run are in ``learning_rate``, at 0.005."""

SECOND_EDITION = (
    "fewest_steps",
    "final_rates",
    "finals",
    "first_page",
    "geometric",
    "muon_tables",
    "screening",
    "small_batches",
)
"""Questions in which "lean2" is LEAN since its second edition; in all others LEAN is the first."""

ON_A_GPU = ("10M",)
"""Questions that are run only when they are named."""

UNFINISHED = (
    "10M",
    "cores",
    "ember_and_free",
    "fewest_steps",
    "final_rates",
    "finals",
    "first_page",
    "formula",
    "geometric",
    "muon_tables",
    *(
        name
        for name in QUESTIONS
        if name.startswith(("batch_", "betas", "one_pass", "peers", "table_", "zero_"))
    ),
    "paper_ratio",
    "paper_ratio_longer",
    "paper_ratio_rates",
    "parts_longer",
    "rate_rule",
    "rate_rule_wiki",
    "rivals",
    "row_moments",
    "screening",
    "settings",
    "small_batches",
    "width",
)
"""Questions that have no result yet, or not with all names and seeds."""
