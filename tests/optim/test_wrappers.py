"""``max_grad_norm`` and ``grad_norm`` through what frameworks wrap around optimizers.

Lightning and Fabric put an object of a subclass of ours before it, which finds our class's
attributes before it asks the optimizer. Accelerate's wrapper forwards nothing: its ``optimizer``
is ours.
"""

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.utils.data import DataLoader

from coupled_adam import CoupledAdam, CoupledAdamW

V, LIMIT = 11, 0.25


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, 4), nn.Linear(4, V))


def optimizer_of(network, cls=CoupledAdamW, **options):
    embedding, head = network
    groups = [{"params": [embedding.weight, head.weight], "coupled": True}, {"params": [head.bias]}]
    return cls(groups, **{"lr": 0.1, "max_grad_norm": LIMIT, **options})


def loss_of(network):
    return nn.functional.cross_entropy(network(torch.arange(V)), torch.arange(V))


def norm_of(network):
    return torch.cat([p.grad.flatten() for p in network.parameters()]).norm()


def check_steps(network, wrapper, read, backward):
    """None, then each step's norm before clipping, then 0 where there is no gradient."""
    assert read() is None
    norms = []
    for _ in range(3):
        wrapper.zero_grad()
        backward(loss_of(network))
        norms.append(norm_of(network))
        wrapper.step()
        torch.testing.assert_close(read(), norms[-1])
    assert min(norms) > LIMIT
    assert len(set(norms)) == 3  # a value that was kept would be seen
    wrapper.zero_grad()
    wrapper.step()
    assert read() == 0


@pytest.mark.parametrize("cls", [CoupledAdam, CoupledAdamW])
@pytest.mark.parametrize("fused", [None, False, True])
def test_alone(cls, fused):
    network = model()
    optimizer = optimizer_of(network, cls, fused=fused)
    check_steps(network, optimizer, lambda: optimizer.grad_norm, torch.Tensor.backward)


def test_without_clipping_there_is_no_norm():
    network = model()
    optimizer = optimizer_of(network, max_grad_norm=None)
    loss_of(network).backward()
    optimizer.step()
    assert optimizer.max_grad_norm is None
    assert optimizer.grad_norm is None


def test_without_gradients_before_any():
    """As ``clip_grad_norm_``, which returns 0 for no gradients."""
    optimizer = optimizer_of(model())
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, nn.utils.clip_grad_norm_([], LIMIT))


def test_fabric():
    network = model()
    fabric = Fabric(accelerator="cpu", devices=1)
    module, wrapper = fabric.setup(network, optimizer_of(network))
    check_steps(module, wrapper, lambda: wrapper.grad_norm, fabric.backward)
    assert wrapper.max_grad_norm == LIMIT
    wrapper.load_state_dict(wrapper.state_dict())
    assert wrapper.grad_norm == 0


@pytest.mark.parametrize(
    "wrap",
    [LightningOptimizer, lambda optimizer: Fabric(accelerator="cpu").setup_optimizers(optimizer)],
    ids=["Lightning", "Fabric"],
)
def test_limit_is_set_through_the_wrapper(wrap):
    """What is written to a wrapper reaches the optimizer, and is checked."""
    optimizer = optimizer_of(model())
    wrapper = wrap(optimizer)
    wrapper.max_grad_norm = 3.0
    assert optimizer.max_grad_norm == 3.0
    with pytest.raises(ValueError, match="Invalid max_grad_norm"):
        wrapper.max_grad_norm = -1.0
    assert optimizer.max_grad_norm == 3.0


class Module(pl.LightningModule):
    """Records the norm by hand before each step, and the one to be read after it."""

    def __init__(self, automatic):
        super().__init__()
        self.network = model()
        self.optimizer = optimizer_of(self.network)
        self.automatic_optimization = automatic
        self.by_hand, self.read = [], []

    def configure_optimizers(self):
        return self.optimizer

    def on_train_start(self):
        wrapper = self.optimizers()
        assert isinstance(wrapper, LightningOptimizer)
        assert wrapper.grad_norm is None
        assert wrapper.max_grad_norm == LIMIT

    def training_step(self, _):
        loss = loss_of(self.network)
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None

    def on_before_optimizer_step(self, _):
        self.by_hand.append(norm_of(self.network))

    def on_train_batch_end(self, *_):
        self.read.append(self.optimizers().grad_norm)

    def on_train_end(self):
        self.zero_grad()
        self.optimizer.step()
        self.read.append(self.optimizers().grad_norm)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")
@pytest.mark.parametrize("automatic", [True, False])
def test_lightning(automatic):
    module = Module(automatic)
    pl.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(torch.zeros(3, 1)))
    assert len(module.by_hand) == 3
    assert min(module.by_hand) > LIMIT
    torch.testing.assert_close(module.read, [*module.by_hand, torch.tensor(0.0)])


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate(accelerator):
    """The prepared optimizer's ``optimizer`` is the one that was given."""
    network = model()
    optimizer = optimizer_of(network)
    prepared, wrapper = accelerator.prepare(network, optimizer)
    assert wrapper.optimizer is optimizer
    check_steps(
        prepared, wrapper, lambda: wrapper.optimizer.grad_norm, lambda loss: loss.backward()
    )


def test_accelerate_accumulates(accelerator):
    """The norm is that of what was accumulated; a step that Accelerate leaves out changes none."""
    network = model()
    prepared, wrapper = accelerator.prepare(network, optimizer_of(network))
    for micro_batch in range(4):
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared))
            norm, before = norm_of(network), wrapper.optimizer.grad_norm
            wrapper.step()
            wrapper.zero_grad()
        if micro_batch % 2 == 0:
            assert wrapper.optimizer.grad_norm is before
        else:
            torch.testing.assert_close(wrapper.optimizer.grad_norm, norm)


class CopyingWrapper:
    """A subclass with a copied ``__dict__``, as Lightning made it before 2.1."""

    def __init__(self, optimizer):
        self.__dict__ = dict(optimizer.__dict__)
        self.__class__ = type("Wrapped", (CopyingWrapper, type(optimizer)), {})
        self.wrapped = optimizer

    def step(self, closure=None):
        return self.wrapped.step(closure)


def test_copied_dict():
    network = model()
    wrapper = CopyingWrapper(optimizer_of(network))
    check_steps(network, wrapper, lambda: wrapper.grad_norm, torch.Tensor.backward)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]
)
def test_copies_keep_the_limit_and_have_norms_of_their_own(copied):
    network = model()
    optimizer = optimizer_of(network)
    loss_of(network).backward()
    optimizer.step()
    norm = optimizer.grad_norm.clone()
    other = copied(optimizer)
    assert other.max_grad_norm == LIMIT
    for p in (p for group in other.param_groups for p in group["params"]):
        p.grad = torch.full_like(p, 3.0)
    other.step()
    assert other.grad_norm > norm
    assert torch.equal(optimizer.grad_norm, norm)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_step():
    """The compiler leaves out what a step writes to attributes of an optimizer."""
    torch.compiler.reset()
    network = model()
    optimizer = optimizer_of(network)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(network).backward()
        norm = norm_of(network)
        step()
        torch.testing.assert_close(optimizer.grad_norm, norm)
    torch.compiler.reset()
