"""Which matrices of a model are token embeddings."""

import collections
import contextlib
import re
import types
import warnings

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
from torch.testing._internal.distributed.fake_pg import FakeStore

import hand_written_models
from coupled_adam import CoupledAdamW, embedding_parameters, param_groups
from token_models import (
    Bert,
    H,
    HandWritten,
    Table,
    Translator,
    Transposed,
    V,
    gpt2,
    llama,
    stablelm,
    t5,
)


@pytest.mark.parametrize("name", hand_written_models.MODELS)
def test_hand_written_models(name):
    """Known projects are right without a word, and nothing is silent."""
    build, right = hand_written_models.MODELS[name]
    result = which_tables.outcome(build(), right)
    known = name.startswith(hand_written_models.PROJECTS)
    assert result["outcome"] == "right" if known else result["outcome"] != "silent", result


def check_class(name):
    """What param_groups finds in a class of transformers, whose tables grow with the vocabulary."""
    model_class = getattr(transformers, name)
    right = which_tables.tables(model_class)
    return which_tables.outcome(which_tables.build(model_class, lambda _, size: size), right)


CLASSES = """
    AlbertForMaskedLM BartForConditionalGeneration BertForPreTraining BlenderbotForCausalLM
    CLIPVisionModel CsmForConditionalGeneration DecisionTransformerModel ElectraForPreTraining
    FSMTForConditionalGeneration GPT2LMHeadModel Gemma3nForCausalLM Gemma4ForCausalLM
    LlamaForCausalLM LlavaForConditionalGeneration MusicgenForCausalLM OPTForCausalLM
    T5ForConditionalGeneration WhisperForConditionalGeneration XLMRobertaForMaskedLM
"""
# The codebooks of nine channels in one matrix; a head's other columns, [H - E, V].
NAMED = ["DiaModel", "MobileBertForPreTraining"]


@pytest.mark.parametrize("name", [*CLASSES.split(), *NAMED])
def test_default_configurations(name):
    result = check_class(name)
    assert result["outcome"] == ("named" if name in NAMED else "right"), result


