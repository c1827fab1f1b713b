"""The optimizers that people have for the core, beside LEAN: alone and in ``Trainer``."""

import functools
import re

import pytest
import torch
from memory_table import EIGHT_BITS, state_bytes
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer

import decoders
from cores import beside, bitsandbytes, go_on, torchao, train
from coupled_adam import LEAN, CoupledAdamW, param_groups
from coupled_adam.transformers import use_coupled_adam
from decoders import assert_same_parameters
from frameworks.test_transformers import Texts, arguments

V, H = 40, 64  # so that 8-bit optimizers make the hidden matrices' states smaller

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True, scope="module")
def eager():
    """Without torchao's compilation of its step, which takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def soap(groups):
    optimizers = pytest.importorskip("pytorch_optimizer")
    return optimizers.SOAP(groups, lr=1e-3, precondition_frequency=2)


def schedule_free(groups):
    return pytest.importorskip("schedulefree").AdamWScheduleFree(groups, lr=1e-3, warmup_steps=2)


CORES = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3),
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "SOAP": soap,
    "schedule-free": schedule_free,
}
every_core = pytest.mark.parametrize("core", CORES.values(), ids=CORES)


def decoder():
    return decoders.decoder(True, V, H).float()


def bytes_of(state):
    """A parameter's, without the step, and the 256 levels of 8-bit tensors."""
    if hasattr(state, "__tensor_flatten__"):
        state = {name: getattr(state, name) for name in state.__tensor_flatten__()[0]}
    if isinstance(state, dict):
        return sum(bytes_of(x) for name, x in state.items() if not re.match("step|qmap", name))
    return state.nbytes


@every_core
def test_it_is_two_optimizers(core):
    """Bit for bit, and a training that is saved in the middle goes on so."""
    model, other, cut = decoder(), decoder(), decoder()
    optimizer, resumed = beside(model, core), beside(cut, core)
    groups = param_groups(other, LEAN | {"lr_factor": 4})
    both = [core(groups[:-1]), CoupledAdamW(groups[-1:], lr=1e-3)]
    getattr(both[0], "train", int)()
    train(model, optimizer, range(6))
    train(other, both, range(6))
    assert_same_parameters(model, other)
    train(cut, resumed, range(3))
    cut, resumed = go_on("state_dict", cut, resumed, lambda m: beside(m, core))
    train(cut, resumed, range(3, 6))
    assert_same_parameters(model, cut)
    copied, again = go_on("pickle", cut, resumed, None)
    train(cut, resumed, range(6, 8))
    train(copied, again, range(6, 8))
    assert_same_parameters(cut, copied)


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_positions=64, n_embd=64, n_layer=1, n_head=2, n_inner=64)
    )


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))


def trainer(folder, optim, model=gpt2, **options):
    options = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-3, **options}
    made = Trainer(model(), arguments(folder, optim=optim, **options), train_dataset=Texts())
    use_coupled_adam(made, embeddings="lean", steps="auto")
    return made


# What each keeps of a hidden matrix beside its step, and the package that it needs.
OPTIMS = {
    "adamw_torch_fused": ({"exp_avg", "exp_avg_sq"}, "torch"),
    "adamw_bnb_8bit": (
        {"state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"},
        "bitsandbytes",
    ),
    "adamw_torch_8bit": ({"exp_avg", "exp_avg_sq"}, "torchao"),
    "adafactor": ({"exp_avg_sq_row", "exp_avg_sq_col", "RMS"}, "torch"),
    "schedule_free_adamw": ({"z", "exp_avg_sq"}, "schedulefree"),
    "galore_adamw": ({"exp_avg", "exp_avg_sq", "projector"}, "galore_torch"),
    "apollo_adamw": ({"exp_avg", "exp_avg_sq", "projector", "seed", "scaled_grad"}, "apollo_torch"),
}


@pytest.mark.parametrize("optim", OPTIMS)
def test_the_trainers_core(optim, tmp_path):
    """It has what ``optim`` names and its decay, the table has LEAN, and a checkpoint goes on."""
    names, package = OPTIMS[optim]
    pytest.importorskip(package)
    options = {"lr_scheduler_type": "constant", "model": llama}
    if optim in ("galore_adamw", "apollo_adamw"):
        options |= {"optim_target_modules": ["attn", "mlp"], "optim_args": "rank=4"}
    (whole := trainer(tmp_path, optim, **options)).train()
    if "optim_args" not in options:  # torch.load refuses GaLore's projector, with any trainer
        (resumed := trainer(tmp_path, optim, **options)).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-2")
        )
        assert_same_parameters(whole.model, resumed.model)
    optimizer = whole.optimizer.optimizer
    core = optimizer if optim.startswith("adamw_torch_f") else optimizer.core
    assert core is optimizer or type(core) is not type(optimizer)
    state = optimizer.state[whole.model.model.layers[0].mlp.up_proj.weight]
    assert {*state} - {"step"} == names
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0, 0.1}
    table = optimizer.state[whole.model.get_input_embeddings().weight]
    assert {*table} >= {"exp_avg_sq", "row_exp_avg_sq"}
    if "8bit" in optim:  # as docs/beside.md has it by formula, but small vectors have 32 bits
        vectors = sum(p.numel() for p in whole.model.parameters() if p.dim() == 1)
        expected = state_bytes(whole.model)["8-bit AdamW and LEAN"] + (8 - EIGHT_BITS) * vectors
        assert sum(map(bytes_of, optimizer.state.values())) == expected


def test_positions_have_32_bits_as_in_the_trainer(tmp_path):
    pytest.importorskip("bitsandbytes")
    (made := trainer(tmp_path, "adamw_bnb_8bit")).train()
    state = made.optimizer.optimizer.state
    assert state[made.model.transformer.wpe.weight]["state1"].dtype == torch.float32
    assert state[made.model.transformer.h[0].mlp.c_fc.weight]["state1"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("optim", "options", "error", "message"),
    [
        ("galore_adamw_layerwise", {}, ValueError, "is for whole models"),
        ("lomo", {}, ValueError, "is for whole models"),
        ("adafactor", {"optim_args": "embedings=lean"}, TypeError, "did you mean.*embeddings"),
        ("galore_adamw", {}, (ValueError, ImportError), "optim_target_modules|galore"),
    ],
)
def test_what_cannot_be_the_trainers_core(optim, options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        trainer(tmp_path, optim, **options)
