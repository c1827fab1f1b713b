"""``CoupledAdam`` and ``CoupledAdamW``: their options, state, step and checkpoints."""

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import Module, ParameterList
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT, _use_grad_for_differentiable
from typing_extensions import Unpack

from coupled_adam.optim import core as cores
from coupled_adam.optim import flat, row_sparse, sharded
from coupled_adam.optim.conversion import adapt, check_structure
from coupled_adam.optim.core import Core, is_cores
from coupled_adam.optim.growth import follow, forget_rows
from coupled_adam.optim.matrix import CoupledMatrix
from coupled_adam.optim.options import (
    OPTIONS,
    Group,
    as_pair,
    check_options,
    complete,
    embeds_tokens,
    refuse_unknown,
    warn_of_lost_factor,
    warn_of_more_steps,
)
from coupled_adam.optim.param_groups import (
    GROUP_OPTIONS,
    Embeddings,
    GroupOptions,
    ParamGroups,
    couple_by_size,
    embedding_options,
    names_of,
    param_groups,
    shown,
)
from coupled_adam.optim.state import check_group, check_parameter, description, fit_state
from coupled_adam.optim.update import kernel_of, update
from coupled_adam.optim.warn import warn

Tensors = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""The tensors of a param group, in the order of torch's ``adam``."""

