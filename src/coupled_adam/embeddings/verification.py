"""Whether a language model can write tokens: it is asked to repeat them.

After the verification of Land & Bartolo (EMNLP 2024, arXiv 2405.05417), section 3.3: a token that
was hardly trained has a low probability even where the text leaves no doubt that it comes next. A
model that cannot repeat at all would fail with any token, so well-trained ones are the control.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from coupled_adam.embeddings.geometry import Array
from coupled_adam.errors import UsageError
from coupled_adam.text.tokenizers import document_start

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOW, HIGH = 0.01, 0.1
"""A token whose probability is below LOW is under-trained, as the authors have it; one above HIGH
is not."""

ABLE = 0.9
"""The share of the well-trained tokens that must reach LOW, or the model verifies nothing."""

_PROMPTS = (("", "{}"), ("", ' "{}",'), ("Copies:\n", "Input: «{}»\nOutput: «{}»\n"))
"""How each prompt begins, and what it repeats; {} stands for the token."""
_LONGEST = 160  # tokens of a prompt: ten or more repetitions in each
_FEWEST = 3  # times that the token must be seen before it is asked for
_BATCH = 4096  # tokens


@dataclasses.dataclass(frozen=True)
class Verification:
    """What a model made of the prompts."""

    rows: NDArray[np.int64]  # [n], the tokens in doubt
    probabilities: Array  # [n], of repeating each; the highest over the prompts
    controls: NDArray[np.int64]  # [m], the well-trained tokens
    control_probabilities: Array  # [m], of repeating these

    @property
    def is_able(self) -> bool:
        """Whether the model repeats well-trained tokens, so that others can be told from them."""
        return len(self.controls) > 0 and bool((self.control_probabilities >= LOW).mean() >= ABLE)

    def verdicts(self) -> list[str]:
        """Of each token in doubt: "under-trained", "trained" or "unclear"; or "not verified"."""
        if not self.is_able:
            return ["not verified"] * len(self.rows)
        names = np.array(["under-trained", "unclear", "trained"])
        verdicts: list[str] = names[np.digitize(self.probabilities, [LOW, HIGH])].tolist()
        return verdicts

    @property
    def sentence(self) -> str:
        """What this shows."""
        controls, verdicts = len(self.controls), self.verdicts()
        low = int((self.control_probabilities < LOW).sum())
        if not self.is_able:
            return (
                "The candidates cannot be verified with this model: it repeats only "
                f"{controls - low} of {controls} well-trained tokens."
            )
        return (
            f"Asked to repeat the {len(self.rows)} candidates, the model gives "
            f"{verdicts.count('under-trained')} of them a probability below {LOW:.0%}, which are "
            f"under-trained, and {verdicts.count('trained')} one above {HIGH:.0%}, which are not; "
            f"of {controls} well-trained tokens, {low} are below {LOW:.0%}."
        )


def verify(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: NDArray[np.int64],
    controls: NDArray[np.int64],
    *,
    length: int = _LONGEST,
) -> Verification:
    """Ask a causal language model to repeat tokens [n], and well-trained ones (controls) [m].

    The tokens are put into the prompts by their ids, so that none is split. Raises UsageError if
    the model takes too few tokens (``length`` is how many), or a logit is not finite.
    """
    tokens = np.concatenate([rows, controls])  # [n + m]
    begin = document_start(tokenizer, model.config.to_dict())
    prompts = list(_prompts(tokenizer, begin, min(length, _LONGEST)))
    if not prompts:
        raise UsageError(
            f"--verify: {model.name_or_path} takes only {length} tokens, and a prompt needs more"
        )
    highest = np.zeros(len(tokens))
    for prompt in prompts:
        size = max(1, _BATCH // len(prompt))
        for start in range(0, len(tokens), size):
            batch = slice(start, start + size)
            highest[batch] = np.maximum(highest[batch], _repeated(model, prompt, tokens[batch]))
    return Verification(rows, highest[: len(rows)], controls, highest[len(rows) :])


def _prompts(
    tokenizer: PreTrainedTokenizerBase, start: Sequence[int], length: int
) -> Iterator[list[int | None]]:
    """Prompts of up to ``length`` ids, with None where the token goes, which also comes next."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    for opening, unit in _PROMPTS:
        begin: list[int | None] = [*start, *encode(opening)]
        before, *pieces = unit.split("{}")
        repeated: list[int | None] = [*encode(before)]
        for piece in pieces:
            repeated += [None, *encode(piece)]
        # The last repetition is cut where its last token would follow.
        last = len(repeated) - repeated[::-1].index(None) - 1
        times = (length - len(begin) - last) // len(repeated)
        if times * repeated.count(None) >= _FEWEST:
            yield [*begin, *repeated * times, *repeated[:last]]


@torch.inference_mode()
def _repeated(
    model: PreTrainedModel, prompt: Sequence[int | None], tokens: NDArray[np.int64]
) -> Array:
    """The probability of each token [n] after the prompt that is filled with it."""
    places = torch.tensor([piece is None for piece in prompt])
    ids = torch.tensor([piece or 0 for piece in prompt]).repeat(len(tokens), 1)  # [n, length]
    asked = torch.from_numpy(tokens)[:, None]  # [n, 1]
    ids = torch.where(places, asked, ids).to(model.device)
    # All positions' logits of a large vocabulary would take gigabytes.
    only_last = "logits_to_keep" in inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if only_last else {}
    logits = model(input_ids=ids, use_cache=False, **last).logits[:, -1].double().cpu()
    if not logits.isfinite().all():
        raise UsageError(f"{model.name_or_path}: a logit is not finite")
    probabilities: Array = logits.softmax(1).gather(1, asked)[:, 0].numpy()
    return probabilities
