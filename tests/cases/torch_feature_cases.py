"""Features of torch that users combine with distributed tensors: transforms, hooks, copies, modes, numbers and names. Each
program is plain torch, with the same results under every layout as on one device.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from case_lists import CaseList, check_under_layouts, make_values
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

CASES = CaseList()
A, B, C = make_values(5, 6) / 8, make_values(6, 7, seed=1) / 8, make_values(6, seed=2) / 8


def program(*tensors: torch.Tensor) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a case that runs the program on these tensors under all layouts."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES[fn.__name__] = partial(check_under_layouts, fn, *tensors, cloned=True, gradients=False)
        return fn

    return add


def make_leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


# --- transforms ---------------------------------------------------------------------------------------------------------
@program(A, B)
def vmap(x: Any, y: Any) -> Any:
    return torch.vmap(lambda row: row @ y)(x), torch.vmap(lambda c: c.softmax(0), in_dims=1, out_dims=1)(x)


@program(A, B)
def gradients_per_sample(x: Any, w: Any) -> Any:
    return torch.vmap(torch.func.grad(lambda w, row: (row @ w).square().sum()), in_dims=(None, 0))(w, x)


@program(C)
def jacobians(x: Any) -> Any:
    def fn(x: Any) -> Any:
        return x.sin() * x.sum()

    made = torch.func.jacrev(fn)(x), torch.func.jacfwd(fn)(x), torch.func.jvp(fn, (x,), (torch.ones_like(x),))
    return made, torch.autograd.functional.jacobian(fn, x), torch.func.hessian(lambda x: fn(x).sum())(x)


@program(A)
def forward_mode(x: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, torch.ones_like(x)).sin() * 2).tangent


@program(A)
def second_derivatives(x: Any) -> Any:
    x = make_leaf(x)
    (first,) = torch.autograd.grad((x.sin() * x.sum()).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


@program(A)
def unused_gradients(x: Any) -> Any:
    x, other = make_leaf(x), make_leaf(x)
    return torch.autograd.grad((x * 2).sum(), [x, other], allow_unused=True, materialize_grads=True)


# --- functions and hooks of autograd ------------------------------------------------------------------------------------
class Exponential(torch.autograd.Function):
    """An exponential with twice its gradient, and a second result without a gradient."""

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), x.sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x.exp() * 2


class Tripled(torch.autograd.Function):
    """Triples a tensor in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


@program(A)
def functions(x: Any) -> Any:
    x = make_leaf(x)
    y, total = Exponential.apply(x)
    tripled = Tripled.apply(x * 1)
    (y + tripled).sum().backward()
    return y, total, tripled, x.grad


@program(A)
def hooks(x: Any) -> Any:
    x, seen, module = make_leaf(x), [], nn.Identity()
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    module.register_forward_hook(lambda m, given, made: made * 2)
    module.register_full_backward_hook(lambda m, given, made: (given[0] * 5,))
    y = module(x)
    y.register_hook(lambda g: g * 3)
    y.retain_grad()
    torch.autograd.graph.register_multi_grad_hook((y, x), lambda grads: seen.extend(g.sum().item() for g in grads))
    y.exp().sum().backward()
    return x.grad, y.grad, seen


