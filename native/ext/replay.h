// A model call that is kept and done again, at other positions and for other tokens, without building its graph.
//
// Where a token takes milliseconds, Python that writes down the same few hundred operations again, and MLX, which looks
// for an order to do them in, take a good part of them. What such a call depends on is little: its tokens, the keys and
// values before them, and how many those are. So it is built twice without being computed, at the least and the greatest
// position, and compared operation by operation. Either all that differs is understood - keys and values are written
// and read up to the position, and numbers count it - or the call is refused, with the reason.
//
// Keys and values are written in place: who replays sees to it that nothing lazy still reads what is overwritten.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "layout.h"
#include "mlx/distributed/primitives.h"

namespace phalanx_cpu {

// What is not known while a call is built. Whoever tries to compute it is told off by MLX.
inline mx::array placeholder(const mx::Shape& shape, mx::Dtype dtype) { return mx::array(shape, dtype, nullptr, {}); }

class Replay {
 public:
  // One way the call was built: results, then the buffers as it leaves them.
  struct Call {
    Arrays inputs;
    Arrays outputs;
    int position;
  };

  // Throws std::invalid_argument, saying what cannot be replayed.
  Replay(const Call& low, const Call& high, Arrays buffers) : low_(low.position), high_(high.position) {
    if (low_ >= high_) refuse("there are no two positions to compare");
    for (const mx::array& buffer : buffers)
      if (!is_known(buffer) || !buffer.flags().row_contiguous) refuse("a buffer is not there yet");
    Comparison compared{*this, low, high, buffers};
    compared.run();
    for (const mx::array& buffer : buffers) buffers_.emplace_back(buffer.shape(), buffer.dtype());
  }

  int low() const { return low_; }
  int high() const { return high_; }
  size_t size() const { return nodes_.size(); }

  // The call at `position`: its results, which the stream is still computing. The buffers have been written when the
  // stream comes to whatever is evaluated next.
  Arrays run(const Arrays& inputs, const Arrays& buffers, int position) const {
    check(inputs, buffers, position);
    Arrays values;
    values.reserve(values_);
    values.insert(values.end(), inputs.begin(), inputs.end());
    values.insert(values.end(), buffers.begin(), buffers.end());
    for (const Counter& counter : counters_) values.push_back(counter.at(position));
    for (const Node& node : nodes_) node.dispatch(values, position - low_);
    Arrays results;
    for (int result : results_) {
      const mx::array& coming = values[result];
      results.emplace_back(coming.shape(), coming.dtype(), std::make_shared<Coming>(stream_, coming), Arrays{});
    }
    auto& encoder = mx::cpu::get_command_encoder(stream_);
    encoder.dispatch([values = std::move(values), temporaries = std::exchange(encoder.temporaries(), {})] {});
    return results;
  }

 private:
  // A result that the stream is computing. Whoever evaluates it waits for the stream, as for any other.
  class Coming : public mx::Primitive {
   public:
    Coming(mx::Stream stream, mx::array result) : mx::Primitive(stream), result_(std::move(result)) {}
    void eval_cpu(const Arrays&, Arrays& out) override { out[0].copy_shared_buffer(result_); }
    void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error("phalanx_cpu runs on the CPU only"); }
    const char* name() const override { return "KernReplayed"; }

   private:
    mx::array result_;
  };

  enum class Kind { kOperation, kWrite, kRead };

  struct Node {
    Kind kind;
    std::shared_ptr<mx::Primitive> primitive;
    Arrays constants;                         // inputs, those that are not constant being anything
    std::vector<std::pair<int, int>> varying;  // input, number of the value
    std::vector<std::pair<mx::Shape, mx::Dtype>> outputs;
    mx::Shape start, end;  // of what is written or read, at the least position
    int axis = 0;          // that grows with the position

    void dispatch(Arrays& values, int by) const {
      Arrays in = constants;
      for (auto [input, value] : varying) in[input] = values[value];
      if (kind == Kind::kWrite) return write(in, values, by);
      Arrays out;
      out.reserve(outputs.size());
      for (const auto& [shape, dtype] : outputs) out.emplace_back(shape, dtype, primitive, Arrays{});
      if (kind == Kind::kRead) {
        mx::Shape longer = outputs[0].first;
        longer[axis] += by;
        out[0] = mx::array(longer, outputs[0].second, primitive, Arrays{});
        read(in[0], out[0]);
      } else {
        primitive->eval_cpu(in, out);
      }
      for (mx::array& o : out) values.push_back(std::move(o));
    }

