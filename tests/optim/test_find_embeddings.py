"""Which matrices of a model are token embeddings."""

import collections
import contextlib
import re
import types
import warnings

import hand_written_models
import pytest
import torch
import torch.distributed as dist
import transformers
import which_tables
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations
from torch.testing._internal.distributed.fake_pg import FakeStore

from coupled_adam import CoupledAdamW, embedding_parameters, param_groups
from token_models import (
    Bert,
    H,
    HandWritten,
    Table,
    Translator,
    Transposed,
    V,
    bert,
    gpt2,
    llama,
    stablelm,
    t5,
)

FOUND = {
    "gpt2": (gpt2, {"transformer.wte.weight"}),
    "gpt2, untied": (
        lambda: gpt2(tie_word_embeddings=False),
        {"transformer.wte.weight", "lm_head.weight"},
    ),
    "gpt2 in a wrapper": (
        lambda: nn.ModuleDict({"inner": gpt2()}),
        {"inner.transformer.wte.weight"},
    ),
    "gpt2 without head": (lambda: gpt2().transformer, {"wte.weight"}),
    "llama": (llama, {"model.embed_tokens.weight", "lm_head.weight"}),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), {"model.embed_tokens.weight"}),
    "stablelm": (stablelm, {"model.embed_tokens.weight", "lm_head.weight"}),
    "stablelm, tied": (lambda: stablelm(tie_word_embeddings=True), {"model.embed_tokens.weight"}),
    "bert": (bert, {"bert.embeddings.word_embeddings.weight"}),
    "t5": (t5, {"shared.weight"}),
}


@pytest.mark.parametrize(("build", "names"), FOUND.values(), ids=FOUND)
def test_transformers_models(build, names):
    """Only token embeddings are coupled; each parameter is in one group; a step works."""
    model = build()
    assert set(embedding_parameters(model)) == names
    groups = param_groups(model, weight_decay=0.3)
    optimizer = CoupledAdamW(groups)
    grouped = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(grouped) == sorted(dict(model.named_parameters()))
    (coupled,) = (g for g in optimizer.param_groups if g["coupled"])
    assert set(coupled["param_names"]) == names
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            assert model.get_parameter(name) is p
            is_matrix = p.dim() >= 2 and "embed" not in name and "shared" not in name
            is_matrix &= not any(s in name for s in ("wte", "wpe", "lm_head", "attention_bias"))
            assert group["weight_decay"] == (0.3 if is_matrix else 0.0), name
            p.grad = torch.ones_like(p)
    optimizer.step()


def test_hand_written_untied():
    model = HandWritten(tied=False, positions=12)
    assert list(embedding_parameters(model)) == ["tok.weight", "head.weight"]


def test_hand_written_with_a_head_of_another_width():
    model = HandWritten(tied=False, positions=12, head_width=2 * H)
    assert list(embedding_parameters(model)) == ["tok.weight", "head.weight"]


@pytest.mark.parametrize("vocab_size", [None, V])
@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: gpt2(n_positions=V), {"transformer.wte.weight"}),
        (lambda: gpt2(n_positions=V).transformer, {"wte.weight"}),
        (lambda: HandWritten(tied=True, positions=V), {"tok.weight"}),
        (lambda: HandWritten(tied=False, positions=V), {"tok.weight", "head.weight"}),
    ],
    ids=["getters", "getters, no head", "tied", "names"],
)
def test_as_many_positions_as_tokens(build, names, vocab_size):
    """Names tell them apart, and there is nothing to warn of."""
    assert set(embedding_parameters(build(), vocab_size=vocab_size)) == names