@program(A)
def saved_tensors_hooks_and_save_on_cpu(x: Any) -> Any:
    x = make_leaf(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        y = (x.exp() * x).sum()
    with torch.autograd.graph.save_on_cpu():
        z = (x.sin() * x).sum()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        v = (x.cos() * x).sum()
    (y + z + v + offload_wrapper(nn.Tanh())(x).sum()).backward()
    return x.grad


@program(A)
def checkpoints(x: Any) -> Any:
    def layer(x: Any) -> Any:
        return F.dropout((x @ x.t()).sin(), 0.3)

    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    found = []
    for options in ({"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": contexts}):
        x = make_leaf(x)
        checkpoint(layer, x, **options).sum().backward()
        found.append(x.grad)
    checkpoint_sequential([torch.sin, torch.exp, torch.tanh], 2, x, use_reentrant=False).sum().backward()
    return found, x.grad


# --- copies, files, words -----------------------------------------------------------------------------------------------
@program(A)
def copies(x: Any) -> Any:
    f = io.BytesIO()
    torch.save({"x": x, "p": nn.Parameter(x)}, f)
    f.seek(0)
    loaded = torch.load(f, weights_only=False)
    deep, shallow, pickled = copy.deepcopy(make_leaf(x)), copy.copy(x), pickle.loads(pickle.dumps(x))
    return deep, deep.requires_grad, shallow, pickled, loaded["x"], loaded["p"], isinstance(loaded["p"], nn.Parameter)


@program(A)
def strings_and_python_numbers(x: Any) -> Any:
    first = x[0, 0].item()
    numbers = len(x), [row.sum().item() for row in x], x.tolist(), bool((x > 100).any()), int(x[0, 0] * 8), first in x
    words = f"{x.sum().item():.3f}", f"{x.sum():.3f}", type(repr(x)), type(str(make_leaf(x) * 2))
    facts = x.t().stride(), x.t().is_contiguous(), x.nbytes, x.nelement(), x.type(torch.float32).dtype, x.is_leaf, x.device.type
    return numbers, words, facts


@program(make_values(1))
def conversions_of_a_scalar(x: Any) -> Any:
    x = x.sum()
    return x.item(), float(x), int(x), bool(x), x.tolist(), round(x.item()), -x, abs(x), x.reshape(1), x.expand(3), x.view(1, 1)


@program(A)
def comparisons(x: Any) -> Any:
    torch.testing.assert_close(x, x * 1.0)
    return torch.equal(x, x * 1), torch.allclose(x, x + 1e-12), x.equal(x + 1), torch.is_nonzero(x.sum() + 100)


# --- modes --------------------------------------------------------------------------------------------------------------
@program(A)
def inference_mode(x: Any) -> Any:
    with torch.inference_mode():
        y = x * 2
        y.view(-1).add_(1)
        w = y.t() @ y
    return y.is_inference(), y + 1, w + 1


@program(A.float())
def autocast(x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, x)
        return y.dtype, F.softmax(y, -1).dtype, F.mse_loss(y, y * 0).dtype


class LogOperators(TorchDispatchMode):
    """Logs the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class PassThroughMode(TorchFunctionMode):
    """A function mode that passes calls unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@program(A)
def dispatch_and_function_modes(x: Any) -> Any:
    with LogOperators() as log, PassThroughMode():
        y = torch.sin(x) * 2
    return y, log.names[:2]


# --- writes -------------------------------------------------------------------------------------------------------------
@program(A)
def writes_through_views(x: Any) -> Any:
    x.view(-1)[3:20] = 1
    x.t()[2] = 4
    x.narrow(0, 1, 3).mul_(2)
    x.select(1, 2).zero_()
    x.diagonal().fill_(9)
    x.split(3)[1].add_(10)
    x.chunk(2, 1)[1].sub_(1)
    x.view(5, 2, 3)[:, 0].add_(1)
    x.as_strided((2, 2), (6, 1)).add_(1)
    x.data[1:3].fill_(7)
    x.detach().add_(1)
    return x


@program(A)
def writes_by_index(x: Any) -> Any:
    x[1:3, 2] = 5
    x[:, -1] = x[:, 0]
    x[x > 1] = 0.5
    x[[0, 2]] = 7
    x[..., 1:3] *= 2
    x[x[:, 0] > 0.1] = 3
    x[2:4] += x[0:2]
    return x, x[:, None], x[[0, 1], [2, 3]], x[::2, ::3], x[4:], x[1:1], x[-3:-1]


@program(A)
def gradients_of_writes_through_views(x: Any) -> Any:
    x = make_leaf(x)
    y = x * 1
    y[1:3] = 0
    y[:, 2].mul_(3)
    y.view(-1)[4:9].add_(1)
    y.t()[0] = y.t()[1]
    y.square().sum().backward()
    return x.grad, y


# --- modules and training -----------------------------------------------------------------------------------------------
def linear(x: torch.Tensor) -> nn.Linear:
    module = nn.Linear(6, 5, bias=False, dtype=torch.float64)
    module.weight = nn.Parameter(x)
    return module


@program(A)
def modules_are_copied_converted_and_loaded(x: Any) -> Any:
    module = linear(x)
    twin = copy.deepcopy(module)
    twin.weight.data.zero_()
    assigned = linear(x * 0)
    assigned.load_state_dict({"weight": x}, assign=True)
    module.load_state_dict({"weight": x * 2})
    half = copy.deepcopy(module).half()
    return module.weight, twin.weight, assigned.weight, half.weight, torch.func.functional_call(module, {"weight": x}, (x,))


@program(A)
def averaged_models(x: Any) -> Any:
    module = linear(x)
    mean = swa_utils.AveragedModel(module)
    moving = swa_utils.AveragedModel(module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        mean.update_parameters(module)
        moving.update_parameters(module)
        module.weight.data.mul_(2)
    return mean.module.weight, moving.module.weight


@program(A)
def weight_norm(x: Any) -> Any:
    module = nn.utils.parametrizations.weight_norm(linear(x))
    return module(x), module.parametrizations.weight.original0


@program(A, C)
def norms_and_clipping(x: Any, c: Any) -> Any:
    parameters = [nn.Parameter(x), nn.Parameter(c)]
    for p in parameters:
        p.grad = p.detach() * 2
    ways = [nn.utils.get_total_norm([x, c], p, foreach=way) for p in (1.0, 2.0, float("inf")) for way in (True, False)]
    total = nn.utils.clip_grad_norm_(parameters, 0.7)
    nn.utils.clip_grad_value_(parameters, 0.1)
    vector = nn.utils.parameters_to_vector([x, c])
    nn.utils.vector_to_parameters(vector * 2, [x, c])
    return ways, total, [p.grad for p in parameters], vector, x, c


@program(A.float())
def gradient_scaling(x: Any) -> Any:
    p = nn.Parameter(x)
    optimizer, scaler = torch.optim.SGD([p], lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 2.0):
        optimizer.zero_grad()
        scaler.scale(p.square().sum() * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p], 1.0)
        scaler.step(optimizer)
        scaler.update()
    return p, scaler.get_scale()
