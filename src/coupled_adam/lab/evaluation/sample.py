"""Text that a language model writes."""

from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coupled_adam.fields import require
from coupled_adam.lab.evaluation.load_model import block_length
from coupled_adam.text.tokenizers import document_start


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
    """Continue a text by ``tokens`` tokens, or up to the end of the document.

    The prompt, which is not returned, follows the token that begins a document, as in training. The
    model sees as many of the last tokens as it allows, but at most 1024. The logits are divided by
    the temperature; 0 takes the most probable token every time. Raises UsageError if the prompt is
    empty and the tokenizer has neither a BOS nor an EOS token, or a logit is not finite.
    """
    prompt_ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    ids = [*document_start(tokenizer, model.config.to_dict()), *prompt_ids]
    require(ids, "--prompt is empty, and the tokenizer has no token that begins a text")
    embeddings: Any = model.get_input_embeddings()
    rows = len(embeddings.weight)  # V
    require(
        max(ids) < rows,
        f"{model.name_or_path}: its tokenizer does not fit its model: it has the token {max(ids)}",
    )
    # Rows that pad the vocabulary belong to no token.
    length, vocab_size = block_length(model), max(tokenizer.get_vocab().values()) + 1
    generator = torch.Generator().manual_seed(seed)
    written: list[int] = []
    for _ in tqdm(range(tokens), "tokens", disable=None, leave=False, delay=1):
        # [1, tokens]; without a cache, which a window that moves on could not use.
        window = torch.tensor([(ids + written)[-length:]], device=model.device)
        logits = model(input_ids=window, use_cache=False).logits[0, -1, :vocab_size].double().cpu()
        require(logits.isfinite().all(), f"{model.name_or_path}: a logit is not finite")
        token = int(logits.argmax())
        if temperature > 0:
            # In float64 and on the CPU, as all devices are to draw the same tokens.
            probabilities = (logits / temperature).softmax(0)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token == tokenizer.eos_token_id:
            break
        written.append(token)
    # Some tokenizers drop a space in front of the first token that they decode.
    return str(tokenizer.decode([*prompt_ids, *written])[len(tokenizer.decode(prompt_ids)) :])
