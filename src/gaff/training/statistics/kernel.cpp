// One pass over a tensor: count, mean, squared deviations, extremes, zeros, non-finite values, and how often each
// power of two occurs. gaff/statistics/rows.py tells what the 74 numbers of a row are; plain.py does the same in torch.
//
// Built against torch's stable ABI: one build works for every torch from 2.10 on. Rows are float64. A call adds to what
// the row holds already, by the updating formulae of Chan, Golub & LeVeque, 1979.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr int64_t kChunk = 4096;         // elements that stay in the nearest cache
constexpr int64_t kBlock = 1 << 17;      // elements that one thread takes at once; fixed, so that sums do not depend on it
constexpr int64_t kAllCounted = 1 << 14; // above this many elements the powers of two are counted on a sample
constexpr int kBuckets = 64;
constexpr int kSubnormal = 0;            // the bucket of what is below the smallest normal number of float32
constexpr int kRow = 10 + kBuckets;      // count mean m2 min max zeros nan +inf -inf sampled, buckets

// The bucket of numbers of magnitude 2^exponent: one for each power of two from -38 to 17, coarser outside.
int bucket_of(int exponent) {
  if (exponent < -126) return kSubnormal;
  if (exponent < -96) return 1;
  if (exponent < -64) return 2;
  if (exponent < -38) return 3;
  if (exponent < 18) return exponent + 42;
  if (exponent < 32) return 60;
  if (exponent < 48) return 61;
  return exponent < 96 ? 62 : 63;
}

struct Block {
  double count = 0, mean = 0, m2 = 0;
  double min = std::numeric_limits<double>::infinity(), max = -std::numeric_limits<double>::infinity();
  double zeros = 0, nan = 0, positive = 0, negative = 0, sampled = 0;
  double buckets[kBuckets] = {};

  void add_moments(double n, double other_mean, double other_m2) {
    if (n == 0) return;
    const double total = count + n, delta = other_mean - mean, share = n / total;
    mean += delta * share;
    m2 += other_m2 + delta * delta * count * share;
    count = total;
  }

  void add(const Block& other) {
    add_moments(other.count, other.mean, other.m2);
    min = std::min(min, other.min);
    max = std::max(max, other.max);
    zeros += other.zeros;
    nan += other.nan;
    positive += other.positive;
    negative += other.negative;
    sampled += other.sampled;
    for (int i = 0; i < kBuckets; ++i) buckets[i] += other.buckets[i];
  }

  void add_to(double* row) const {
    Block known;
    known.count = row[0], known.mean = row[1], known.m2 = row[2], known.min = row[3], known.max = row[4];
    known.add_moments(count, mean, m2);
    row[0] = known.count, row[1] = known.mean, row[2] = known.m2;
    row[3] = std::min(row[3], min), row[4] = std::max(row[4], max);
    row[5] += zeros, row[6] += nan, row[7] += positive, row[8] += negative, row[9] += sampled;
    for (int i = 0; i < kBuckets; ++i) row[10 + i] += buckets[i];
  }
};

template <typename T> struct Bits;
template <> struct Bits<float> {
  using type = uint32_t;
  static constexpr type magnitude = 0x7fffffffu, exponent = 0x7f800000u;
};
template <> struct Bits<double> {
  using type = uint64_t;
  static constexpr type magnitude = 0x7fffffffffffffffull, exponent = 0x7ff0000000000000ull;
};

