"""What sums to zero over the vocabulary: measured on models, and by the formulas."""

import json

import numpy as np
import pytest
import torch
from study.theory import main, measure_theory, picture
from study.toy_example import TOY_EMBEDDINGS, toy_updates
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from coupled_adam.errors import UsageError
from coupled_adam.lab.evaluation.load_model import load_model
from coupled_adam.lab.training.loss import sequence_losses


def batches(number, vocab_size=448):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (4, 17), generator=generator) for _ in range(number)]


def test_a_tied_model(gpt2):
    """In float64 zero is zero; what remains of Coupled Adam's sum is the lookup's."""
    model = load_model(gpt2, "cpu").double()
    theory = measure_theory(model, batches(20))
    assert (theory.tied, theory.batches) == (True, 20)
    head, lookup, both = (theory.sums[side] for side in ("output", "input", "both"))
    assert head.gradient < 1e-14
    for name in ("SGD", "Coupled Adam"):
        assert head.updates[name] < 1e-13
        assert both.input_share[name] == pytest.approx(1, abs=1e-12)
        assert both.updates[name] > 1e-3
    assert head.updates["AdamW"] > 0.01
    assert 0 < both.input_share["AdamW"] < 0.9
    assert lookup.gradient > 1e-3
    assert head.input_share is None


def test_by_the_formulas(gpt2, gpt2_options):
    """After one batch: g for SGD, g / (|g| + eps) for AdamW, g / (column RMS + eps) for Coupled."""
    model = load_model(gpt2, "cpu").double()
    (batch,) = batches(1)
    theory = measure_theory(model, [batch], betas=(0.8, 0.9), eps=1e-3)
    # The two sides, each with the other one held fixed.
    sides = []
    for side in ("output", "input"):
        untied = GPT2LMHeadModel(GPT2Config(**gpt2_options, tie_word_embeddings=False)).double()
        untied.load_state_dict(model.state_dict())
        untied.eval()
        sequence_losses(untied, batch).mean().backward()
        layer = untied.lm_head if side == "output" else untied.transformer.wte
        sides.append(layer.weight.grad)
    total = sides[0] + sides[1]
    weight = model.lm_head.weight.detach()
    for name, divisor in {
        "SGD": torch.ones_like(total),
        "AdamW": total.abs() + 1e-3,
        "Coupled Adam": (total**2).mean(0).sqrt() + 1e-3,
    }.items():
        update = -total / divisor
        torch.testing.assert_close(theory.updates[name], update)
        both, summed = theory.sums["both"], update.sum(0)
        expected = float(summed.norm() / update.norm(dim=1).sum())
        assert both.updates[name] == pytest.approx(expected, rel=1e-9)
        share = float((-sides[1] / divisor).sum(0) @ summed / (summed @ summed))
        assert both.input_share[name] == pytest.approx(share, rel=1e-9)
        mean = weight.mean(0)
        cosine = float(summed @ mean / summed.norm() / mean.norm())
        assert both.away[name] == pytest.approx(cosine, rel=1e-9)


def test_soft_capping_breaks_the_argument():
    """Capped logits: the gradient of each row has its own factor, and the sum is not zero."""
    torch.manual_seed(0)
    size = {"vocab_size": 60, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    sums = {}
    for cap in (None, 1.0):
        config = Gemma2Config(**size, **heads, final_logit_softcapping=cap, pad_token_id=0)
        model = Gemma2ForCausalLM(config).double().eval()
        model.model.embed_tokens.weight.data *= 50
        sums[cap] = measure_theory(model, batches(3, 60)).sums["output"].gradient
    assert sums[None] < 1e-14
    assert sums[1.0] > 1e-3


def test_an_untied_run_through_the_command(trained, gpt2, text_file, tmp_path, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.setenv("COUPLED_ADAM_CACHE", str(tmp_path / "cache"))
    image = tmp_path / "updates.png"
    main([str(folder), "--json", "--batches", "9", "--picture", str(image)])
    result = json.loads(capsys.readouterr().out)
    assert (result["tied"], result["batches"], list(result["sums"])) == (
        False,
        9,
        ["output", "input"],
    )
    assert result["sums"]["output"]["gradient"] < 1e-6  # in float32
    assert result["sums"]["output"]["updates"]["Coupled Adam"] < 1e-6
    assert result["sums"]["output"]["updates"]["AdamW"] > 0.01
    assert image.read_bytes().startswith(b"\x89PNG")

    main([str(gpt2), "--text", str(text_file), "--batches", "2"])
    assert "of both, tied" in capsys.readouterr().out
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    AutoTokenizer.from_pretrained(gpt2).save_pretrained(tmp_path / "empty")
    for arguments, message in {
        (gpt2,): "is a model: name a text for it with --text",
        (folder, "--text", text_file): "--text is for models",
        (gpt2, "--text", short): "the text is shorter than one batch",
        (tmp_path / "empty", "--text", short): "is neither a run",
    }.items():
        with pytest.raises(UsageError, match=message):
            main([*map(str, arguments)])


def test_clouds_of_updates(gpt2):
    """One for each optimizer, whose title is its sum."""
    theory = measure_theory(load_model(gpt2, "cpu"), batches(2))
    titles = [ax.get_title() for ax in picture(theory).axes]
    assert [title.partition(":")[0] for title in titles] == ["SGD", "AdamW", "Coupled Adam"]


def test_gradients_that_are_not_finite(gpt2):
    model = load_model(gpt2, "cpu")
    model.transformer.ln_f.weight.data[0] = torch.inf
    with pytest.raises(UsageError, match="a gradient is not finite"):
        measure_theory(model, batches(1))


def test_toy_example():
    """With the real optimizers: all but AdamW's updates sum to zero."""
    updates = toy_updates()
    for name, update in updates.items():
        assert update.shape == (len(TOY_EMBEDDINGS), 2)
        assert (np.abs(update.sum(0)).max() < 1e-6) == (name != "AdamW"), name
    # Gradient descent moves along h, as -(delta - p) h does.
    np.testing.assert_allclose(updates["SGD"][:, 1], updates["SGD"][:, 0] / 2)
