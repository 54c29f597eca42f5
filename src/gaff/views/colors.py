"""The colours of pictures, 256 of each kind, as three bytes: what the page's ``color.ts`` has, for cells and figures.

``RAMP`` goes from dark to light in even steps of lightness, so that an order is seen in grey, too; ``SIGNED`` from blue
over white, in the middle, to red.
"""

from __future__ import annotations

_ANCHORS = ((88, 46, 141), (122, 62, 148), (157, 79, 143), (190, 98, 131),
            (219, 122, 115), (239, 152, 103), (248, 188, 110), (252, 229, 154))  # fmt: skip
_COOL, _WHITE, _WARM = (38, 110, 190), (245, 245, 245), (205, 72, 48)


def _between(one: tuple[int, ...], other: tuple[int, ...], share: float) -> bytes:
    return bytes(round(a + (b - a) * share) for a, b in zip(one, other, strict=True))


def _ramp(share: float) -> bytes:
    at = share * (len(_ANCHORS) - 1)
    low = min(len(_ANCHORS) - 2, int(at))
    return _between(_ANCHORS[low], _ANCHORS[low + 1], at - low)


RAMP = tuple(_ramp(at / 255) for at in range(256))
SIGNED = tuple(_between(_WHITE, _COOL if at < 127.5 else _WARM, abs(at - 127.5) / 127.5) for at in range(256))