template <typename T>
inline typename Bits<T>::type bits_of(T value) {
  typename Bits<T>::type bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

struct Sums {
  double sum, squares, min, max;
  int64_t zeros;
};

#if defined(__AVX512F__)
constexpr int kRegister = 64; // bytes
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

template <typename T> struct Wide;
template <> struct Wide<float> {
  typedef float values __attribute__((vector_size(kRegister)));
  typedef int32_t integers __attribute__((vector_size(kRegister)));
};
template <> struct Wide<double> {
  typedef double values __attribute__((vector_size(kRegister)));
  typedef int64_t integers __attribute__((vector_size(kRegister)));
};

// Sums of value - shift over n values, in T for kShort steps at a time and in double from there on. NaN or inf among
// the values makes the sum NaN or inf.
template <typename T>
void sum_values(const T* values, int64_t n, double shift, Sums* out) {
  using V = typename Wide<T>::values;
  using I = typename Wide<T>::integers;
  constexpr int kLanes = kRegister / sizeof(T), kSets = 4, kShort = 16;
  constexpr int64_t kStep = kLanes * kSets;
  const T offset = static_cast<T>(shift);
  V low[kSets], high[kSets];
  I zeros[kSets] = {};
  for (int set = 0; set < kSets; ++set) low[set] = high[set] = V{} + values[0];
  double sum = 0, squares = 0;
  int64_t at = 0;
  while (at + kStep <= n) {
    V sums[kSets] = {}, powers[kSets] = {};
    const int64_t stop = std::min(n - kStep, at + kStep * (kShort - 1));
    for (; at <= stop; at += kStep) {
      for (int set = 0; set < kSets; ++set) {
        V value;
        I bits;
        std::memcpy(&value, values + at + set * kLanes, sizeof(value));
        std::memcpy(&bits, &value, sizeof(bits));
        const V deviation = value - offset;
        sums[set] += deviation;
        powers[set] += deviation * deviation;
        low[set] = value < low[set] ? value : low[set];
        high[set] = value > high[set] ? value : high[set];
        zeros[set] -= (bits & static_cast<decltype(bits[0] + 0)>(Bits<T>::magnitude)) == 0; // true is -1
      }
    }
    const V all = (sums[0] + sums[1]) + (sums[2] + sums[3]), each = (powers[0] + powers[1]) + (powers[2] + powers[3]);
    for (int lane = 0; lane < kLanes; ++lane) {
      sum += static_cast<double>(all[lane]);
      squares += static_cast<double>(each[lane]);
    }
  }
  *out = Sums{sum, squares, static_cast<double>(values[0]), static_cast<double>(values[0]), 0};
  for (; at < n; ++at) {
    const double value = static_cast<double>(values[at]), deviation = value - static_cast<double>(offset);
    out->sum += deviation;
    out->squares += deviation * deviation;
    out->min = value < out->min ? value : out->min;
    out->max = value > out->max ? value : out->max;
    out->zeros += (bits_of(values[at]) & Bits<T>::magnitude) == 0;
  }
  for (int set = 0; set < kSets; ++set) {
    for (int lane = 0; lane < kLanes; ++lane) {
      out->min = std::min(out->min, static_cast<double>(low[set][lane]));
      out->max = std::max(out->max, static_cast<double>(high[set][lane]));
      out->zeros += static_cast<int64_t>(zeros[set][lane]);
    }
  }
}

inline void widen_bfloat16(const uint16_t* __restrict from, int64_t n, uint32_t* __restrict to) {
  for (int64_t at = 0; at < n; ++at) to[at] = static_cast<uint32_t>(from[at]) << 16;
}

// Subnormal numbers are made normal as integers: a flag of the processor may turn them into zeros in arithmetic.
inline void widen_half(const uint16_t* __restrict from, int64_t n, uint32_t* __restrict to) {
  uint32_t subnormal = 0;
  for (int64_t at = 0; at < n; ++at) {
    const uint32_t half = from[at], exponent = half & 0x7c00u, fraction = half & 0x7fffu;
    const uint32_t raise = exponent == 0x7c00u ? 224u << 23 : exponent ? 112u << 23 : 0u;
    to[at] = ((fraction << 13) + raise) | ((half & 0x8000u) << 16);
    subnormal |= static_cast<uint32_t>(exponent == 0) & static_cast<uint32_t>(fraction != 0);
  }
  if (!subnormal) return;
  for (int64_t at = 0; at < n; ++at) {
    const uint32_t half = from[at], fraction = half & 0x3ffu;
    if ((half & 0x7c00u) != 0 || fraction == 0) continue;
    const int shift = __builtin_clz(fraction) - 21; // to where the leading one of a half is implied
    to[at] = ((half & 0x8000u) << 16) | static_cast<uint32_t>(113 - shift) << 23 | ((fraction << shift) & 0x3ffu) << 13;
  }
}

// One chunk, number by number in double: where squares would overflow or vanish in T, or where there is NaN or inf, which
// are counted and left out of everything else. Returns the number of zeros.
template <typename T>
int64_t add_exactly(const T* values, int64_t n, Block* block) {
  double count = 0, mean = 0, m2 = 0;
  int64_t zeros = 0;
  for (int64_t at = 0; at < n; ++at) {
    const T value = values[at];
    const auto bits = bits_of(value);
    if ((bits & Bits<T>::exponent) == Bits<T>::exponent) {
      const bool is_nan = (bits & Bits<T>::magnitude) != Bits<T>::exponent;
      (is_nan ? block->nan : bits == Bits<T>::exponent ? block->positive : block->negative) += 1;
      continue;
    }
    zeros += (bits & Bits<T>::magnitude) == 0;
    const double wide = static_cast<double>(value), delta = wide - mean;
    count += 1;
    mean += delta / count;
    m2 += delta * (wide - mean);
    block->min = std::min(block->min, wide);
    block->max = std::max(block->max, wide);
  }
  block->add_moments(count, mean, m2);
  block->zeros += static_cast<double>(zeros);
  return zeros;
}

// How often each power of two occurs, in four tables so that equal neighbours do not wait for each other.
struct Powers {
  uint32_t counts[4][256];
  int64_t zeros;
  int64_t next; // distance to the next element of the sample

  void clear(int64_t first) {
    std::memset(counts, 0, sizeof(counts));
    zeros = 0;
    next = first;
  }

  static int index_of(float value) { return static_cast<int>((bits_of(value) >> 23) & 0xffu); }
  static int index_of(double value) {
    const int biased = static_cast<int>((bits_of(value) >> 52) & 0x7ff);
    return biased == 0x7ff ? 255 : std::clamp(biased - 1023 + 127, 0, 254);
  }

  // `known` zeros are among the values; of a sample they are counted here.
  template <typename T>
  void add(const T* values, int64_t n, int64_t stride, int64_t known) {
    int64_t at = next;
    if (stride == 1) {
      zeros += known;
      for (; at + 4 <= n; at += 4) {
        ++counts[0][index_of(values[at])];
        ++counts[1][index_of(values[at + 1])];
        ++counts[2][index_of(values[at + 2])];
        ++counts[3][index_of(values[at + 3])];
      }
      for (; at < n; ++at) ++counts[0][index_of(values[at])];
    } else {
      for (; at < n; at += stride) {
        ++counts[at & 3][index_of(values[at])];
        zeros += (bits_of(values[at]) & Bits<T>::magnitude) == 0;
      }
    }
    next = at - n;
  }

  void add_to(Block* block, int64_t stride) const {
    for (int index = 0; index < 255; ++index) { // 255: NaN and inf
      uint32_t count = counts[0][index] + counts[1][index] + counts[2][index] + counts[3][index];
      if (!count) continue;
      block->sampled += static_cast<double>(count) * static_cast<double>(stride);
      if (index == 0) count -= static_cast<uint32_t>(zeros);
      block->buckets[index == 0 ? kSubnormal : bucket_of(index - 127)] +=
          static_cast<double>(count) * static_cast<double>(stride);
    }
  }
};

// Elementwise: each of n values belongs to a unit of its own.
template <typename T>
void span_across(const T* __restrict values, int64_t n, T* __restrict low, T* __restrict high, T* __restrict magnitude) {
  for (int64_t at = 0; at < n; ++at) {
    const T value = values[at];
    low[at] = value < low[at] ? value : low[at];
    high[at] = value > high[at] ? value : high[at];
    magnitude[at] += std::fabs(value);
  }
}

// All of n values belong to one unit.
template <typename T>
void span_along(const T* values, int64_t n, T* low, T* high, T* magnitude) {
  using V = typename Wide<T>::values;
  constexpr int64_t kLanes = kRegister / sizeof(T);
  V lows = V{} + *low, highs = V{} + *high, sums = {};
  int64_t at = 0;
  for (; at + kLanes <= n; at += kLanes) {
    V value;
    std::memcpy(&value, values + at, sizeof(value));
    lows = value < lows ? value : lows;
    highs = value > highs ? value : highs;
    sums += value < 0 ? -value : value;
  }
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    *low = lows[lane] < *low ? lows[lane] : *low;
    *high = highs[lane] > *high ? highs[lane] : *high;
    *magnitude += sums[lane];
  }
  for (; at < n; ++at) {
    *low = values[at] < *low ? values[at] : *low;
    *high = values[at] > *high ? values[at] : *high;
    *magnitude += std::fabs(values[at]);
  }
}

