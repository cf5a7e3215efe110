// Kernels of kern/attention.h for one instruction set.
//
// A task is up to kQueries query rows that share a head of keys and values, and a range of keys; it goes through these
// in blocks with an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). While queries are few, the keys
// of a head are cut into parts of kPart, so that all threads have work, and the parts' results are merged. Blocks and
// parts begin at multiples of their size, wherever a row begins and ends: a row gives the same bits in any batch.
#pragma once
#include <float.h>

#include "elements.h"
#include "kern/attention.h"
#include "tiles.h"

namespace kern::KERN_NS {

constexpr int64_t kKeys = 64;               // of a block
constexpr int64_t kQueries = 64;            // rows of a task
constexpr int64_t kPart = 256;              // keys of a task while queries are few
constexpr int64_t kFewQueries = 16;         // positions up to which keys are cut into parts
constexpr int64_t kDotRows = 32;            // rows from which transposing the keys pays (measured on Zen 3)
constexpr int64_t kStateHead = 16;          // floats before a row's values: the largest score, the weights' sum
constexpr int64_t kTaskWork = 1 << 16;      // multiplications that are worth a task
constexpr int64_t kPartsMemory = 32 << 20;  // bytes of unmerged results

struct Span {
  int64_t from, to;
  bool empty() const { return from >= to; }
};

template <class T>
class Attention {
 public:
  explicit Attention(const kern_attention_args& args)
      : a(args),
        share_(args.q_heads / args.kv_heads),
        group_(share_ * args.queries),
        tiled_(tiled(group_)),
        pairs_(args.kv_heads * ((group_ + kQueries - 1) / kQueries)),
        dim_((args.dim + W - 1) / W * W),
        v_dim_((args.v_dim + W - 1) / W * W),
        state_(kStateHead + v_dim_),
        block_(args.dim > 256 ? kKeys / 2 : kKeys) {}

