"""Recipes: what they say, what they build, and what is refused before any work."""

import re

import pytest
import torch
import yaml
from torch import nn

from coupled_adam import LEAN, CoupledAdamW, embedding_parameters
from coupled_adam.cli import load_command, main
from coupled_adam.cli.parser import parsed
from coupled_adam.errors import UsageError
from coupled_adam.fields import meanings
from coupled_adam.lab.arms import ARMS
from coupled_adam.lab.models import build_model, count_parameters, parameters
from coupled_adam.lab.recipe import (
    load_recipe,
    load_values,
    override,
    read_yaml,
    recipe_from,
    recipe_names,
)
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.loss import sequence_losses
from coupled_adam.lab.training.schedules import lr_scheduler
from coupled_adam.lab.training.train import try_out

PAPER = {  # max lr, heads, layers, H, N as named, steps for each D
    "124M": (6.0e-4, 12, 12, 768, {"5B": 50_000, "10B": 100_000, "20B": 200_000}),
    "350M": (3.0e-4, 16, 24, 1024, {"5B": 50_000, "10B": 100_000, "20B": 200_000}),
    "760M": (2.5e-4, 16, 24, 1536, {"5B": 50_000, "10B": 100_000, "20B": 200_000}),
    "1.3B": (2.0e-4, 32, 24, 2048, {"26B": 49_591}),
    "2.6B": (1.6e-4, 32, 32, 2560, {"210B": 400_543}),
}


def number(text):
    """124M -> 124e6."""
    return float(text[:-1]) * {"M": 1e6, "B": 1e9}[text[-1]]


@pytest.mark.parametrize(
    ("size", "tokens"), [(size, tokens) for size in PAPER for tokens in PAPER[size][-1]]
)
def test_the_papers_recipes(size, tokens):
    lr, heads, layers, width, steps = PAPER[size]
    count = steps[tokens]
    recipe = load_recipe(f"{size}-{tokens}")
    training, model = recipe.training, recipe.model
    assert recipe.name == f"{size}-{tokens}"
    assert recipe.training.total_steps == count
    assert recipe.tokens == pytest.approx(number(tokens), rel=0.02)
    assert (training.lr, training.betas, training.eps) == (lr, (0.9, 0.95), 1e-8)
    assert (training.weight_decay, training.max_grad_norm) == (0.1, 1.0)
    assert (training.schedule, training.final_lr) == ("cosine", 0.1)
    assert training.precision == "bf16-mixed"
    assert (model.n_head, model.n_layer, model.n_embd) == (heads, layers, width)
    assert (model.vocab_size, model.tied) == (50304, True)
    large = size in ("1.3B", "2.6B")
    assert model.architecture == ("stablelm" if large else "gpt2")
    assert training.sequence_length == (2048 if large else 1024)
    assert training.batch_size == (256 if large else 96)
    if not large:  # the paper's numbers of tokens
        assert training.test_batches * recipe.training.tokens_per_step == 2000 * 12 * 1024
        evaluated = training.evaluation_batches * recipe.training.tokens_per_step
        assert evaluated == pytest.approx(100 * 12 * 1024, rel=0.05)
    assert recipe.warmup_steps == (round(0.01 * count) if large else 100)
    assert recipe.data.hub == ("cerebras/SlimPajama-627B" if large else "Skylion007/openwebtext")
    assert list(recipe.arms) == ["adamw", "coupled_adam"]