// Largest and smallest value and sum of magnitudes of each unit; the elements of a unit are `inner` neighbours in memory.
template <typename T>
struct Units {
  int64_t count, inner;
  std::vector<T> largest, smallest, magnitude;

  Units(int64_t count, int64_t inner)
      : count(count), inner(inner), largest(count, -std::numeric_limits<T>::infinity()),
        smallest(count, std::numeric_limits<T>::infinity()), magnitude(count, T(0)) {}

  void add(const T* values, int64_t begin, int64_t n) {
    for (int64_t at = 0; at < n;) {
      const int64_t place = begin + at, unit = (place / inner) % count;
      if (inner == 1) {
        const int64_t size = std::min(n - at, count - unit);
        span_across(values + at, size, &smallest[unit], &largest[unit], &magnitude[unit]);
        at += size;
      } else {
        const int64_t size = std::min(n - at, inner - place % inner);
        span_along(values + at, size, &smallest[unit], &largest[unit], &magnitude[unit]);
        at += size;
      }
    }
  }
};

// The elements of a tensor in the order of memory, as chunks of float or double.
struct Source {
  const char* data = nullptr;
  ScalarType dtype = ScalarType::Float;
  int64_t numel = 0;
  bool is_dense = true;
  std::vector<int64_t> sizes, strides; // of what is not dense: outermost first

