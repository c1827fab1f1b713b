"""Text that a language model writes."""

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coupled_adam.errors import UsageError
from coupled_adam.lab.evaluation.loading import block_length


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str = "",
    *,
    tokens: int = 100,
    temperature: float = 0.8,
    seed: int = 1,
) -> str:
    """Continue a text, token by token, up to the end of the document or a number of tokens.

    The prompt follows the token that begins a document, as in training. The model sees as many of
    the last tokens as it allows, but at most 1024. Models with the same tokenizer are given the
    same random numbers, so that their texts differ only where their probabilities do.

    Args:
        prompt: the beginning of the text, which is not returned; empty to begin a document.
        tokens: the largest number of tokens to write.
        temperature: the logits are divided by it; 0 takes the most probable token every time.

    Raises:
        UsageError: the tokenizer has neither a BOS nor an EOS token for an empty prompt, or a
            logit is not finite.
    """
    end = tokenizer.eos_token_id
    first = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    prompt_ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    ids = [*([] if first is None else [first]), *prompt_ids]
    if not ids:
        raise UsageError("--prompt is empty, and the tokenizer has no token that begins a text")
    # Rows that pad the vocabulary belong to no token.
    length, vocab_size = block_length(model), max(tokenizer.get_vocab().values()) + 1
    generator = torch.Generator().manual_seed(seed)
    written: list[int] = []
    for _ in tqdm(range(tokens), "tokens", disable=None, leave=False, delay=1):
        window = torch.tensor([(ids + written)[-length:]], device=model.device)
        logits = model(input_ids=window, use_cache=False).logits[0, -1, :vocab_size].double().cpu()
        if not logits.isfinite().all():
            raise UsageError(f"{model.name_or_path}: a logit is not finite")
        if temperature == 0:
            token = int(logits.argmax())
        else:
            # Where the same number falls in the cumulative sum: close models then choose the same.
            cumulative = (logits / temperature).softmax(0).cumsum(0)
            place = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
            token = int(torch.searchsorted(cumulative, place, right=True))
        if token == end:
            break
        written.append(token)
    # Some tokenizers drop a space in front of the first token that they decode.
    before = tokenizer.decode(prompt_ids)
    return str(tokenizer.decode([*prompt_ids, *written])[len(before) :])
