// Kernels of kern/vocabulary.h for one instruction set. Rows are cut into pieces of one size, so that one long row
// keeps all threads busy; a piece's result does not depend on who computes it, and they are merged in order.
#pragma once
#include "elements.h"
#include "kern/vocabulary.h"
#include "order.h"

namespace kern::KERN_NS {

constexpr int64_t kPiece = 8192;

// The natural logarithm of a positive normal number, to about 1 unit in the last place (Cephes' polynomial; Moshier).
KERN_INLINE vf vlog(vf v) {
  vi bits = (vi)v;
  vi exponent = ((bits - 0x3f3504f3) >> 23);  // of v / sqrt(1/2), rounded down
  vf m = (vf)(bits - (exponent << 23)) - 1.0f;
  vf e = __builtin_convertvector(exponent, vf);
  vf p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  vf z = m * m;
  p = p * m * z + e * -2.12194440e-4f - z * 0.5f;
  return m + p + e * 0.693359375f;
}

// Calls piece(row, number, from, to) for all pieces of all rows.
template <class Body>
KERN_INLINE void each_piece(int64_t rows, int64_t width, const Body& piece) {
  int64_t pieces = (width + kPiece - 1) / kPiece;
  each_row(rows * pieces, least(width, kPiece), [&](int64_t i) {
    int64_t from = i % pieces * kPiece;
    piece(i / pieces, i % pieces, from, least(width, from + kPiece));
  });
}

// A result per piece, in memory that the threads share.
template <class T>
KERN_INLINE T* piece_results(int64_t rows, int64_t width, int64_t* pieces) {
  *pieces = (width + kPiece - 1) / kPiece;
  return static_cast<T*>(scratch(SLOT_SHARED, static_cast<size_t>(rows * *pieces) * sizeof(T)));
}

// -- softmax ---------------------------------------------------------------------------------------------------------

// The sum of e^(x - base), base being the largest x, or 0 where all are -Inf.
struct Mass {
  float largest, sum;
  float base() const { return largest == -INFINITY ? 0.0f : largest; }
};

template <class T>
KERN_INLINE Mass mass_of(const T* x, int64_t width) {
  vf top = splat(-INFINITY), total = {};
  vectors(width, [&](int64_t i, int n) { top = vmax(get(x + i, n, -INFINITY), top); });
  Mass mass{largest(top), 0.0f};
  vectors(width, [&](int64_t i, int n) { total += vexp(get(x + i, n, -INFINITY) - mass.base()); });
  mass.sum = sum(total);
  return mass;
}

KERN_INLINE Mass merged(const Mass* masses, int64_t count) {
  Mass whole{-INFINITY, 0.0f};
  for (int64_t i = 0; i < count; i++)
    if (masses[i].largest > whole.largest) whole.largest = masses[i].largest;
  for (int64_t i = 0; i < count; i++) whole.sum += masses[i].sum * exp1(masses[i].base() - whole.base());
  return whole;
}

template <class T>
KERN_INLINE Mass* masses_of(const kern_long_row_args* a, int64_t* pieces) {
  Mass* masses = piece_results<Mass>(a->rows, a->width, pieces);
  each_piece(a->rows, a->width, [&](int64_t row, int64_t piece, int64_t from, int64_t to) {
    masses[row * *pieces + piece] = mass_of(static_cast<const T*>(a->x) + row * a->x_stride + from, to - from);
  });
  return masses;
}

inline int softmax(const kern_long_row_args* a) {
  return with_type(a->type, [&](auto of) {
    using T = typename decltype(of)::type;
    int64_t pieces;
    const Mass* masses = masses_of<T>(a, &pieces);
    each_piece(a->rows, a->width, [&](int64_t row, int64_t, int64_t from, int64_t to) {
      Mass whole = merged(masses + row * pieces, pieces);
      const T* x = static_cast<const T*>(a->x) + row * a->x_stride + from;
      T* out = static_cast<T*>(a->out) + row * a->width + from;
      float share = 1.0f / whole.sum;
      vectors(to - from, [&](int64_t i, int n) { put(out + i, vexp(get(x + i, n) - whole.base()) * share, n); });
    });
    return KERN_OK;
  });
}

inline int logsumexp(const kern_long_row_args* a) {
  return with_type(a->type, [&](auto of) {
    using T = typename decltype(of)::type;
    int64_t pieces;
    const Mass* masses = masses_of<T>(a, &pieces);
    for (int64_t row = 0; row < a->rows; row++) {
      Mass whole = merged(masses + row * pieces, pieces);
      float value = whole.largest == INFINITY ? INFINITY : whole.base() + logf(whole.sum);
      static_cast<T*>(a->out)[row] = from_float<T>(value);
    }
    return KERN_OK;
  });
}

inline int exp_mass(const kern_long_row_args* a) {
  if (a->type != KERN_F32) return KERN_UNSUPPORTED;
  int64_t pieces;
  int64_t* sums = piece_results<int64_t>(a->rows, a->width, &pieces);
  each_piece(a->rows, a->width, [&](int64_t row, int64_t piece, int64_t from, int64_t to) {
    const float* x = static_cast<const float*>(a->x) + row * a->x_stride + from;
    int64_t total = 0;
    vectors(to - from, [&](int64_t i, int n) {
      vf e = vexp(get(x + i, n, -INFINITY)) * 0x1p40f;
      for (int lane = 0; lane < W; lane++) total += static_cast<int64_t>(e[lane]);
    });
    sums[row * pieces + piece] = total;
  });
  for (int64_t row = 0; row < a->rows; row++) {
    int64_t total = 0;
    for (int64_t i = 0; i < pieces; i++) total += sums[row * pieces + i];
    static_cast<int64_t*>(a->out)[row] = total;
  }
  return KERN_OK;
}

// -- the largest -----------------------------------------------------------------------------------------------------

struct Best {
  float value;
  uint32_t index;
};

// Of values that come a vector at a time, in ascending order of their indices.
struct Search {
  vf value = splat(-INFINITY);
  vi index = {};

