"""The runs of each question by name; ``python -m study.run`` says which have no result yet.

"lean" and "lean2" are LEAN since its second edition. Of the first are left only those runs that the
table of the editions shows: "first", "plain delayed", and "512 lean" in ``rate_rule``.
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


BETAS = tuple(itertools.product((0.0, 0.5, 0.9), (0.95, 0.99, 0.999)))
FAST = "head:FAST"
FIRST_LEAN = "table_rules:PLAIN_DELAYED"


def _variant(module: str, *words: float | str) -> str:
    """The variant of a name and numbers: that of 1 and 0.25 is ``NAME_1_025``."""
    return f"{module}:{'_'.join(map(str, words)).replace('.', '').upper()}"


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


def _scaled(coupled: Iterable[int], adamw: Iterable[int], **overrides: Any) -> dict[str, Entry]:
    """Scale nu by 2^-n, or AdamW's embedding learning rate by the corresponding 2^(n/2)."""
    scaled = {n: {**COUPLED, "second_moment_scale": 2.0**-n} for n in coupled}
    faster = {n: {**ADAMW, "lr_factor": 2 ** (n / 2)} for n in adamw}
    return {
        f"{arm} n={n}": Entry(options, overrides)
        for arm, factors in (("coupled", scaled), ("adamw", faster))
        for n, options in factors.items()
    }


def _faster(factors: Mapping[str, Iterable[int]], **overrides: Any) -> dict[str, Entry]:
    """Both arms with learning rates of the embeddings that are 2^(n/2) times the core's."""
    return {
        f"{arm} n={n}": Entry({**ARMS[arm], "lr_factor": 2 ** (n / 2)}, overrides)
        for arm, ns in factors.items()
        for n in ns
    }


def _entry(
    n: int,
    betas: tuple[float, float],
    overrides: Mapping[str, Any],
    variant: str,
    arm: Mapping[str, Any] = ADAMW,
) -> Entry:
    """An arm whose embeddings have betas of their own, and 2^(n/2) times the core's rate."""
    own = {"beta1": betas[0], "beta2": betas[1], "lr_factor": 2 ** (n / 2)}
    return Entry({**arm, **own}, overrides, variant)


def _betas(
    settings: Iterable[tuple[str, tuple[float, float], int]], **overrides: Any
) -> dict[str, Entry]:
    """By arm, the embeddings' betas, and n: they learn 2^(n/2) times as fast as the rest."""
    return {
        f"{arm} {betas[0]:g} {betas[1]:g} n={n}": _entry(n, betas, overrides, FAST, ARMS[arm])
        for arm, betas, n in settings
    }


def _adamw(
    betas: Iterable[tuple[float, float]], factors: Iterable[int], **overrides: Any
) -> dict[str, Entry]:
    """AdamW with each of some betas at each of some factors."""
    return _betas([("adamw", *tried) for tried in itertools.product(betas, factors)], **overrides)


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
    "plain delayed": (0.0, 0.99),
    "ember free": (0.0, 0.999),
    "adafactor free": (0.0, 0.999),
    "balanced free": (0.95, 0.999),
    "balanced 0 free": (0.0, 0.999),
}
"""The rules of :mod:`study.table_rules`, with the betas of each in its paper."""


def _rules(factors: Mapping[str, Iterable[int]], **overrides: Any) -> dict[str, Entry]:
    """Embeddings updated by a rule at 2^(n/2) times the core's rate, by the rule's name."""
    return {
        f"{rule} n={n}": _entry(n, RULES[rule], overrides, _variant("table_rules", *rule.split()))
        for rule, ns in factors.items()
        for n in ns
    }


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
        f"{rule} {beta1:g} {beta2:g} n={n}": _entry(
            n, (beta1, beta2), overrides, _variant("peers", rule)
        )
        for rule, tried in settings.items()
        for beta1, beta2, n in tried
    }
    without_mean = _betas([("adamw", (0.0, 0.999), 5)], **overrides)
    return peers | {
        f"centered {name}": dataclasses.replace(entry, variant="peers:CENTERED")
        for name, entry in without_mean.items()
    }


