"""What each layer adds to its parameters' gradients, example by example, as sums of outer products.

The gradient of a weight is a sum over positions of ``outer[t] * inner[t]^T``. Its squared norm, and the inner product
of two such sums, need only the products of the factors: ``sum over t, s of (outer_t . outer_s) (inner_t . inner_s)``.
So no example's gradient is ever made, unless that is cheaper: of few weights and many positions.

``find_rule`` gives the function that turns a layer's input and the gradient at its output into ``Terms``; ``measure``
makes norms of them. Everything is computed in float32 or wider, under no autocast (see ``sample_norms``): a rule is
given a gradient that is ``wide`` already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaff.engine.forwards import users_forward
from gaff.errors import PlanError

_LOST = 1e-3  # chosen: below this part of what could be, float32 keeps too few digits
_MOST = 2**24  # elements of one block of whole gradients, when these are cheaper than inner products


class Terms(NamedTuple):
    """One layer call's part of a parameter's gradient: the factors of a sum over positions, for each example and group.

    ``inner`` [batch, groups, positions, width]; ``outer`` the same with its own width, or [..., positions] of rows.
    ``outer`` None: the gradient is the sum of ``inner`` itself (a bias, a gain). Integer: the number of the row of an
    embedding that each position reads, -1 for none. Groups are those of a grouped convolution, 1 elsewhere.
    """

    inner: Tensor
    outer: Tensor | None = None


Rule = Callable[[Any, str, Tensor, Tensor], Terms]


class MeasuredLayer(NamedTuple):
    """What the terms of one parameter come to, and how well they explain the gradient that came.

    ``squares`` [batch]: squared norms of the examples' gradients. ``explained``: inner product of their sum with what
    was asked. ``reach``: how large the sum could be if nothing cancelled; rounding errors go with it.
    """

    squares: Tensor
    explained: float
    reach: float


def question(gradient: Tensor) -> Tensor:
    """A direction in which a sum of terms and the gradient that came must agree, if they are equal.

    The gradient itself, and as much of a random matrix of rank 4 from a seed of its own: the gradient alone would not
    tell a sum from its projection, which is what a hook that masks or centres it makes. Of a gradient of zeros that
    matrix alone, of norm 1. ``gradient`` is dense.
    """
    gradient = wide(gradient)
    flat = gradient.flatten(1) if gradient.dim() > 1 else gradient.reshape(-1, 1)
    draw = torch.Generator(gradient.device).manual_seed(0)
    kind: dict[str, Any] = {"generator": draw, "dtype": flat.dtype, "device": flat.device}
    rows, columns = torch.randn(flat.shape[0], 4, **kind), torch.randn(4, flat.shape[1], **kind)
    norm = torch.linalg.vector_norm(flat)
    scale = torch.where(norm > 0, norm / 2, 1 / torch.linalg.vector_norm(rows @ columns).clamp(min=1e-30))
    return torch.addmm(flat, rows * scale, columns).reshape(gradient.shape)


def measure(before: list[Terms], new: list[Terms], asked: Tensor) -> MeasuredLayer:
    """Measure the terms of a parameter whose gradient has come: norms, and what they come to in a direction ``asked``.

    ``new``: terms that this gradient holds; ``before``: terms that an earlier gradient of it, in the same run, has
    told; they add to the examples' norms and not to this gradient. ``asked`` is dense, and not of half precision. Waits
    for the device.
    """
    terms = before + new
    reach = float(sum((_bound(one) * one.inner.shape[2] ** 0.5).sum() for one in new))
    [only] = terms if len(terms) == 1 else [None]
    if only is not None and only.outer is not None and only.outer.is_floating_point() and _is_cheaper_whole(only, only):
        weight = asked.reshape(only.outer.shape[1], only.outer.shape[3], only.inner.shape[3])
        squares, explained = [], 0.0
        for mine in _iter_whole(only):
            squares.append(mine.square().sum((1, 2, 3)))
            explained += float((mine.sum(0) * weight).sum())
        return MeasuredLayer(torch.cat(squares), explained, reach)
    return MeasuredLayer(_squares_of(terms), float(sum(_meeting(one, asked) for one in new)), reach)


def _squares_of(terms: list[Terms]) -> Tensor:
    """The squared norm, for each example, of the sum of all terms: every pair of them meets once.

    Where the answer is less than a thousandth of what it could be, large numbers have cancelled, and float32 cannot
    tell what is left: it is computed again in float64. Waits for the device.
    """
    total = _pairs(terms)
    most = torch.stack([_bound(one).square() for one in terms]).sum(0)
    is_lost = total < _LOST * most  # what is left of large numbers that cancel: the products cannot tell
    if bool(is_lost.any()) and all(one.outer is None or one.outer.is_floating_point() for one in terms):
        wide = [Terms(one.inner.double(), None if one.outer is None else one.outer.double()) for one in terms]
        total = torch.where(is_lost, _pairs(wide).to(total.dtype), total)
    return total


def _meeting(terms: Terms, gradient: Tensor) -> Tensor:
    """The inner product of all examples' terms together with what has the shape of the whole parameter."""
    if terms.outer is None:
        return (terms.inner.sum((0, 1, 2)) * gradient.reshape(-1)).sum()
    if not terms.outer.is_floating_point():
        rows = gradient[terms.outer.clamp(min=0)] * (terms.outer >= 0)[..., None]
        return (rows * terms.inner).sum()
    groups = terms.outer.shape[1]
    weight = gradient.reshape(groups, terms.outer.shape[3], terms.inner.shape[3])
    return ((terms.outer @ weight) * terms.inner).sum()