OURS = ("demo", "tiny", "10M", "30M")


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_builds_the_model_it_claims(name):
    """Of this size; in the paper's all but token embeddings, biases and norms decays."""
    recipe = load_recipe(name)
    with torch.device("meta"):
        model = build_model(recipe)
    claimed = re.match(r"[\d.]+[MB]", name)
    size = number(claimed[0]) if claimed else 0.37e6
    assert count_parameters(model) == pytest.approx(size, rel=0.07 if size < 50e6 else 0.03)
    assert model.config.max_position_embeddings == recipe.training.sequence_length
    exempt = ("wte.weight", "embed_tokens.weight", *["wpe.weight"] * name.startswith(OURS))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for arm in recipe.arms.values():
        groups = arm.build_optimizer(model, recipe.training).param_groups
        decays = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
        assert decays == {
            name: 0.0 if name.endswith(exempt) or p.dim() < 2 else 0.1
            for name, p in trained.items()
        }
    assert recipe_from(yaml.safe_load(yaml.safe_dump(recipe.to_dict())), "again") == recipe


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3", "mistral", "olmo2", "gemma2", "gpt_neox", "opt"]
)
def test_any_causal_architecture_of_transformers(architecture):
    """It has the recipe's sizes, no dropout, can be trained, and its embeddings are coupled."""
    values = {"model.architecture": architecture, "model.vocab_size": 300, "model.tied": False}
    recipe = override(load_recipe("tiny"), values)
    model = build_model(recipe)
    assert count_parameters(model) == parameters(recipe)
    head = model.get_output_embeddings().weight
    assert head.shape == (300, 64)
    assert head is not model.get_input_embeddings().weight
    assert model.config.num_hidden_layers == 2
    assert not any(m.p for m in model.modules() if isinstance(m, nn.Dropout))
    blocks = torch.randint(300, (2, 65), generator=torch.Generator().manual_seed(0))
    losses = [sequence_losses(model, blocks) for _ in range(2)]
    assert torch.equal(*losses)
    losses[0].mean().backward()
    for arm in recipe.arms:
        recipe.arms[arm].build_optimizer(model, recipe.training).step()
    assert set(embedding_parameters(model).values()) == {
        head,
        model.get_input_embeddings().weight,
    }


def test_config_of_an_architecture():
    """Its own values beat what we make of the recipe's sizes."""
    values = {"model.architecture": "llama", "model.config": {"num_key_value_heads": 1}}
    recipe = override(load_recipe("tiny"), values)
    attention = build_model(recipe).model.layers[0].self_attn
    assert attention.k_proj.weight.shape == (32, 64)
    assert attention.q_proj.weight.shape == (64, 64)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"architecture": "lama"}, "model.architecture='lama' .* did you mean llama?"),
        (
            {"architecture": "llama", "config": {"kv_heads": 1}},
            r"model.config.kv_heads is no value of llama: .* num_key_value_heads",
        ),
        (
            {"architecture": "llama", "config": {"num_hidden_layers": 10**9}},
            r"model.config.num_hidden_layers is what other keys give: leave it out",
        ),
        (
            {"architecture": "opt", "intermediate_size": 99},
            "model.intermediate_size=99: opt has another name .* give it in model.config",
        ),
        (
            {"architecture": "opt", "config": {"do_layer_norm_before": 3}},
            "model.architecture=opt: transformers cannot build it with these values",
        ),
    ],
)
def test_architectures_that_cannot_be_built(values, said):
    recipe = override(load_recipe("tiny"), {f"model.{key}": v for key, v in values.items()})
    with pytest.raises(UsageError, match=said):
        parameters(recipe)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_key_value_heads": 3}, "must match the size"),
        ({"rms_norm_eps": -1.0}, "the loss is nan"),
        ({"output_attentions": True}, "is not supported"),  # it trains, and cannot be saved
    ],
    ids=str,
)
def test_a_model_is_tried_out(values, said):
    """With a tiny batch, forwards and backwards; what transformers finds out only then is said."""
    llama = override(load_recipe("tiny"), {"model.architecture": "llama"})
    try_out(llama, Execution(), (2, 3))
    with pytest.raises(UsageError, match=f"llama cannot be trained with these values.*{said}"):
        try_out(override(llama, {"model.config": values}), Execution(), (2, 3))


