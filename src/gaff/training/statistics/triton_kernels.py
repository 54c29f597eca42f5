"""The statistics of a tensor, in Triton's language: what ``fused`` launches on a GPU.

A *stretch* is what one program of a launch counts: tiles of a tensor, each as far from the next as there are programs.
Its moments go to a line of *parts*, which a second launch merges into the row in a fixed order, so that a run tells the
same bits as the one before it; magnitudes are added to the row at once: they are whole numbers, exact in any order.

Names in capitals are known when a kernel is compiled. ``row``, ``parts``, ``x`` are addresses.
"""

import triton
import triton.language as tl

_DOWN = tl.constexpr(2.0**-13)  # so that a sum over a tile does not overflow
_UP = tl.constexpr(2.0**13)


@triton.jit
def _wide(x):
    """Numbers of half precision as float32, and others as they are; bfloat16 by its bits, subnormal numbers too."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def _merged(count, mean, m2, more, its_mean, its_m2):
    """Moments of two parts together: Chan, Golub & LeVeque, 1979."""
    total = count + more
    share = more / tl.maximum(total, 1.0)
    delta = its_mean - mean
    return total, mean + delta * share, m2 + its_m2 + delta * delta * count * share


@triton.jit
def _scale_of(largest):
    """A power of two by which numbers up to ``largest`` become at most four."""
    if largest.dtype == tl.float64:
        exponent = (largest.to(tl.int64, bitcast=True) >> 52) & 2047
        return (tl.minimum(tl.maximum(2046 - exponent, 1), 2046) << 52).to(tl.float64, bitcast=True)
    else:
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
        return (tl.minimum(tl.maximum(254 - exponent, 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _moments(deviation, about, scale, number):
    """Mean and sum of squared deviations of so many numbers, from their scaled deviations from ``about``.

    That is near their mean, not quite it: the sum of the deviations corrects both.
    """
    total = tl.sum(deviation).to(tl.float64)
    squares = tl.sum(deviation * deviation).to(tl.float64)
    wide, n = scale.to(tl.float64), tl.maximum(number, 1.0)
    mean = about.to(tl.float64) + total / n / wide
    return mean, tl.maximum(squares - total * total / n, 0.0) / wide / wide


@triton.jit
def _count_odd_tile(x, is_there):
    """Moments, extremes and counts of a tile that is not full, or that holds what is not finite."""
    is_finite = is_there & (tl.abs(x) < float("inf"))
    number = tl.sum(tl.where(is_finite, 1, 0)).to(tl.float64)
    low = tl.min(tl.where(is_finite, x, float("inf")))
    high = tl.max(tl.where(is_finite, x, float("-inf")))
    about = (tl.sum(tl.where(is_finite, x * _DOWN, 0.0)) / tl.maximum(number, 1.0).to(x.dtype)) * _UP
    scale = _scale_of(tl.where(number > 0, tl.maximum(tl.abs(low), tl.abs(high)), 0.0))
    mean, m2 = _moments(tl.where(is_finite, x * scale - about * scale, 0.0), about, scale, number)
    zeros = tl.sum(tl.where(is_there & (x == 0), 1, 0)).to(tl.float64)
    nan = tl.sum(tl.where(is_there & (x != x), 1, 0)).to(tl.float64)
    positive = tl.sum(tl.where(is_there & (x == float("inf")), 1, 0)).to(tl.float64)
    negative = tl.sum(tl.where(is_there & (x == float("-inf")), 1, 0)).to(tl.float64)
    return number, mean, m2, low.to(tl.float64), high.to(tl.float64), zeros, nan, positive, negative


@triton.jit
def _count_stretch(pointer, elements, first, programs, TILE: tl.constexpr):
    """Moments, extremes and counts of the tiles of one program, in float64; what is not finite is counted apart.

    A full tile of finite numbers goes the short way: a sum of all that is finite says so, and the rest needs no masks.
    """
    count, mean, m2 = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    low, high = tl.full((), float("inf"), tl.float64), tl.full((), float("-inf"), tl.float64)
    zeros, nan = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    positive, negative = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    lanes = tl.arange(0, TILE)
    begin = first.to(tl.int64) * TILE
    while begin < elements:
        left = tl.minimum(elements - begin, TILE).to(tl.int32)
        if left == TILE:
            x = _wide(tl.load(pointer + begin + lanes))
        else:
            x = _wide(tl.load(pointer + begin + lanes, mask=lanes < left, other=0.0))
        total = tl.sum(x * _DOWN)
        if (left == TILE) & (tl.abs(total) < float("inf")):
            its_low, its_high = tl.min(x), tl.max(x)
            about, scale = total / TILE * _UP, _scale_of(tl.maximum(tl.abs(its_low), tl.abs(its_high)))
            more = tl.full((), TILE, tl.float64)
            its_mean, its_m2 = _moments(x * scale - about * scale, about, scale, more)
            low, high = tl.minimum(low, its_low.to(tl.float64)), tl.maximum(high, its_high.to(tl.float64))
            zeros += tl.sum((x == 0).to(tl.int32)).to(tl.float64)
        else:
            more, its_mean, its_m2, odd_low, odd_high, its_zeros, its_nan, its_positive, its_negative = _count_odd_tile(
                x, lanes < left
            )
            low, high = tl.minimum(low, odd_low), tl.maximum(high, odd_high)
            zeros += its_zeros
            nan += its_nan
            positive += its_positive
            negative += its_negative
        count, mean, m2 = _merged(count, mean, m2, more, its_mean, its_m2)
        begin += programs.to(tl.int64) * TILE
    return count, mean, m2, low, high, zeros, nan, positive, negative


@triton.jit
def _bucket_of(x):
    """The bucket of magnitudes of each number (``record.statistics.bucket_of``); 64 of zeros, 65 of NaN and inf.

    The exponent is read from the bits. One of float64 that float32 does not reach counts at its ends.
    """
    if x.dtype == tl.float64:
        biased = (x.to(tl.int64, bitcast=True) >> 52) & 2047
        power = tl.where(biased == 2047, 128, tl.minimum(tl.maximum(biased - 1023, -127), 127)).to(tl.int32)
    else:
        power = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    bucket = tl.where(power < -126, 0, tl.where(power < -96, 1, tl.where(power < -64, 2, 3)))
    above = tl.where(power < 32, 60, tl.where(power < 48, 61, tl.where(power < 96, 62, 63)))
    bucket = tl.where(power < -38, bucket, tl.where(power < 18, power + 42, above))
    return tl.where(x == 0, 64, tl.where(power == 128, 65, bucket))


@triton.jit
def _count_powers(pointer, row, elements, stride, first, programs, SAMPLES: tl.constexpr):
    """Add to a row the magnitudes of every ``stride``-th element, each as often as it stands for others."""
    lanes = tl.arange(0, SAMPLES)
    counts = tl.zeros((128,), tl.int32)
    samples = (elements + stride - 1) // stride
    begin = first.to(tl.int64) * SAMPLES
    while begin < samples:
        at = begin + lanes
        x = _wide(tl.load(pointer + at * stride, mask=at < samples, other=0.0))
        counts += tl.histogram(tl.where(at < samples, _bucket_of(x), 65), 128)
        begin += programs.to(tl.int64) * SAMPLES
    bins = tl.arange(0, 128)
    found = (counts * stride).to(tl.float64)
    sampled = tl.sum(tl.where(bins < 65, found, 0.0))
    if sampled > 0:
        tl.atomic_add(row + 9, sampled)
        tl.atomic_add(row + 10 + bins, found, mask=(bins < 64) & (found > 0))


@triton.jit
def _add_to(row, count, mean, m2, low, high, zeros, nan, positive, negative):
    """Merge a part into a row."""
    total, together, deviations = _merged(tl.load(row), tl.load(row + 1), tl.load(row + 2), count, mean, m2)
    tl.store(row, total)
    tl.store(row + 1, together)
    tl.store(row + 2, deviations)
    tl.store(row + 3, tl.minimum(tl.load(row + 3), low))
    tl.store(row + 4, tl.maximum(tl.load(row + 4), high))
    tl.store(row + 5, tl.load(row + 5) + zeros)
    tl.store(row + 6, tl.load(row + 6) + nan)
    tl.store(row + 7, tl.load(row + 7) + positive)
    tl.store(row + 8, tl.load(row + 8) + negative)


@triton.jit
def _store(part, count, mean, m2, low, high, zeros, nan, positive, negative):
    """Write a line of parts."""
    tl.store(part, count)
    tl.store(part + 1, mean)
    tl.store(part + 2, m2)
    tl.store(part + 3, low)
    tl.store(part + 4, high)
    tl.store(part + 5, zeros)
    tl.store(part + 6, nan)
    tl.store(part + 7, positive)
    tl.store(part + 8, negative)


@triton.jit(do_not_specialize=["elements", "stride", "programs"])
def count_one(x, row, parts, elements, stride, programs, IS_ALONE: tl.constexpr, TILE: tl.constexpr,
               SAMPLES: tl.constexpr):  # fmt: skip
    """One stretch of one tensor, into its line of ``parts``; at once into the row where it is the only one."""
    first = tl.program_id(0)
    n, mean, m2, low, high, zeros, nan, positive, negative = _count_stretch(x, elements, first, programs, TILE)
    if IS_ALONE:
        _add_to(row, n, mean, m2, low, high, zeros, nan, positive, negative)
    else:
        _store(parts + first * 9, n, mean, m2, low, high, zeros, nan, positive, negative)
    if stride > 0:
        _count_powers(x, row, elements, stride, first, programs, SAMPLES)


@triton.jit
def _merge_parts(parts, row, number, SIZE: tl.constexpr):
    """Merge so many lines of parts into a row, all at once and always in the same order."""
    lanes = tl.arange(0, SIZE)
    is_there = lanes < number
    line = parts + lanes * 9
    count = tl.load(line, mask=is_there, other=0.0)
    mean = tl.load(line + 1, mask=is_there, other=0.0)
    total = tl.sum(count)
    together = tl.sum(mean * (count / tl.maximum(total, 1.0)))
    away = mean - together
    m2 = tl.sum(tl.load(line + 2, mask=is_there, other=0.0) + away * away * count)
    low = tl.min(tl.load(line + 3, mask=is_there, other=float("inf")))
    high = tl.max(tl.load(line + 4, mask=is_there, other=float("-inf")))
    zeros = tl.sum(tl.load(line + 5, mask=is_there, other=0.0))
    nan = tl.sum(tl.load(line + 6, mask=is_there, other=0.0))
    positive = tl.sum(tl.load(line + 7, mask=is_there, other=0.0))
    negative = tl.sum(tl.load(line + 8, mask=is_there, other=0.0))
    _add_to(row, total, together, m2, low, high, zeros, nan, positive, negative)


@triton.jit(do_not_specialize=["number"])
def merge_one(parts, row, number, SIZE: tl.constexpr):
    """All parts of one tensor."""
    _merge_parts(parts, row, number, SIZE)


@triton.jit(do_not_specialize=["number"])
def count_many(table, number, rows, parts, KIND: tl.constexpr, IS_ALIGNED: tl.constexpr, WIDTH: tl.constexpr,
                TILE: tl.constexpr, SAMPLES: tl.constexpr):  # fmt: skip
    """One stretch of one of many tensors. ``table``: addresses, elements, strides, rows, first programs, then whose
    stretch each program counts."""
    program = tl.program_id(0)
    at = tl.load(table + 5 * number + 1 + program)
    address = tl.load(table + at)
    elements = tl.load(table + number + at)
    stride = tl.load(table + 2 * number + at)
    row = rows + tl.load(table + 3 * number + at) * WIDTH
    begin = tl.load(table + 4 * number + at)
    programs = tl.load(table + 4 * number + at + 1) - begin
    first = program - begin
    if KIND == 0:
        x = address.to(tl.pointer_type(tl.float32))
    elif KIND == 1:
        x = address.to(tl.pointer_type(tl.float16))
    elif KIND == 2:
        x = address.to(tl.pointer_type(tl.bfloat16))
    else:
        x = address.to(tl.pointer_type(tl.float64))
    if IS_ALIGNED:
        x = tl.multiple_of(x, 16)
    n, mean, m2, low, high, zeros, nan, positive, negative = _count_stretch(x, elements, first, programs, TILE)
    _store(parts + program * 9, n, mean, m2, low, high, zeros, nan, positive, negative)
    if stride > 0:
        _count_powers(x, row, elements, stride, first, programs, SAMPLES)


@triton.jit(do_not_specialize=["number"])
def merge_many(table, number, parts, rows, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """All parts of one of many tensors."""
    at = tl.program_id(0)
    row = rows + tl.load(table + 3 * number + at) * WIDTH
    begin = tl.load(table + 4 * number + at)
    _merge_parts(parts + begin * 9, row, tl.load(table + 4 * number + at + 1) - begin, SIZE)


@triton.jit(do_not_specialize=["count", "inner", "values"])
def count_units(x, units, count, inner, values, UNITS: tl.constexpr, SIZE: tl.constexpr):
    """Largest, smallest and sum of magnitudes of some units, of ``values`` elements each."""
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    lanes = tl.arange(0, SIZE)
    high = tl.full((UNITS,), float("-inf"), tl.float64)
    low = tl.full((UNITS,), float("inf"), tl.float64)
    size = tl.zeros((UNITS,), tl.float64)
    begin = tl.zeros((), tl.int64)
    while begin < values:
        at = begin + lanes
        is_there = (at < values)[:, None] & (unit < count)[None, :]
        place = ((at // inner)[:, None] * count + unit[None, :]) * inner + (at % inner)[:, None]
        found = _wide(tl.load(x + place, mask=is_there, other=0.0))
        high = tl.maximum(high, tl.max(tl.where(is_there & (found == found), found, float("-inf")), 0).to(tl.float64))
        low = tl.minimum(low, tl.min(tl.where(is_there & (found == found), found, float("inf")), 0).to(tl.float64))
        size += tl.sum(tl.abs(found), 0).to(tl.float64)
        begin += SIZE
    is_unit = unit < count
    known = tl.load(units + unit, mask=is_unit, other=0.0)
    tl.store(units + unit, tl.maximum(known, high), mask=is_unit)
    known = tl.load(units + count + unit, mask=is_unit, other=0.0)
    tl.store(units + count + unit, tl.minimum(known, low), mask=is_unit)
    known = tl.load(units + 2 * count + unit, mask=is_unit, other=0.0)
    tl.store(units + 2 * count + unit, known + size, mask=is_unit)