_ADAM_OPTIONS = ["lr", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"]
_ADAM_OPTIONS += ["foreach", "capturable", "differentiable", "fused"]


class CoupledAdam(torch.optim.Adam):
    r"""Adam in which all rows of an embedding matrix share one second moment.

    A drop-in replacement for :class:`torch.optim.Adam` with six more options for each param group.
    In groups with ``coupled=True``, the second moment of each row is replaced by the average over
    all V rows (Algorithm 1 of arXiv 2502.08441, written out in
    :mod:`coupled_adam.optim.reference`). All other groups run torch's own implementation, with
    bit-identical results. :func:`coupled_adam.param_groups` finds a model's embedding matrices and
    builds the groups.

    The state of a coupled parameter [V, H] consists of ``exp_avg`` [V, H] in the parameter's dtype,
    ``exp_avg_sq`` [H] in float32 or wider, and ``step``. With ``amsgrad`` there is also
    ``max_exp_avg_sq`` [H], the running maximum of the average. The state is created at the first
    step, or by :meth:`init_state`.

    As in torch's Adam, gradients that are not finite are not filtered: one such element spoils its
    column of every row. Use ``GradScaler`` or ``clip_grad_norm_(error_if_nonfinite=True)``.

    Where a wrapper has flattened matrices and left a piece of each on every rank, groups need the
    option ``flat_shards``: a list with a :class:`coupled_adam.FlatShard` for each parameter, with a
    list of them for a tensor that holds pieces of several matrices, or with None for a whole
    parameter. Its state has the second moments of all matrices, one after the other.

    ``foreach``, ``fused``, ``capturable`` and ``differentiable`` have the same meaning for coupled
    parameters as in torch, but coupled matrices are always updated one at a time.

    Args:
        params: a model, of which :func:`coupled_adam.param_groups` makes the groups; or tensors,
            named parameters, or param groups, as in torch.
        lr, betas, eps, weight_decay, amsgrad: as in :class:`torch.optim.Adam`, with the same
            defaults.
        foreach, maximize, capturable, differentiable, fused, decoupled_weight_decay: likewise.
        coupled, vocab_dim: whether the rows of each matrix in the group share a second moment, by
            default False, and the dimension that indexes the tokens: 0 for [V, H], the default, or
            1 for [H, V]. A model or ``vocab_size`` says both instead. Without ``coupled`` the next
            four have no effect.
        second_moment_scale: positive factor applied to the shared second moment, the 2^-n of Scaled
            Coupled Adam (Sec. 6.1), by default 1.
        row_exponent: a between 0 and 1, by default 0. With a > 0 the step size of each token also
            depends on its own average squared gradient, to the power -a/2 (see
            :mod:`coupled_adam.optim.reference`). This goes beyond the paper and needs one more
            number of state for each token, ``row_exp_avg_sq`` [V].
        zero_sum: subtract the mean of the rows' updates from each of them, from step
            1 / (1 - beta2) on, so that a step does not move the mean embedding, except by weight
            decay and rounding; beyond the paper, too.
        stochastic_rounding: round updated bfloat16 parameters up or down at random, so that small
            updates are kept on average (see :mod:`coupled_adam.optim.rounding`).
        embeddings: how the coupled matrices of a model, or those that ``vocab_size`` finds, are
            updated, as in :func:`coupled_adam.param_groups`. What it sets is no argument.
        vocab_size: the number V of rows of the embedding matrices, padding included, where a model
            does not say it. Frameworks that pass on parameters only always need it: every matrix
            with V rows or V columns then moves to a coupled group with the options of its own group
            and of ``embeddings``. Groups that are added later have to say ``coupled`` themselves.
        steps: the number of optimizer steps of the whole training, from which the learning rate of
            ``embeddings="lean"`` follows. A checkpoint that is loaded keeps its own.
        core: a function that makes another optimizer of param groups, which then updates all
            parameters but the token embeddings, as in ``core=lambda groups: AdamW8bit(groups,
            lr=6e-4, weight_decay=0.1)``. The groups have the options that are given for them, such
            as no weight decay for biases; the arguments above are those of the embeddings alone.
            The two are one optimizer to everything outside.
        groups: further arguments of :func:`coupled_adam.param_groups`, for a model.

    Raises:
        TypeError: if an argument is unknown, or one of ``groups`` is given without a model.
        ValueError: if an option is out of range, a coupled parameter is not a non-empty, real,
            floating-point matrix, or no matrix has the size ``vocab_size``, or hidden layers have
            it; also as in :func:`coupled_adam.param_groups`.
        RuntimeError: in ``step``, if a gradient is sparse, a state has the wrong shape or device,
            or the device does not support an implementation flag. No parameter is changed then.
    """

    # Optimizer.__init__ adds the groups before this class can add its options to self.defaults.
    _coupling_defaults: Mapping[str, Any] = OPTIONS

    core: torch.optim.Optimizer | None = None
    """What updates the groups that have an option ``core``."""

    if not hasattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check"):
        # The method has another name in older releases of torch.
        _accelerator_graph_capture_health_check = (
            torch.optim.Optimizer._cuda_graph_capture_health_check
        )

    def __init__(
        self,
        params: ParamsT | Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        coupled: bool | None = None,
        second_moment_scale: float | None = None,
        row_exponent: float | None = None,
        zero_sum: bool | None = None,
        vocab_dim: int | None = None,
        stochastic_rounding: bool | None = None,
        embeddings: Embeddings = "coupled",
        vocab_size: int | Iterable[int] | None = None,
        steps: int | None = None,
        core: Core | None = None,
        **groups: Unpack[GroupOptions],
    ) -> None:
        arguments = dict(locals())
        # As **LEAN has it, where it is None
        if (factor := arguments["groups"].pop("lr_factor", None)) is not None:
            raise ValueError(
                f"lr_factor={factor!r} is an option of the embeddings: write "
                f"embeddings={{'lr_factor': {factor!r}}}, or embeddings=LEAN | {{...}}"
            )
        # 1. What says which matrices are coupled, and how
        refuse_unknown(groups, GROUP_OPTIONS, type(self).__name__)
        is_model = isinstance(params, Module) and not isinstance(params, ParameterList)
        if groups and not is_model:
            raise TypeError(f"{', '.join(groups)}: only with a model instead of parameters")
        says_how = steps is not None or embeddings != "coupled"
        if says_how and not is_model and vocab_size is None:
            option = f"{embeddings=}" if steps is None else f"{steps=}"
            raise ValueError(
                f"{option} says how embedding matrices are updated, but not which parameters they "
                "are: pass the model instead of parameters, or vocab_size= with the number of "
                "their rows; param groups have the options themselves, as of param_groups(model, "
                "'lean', steps=...)"
            )
        # 2. The options, which are checked where they enter, and the groups
        muon = groups.get("beside_muon", False)
        own_options = embedding_options(embeddings, steps, beside_muon=muon)
        coupling = {name: arguments[name] for name in OPTIONS if arguments[name] is not None}
        torchs = {name: arguments[name] for name in (*_ADAM_OPTIONS, "betas")}
        check_options({**torchs, **coupling})
        given: Any = params
        if isinstance(params, Module) and is_model:
            given = param_groups(params, own_options, vocab_size=vocab_size, steps=steps, **groups)
        is_grouped = isinstance(given, ParamGroups)
        _refuse_what_groups_set(
            coupling,
            given[-1] if is_grouped and given else own_options,
            is_grouped or vocab_size is not None,
        )
        # What each group says itself; a factor becomes a rate.
        said: Iterable[set[str]] = itertools.repeat({"params", "param_names"})
        if isinstance(given, list | tuple) and all(isinstance(group, dict) for group in given):
            said = [{*group, *(["lr"] * ("lr_factor" in group))} for group in given]
        # 3. The optimizer, whose constructor calls add_param_group
        self._warned, self._checked = set[str](), dict[int, Any]()
        self._coupling_defaults = {**OPTIONS, **coupling}
        # Not super().__init__: in CoupledAdamW that is AdamW's, without decoupled_weight_decay.
        torch.optim.Adam.__init__(self, given, **{**torchs, "betas": as_pair(betas)})
        of_parameter = {p: s for group, s in zip(self.param_groups, said) for p in group["params"]}
        if vocab_size is not None and not is_model:
            # Only now, as torch has turned all that params may be into groups.
            self.param_groups = couple_by_size(self.param_groups, vocab_size, own_options)
            for group in self.param_groups:
                check_group(group)
        # 4. The core, of the other groups as they were given, without what completed them
        said = [of_parameter.get(next(iter(g["params"]), None), {*g}) for g in self.param_groups]
        if core is not None:
            if vocab_size is None and not any("coupled" in names for names in said):
                raise ValueError(
                    "core= needs the model instead of parameters, vocab_size=, or param groups "
                    "that say which are coupled, as those of param_groups(model, 'lean', steps=...)"
                )
            bare = [
                {name: group[name] for name in group if name in names}
                for group, names in zip(self.param_groups, said)
                if not embeds_tokens(group)
            ]
            own = [group for group in self.param_groups if embeds_tokens(group)]
            self.param_groups = [*self._set_core(core, bare), *own]
        # Groups that say it themselves are meant so, and param_groups has said why.
        is_meant = all("coupled" in names for names in said) or vocab_size is not None
        if not (is_meant or any(group["coupled"] for group in self.param_groups)):
            warn(
                f"no param group is coupled, so this {type(self).__name__} does the same as "
                "torch's optimizer. Pass the model instead of parameters, or vocab_size= with the "
                "number of rows of the embedding matrix, or set 'coupled': True in the group that "
                "holds it. Ignore this warning on a pipeline rank without embeddings"
            )

    def _set_core(self, core: Core, groups: list[Group]) -> list[Group]:
        """Let the core update some groups, and return what it has made of them."""
        self.core = cores.build(core, groups, self.defaults["lr"])
        self.state.update(self.core.state)  # what APOLLO draws for each parameter
        self._step_supports_amp_scaling = False  # the core may not unscale in its step
        return self.core.param_groups

    def _lend(self) -> torch.optim.Optimizer:
        """The core, with its groups and states of now; there must be one."""
        assert self.core is not None
        return cores.lend(self.core, self.param_groups, self.state)

    def __repr__(self) -> str:
        """A line for each group: its parameters, and the options that are not the defaults."""
        flags = {name: x for name, x in self.defaults.items() if isinstance(x, bool | None)}
        plain = {**dict.fromkeys(flags, False), "foreach": None, "fused": None, **OPTIONS}
        plain["decoupled_weight_decay"] = self.defaults["decoupled_weight_decay"]
        groups = [f"  {names_of(g)}: {shown(g, self.defaults)}" for g in self.param_groups]
        return "\n".join([f"{type(self).__name__}({shown(self.defaults, plain)}", *groups]) + "\n)"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch. A group that fails the checks is not added.

        Instead of ``lr`` the group may have ``lr_factor``, a multiple of the optimizer's ``lr``. If
        there is a core, it has no part in the group.
        """
        self.defaults = {**self._coupling_defaults, **self.defaults}
        if isinstance(param_group, dict):  # torch refuses anything else
            complete(param_group, self.defaults)
            _name_parameters(param_group, self.param_groups)
        super().add_param_group(param_group)
        # After torch has checked the tensors and made a list of them.
        try:
            check_group(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def _complete_groups(self) -> None:
        """Complete the groups that come from elsewhere: assigned, appended, or of AdamW."""
        # In every step, as nothing tells when a group is assigned; it compares keys alone.
        for group in self.param_groups:
            if not group.keys() >= self.defaults.keys() and not is_cores(group):
                complete(group, self.defaults)
                check_group(group)

    def train(self) -> None:
        """Pass on to the core what a schedule-free one needs before it trains."""
        self._switch_core("train")

    def eval(self) -> None:
        """Pass on to the core what a schedule-free one needs before the model is used or saved."""
        self._switch_core("eval")

    def _switch_core(self, mode: str) -> None:
        if hasattr(self.core, mode):
            getattr(self._lend(), mode)()

    def _own_groups(self) -> list[Group]:
        """The groups that no core updates."""
        return [group for group in self.param_groups if not is_cores(group)]

    def follow(self, model: Module) -> None:
        """Update the parameters that a model has now, in the place of those of the same names.

        Call this after ``model.resize_token_embeddings(...)`` in the middle of a training, which
        makes new parameters with more rows, or fewer, and copies the rows that remain. So does this
        with the state; a new row has that of one without a gradient so far.

        Args:
            model: the model of which the optimizer was built, by itself or by param groups with
                names, whose other parameters are the same.

        Raises:
            ValueError: if the groups have no names, a name is none of the model's any more, or a
                parameter is another one that ``core`` updates, or differs in more than its number
                of rows. Nothing has been changed then.
        """
        follow(self.param_groups, self.state, model)
        self._checked.clear()

    @torch.no_grad()
    def forget_rows(self, parameter: Tensor, rows: Tensor | Iterable[int]) -> None:
        """Let the state of some rows be that of rows which never had a gradient.

        Call this where rows begin to stand for something else, as for ids that others replace, and
        set their weights yourself. Averages over all rows are not changed. With parts of a matrix
        on several ranks, each of them has to call it.

        Args:
            parameter: a matrix of the optimizer, whole or a DTensor.
            rows: their numbers in the whole matrix, integers [n], in any order.

        Raises:
            ValueError: if the matrix has no such rows, or is none of the optimizer's; if ``core``
                updates it, or it lies in pieces (``flat_shards``).
        """
        forget_rows(self.param_groups, self.state, parameter, rows)

    def init_state(self) -> None:
        """Create the state of every trainable parameter without performing a step.

        Use this where the state must exist before the first step, for example to load a distributed
        checkpoint into it. Existing states, parameters and gradients are not changed.
        """
        self._complete_groups()
        if self.core is not None:
            cores.init_state(self._lend())
        # torch makes states only for parameters with gradients, and so does _init_group.
        for group in self._own_groups():
            without_grad = [p for p in group["params"] if p.requires_grad and p.grad is None]
            try:
                for p in without_grad:
                    p.grad = p.detach()  # _init_group only asks whether there is a gradient
                self._init_group(group, [], [], [], [], [], [])
            finally:
                for p in without_grad:
                    p.grad = None

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        """Create missing states; collect the tensors of a group that is not coupled.

        The name is torch's: ``torch.compile`` treats the method of this name specially.
        """
        if not group["coupled"]:
            has_complex: bool = super()._init_group(  # type: ignore[no-untyped-call]
                group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
            )
            return has_complex
        for index, p in enumerate(group["params"]):
            if _takes_part(group, p):
                check_parameter(group, index)
                fit_state(group, index, self.state[p])
        return False  # check_parameter has refused complex parameters

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform a single optimization step.

        Args:
            closure: a function that reevaluates the model and returns the loss.

        Returns:
            The loss that the closure returned, or None without a closure.
        """
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # GradScaler sets these where fused=True, and leaves unscaling and skipping to the step.
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        unscale = None if grad_scale is None else 1 / grad_scale

        # 1. What loops and schedules have done since the step before
        self._complete_groups()
        if "factor" not in self._warned and warn_of_lost_factor(self.param_groups):
            self._warned.add("factor")  # no attribute is set, as Dynamo refuses that
        if not ("steps" in self._warned or torch.compiler.is_compiling()) and warn_of_more_steps(
            self.param_groups, self.state
        ):
            self._warned.add("steps")
        # 2. The tensors; whatever is refused is refused before anything has been changed
        coupled, uncoupled = self._collect()
        # 3. The updates; those of others first, which may refuse something, too
        if self.core is not None:
            cores.step(self._lend())
        for group, tensors, has_complex in uncoupled:
            options: Any = {name: group[name] for name in _ADAM_OPTIONS}
            options |= {"grad_scale": grad_scale, "found_inf": found_inf}
            beta1, beta2 = group["betas"]
            adam(*tensors, has_complex=has_complex, beta1=beta1, beta2=beta2, **options)
        update(coupled, unscale, found_inf)
        if unscale is not None:  # as torch's fused kernels do
            for p in dict.fromkeys(matrix.parameter for matrix in coupled):
                if p.grad is not None:
                    p.grad.mul_(unscale.to(p.device))
        return loss

    def _collect(self) -> tuple[list[CoupledMatrix], list[tuple[dict[str, Any], Tensors, bool]]]:
        """Return the coupled matrices; and the other groups, and whether a tensor is complex.

        All errors of coupled groups are raised here, before anything is changed.
        """
        coupled: list[CoupledMatrix] = []
        uncoupled: list[tuple[dict[str, Any], Tensors, bool]] = []
        is_compiling = torch.compiler.is_compiling()
        # Coupled groups first: what they refuse, they refuse before torch makes a state.
        groups = self.param_groups if self.core is None else self._own_groups()
        for group in sorted(groups, key=operator.itemgetter("coupled"), reverse=True):
            tensors: Tensors = ([], [], [], [], [], [])
            if is_compiling or not group["coupled"]:
                has_complex = self._init_group(group, *tensors)
            if not group["coupled"]:
                uncoupled.append((group, tensors, has_complex))
                continue
            for index, p in enumerate(group["params"]):
                if _takes_part(group, p):
                    coupled += self._matrices(group, index, len(coupled), is_compiling)
        return coupled, uncoupled

    def _matrices(
        self, group: dict[str, Any], index: int, number: int, is_checked: bool
    ) -> list[CoupledMatrix]:
        """The coupled matrix of a parameter, or those of which pieces lie in it.

        Its checks and the choice of its kernel are those of the step before if all that they depend
        on is the same.
        """
        p = group["params"][index]
        # What is refused leaves no state behind, not even an empty one.
        now = description(group, p, self.state.get(p, {}))  # None: to be checked in every step
        before, kernel = self._checked.get(number, (None, None))
        if now is None or now != before:
            kernel = None
            if not is_checked:
                check_parameter(group, index)
                fit_state(group, index, self.state[p])
                now = now and description(group, p, self.state[p])  # which may be new
        whole = CoupledMatrix.of(group, p, self.state[p], number)
        if whole.grad.layout == torch.sparse_coo:
            whole = row_sparse.touched(whole)
        matrices = [whole] if p.dim() == 2 else [*flat.matrices(whole)]
        for matrix in matrices:
            matrix.kernel = kernel or kernel_of(matrix)
        if now is not None:
            self._checked[number] = now, whole.kernel
        return matrices

    def __getstate__(self) -> dict[str, Any]:
        """The state that pickle and copy use: torch's, and the core."""
        state: dict[str, Any] = super().__getstate__()
        return state if self.core is None else {**state, "core": cores.pickled(self.core)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what ``__getstate__`` has returned, or parts of it."""
        if "core" in state:
            state = {**state, "core": cores.unpickled(*state["core"])}
        # torch's Adam looks for what is its own in all groups that it gets.
        groups = state["param_groups"]
        own = {"param_groups": [group for group in groups if not is_cores(group)]}
        super().__setstate__({**state, **own})  # type: ignore[no-untyped-call]
        self.param_groups = groups
        self.defaults = {**self._coupling_defaults, **self.defaults}
        self._warned, self._checked = set[str](), dict[int, Any]()

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the groups, as in torch; of ``flat_shards`` only that there are.

        The core's states are as its own ``state_dict`` has them.
        """
        self._complete_groups()

        def as_saved(_: Any, saved: dict[str, Any]) -> None:
            if self.core is not None:
                keys = [k for g in saved["param_groups"] if is_cores(g) for k in g["params"]]
                states = cores.lend_own_state(self._lend()).state_dict()["state"]
                saved["state"] |= {keys[i]: states[i] for i in states}
            if any(group.get("flat_shards") for group in self.param_groups):
                for group in saved["param_groups"]:  # process groups cannot be saved
                    group["flat_shards"] = bool(group.get("flat_shards"))

        hook = self.register_state_dict_post_hook(as_saved, prepend=True)
        try:
            saved: dict[str, Any] = super().state_dict()
        finally:
            hook.remove()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of ``torch.optim.Adam(W)``, or of another Coupled Adam.

        A second moment that was kept for every row, [V, H], is replaced by its mean over the rows,
        [H]: exactly the state that Coupled Adam would have, so that it can continue a training with
        AdamW after any step. With ``row_exponent``, the mean of each row becomes its
        ``row_exp_avg_sq``; of a checkpoint of Coupled Adam all rows start with the mean of
        ``exp_avg_sq``, except for those that never had a gradient, whose ``exp_avg`` is zero. With
        ``flat_shards`` nothing is converted: the state must be that of the same pieces.

        As in torch, the options of the loaded groups replace the optimizer's own, with a warning if
        this makes it another optimizer. Options that the checkpoint does not contain, such as ours
        in one of torch, keep their values.

        Args:
            state_dict: as returned by ``state_dict()``; it is not changed.

        Raises:
            ValueError: if a group or a state is damaged, or does not fit. The optimizer is then
                unchanged.
        """
        check_structure(state_dict)
        self._complete_groups()
        moments: dict[Tensor, dict[str, Tensor]] = {}

        def before(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            adapted, second_moments = adapt(self.param_groups, saved)
            moments.update(second_moments)
            # torch's load would cast the core's states, so it loads them itself, and torch the rest
            return adapted if self.core is None else cores.load(self._lend(), adapted)

        def after(_: Any) -> None:
            if self.core is not None:
                loaded = iter(self.core.param_groups)
                self.param_groups = [next(loaded) if is_cores(g) else g for g in self.param_groups]
                self.state.update(self.core.state)
            for p, second_moments in moments.items():
                # torch has cast every state to its parameter's dtype, moments [H] among them, and
                # has kept the strides that exp_avg was saved with: they shall be the parameter's.
                self.state[p].update(second_moments)
                exp_avg = self.state[p].get("exp_avg")
                if exp_avg is not None and exp_avg.stride() != p.stride():
                    strided = torch.empty_like(p, dtype=exp_avg.dtype)
                    self.state[p]["exp_avg"] = strided.copy_(exp_avg)

        # After the user's hooks, which see the checkpoint; before those that see what is loaded.
        hooks = [
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(after, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()


class CoupledAdamW(CoupledAdam, torch.optim.AdamW):
    r"""AdamW in which all rows of an embedding matrix share one second moment.

    A drop-in replacement for :class:`torch.optim.AdamW`. Weight decay is decoupled; everything else
    is as in :class:`CoupledAdam`. This is the optimizer of the paper's experiments.

    Examples:
        >>> from coupled_adam import CoupledAdamW
        >>> optimizer = CoupledAdamW(model, lr=6e-4, betas=(0.9, 0.95), fused=True)
        >>> optimizer = CoupledAdamW(model, lr=6e-4, embeddings="lean", steps=10_000, fused=True)

    Args:
        params, groups: these and all others as in :class:`CoupledAdam`, with the defaults of
            :class:`torch.optim.AdamW`.
    """

    def __init__(
        self,
        params: ParamsT | Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        # By name, since frameworks such as litgpt pass on what they find in the signature.
        coupled: bool | None = None,
        second_moment_scale: float | None = None,
        row_exponent: float | None = None,
        zero_sum: bool | None = None,
        vocab_dim: int | None = None,
        stochastic_rounding: bool | None = None,
        embeddings: Embeddings = "coupled",
        vocab_size: int | Iterable[int] | None = None,
        steps: int | None = None,
        core: Core | None = None,
        **groups: Unpack[GroupOptions],
    ) -> None:
        options = {name: x for name, x in locals().items() if name not in ("self", "__class__")}
        super().__init__(**options.pop("groups"), **options, decoupled_weight_decay=True)


def _refuse_what_groups_set(
    coupling: Mapping[str, Any], group_options: Mapping[str, Any], knows_matrices: bool
) -> None:
    """Raise ValueError for an argument that has no effect, as the coupled groups set it.

    ``group_options`` are those of the coupled groups, or of ``embeddings``; ``knows_matrices`` is
    whether a model, or ``vocab_size``, says which matrices are coupled.
    """
    for name, value in coupling.items():
        if name in ("coupled", "vocab_dim") and knows_matrices:
            raise ValueError(
                f"{name}={value!r} has no effect beside a model or vocab_size=, which say which "
                "matrices embed tokens and how they are stored: leave it out, or name them, as in "
                "param_groups(model, tables={'embed.W_E': 0, 'unembed.W_U': 1}), 1 for [H, V]"
            )
        if name in group_options:
            raise ValueError(
                f"{name}={value!r} has no effect, as embeddings= sets {name} to "
                f"{group_options[name]!r}: change it there, as in "
                f"embeddings=LEAN | {{{name!r}: {value!r}}}"
            )


def _name_parameters(group: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Give a group that is added later names if the others have some, as torch demands."""
    params = group["params"]
    # torch itself refuses a set, since its order may change.
    if isinstance(params, set) or not others or "param_names" not in others[0]:
        return
    group["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    if not any(isinstance(p, tuple) for p in params):
        group.setdefault("param_names", [f"parameter {i}" for i in range(len(params))])


def _takes_part(group: dict[str, Any], p: Tensor) -> bool:
    """Whether there is a gradient, or may be one on another rank that has a part of the matrix."""
    if p.grad is not None:
        return True
    return p.requires_grad and (sharded.is_shared(p) or p in flat.shards_of(group))