WIDTHS = {  # configurations in which hidden layers have as many rows or columns as the vocabulary
    "gpt2, V = H": lambda: gpt2(vocab_size=H),
    "gpt2, V = F": lambda: gpt2(n_inner=V),
    "gpt2, V = 3 H": lambda: gpt2(vocab_size=3 * H),
    "gpt2, V = 4 H": lambda: gpt2(vocab_size=4 * H),
    "gpt2 untied, V = 4 H": lambda: gpt2(vocab_size=4 * H, tie_word_embeddings=False),
    "llama, V = KV": lambda: llama(num_key_value_heads=2, head_dim=V // 2),
    "llama tied, V = KV": lambda: llama(
        num_key_value_heads=2, head_dim=V // 2, tie_word_embeddings=True
    ),
    "llama without head, V = KV": lambda: llama(num_key_value_heads=2, head_dim=V // 2).model,
    "stablelm, V = H": lambda: stablelm(hidden_size=V),
}


@pytest.mark.parametrize("build", WIDTHS.values(), ids=WIDTHS)
def test_hidden_layers_as_wide_as_the_vocabulary(build):
    """What the getters return, or, without a head, nothing in a block; and nothing is said."""
    model = build()
    head = None if not hasattr(model, "get_output_embeddings") else model.get_output_embeddings()
    tables = {p for p in (model.get_input_embeddings(), head) if p is not None}
    expected = {module.weight for module in tables}
    assert set(embedding_parameters(model).values()) == expected


def test_layers_that_are_as_wide_as_the_vocabulary():
    """Without a configuration an error asks; with one the table is clear, and the rest is named."""
    layers = [nn.Linear(H, H) for _ in range(3)]
    untied = nn.Sequential(nn.Embedding(H, H), *layers)
    with pytest.raises(ValueError, match=r"cannot tell .*'0.weight'.*tables=\['0.weight', ...\]"):
        embedding_parameters(untied)
    named = ["0.weight", "3.weight"]
    assert list(embedding_parameters(untied, tables=named)) == named
    with pytest.warns(UserWarning, match=r"not coupled.*'1.weight' .*'2.weight' .*'3.weight'"):
        assert set(embedding_parameters(untied, vocab_size=H)) == {"0.weight"}


@pytest.mark.parametrize("heads", [1, 3])
def test_hand_written_bert(heads):
    """All heads over the vocabulary, however many; neither segments nor the pair task."""
    expected = ["tok.weight", *(f"mlm.{i}.weight" for i in range(heads))]
    assert list(embedding_parameters(Bert(heads))) == expected


@pytest.mark.parametrize("names", [("tok", "pos"), ("first", "second")], ids=["names", "neutral"])
@pytest.mark.parametrize(
    ("tokens", "positions", "classes"), [(100, 16, 16), (65, 256, 65), (65, 256, 256)]
)
def test_a_head_of_the_size_of_another_table(tokens, positions, classes, names):
    """Sixteen classes and positions, or few characters and many positions: that is no pair."""
    model = nn.ModuleDict(
        {
            names[0]: nn.Embedding(tokens, 8),
            names[1]: nn.Embedding(positions, 8),
            "up": nn.Linear(8, 256),  # a hidden layer as wide as there are positions
            "down": nn.Linear(256, 8),
            "head": nn.Linear(8, classes),
        }
    )
    if names[0] == "tok" and classes == tokens:
        assert set(embedding_parameters(model)) == {"tok.weight", "head.weight"}
    else:
        with pytest.raises(ValueError, match=rf"cannot tell which .*'{names[0]}.weight'"):
            embedding_parameters(model)


def test_sizes_that_are_given_are_searched_for():
    model = nn.Sequential(nn.Embedding(65, 8), nn.Embedding(256, 8), nn.Linear(8, 65))
    assert set(embedding_parameters(model, vocab_size=65)) == {"0.weight", "2.weight"}


@pytest.mark.parametrize("sizes", [(90, 100), (100, 90), (8000, 32000), (32000, 8000)])
def test_two_vocabularies(sizes):
    """By the configuration or the argument; otherwise one is named, or an error asks."""
    everything = {"src.weight", "tgt.weight", "head.weight"}
    config = {"src_vocab_size": sizes[0], "tgt_vocab_size": sizes[1]}
    assert set(embedding_parameters(Translator(*sizes, **config))) == everything
    assert set(embedding_parameters(Translator(*sizes), vocab_size=sizes)) == everything
    if sizes[0] < sizes[1]:
        with pytest.warns(UserWarning, match=r"not coupled.*'src.weight' \["):
            assert set(embedding_parameters(Translator(*sizes))) == everything - {"src.weight"}
    else:
        with pytest.raises(ValueError, match=r"cannot tell .*'src.weight'.*'tgt.weight'"):
            embedding_parameters(Translator(*sizes))


NAMED = {  # what may be a vocabulary more is at least named
    "two heads": (
        [(32000, 8), (8192, 8)],
        [(8, 32000), (8, 8192)],
        {"in.0.weight", "out.0.weight"},
        ["in.1.weight", "out.1.weight"],
    ),
    "half": (
        [(32001, 8), (16000, 8)],
        [(8, 32001)],
        {"in.0.weight", "out.0.weight"},
        ["in.1.weight"],
    ),
    "smaller": (
        [(32000, 8), (8000, 8)],
        [(8, 32000)],
        {"in.0.weight", "out.0.weight"},
        ["in.1.weight"],
    ),
}


@pytest.mark.parametrize(("tables", "heads", "coupled", "named"), NAMED.values(), ids=NAMED)
def test_what_may_be_a_vocabulary_more_is_named(tables, heads, coupled, named):
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "in": nn.ModuleList(nn.Embedding(*size) for size in tables),
                "out": nn.ModuleList(nn.Linear(*size, bias=False) for size in heads),
            }
        )
    with pytest.warns(UserWarning, match=r"not coupled.*" + ".*".join(named)) as caught:
        assert set(embedding_parameters(model)) == coupled
    assert caught[0].filename == __file__


