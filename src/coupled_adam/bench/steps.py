"""How long a step takes, and what memory: Coupled Adam against other optimizers.

Every optimizer is timed in turn with torch's fused AdamW, step by step in one process, so that both
see the same machine; what counts is the ratio within such pairs.
"""

import dataclasses
import importlib.util
import io
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from coupled_adam import CoupledAdamW
from coupled_adam.errors import UsageError
from coupled_adam.files import write_atomically

BASELINE = "AdamW fused"
_LEAST_SECONDS = 2e-3  # of a sample: of several steps, where one is shorter
_LEAST_SAMPLES, _MOST_SAMPLES = 5, 100

Maker = Callable[[nn.Parameter, list[nn.Parameter], float | None], Optimizer]
"""Makes an optimizer of an embedding matrix, other parameters, and a norm to clip to."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is stepped: an embedding matrix, and beside it other parameters.

    Attributes:
        rows, columns: V and H of the embedding matrix.
        dtype: of parameters and gradients.
        others: the number of matrices [64, 64] beside it, which are not coupled.
        clip: the gradients' norm is clipped, too, by the optimizer where it can: max_grad_norm.
    """

    rows: int
    columns: int
    dtype: str = "float32"
    others: int = 0
    clip: bool = False

    @property
    def label(self) -> str:
        """V x H, and what is not the default."""
        label = f"{self.rows:,} × {self.columns:,}"
        if self.dtype != "float32":
            label += f" {self.dtype}"
        if self.others:
            label += f" + {self.others}"
        return label + (", clip" if self.clip else "")

    @property
    def bytes(self) -> int:
        """Of the embedding matrix."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.rows * self.columns * itemsize


@dataclasses.dataclass(frozen=True)
class Timed:
    """One optimizer in one case.

    Attributes:
        samples: seconds of a step, of a step of the baseline, and of a copy of the matrix, each
            three taken one right after the other.
        state_bytes: of the optimizer's state.
        extra_bytes: the most that a step holds beside parameters, gradients and state.
        moved_bytes: what a step has to move between memory and processor, where that is known.
    """

    case: Case
    optimizer: str
    samples: list[tuple[float, float, float]]
    state_bytes: int
    extra_bytes: int
    moved_bytes: int | None

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(mine for mine, _, _ in self.samples)

    @property
    def ratio(self) -> tuple[float, float, float]:
        """To the baseline, within pairs: lower quartile, median, upper quartile."""
        low, middle, high = statistics.quantiles((a / b for a, b, _ in self.samples), n=4)
        return low, middle, high

    @property
    def bandwidth(self) -> float | None:
        """``moved_bytes`` per second, as a share of what a copy moves: it reads and writes."""
        if self.moved_bytes is None:
            return None
        share = self.moved_bytes / (2 * self.case.bytes)
        return statistics.median(share * copy / mine for mine, _, copy in self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        summary = {"seconds": self.seconds, "ratio": self.ratio, "bandwidth": self.bandwidth}
        return {**dataclasses.asdict(self), **summary}


SHAPES = {
    "cpu": ("256x64", "4096x64", "8192x512", "50304x768", "128256x2048"),
    "cuda": ("8192x512", "50304x768", "128256x4096", "256000x2304"),
}
"""By default: small vocabularies, GPT-2's, and those of current models."""