  explicit Source(const Tensor& tensor) : dtype(tensor.scalar_type()), numel(tensor.numel()) {
    data = static_cast<const char*>(tensor.const_data_ptr());
    std::vector<std::pair<int64_t, int64_t>> dims;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.size(dim) != 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
    std::sort(dims.begin(), dims.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    int64_t expected = 1;
    for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
      is_dense &= dim->first == expected;
      expected *= dim->second;
    }
    for (const auto& [stride, size] : dims) strides.push_back(stride), sizes.push_back(size);
  }

  size_t width() const { return dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2; }

  // n elements from the given one on: in place where they lie so already, else copied into `room`.
  const char* gather(int64_t begin, int64_t n, char* room) const {
    const int64_t size = static_cast<int64_t>(width());
    if (is_dense) return data + begin * size;
    std::vector<int64_t> index(sizes.size());
    int64_t rest = begin, offset = 0;
    for (int64_t dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
      index[dim] = rest % sizes[dim];
      rest /= sizes[dim];
      offset += index[dim] * strides[dim];
    }
    for (int64_t at = 0; at < n; ++at) {
      std::memcpy(room + at * size, data + offset * size, size);
      for (int64_t dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
        offset += strides[dim];
        if (++index[dim] < sizes[dim]) break;
        offset -= strides[dim] * sizes[dim];
        index[dim] = 0;
      }
    }
    return room;
  }
};

