"""Which rows of a value are kept, and what is known of each: sample, position, token, and the user's own columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from gaff.compat import elements
from gaff.errors import PlanError, SiteError
from gaff.harvesting.batches import Numbered

Rows = Literal["sample", "token", "position"]
# Names of labels that belong to a site, or to a parameter, begin with these.
SCALE_OF, PLACE_OF, NORM_OF = "scale of ", "place of ", "gradient norm of "
_OWN = ("sample", "position", "token", "finite")
_MASK, _TOKENS = "attention_mask", "input_ids"


class Selection:
    """The rows of one batch that are kept, by a mask over the leading dimensions of every value.

    One dimension for rows that are samples, two for positions of samples; None stands for all. Made anew for each
    batch.
    """

    def __init__(self, given: Numbered, rows: Rows | Callable[[Any], Tensor], mask: str | None) -> None:
        self._given, self._rows, self._named = given, rows, mask if rows == "token" and mask else _MASK
        self._size = len(given.samples)
        self._mask: Tensor | None = None
        self._shape: tuple[int, ...] = (self._size,)
        self._dims = 1 if rows == "sample" else 2
        if callable(rows):
            self._set(_as_mask(rows(given.batch), "rows()"))
        elif rows == "token":
            found = _known(given, self._named)
            if found is not None:
                self._set(_as_mask(found, f"the mask {self._named!r}"))
                if mask is None and (alike := [one for one in _texts(given.batch) if one != _MASK]):
                    self._refuse_several(alike)
            elif mask is not None:
                raise PlanError(f"mask={mask!r} is not in the batch: expected a key of it")
            elif others := _other_masks(given.batch):
                raise PlanError(
                    f"rows='token' finds no {_MASK!r} in the batch, which has {', '.join(map(repr, others))}: expected "
                    "mask= with the key that tells padding, or rows='position' for every position"
                )
        if self._mask is None and self._dims > 1:
            tokens = self._tokens()
            if isinstance(tokens, Tensor) and tokens.dim() == self._dims:
                self._shape = tuple(tokens.shape)

    @property
    def dims(self) -> int:
        """How many leading dimensions of a value become rows."""
        return self._dims

    def of(self, address: str, value: Any) -> Tensor:
        """The rows of a value, ``[rows, ...]`` on the CPU. Raises SiteError for one that has other dimensions."""
        if value is None:
            raise SiteError(
                f"{address}: is None in this batch: a gradient is where its loss does not depend on the site; "
                "expected a tensor from every batch"
            )
        if not isinstance(value, Tensor):
            raise SiteError(f"{address}: is a {type(value).__name__}: expected one tensor; add its key, such as [0]")
        if not elements.is_plain(value):
            kind = "nested tensor" if value.is_nested else f"{type(value).__name__} of layout {value.layout}"
            way = "to_padded_tensor(0.0)" if value.is_nested else "dequantize()"
            raise SiteError(f"{address}: is a {kind}: expected a dense tensor with plain memory; reduce= can make one, "
                            f"such as lambda x: x.{way}")  # fmt: skip
        leading = tuple(value.shape[: self._dims])
        if self._mask is None and value.dim() >= self._dims and leading[0] == self._size:
            if len(self._shape) < self._dims:
                if value.dim() == self._dims:
                    raise SiteError(
                        f"{address}: has shape {list(value.shape)}, and nothing in the batch tells whether its second "
                        f"dimension is positions, of which rows={self._rows!r} would make a row of one number each: "
                        "expected rows='sample', or reduce=lambda x: x.unsqueeze(-1) where they are positions"
                    )
                self._shape = leading  # of the first value: what follows must be like it
            if leading == self._shape:
                return value.flatten(0, self._dims - 1).cpu() if self._dims > 1 else value.cpu()
        elif self._mask is not None and leading == self._shape:
            return value[self._mask.to(value.device)].cpu()
        expected = list(self._shape) if len(self._shape) == self._dims else [self._size, "positions"]
        others = [one for one in _texts(self._given.batch) if one != self._named] if self._rows == "token" else []
        way = f"mask={others[0]!r} is of another text; " if others else ""
        raise SiteError(
            f"{address}: has shape {list(value.shape)}: expected it to begin with {expected}, as rows={self._rows!r} "
            f"says; {way}reduce= can put that in front, such as lambda x: x.transpose(0, 1)"
        )

    def labels(self, own: Mapping[str, Any]) -> dict[str, Tensor]:
        """By name: what is known of each row, after the values were taken. ``own``: the user's columns of the batch.

        ``sample`` (int64), and of positions ``position`` (int32) and ``token``, where it is known of which text: of a
        mask such as ``decoder_attention_mask`` it is in ``decoder_input_ids``; of ``rows="position"``, and of masks of
        other names, in ``input_ids``, where the batch has no other text. A position is counted from the first one that
        the mask tells, so that it does not depend on the other samples of a batch that is padded on the left; of
        ``rows="position"`` from the first, padding or not; and through all dimensions of a mask with more than two.
        """
        places = (
            torch.ones(self._shape, dtype=torch.bool, device="cpu") if self._mask is None else self._mask
        ).nonzero()
        labels = {"sample": self._given.samples[places[:, 0]]}
        if self._dims > 1:
            labels["position"] = self._positions(places).to(torch.int32)
            tokens = self._tokens()
            if tokens is not None and tuple(tokens.shape) == self._shape:
                labels["token"] = tokens.cpu()[tuple(places.T)]
        for name, values in own.items():
            if is_reserved(name):
                raise PlanError(f"label {name!r} is a name of gaff's own: expected another")
            labels[name] = self._own(name, values, places)
        return labels

    def _positions(self, places: Tensor) -> Tensor:
        """The place of each row in its sample."""
        found = places[:, 1]
        for dim, size in enumerate(self._shape[2:], 2):
            found = found * size + places[:, dim]
        mask = _known(self._given, self._named) if self._rows != "position" else None
        if not isinstance(mask, Tensor) or tuple(mask.shape) != self._shape or len(self._shape) != 2:
            return found
        return found - (mask.cpu() != 0).int().argmax(1)[places[:, 0]]

    def _tokens(self) -> Tensor | None:
        """The ids of the tokens of the text that rows are of; None where there are none, or nobody tells of which."""
        prefix = self._named.removesuffix(_MASK)
        if self._named.endswith(_MASK) and prefix:
            return _ids(self._given, f"{prefix}{_TOKENS}")
        is_told = self._rows == "token" and self._named == _MASK
        return _ids(self._given, _TOKENS) if is_told or not _other_tokens(self._given.batch) else None

    def _refuse_several(self, masks: list[str]) -> None:
        """Raises PlanError where another text of the batch has as many positions, so that no shape tells them apart."""
        shapes = [getattr(_known(self._given, one), "shape", None) for one in masks]
        if self._shape in [None if one is None else tuple(one) for one in shapes]:
            raise PlanError(
                f"rows='token' finds {_MASK!r} in the batch and {', '.join(map(repr, masks))} of the same shape "
                f"{list(self._shape)}: expected mask= with the one of the text that these sites are of"
            )

    def of_samples(self, name: str, values: Tensor) -> Tensor:
        """What is known of each sample, for each row."""
        places = (
            torch.ones(self._shape, dtype=torch.bool, device="cpu") if self._mask is None else self._mask
        ).nonzero()
        return self._own(name, values, places)

    def _set(self, mask: Tensor) -> None:
        """Keep the rows where ``mask`` is true. Raises PlanError where it is not of this batch."""
        if not mask.dim() or mask.shape[0] != self._size:
            raise PlanError(
                f"the mask of the rows has shape {list(mask.shape)}: expected its first dimension to be the "
                f"{self._size} samples of the batch"
            )
        self._mask, self._shape, self._dims = mask.cpu(), tuple(mask.shape), mask.dim()

    def _own(self, name: str, values: Any, places: Tensor) -> Tensor:
        """The user's column for each row. Raises PlanError for one that is not of this batch."""
        tensor = values if isinstance(values, Tensor) else _as_tensor(name, values)
        tensor = tensor.detach().cpu()
        if tuple(tensor.shape[: self._dims]) == self._shape:
            return tensor[tuple(places.T)].contiguous()
        if tensor.shape == (self._size,) or (self._dims == 1 and tensor.dim() and len(tensor) == self._size):
            return tensor[places[:, 0]].contiguous()
        raise PlanError(
            f"label {name!r} has shape {list(tensor.shape)}: expected one number for each of the "
            f"{self._size} samples, or something for each place of {list(self._shape)}"
        )