def test_stablelm_is_layernorm_swiglu_and_whole_rotation():
    model = build_model(load_recipe("tiny-stablelm"))
    layer = model.model.layers[0]
    assert isinstance(layer.input_layernorm, nn.LayerNorm)
    x = torch.linspace(-3, 3, 7)
    assert torch.equal(layer.mlp.act_fn(x), nn.functional.silu(x))
    assert all(m.bias is None for m in layer.modules() if isinstance(m, nn.Linear))
    assert model.config.rope_parameters["partial_rotary_factor"] == 1.0
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_without_biases_is_without():
    """Frozen at zero: the same function, whatever is trained."""
    recipe = override(load_recipe("tiny"), {"model.bias": False})
    model = build_model(recipe)
    biases = {n: p for n, p in model.named_parameters() if n.endswith("bias")}
    assert len(biases) == 2 * 6 + 1
    ids = torch.arange(20).view(1, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer = recipe.arms["coupled_adam"].build_optimizer(model, recipe.training)
    before = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.transformer.h[0].mlp.c_fc.weight, before)
    assert all((p == 0).all() and p.grad is None for p in biases.values())


def test_scaled_and_sgd_arms():
    scaled = load_recipe("124M-20B-scaled")
    scales = [scaled.arms[f"coupled_adam_n{n}"].second_moment_scale for n in range(-5, 6)]
    assert scales == [2.0**-n for n in range(-5, 6)]
    assert scaled.arms["coupled_adam_n3"].label == "Coupled Adam, n = 3"
    assert scaled.arms["coupled_adam_n0"].label == "Coupled Adam"
    sgd = load_recipe("124M-20B-sgd")
    factors = [arm.lr_factor for arm in sgd.arms.values() if arm.optimizer == "sgd"]
    assert factors == [100, 200, 300, 400, 500, 600]
    assert sgd.arms["sgd_f300"].label == "SGD, f = 300"
    # The same rates in small
    small = load_recipe("tiny-sgd")
    rates = [arm.lr_factor * small.training.lr for arm in small.arms.values()]
    assert rates[2:] == pytest.approx([factor * sgd.training.lr for factor in factors])


def built(values, arm):
    """A recipe with some values, the model and optimizer of an arm, and each parameter's group."""
    recipe = override(load_recipe("tiny"), values)
    model = build_model(recipe)
    optimizer = recipe.arms[arm].build_optimizer(model, recipe.training)
    groups = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert groups.keys() == dict(model.named_parameters()).keys()
    return recipe, model, optimizer, groups


TABLE, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"


