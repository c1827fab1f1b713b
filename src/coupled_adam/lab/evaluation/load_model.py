"""Load models and tokenizers from folders or the hub, for evaluation."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coupled_adam.errors import UsageError, one_line
from coupled_adam.fields import require
from coupled_adam.inputs import check_model_folder
from coupled_adam.lab.run import Run, read_run
from coupled_adam.lab.training.variant import Variant, load_variant
from coupled_adam.runs import MODEL, inner_runs
from coupled_adam.text.hub import hub_error, is_hub_id, reach_hub


def trusted_run(folder: Path, variant: str | None = None) -> Run:
    """Read a run; UsageError if there is none, or it needs other code than this variant's."""
    run = read_run(folder)
    needed = run.recipe.variant
    require(
        needed in (None, variant),
        f"{folder} was trained with the code of {needed}, which only coupled-adam evaluate "
        f"{folder} --variant {needed} executes: add this if you trust it",
    )
    require(
        variant in (None, needed),
        f"--variant {variant} is not for {folder}, which was trained without one",
    )
    return run


def check_model(source: Path | str) -> None:
    """Raise UsageError unless this is the folder of a model, or could be the id of one."""
    folder = Path(source)
    check_model_folder(folder)
    if (folder / "config.json").exists() or (not folder.exists() and is_hub_id(str(source))):
        return
    problem = "is neither a run (config.yaml) nor a model (config.json, model.safetensors)"
    for run in inner_runs(folder)[:1]:
        problem = f"is a comparison: name one of its runs, such as {run}"
    raise UsageError(f"{folder} {problem}")


def load_model(
    source: Path | str,
    device: str,
    revision: str | None = None,
    cls: type[Any] = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Load a causal language model in float32; only safetensors are read, never pickle files.

    Raises UsageError if there is no such model, or its weights are damaged or incomplete.
    ``cls`` is its class, where its configuration does not tell.
    """
    check_model(source)
    is_here = Path(source).exists()
    if not is_here:
        reach_hub()
    where: Any = {"revision": revision or "main", "local_files_only": is_here}
    try:
        model, report = cls.from_pretrained(
            source,
            **where,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # raised by several libraries
        reason = f"{type(error).__name__}: {one_line(error)}" if is_here else hub_error(error)
        raise UsageError(f"{source}: {reason}") from None
    # transformers only warns, and fills them in at random.
    missing = ", ".join(sorted(report["missing_keys"])[:3])
    require(not missing, f"{source}: weights are missing and would be random: {missing}")
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def load_trained(run: Run, device: str) -> tuple[PreTrainedModel, Variant]:
    """The model of a finished run, and the variant of its recipe, whose code is executed."""
    variant = load_variant(run.recipe.variant)
    if run.recipe.variant is None:
        return load_model(run.folder / MODEL, device), variant
    # transformers does not know a variant's own class: ask a model that is built without weights.
    with torch.device("meta"):
        cls = type(variant.build_model(run.recipe))
    return load_model(run.folder / MODEL, device, cls=cls), variant


def block_length(model: PreTrainedModel) -> int:
    """The length of a model's input blocks: as many tokens as it allows, but at most 1024."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # -1 stands for no limit, as of XLNet.
    return min(positions, 1024) if positions and positions > 0 else 1024