@pytest.mark.slow(minutes=2)
def test_all_language_models_of_transformers():
    """Nearly all can be built from the default configuration without further packages."""
    names = [
        n
        for n in which_tables.class_names(which_tables.TASKS, "MODEL")
        if n.endswith(("LM", "LMHeadModel", "Generation"))
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


def of(layers, **attributes):
    """A module with these layers and attributes."""
    module = nn.ModuleDict(layers)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def padded_llama():
    """A table with more rows than the configuration says."""
    model = llama()
    model.resize_token_embeddings(64)
    model.config.vocab_size = V
    return model


class LearnedPositions(nn.Embedding):
    pass


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


class Missing(dict):
    """As OmegaConf with ``???``, or with an interpolation that cannot be resolved."""

    def __getitem__(self, key):
        if key == "data":
            raise RuntimeError("missing mandatory value")
        return super().__getitem__(key)

    def items(self):
        raise RuntimeError("missing mandatory value")


class Unreadable(nn.Module):
    """Properties that raise; the table and the head say V."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(V, H), nn.Linear(H, V)

    @property
    def config(self):
        raise RuntimeError("not now")

    get_input_embeddings = get_output_embeddings = config


def pipeline():
    """As in PyTorch's tutorial: 0.encoder.weight, 2.decoder.weight."""
    stages = [of({"encoder": nn.Embedding(V, H)}), nn.TransformerEncoderLayer(H, 2, 20)]
    return nn.Sequential(*stages, of({"decoder": nn.Linear(H, V)}))


def ensemble():
    return of({"models": nn.ModuleList(HandWritten(tied=False, positions=12) for _ in range(2))})


class Projection(nn.Module):
    """As encoders of images and sounds have it."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(12, H)

    def get_input_embeddings(self):
        return self.patches


GPT2, GPT2_HEAD = "transformer.wte.weight", "lm_head.weight"
LLAMA = "model.embed_tokens.weight lm_head.weight"
AS_WIDE = {"num_key_value_heads": 2, "head_dim": V // 2}  # keys with V rows
VOCABULARIES = {"src_vocab_size": 8000, "tgt_vocab_size": 32000}
FOUND = {  # without a word
    "gpt2": (gpt2, GPT2),
    "gpt2 without head": (lambda: gpt2().transformer, "wte.weight"),
    "llama": (llama, LLAMA),
    "t5": (t5, "shared.weight"),
    # layers with as many rows or columns as there are tokens
    "gpt2, V = H": (lambda: gpt2(vocab_size=H), GPT2),
    "gpt2 untied, V = 4 H": (
        lambda: gpt2(vocab_size=4 * H, tie_word_embeddings=False),
        f"{GPT2} {GPT2_HEAD}",
    ),
    "llama, V = KV": (lambda: llama(**AS_WIDE), LLAMA),
    "stablelm, V = H": (lambda: stablelm(hidden_size=V), LLAMA),
    # by hand
    "two vocabularies": (
        lambda: Translator(8000, 32000, **VOCABULARIES),
        "src.weight tgt.weight head.weight",
    ),
    "a nested configuration": (
        lambda: of(
            {"a": nn.Embedding(V, H), "b": nn.Embedding(32, H), "c": nn.Linear(H, V)},
            config=types.SimpleNamespace(model={"vocab_size": V}, block_size=32),
        ),
        "a.weight c.weight",
    ),
    "padded llama": (padded_llama, LLAMA),
    "a class named for positions": (
        lambda: nn.Sequential(LearnedPositions(V, H), nn.Linear(H, 3)),
        "",
    ),
    "a projection to as many features": (
        lambda: of({"tok": nn.Embedding(H, H), "up": nn.Linear(V, H)}, config={"vocab_size": H}),
        "tok.weight",
    ),
    "one table": (lambda: of({"word_embeddings": nn.Embedding(V, H)}), "word_embeddings.weight"),
    "one table in a list": (
        lambda: nn.ModuleList([of({"e": nn.Embedding(V, H)}), nn.Linear(H, H)]),
        "0.e.weight",
    ),
    "a configuration with missing values": (
        lambda: of(
            {"a": nn.Embedding(V, H), "b": nn.Embedding(32, H)},
            config=Missing(vocab_size=V, data=None),
        ),
        "a.weight",
    ),
    "nothing can be read": (Unreadable, "embed.weight out.weight"),
    "a pipeline": (pipeline, "0.encoder.weight 2.decoder.weight"),
    "a pipeline of layers": (
        lambda: nn.Sequential(
            nn.Embedding(V, H),
            *(of({"up": nn.Linear(H, 50), "down": nn.Linear(50, H)}) for _ in range(2)),
            nn.Linear(H, V),
        ),
        "0.weight 3.weight",
    ),
    "nothing says V": (lambda: nn.ModuleDict({"tok": Table(), "pos": Table(12)}), ""),
    # getters
    "a head without a getter": (
        lambda: HeadOfItsOwn(llama().config),
        "model.embed_tokens.weight predict.weight",
    ),
    "a head by columns": (HeadByColumns, "tok.weight unembed.weight"),
    "a projection of images": (Projection, ""),
}


@pytest.mark.parametrize(("build", "names"), FOUND.values(), ids=FOUND)
def test_found(build, names):
    """In one coupled group, or one for each layout; what decays, test_roles.py has."""
    model, names = build(), names.split()
    assert {*embedding_parameters(model)} == {*names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no param group" if not names else "nothing")
        optimizer = CoupledAdamW(param_groups(model))
    groups = optimizer.param_groups
    assert {n for g in groups if g["coupled"] for n in g["param_names"]} == {*names}
    assert sorted(n for g in groups for n in g["param_names"]) == sorted(
        name for name, _ in model.named_parameters()
    )
    for group in groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            assert model.get_parameter(name) is p
            p.grad = torch.ones_like(p)
    optimizer.step()


ASKED = {  # an error says what to pass
    "V is the width of layers": (
        lambda: nn.Sequential(
            nn.Embedding(H, H), nn.Embedding(3, H), *(nn.Linear(H, H) for _ in range(3))
        ),
        {},
        r"'0.weight'.*'1.weight'.*param_groups\(model, tables=\{'0.weight': 0, ...\}",
    ),
    "no head": (
        lambda: of({"words": nn.Embedding(V, H), "characters": nn.Embedding(7, H)}),
        {},
        "'words.weight' .*'characters.weight' .*vocab_size=",
    ),
    "an ensemble": (ensemble, {}, "'models.0.tok.weight' .*vocab_size="),
    "one-hot tokens": (
        lambda: nn.Sequential(nn.Linear(V, H), nn.Linear(H, H), nn.Linear(H, V)),
        {"vocab_size": V},
        r"'0.weight' \[16, 40\], '2.weight'",
    ),
}


@pytest.mark.parametrize(("build", "options", "message"), ASKED.values(), ids=ASKED)
def test_asked(build, options, message):
    with pytest.raises(ValueError, match=f"cannot tell which .*{message}"):
        embedding_parameters(build(), **options)


WARNED = {  # what may embed tokens, too, is named
    "V is the width of layers": (
        lambda: nn.Sequential(nn.Embedding(H, H), *(nn.Linear(H, H) for _ in range(3))),
        {"vocab_size": H},
        "0.weight",
        "'1.weight' .*'2.weight' .*'3.weight'",
    ),
    "V is the width of layers, and not given": (
        lambda: nn.Sequential(nn.Embedding(H, H), *(nn.Linear(H, H) for _ in range(3))),
        {},
        "0.weight",
        "'1.weight' .*'2.weight' .*'3.weight'",
    ),
    **{
        f"a table named {name}": (
            lambda name=name: of(
                {"tok": nn.Embedding(V, H), name: nn.Embedding(V, H), "out": nn.Linear(H, V)}
            ),
            {"vocab_size": V},
            "tok.weight out.weight",
            f"'{name}.weight'",
        )
        for name in ("posemb", "posenc", "abspos", "temporal", "speaker", "abs_posemb", "timeemb")
    },
    "a hand-written table": (
        lambda: of({"tok": Table(), "pos": Table(12), "head": nn.Linear(H, V)}),
        {"vocab_size": V},
        "head.weight",
        r"'tok.weight' \[40, 16\]\.",
    ),
    "a hand-written table beside a pair": (
        lambda: of({"one": nn.Embedding(V, H), "out": nn.Linear(H, V), "two": Table()}),
        {},
        "one.weight out.weight",
        r"'two.weight' \[40, 16\]",
    ),
}


@pytest.mark.parametrize(("build", "options", "names", "named"), WARNED.values(), ids=WARNED)
def test_warned(build, options, names, named):
    with pytest.warns(UserWarning, match=rf"not coupled.*{named}.*param_groups\(") as caught:
        assert {*embedding_parameters(build(), **options)} == {*names.split()}
    assert caught[0].filename == __file__


def test_sizes_that_are_given():
    """They replace what the rule cannot tell; several are several vocabularies."""
    model = nn.Sequential(nn.Embedding(65, 8), nn.Embedding(256, 8), nn.Linear(8, 65))
    assert {*embedding_parameters(model, vocab_size=65)} == {"0.weight", "2.weight"}
    assert len(embedding_parameters(Translator(100, 90), vocab_size=(90, 100))) == 3
    padded = of({"wte": nn.Embedding(50257, 8), "out": nn.Linear(8, 50304)})
    assert len(embedding_parameters(padded, vocab_size=(50257, 50304))) == 2
    assert {*embedding_parameters(gpt2(n_positions=V), vocab_size=V)} == {GPT2}
    assert len(embedding_parameters(ensemble(), vocab_size=V)) == 4
    assert len(embedding_parameters(pipeline(), vocab_size=V)) == 2
    assert len(CoupledAdamW(pipeline().named_parameters(), vocab_size=V).param_groups[1]) > 0


@pytest.mark.parametrize("name", ["pos_embed", "wpe", "class_embedding", "query_embed"])
def test_the_only_table_of_a_model_that_is_no_language_model(name):
    """Also if a classifier has as many classes, and a module of its own holds the table."""
    for table in (nn.Embedding(V, H), of({"emb": nn.Embedding(V, H)})):
        model = of({name: table, "mlp": nn.Linear(H, H), "out": nn.Linear(H, V)})
        assert embedding_parameters(model) == {}
        with pytest.warns(UserWarning, match="no param group is coupled, as no token embeddings"):
            groups = param_groups(model)
        CoupledAdamW(groups)  # says nothing more


@pytest.mark.parametrize("vocab_size", [None, 1000])
@pytest.mark.parametrize("name", ["lora of the head", "lora of the table"])
def test_factors_of_adapters(name, vocab_size):
    """As PEFT has them, with V rows or columns; a warning says that the embeddings are frozen."""
    build, _ = hand_written_models.MODELS[name]
    model = build()
    assert embedding_parameters(model, vocab_size=vocab_size) == {}
    with pytest.warns(
        UserWarning, match=r"the token embeddings are frozen: 'tok.*\[1000, 32\]"
    ) as caught:
        CoupledAdamW(param_groups(model, vocab_size=vocab_size))
    assert len(caught) == 1
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="have this size: none"):
        CoupledAdamW(trained, vocab_size=1000)


@pytest.mark.parametrize(
    "options",
    [{"tables": {"W_E": 0, "*_U": 1}}, {"tables": ["W_E", "W_U"], "vocab_size": V}],
    ids=["mapping", "names"],
)
def test_a_head_stored_by_columns(options):
    groups = param_groups(Transposed(), **options)
    assert [g["param_names"] for g in groups] == [["W_in", "W_out"], ["W_E"], ["W_U"]]
    assert [g.get("vocab_dim", 0) for g in groups] == [0, 0, 1]


@pytest.mark.parametrize(
    ("couple", "names"), [("both", LLAMA), ("input", LLAMA.split()[0]), ("output", GPT2_HEAD)]
)
def test_couple_of_an_untied_model(couple, names):
    """The one that is left out does not decay either: arms differ in the coupling alone."""
    model = llama()
    assert {*embedding_parameters(model, couple=couple)} == {*names.split()}
    decay = {
        name: group["weight_decay"]
        for group in param_groups(model, couple=couple, weight_decay=0.1)
        for name in group["param_names"]
    }
    assert decay["model.embed_tokens.weight"] == decay["lm_head.weight"] == 0.0


@pytest.mark.parametrize("couple", ["input", "output"])
@pytest.mark.parametrize("build", [gpt2, lambda: HandWritten(tied=True), t5])
def test_couple_of_a_tied_model_is_refused(build, couple):
    """It would do the same as both, and reports would say something else."""
    with pytest.raises(ValueError, match=rf"couple='{couple}', but '.*' \[40, 16\] is input and"):
        param_groups(build(), couple=couple)


TABLES = {
    "module": (llama, lambda model: model.lm_head, GPT2_HEAD),
    "parameter": (llama, lambda model: model.lm_head.weight, GPT2_HEAD),
    "name": (llama, lambda _: "lm_head.weight", GPT2_HEAD),
    "pattern": (llama, lambda _: "lm_*", GPT2_HEAD),
    "several": (llama, lambda model: [model.model.embed_tokens, "*head*"], LLAMA),
    "the other name of a tied matrix": (gpt2, lambda _: GPT2_HEAD, GPT2),
    "a head, without its bias": (
        lambda: HandWritten(tied=True),
        lambda model: model.head,
        "tok.weight",
    ),
    "nothing": (llama, lambda _: [], ""),
}


@pytest.mark.parametrize(("build", "tables", "names"), TABLES.values(), ids=TABLES)
def test_tables(build, tables, names):
    model = build()
    assert {*embedding_parameters(model, tables=tables(model))} == {*names.split()}


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