def test_a_padded_head():
    """With the number of tokens in the configuration what is padded is named."""
    with torch.device("meta"):
        model = nn.ModuleDict({"wte": nn.Embedding(50257, 8), "out": nn.Linear(8, 50304)})
    with pytest.raises(ValueError, match=r"cannot tell .*'wte.weight' \[50257, 8\]"):
        embedding_parameters(model)
    assert len(embedding_parameters(model, vocab_size=(50257, 50304))) == 2
    model.config = {"vocab_size": 50257}
    with pytest.warns(UserWarning, match=r"not coupled.*'out.weight' \[50304, 8\]"):
        assert set(embedding_parameters(model)) == {"wte.weight"}


@pytest.mark.parametrize(
    "layers",
    [[], [nn.Linear(H, 2)], [nn.LSTM(H, V // 4)], [nn.Embedding(32, H), nn.Linear(H, 32)]],
    ids=["alone", "classifier", "lstm", "another pair"],
)
def test_a_table_without_a_head(layers):
    """Nothing says how many tokens there are."""
    model = nn.ModuleDict({"word_embeddings": nn.Embedding(V, H), "rest": nn.Sequential(*layers)})
    with pytest.raises(ValueError, match=r"cannot tell .*'word_embeddings.weight' .*vocab_size="):
        embedding_parameters(model)
    assert set(embedding_parameters(model, vocab_size=V)) == {"word_embeddings.weight"}


OTHER = (
    "pos_embed position_embeddings wpe time_embed label_emb class_embedding codebook query_embed"
)


@pytest.mark.parametrize("name", OTHER.split())
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("head", [3, V])
def test_the_only_table_of_a_model_that_is_no_language_model(name, inner, head):
    """Also if a classifier has as many classes, and if a module of its own holds the table."""
    table = nn.Embedding(V, H)
    if inner:
        table = nn.ModuleDict({"emb": table})
    model = nn.ModuleDict({name: table, "mlp": nn.Linear(H, H), "out": nn.Linear(H, head)})
    assert embedding_parameters(model) == {}
    with pytest.warns(UserWarning, match="no param group is coupled, as no token embeddings were"):
        groups = param_groups(model)
    CoupledAdamW(groups)  # says nothing more


class LearnedPositions(nn.Embedding):
    pass


def test_classes_have_names_too():
    model = nn.Sequential(LearnedPositions(V, H), nn.Linear(H, 3))
    assert embedding_parameters(model) == {}


def adapted(rank=4):
    """As PEFT has them: a frozen head with factors, a frozen table with factors by columns."""
    model = nn.ModuleDict({"embed_tokens": nn.ModuleDict(), "lm_head": nn.ModuleDict()})
    model["embed_tokens"]["base_layer"] = nn.Embedding(V, H)
    model["embed_tokens"]["lora_embedding_A"] = nn.ParameterDict({"default": torch.ones(rank, V)})
    model["lm_head"]["base_layer"] = nn.Linear(H, V)
    model["lm_head"]["lora_A"] = nn.ModuleDict({"default": nn.Linear(H, rank, bias=False)})
    model["lm_head"]["lora_B"] = nn.ModuleDict({"default": nn.Linear(rank, V, bias=False)})
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    return model


@pytest.mark.parametrize("vocab_size", [None, V])
def test_factors_of_adapters(vocab_size):
    """They have V rows or columns, but a row is no embedding; a warning says what is frozen."""
    model = adapted()
    assert embedding_parameters(model, vocab_size=vocab_size) == {}
    message = r"the token embeddings are frozen: 'embed_tokens.base_layer.weight' \[40, 16\], 'lm_h"
    with pytest.warns(UserWarning, match=message) as caught:
        CoupledAdamW(param_groups(model, vocab_size=vocab_size))
    assert len(caught) == 1
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="named for something else"):
        CoupledAdamW(trained, vocab_size=V)


def test_padded_tables_and_nested_configurations():
    """A table with more rows than the configuration says is found by its getter, or as tied."""
    model = llama()
    model.resize_token_embeddings(64)
    model.config.vocab_size = V
    assert len(embedding_parameters(model)) == 2
    config = types.SimpleNamespace(model={"vocab_size": V}, block_size=32)
    table = nn.Sequential(nn.Embedding(V, H), nn.Embedding(32, H), nn.Linear(H, V))
    table.config = config
    assert set(embedding_parameters(table)) == {"0.weight", "2.weight"}
    tied = HandWritten(tied=True)
    tied.config = types.SimpleNamespace(vocab_size=V - 3)
    assert set(embedding_parameters(tied)) == {"tok.weight"}


class HeadOfItsOwn(transformers.PreTrainedModel):
    """Its getters return the input table only."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.predict = nn.Linear(H, V)

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return None


def test_a_head_that_the_getters_do_not_return():
    config = llama().config
    assert set(embedding_parameters(HeadOfItsOwn(config))) == {
        "model.embed_tokens.weight",
        "predict.weight",
    }


class GettersWithArguments(Bert):
    def get_input_embeddings(self, ids):
        return self.tok(ids)

    def get_output_embeddings(self, *, of):
        raise AssertionError


def test_getters_that_take_arguments_are_something_else():
    assert list(embedding_parameters(GettersWithArguments())) == ["tok.weight", "mlm.0.weight"]


def test_an_error_within_a_getter_is_not_hidden():
    model = Bert()
    model.get_input_embeddings = lambda: model.tok.wait
    with pytest.raises(AttributeError, match="wait"):
        embedding_parameters(model)


@pytest.mark.parametrize(
    "parametrize",
    [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm],
    ids=["weight_norm", "spectral_norm", "old weight_norm"],
)
@pytest.mark.parametrize(
    ("build", "modules"),
    [
        (lambda: HandWritten(tied=False), ("tok", "head")),
        (llama, ("model.embed_tokens", "lm_head")),
    ],
    ids=["HandWritten", "llama"],
)
@pytest.mark.filterwarnings("ignore:.*nn.utils.weight_norm. is deprecated")
def test_parametrized_tables_and_heads(build, modules, parametrize):
    """What takes a weight's place is coupled, and does not decay; magnitudes [V, 1] are neither."""
    model = build()
    for name in modules:
        parametrize(model.get_submodule(name))
    matrices = {n: p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith(modules)}
    expected = {name for name, p in matrices.items() if p.shape == (V, H)}
    assert len(expected) == 2
    groups = param_groups(model, weight_decay=0.1)
    assert set(groups[-1]["param_names"]) == expected
    decays = {name: g["weight_decay"] for g in groups for name in g["param_names"]}
    assert {decays[name] for name in matrices} == {0.0}
    optimizer = CoupledAdamW(groups)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    name = next(name for name in expected if name.startswith(modules[1]))
    assert list(embedding_parameters(model, tables=name)) == [name]


def test_hand_written_tables():
    """They are not guessed: an error asks for them, or a warning names them."""
    model = nn.ModuleDict({"tok": Table(), "pos": Table(12), "head": nn.Linear(H, V)})
    assert embedding_parameters(model) == {}  # nothing says V
    with pytest.warns(UserWarning, match=r"not coupled.*'tok.weight' \[40, 16\]\."):
        assert set(embedding_parameters(model, vocab_size=V)) == {"head.weight"}
    assert len(embedding_parameters(model, tables={"tok.weight": 0, "head.weight": 0})) == 2
    two = nn.ModuleDict({"one": Table(), "two": Table()})
    message = r"'one.weight' \[40, 16\], 'two.weight'.*tables=\{'one.weight': 0, ...\}"
    with pytest.raises(ValueError, match=message):
        embedding_parameters(two, vocab_size=V)
    beside = nn.ModuleDict({"one": nn.Embedding(V, H), "out": nn.Linear(H, V), "two": Table()})
    with pytest.warns(UserWarning, match=r"not coupled.*'two.weight' \[40, 16\]"):
        assert set(embedding_parameters(beside)) == {"one.weight", "out.weight"}


@pytest.mark.parametrize(
    "options",
    [
        {"tables": {"W_E": 0, "*_U": 1}},
        {"tables": ["W_E", "W_U"], "vocab_size": V},
    ],
    ids=["mapping", "names"],
)
def test_a_head_stored_by_columns(options):
    """One moment for each hidden feature, in either layout."""
    torch.manual_seed(0)
    model = Transposed()
    groups = param_groups(model, **options)
    assert [g["param_names"] for g in groups] == [["W_in", "W_out"], ["W_E"], ["W_U"]]
    assert [g.get("vocab_dim", 0) for g in groups] == [0, 0, 1]
    saved = 4 * (V * H - H)
    assert str(groups).splitlines()[-1].split() == ["total", f"{2 * saved:,}", "B"]
    rows = nn.Parameter(model.W_U.detach().T.clone())
    expected = CoupledAdamW([{"params": [rows], "coupled": True, "weight_decay": 0.0}], lr=0.1)
    optimizer = CoupledAdamW(groups, lr=0.1)
    for p in (*model.parameters(), rows):
        p.grad = torch.randn_like(p)
    model.W_U.grad = rows.grad.T.clone()
    optimizer.step()
    expected.step()
    torch.testing.assert_close(model.W_U.T, rows)
    assert optimizer.state[model.W_U]["exp_avg_sq"].shape == (H,)


class HeadByColumns(Bert):
    """Its getter returns a hand-written head whose weight is [H, V]."""

    def __init__(self):
        super().__init__()
        self.config = {"vocab_size": 100}
        self.mlm = nn.Identity()
        self.unembed = Table()
        self.unembed.weight = nn.Parameter(torch.zeros(8, 100))

    def get_output_embeddings(self):
        return self.unembed


def test_a_head_by_columns_from_a_getter():
    groups = param_groups(HeadByColumns())
    dims = {n: g.get("vocab_dim", 0) for g in groups if g["coupled"] for n in g["param_names"]}
    assert dims == {"tok.weight": 0, "unembed.weight": 1}


def test_one_hot_tokens():
    """A projection of one-hot tokens is [H, V]: named beside a head, or asked for."""
    model = nn.Sequential(nn.Linear(V, H), nn.Linear(H, H), nn.Linear(H, V))
    with pytest.raises(ValueError, match=r"cannot tell .*'0.weight' \[16, 40\], '2.weight'"):
        embedding_parameters(model, vocab_size=V)
    groups = param_groups(model, tables={"0.weight": 1, "2.weight": 0})
    assert [(g["param_names"], g.get("vocab_dim", 0)) for g in groups if g["coupled"]] == [
        (["2.weight"], 0),
        (["0.weight"], 1),
    ]


@pytest.fixture
def megatron():
    """A model whose head has some of its rows on this rank, as Megatron marks it."""
    model = llama()
    model.lm_head.weight.tensor_model_parallel = True
    model.lm_head.weight.partition_dim = 0
    return model


@pytest.mark.parametrize("options", [{}, {"tables": "lm_head.weight"}], ids=str)
def test_tensor_parallel_parameters_of_megatron_are_refused(megatron, options):
    """The average over this rank's rows would be another one."""
    message = r"cannot couple 'lm_head.weight' \[40, 16\].*parallelize_module.*=False"
    with pytest.raises(ValueError, match=message):
        param_groups(megatron, **options)


def test_the_optimizer_refuses_tensor_parallel_parameters_of_megatron(megatron):
    with pytest.raises(ValueError, match=r"cannot couple parameter 0 \[40, 16\].*=False"):
        CoupledAdamW([megatron.lm_head.weight], coupled=True)


def test_tensor_parallel_parameters_of_megatron_need_not_be_coupled(megatron):
    assert len(param_groups(megatron, couple="input")[-1]["params"]) == 1


def test_parameters_of_megatron_with_all_rows_are_coupled(megatron):
    head = megatron.lm_head.weight
    head.partition_dim = 1  # all rows are here, of some columns
    assert len(embedding_parameters(megatron)) == 2
    CoupledAdamW([head], coupled=True)
    head.tensor_model_parallel, head.partition_dim = False, 0
    assert len(embedding_parameters(megatron)) == 2


@pytest.mark.parametrize("name", hand_written_models.MODELS)
def test_hand_written_models(name):
    """Those of known projects are right without a word; of the others nothing is silent."""
    build, right = hand_written_models.MODELS[name]
    result = which_tables.outcome(build(), right)
    known = name.startswith(hand_written_models.PROJECTS)
    assert result["outcome"] == "right" if known else result["outcome"] != "silent", result


def check_class(name):
    """What param_groups finds in a class of transformers, whose tables grow with the vocabulary."""
    model_class = getattr(transformers, name)
    right = which_tables.tables(model_class)
    return which_tables.outcome(which_tables.build(model_class, lambda _, size: size), right)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AlbertForMaskedLM", "right"),
        ("BartForConditionalGeneration", "right"),
        ("BertForPreTraining", "right"),
        ("BlenderbotForCausalLM", "right"),
        ("CLIPVisionModel", "right"),  # the only table is of positions
        ("CsmForConditionalGeneration", "right"),
        ("DecisionTransformerModel", "right"),
        ("DiaModel", "named"),  # the codebooks of nine channels in one matrix
        ("ElectraForPreTraining", "right"),
        ("FSMTForConditionalGeneration", "right"),
        ("GPT2LMHeadModel", "right"),
        ("Gemma3nForCausalLM", "right"),
        ("Gemma4ForCausalLM", "right"),
        ("LlamaForCausalLM", "right"),
        ("LlavaForConditionalGeneration", "right"),
        ("MobileBertForPreTraining", "named"),  # the head's other columns, [H - E, V]
        ("MusicgenForCausalLM", "right"),
        ("OPTForCausalLM", "right"),
        ("T5ForConditionalGeneration", "right"),
        ("WhisperForConditionalGeneration", "right"),
        ("XLMRobertaForMaskedLM", "right"),
    ],
)
def test_default_configurations(name, expected):
    result = check_class(name)
    assert result["outcome"] == expected, result