def parse_case(shape: str, dtype: str, clip: bool) -> Case:
    """A case from "VxH".

    Raises:
        UsageError: it is not two numbers above 0.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
    if not found:
        raise UsageError(f"--shapes {shape}: tokens, x, dimensions are needed: 50304x768")
    return Case(int(found[1]), int(found[2]), dtype, clip=clip)


def check_memory(cases: Iterable[Case], device: str) -> None:
    """Refuse what does not fit into the machine's memory.

    Raises:
        UsageError: a case needs more.
    """
    if device == "cuda":
        have = torch.cuda.get_device_properties().total_memory
    else:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for case in cases:
        # Parameter, gradient, a copy, two states of two optimizers, one's temporary.
        need = 8 * case.bytes
        if need > have:
            raise UsageError(
                f"{case.label} needs {need / 1e9:.1f} GB, {device} has {have / 1e9:.1f} GB: leave "
                "it out of --shapes"
            )


def bench(
    cases: Iterable[Case],
    optimizers: Sequence[str] = (),
    *,
    device: str = "cpu",
    seconds: float = 4.0,
) -> Iterator[Timed]:
    """Time optimizers, each in pairs with :data:`BASELINE`.

    Args:
        cases: what they step.
        optimizers: names of :func:`optimizers_here`; all, where none is named.
        device: of parameters, gradients and states.
        seconds: about as long each optimizer is timed for, though at least for five pairs.
    """
    makers = {**optimizers_here(), BASELINE: _BASELINE}
    for case, name in itertools.product(cases, optimizers or optimizers_here()):
        yield _time(case, name, makers, device, seconds)


def optimizers_here() -> dict[str, Maker]:
    """What there is to time: ours, torch's, and those of other packages that are installed."""
    found = {
        "CoupledAdamW": _coupled(),
        "CoupledAdamW fused": _coupled(fused=True),
        "AdamW": _uncoupled(torch.optim.AdamW, foreach=False),
        "AdamW foreach": _uncoupled(torch.optim.AdamW, foreach=True),
        "average of V × H": _uncoupled(AveragedAdamW),
    }
    if importlib.util.find_spec("optimi"):
        import optimi

        found["optimi AdamW"] = _uncoupled(optimi.AdamW)
    if importlib.util.find_spec("pytorch_optimizer"):
        import pytorch_optimizer

        found["pytorch_optimizer StableAdamW"] = _uncoupled(pytorch_optimizer.StableAdamW)
    if importlib.util.find_spec("torchao"):
        from torchao.optim import AdamW8bit

        found["torchao AdamW8bit"] = _uncoupled(AdamW8bit)
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes

        found["bitsandbytes AdamW"] = _uncoupled(bitsandbytes.optim.AdamW)
        found["bitsandbytes AdamW8bit"] = _uncoupled(bitsandbytes.optim.AdamW8bit)
    return found


def _coupled(**options: Any) -> Maker:
    def make(embedding: nn.Parameter, others: list[nn.Parameter], clip: float | None) -> Optimizer:
        groups: list[dict[str, Any]] = [{"params": [embedding], "coupled": True}]
        if others:
            groups.append({"params": others})
        return CoupledAdamW(groups, lr=1e-4, max_grad_norm=clip, **options)

    return make


def _uncoupled(cls: Any, **options: Any) -> Maker:
    return lambda embedding, others, _: cls([embedding, *others], lr=1e-4, **options)


_BASELINE = _uncoupled(torch.optim.AdamW, fused=True)