def is_reserved(name: str) -> bool:
    """Whether a label of this name is made by gaff itself."""
    return name in _OWN or name.startswith((SCALE_OF, PLACE_OF, NORM_OF))


def column(batch: Any, key: Any) -> Any:
    """What a batch has under a key, or at a place if it is a tuple; None where it has none."""
    if isinstance(key, int):
        return batch[key] if isinstance(batch, (tuple, list)) and -len(batch) <= key < len(batch) else None
    return batch[key] if hasattr(batch, "keys") and key in batch.keys() else None  # noqa: SIM118  # tokenizers' batches


def _known(given: Numbered, key: str) -> Any:
    """What a batch has under a key, in its inputs where it is a pair of these and labels, or what the model is given by
    that name; None where nobody has it."""
    first = given.batch[0] if isinstance(given.batch, (tuple, list)) and given.batch else None
    found = (column(one, key) for one in (given.batch, first, given.kwargs))
    return next((one for one in found if one is not None), None)


def _ids(given: Numbered, key: str) -> Tensor | None:
    """The ids of a batch's tokens under a key as a tensor; None where it has none, or ragged ones."""
    found = _known(given, key)
    try:
        return None if found is None else torch.as_tensor(found, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None


def _texts(batch: Any) -> list[str]:
    """The attention masks of a batch that has several texts, one each: the mask of a decoder, of one tower of two."""
    keys = {key for key in (batch.keys() if hasattr(batch, "keys") else ()) if isinstance(key, str)}
    prefixes = sorted(key.removesuffix(_MASK) for key in keys if key.endswith(_MASK))
    return [f"{one}{_MASK}" for one in prefixes if one in ("", "decoder_") or f"{one}{_TOKENS}" in keys]


def _other_tokens(batch: Any) -> list[str]:
    """The keys of a batch that are called ids of tokens, but for the usual one."""
    keys = list(batch.keys()) if hasattr(batch, "keys") else []
    return [key for key in keys if isinstance(key, str) and key.endswith(_TOKENS) and key != _TOKENS]


def _other_masks(batch: Any) -> list[str]:
    """The keys of a batch that are called a mask, one of which may tell what is padding."""
    keys = list(batch.keys()) if hasattr(batch, "keys") else []
    return [key for key in keys if isinstance(key, str) and "mask" in key.lower()]


def own_columns(batch: Any, labels: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
    """The user's columns of one batch. Raises PlanError for a key that the batch has not."""
    if callable(labels):
        made: Any = labels(batch)
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            raise PlanError(f"labels gave {made!r:.40} for a batch: expected a dict of names and columns")
        return dict(made)
    found = {name: column(batch, key) for name, key in labels.items()}
    for name, value in found.items():
        if value is None:
            raise PlanError(f"label {name!r}: the batch has no {labels[name]!r}")
    return found


def _as_mask(found: Any, what: str) -> Tensor:
    """A mask as booleans. Raises PlanError for what is none."""
    if not isinstance(found, Tensor) or found.is_floating_point() or found.is_complex():
        kind = f"of {found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise PlanError(f"{what} is {kind}: expected a tensor of booleans or 0 and 1")
    if bool(((found != 0) & (found != 1)).any()):
        odd = found[(found != 0) & (found != 1)][0]
        raise PlanError(f"{what} holds {odd.item()}: expected a tensor of booleans or 0 and 1, one for each sample")
    return found.bool()


def _as_tensor(name: str, values: Any) -> Tensor:
    try:
        found = torch.as_tensor(values, device="cpu")
        is_of_python = found.is_floating_point() and not hasattr(values, "dtype")  # whose numbers have 64 bits
        return torch.as_tensor(values, dtype=torch.float64, device="cpu") if is_of_python else found
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(
            f"label {name!r} holds {values!r:.40}: expected numbers; texts are found by the number of their sample"
        ) from None
