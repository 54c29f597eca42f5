"""Dimensions that were taken for one another, read from the autograd graph.

Attention by hand whose softmax runs along another dimension than the one over which its result is summed: a matrix
product that takes what a softmax has made of scores, which are a product of two others, queries and keys. What such
attention sees of what comes next. And classes that a view has made of positions, and examples of one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gaff.compat import elements
from gaff.compat.autograd import kept_by, nodes_behind, nodes_of
from gaff.training.watch.loss_terms import name_of, signed

_MOST_NODES = 2000  # behind a loss
_LEAST = 4  # positions that attention is over
_DEPTH = 10  # nodes between a product and the softmax, and between that and its scores
_PRODUCTS = {"BmmBackward": ("self", "mat2"), "MmBackward": ("self", "mat2")}
_RESHAPED = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "UnsqueezeBackward")
_ALIKE = ("ExpandBackward", "CloneBackward", "ToCopyBackward", "NativeDropoutBackward", "MulBackward", "AliasBackward")
_OF_SCORES = (*_RESHAPED, *_ALIKE, "DivBackward", "AddBackward", "SubBackward", "MaskedFillBackward", "WhereBackward",
              "PermuteBackward", "TransposeBackward")  # fmt: skip


Nodes = list[tuple[Any, str]]  # of an autograd graph, with the name of each


def mistaken(loss: Tensor) -> dict[str, Any]:
    """What the first 2,000 nodes behind a loss tell of dimensions that were taken for one another; empty if nothing.

    - ``mixing``: of the first attention whose weights do not add up to one over what they are summed over the ``shape``
      of what its softmax returned, along which ``dim`` that ran, and the one ``over`` which it is summed
    - ``by_hand``: of all other attention by hand, by how many positions it is over, whether in every example each of
      them ``sees`` the next one, and whether attention ``hides`` that from all
    - ``ctc_axis``: of the first CTC loss whose log_softmax does not run over its classes, its last dimension, the
      ``shape`` of what that has returned, and its ``dim``
    - ``viewed``: of the first cross entropy whose classes a view has made of something else the shape that was
      ``given``, and the ``shape`` that it was viewed as
    - ``viewed_batches``: the same of up to four views whose rows may be made of several examples
    """
    nodes = [(node, name_of(node)) for node in islice(nodes_behind(nodes_of([loss])), _MOST_NODES)]
    softmaxes = [one for node, name in nodes for one in _softmaxes_behind(node, name)]
    told = {
        "ctc_axis": _classes_of_ctc(nodes),
        "mixing": _wrong_axis(softmaxes),
        "by_hand": _seen(softmaxes),
        "viewed": _viewed_classes(nodes),
        "viewed_batches": _viewed_batches(nodes),
    }
    return {name: found for name, found in told.items() if found}


def _softmaxes_behind(node: Any, name: str) -> Iterator[tuple[Any, int]]:
    """The softmax nodes of attention by hand that a product takes, and the dimension over which it sums of each."""
    for operand, axis in ((0, -1), (1, -2)) if name in _PRODUCTS else ():
        found = _softmax_before(node.next_functions[operand][0], axis, "SoftmaxBackward")
        if found is not None and _is_of_scores(found[0]):
            yield found


def _wrong_axis(softmaxes: Iterable[tuple[Any, int]]) -> dict[str, Any] | None:
    for node, axis in softmaxes:
        shape, dim = _shape(node), _dim(node)
        if dim != axis == len(shape) - 1 and shape[dim] > 1 and shape[axis] > 1:
            return {"shape": list(shape), "dim": dim, "over": axis}
    return None


def _classes_of_ctc(nodes: Nodes) -> dict[str, Any] | None:
    for node, name in nodes:
        inner = node.next_functions[0][0] if name == "CtcLossBackward" else None
        found = _softmax_before(inner, -1, "LogSoftmaxBackward")
        if found is not None and _dim(found[0]) != found[1]:
            return {"shape": list(_shape(found[0])), "dim": _dim(found[0])}
    return None


def _seen(softmaxes: Iterable[tuple[Any, int]]) -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = {}
    for node, axis in softmaxes:
        shape = _shape(node)
        if _dim(node) == axis == len(shape) - 1 > 1 and shape[-2] == shape[-1] >= _LEAST:
            weights = kept_by(node, "result")
            if weights is not None and elements.is_plain(weights):
                with torch.no_grad():
                    after = weights.diagonal(1, -2, -1)
                    told = {"sees": (after > 0).all(), "hides": (after == 0).all()}
                    known = found.get(shape[-1], told)
                    found[shape[-1]] = {name: elements.both(one, known[name]) for name, one in told.items()}
    return found


def _viewed_classes(nodes: Nodes) -> dict[str, Any] | None:
    """The first cross entropy whose classes lay in another place: last, and a view has them second, or the reverse."""
    for node, name in nodes:
        viewed = _inner(node) if name == "LogSoftmaxBackward" else None
        while viewed is not None and name_of(viewed) in ("CloneBackward", "ToCopyBackward"):
            viewed = _inner(viewed)
        inner = _inner(viewed) if viewed is not None and name_of(viewed) in _RESHAPED else None
        if inner is None or len(_shape(node)) < 2 or node._saved_dim != 1:
            continue
        shape, given = _shape(viewed), _shape(inner)
        classes = shape[1]
        if len(shape) == 2:
            is_image = name_of(inner) == "ConvolutionBackward"  # whose channels are the second dimension
            is_moved = len(given) > 2 and given[1] == classes and (is_image or given[-1] % classes > 0)
        else:
            is_moved = given[-1] == classes != shape[-1]
        stays = any(
            size == classes and math.prod(given[at + 1 :]) == math.prod(shape[2:]) for at, size in enumerate(given)
        )
        if is_moved and not stays and classes > 1:
            return {"given": list(given), "shape": list(shape)}
    return None


def _viewed_batches(nodes: Nodes) -> list[dict[str, Any]]:
    """Views whose first dimension is as large as the second one of what they view, and is no part of its first.

    Where that is the batch a view has made examples of one another: as of the last states of a recurrent layer,
    ``[layers, batch, width]``.
    """
    found: list[dict[str, Any]] = []
    for node, name in nodes:
        inner = _inner(node) if name in _RESHAPED else None
        shape, given = (_shape(node), _shape(inner)) if inner is not None else ((), ())
        if len(given) > 2 and len(shape) > 1 and given[0] > 1 < given[1] == shape[0] and given[0] % given[1] > 0:
            found.append({"given": list(given), "shape": list(shape)})
    return found[:4]


def _softmax_before(node: Any, axis: int, wanted: str) -> tuple[Any, int] | None:
    """The softmax that what a node hands on comes from, and where a dimension of that is in it, if known."""
    for _ in range(_DEPTH):
        if node is None:
            return None
        shape = _shape(node)
        name = name_of(node)
        axis %= len(shape) or 1
        if name == wanted:
            return node, axis
        inner = _inner(node)
        if inner is None:
            return None
        moved = _moved(node, name, axis, shape, _shape(inner))
        if moved is None:
            return None
        node, axis = inner, moved
    return None


def _moved(node: Any, name: str, axis: int, shape: tuple[int, ...], given: tuple[int, ...]) -> int | None:
    """Where a dimension of what a node has made is in what it was given; None where that is not known."""
    if name == "PermuteBackward":
        return int(signed(node._saved_dims[axis])) % len(given)
    if name == "TransposeBackward":
        swapped = [int(signed(one)) % len(shape) for one in (node._saved_dim0, node._saved_dim1)]
        return swapped[1 - swapped.index(axis)] if axis in swapped else axis
    if name in _ALIKE:
        return axis - len(shape) + len(given) if given[axis - len(shape) :][:1] == shape[axis:][:1] else None
    if name in _RESHAPED:
        before = math.prod(shape[:axis])
        places = [at for at, size in enumerate(given) if size == shape[axis] and math.prod(given[:at]) == before]
        return places[0] if len(places) == 1 else None
    return None


def _is_of_scores(softmax: Any) -> bool:
    """Whether a softmax is of a product of two things that were computed, as of queries and keys; not of a layer."""
    node = _inner(softmax)
    for _ in range(_DEPTH):
        if node is None:
            return False
        if name_of(node) in _PRODUCTS:
            operands = [one for one, _ in node.next_functions]
            return len(operands) == 2 and all(one is not None and not _is_weight(one) for one in operands)
        if name_of(node) not in _OF_SCORES:
            return False
        node = _inner(node)
    return False


def _is_weight(node: Any) -> bool:
    """Whether a node hands out a parameter, turned around or in another shape perhaps."""
    for _ in range(_DEPTH):
        if node is None or hasattr(node, "variable"):
            return node is not None
        if name_of(node) not in (*_RESHAPED, *_ALIKE, "TBackward", "TransposeBackward", "PermuteBackward"):
            return False
        node = _inner(node)
    return False


def _inner(node: Any) -> Any:
    """The one node whose gradient a node computes; None where there are several, or none."""
    found = [one for one, _ in node.next_functions if one is not None]
    return found[0] if len(found) == 1 else None


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(one) for one in node._input_metadata[0].shape)


def _dim(softmax: Any) -> int:
    return signed(softmax._saved_dim) % len(_shape(softmax))