  KERN_INLINE void see(vf v, int64_t at) {
    vi better = v > value;
    value = better ? v : value;
    index = better ? lanes() + static_cast<int32_t>(at) : index;
  }
  KERN_INLINE Best best() const {
    Best b{value[0], static_cast<uint32_t>(index[0])};
    for (int i = 1; i < W; i++) {
      Best other{value[i], static_cast<uint32_t>(index[i])};
      if (other.value > b.value || (other.value == b.value && other.index < b.index)) b = other;
    }
    return b;
  }
  static KERN_INLINE vi lanes() {
    vi v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
  }
};

KERN_INLINE uint32_t first_best(const Best* bests, int64_t count) {
  Best b = bests[0];
  for (int64_t i = 1; i < count; i++)
    if (bests[i].value > b.value) b = bests[i];
  return b.index;
}

inline int peaks(const kern_peaks_args* a) {
  struct Part {
    Best best;
    float sum;
  };
  if (a->width < 1) return KERN_UNSUPPORTED;
  int64_t pieces;
  Part* parts = piece_results<Part>(a->rows, a->width, &pieces);
  each_piece(a->rows, a->width, [&](int64_t row, int64_t piece, int64_t from, int64_t to) {
    const float* x = a->x + row * a->x_stride + from;
    Search search;
    vf total{};
    vectors(to - from, [&](int64_t i, int n) {
      search.see(get(x + i, n, -INFINITY), from + i);
      total += get(x + i, n);
    });
    parts[row * pieces + piece] = {search.best(), sum(total)};
  });
  for (int64_t row = 0; row < a->rows; row++) {
    Part whole = parts[row * pieces];
    for (int64_t i = 1; i < pieces; i++) {
      const Part& part = parts[row * pieces + i];
      if (part.best.value > whole.best.value) whole.best = part.best;
      whole.sum += part.sum;
    }
    a->sums[row] = whole.sum;
    a->values[row] = whole.best.value;
    a->indices[row] = whole.best.index;
  }
  return KERN_OK;
}

// -- Gumbel noise ----------------------------------------------------------------------------------------------------

// The tokens [from, from + W) of the stream of a key; see noise.py for the reasons behind every step.
KERN_INLINE vf gumbel(uint64_t key, int64_t from) {
  typedef uint64_t vl __attribute__((vector_size(W * 8)));
  vl state;
  for (int i = 0; i < W; i++) state[i] = static_cast<uint64_t>(from + i + 1);
  state = key + state * 0x9e3779b97f4a7c15u;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  state = (state ^ (state >> 31)) >> 33;
  vf uniform = (__builtin_convertvector(__builtin_convertvector(state, vi), vf) + 0.5f) * 0x1p-31f;
  uniform = vmin(uniform, splat(1.0f - 0x1p-24f));
  vf rest = 1.0f - uniform;
  constexpr float tiny = 1e-30f;
  vf exponential = uniform * ((tiny - vlog(rest)) / ((1.0f - rest) + tiny));
  return -vlog(exponential);
}

inline int gumbel_argmax(const kern_gumbel_argmax_args* a) {
  int64_t pieces;
  Best* bests = piece_results<Best>(a->rows, a->width, &pieces);
  each_piece(a->rows, a->width, [&](int64_t row, int64_t piece, int64_t from, int64_t to) {
    const float* z = a->z + row * a->z_stride + from;
    Search search;
    vectors(to - from, [&](int64_t i, int n) {
      vf v = get(z + i, n, -INFINITY);
      search.see(v >= a->floors[row] ? v + gumbel(a->keys[row], from + i) : splat(-INFINITY), from + i);
    });
    bests[row * pieces + piece] = search.best();
  });
  for (int64_t row = 0; row < a->rows; row++) a->tokens[row] = first_best(bests + row * pieces, pieces);
  return KERN_OK;
}

// -- the first k -----------------------------------------------------------------------------------------------------

// Collects what is larger than the `count`-th largest so far; whenever there is no more room, keeps `count` of it.
KERN_INLINE void top_k_row(const kern_top_k_args* a, int64_t row) {
  const float* x = a->x + row * a->x_stride;
  int64_t room = 4 * a->count + 1024, held = 0;
  uint64_t* keys = static_cast<uint64_t*>(scratch(SLOT_CHUNK, static_cast<size_t>(room + W) * sizeof(uint64_t)));
  int32_t least_rank = INT32_MIN;  // what is not above cannot be among the first
  bool all = true;                 // nothing has been dropped yet
  vectors(a->width, [&](int64_t i, int n) {
    vi bits = (vi)get(x + i, n);
    vi rank = bits ^ ((bits >> 31) & 0x7fffffff);  // integers in the order of the floats
    vi above = rank > least_rank;
    bool any = all;
    for (int lane = 0; lane < W; lane++) any |= above[lane] != 0;
    if (!any) return;
    for (int lane = 0; lane < n; lane++) {
      if (!all && !above[lane]) continue;
      uint32_t descending = 0x7fffffffu - static_cast<uint32_t>(rank[lane]);
      keys[held++] = static_cast<uint64_t>(descending) << 32 | static_cast<uint64_t>(i + lane);
    }
    if (held < room) return;
    keep_smallest(keys, held, a->count);
    held = a->count;
    uint64_t worst = 0;
    for (int64_t j = 0; j < held; j++) worst = keys[j] > worst ? keys[j] : worst;
    least_rank = static_cast<int32_t>(0x7fffffffu - static_cast<uint32_t>(worst >> 32));
    all = false;
  });
  keep_smallest(keys, held, a->count);
  sort_keys(keys, a->count);
  for (int64_t j = 0; j < a->count; j++) {
    uint32_t index = static_cast<uint32_t>(keys[j]);
    a->indices[row * a->count + j] = index;
    a->values[row * a->count + j] = x[index];
  }
}

inline int top_k(const kern_top_k_args* a) {
  if (a->count < 1 || a->count > a->width) return KERN_UNSUPPORTED;
  chunks(a->rows, most(1, kRowWork / a->width), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) top_k_row(a, row);
  });
  return KERN_OK;
}