def find_rule(layer: nn.Module) -> Rule:
    """The function that tells how ``layer`` adds to its gradients.

    Raises PlanError for a layer that has no rule: a kind that is not known, a class or an instance with another
    ``forward``, or an embedding that divides gradients by how often a row was read.
    """
    own = [kind for kind in type(layer).__mro__[-9:] if kind.__module__.startswith("torch.nn.modules")]
    is_own = any(type(layer).forward is getattr(kind, "forward", 0) for kind in own)
    is_own = is_own and users_forward(vars(layer).get("forward")) is None
    for kinds, rule in _RULES:
        if is_own and isinstance(layer, kinds) and not getattr(layer, "scale_grad_by_freq", False):
            return rule
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"):  # transformers' transposed linear layer
        return _linear_transposed
    if _is_rms_norm(layer):
        return _layer_norm
    raise PlanError(f"no rule for {type(layer).__name__}")


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 where it is of half precision or less; any other as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def is_batched(layer: nn.Module, given: Tensor) -> bool:
    """Whether ``given``, a layer's input, has a dimension of examples before those that the layer itself needs."""
    if given.is_complex():
        return False
    if isinstance(layer, nn.Embedding):
        return given.dim() >= 1
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) or _is_rms_norm(layer):
        return given.dim() > len(_normalized_shape(layer))
    spatial = len(getattr(layer, "kernel_size", ()))
    instance = {"InstanceNorm1d": 1, "InstanceNorm2d": 2, "InstanceNorm3d": 3}.get(type(layer).__name__, 0)
    return given.dim() >= 2 + max(spatial, instance)


def _pairs(terms: list[Terms]) -> Tensor:
    """The squared norm, for each example, of the sum of all terms, in the precision that they have."""
    total = torch.zeros((), dtype=torch.float32, device=terms[0].inner.device)
    for number, one in enumerate(terms):
        total = total + _product(one, one)
        for other in terms[number + 1 :]:
            total = total + 2 * _product(one, other)
    return total


def _bound(one: Terms) -> Tensor:
    """The norm, for each example, that its part would have if nothing cancelled, but for the number of positions."""
    norm: Tensor = torch.linalg.vector_norm(one.inner, dim=(1, 2, 3))
    if one.outer is not None and one.outer.is_floating_point():
        norm = norm * torch.linalg.vector_norm(one.outer, dim=(1, 2, 3))
    return norm


