// The pairs of rows of x and matrices of a call, ordered by matrix, so that each matrix is read once.
#pragma once
#include "quant_format.h"

namespace kern::KERN_NS {

constexpr int64_t kBlockRows = 512;  // rows of x that are prepared at a time: bounds the scratch they take

struct Segment {  // slots [first, first + count) have the same matrix
  int64_t matrix, first, count;
};

struct Slots {
  int64_t count, segment_count;
  int64_t* in;        // [count] row of x
  int64_t* out;       // [count] row of out
  int32_t* of;        // [count] segment
  Segment* segments;  // none crosses a multiple of kBlockRows

  int64_t largest() const {
    int64_t rows = 0;
    for (int64_t i = 0; i < segment_count; i++) rows = most(rows, segments[i].count);
    return rows;
  }
  int64_t smallest() const {
    int64_t rows = count;
    for (int64_t i = 0; i < segment_count; i++) rows = least(rows, segments[i].count);
    return rows;
  }
};

// Calls body(pair) for the pairs in order of their matrices. `next` has room for matrices + 1.
template <class Body>
KERN_INLINE void each_pair(const kern_quant_matmul_args& a, int64_t* next, int64_t* order, const Body& body) {
  if (a.rhs == nullptr) {
    for (int64_t p = 0; p < a.pairs; p++) body(p);
    return;
  }
  memset(next, 0, static_cast<size_t>(a.w.matrices + 1) * sizeof *next);
  for (int64_t p = 0; p < a.pairs; p++) next[a.rhs[p] + 1]++;
  for (int64_t m = 0; m < a.w.matrices; m++) next[m + 1] += next[m];
  for (int64_t p = 0; p < a.pairs; p++) order[next[a.rhs[p]]++] = p;
  for (int64_t i = 0; i < a.pairs; i++) body(order[i]);
}

inline Slots find_slots(const kern_quant_matmul_args& a) {
  const int64_t count = a.pairs * a.rows;
  const int64_t most_segments = least(a.pairs, count) + count / kBlockRows + 1;
  const int64_t words = 2 * count + 3 * most_segments + a.w.matrices + 1 + a.pairs;
  const int64_t bytes = words * static_cast<int64_t>(sizeof(int64_t)) + count * static_cast<int64_t>(sizeof(int32_t));
  int64_t* memory = static_cast<int64_t*>(scratch(SLOT_SHARED_2, static_cast<size_t>(bytes)));
  Slots s{count, 0, memory, memory + count, nullptr, reinterpret_cast<Segment*>(memory + 2 * count)};
  int64_t* next = memory + 2 * count + 3 * most_segments;
  int64_t* order = next + a.w.matrices + 1;
  s.of = reinterpret_cast<int32_t*>(order + a.pairs);
  int64_t slot = 0;
  each_pair(a, next, order, [&](int64_t p) {
    const int64_t matrix = a.rhs != nullptr ? a.rhs[p] : p, block = a.lhs != nullptr ? a.lhs[p] : p / a.repeat;
    for (int64_t row = 0; row < a.rows; row++, slot++) {
      s.in[slot] = block * a.rows + row;
      s.out[slot] = p * a.rows + row;
      Segment* last = s.segments + s.segment_count - 1;
      if (s.segment_count == 0 || last->matrix != matrix || slot % kBlockRows == 0)
        s.segments[s.segment_count++] = {matrix, slot, 1};
      else
        last->count++;
      s.of[slot] = static_cast<int32_t>(s.segment_count - 1);
    }
  });
  return s;
}

// Calls body(first segment, behind the last, first slot, slots) for each kBlockRows slots.
template <class Body>
KERN_INLINE void each_slot_block(const Slots& s, const Body& body) {
  for (int64_t begin = 0; begin < s.segment_count;) {
    const int64_t slot = s.segments[begin].first;
    int64_t end = begin + 1;
    while (end < s.segment_count && s.segments[end].first < slot + kBlockRows) end++;
    body(begin, end, slot, least(kBlockRows, s.count - slot));
    begin = end;
  }
}

KERN_INLINE int64_t element_bytes(int type) { return type == KERN_F32 ? 4 : 2; }

inline void read_row(const void* rows, int type, int64_t at, int64_t count, float* to) {
  with_type(type, [&]<class T>(Of<T>) {
    const T* from = static_cast<const T*>(rows) + at;
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load(from + i));
    for (; i < count; i++) to[i] = to_float(from[i]);
    return 0;
  });
}

inline void write_row(const float* from, int64_t count, void* rows, int type, int64_t at) {
  with_type(type, [&]<class T>(Of<T>) {
    T* to = static_cast<T*>(rows) + at;
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load(from + i));
    store_some(to + i, load_some(from + i, static_cast<int>(count - i)), static_cast<int>(count - i));
    return 0;
  });
}

}  // namespace kern::KERN_NS