@pytest.mark.parametrize("kind", ["adamw", "coupled_adam"])
def test_embeddings_have_their_own_learning_rate_and_decay(kind):
    """As if all parameters had that rate, for the embeddings; as ever, for the others."""
    options = {"optimizer": kind, "lr_factor": 4, "embedding_weight_decay": 0.5, "lr": 0.25}
    options |= {"beta1": 0, "beta2": 0.999}
    recipe, model, optimizer, groups = built({"arms": {"x": options}}, "x")
    label = recipe.arms["x"].label
    assert label.endswith(", f = 4, decay 0.5, beta1 0, beta2 0.999, lr 0.25")
    settings = {
        name: (g["lr"], g["weight_decay"], g.get("betas", optimizer.defaults["betas"]))
        for name, g in groups.items()
    }
    lr, decay = 0.25, recipe.training.weight_decay
    assert settings[TABLE] == (4 * lr, 0.5, (0, 0.999))
    assert settings[POSITIONS] == (lr, 0.5, (0.9, 0.95))
    assert settings["transformer.ln_f.weight"] == (lr, 0, (0.9, 0.95))
    assert settings["transformer.h.0.mlp.c_fc.weight"] == (lr, decay, (0.9, 0.95))
    scheduler = lr_scheduler(optimizer, recipe)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(50):
        optimizer.step()
        scheduler.step()
    rates = [group["lr"] / group["initial_lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.5] * len(rates))  # half of the warmup


def test_lean_is_the_optimizers_lean():
    values = {"arms": {"x": {"optimizer": "lean", "lr_factor": 8}}}
    recipe, model, optimizer, groups = built(values, "x")
    assert recipe.arms["x"].label == "LEAN, f = 8"
    assert ARMS["lean"]().lr_factor == LEAN["lr_factor"]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    group = groups.pop(TABLE)
    assert group["lr"] == 8 * recipe.training.lr
    assert all(group[key] == value for key, value in LEAN.items() if key != "lr_factor")
    (table,) = group["params"]
    vocabulary, width = table.shape
    size = sum(value.numel() for value in optimizer.state[table].values())
    assert size == vocabulary + 2 * width + 1  # with the step
    assert {g["betas"] for g in groups.values()} == {(0.9, 0.95)}


@pytest.mark.parametrize("length", [{"steps": 5000}, {"steps": None, "tokens": 5000 * 2048}])
def test_the_length_of_a_run_chooses_leans_rate(length):
    """Whether it is given as steps or as tokens."""
    values = {"arms": {"lean": {"optimizer": "lean"}}}
    values |= {f"training.{name}": value for name, value in length.items()}
    recipe, _, _, groups = built(values, "lean")
    assert recipe.training.total_steps == 5000
    assert groups[TABLE]["lr"] == 6 * recipe.training.lr
    assert groups[TABLE]["lr_factor_from"] == "steps=5000"


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("decay_positions", [True, False])
def test_muon_has_the_hidden_matrices(coupled, decay_positions):
    values = {
        "arms.muon": {"optimizer": "muon", "lr_factor": 4, "coupled": coupled},
        "training.decay_positions": decay_positions,
    }
    recipe, model, optimizer, groups = built(values, "muon")
    hidden = {n for n, p in model.named_parameters() if ".h." in n and p.dim() == 2}
    assert set(optimizer.param_groups[0]["param_names"]) == hidden
    embeddings, positions = groups.pop(TABLE), groups.pop(POSITIONS)
    assert embeddings["lr"] == 4 * recipe.training.lr
    assert embeddings["coupled"] == coupled
    assert embeddings["weight_decay"] == 0
    assert positions["weight_decay"] == (recipe.training.weight_decay if decay_positions else 0)
    assert not any(group["coupled"] for group in groups.values())
    assert {group["lr"] for group in groups.values()} == {recipe.training.lr}
    beside = "Coupled Adam" if coupled else "AdamW"
    assert recipe.arms["muon"].label.startswith(f"Muon with {beside}")


@pytest.mark.parametrize("couple", ["input", "output"])
def test_couple_one_side_of_an_untied_model(couple):
    values = {"model.tied": False, "arms.coupled_adam.couple": couple}
    _, model, optimizer, groups = built(values, "coupled_adam")
    assert isinstance(optimizer, CoupledAdamW)
    (coupled,) = (name for name, group in groups.items() if group["coupled"])
    assert [coupled] == list(embedding_parameters(model, couple=couple))


def given(*words):
    """The values of key=value, as on the command line."""
    return {key: read_yaml(text, key) for key, text in (word.split("=", 1) for word in words)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("training.betas=[0.9, 1.0]", "training.betas.1=1.0: Input should be less than 1"),
        ("seeds=[1, 1]", "seeds=[1, 1] must be different"),
        ("name=../evil", "name=../evil: must be a name of at most 50 letters, digits, _"),
        ("training.steps=true", "training.steps=True: Input should be a number"),
        ("training.betas=[0.9, yes]", "training.betas.1=True: Input should be a number"),
        ("arms.adamw.lr_factor=on", "arms.adamw: lr_factor=True: Input should be a number"),
        ("data.shuffle_seed=-1", "data.shuffle_seed=-1: Input should be greater than or equal"),
        ("model.n_layer=1001", "model.n_layer=1001: Input should be less than or equal to 1000"),
        ("model.architecture=stablelm model.n_embd=66", "makes heads of odd width"),
        ("model.n_positions=32", "training.sequence_length=64 must not exceed model.n_position"),
        ("data.text=a data.hub=b", "data.text and data.hub exclude each other"),
        ("data.shuffle_seed=3", "data.shuffle_seed=3 is for data.hub, which is not given: leave"),
        ("data.text=a data.token_dtype=uint16", "data.token_dtype=uint16 is for data.tokens, wh"),
        ("arms.adamw-2={optimizer: adamw} arms.adamw.lr_factor=[1,2]", "would be called adamw-2"),
        ("arms.coupled_adam.row_expo=2", "arms.coupled_adam: row_expo is no key: did you mean r"),
        ("arms.coupled_adam.couple=input", "couple=input needs model.tied=false"),
        ("arms.x={optimizer: muon, coupled: false, zero_sum: true}", "need coupled=true"),
        ('training.schedule="\\e[2J"', "training.schedule= [2J: Input should be 'cosine'"),
        ("data.text=" + 1000 * "[", "is not YAML: maximum recursion depth"),
    ],
)
def test_errors(words, message):
    with pytest.raises(UsageError) as error:
        override(load_recipe("tiny"), given(*re.split(r" (?=[a-z]+\.)", words)))
    assert message in str(error.value)
    assert str(error.value).isprintable()  # no line ends, and nothing that a terminal obeys


def test_lists_of_values_make_arms():
    """One for each combination, numbered; and none of it depends on how a value is written."""
    values = given("arms.*.lr_factor=[1, 4]", "arms.coupled*.lr=[1.0e-3, 0.01]")
    recipe = override(load_recipe("tiny"), values)
    assert list(recipe.arms) == [f"adamw-{i}" for i in (1, 2)] + [
        f"coupled_adam-{i}" for i in (1, 2, 3, 4)
    ]
    last = recipe.arms["coupled_adam-4"]
    assert last == ARMS["coupled_adam"](lr_factor=4, lr=0.01)
    assert last.options == {"lr_factor": 4, "lr": 0.01}
    assert recipe.arms["coupled_adam-3"].label == "Coupled Adam, f = 4, lr 0.001"
    assert recipe_from(yaml.safe_load(yaml.safe_dump(recipe.to_dict())), "again") == recipe


@pytest.mark.parametrize(
    "words",
    [
        "--arms.*.lr=[1e-3,0.01]",
        "--arms.*.lr 1e-3,0.01",
        "--arms.*.lr 1e-3 0.01",
        "--training.lr 1e-3 0.01",
        "--training.lr=[1e-3,0.01]",
    ],
)
def test_several_values_are_typed_in_any_way(words):
    """Arms are chosen before there are several of each; others need not have the option."""
    line = ["--arms", "lean", "adamw", *words.split(), "--arms.*.beta1", "0"]
    recipe, demo = load_recipe("tiny-sgd"), load_values("tiny-sgd")
    assert "sgd" in {arm.optimizer for arm in recipe.arms.values()}
    demo["arms"]["lean"] = {"optimizer": "lean"}
    options = parsed(load_command("compare"), line)
    recipe = options.selected(options.recipe_of(demo, options.arms))
    assert list(recipe.arms) == ["lean-1", "lean-2", "adamw-1", "adamw-2"]
    assert [arm.lr for arm in recipe.arms.values()] == [1e-3, 0.01] * 2
    assert {arm.beta1 for arm in recipe.arms.values()} == {0}


def test_files_extend(tmp_path):
    """Sections are merged, arms replaced."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: tiny\nname: mine\nmodel: {n_layer: 3}\narms: {only: {optimizer: adamw}}\n"
    )
    recipe, tiny = load_recipe(str(path)), load_recipe("tiny")
    assert (recipe.model.n_layer, recipe.model.n_embd) == (3, tiny.model.n_embd)
    assert recipe.training == tiny.training
    assert list(recipe.arms) == ["only"]
    (tmp_path / "folder").mkdir()
    beside = tmp_path / "folder" / "beside.yaml"
    beside.write_text("extends: ../mine.yaml\nname: beside\n")
    assert load_recipe(str(beside)).model.n_layer == 3


TWICE = r"line \d: the key (name|lr|beta1) is given twice"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: x.yaml\nname: circle\n", "extends itself"),
        ("extends: tinny\n", r"tinny', which '.*x.yaml' extends: did you mean tiny\?"),
        ("- a list\n", "must consist of keys"),
        ("name: 5\nmodel: !!python/object:os.system {}\n", "is not YAML"),
        # YAML's own loader would take the last without a word.
        ("name: x\ntraining: {lr: 1}\nname: y", TWICE),
        ("name: x\ntraining: {lr: 1, lr: 2}", TWICE),
        ("arms: {adamw: {optimizer: adamw, beta1: 0.1, beta1: 0.9}}", TWICE),
        ("training: {<<: {lr: 0.01, lr: 0.5}}", TWICE),
        ("training: {<<: [{lr: 0.01, lr: 0.5}]}", TWICE),
    ],
)
def test_files_that_are_refused(text, message, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_recipe(str(tmp_path / "x.yaml"))


def test_code_is_not_inherited(tmp_path):
    """Of somebody else's recipe that one extends; it may be named again, or left out."""
    theirs, mine = tmp_path / "theirs.yaml", tmp_path / "mine.yaml"
    theirs.write_text("extends: tiny\nvariant: evil.module:RUN\n")
    mine.write_text("extends: theirs.yaml\n")
    with pytest.raises(
        UsageError, match=r"its variant, evil\.module:RUN, is code and not inherited"
    ):
        load_recipe(str(mine))
    mine.write_text("extends: theirs.yaml\nvariant: null\n")
    assert load_recipe(str(mine)).variant is None
    assert load_recipe(str(theirs)).variant == "evil.module:RUN"


def test_numbers_that_are_text_in_plain_values():
    values = load_recipe("tiny").to_dict()
    text = {**values, "training": {**values["training"], "lr": "0.25"}, "seeds": [4]}
    assert recipe_from(text, "here").training.lr == 0.25
    with pytest.raises(UsageError, match="here: name: Field required"):
        recipe_from({1: 2}, "here")


@pytest.mark.parametrize("name", ["tiny", "124M-20B-sgd"])
def test_a_recipe_is_printed_with_the_meaning_of_each_key(name, capsys):
    recipe = load_recipe(name)
    assert main(["recipes", name]) == 0
    printed = capsys.readouterr().out
    assert recipe_from(yaml.safe_load(printed), "printed") == recipe
    assert list(yaml.safe_load(printed)) == [*recipe.to_dict()]
    assert max(map(len, printed.splitlines())) <= 100
    lines = [line.strip() for line in printed.splitlines()]
    for section in (recipe, recipe.model, recipe.data, recipe.training):
        for key, meaning in meanings(type(section)).items():
            assert meaning, key
            assert meaning in " ".join(line.removeprefix("# ") for line in lines)
    for options in ARMS.values():
        assert all(meanings(options).values()), options


def test_a_file_without_a_name_is_named_after_itself(tmp_path):
    """With its parent's name, its runs would go to the folder of its parent's."""
    path = tmp_path / "half.yaml"
    path.write_text("extends: tiny\ntraining: {steps: 300}\n")
    assert load_recipe(str(path)).name == "half"
    (tmp_path / "again.yaml").write_text(f"extends: {path}\n")
    assert load_recipe(str(tmp_path / "again.yaml")).name == "again"


def test_a_key_that_is_merged_may_be_given_again():
    """As YAML allows; also where a mapping that does so is merged itself."""
    text = "slow: &slow {<<: {lr: 1}, lr: 2}\nfast: {<<: *slow, lr: 3}"
    assert read_yaml(text, "it") == {"slow": {"lr": 2}, "fast": {"lr": 3}}
    with pytest.raises(UsageError, match="given twice"):
        read_yaml("{optimizer: lean, lr_factor: 2, lr_factor: 4}", "--arms.lean")