  void run() const {
    bool cut = a.queries <= kFewQueries && a.keys > kPart;
    int64_t work = least(group_, kQueries) * (cut ? kPart : a.keys) * (dim_ + v_dim_);
    int64_t step = most(1, kTaskWork / most(1, work));
    if (cut) return run_parts(step);
    int64_t tasks = a.rows * pairs_;
    chunks(tasks, step, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++) {
        int64_t i = tasks - 1 - t;  // the last queries see most keys: begin with them
        Work w = place(i / pairs_, i % pairs_, {0, a.keys}, nullptr);
        compute(w);
        for (int64_t m = 0; m < w.rows; m++) finish(w, m, 1, 0);
      }
    });
  }

 private:
  struct Work {
    int64_t row, kv_head;
    int64_t first, rows;  // of the group's query rows: head * queries + position
    Span keys;
    int64_t last;          // behind the last key that any row sees
    float* states;         // [rows][state_]
    float *q, *scores;     // [rows][dim_] scaled, [rows][kKeys]
    float *wide, *repacked;  // keys of a block as fp32 [block_][dim_], and transposed [dim_][block_]
    float* values;         // values of a block as fp32 [block_][v_dim_]
    Span spans[kQueries];  // the block's keys that each row sees
  };

  void run_parts(int64_t step) const {
    int64_t parts = (a.keys + kPart - 1) / kPart, apart = tiled_ * state_;
    int64_t row_floats = a.kv_heads * parts * apart;
    int64_t at_once = most(1, kPartsMemory / (row_floats * 4));
    for (int64_t row = 0; row < a.rows; row += at_once) {
      int64_t rows = least(at_once, a.rows - row);
      float* states = static_cast<float*>(scratch(SLOT_SHARED, static_cast<size_t>(rows * row_floats) * 4));
      auto at = [&](int64_t i, int64_t part) {  // task i of rows * pairs, in [rows, kv_heads, parts, tiled_, state_]
        return states + ((i / pairs_ * a.kv_heads + kv_head(i % pairs_)) * parts + part) * apart +
               first_query(i % pairs_) * state_;
      };
      chunks(rows * pairs_ * parts, step, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
          int64_t i = t / parts, part = t % parts;
          Span keys{part * kPart, least(a.keys, (part + 1) * kPart)};
          Work w = place(row + i / pairs_, i % pairs_, keys, at(i, part));
          compute(w);
        }
      });
      chunks(rows * pairs_, most(1, kTaskWork / (parts * apart)), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
          Work w = place(row + i / pairs_, i % pairs_, {0, a.keys}, at(i, 0));
          for (int64_t m = 0; m < w.rows; m++) finish(w, m, parts, apart);
        }
      });
    }
  }

  static constexpr int64_t kLine = 64 / sizeof(T);  // elements of a cache line

  static int64_t tiled(int64_t rows) { return rows <= 2 ? rows : (rows + kTile - 1) / kTile * kTile; }
  int64_t kv_head(int64_t pair) const { return pair / (pairs_ / a.kv_heads); }
  int64_t first_query(int64_t pair) const { return pair % (pairs_ / a.kv_heads) * kQueries; }

  // Task `pair` of a row: which queries, and where its memory is. Without `states` they are scratch too.
  Work place(int64_t row, int64_t pair, Span keys, float* states) const {
    Work w{};
    w.row = row;
    w.kv_head = kv_head(pair);
    w.first = first_query(pair);
    w.rows = least(kQueries, group_ - w.first);
    w.keys = keys;
    int64_t sizes[] = {kQueries * dim_, kQueries * kKeys, block_ * dim_, dim_ * block_, block_ * v_dim_,
                       states == nullptr ? kQueries * state_ : 0};
    float** parts[] = {&w.q, &w.scores, &w.wide, &w.repacked, &w.values, &w.states};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    float* memory = static_cast<float*>(scratch(SLOT_CHUNK, static_cast<size_t>(total) * 4));
    for (int i = 0; i < 6; i++) {
      *parts[i] = memory;
      memory += sizes[i];
    }
    if (states != nullptr) w.states = states;
    return w;
  }

  int64_t head(const Work& w, int64_t m) const { return w.kv_head * share_ + (w.first + m) / a.queries; }
  int64_t position(const Work& w, int64_t m) const { return (w.first + m) % a.queries; }
  int64_t length(int64_t row) const {
    return a.lengths == nullptr ? a.keys : most(0, least(a.lengths[row], a.keys));
  }

  // The keys that lengths, order and window leave to a query.
  Span seen(const Work& w, int64_t m) const {
    int64_t length = this->length(w.row), place = length - a.queries + position(w, m);
    bool ordered = a.causal || a.lengths != nullptr || a.window > 0;
    Span s{a.window > 0 ? most(0, place - a.window + 1) : 0, ordered ? least(length, place + 1) : length};
    return s.empty() ? Span{0, 0} : s;
  }

  const T* key(const Work& w, int64_t i) const {
    return static_cast<const T*>(a.k) + w.row * a.k_strides[0] + w.kv_head * a.k_strides[1] + i * a.k_strides[2];
  }
  const T* value(const Work& w, int64_t i) const {
    return static_cast<const T*>(a.v) + w.row * a.v_strides[0] + w.kv_head * a.v_strides[1] + i * a.v_strides[2];
  }
  int64_t mask_offset(const Work& w, int64_t m, int64_t i) const {
    return w.row * a.mask_strides[0] + head(w, m) * a.mask_strides[1] + position(w, m) * a.mask_strides[2] +
           i * a.mask_strides[3];
  }

  // Leaves each row's largest score, sum of weights and weighted values in its state.
  void compute(Work& w) const {
    Span all{w.keys.to, w.keys.from};
    int64_t tiled = this->tiled(w.rows);
    for (int64_t m = 0; m < w.rows; m++) {
      Span s = seen(w, m);
      all.from = least(all.from, most(s.from, w.keys.from));
      all.to = most(all.to, least(s.to, w.keys.to));
    }
    memset(w.states, 0, static_cast<size_t>(tiled * state_) * 4);
    for (int64_t m = 0; m < w.rows; m++)
      w.states[m * state_] = -FLT_MAX;  // finite: whatever is hidden by -inf then weighs nothing
    if (all.empty()) return;
    w.last = all.to;
    for (int64_t m = 0; m < w.rows; m++) {
      const T* q = static_cast<const T*>(a.q) + w.row * a.q_strides[0] + head(w, m) * a.q_strides[1] +
                   position(w, m) * a.q_strides[2];
      widen(q, 0, 1, a.dim, w.q + m * dim_, dim_, a.scale);
    }
    memset(w.q + w.rows * dim_, 0, static_cast<size_t>((tiled - w.rows) * dim_) * 4);
    memset(w.scores, 0, static_cast<size_t>(tiled * kKeys) * 4);
    for (int64_t at = all.from / block_ * block_; at < all.to; at += block_) {
      Span block{most(at, all.from), least(at + block_, all.to)};
      for (int64_t m = 0; m < w.rows; m++) {
        Span s = seen(w, m);
        w.spans[m] = {most(s.from, block.from) - at, least(s.to, block.to) - at};
      }
      if (a.mask_kind == KERN_MASK_BOOL && hidden(w, at)) continue;
      score(w, at, block);
      for (int64_t m = 0; m < w.rows; m++) weigh(w, m, at);
      if (w.rows == 1)
        add_values<1, 2 * kStrip>(w, at, block);
      else if (w.rows == 2)
        add_values<2, 2 * kStrip>(w, at, block);
      else
        add_values<kTile, kStrip>(w, at, block);
    }
  }

  // Whether a mask of booleans hides all of the block from all rows. They leave no trace then: see `finish`.
  bool hidden(const Work& w, int64_t at) const {
    const uint8_t* mask = static_cast<const uint8_t*>(a.mask);
    bool same_for_heads = a.mask_strides[1] == 0;
    int64_t rows = same_for_heads ? least(w.rows, a.queries) : w.rows;
    for (int64_t m = 0; m < rows; m++) {
      const uint8_t* p = mask + mask_offset(w, m, at);
      uint8_t any = 0;
      if (a.mask_strides[3] == 1)
        for (int64_t i = w.spans[m].from; i < w.spans[m].to; i++) any |= p[i];
      else
        for (int64_t i = w.spans[m].from; i < w.spans[m].to; i++) any |= p[i * a.mask_strides[3]];
      if (any) return false;
    }
    return true;
  }

  // What a tile of rows sees of the block.
  template <int R>
  static Span tile_span(const Work& w, int64_t m) {
    Span s = w.spans[m];
    for (int64_t r = m + 1; r < least(m + R, w.rows); r++) {
      if (w.spans[r].empty()) continue;
      s = s.empty() ? w.spans[r] : Span{least(s.from, w.spans[r].from), most(s.to, w.spans[r].to)};
    }
    return s;
  }

  void score(const Work& w, int64_t at, Span block) const {
    if (w.rows >= kDotRows) return score_transposed(w, at, block);
    if (dim_ != a.dim) {
      widen(key(w, block.from), a.k_strides[2], block.to - block.from, a.dim, w.wide + (block.from - at) * dim_, dim_);
      return score_dots(w, at, block.from - at, block.to - at, w.wide, dim_);
    }
    score_dots(w, at, block.from - at, block.to - at, key(w, at), a.k_strides[2]);
  }

  template <class K>
  void score_dots(const Work& w, int64_t at, int64_t from, int64_t to, const K* keys, int64_t stride) const {
    if (w.rows == 1)
      score_rows<1, 4>(w, at, from, to, keys, stride);
    else if (w.rows == 2)
      score_rows<2, 4>(w, at, from, to, keys, stride);
    else
      score_rows<kTile, kStrip>(w, at, from, to, keys, stride);
  }

  template <int R, int C, class K>
  void score_rows(const Work& w, int64_t at, int64_t from, int64_t to, const K* keys, int64_t stride) const {
    const T* values = value(w, at);  // fetched meanwhile
    int64_t i = from;
    for (; i + C <= to; i += C) {
      for (int64_t m = 0; m < w.rows; m += R)
        dot_tile<R, C>(w.q + m * dim_, dim_, keys + i * stride, stride, dim_, w.scores + m * kKeys + i, kKeys);
      for (int c = 0; c < C; c++)
        for (int64_t d = 0; d < a.v_dim; d += kLine) __builtin_prefetch(values + (i + c) * a.v_strides[2] + d);
    }
    for (; i < to; i++)
      for (int64_t m = 0; m < w.rows; m += R)
        dot_tile<R, 1>(w.q + m * dim_, dim_, keys + i * stride, stride, dim_, w.scores + m * kKeys + i, kKeys);
  }

  void score_transposed(const Work& w, int64_t at, Span block) const {
    int64_t from = block.from - at, to = block.to - at;
    widen(key(w, block.from), a.k_strides[2], to - from, a.dim, w.wide + from * dim_, dim_);
    memset(w.wide, 0, static_cast<size_t>(from * dim_) * 4);
    memset(w.wide + to * dim_, 0, static_cast<size_t>((block_ - to) * dim_) * 4);
    for (int64_t i = 0; i < block_; i += W)
      for (int64_t d = 0; d < dim_; d += 4)
        transpose_4(w.wide + i * dim_ + d, dim_, w.repacked + d * block_ + i, block_);
    for (int64_t i = 0; i < block_; i += kStrip * W)
      for (int64_t m = 0; m < w.rows; m += kTile) {
        Span s = tile_span<kTile>(w, m);
        if (s.empty() || s.to <= i || s.from >= i + kStrip * W) continue;
        product_tile<kTile, kStrip>(w.q + m * dim_, dim_, w.repacked + i, block_, dim_, w.scores + m * kKeys + i, kKeys,
                                    false);
      }
  }

  // Scores of a row to weights, relative to the largest score so far; zero for keys that it does not see.
  void weigh(const Work& w, int64_t m, int64_t at) const {
    Span s = w.spans[m];
    float* p = w.scores + m * kKeys;
    if (s.empty()) {
      memset(p, 0, static_cast<size_t>(block_) * 4);
      return;
    }
    if (a.mask_kind != KERN_MASK_NONE) apply_mask(p, s, mask_offset(w, m, at));
    for (int64_t i = 0; i < s.from; i++) p[i] = -INFINITY;
    for (int64_t i = s.to; i < block_; i++) p[i] = -INFINITY;
    float* state = w.states + m * state_;
    vf top = splat(state[0]);
    for (int64_t i = 0; i < block_; i += W) top = vmax(load(p + i), top);
    float peak = largest(top);
    vf mass = {};
    for (int64_t i = 0; i < block_; i += W) {
      vf e = vexp(load(p + i) - peak);
      store(p + i, e);
      mass += e;
    }
    if (peak != state[0]) {
      float fade = exp1(state[0] - peak);
      state[0] = peak;
      state[1] *= fade;
      for (int64_t i = 0; i < v_dim_; i += W) store(state + kStateHead + i, load(state + kStateHead + i) * fade);
    }
    state[1] += sum(mass);
  }

  void apply_mask(float* p, Span s, int64_t offset) const {
    int64_t step = a.mask_strides[3];
    if (a.mask_kind == KERN_MASK_BOOL) {
      const uint8_t* mask = static_cast<const uint8_t*>(a.mask) + offset;
      if (step == 1)
        for (int64_t i = s.from; i < s.to; i++) p[i] = mask[i] ? p[i] : -INFINITY;
      else
        for (int64_t i = s.from; i < s.to; i++) p[i] = mask[i * step] ? p[i] : -INFINITY;
      return;
    }
    with_type(a.mask_type, [&](auto of) {
      const auto* mask = static_cast<const typename decltype(of)::type*>(a.mask) + offset;
      int64_t i = s.from;
      if (step == 1)
        for (; i + W <= s.to; i += W) store(p + i, load(p + i) + load(mask + i));
      for (; i < s.to; i++) p[i] += to_float(mask[i * step]);
      return KERN_OK;
    });
  }

  template <int R, int N>
  void add_values(const Work& w, int64_t at, Span block) const {
    // many rows read the values many times: widen them once
    bool direct = v_dim_ == a.v_dim && (sizeof(T) == sizeof(float) || w.rows < kDotRows);
    if (direct) return add_strips<R, N>(w, at, value(w, at), a.v_strides[2]);
    widen(value(w, block.from), a.v_strides[2], block.to - block.from, a.v_dim, w.values + (block.from - at) * v_dim_,
          v_dim_);
    add_strips<R, N>(w, at, static_cast<const float*>(w.values), v_dim_);
  }

  template <int R, int N, class V>
  void add_strips(const Work& w, int64_t at, const V* values, int64_t stride) const {
    int64_t i = 0;
    for (; i + N * W <= v_dim_; i += N * W) add_strip<R, N>(w, at, values + i, stride, i);
    for (; i < v_dim_; i += W) add_strip<R, 1>(w, at, values + i, stride, i);
  }

  template <int R, int N, class V>
  void add_strip(const Work& w, int64_t at, const V* values, int64_t stride, int64_t i) const {
    const T* next = key(w, at + block_);  // fetched meanwhile: reading must not wait for computing
    for (int64_t m = 0; m < w.rows; m += R) {
      Span s = tile_span<R>(w, m);
      if (s.empty()) continue;
      product_tile<R, N>(w.scores + m * kKeys + s.from, kKeys, values + s.from * stride, stride, s.to - s.from,
                         w.states + m * state_ + kStateHead + i, state_, true, [&](int64_t j) {
                           if (m > 0 || at + block_ >= w.last) return;
                           for (int64_t d = 0; d < N * W; d += kLine)
                             __builtin_prefetch(next + (s.from + j) * a.k_strides[2] + i + d);
                         });
    }
  }

  // Merges a row's parts, whose states are `apart` floats from each other, with the sink and writes the result.
  void finish(const Work& w, int64_t m, int64_t parts, int64_t apart) const {
    int64_t head = this->head(w, m);
    const float* states = w.states + m * state_;
    T* out = static_cast<T*>(a.out) + w.row * a.out_strides[0] + head * a.out_strides[1] +
             position(w, m) * a.out_strides[2];
    float peak = states[0], mass = 0.0f;
    for (int64_t i = 1; i < parts; i++) peak = states[i * apart] > peak ? states[i * apart] : peak;
    if (a.sinks != nullptr) {
      float logit = sink(head);
      peak = logit > peak ? logit : peak;
      mass = exp1(logit - peak);
    }
    float* total = w.values;
    memset(total, 0, static_cast<size_t>(v_dim_) * 4);
    for (int64_t i = 0; i < parts; i++) {
      const float* state = states + i * apart;
      float weight = exp1(state[0] - peak);
      mass += state[1] * weight;
      for (int64_t d = 0; d < v_dim_; d += W) store(total + d, load(total + d) + load(state + kStateHead + d) * weight);
    }
    Span s = seen(w, m);
    if (mass == 0.0f && s.empty()) mass = 1.0f;
    if (mass == 0.0f && a.mask_kind == KERN_MASK_BOOL) return mean(w, s, out);
    vectors(a.v_dim, [&](int64_t d, int n) { put(out + d, load(total + d) / mass, n); });
  }

  float sink(int64_t head) const {
    float logit = 0.0f;
    with_type(a.sinks_type, [&](auto of) {
      logit = to_float(static_cast<const typename decltype(of)::type*>(a.sinks)[head]);
      return KERN_OK;
    });
    return logit;
  }

  // Hiding everything is like hiding nothing from a query without preferences.
  void mean(const Work& w, Span s, T* out) const {
    for (int64_t d = 0; d < a.v_dim; d++) {
      float total = 0.0f;
      for (int64_t i = s.from; i < s.to; i++) total += to_float(value(w, i)[d]);
      out[d] = from_float<T>(total / static_cast<float>(s.to - s.from));
    }
  }

  const kern_attention_args& a;
  int64_t share_, group_;  // query heads, and query rows, per head of keys
  int64_t tiled_;          // query rows, with room for whole tiles
  int64_t pairs_;          // of a head of keys and up to kQueries of its query rows
  int64_t dim_, v_dim_;    // padded to vectors
  int64_t state_, block_;  // floats of a state, keys of a block
};