// `shift` is near the mean of what came before; what it is not near to is summed once more around its own mean.
template <typename T>
void add_chunk(const T* values, int64_t n, int64_t stride, Block* block, Powers* powers) {
  Sums sums;
  const double size = static_cast<double>(n);
  double shift = static_cast<double>(static_cast<T>(block->mean)), offset = 0, m2 = 0;
  for (int attempt = 0; attempt < 2; ++attempt) {
    sum_values(values, n, shift, &sums);
    offset = sums.sum / size;
    m2 = std::max(0.0, sums.squares - sums.sum * offset);
    if (!(std::isfinite(sums.squares) && offset * offset * size > 4 * m2)) break;
    shift = static_cast<double>(static_cast<T>(shift + offset));
  }
  const bool may_vanish = sums.squares < 1e-30 * size && sums.min != sums.max && sizeof(T) < sizeof(double);
  if (std::isfinite(sums.squares) && !may_vanish) {
    block->add_moments(size, shift + offset, m2);
    block->min = std::min(block->min, sums.min);
    block->max = std::max(block->max, sums.max);
    block->zeros += static_cast<double>(sums.zeros);
  } else {
    sums.zeros = add_exactly(values, n, block);
  }
  if (stride) powers->add(values, n, stride, sums.zeros);
}

// Calls `work` with each chunk of a range, as float or double, where it begins and how long it is.
template <typename T, typename Work>
void each_chunk(const Source& source, int64_t begin, int64_t end, const Work& work) {
  alignas(64) char room[kChunk * sizeof(T)];
  alignas(64) uint32_t wide[kChunk];
  for (int64_t at = begin; at < end; at += kChunk) {
    const int64_t n = std::min(kChunk, end - at);
    const char* chunk = source.gather(at, n, room);
    if (source.width() == 2) {
      const auto* narrow = reinterpret_cast<const uint16_t*>(chunk);
      source.dtype == ScalarType::BFloat16 ? widen_bfloat16(narrow, n, wide) : widen_half(narrow, n, wide);
      chunk = reinterpret_cast<const char*>(wide);
    }
    work(reinterpret_cast<const T*>(chunk), at, n);
  }
}

template <typename T>
void add_range_as(const Source& source, int64_t begin, int64_t end, int64_t stride, Block* block) {
  Powers powers;
  if (stride) powers.clear((stride - begin % stride) % stride);
  each_chunk<T>(source, begin, end, [&](const T* values, int64_t, int64_t n) {
    add_chunk(values, n, stride, block, &powers);
  });
  if (stride) powers.add_to(block, stride);
}

void add_range(const Source& source, int64_t begin, int64_t end, int64_t stride, Block* block) {
  if (source.dtype == ScalarType::Double) {
    add_range_as<double>(source, begin, end, stride, block);
  } else {
    add_range_as<float>(source, begin, end, stride, block);
  }
}

int64_t stride_of(int64_t numel, bool histogram) {
  return !histogram ? 0 : numel <= kAllCounted ? 1 : (numel / kAllCounted) | 1; // odd: powers of two alias with channels
}

void check(const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
          dtype == ScalarType::BFloat16,
      "gaff: expected a tensor of float16, bfloat16, float32 or float64");
}

void check_row(const Tensor& row, int64_t numel) {
  STD_TORCH_CHECK(
      row.scalar_type() == ScalarType::Double && row.is_contiguous() && row.numel() == numel,
      "gaff: expected contiguous rows of ", kRow, " float64 each, in all ", numel, ", got ", row.numel());
}

