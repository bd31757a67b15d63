"""Stub of tensor methods: ``python tests/support/tensor_methods_stub.py`` prints ``dtensor/base/tensor_methods.pyi``.

torch declares that methods of ``torch.Tensor`` return a ``Tensor``, also for subclasses. The stub declares the same methods, with
the same parameters, and results of the subclass. ``make stubs`` writes it from the installed torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

TORCH = Path(torch.__file__).parent
STUB = Path(__file__).parents[2] / "dtensor" / "base" / "tensor_methods.pyi"

_HEAD = '''"""Tensor methods: ``make stubs`` writes this file from the types of torch {version}; do not edit it.

Type checkers read it, Python does not. A method that returns a ``Tensor`` for torch returns the class of ``self`` here.
"""

# Classes of several results are not torch's: those are final. Overloads are torch's.
# mypy: disable-error-code="override, overload-overlap"
# ruff: noqa: N815

from builtins import bool as _bool
from builtins import complex as _complex
from builtins import float as _float
from builtins import int as _int
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar, overload

import torch
from torch import Generator, SymInt, Tensor, memory_format
from torch import device as _device
from torch import dtype as _dtype
from torch import layout as _layout
from torch._C import _Index
from torch._prims_common import DeviceLikeType
from torch.storage import TypedStorage, UntypedStorage
from torch.types import IntLikeType, Number, Storage, _size, _symsize
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")

'''

# Methods that torch writes in Python or declares without types. A strict checker refuses a call of a method without types.
_PYTHON_METHODS = """
def __rsub__(self, other: Tensor | Number | _complex) -> Tensor: ...
def __rtruediv__(self, other: Tensor | Number | _complex) -> Tensor: ...
def __rmod__(self, other: Tensor | Number | _complex) -> Tensor: ...
def __rpow__(self, other: Tensor | Number | _complex) -> Tensor: ...
def __floordiv__(self, other: Tensor | Number) -> Tensor: ...
def __rfloordiv__(self, other: Tensor | Number) -> Tensor: ...
def __rlshift__(self, other: Tensor | Number | _complex) -> Tensor: ...
def __rrshift__(self, other: Tensor | Number | _complex) -> Tensor: ...
def __rmatmul__(self, other: Tensor) -> Tensor: ...
def __itruediv__(self, other: Tensor | Number | _complex) -> Tensor: ...
def __ipow__(self, other: Tensor | Number | _complex) -> Tensor: ...
def cfloat(self, *, memory_format: memory_format | None = None) -> Tensor: ...
def cdouble(self, *, memory_format: memory_format | None = None) -> Tensor: ...
def apply_(self, callable: Callable[[Any], Any]) -> Tensor: ...
def map_(self, other: Tensor, callable: Callable[[Any, Any], Any]) -> Tensor: ...
def map2_(self, x: Tensor, y: Tensor, callable: Callable[[Any, Any, Any], Any]) -> Tensor: ...
def tolist(self) -> Any: ...
def share_memory_(self) -> Tensor: ...
def __pos__(self) -> Tensor: ...
def __len__(self) -> _int: ...
def __iter__(self) -> Iterator[Tensor]: ...
def __reversed__(self) -> Tensor: ...
def __hash__(self) -> _int: ...
def register_hook(self, hook: Callable[[Self], Tensor | None]) -> RemovableHandle: ...
def register_post_accumulate_grad_hook(self, hook: Callable[[Self], None]) -> RemovableHandle: ...
def norm(
    self,
    p: _float | str | None = "fro",
    dim: _int | Sequence[_int] | None = None,
    keepdim: _bool = False,
    dtype: _dtype | None = None,
) -> Tensor: ...
def split(self, split_size: _int | SymInt | Sequence[_int | SymInt] | Tensor, dim: _int = 0) -> tuple[Tensor, ...]: ...
@overload
def unique(
    self,
    sorted: _bool = True,
    return_inverse: Literal[False] = False,
    return_counts: Literal[False] = False,
    dim: _int | None = None,
) -> Tensor: ...
@overload
def unique(
    self, sorted: _bool = True, return_inverse: _bool = False, return_counts: _bool = False, dim: _int | None = None
) -> Any: ...
@overload
def unique_consecutive(
    self, return_inverse: Literal[False] = False, return_counts: Literal[False] = False, dim: _int | None = None
) -> Tensor: ...
@overload
def unique_consecutive(self, return_inverse: _bool = False, return_counts: _bool = False, dim: _int | None = None) -> Any: ...
def unflatten(self, dim: _int | str, sizes: Sequence[_int | SymInt]) -> Tensor: ...
def stft(
    self,
    n_fft: _int,
    hop_length: _int | None = None,
    win_length: _int | None = None,
    window: Tensor | None = None,
    center: _bool = True,
    pad_mode: str = "reflect",
    normalized: _bool = False,
    onesided: _bool | None = None,
    return_complex: _bool | None = None,
    align_to_window: _bool | None = None,
) -> Tensor: ...
def istft(
    self,
    n_fft: _int,
    hop_length: _int | None = None,
    win_length: _int | None = None,
    window: Tensor | None = None,
    center: _bool = True,
    normalized: _bool = False,
    onesided: _bool | None = None,
    length: _int | None = None,
    return_complex: _bool = False,
) -> Tensor: ...
"""


def make_stub() -> str:
    """Return the text of the stub, not formatted."""
    methods = ast.parse(_PYTHON_METHODS).body
    hidden = {node.name for node in methods if isinstance(node, ast.FunctionDef)}
    base = [node for node in _public_members(_class_body("_C/__init__.pyi", "TensorBase")) if _name_of(node) not in hidden]
    records = {name: make_record(name) for node in base for name in _list_records(node)}
    with_tensors = {_name_of(node) for node in base if "Tensor" in _declared_type(node) or _list_records(node)}
    members = [_return_self(node) for node in (*base, *methods) if _name_of(node) in with_tensors | hidden]
    text = "\n".join(ast.unparse(node) for node in members)
    class_text = "class TensorMethods(Tensor):\n" + "\n".join(f"    {line}" for line in text.splitlines())
    return _HEAD.format(version=torch.__version__.partition("+")[0]) + "\n\n".join((*records.values(), class_text)) + "\n"


def make_record(name: str) -> str:
    """Return a class with the fields of ``torch.return_types.<name>``. torch's class cannot have subclasses."""
    fields = [
        f"    {node.name}: {_declared_type(node).replace('Tensor', 'T')}"
        for node in _class_body("return_types.pyi", name)
        if isinstance(node, ast.FunctionDef) and [ast.unparse(decorator) for decorator in node.decorator_list] == ["property"]
    ]
    return "\n".join((f"class {_record_name(name)}(NamedTuple, Generic[T]):", *fields))