@pytest.mark.slow
def test_all_language_models_of_transformers():
    """Nearly all can be built from the default configuration without further packages."""
    names = [
        n for n in which_tables.class_names() if n.endswith(("LM", "LMHeadModel", "Generation"))
    ]
    outcomes, silent = collections.Counter(), []
    for name in names:
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            result = check_class(name)
            outcomes[result["outcome"]] += 1
            silent += result["of"] if result["outcome"] == "silent" else []
    # The audio tokens of one model have another vocabulary, and V is a width in the default
    # configuration of another.
    assert silent == [
        "model.audio_tower.embed_audio_tokens.embed_audio_tokens.weight",
        "model.audio_tower.proj2.weight",
        "model.visual.merger.mlp.2.weight",
    ]
    assert outcomes["right"] > 0.75 * len(names)
    assert outcomes["named"] < 0.05 * len(names)


@pytest.mark.parametrize(
    ("couple", "names"),
    [
        ("both", {"model.embed_tokens.weight", "lm_head.weight"}),
        ("input", {"model.embed_tokens.weight"}),
        ("output", {"lm_head.weight"}),
    ],
)
def test_couple_of_an_untied_model(couple, names):
    """The one that is left out does not decay either: arms differ in the coupling alone."""
    model = llama()
    assert set(embedding_parameters(model, couple=couple)) == names
    decay = {
        name: group["weight_decay"]
        for group in param_groups(model, couple=couple, weight_decay=0.1)
        for name in group["param_names"]
    }
    assert decay["model.embed_tokens.weight"] == decay["lm_head.weight"] == 0.0


