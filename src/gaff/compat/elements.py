"""Which numbers are in a tensor: one answer for every kind of tensor that torch and its libraries have.

Everything that counts, measures, compares or draws values asks here. A new kind of tensor is taught here, and nowhere
else. Nothing in this file communicates with other processes.

| kind | its numbers |
|---|---|
| DTensor (FSDP2, tensor parallelism) | those of this process's part |
| what a collective under way brings | those that it brings: it is waited for |
| quantised, by torch or by a subclass with ``dequantize`` (torchao, quanto) | those that it stands for |
| float8 and smaller floats | the same as float32, which can be computed with |
| bits, and numbers of less than a byte (``uint4``, ``float4_e2m1fn_x2``) | the bytes in which they lie |
| sparse | those that are stored; as a dense tensor zeros, too |
| nested | those of its parts, one after the other |
| another wrapper of tensors (``__tensor_flatten__``) | those of the tensors inside, one after the other |
| complex | pairs of real ones |
| on Apple's MPS | the same, copied to the CPU |
| meta, fake, functional; stand-ins inside ``torch.func`` and batched backward passes | none that can be read |
| a wrapper that lies inside itself, as ``torch.utils.swap_tensors`` can make one | none: torch cannot read it either |
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gaff.compat import autograd, distributed

_PACKED = re.compile(r"torch\.(u?int[1-7]|float4\w*|bits\w+)$")
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_UNREADABLE = ("FakeTensor", "FunctionalTensor")  # told by name, for importing their modules takes long


def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """As ``torch.can_cast``, in a form that Dynamo compiles: nothing imaginary, no fraction and no number is lost."""
    return _rank(source) <= _rank(target)


def _rank(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1


def signed(tensor: Tensor) -> Tensor:
    """The same memory, in which unsigned integers of more than a byte, which torch indexes with nothing, are signed."""
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor


def comparable(tensor: Tensor) -> Tensor:
    """The same values in a type that torch compares: int64 for unsigned integers of more than a byte."""
    return tensor.to(torch.int64) if tensor.dtype in _SIGNED else tensor


def both(one: Any, other: Any) -> Any:
    """Whether two truth values hold, each a bool or a tensor of dimension 0; these may lie on different devices, as
    where a model is spread over several, and are not waited for."""
    is_apart = isinstance(one, Tensor) and isinstance(other, Tensor) and one.device != other.device
    return one & (other.to(one.device) if is_apart else other)


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name, with or without ``torch.``. Raises ValueError where there is none."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of torch's")
    return found


def wide_type(tensor: Tensor) -> torch.dtype:
    """The widest type that sums of a tensor can be in where it lies: float64, on Apple's MPS float32; of complex ones
    complex128, there complex64."""
    if tensor.is_complex():
        return torch.complex64 if tensor.is_mps else torch.complex128
    return torch.float32 if tensor.is_mps else torch.float64


def is_plain(tensor: Tensor) -> bool:
    """Whether the numbers lie in the tensor's memory just as its shape, strides and dtype say."""
    kind = type(tensor)
    is_odd = tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta
    if is_odd or kind.__name__ in _UNREADABLE:
        return False
    return kind in (Tensor, torch.nn.Parameter) or not (is_opaque(tensor) or is_traceable_wrapper_subclass(tensor))


def is_opaque(value: object) -> bool:
    """Whether a tensor's class does all operations itself, and does not tell the tensors inside: it makes no lists."""
    if type(value) is Tensor or not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return False
    return type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__