void observe_each(const std::vector<Tensor>& tensors, double* rows, bool histogram) {
  std::vector<Source> sources;
  struct Task {
    int64_t tensor, begin;
  };
  std::vector<Task> tasks;
  int64_t total = 0;
  for (const Tensor& tensor : tensors) {
    check(tensor);
    sources.emplace_back(tensor);
    for (int64_t begin = 0; begin < sources.back().numel; begin += kBlock) {
      tasks.push_back({static_cast<int64_t>(sources.size()) - 1, begin});
    }
    total += sources.back().numel;
  }
  std::vector<Block> blocks(tasks.size());
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const Source& source = sources[tasks[at].tensor];
      const int64_t stop = std::min(source.numel, tasks[at].begin + kBlock);
      add_range(source, tasks[at].begin, stop, stride_of(source.numel, histogram), &blocks[at]);
    }
  };
  if (total < 2 * kBlock) {
    work(0, static_cast<int64_t>(tasks.size()));
  } else {
    torch::stable::parallel_for(0, static_cast<int64_t>(tasks.size()), 1, work);
  }
  for (size_t at = 0; at < tasks.size();) { // in order: the same sums on any number of threads
    Block whole;
    const int64_t tensor = tasks[at].tensor;
    for (; at < tasks.size() && tasks[at].tensor == tensor; ++at) whole.add(blocks[at]);
    whole.add_to(rows + tensor * kRow);
  }
}

void observe_(const Tensor& tensor, Tensor row, bool histogram) {
  check_row(row, kRow);
  observe_each({tensor}, static_cast<double*>(row.mutable_data_ptr()), histogram);
}

void observe_many_(std::vector<Tensor> tensors, Tensor rows, bool histogram) {
  check_row(rows, kRow * static_cast<int64_t>(tensors.size()));
  observe_each(tensors, static_cast<double*>(rows.mutable_data_ptr()), histogram);
}

template <typename T>
void observe_units(const Source& source, double* table, int64_t count, int64_t inner) {
  const int64_t blocks = (source.numel + kBlock - 1) / kBlock;
  std::vector<Units<T>> units(blocks, Units<T>(count, inner));
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      each_chunk<T>(source, block * kBlock, std::min(source.numel, (block + 1) * kBlock),
                    [&](const T* values, int64_t at, int64_t n) { units[block].add(values, at, n); });
    }
  };
  blocks < 2 ? work(0, blocks) : torch::stable::parallel_for(0, blocks, 1, work);
  for (const Units<T>& some : units) {
    for (int64_t unit = 0; unit < count; ++unit) {
      table[unit] = std::max(table[unit], static_cast<double>(some.largest[unit]));
      table[count + unit] = std::min(table[count + unit], static_cast<double>(some.smallest[unit]));
      table[2 * count + unit] += static_cast<double>(some.magnitude[unit]);
    }
  }
}

// units: [3, count], float64: largest, smallest, sum of magnitudes, of each unit so far; NaN passes none of these
void observe_units_(const Tensor& tensor, Tensor units, int64_t inner) {
  check(tensor);
  const int64_t count = units.size(1);
  check_row(units, 3 * count);
  const Source source(tensor);
  STD_TORCH_CHECK(
      source.is_dense && inner > 0 && count > 0 && source.numel % (count * inner) == 0,
      "gaff: expected a dense tensor of ", count, " units of ", inner, ", got ", source.numel, " elements");
  double* table = static_cast<double*>(units.mutable_data_ptr());
  if (source.dtype == ScalarType::Double) {
    observe_units<double>(source, table, count, inner);
  } else {
    observe_units<float>(source, table, count, inner);
  }
}

} // namespace

STABLE_TORCH_LIBRARY(gaff, library) {
  library.def("observe_(Tensor x, Tensor(a!) row, bool histogram) -> ()");
  library.def("observe_many_(Tensor[] x, Tensor(a!) rows, bool histogram) -> ()");
  library.def("observe_units_(Tensor x, Tensor(a!) units, int inner) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gaff, CPU, library) {
  library.impl("observe_", TORCH_BOX(&observe_));
  library.impl("observe_many_", TORCH_BOX(&observe_many_));
  library.impl("observe_units_", TORCH_BOX(&observe_units_));
}