@pytest.mark.parametrize("couple", ["input", "output"])
@pytest.mark.parametrize(
    "build",
    [gpt2, lambda: HandWritten(tied=True), t5],
    ids=["gpt2", "HandWritten", "t5"],
)
def test_couple_of_a_tied_model_is_refused(build, couple):
    """It would do the same as both, and reports would say something else."""
    with pytest.raises(ValueError, match=rf"couple='{couple}', but '.*' \[40, 16\] is input and"):
        param_groups(build(), couple=couple)


@pytest.mark.parametrize(
    "entry_of",
    [
        lambda model: model.lm_head,
        lambda model: model.lm_head.weight,
        lambda _: "lm_head.weight",
        lambda _: "lm_*",
        lambda _: ["*head*"],
    ],
    ids=["module", "parameter", "name", "pattern", "list"],
)
def test_embeddings_named_outright(entry_of):
    model = llama()
    assert set(embedding_parameters(model, tables=entry_of(model))) == {"lm_head.weight"}


def test_several_embeddings_named_outright():
    model = llama()
    both = [model.model.embed_tokens, "lm_head.weight"]
    assert len(embedding_parameters(model, tables=both)) == 2


def test_a_tied_matrix_has_two_names():
    """Either one means it."""
    assert set(embedding_parameters(gpt2(), tables="lm_head.weight")) == {"transformer.wte.weight"}