def _product(one: Terms, other: Terms) -> Tensor:
    """The inner product, for each example, of two parts of one parameter's gradient: ``[batch]``.

    Positions of one part are taken in blocks: the products of all with all can be larger than the layer's input.
    """
    if one.outer is None or other.outer is None:
        return (one.inner.sum(2) * other.inner.sum(2)).sum((1, 2))
    rows = not one.outer.is_floating_point(), not other.outer.is_floating_point()
    if rows == (False, False) and _is_cheaper_whole(one, other):
        return _whole(one, other)
    if rows == (True, False):
        return _product(other, one)
    length = one.inner.shape[2]
    block = max(1, _MOST // max(1, len(one.inner) * one.inner.shape[1] * other.inner.shape[2]))
    total = torch.zeros((), dtype=torch.float32, device=one.inner.device)
    for at in range(0, length, block):
        inner, outer = one.inner[:, :, at : at + block], one.outer[:, :, at : at + block]
        total = total + (_meet(outer, other.outer, inner.dtype) * (inner @ other.inner.mT)).sum((1, 2, 3))
    return total


def _meet(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Inner products of outer factors, position by position; rows of an embedding meet where they are the same row.

    A row of an embedding is a vector with a single one in it, so its product with a dense factor is one element of
    that.
    """
    if one.is_floating_point() and other.is_floating_point():
        return one @ other.mT
    if one.is_floating_point():  # a weight that is an embedding and a linear layer at once
        index = other.clamp(min=0)[..., None, :].expand(*one.shape[:-1], -1)
        return one.gather(-1, index) * (other >= 0)[..., None, :]
    same = one[..., :, None] == other[..., None, :]
    return (same & (one >= 0)[..., None]).to(dtype)


def _is_cheaper_whole(one: Terms, other: Terms) -> bool:
    """Whether there are more pairs of positions than elements of the weight: then its gradient is made after all."""
    positions = one.inner.shape[2] * other.inner.shape[2]
    return positions > one.inner.shape[3] * (one.outer.shape[3] if one.outer is not None else 1)


def _whole(one: Terms, other: Terms) -> Tensor:
    """The inner product by making the examples' gradients after all, some at a time."""
    if one is other:
        return torch.cat([mine.square().sum((1, 2, 3)) for mine in _iter_whole(one)])
    pairs = zip(_iter_whole(one), _iter_whole(other), strict=True)
    return torch.cat([(mine * theirs).sum((1, 2, 3)) for mine, theirs in pairs])


def _iter_whole(one: Terms) -> Iterator[Tensor]:
    """The examples' gradients themselves, ``[block, groups, outer, inner]``, some examples at a time."""
    assert one.outer is not None  # as the callers have seen
    size = one.inner.shape[1] * one.inner.shape[3] * one.outer.shape[3]
    block = max(1, _MOST // max(1, size))
    for at in range(0, len(one.inner), block):
        yield one.outer[at : at + block].mT @ one.inner[at : at + block]


def _linear(layer: nn.Linear, name: str, given: Tensor, gradient: Tensor) -> Terms:
    """A linear layer, ``y = x W^T + b``: the weight's gradient is the sum over positions of ``grad_y * x^T``."""
    gradient = gradient.reshape(len(gradient), 1, -1, gradient.shape[-1])
    if name == "bias":
        return Terms(gradient)
    return Terms(wide(given).reshape(len(given), 1, -1, given.shape[-1]), gradient)


def _linear_transposed(layer: Any, name: str, given: Tensor, gradient: Tensor) -> Terms:
    """A linear layer whose weight is [in, out], as transformers' Conv1D has it: the factors change places."""
    terms = _linear(layer, name, given, gradient)
    return terms if terms.outer is None else Terms(terms.outer, terms.inner)


def _embedding(layer: nn.Embedding, name: str, given: Tensor, gradient: Tensor) -> Terms:
    """An embedding: each position adds the gradient at its output to the row that it reads, the padding row to none."""
    rows = given.reshape(len(given), 1, -1)
    if layer.padding_idx is not None:
        rows = torch.where(rows == layer.padding_idx, -1, rows)
    return Terms(gradient.reshape(len(gradient), 1, -1, gradient.shape[-1]), rows)


def _convolution(layer: Any, name: str, given: Tensor, gradient: Tensor) -> Terms:
    """A convolution as a linear layer whose inputs are the windows under the kernel, padded as the layer pads.

    In a transposed one the gradient at the output takes the part of the input, and the other way round.
    """
    if name == "bias":
        return _by_channel(gradient)
    if layer.transposed:
        sides = [side for padding in reversed(layer.padding) for side in (padding, padding)]
        return _windows(layer, F.pad(gradient, sides), wide(given))
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return _windows(layer, F.pad(wide(given), layer._reversed_padding_repeated_twice, mode=mode), gradient)


def _windows(layer: Any, padded: Tensor, small: Tensor) -> Terms:
    """Terms with one position for each place of the kernel.

    ``inner`` is the window of ``padded`` under the kernel, ``outer`` the values of ``small`` at that place. Some places
    are left over by a transposed convolution with output padding. ``F.unfold`` is not used: it copies where nothing has
    to be copied, and has no code for three dimensions.
    """
    spatial, windows = small.dim() - 2, padded
    for dim, size in enumerate(small.shape[2:]):
        reach = layer.dilation[dim] * (layer.kernel_size[dim] - 1) + 1
        windows = windows.unfold(2 + dim, reach, layer.stride[dim]).narrow(2 + dim, 0, size)
        windows = windows[..., :: layer.dilation[dim]]
    windows = windows.permute(0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))
    windows = windows.flatten(2 + spatial).flatten(1, 1 + spatial)  # batch, channels * kernel, positions
    values = small.flatten(2).unflatten(1, (layer.groups, -1))
    return Terms(windows.unflatten(1, (layer.groups, -1)).mT, values.mT)


def _layer_norm(layer: Any, name: str, given: Tensor, gradient: Tensor) -> Terms:
    """Layer and RMS norms: the gain's gradient is that at the output times the normalised input."""
    shape = _normalized_shape(layer)
    if name == "weight":
        norm: Any = F.layer_norm if isinstance(layer, nn.LayerNorm) else F.rms_norm
        gradient = gradient * norm(wide(given), shape, eps=getattr(layer, "variance_epsilon", None) or layer.eps)
    return Terms(gradient.reshape(len(gradient), 1, -1, math.prod(shape)))


def _is_rms_norm(layer: Any) -> bool:
    """Whether this is an RMS norm as Llama's and its kin write their own: a gain alone, over the last dimension.

    One that is only called so is found out by what its terms come to, as every layer is.
    """
    named = type(layer).__name__
    gains = [one for one in layer._parameters.values() if one is not None]
    is_named = named.endswith("RMSNorm") or (named.endswith("LayerNorm") and hasattr(layer, "variance_epsilon"))  # T5's
    return (
        is_named
        and [one.dim() for one in gains] == [1]
        and (hasattr(layer, "variance_epsilon") or hasattr(layer, "eps"))
    )


def _normalized_shape(layer: Any) -> tuple[int, ...]:
    """The dimensions at the end over which a layer or RMS norm goes."""
    return tuple(getattr(layer, "normalized_shape", None) or layer.weight.shape)


def _channel_norm(layer: Any, name: str, given: Tensor, gradient: Tensor) -> Terms:
    """Norms with a gain for each channel: batch norm in eval mode, group and instance norm.

    Positions are places in space. The normalised input is computed again from the input, without gain and bias; running
    statistics keep their values.
    """
    if name == "weight":
        given = wide(given)
        if isinstance(layer, nn.GroupNorm):
            plain = F.group_norm(given, layer.num_groups, eps=layer.eps)
        elif isinstance(layer, nn.modules.instancenorm._InstanceNorm):
            uses_input = layer.training or not layer.track_running_stats
            plain = F.instance_norm(
                given, layer.running_mean, layer.running_var, use_input_stats=uses_input, momentum=0.0, eps=layer.eps
            )
        else:
            plain = F.batch_norm(given, layer.running_mean, layer.running_var, eps=layer.eps)
        gradient = gradient * plain
    return _by_channel(gradient)


def _by_channel(gradient: Tensor) -> Terms:
    """The gradient of what is added to each channel: places in space are the positions, one where there are none."""
    return Terms(gradient.flatten(2).mT[:, None] if gradient.dim() > 2 else gradient[:, None, None])


_RULES: tuple[tuple[Any, Rule], ...] = (
    (nn.Linear, _linear),
    (nn.Embedding, _embedding),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _convolution),
    ((nn.LayerNorm, nn.RMSNorm), _layer_norm),
    ((nn.GroupNorm, nn.modules.instancenorm._InstanceNorm, nn.modules.batchnorm._BatchNorm), _channel_norm),
)
