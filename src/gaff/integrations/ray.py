"""Ray: workers for ``gaff.harvest(..., engine="ray")``, and a stage for Ray Data. Needs the package ``ray``.

``OnRay(workers=4, gpus=1)`` says how many workers there are to be and what each takes. ``Extract`` is a stage of
``Dataset.map_batches`` that adds a column for each site, for those who read and write by Ray Data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gaff.compat import libraries
from gaff.compat.extras import need
from gaff.errors import PlanError
from gaff.harvesting.on_ray import OnRay
from gaff.sessions.take import take

__all__ = ["Extract", "OnRay"]


class Extract:
    """A stage of Ray Data: ``ds.map_batches(Extract, fn_constructor_args=(make, ["fc"], ["x"]), concurrency=2)``.

    Args:
        make: a function without arguments that makes the model; called once in each worker. The model is in evaluation
            mode there, on a GPU where Ray has given the worker one.
        sites: addresses of forward values; each becomes a column of that name, an array ``[rows, ...]``.
        inputs: columns of the batch that the model takes, in this order; or a dict from parameter to column.
        dtype: of the new columns; None: as they pass, and float32 for bfloat16 and float8, which NumPy does not have.

    Rows stay in their order, and other columns as they are. Raises PlanError for a column that is there already, and
    for a site whose first dimension are not the rows of the batch.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        sites: Sequence[str],
        inputs: Sequence[str] | Mapping[str, str],
        dtype: torch.dtype | None = None,
    ) -> None:
        need("numpy", "page", for_="gaff.integrations.ray.Extract")
        model = make().eval()
        if torch.cuda.is_available():  # Ray shows a worker the GPUs that it was given, and no others
            model.to("cuda")
        self._take = take(model, tuple(sites), {})
        self._device = libraries.device_of(model)
        if dtype is not None and not dtype.is_floating_point:
            raise PlanError(f"dtype={dtype} is no floating type: expected one, such as torch.float16")
        self._inputs, self._dtype = inputs, dtype

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with a column for each site."""
        named = self._inputs if isinstance(self._inputs, Mapping) else {}
        with torch.no_grad():
            found = self._take(
                *([] if named else [self._tensor(batch, name) for name in self._inputs]),
                **{name: self._tensor(batch, column) for name, column in named.items()},
            )
        rows = len(next(iter(batch.values())))
        for site, value in found.items():
            if site in batch:
                raise PlanError(f"the batch has a column {site!r} already: expected another name for it")
            if not isinstance(value, Tensor) or not value.dim() or len(value) != rows:
                raise PlanError(f"{site}: expected a tensor whose first dimension are the {rows} rows of the batch")
            batch[site] = self._array(site, value)
        return batch

    def _tensor(self, batch: dict[str, Any], name: str) -> Tensor:
        if name not in batch:
            raise PlanError(f"the batch has no column {name!r}: expected one of {', '.join(batch)}")
        if batch[name].dtype.kind not in "biufc":
            raise PlanError(f"column {name!r} holds no numbers ({batch[name].dtype}): texts, times, or objects such as "
                            "lists of unequal length; expected numbers of one shape in each row")  # fmt: skip
        return torch.as_tensor(batch[name].copy(), device="cpu").to(self._device)

    def _array(self, site: str, value: Tensor) -> Any:
        if value.layout != torch.strided:
            raise PlanError(
                f"{site}: a tensor of layout {value.layout} has no rows of a column: expected a strided one"
            )
        if self._dtype is not None and value.is_complex() and not self._dtype.is_complex:
            raise PlanError(f"{site}: dtype={self._dtype} would drop its imaginary parts: expected a complex one")
        value = value if self._dtype is None else value.to(self._dtype)
        is_known = value.dtype != torch.bfloat16 and (value.dtype.itemsize > 1 or not value.is_floating_point())
        return (value if is_known else value.float()).cpu().numpy()