// -- the smallest, in no order ----------------------------------------------------------------------------------------

template <class T>
KERN_INLINE void arg_partition_row(const kern_arg_partition_args* a, int64_t row) {
  const T* x = static_cast<const T*>(a->x) + row * a->x_stride;
  auto* keys = static_cast<uint64_t*>(scratch(SLOT_CHUNK, static_cast<size_t>(a->width) * sizeof(uint64_t)));
  for (int64_t i = 0; i < a->width; i++) {
    const float value = to_float(x[i]) + 0.0f;  // there is one zero
    const auto bits = bit_cast<uint32_t>(value);
    uint32_t rank = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if (value != value) rank = UINT32_MAX;
    keys[i] = static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(i);
  }
  keep_smallest(keys, a->width, a->kth);
  for (int64_t i = 0; i < a->width; i++) a->out[row * a->width + i] = static_cast<uint32_t>(keys[i]);
}

inline int arg_partition(const kern_arg_partition_args* a) {
  if (a->kth < 0 || a->kth >= a->width || a->width > UINT32_MAX) return KERN_UNSUPPORTED;
  return with_type(a->type, [&](auto of) {
    chunks(a->rows, most(1, kRowWork / a->width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) arg_partition_row<typename decltype(of)::type>(a, row);
    });
    return KERN_OK;
  });
}

}  // namespace kern::KERN_NS