class AveragedAdamW(Optimizer):
    """Coupled Adam as its definition reads: all second moments are kept, and averaged each step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step, with the constants of torch's AdamW."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                m, v, step = state["m"], state["v"], state["step"]
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                nu = v.mean(0, keepdim=True)
                denominator = (nu / (1 - 0.999**step)).sqrt_().add_(1e-8)
                p.mul_(1 - group["lr"] * 1e-2)
                p.addcdiv_(m / (1 - 0.9**step), denominator, value=-group["lr"])


def _time(case: Case, name: str, makers: dict[str, Maker], device: str, seconds: float) -> Timed:
    embedding, others = _parameters(case, device)
    optimizer, step = _stepper(makers[name], embedding, others, case.clip)
    _, baseline = _stepper(makers[BASELINE], embedding, others, case.clip)
    target = torch.empty_like(embedding.detach())
    steps: list[Callable[[], Any]] = [step, baseline, lambda: target.copy_(embedding.detach())]
    for one in steps * 3:
        one()
    repeats = [max(1, round(_LEAST_SECONDS / _clock(one, 1, device))) for one in steps]
    samples: list[tuple[float, float, float]] = []
    end = time.perf_counter() + seconds
    while len(samples) < _LEAST_SAMPLES or (
        len(samples) < _MOST_SAMPLES and time.perf_counter() < end
    ):
        order = (0, 1, 2) if len(samples) % 2 else (1, 0, 2)
        times = {i: _clock(steps[i], repeats[i], device) for i in order}
        samples.append((times[0], times[1], times[2]))
    state = [x for s in optimizer.state.values() for x in s.values()]
    return Timed(
        case,
        name,
        samples,
        state_bytes=sum(_bytes(x) for x in state if isinstance(x, Tensor)),
        extra_bytes=_extra_bytes(step, device),
        moved_bytes=_moved_bytes(case, name),
    )


def _parameters(case: Case, device: str) -> tuple[nn.Parameter, list[nn.Parameter]]:
    generator = torch.Generator(device).manual_seed(0)
    options: Any = {"device": device, "dtype": getattr(torch, case.dtype)}
    made = []
    for shape in [(case.rows, case.columns), *[(64, 64)] * case.others]:
        p = nn.Parameter(torch.empty(shape, **options).normal_(std=0.02, generator=generator))
        p.grad = torch.empty(shape, **options).normal_(std=1e-4, generator=generator)
        made.append(p)
    return made[0], made[1:]


def _stepper(
    make: Maker, embedding: nn.Parameter, others: list[nn.Parameter], clip: bool
) -> tuple[Optimizer, Callable[[], Any]]:
    """An optimizer, and its step: with the clipping before it, where it does not clip itself."""
    optimizer = make(embedding, others, 1.0 if clip else None)
    if not clip or isinstance(optimizer, CoupledAdamW):
        return optimizer, optimizer.step

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_([embedding, *others], 1.0)
        optimizer.step()

    return optimizer, clip_and_step


def _clock(step: Callable[[], Any], repeats: int, device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    _synchronize(device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _extra_bytes(step: Callable[[], Any], device: str) -> int:
    """The most memory that is allocated at once during a step."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before: int = torch.cuda.memory_allocated()
        step()
        most: int = torch.cuda.max_memory_allocated()
        return most - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    peak: int = max(itertools.accumulate((e["args"]["Bytes"] for e in changes), initial=0))
    return peak


def _bytes(x: Tensor) -> int:
    """Of a tensor, or of those that a subclass keeps in its place: codes and scales."""
    if hasattr(x, "__tensor_flatten__"):
        return sum(_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.numel() * x.element_size()


def _moved_bytes(case: Case, name: str) -> int | None:
    """AdamW reads p, g, m, v and writes p, m, v; Coupled Adam has no v, and reads g twice."""
    matrices = {BASELINE: 7, "CoupledAdamW": 6, "CoupledAdamW fused": 6}.get(name)
    if matrices is None or case.others or case.clip:
        return None
    return matrices * case.bytes


def bench_table(results: Sequence[Timed]) -> Table:
    """For the terminal: a row for each optimizer in each case."""
    table = Table(
        title=f"a step, and its ratio to torch's {BASELINE} in pairs",
        caption="in brackets: quartiles; bandwidth: of the bytes that must move, to a copy's",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for header in ("V × H", "optimizer", "ms", "ratio", "", "bandwidth", "state MB", "extra MB"):
        text = header in ("V × H", "optimizer")
        table.add_column(header, justify="left" if text else "right", no_wrap=True)
    case = None
    for result in results:
        if case is not None and result.case != case:
            table.add_section()
        low, middle, high = result.ratio
        table.add_row(
            "" if result.case == case else result.case.label,
            result.optimizer,
            f"{result.seconds * 1e3:.3g}",
            f"{middle:.2f}",
            f"({low:.2f}–{high:.2f})",
            "–" if result.bandwidth is None else f"{result.bandwidth:.0%}",
            f"{result.state_bytes / 1e6:,.1f}",
            f"{result.extra_bytes / 1e6:,.2f}",
        )
        case = result.case
    return table


def bench_picture(results: Sequence[Timed]) -> Figure:
    """The ratios, as points with their quartiles, one group for each case."""
    cases = list(dict.fromkeys(result.case for result in results))
    names = list(dict.fromkeys(result.optimizer for result in results))
    figure = Figure(figsize=(9, 1 + 0.55 * len(cases) + 0.12 * len(names)), layout="constrained")
    ax = figure.subplots()
    for number, name in enumerate(names):
        mine = [result for result in results if result.optimizer == name]
        low, middle, high = zip(*(result.ratio for result in mine))
        heights = [cases.index(r.case) + (number + 0.5) / len(names) * 0.8 - 0.4 for r in mine]
        spread = [
            [m - q for m, q in zip(middle, low)],
            [q - m for m, q in zip(middle, high)],
        ]
        ax.errorbar(middle, heights, xerr=spread, fmt="o", markersize=4, color=f"C{number}")
        ax.plot([], [], "o", color=f"C{number}", label=name)
    ax.axvline(1, color="gray", linewidth=1)
    ax.set_yticks(range(len(cases)), [case.label for case in cases])
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel=f"time of a step, as a multiple of torch's {BASELINE}")
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 5, 10, 20) if _within(tick, results)]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.grid(axis="x", alpha=0.3)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _within(tick: float, results: Sequence[Timed]) -> bool:
    ratios = [quantile for result in results for quantile in result.ratio]
    return min(ratios) / 1.5 < tick < max(ratios) * 1.5