def words(tensor: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The elements of a tensor in the order of its indices as words of ``dtype``, such as its bytes; may be a view.

    A single element may have any stride, as ``x[:, 0]`` of a batch of one has, and torch refuses to view that as bytes;
    so it does what is to be negated or conjugated when it is read, as the imaginary part of a conjugate.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(dtype)


def has_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bit for bit: a NaN is itself, -0 is not 0. False where their memory cannot tell.

    Waits for a device.
    """
    if not (is_plain(one) and is_plain(other)) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(words(one), words(other))


def is_readable(tensor: Tensor) -> bool:
    """Whether there are numbers that can be read here: not in meta and fake tensors, nor inside transforms."""
    kind = type(tensor)
    if tensor.is_meta or kind.__name__ in _UNREADABLE or autograd.is_wrapper(tensor):
        return False
    return kind is Tensor or kind is torch.nn.Parameter or not is_endless(tensor)


def is_endless(tensor: Tensor, around: tuple[Tensor, ...] = ()) -> bool:
    """Whether a wrapper of tensors lies inside itself, so that every operation on it ends in a RecursionError.

    A parametrisation that wraps a parameter makes one where parameters are swapped and not replaced. ``around``: the
    wrappers that ``tensor`` was found in.
    """
    if any(one is tensor for one in around):
        return True
    names: list[str] = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else []
    parts = [getattr(tensor, name) for name in names]
    return any(isinstance(part, Tensor) and is_endless(part, (*around, tensor)) for part in parts)


def is_packed(dtype: torch.dtype) -> bool:
    """Whether torch only stores elements of this type, without copying or converting them: bits, and parts of bytes."""
    return _PACKED.match(str(dtype)) is not None


def _computable(tensor: Tensor) -> Tensor:
    """The same numbers in a type that torch computes with; of packed ones their bytes."""
    if is_packed(tensor.dtype):
        return tensor.view(torch.uint8)
    return tensor.float() if is_small_float(tensor) else tensor


def cast(tensor: Tensor, dtype: torch.dtype, *, device: torch.device | None = None, copy: bool = False) -> Tensor:
    """As ``tensor.to``, but what is infinite stays not finite: NaN in the one type in which torch makes it 448."""
    if dtype == torch.float8_e4m3fn and tensor.is_floating_point() and tensor.dtype != dtype:
        tensor = tensor.float() if is_small_float(tensor) else tensor
        tensor = torch.where(tensor.isinf(), torch.nan, tensor)
    return tensor.to(device=tensor.device if device is None else device, dtype=dtype, copy=copy)


def is_beyond(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the numbers of a tensor are NaN, infinite, or too large for a type, to the largest of which they would not
    be rounded."""
    limits = torch.finfo(dtype)
    half = limits.eps * 2.0 ** math.floor(math.log2(limits.max)) / 2  # of the step between its largest numbers
    size = tensor.double().abs()
    is_even = dtype == torch.float8_e4m3fn  # what is in the middle is rounded to even
    return ~((size <= limits.max + half) if is_even else (size < limits.max + half))


def is_small_float(tensor: Tensor) -> bool:
    """Whether a tensor's type holds numbers and computes with none: float8 and smaller."""
    return tensor.is_floating_point() and tensor.element_size() == 1 and not tensor.is_quantized


def dequantized(tensor: Tensor) -> Tensor:
    """The numbers that a quantised tensor stands for, in its shape; every other tensor as it is."""
    if tensor.is_quantized:
        return tensor.dequantize()
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter or not is_traceable_wrapper_subclass(tensor):
        return tensor
    own = getattr(kind, "dequantize", None)
    return tensor.dequantize() if own is not None and own is not Tensor.dequantize else tensor


def dense(tensor: Tensor) -> Tensor | None:
    """The numbers in the tensor's own shape (of this process's part), strided, without an autograd graph.

    A view of the tensor's memory where that is possible. None where there are no numbers, or no one shape: of nested
    tensors and of wrappers of several.
    """
    if not is_readable(tensor):
        return None
    value = _own(tensor)
    if value.is_nested or not is_readable(value):
        return None
    if value.layout != torch.strided:
        value = value.to_dense()
    value = _computable(value)
    return value if is_plain(value) else None


def elements(tensor: Tensor) -> Tensor | None:
    """All numbers as one real, strided tensor without an autograd graph; None where none can be read.

    A view where that is possible; its shape means nothing for kinds that are not plain. Of a sparse tensor those that
    are stored, not summed up where an index is stored twice.
    """
    if not is_readable(tensor):
        return None
    value = _own(tensor)
    if value.is_nested:
        return _joined(list(value.unbind()))
    if value.layout == torch.sparse_coo:
        value = value._values()
    elif value.is_mkldnn:
        value = value.to_dense()
    elif value.layout != torch.strided:
        value = value.values()
    if not is_plain(value):
        names: list[str] = value.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(value) else []
        return _joined([part for name in names if isinstance(part := getattr(value, name), Tensor)])
    value = _computable(value)
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _own(tensor: Tensor) -> Tensor:
    """What lies in this process, without an autograd graph: the local part, once it has come, dequantised.

    A copy on the CPU, which is waited for, of what lies on Apple's MPS: that computes nothing in float64.
    """
    value = dequantized(distributed.arrived(distributed.local_of(tensor.detach())))
    return value.cpu() if value.is_mps else value


def _joined(parts: list[Tensor]) -> Tensor | None:
    """The numbers of several tensors one after the other; None where there are none."""
    found = [value.reshape(-1) for part in parts if (value := elements(part)) is not None]
    return torch.cat(found) if found else None