    static int64_t first(const mx::array& buffer, const mx::Shape& from) {
      int64_t offset = 0;
      for (size_t i = 0; i < from.size(); i++) offset += from[i] * buffer.strides(static_cast<int>(i));
      return offset;
    }

    void write(Arrays& in, Arrays& values, int by) const {
      mx::array &buffer = in[0], &update = in[1];
      mx::Shape from = start;
      from[axis] += by;
      auto* to = static_cast<char*>(data(buffer)) + first(buffer, from) * static_cast<int64_t>(buffer.itemsize());
      mx::cpu::get_command_encoder(primitive->stream())
          .dispatch([to, source = static_cast<const char*>(data(update)), shape = update.shape(),
                     strides = update.strides(), places = buffer.strides(), size = update.itemsize()] {
            copy(to, source, shape, strides, places, size, 0);
          });
      values.push_back(buffer);
    }

    static void copy(char* to, const char* from, const mx::Shape& shape, const mx::Strides& strides,
                     const mx::Strides& places, size_t size, size_t axis) {
      const auto count = static_cast<size_t>(shape[axis]);
      if (axis + 1 == shape.size() && strides[axis] == 1 && places[axis] == 1) {
        std::memcpy(to, from, count * size);
        return;
      }
      for (size_t i = 0; i < count; i++) {
        char* there = to + static_cast<int64_t>(i * size) * places[axis];
        const char* here = from + static_cast<int64_t>(i * size) * strides[axis];
        axis + 1 == shape.size() ? void(std::memcpy(there, here, size))
                                 : copy(there, here, shape, strides, places, size, axis + 1);
      }
    }

    // A view; that nothing is said to be contiguous is never wrong.
    void read(const mx::array& buffer, mx::array& out) const {
      int64_t last = 0;
      for (int i = 0; i < static_cast<int>(out.ndim()); i++) last += (out.shape(i) - 1) * buffer.strides(i);
      out.copy_shared_buffer(buffer, buffer.strides(), {false, false, false}, last + 1, first(buffer, start));
    }
  };

  // A number that counts the position.
  struct Counter {
    int more;
    mx::Dtype dtype;
    mx::array at(int position) const { return mx::array(position + more, dtype); }
  };

  [[noreturn]] static void refuse(const std::string& why) { throw std::invalid_argument(why); }

  static bool is_known(const mx::array& a) { return !a.has_primitive() && a.status() != mx::array::Status::unscheduled; }

  using Like = std::vector<std::pair<mx::Shape, mx::Dtype>>;

  static bool fit(const Arrays& arrays, const Like& like) {
    bool fit = arrays.size() == like.size();
    for (size_t i = 0; fit && i < arrays.size(); i++)
      fit = is_known(arrays[i]) && arrays[i].flags().row_contiguous && arrays[i].shape() == like[i].first &&
            arrays[i].dtype() == like[i].second;
    return fit;
  }

  void check(const Arrays& inputs, const Arrays& buffers, int position) const {
    if (position < low_ || position > high_)
      refuse("replay: position " + std::to_string(position) + " is not one of " + std::to_string(low_) + " to " +
             std::to_string(high_));
    if (!fit(inputs, inputs_)) refuse("replay: these are not the inputs of the call");
    if (!fit(buffers, buffers_)) refuse("replay: these are not the buffers of the call");
  }

  // Walks both graphs at once, and fills the replay.
  class Comparison {
   public:
    Comparison(Replay& replay, const Call& low, const Call& high, const Arrays& buffers)
        : replay_(replay), low_(low), high_(high), buffers_(buffers), by_(high.position - low.position) {}