// Rows that share a slot, one such run after the other.
template <class T>
void attend_by_slot(const kern_attention_args& a) {
  for (int64_t first = 0, last; first < a.rows; first = last) {
    for (last = first + 1; last < a.rows && a.slots[last] == a.slots[first]; last++) {
    }
    kern_attention_args run = a;
    run.rows = 1;
    run.queries = last - first;
    run.q = static_cast<const T*>(a.q) + first * a.q_strides[0];
    run.k = static_cast<const T*>(a.k) + a.slots[first] * a.k_strides[0];
    run.v = static_cast<const T*>(a.v) + a.slots[first] * a.v_strides[0];
    run.out = static_cast<T*>(a.out) + first * a.out_strides[0];
    run.q_strides[2] = a.q_strides[0];
    run.out_strides[2] = a.out_strides[0];
    run.lengths = a.lengths + last - 1;
    Attention<T>(run).run();
  }
}

inline int attention(const kern_attention_args* a) {
  if (a->kv_heads <= 0 || a->q_heads % a->kv_heads != 0) return KERN_UNSUPPORTED;
  if (a->slots != nullptr && (a->queries != 1 || a->lengths == nullptr || a->mask_kind != KERN_MASK_NONE))
    return KERN_UNSUPPORTED;
  return with_type(a->type, [&](auto of) {
    using T = typename decltype(of)::type;
    if (a->slots != nullptr)
      attend_by_slot<T>(*a);
    else
      Attention<T>(*a).run();
    return KERN_OK;
  });
}

}  // namespace kern::KERN_NS