def _record_name(name: str) -> str:
    return f"{name.title().replace('_', '')}Result"


def _class_body(file: str, name: str) -> list[ast.stmt]:
    module = ast.parse((TORCH / file).read_text())
    (body,) = [node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == name]
    return body


def _public_members(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AnnAssign]:
    """Yield the methods and attributes that programs use. Constructors are those of ``Tensor``."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AnnAssign)):
            name = _name_of(node)
            if name not in ("__init__", "__new__", "new") and (name.startswith("__") or not name.startswith("_")):
                yield node


def _name_of(node: ast.stmt) -> str:
    return node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else ""


def _declared_type(node: ast.FunctionDef | ast.AnnAssign) -> str:
    """Return the type of a result or an attribute."""
    declared = node.returns if isinstance(node, ast.FunctionDef) else node.annotation
    return "" if declared is None else ast.unparse(declared)


def _list_records(node: ast.FunctionDef | ast.AnnAssign) -> list[str]:
    module, _, name = _declared_type(node).rpartition(".")
    return [name] if module == "torch.return_types" else []


def _return_self(node: ast.stmt) -> ast.stmt:
    """Return a declaration without docstring, with results and attributes of the class of ``self``."""
    assert isinstance(node, (ast.FunctionDef, ast.AnnAssign))
    text = _declared_type(node).replace("Tensor", "Self")
    for name in _list_records(node):
        text = f"{_record_name(name)}[Self]"
    declared = ast.parse(text, mode="eval").body
    if isinstance(node, ast.AnnAssign):
        node.annotation = declared
    else:
        node.returns, node.body = declared, [ast.Expr(ast.Constant(...))]
    return node


if __name__ == "__main__":
    print(make_stub(), end="")