    void run() {
      if (low_.inputs.size() != high_.inputs.size()) refuse("the calls do not have the same inputs");
      for (size_t i = 0; i < low_.inputs.size(); i++) {
        const mx::array &a = low_.inputs[i], &b = high_.inputs[i];
        if (a.shape() != b.shape() || a.dtype() != b.dtype()) refuse("the calls do not have the same inputs");
        replay_.inputs_.push_back({a.shape(), a.dtype()});
        name(a, b, static_cast<int>(i));
      }
      const int inputs = static_cast<int>(low_.inputs.size());
      if (low_.outputs.size() != high_.outputs.size() || low_.outputs.size() < buffers_.size())
        refuse("the calls do not have the same results");
      for (size_t i = 0; i < buffers_.size(); i++) {
        name(buffers_[i], buffers_[i], inputs + static_cast<int>(i));
        version_of_[inputs + static_cast<int>(i)] = i;
      }
      for (size_t i = 0; i < low_.outputs.size(); i++) find_counters(low_.outputs[i], high_.outputs[i]);
      next_ = given();
      for (size_t i = 0; i < low_.outputs.size(); i++) visit(low_.outputs[i], high_.outputs[i]);
      replay_.values_ = next_;
      finish();
    }

   private:
    using Pair = std::pair<mx::array, mx::array>;

    // Values that are there before anything is computed.
    int given() const { return static_cast<int>(low_.inputs.size() + buffers_.size() + replay_.counters_.size()); }

    void name(const mx::array& low, const mx::array& high, int value) {
      number_[low.id()] = value;
      other_[low.id()] = high.id();
    }

    // Whether a pair has been met; the same one of the first call must always go with the same one of the second.
    bool is_named(const mx::array& low, const mx::array& high) const {
      auto found = other_.find(low.id());
      if (found == other_.end()) return false;
      if (found->second != high.id()) refuse("what is used twice at one position is not at another");
      return true;
    }

    // Calls `visit` with every pair of arrays below this one, inputs first.
    template <class Enter, class Leave>
    void walk(const mx::array& low, const mx::array& high, Enter enter, Leave leave) {
      std::vector<std::pair<Pair, size_t>> path;
      if (enter(low, high)) path.push_back({{low, high}, 0});
      while (!path.empty()) {
        auto& [pair, next] = path.back();
        if (next == pair.first.inputs().size()) {
          Pair done = pair;
          path.pop_back();
          leave(done.first, done.second);
          continue;
        }
        const mx::array a = pair.first.inputs()[next], b = pair.second.inputs()[next];
        next++;
        if (enter(a, b)) path.push_back({{a, b}, 0});
      }
    }

    // Values are numbered in the order in which they come, counters before all that is computed.
    void find_counters(const mx::array& low, const mx::array& high) {
      walk(
          low, high,
          [this](const mx::array& a, const mx::array& b) {
            if (is_named(a, b) || seen_.count(a.id()) != 0) return false;
            if (a.has_primitive() != b.has_primitive()) refuse("the graphs differ");
            if (!a.has_primitive()) {
              leaf(a, b);
              return false;
            }
            compare(a, b);
            seen_.insert(a.id());
            return true;
          },
          [](const mx::array&, const mx::array&) {});
    }

    void leaf(const mx::array& a, const mx::array& b) {
      if (!is_known(a) || !is_known(b)) refuse("it reads what is not known");
      if (a.id() != b.id()) {
        if (a.shape() != b.shape() || a.dtype() != b.dtype()) refuse("a constant changes its shape with the position");
        if (const auto more = counts(a, b)) {
          name(a, b, given());
          replay_.counters_.push_back({*more, a.dtype()});
          return;
        }
        if (!is_same(a, b)) refuse("a constant changes with the position");
      }
      name(a, b, kConstant);
    }

    std::optional<int> counts(const mx::array& a, const mx::array& b) const {
      if (a.dtype() != mx::int32 || a.ndim() != 0 || !a.is_available() || !b.is_available()) return std::nullopt;
      const int low = a.data<int32_t>()[0], high = b.data<int32_t>()[0];
      return high - low == by_ ? std::optional<int>(low - low_.position) : std::nullopt;
    }

    static bool is_same(const mx::array& a, const mx::array& b) {
      constexpr size_t kSmall = size_t{1} << 20;
      if (!a.is_available() || !b.is_available() || a.nbytes() > kSmall) return false;
      const bool dense = a.flags().row_contiguous && b.flags().row_contiguous;
      return dense && std::memcmp(data(a), data(b), a.nbytes()) == 0;
    }

