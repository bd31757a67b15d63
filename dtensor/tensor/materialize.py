"""``materialize``: a model built on the meta device gets memory, module by module, and the values that one device would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import DTensorError
from .distribute import distribute_at, own_tensors
from .dtensor import DTensor
from .stale_params import replacing

M = TypeVar("M", bound=nn.Module)
_INITIALISERS = ("reset_parameters", "_reset_parameters")  # torch's own modules have one or the other


def materialize(module: M, *, init: Callable[[nn.Module], object] | None = None, device: str | torch.device | None = None) -> M:
    """``module``, in place, its parameters and buffers on the meta device replaced by real ones, initialised.

    Module by module, children first and in the order they were registered: memory for the tensors the module itself has (of a
    DTensor only this rank's piece), then ``init(module)``. That is the order in which constructors draw random numbers, so with
    the seed of a model built on one device the values are that model's, whatever the mesh and the placements. Not where a
    constructor copies a module that it has made (``nn.TransformerEncoder`` and its layers): each copy gets values of its own.
    Tensors with values keep them. What ``init`` puts in a DTensor's place is laid out as that was.

    Args:
        module: built under ``torch.device("meta")``, and then distributed: by :func:`parallelize_module`, :func:`fully_shard`,
            :func:`replicate` or ``distribute_module``.
        init: sets the values of the tensors that a module itself has; called for each module that has, or has below it,
            tensors on meta. Default: the module's ``reset_parameters()`` or ``_reset_parameters()``, where it has one; if it has
            no tensors of its own, only where its constructor calls that too.
        device: of tensors that are not distributed; default that of the first DTensor's mesh, or ``"cpu"``.

    Raises:
        DTensorError: without ``init``, before anything is done: a module has tensors on meta and no ``reset_parameters()``, so
            nobody would set them (buffers computed in a constructor are such); or a parameter is two modules', so that it is not
            known whose values it should have.

    Memory: this rank's pieces, and while one parameter is drawn a whole one of that shape; under ``random_mode("counter")``, its
    piece. No communication but that of ``init``. Make optimizers afterwards: parameters are new objects. Tied ones stay tied.

    >>> import dtensor as dt
    >>> from dtensor.parallel import ColwiseParallel, parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    >>> model = parallelize_module(model, mesh, {"0": ColwiseParallel()})
    >>> _ = torch.manual_seed(0)
    >>> model = materialize(model)
    >>> _ = torch.manual_seed(0)
    >>> alone = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    >>> torch.equal(model[0].weight.full_tensor(), alone[0].weight), torch.equal(model[1].weight, alone[1].weight)
    (True, True)
    """
    if init is None:
        check_initialisers(module)
    places = [(held, name, x) for inner in module.modules() for held, name, x in own_tensors(inner)]
    made: dict[int, tuple[Tensor, Any]] = {}  # by what stood there, which is kept so that no other takes its id
    device = torch.device(device) if device is not None else _device_of(module)
    with torch.no_grad(), replacing(module.modules(), "materialize"):
        for inner in _unfinished(module):
            _allocate(inner, device, made)
            if init is not None:
                init(inner)
            else:
                _reset(inner, made)
        for held, name, x in places:
            if x.is_meta and isinstance(x, DTensor):
                _keep_layout(held, name, made[id(x)][1])
    return module


def check_values(modules: Sequence[nn.Module], places: set[tuple[int, str]]) -> None:
    """Raises DTensorError, naming them: parameters at these places (ids of modules, names) are on the meta device."""
    meta = [
        f"{prefix}.{name}".lstrip(".")
        for module in modules
        for prefix, inner in module.named_modules()
        for name, parameter in inner._parameters.items()
        if parameter is not None and parameter.is_meta and (id(inner), name) in places
    ]
    if meta:
        shown = ", ".join(meta[:8]) + (f", and {len(meta) - 8} more" if len(meta) > 8 else "")
        raise DTensorError(
            f"parameters are still on the meta device, without values: {shown}; initialize them first: "
            "materialize(model), or model.to_empty(device=...) and your own initialization"
        )


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _unfinished(module: nn.Module) -> list[nn.Module]:
    inners = _children_first(module, set())
    return [inner for inner in inners if any(x.is_meta for part in inner.modules() for _, _, x in own_tensors(part))]


def check_initialisers(module: nn.Module) -> None:
    """Raises DTensorError, naming them: tensors on the meta device that nobody would set, or two modules would."""
    names = {inner: name for name, inner in module.named_modules()}
    unset: list[str] = []
    kinds: dict[str, None] = {}
    owners: dict[int, list[str]] = {}
    for inner in _unfinished(module):
        meta = [(f"{names[inner]}.{name}".lstrip("."), id(x)) for _, name, x in own_tensors(inner) if x.is_meta]
        if _initialiser(inner) is None:
            unset += [name for name, _ in meta]
            kinds |= {type(inner).__name__: None} if meta else {}
        for name, x in meta:
            owners.setdefault(x, []).append(name)
    advice = (
        "Give materialize(module, init=f) or shard_model(module, spec, init_fn=f), f(m) setting the tensors that m itself has"
    )
    if unset:
        shown = ", ".join(unset[:8]) + (", ..." if len(unset) > 8 else "")
        raise DTensorError(f"nothing initializes {shown}: {', '.join(kinds)} without reset_parameters(). {advice}")
    for tied in owners.values():
        if len(tied) > 1:
            raise DTensorError(
                f"{' and '.join(tied)} are one shared parameter, and it is not known which module initializes it. {advice}"
            )


def _initialiser(module: nn.Module) -> Callable[[], object] | None:
    """What gives ``module`` the values that its constructor does.

    A module with tensors of its own has values from nowhere else. One without draws numbers for its children again, which is
    what its constructor did only if it names that method.
    """
    name = next((name for name in _INITIALISERS if callable(getattr(module, name, None))), None)
    if name is None or not (any(True for _ in own_tensors(module)) or _constructor_names(type(module), name)):
        return None
    return getattr(module, name)


def _constructor_names(kind: type, method: str) -> bool:
    codes = (getattr(vars(base).get("__init__"), "__code__", None) for base in kind.__mro__)
    return any(method in code.co_names for code in codes if code is not None)


def _reset(module: nn.Module, made: dict[int, tuple[Tensor, Any]]) -> None:
    """Run the initialiser; what had values before keeps them, also where a parent sets all that is below it."""
    initialise = _initialiser(module)
    if initialise is None:
        return
    new = {id(value) for _, value in made.values()}
    below = [place for part in module.modules() for place in own_tensors(part)]
    kept = [(held, name, x, x.detach().clone()) for held, name, x in below if not x.is_meta and id(x) not in new]
    initialise()
    for held, name, x, value in kept:
        held[name] = x
        x.copy_(value)


def _keep_layout(held: dict[str, Any], name: str, made: DTensor) -> None:
    """A plain tensor that was put in the place of a DTensor becomes one, with its layout."""
    now = held.get(name)
    if now is made or now is None or isinstance(now, DTensor):
        return
    distribute_at(held, name, made.device_mesh, made.placements)
    held[name].__dict__.update(made.__dict__ | held[name].__dict__)


def _device_of(module: nn.Module) -> torch.device:
    meshes = (x.device_mesh for inner in module.modules() for _, _, x in own_tensors(inner) if isinstance(x, DTensor))
    return torch.device(next((mesh.device_type for mesh in meshes), "cpu"))


def _kept_on(x: Tensor, device: torch.device) -> str | torch.device:
    """Where the pieces of ``x`` belong: not with the mesh if they are offloaded."""
    return x.__dict__.get("_data_parallel", x.device_mesh.device_type) if isinstance(x, DTensor) else device


def _allocate(module: nn.Module, device: torch.device, made: dict[int, tuple[Tensor, Any]]) -> None:
    for held, name, x in own_tensors(module):
        if not x.is_meta:
            continue
        if id(x) not in made:
            value: Tensor = torch.empty_like(x, device=_kept_on(x, device))
            if isinstance(x, nn.Parameter):
                value = nn.Parameter(value, requires_grad=x.requires_grad)
            value.__dict__.update(x.__dict__ | value.__dict__)  # marks of those who distributed it
            made[id(x)] = x, value
        held[name] = made[id(x)][1]
    weights = module.__dict__.get("_flat_weights_names")
    if weights is not None:  # recurrent modules keep a list of their weights
        module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in weights]