def test_the_bias_of_a_head_is_not_meant_by_the_head():
    tied = HandWritten(tied=True)
    assert set(embedding_parameters(tied, tables=tied.head)) == {"tok.weight"}


def test_an_empty_list_of_embeddings_couples_nothing():
    """Which the optimizer warns about."""
    assert embedding_parameters(llama(), tables=[]) == {}


def test_a_hand_written_matrix_named_outright_needs_its_dimension():
    with pytest.raises(ValueError, match=r"which dimension of 'W_U' \[16, 40\].*\{'W_U': 0\}"):
        embedding_parameters(Transposed(), tables="W_U")


@pytest.mark.parametrize("build", [gpt2, llama, lambda: HandWritten(tied=False)])
@pytest.mark.parametrize("wrapper", ["compile", "DDP", "FSDP2", "checkpointed"])
def test_wrapped_models(build, wrapper):
    """The same matrices, without a word, whatever wraps the model."""
    expected = {*embedding_parameters(build())}
    model = build()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        if wrapper == "compile":
            model = torch.compile(model)
        elif wrapper == "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        elif wrapper == "FSDP2":
            model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        else:
            apply_activation_checkpointing(model)
        found = {*embedding_parameters(model)}
    finally:
        dist.destroy_process_group()
    wrappers = r"_orig_mod\.|^module\.|_checkpoint_wrapped_module\."
    assert {re.sub(wrappers, "", name) for name in found} == expected


def test_frozen_parameters_are_left_out():
    model = llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    names = {name for group in param_groups(model) for name in group["param_names"]}
    assert "model.embed_tokens.weight" not in names
    assert set(embedding_parameters(model)) == {"lm_head.weight"}


def test_meta_device():
    with torch.device("meta"):
        model = gpt2()
    assert set(embedding_parameters(model)) == {"transformer.wte.weight"}