    // Both were made by the same operation, but for what `plan` understands.
    static void compare(const mx::array& a, const mx::array& b) {
      mx::Primitive &p = a.primitive(), &q = b.primitive();
      if (typeid(p) != typeid(q) || std::strcmp(p.name(), q.name()) != 0 || a.inputs().size() != b.inputs().size() ||
          a.siblings().size() != b.siblings().size() || a.sibling_position() != b.sibling_position() ||
          a.dtype() != b.dtype())
        refuse(std::string(p.name()) + " and " + q.name() + " stand for the same");
      if (p.stream() != q.stream() || p.device() != mx::Device::cpu) refuse("it computes elsewhere as well");
    }

    void visit(const mx::array& low, const mx::array& high) {
      walk(
          low, high, [this](const mx::array& a, const mx::array& b) { return !is_named(a, b); },
          [this](const mx::array& a, const mx::array& b) {
            if (!is_named(a, b)) plan(a, b);  // a sibling may have come first
          });
    }

    void plan(const mx::array& a, const mx::array& b) {
      if (replay_.nodes_.empty()) replay_.stream_ = a.primitive().stream();
      if (a.primitive().stream() != replay_.stream_) refuse("it computes on several streams");
      Node node{Kind::kOperation, a.primitive_ptr(), a.inputs(), {}, {}, {}, {}, 0};
      for (size_t i = 0; i < a.inputs().size(); i++) {
        const int value = number_.at(a.inputs()[i].id());
        if (value == kConstant) continue;
        node.varying.push_back({static_cast<int>(i), value});
        node.constants[i] = nothing_;  // and not the graph, nor buffers
        users_[value].push_back({static_cast<int>(replay_.nodes_.size()), static_cast<int>(i)});
      }
      const Arrays outputs = a.outputs(), others = b.outputs();
      for (size_t i = 0; i < outputs.size(); i++) {
        node.outputs.push_back({outputs[i].shape(), outputs[i].dtype()});
        name(outputs[i], others[i], next_ + static_cast<int>(i));
      }
      if (!understand(node, a, b)) {
        if (!is_alike(a.primitive(), b.primitive()))
          refuse(std::string(a.primitive().name()) + " changes with the position");
        for (size_t i = 0; i < outputs.size(); i++)
          if (outputs[i].shape() != others[i].shape())
            refuse(std::string(a.primitive().name()) + " has another shape at another position");
      }
      order_sums(node);
      next_ += static_cast<int>(outputs.size());
      replay_.nodes_.push_back(std::move(node));
    }

    // Whether both operations do the same. Some cannot say so themselves.
    bool is_alike(const mx::Primitive& a, const mx::Primitive& b) {
      const std::string name = a.name();
      if (name == "Depends" || name == "Expm1") return true;
      if (name.size() < 9 || name.compare(name.size() - 9, 9, "AllReduce") != 0) return a.is_equivalent(b);
      using Sum = mx::distributed::DistPrimitive;
      return static_cast<const Sum&>(a).group().raw_group() == static_cast<const Sum&>(b).group().raw_group();
    }

    // How many sums over ranks lie on the longest way to a node, itself included. All ranks have to sum in one order,
    // and only those that depend on each other have one.
    void order_sums(const Node& node) {
      int sums = 0;
      for (auto [input, value] : node.varying) sums = std::max(sums, sums_to_[value]);
      const std::string name = node.primitive->name();
      if (name.find("All") != std::string::npos && ++sums != ++sums_) refuse("sums over ranks have no order");
      for (size_t i = 0; i < node.outputs.size(); i++) sums_to_[next_ + static_cast<int>(i)] = sums;
    }

