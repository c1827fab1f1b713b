"""The mean of the output embeddings is a gauge: docs/study/gauge.md.

Softmax does not see a common shift of the output embeddings. So the mean may move, stay or be
removed at each step without any effect on the loss, the gradients or the embeddings' differences.
"""

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

import token_models
from coupled_adam import CoupledAdamW

V, H, STEPS = 40, 8, 60


def zipf_tokens(seed, shape):
    """Token ids of which some are a hundred times as frequent as others, as in a text."""
    weights = 1 / torch.arange(1, V + 1, dtype=torch.float64)
    drawn = weights.multinomial(
        shape[0] * shape[1], replacement=True, generator=torch.Generator().manual_seed(seed)
    )
    return drawn.view(shape)


def centered(matrix):
    return matrix - matrix.mean(0)


def train_untied(rule, weight_decay=0.0, steps=STEPS):
    """A model with an input table and an output matrix E of its own, trained with AdamW.

    Args:
        rule: what is different for E: ``"adamw"`` (nothing), ``"zero_sum"`` (the mean over the rows
            is subtracted from the updates), ``"centered"`` (it is subtracted from E after each
            step), ``"coupled"`` (the second moment is the mean over the rows).

    Returns:
        The loss of each step, and the parameters, of which the last is E.
    """
    generator = torch.Generator().manual_seed(0)
    table, hidden, output = parameters = [
        nn.Parameter(0.3 * torch.randn(size, generator=generator, dtype=torch.float64))
        for size in ((V, H), (H, H), (V, H))
    ]
    lr, losses = 0.05, []
    groups = [{"params": [table, hidden]}, {"params": [output], "coupled": rule == "coupled"}]
    kind = CoupledAdamW if rule == "coupled" else torch.optim.AdamW
    optimizer = kind(groups, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    for t in range(1, steps + 1):
        x, y = zipf_tokens(t, (2, 64))
        loss = nn.functional.cross_entropy(torch.tanh(table[x] @ hidden) @ output.T, y)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        decayed = (1 - lr * weight_decay) * output.detach()
        optimizer.step()
        with torch.no_grad():
            if rule == "zero_sum":
                output.copy_(decayed + centered(output - decayed))
            if rule == "centered":
                output.copy_(centered(output))
    return torch.tensor(losses, dtype=torch.float64), [p.detach() for p in parameters]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_in_an_untied_model_the_mean_is_a_gauge(weight_decay):
    """AdamW, with zero-sum updates, and centered at each step: one function, three means."""
    losses, parameters = train_untied("adamw", weight_decay)
    initial = train_untied("adamw", steps=0)[1][-1].mean(0)
    assert parameters[-1].mean(0).norm() > 2 * initial.norm()  # the mean drifts
    assert losses[-1] < losses[0] - 0.3
    for rule in ("zero_sum", "centered"):
        same, others = train_untied(rule, weight_decay)
        torch.testing.assert_close(same, losses, rtol=1e-12, atol=0)
        for ours, theirs in zip(others[:-1], parameters[:-1]):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            centered(others[-1]), centered(parameters[-1]), rtol=0, atol=1e-12
        )
        mean = others[-1].mean(0)
        kept = 0 if rule == "centered" else (1 - 0.05 * weight_decay) ** STEPS
        torch.testing.assert_close(mean, kept * initial, rtol=1e-9, atol=1e-12)
    coupled, _ = train_untied("coupled", weight_decay)  # other step sizes do make a difference
    assert (coupled - losses).abs().max() > 1e-2


def gpt2():
    return token_models.gpt2(0, vocab_size=V, n_embd=H).double()


def rotary():
    torch.manual_seed(0)
    return token_models.stablelm(vocab_size=V, hidden_size=H, tie_word_embeddings=True).double()


def loss_of(model, seed=1, cap=None):
    ids = zipf_tokens(seed, (8, 12))
    logits = model(input_ids=ids[:, :-1]).logits
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def shift(model):
    """Add the same vector to all token embeddings, and subtract it from learned positions."""
    with torch.no_grad():
        vector = torch.linspace(-1, 1, H, dtype=torch.float64)
        model.get_input_embeddings().weight += vector
        if isinstance(model, GPT2LMHeadModel):
            model.transformer.wpe.weight -= vector


def loss_and_gradients(model):
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def test_learned_positions_take_the_shift_of_a_tied_matrix():
    """Neither the loss of a tied GPT-2 nor any gradient changes, so no optimizer's state does."""
    model = gpt2()
    loss, gradients = loss_and_gradients(model)
    shift(model)
    shifted_loss, shifted_gradients = loss_and_gradients(model)
    torch.testing.assert_close(shifted_loss, loss, rtol=1e-12, atol=0)
    for ours, theirs in zip(shifted_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_where_the_mean_is_no_gauge():
    """Nothing takes up the shift in a tied rotary model; a cap on the logits sees it, too."""
    model = rotary()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with torch.no_grad():
        before = loss_of(model)
        shift(model)
        assert (loss_of(model) - before).abs() > 1e-4
        capped = gpt2()
        before = loss_of(capped, cap=1.0)
        shift(capped)
        assert (loss_of(capped, cap=1.0) - before).abs() > 1e-4


def train_gpt2(move_mean, decays):
    """Torch's AdamW on a tied GPT-2; with ``move_mean`` the mean moves to the positions each step.

    Args:
        decays: the weight decay of the token embeddings and of the positions.

    Returns:
        The loss of each step, and the token embeddings without their mean.
    """
    model = gpt2()
    table, positions = model.transformer.wte.weight, model.transformer.wpe.weight
    others = [p for p in model.parameters() if p is not table and p is not positions]
    groups = [
        {"params": [table], "weight_decay": decays[0]},
        {"params": [positions], "weight_decay": decays[1]},
        {"params": others, "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
    losses = []
    for step in range(STEPS // 2):
        optimizer.zero_grad()
        loss = loss_of(model, seed=step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if move_mean:
            with torch.no_grad():
                mean = table.mean(0)
                table -= mean
                positions += mean
    return torch.tensor(losses, dtype=torch.float64), centered(table.detach())


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_training_a_tied_gpt2_with_its_mean_in_the_positions(decay):
    """It is AdamW's run if tokens and positions decay alike, and not if only positions decay."""
    losses, table = train_gpt2(False, (decay, decay))
    same, centered_table = train_gpt2(True, (decay, decay))
    torch.testing.assert_close(same, losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(centered_table, table, rtol=0, atol=1e-12)
    losses, _ = train_gpt2(False, (0.0, 0.1))
    other, _ = train_gpt2(True, (0.0, 0.1))
    assert (other - losses).abs().max() > 1e-6