GROWTH: dict[str, list[Case]] = {
    "rows": [Case(2**n * 1024, 768) for n in range(10)],
    "columns": [Case(32768, 2**n * 64) for n in range(8)],
    "others": [Case(8192, 256, others=n) for n in (1, 4, 16, 64, 256, 1024)],
}
"""How the cost grows: with V from 1k to 512k, with H from 64 to 8192, with other parameters."""

GROWING = ("CoupledAdamW fused", "AdamW foreach")
"""What is timed there by default."""

_AXES = {
    "rows": "tokens V (H = 768)",
    "columns": "H (V = 32,768)",
    "others": "matrices [64, 64] beside [8192, 256]",
}


def growth_picture(results: Sequence[Timed]) -> Figure:
    """The time of a step, above, and its ratio to the baseline, below, of the cases of GROWTH."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes = figure.subplots(2, len(GROWTH), sharex="col", squeeze=False)
    for column, (key, cases) in enumerate(GROWTH.items()):
        above, below = axes[:, column]
        for number, name in enumerate(dict.fromkeys(result.optimizer for result in results)):
            mine = [r for r in results if r.optimizer == name and r.case in cases]
            x = [getattr(result.case, key) for result in mine]
            style = {"marker": "o", "markersize": 3, "color": f"C{number}", "label": name}
            above.plot(x, [result.seconds for result in mine], **style)
            low, middle, high = zip(*(result.ratio for result in mine))
            below.plot(x, middle, **style)
            below.fill_between(x, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
            if not number:
                baseline = [statistics.median(b for _, b, _ in r.samples) for r in mine]
                above.plot(x, baseline, color="gray", label=BASELINE)
        below.axhline(1, color="gray", linewidth=1)
        above.set(xscale="log", yscale="log")
        below.set(xscale="log", xlabel=_AXES[key], ylim=(0, None))
        above.yaxis.set_major_formatter(EngFormatter("s"))
        above.yaxis.set_minor_formatter(NullFormatter())
        below.xaxis.set_major_formatter(EngFormatter())
    axes[0, 0].set_ylabel("time of a step")
    axes[1, 0].set_ylabel(f"as a multiple of {BASELINE}")
    axes[0, 0].legend(frameon=False)
    return figure


def check_format(path: Path) -> None:
    """Refuse a name that does not tell the format of a picture.

    Raises:
        UsageError: its ending is none that matplotlib writes.
    """
    if path.suffix[1:] not in FigureCanvasBase.get_supported_filetypes():
        raise UsageError(f"--picture {path}: end its name with .png, .svg or .pdf")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of its name, whole or not at all."""
    image = io.BytesIO()
    figure.savefig(image, dpi=130, format=path.suffix[1:])
    write_atomically(path, image.getvalue())