    // Writing new keys and values behind the old ones, and reading all of them.
    bool understand(Node& node, const mx::array& a, const mx::array& b) {
      if (node.varying.empty() || node.varying[0].first != 0) return false;
      const auto version = version_of_.find(node.varying[0].second);
      if (version == version_of_.end()) return false;
      const std::string name = a.primitive().name();
      mx::Shape start, end, strides, other_start, other_end, other_strides;
      if (name == "SliceUpdate") {
        std::tie(std::ignore, start, end, strides) = static_cast<const mx::SliceUpdate&>(a.primitive()).state();
        std::tie(std::ignore, other_start, other_end, other_strides) =
            static_cast<const mx::SliceUpdate&>(b.primitive()).state();
        node.kind = Kind::kWrite;
        if (a.inputs()[1].dtype() != a.dtype() || node.outputs.size() != 1) refuse("keys are converted as they are written");
        version_of_[next_] = version->second;
      } else if (name == "Slice") {
        std::tie(start, end, strides) = static_cast<const mx::Slice&>(a.primitive()).state();
        std::tie(other_start, other_end, other_strides) = static_cast<const mx::Slice&>(b.primitive()).state();
        node.kind = Kind::kRead;
      } else {
        return false;
      }
      const bool writes = node.kind == Kind::kWrite;
      node.axis = -1;
      for (size_t i = 0; i < start.size(); i++) {
        if (strides[i] != 1 || other_strides[i] != 1 || start[i] < 0) refuse("keys are not neighbours");
        const int more = other_end[i] - end[i], later = other_start[i] - start[i];
        if (more == 0 && later == 0) continue;
        if (more != by_ || later != (writes ? by_ : 0) || node.axis >= 0)
          refuse("keys are not written and read up to the position");
        node.axis = static_cast<int>(i);
      }
      if (node.axis < 0) refuse("keys are written or read at a fixed place");
      node.start = std::move(start);
      node.end = std::move(end);
      mx::Shape expected = a.shape();
      if (!writes) expected[node.axis] += by_;
      if (b.shape() != expected) refuse("keys are not as long as the position says");
      if (writes)
        for (size_t i = 0; i < node.start.size(); i++)
          if (a.inputs()[1].shape(static_cast<int>(i)) != node.end[i] - node.start[i]) refuse("keys are repeated");
      return true;
    }

    // Who uses what, and what the results are.
    void finish() {
      for (const auto& [value, users] : users_)
        for (auto [user, input] : users) {
          const Node& node = replay_.nodes_[user];
          if (node.kind == Kind::kWrite && input == 0 && users.size() > 1) refuse("keys are read while they are written");
          if (node.kind == Kind::kOperation && version_of_.count(value) != 0) refuse("a buffer is used as a whole");
          if (reads(value) && std::strcmp(node.primitive->name(), "KernAttention") != 0)
            refuse(std::string("keys are read by ") + node.primitive->name());
        }
      const size_t results = low_.outputs.size() - buffers_.size();
      for (size_t i = 0; i < low_.outputs.size(); i++) {
        const int value = number_.at(low_.outputs[i].id());
        if (i < results) {
          if (value < given() || reads(value) ||
              version_of_.count(value) != 0)
            refuse("a result is not computed");
          replay_.results_.push_back(value);
        } else {
          const auto version = version_of_.find(value);
          if (version == version_of_.end() || version->second != i - results) refuse("a buffer is not left in its place");
        }
      }
    }

    bool reads(int value) const {
      int next = given();
      for (const Node& node : replay_.nodes_) {
        if (value < next + static_cast<int>(node.outputs.size()))
          return value >= next && node.kind == Kind::kRead;
        next += static_cast<int>(node.outputs.size());
      }
      return false;
    }

    static constexpr int kConstant = -1;

    Replay& replay_;
    const Call &low_, &high_;
    const Arrays& buffers_;
    const int by_;
    const mx::array nothing_ = mx::array(0);
    int next_ = 0;
    std::map<std::uintptr_t, int> number_;  // of the first call's arrays
    std::map<std::uintptr_t, std::uintptr_t> other_;
    std::set<std::uintptr_t> seen_;
    std::map<int, int> sums_to_;
    int sums_ = 0;
    std::map<int, size_t> version_of_;  // value -> the buffer that it is
    std::map<int, std::vector<std::pair<int, int>>> users_;  // value -> nodes and their inputs
  };

  const int low_, high_;
  int values_ = 0;
  mx::Stream stream_ = mx::default_stream(mx::Device::cpu);
  Like inputs_, buffers_;
  std::vector<Counter> counters_;
  std::vector<Node> nodes_;
  std::vector<int> results_;
};

}  // namespace phalanx_cpu
