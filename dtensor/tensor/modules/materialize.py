"""Materialize a model that was built on the meta device: allocate memory module by module, and initialize it as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...base.tensor_tree import own_tensors
from ...errors import DTensorError
from ..dtensor import DTensor
from .distribute_module import distribute_at
from .stale_params import replacing_params

M = TypeVar("M", bound=nn.Module)
_INITIALIZERS = ("reset_parameters", "_reset_parameters")  # torch's own modules have one of them


def materialize(module: M, *, init: Callable[[nn.Module], object] | None = None, device: str | torch.device | None = None) -> M:
    """Return ``module`` after its parameters and buffers on the meta device were replaced by initialized ones.

    Modules are handled one by one, children first and in the order of their registration: memory is allocated for the tensors of
    the module itself (for a DTensor only this rank's local tensor), then ``init(module)`` runs. Constructors draw random numbers
    in that order. So with the seed of a model built on one device the values are those of that model, whatever the mesh and the
    placements. An exception is a constructor that copies a module (``nn.TransformerEncoder`` and its layers): each copy gets
    values of its own. Tensors with values keep them. A plain tensor that ``init`` puts in the place of a DTensor gets the layout
    of that DTensor.

    Args:
        module: built under ``torch.device("meta")``, and then distributed: by :func:`parallelize_module`, :func:`fully_shard`,
            :func:`replicate` or ``distribute_module``.
        init: sets the values of the tensors of a module itself. It is called for each module with tensors on meta, in itself or
            in a submodule. Default: the module's ``reset_parameters()`` or ``_reset_parameters()``, if it has one. For a module
            without tensors of its own, only if its constructor calls that method too.
        device: of tensors that are not distributed; default that of the first DTensor's mesh, or ``"cpu"``.

    Raises:
        DTensorError: without ``init``, before any change: a module has tensors on meta and no ``reset_parameters()`` (for example
            buffers computed in a constructor); or a parameter belongs to two modules, so that it is unclear which one initializes
            it.

    Memory: this rank's local tensors, and temporarily one full parameter while it is drawn; under ``random_mode("counter")`` only
    its local tensor. No communication except that of ``init``. Make optimizers afterwards: parameters are new objects. Tied ones
    stay tied.

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
        check_initializers(module)
    old_places = [(holder, name, x) for submodule in module.modules() for holder, name, x in own_tensors(submodule)]
    new_by_id: dict[int, tuple[Tensor, Any]] = {}  # id of the old tensor -> (old, new); the old one keeps its id in use
    device = torch.device(device) if device is not None else _default_device(module)
    with torch.no_grad(), replacing_params(module.modules(), "materialize"):
        for submodule in _modules_on_meta(module):
            _allocate_tensors(submodule, device, new_by_id)
            if init is not None:
                init(submodule)
            else:
                _initialize(submodule, new_by_id)
        for holder, name, x in old_places:
            if x.is_meta and isinstance(x, DTensor):
                _restore_layout(holder, name, new_by_id[id(x)][1])
    return module


def check_not_on_meta(modules: Sequence[nn.Module], places: set[tuple[int, str]]) -> None:
    """Raise DTensorError if the parameters at ``places`` (ids of modules, names) are on the meta device."""
    meta = [
        f"{prefix}.{name}".lstrip(".")
        for module in modules
        for prefix, inner in module.named_modules()
        for name, parameter in inner._parameters.items()
        if parameter is not None and parameter.is_meta and (id(inner), name) in places
    ]
    if meta:
        listed = ", ".join(meta[:8]) + (f", and {len(meta) - 8} more" if len(meta) > 8 else "")
        raise DTensorError(
            f"parameters are still on the meta device, without values: {listed}; initialize them first: "
            "materialize(model), or model.to_empty(device=...) and your own initialization"
        )


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of a tree, each once and after its children."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _modules_on_meta(module: nn.Module) -> list[nn.Module]:
    """Return the modules with tensors on meta, in themselves or in a submodule, children first."""
    inners = _children_first(module, set())
    return [inner for inner in inners if any(x.is_meta for part in inner.modules() for _, _, x in own_tensors(part))]


def check_initializers(module: nn.Module) -> None:
    """Raise DTensorError, with their names, if tensors on meta have no module that initializes them, or two."""
    module_names = {submodule: name for name, submodule in module.named_modules()}
    unset: list[str] = []
    class_names: dict[str, None] = {}
    names_by_id: dict[int, list[str]] = {}
    for submodule in _modules_on_meta(module):
        meta_tensors = [
            (f"{module_names[submodule]}.{name}".lstrip("."), id(x)) for _, name, x in own_tensors(submodule) if x.is_meta
        ]
        if _find_initializer(submodule) is None:
            unset += [name for name, _ in meta_tensors]
            class_names |= {type(submodule).__name__: None} if meta_tensors else {}
        for name, x in meta_tensors:
            names_by_id.setdefault(x, []).append(name)
    advice = (
        "Give materialize(module, init=f) or shard_model(module, spec, init_fn=f), f(m) setting the tensors that m itself has"
    )
    if unset:
        listed = ", ".join(unset[:8]) + (", ..." if len(unset) > 8 else "")
        raise DTensorError(f"nothing initializes {listed}: {', '.join(class_names)} without reset_parameters(). {advice}")
    for tied in names_by_id.values():
        if len(tied) > 1:
            raise DTensorError(
                f"{' and '.join(tied)} are one shared parameter, and it is not known which module initializes it. {advice}"
            )


def _find_initializer(module: nn.Module) -> Callable[[], object] | None:
    """Return the method that initializes ``module`` like its constructor does; None if there is none.

    A module with tensors of its own is initialized by no other module. A module without such tensors would initialize its
    children again, which its constructor did only if it names that method.
    """
    name = next((name for name in _INITIALIZERS if callable(getattr(module, name, None))), None)
    if name is None or not (any(True for _ in own_tensors(module)) or _constructor_calls(type(module), name)):
        return None
    return getattr(module, name)


def _constructor_calls(kind: type, method: str) -> bool:
    """Return True if a constructor of the class ``kind`` refers to the initializer ``method``."""
    codes = (getattr(vars(base).get("__init__"), "__code__", None) for base in kind.__mro__)
    return any(method in code.co_names for code in codes if code is not None)


def _initialize(module: nn.Module, new_by_id: dict[int, tuple[Tensor, Any]]) -> None:
    """Run the initializer of a module on its allocated tensors; tensors that had values keep them, also in submodules."""
    initialize = _find_initializer(module)
    if initialize is None:
        return
    new_ids = {id(value) for _, value in new_by_id.values()}
    own_and_inner = [place for part in module.modules() for place in own_tensors(part)]
    saved = [(holder, name, x, x.detach().clone()) for holder, name, x in own_and_inner if not x.is_meta and id(x) not in new_ids]
    initialize()
    for holder, name, x, value in saved:
        holder[name] = x
        x.copy_(value)


def _restore_layout(holder: dict[str, Any], name: str, original: DTensor) -> None:
    """Distribute a plain tensor, which an initializer assigned in place of the DTensor ``original``, like ``original``."""
    current = holder.get(name)
    if current is original or current is None or isinstance(current, DTensor):
        return
    distribute_at(holder, name, original.device_mesh, original.placements)
    holder[name].__dict__.update(original.__dict__ | holder[name].__dict__)


def _default_device(module: nn.Module) -> torch.device:
    """Return the device of the first DTensor's mesh, or the CPU."""
    meshes = (x.device_mesh for inner in module.modules() for _, _, x in own_tensors(inner) if isinstance(x, DTensor))
    return torch.device(next((mesh.device_type for mesh in meshes), "cpu"))


def _storage_device(x: Tensor, device: torch.device) -> str | torch.device:
    """Return the device of the local tensors of ``x``: for offloaded parameters not that of the mesh."""
    return x.__dict__.get("_data_parallel", x.device_mesh.device_type) if isinstance(x, DTensor) else device


def _allocate_tensors(module: nn.Module, device: torch.device, new_by_id: dict[int, tuple[Tensor, Any]]) -> None:
    """Replace the meta tensors of ``module`` itself by uninitialized ones, recorded in ``new_by_id``."""
    for holder, name, x in own_tensors(module):
        if not x.is_meta:
            continue
        if id(x) not in new_by_id:
            value: Tensor = torch.empty_like(x, device=_storage_device(x, device))
            if isinstance(x, nn.Parameter):
                value = nn.Parameter(value, requires_grad=x.requires_grad)
            value.__dict__.update(x.__dict__ | value.__dict__)  # attributes that functions which distributed it have set
            new_by_id[id(x)] = x, value
        holder[name] = new_by_id[id(x)][1]
    weight_names = module.__dict__.get("_flat_weights_names")
    if weight_names is not None:  # recurrent modules keep a list of their weights
        module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in weight_names]