def _in_settings(
    settings: Mapping[str, Mapping[str, Any]], factors: Mapping[str, Iterable[int]]
) -> dict[str, Entry]:
    """AdamW and Coupled Adam in other settings, whose names stand in front."""
    return {
        f"{setting} {name}": entry
        for setting, overrides in settings.items()
        for name, entry in _faster(factors, **overrides).items()
    }


def _core_rates() -> dict[str, Entry]:
    """Half and twice the core's rate, with the best embedding rates relative to it, and absolute.

    At a rate of 5e-3 the best n with the first seed is 9 (AdamW) and 5 (Coupled Adam).
    """
    entries: dict[str, Entry] = {}
    for lr, shift in ((2.5e-3, 2), (1e-2, -2)):
        factors = {"adamw": (9, 9 + shift), "coupled": (5, 5 + shift)}
        entries |= _in_settings({f"lr={lr:g}": {"training.lr": lr}}, factors)
    return entries


def _other_models() -> dict[str, Entry]:
    """The same in a model that is not tied, has rotary positions, or is larger."""
    models = {"untied": {"model.tied": False}, "rotary": ROTARY}
    usual = {"adamw": (7, 9), "coupled": (5, 7)}
    # In the larger model the highest n are the best.
    return _in_settings(models, usual) | _in_settings(
        {"1.1M": WIDE}, {"adamw": (7, 9, 11), "coupled": (5, 7, 9)}
    )


def _beside_muon(tied: Iterable[float], untied: Iterable[tuple[float, float]]) -> dict[str, Entry]:
    """Rates of their own for the embeddings, and for the head of an untied model, beside Muon.

    Args:
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
        for arm, options in ARMS.items()
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


SETTINGS: dict[str, tuple[dict[str, Any], tuple[int, int], int]] = {
    "1.2M": (_steps(600), (6, 8), 8),
    "untied": ({"model.tied": False, **_steps(1200)}, (4, 6), 6),
    "rotary": ({**ROTARY, **_steps(1200)}, (6, 8), 6),
    "H=32": ({**NARROW, **_steps(1200)}, (5, 7), 5),
    "16k": (_batch(256, 300), (7, 8), 7),
    "64k": (_batch(1024, 75), (8, 9), 8),
    "H=128": ({**WIDE, **_steps(1200)}, (5, 7), 7),
    "V=16384": ({"model.vocab_size": 16384, **_steps(1200)}, (5, 7), 7),
}
"""Eight settings: what differs from ``english.yaml``, two n that are tried, and the one of them
that the validation loss of LEAN's first edition chose."""


def rate_rule(steps: int) -> float:
    """The first rule for the factor on the core's rate, as it was tested."""
    return min(16.0, max(1.0, 15_000 / steps))


def _few_steps(steps: int, **overrides: Any) -> dict[str, Any]:
    """A warmup of a sixth of the steps, at most 100, and little time for evaluations."""
    return {
        "training.steps": steps,
        **overrides,
        "training.evaluate_every": steps,
        "training.test_batches": 1,
        "training.warmup": min(100, steps // 6),
    }


RATE_SETTINGS: dict[str, dict[str, Any]] = {
    "150 steps": _few_steps(150),
    "300 steps": _few_steps(300),
    "1200 steps": _few_steps(1200),
    "1k": _few_steps(2400, **_batch(16, 2400)),
    "512": _few_steps(4800, **_batch(8, 4800)),
    "constant": _few_steps(600, **{"training.schedule": "constant"}),
}
"""Settings of the test of :func:`rate_rule` that others have, too."""


def _rate_rule() -> dict[str, Entry]:
    """AdamW without momentum at multiples of the rule's factor; LEAN's first edition in one."""
    tried = [
        (setting, "adamw", {**ADAMW, "beta1": 0.0, "beta2": 0.999}, multiple)
        for setting in RATE_SETTINGS
        for multiple in (0.25, 0.5, 1, 2, 4)
    ]
    first_lean = {**COUPLED, "row_exponent": 0.75, "zero_sum": True, "beta1": 0.0, "beta2": 0.99}
    tried += [("512", "lean", first_lean, x) for x in (1, 2)]
    return {
        f"{setting} {arm} x{multiple:g}": Entry(
            {**options, "lr_factor": multiple * rate_rule(overrides["training.steps"])},
            overrides,
            FAST,
        )
        for setting, arm, options, multiple in tried
        for overrides in (RATE_SETTINGS[setting],)
    }


SECOND_SETTINGS: dict[str, dict[str, Any]] = {
    "1.2M": _few_steps(600),
    "1k": _few_steps(2400, **_batch(16, 2400)),
    "2400 steps": _few_steps(2400),
    "64k": _few_steps(75, **_batch(1024, 75)),
}
"""In which LEAN's constants are chosen: the base, small batches, more steps, and few large ones."""


LEAN2 = {**COUPLED, "beta1": 0.0, "row_exponent": 0.75, "zero_sum": True}
"""The second edition without its beta2. It compares rows with the geometric mean of the columns'
second moments; the names of its runs begin with "lean2"."""

WITHOUT_MOMENTUM = {**ADAMW, "beta1": 0.0, "beta2": 0.999}
DECAY = {"embedding_weight_decay": 0.02}


def _second(overrides: Mapping[str, Any], factor: float) -> dict[str, Entry]:
    """What is tried for LEAN's second edition in a setting, at one rate."""
    by_tokens = 0.999 ** (overrides.get("training.batch_size", 32) / 32)
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
    runs: the question and the name of these runs; None if ``finals`` has them.
    """

    factor: float
    runs: tuple[str, str] | None = None


class FinalSetting(NamedTuple):
    """What differs from ``english.yaml``, and what is known of each of :data:`FINAL_ARMS`."""

    overrides: dict[str, Any]
    earlier: dict[str, Earlier]


def _final_setting(overrides: dict[str, Any], lean: float, *others: Earlier) -> FinalSetting:
    return FinalSetting(overrides, dict(zip(FINAL_ARMS, (Earlier(lean), *others))))


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
    changes = (
        ("lean2 0 0.99", " free", {"zero_sum": False}),
        ("lean2 0 0.99", " decay=0.02", DECAY),
        ("adamw 0 0.999", " decay=0.02", DECAY),
    )
    entries: dict[str, Entry] = {}
    for name, setting in FINAL_SETTINGS.items():
        for arm, earlier in setting.earlier.items():
            if earlier.runs is None:
                entries[f"{name} {arm}"] = _final(setting, arm)
        for arm, changed, options in changes:
            entries[f"{name} {arm}{changed}"] = _final(setting, arm, **options)
    return entries


RATES_BESIDE = {"x0.5": 0.5, "x0.71": 2**-0.5, "x1.4": 2**0.5, "x2": 2.0, "x2.8": 2**1.5}
"""What the factors of the finals are multiplied with, as far as it is needed to find the best."""


CHOSEN = {
    "constant": (16.0, 16 / 2**0.5),
    "1.2M": (16.0, 16.0),
    "H=32": (8.0, 2**3.5),
    "untied": (8.0, 8.0),
    "rotary": (8.0, 8.0),
    "512": (6.25 * 2**0.5, 6.25),
    "1k": (12.5, 12.5),
    "16k": (16.0, 16.0),
    "64k": (16.0, 16.0),
    "2400 steps": (2**2.5, 2**2.5),
    "H=128": (16.0, 2**4.5),
    "V=16384": (2**3.5, 2**4.5),
    "9768 steps": (2.0, 2**1.5),
}
"""The factors of AdamW at 0, 0.999 and of LEAN's second edition that the validation losses of the
finals have chosen in each setting, the shortest first."""

BESIDE = {"x1": 1.0, "x0.71": 2**-0.5, "x1.4": 2**0.5}


def _rivals() -> dict[str, Entry]:
    """AdamW at 0, 0.999 and LEAN with decayed embeddings, at their best factors and beside them."""
    return {
        f"{setting} {arm} decay=0.02 {times}": Entry(
            {**FINAL_ARMS[arm][0], **DECAY, "lr_factor": factor * multiple},
            FINAL_SETTINGS[setting].overrides,
            FAST,
        )
        for setting, factors in CHOSEN.items()
        for arm, factor in zip(("adamw 0 0.999", "lean2 0 0.99"), factors)
        for times, multiple in BESIDE.items()
    }


FORMULA_SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    name: (FINAL_SETTINGS[name].overrides, factor) for name, (_, factor) in CHOSEN.items()
} | {
    f"{name} low": (FINAL_SETTINGS[name].overrides, factor)
    for name, factor in {"512": 3.125, "1.2M": 4.0, "2400 steps": 2.0}.items()
}
"""The settings of the finals, shortest first, and three of them at low rates."""


def _formula() -> dict[str, Entry]:
    """LEAN's second edition with another limit.

    Updates sum to zero from the first step, from step 1 / (1 - beta2) on (later), or never (free).
    """
    return {
        f"{setting} limit{zero_sum} {times}": Entry(
            {**WITHOUT_MOMENTUM, "beta2": 0.99, "lr_factor": factor * multiple},
            overrides,
            "table_rules:LEAN_LIMIT" + zero_sum.replace(" ", "_").upper(),
        )
        for setting, (overrides, factor) in FORMULA_SETTINGS.items()
        for zero_sum in ("", " later", " free")
        for times, multiple in BESIDE.items()
    }


HELD_OUT_SETTINGS: dict[str, dict[str, Any]] = {
    "2400 steps of 512": _few_steps(2400, **_batch(8, 2400)),
    "3600 steps of 1k, H=32": {**NARROW, **_few_steps(3600, **_batch(16, 3600))},
}
"""Settings that no rule for the rate was read from."""


def _held_out_rates() -> dict[str, Entry]:
    """LEAN's third edition at C / steps times the core's rate."""
    return {
        f"{setting} C={constant}": Entry(
            {**LEAN2, "beta2": 0.99, "lr_factor": constant / overrides["training.steps"]},
            overrides,
            FAST,
        )
        for setting, overrides in HELD_OUT_SETTINGS.items()
        for constant in (15_000, 21_213, 30_000, 42_426, 60_000)
    }


def _cores() -> dict[str, Entry]:
    """Optimizers of the embeddings beside an 8-bit core, at their best factors beside AdamW.

    The one of them beside a float32 core is in no other question with these seeds.
    """
    adamw = {**ADAMW, "beta1": 0.9, "beta2": 0.95}
    arms = {
        "adamw 0.9 0.95": (adamw, "cores:EIGHT_BIT_CORE"),
        "adamw 0 0.999": (WITHOUT_MOMENTUM, "cores:EIGHT_BIT_CORE"),
        "lean2 0 0.99": ({**LEAN2, "beta2": 0.99}, "cores:EIGHT_BIT_CORE"),
        "all 0.9 0.95": (adamw, "cores:EIGHT_BIT_ALL"),
        "all 0 0.999": (WITHOUT_MOMENTUM, "cores:EIGHT_BIT_ALL"),
    }
    longer = {
        f"8-bit {name} {times}": Entry(
            {**options, "lr_factor": multiple * 2**2.5}, _steps(2400), variant
        )
        for name, (options, variant) in arms.items()
        for times, multiple in BESIDE.items()
    }
    shorter = {
        f"600 steps 8-bit {name}": Entry(
            {**options, "lr_factor": 2**4.5 if "0.9" in name.split() else 16.0},
            _steps(600),
            variant,
        )
        for name, (options, variant) in arms.items()
    }
    usual = Entry({**adamw, "lr_factor": 2**4.5}, _steps(600), FAST)
    return longer | shorter | {"600 steps adamw 0.9 0.95": usual}


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

    "line second" is the line with LEAN's second edition.
    """
    lines = {
        "adamw": (ADAMW, "first_page:BEFORE"),
        "line": ({"optimizer": "lean"}, "first_page:AFTER"),
        "line second": ({"optimizer": "lean"}, "first_page:AFTER"),
    }
    return {
        f"{steps} steps {line} 0.9 {beta2:g}": Entry(
            options, {**_few_steps(steps), "training.betas": [0.9, beta2]}, variant
        )
        for steps in (600, 2400, 9768)
        for beta2 in (0.999, 0.95)
        for line, (options, variant) in lines.items()
    }


def _disturbed() -> dict[str, Entry]:
    """Gradients that jump, without clipping and with it, and none that does, without."""
    arms = {
        "adamw 0 0.999": {**WITHOUT_MOMENTUM, "lr_factor": 16.0},
        "coupled n=5": {**COUPLED, "lr_factor": 2**2.5},
        "lean": {**LEAN2, "beta2": 0.99, "lr_factor": 16.0},
    }
    jumps = {"none": FAST, "all": "disturbed:ALL", "row": "disturbed:ROW"}
    norms = {"": 1e9, "clipped ": 1.0}
    return {
        f"{jump} {clipped}{arm}": Entry(
            options, {**SECOND_SETTINGS["1.2M"], "training.max_grad_norm": norm}, variant
        )
        for clipped, norm in norms.items()
        for jump, variant in jumps.items()
        for arm, options in arms.items()
    }


def _geometric() -> dict[str, Entry]:
    """The geometric mean alone, beside LEAN as it was, with the same beta2."""
    overrides, options = SECOND_SETTINGS["1.2M"], {**WITHOUT_MOMENTUM, "beta2": 0.99}
    tried = _second(overrides, 16.0)
    return {
        "first 0 0.99": Entry({**options, "lr_factor": 16.0}, overrides, FIRST_LEAN),
        **{name: tried[name] for name in ("lean2 0 0.99", "lean2 0 0.999")},
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
    "muon_rates": _beside_muon((0.25, 4, 16), itertools.product((1, 4), (0.25, 1))),
    "alternatives": _alternatives(),
    "between": _faster({"adamw": (8, 9, 10), "coupled": (5, 6, 7)}),
    # AdamW's n = 5 and Coupled Adam's n = 3 and 5 are in scaled_longer.
    "between_longer": _faster({"adamw": (3, 4)}, **_steps(2400)),
    "between_rates": _core_rates(),
    "between_models": _other_models(),
    "paper_ratio": _faster({"adamw": (-2, 0, 2, 4), "coupled": (-2, 0, 2, 4)}, **_steps(9768)),
    # 48M tokens, each with its best n after 20M
    "paper_ratio_longer": _faster({"adamw": (0,), "coupled": (0,)}, **_steps(23436)),
    "betas": _betas(
        (
            *(("adamw", betas, 5) for betas in BETAS),
            ("adamw", (0.9, 0.95), 4),
            *(("adamw", (0.0, 0.999), n) for n in (4, 6)),
            *(("coupled", (0.9, beta2), 4) for beta2 in (0.95, 0.999)),
        ),
        **_steps(2400),
    ),
    "peers": _peers(**_steps(2400)),
    # 4.9M tokens in larger batches, and the largest with as many steps as 16k-token batches take
    "batch_16k": _adamw(((0.0, 0.99), (0.0, 0.999), (0.9, 0.999)), (5, 7, 9), **_batch(256, 300)),
    "batch_64k": _adamw(((0.0, 0.999), (0.9, 0.999)), (9,), **_batch(1024, 75)),
    "batch_64k_steps": _adamw(((0.0, 0.999), (0.9, 0.999)), (7, 9), **_batch(1024, 300)),
    "betas_longer": {
        **_adamw(((0.0, 0.99), (0.9, 0.999)), (0, 1, 2), **_steps(9768)),
        **_adamw(((0.0, 0.999),), (1, 2), **_steps(9768)),
        **_betas([(arm, (0.9, 0.95), 0) for arm in ARMS], **_steps(9768)),
    },
    **{
        f"betas_{name}": _adamw(((0.9, 0.95), (0.0, 0.999)), (2,), **model, **_steps(9768))
        for name, model in (("H=32", NARROW), ("H=128", WIDE))
    },
    **{
        f"betas_{name}": _adamw(((0.0, 0.999),), (2, 4, 6), **model, **_steps(2400))
        | _adamw(((0.9, 0.95),), (2, 4), **model, **_steps(2400))
        for name, model in (("untied", {"model.tied": False}), ("rotary", ROTARY))
    },
    "one_pass_longer": _rules(
        {"plain delayed": (1,), "ember free": (1, 2, 3), "adafactor free": (2, 3, 4)},
        **_steps(9768),
    ),
    "zero_sum": _rules({"ember free": (4, 5, 6, 7)}, **_steps(2400)),
    "table_rules": _rules(
        {
            "adafactor free": (5, 7, 9),
            **dict.fromkeys(("balanced free", "balanced 0 free"), (3, 5, 7)),
        },
        **_steps(2400),
    ),
    "settings": {
        f"{setting} {name}": entry
        for setting, (overrides, tried, _) in SETTINGS.items()
        for name, entry in _adamw(((0.0, 0.999),), tried, **overrides).items()
    },
    # One moment for each row, without LEAN's for each column, at LEAN's n
    "row_moments": {
        f"{setting} row_moment 0 0.99 n={n}": _entry(n, (0.0, 0.99), overrides, "peers:ROW_MOMENT")
        for setting, (overrides, _, n) in SETTINGS.items()
    },
    "ember_and_free": {
        f"{setting} {name}": entry
        for setting, (overrides, tried, _) in SETTINGS.items()
        for name, entry in _rules({"ember free": tried}, **overrides).items()
    },
    "rate_rule": _rate_rule(),
    "first_page": _first_page(),
    "geometric": _geometric(),
    "disturbed": _disturbed(),
    "screening": _screening(),
    "finals": _finals(),
    "final_rates": {
        f"{name} {arm} {times}": _final(setting, arm, multiple)
        for name, setting in FINAL_SETTINGS.items()
        for arm in FINAL_ARMS
        for times, multiple in RATES_BESIDE.items()
    },
    "rivals": _rivals(),
    "cores": _cores(),
    "held_out_rates": _held_out_rates(),
    # LEAN with an exponent of 0.5 in small batches, at the rates of the finals
    "small_batches": {
        f"{name} lean2 0 0.99 a=0.5 {times}": _final(
            FINAL_SETTINGS[name], "lean2 0 0.99", multiple, row_exponent=0.5
        )
        for name in ("1k", "512")
        for times, multiple in {"x1": 1.0, **RATES_BESIDE}.items()
    },
    "fewest_steps": _fewest_steps(),
    "formula": _formula(),
    # None, ten steps, and the base's hundred, with one rate for all parameters
    "warmup": _in_settings(
        {f"warmup={steps}": {"training.warmup": steps} for steps in (0, 10, 100)},
        {"adamw": (0,), "coupled": (0,)},
    ),
    "switching": {
        name: Entry(ADAMW, variant=_variant("switching", name))
        for name in ("switched", "recentered_and_switched", "recentered")
    },
}
"""The runs by question. Both arms of the base run are in ``learning_rate``, at 0.005."""
