// Records a repeated model call: its operations in order, and how they depend on the position.
//
// The caller builds the call twice without computing it, at the lowest and at the highest position. A recording
// compares the two graphs operation by operation. It accepts two differences: keys and values are written and read up
// to the position, and numbers count it. For any other difference it refuses the call, with the reason.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "layout.h"
#include "rows.h"
#include "mlx/distributed/primitives.h"

namespace phalanx_cpu {

// An input whose value is unknown while a call is built. MLX throws if the model computes with it.
inline mx::array placeholder(const mx::Shape& shape, mx::Dtype dtype) { return mx::array(shape, dtype, nullptr, {}); }

inline bool is_known(const mx::array& a) { return !a.has_primitive() && a.status() != mx::array::Status::unscheduled; }

[[noreturn]] inline void refuse(const std::string& why) { throw std::invalid_argument(why); }

// A call built at one position. Outputs: the results, then the buffers after the call.
struct Call {
  Arrays inputs;
  Arrays outputs;
  int position;
};

// Values are numbered: inputs, buffers, counters, then the operations' outputs, in their order.
struct Recording {
  enum class Kind { kOperation, kWrite, kRead };

  struct Node {
    Kind kind;
    std::shared_ptr<mx::Primitive> primitive;
    Arrays constants;                          // inputs, those that are not constant being anything
    std::vector<std::pair<int, int>> varying;  // input, number of the value
    std::vector<std::pair<mx::Shape, mx::Dtype>> outputs;
    mx::Shape start;      // of what is read, at the least position
    int axis = 0;         // that follows the position
    bool slides = false;  // what is read: its beginning follows, too
  };

  // A number that counts the position.
  struct Counter {
    int more;
    mx::Dtype dtype;
  };

  using Like = std::vector<std::pair<mx::Shape, mx::Dtype>>;

  int low, high;  // positions
  int values = 0;
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  Like inputs, buffers;
  std::vector<Counter> counters;
  std::vector<Node> nodes;
  std::map<int, int> reads;  // keys or values up to the position -> the operation that reads them
  std::vector<int> results;

  int given() const { return static_cast<int>(inputs.size() + buffers.size() + counters.size()); }
};

// Walks both graphs at once, and records.
class Comparison {
 public:
  // Throws std::invalid_argument with the reason if the call cannot be replayed.
  static Recording record(const Call& low, const Call& high, const Arrays& buffers) {
    if (low.position >= high.position) refuse("there are no two positions to compare");
    for (const mx::array& buffer : buffers)
      if (!is_known(buffer) || !buffer.flags().row_contiguous) refuse("a buffer is not there yet");
    Recording recording;
    recording.low = low.position;
    recording.high = high.position;
    Comparison(recording, low, high, buffers).run();
    return recording;
  }

 private:
  using Kind = Recording::Kind;
  using Node = Recording::Node;

  Comparison(Recording& recording, const Call& low, const Call& high, const Arrays& buffers)
      : recording_(recording), low_(low), high_(high), buffers_(buffers), by_(high.position - low.position) {}

  void run() {
    if (low_.inputs.size() != high_.inputs.size()) refuse("the calls do not have the same inputs");
    for (size_t i = 0; i < low_.inputs.size(); i++) {
      const mx::array &a = low_.inputs[i], &b = high_.inputs[i];
      if (a.shape() != b.shape() || a.dtype() != b.dtype()) refuse("the calls do not have the same inputs");
      recording_.inputs.push_back({a.shape(), a.dtype()});
      name(a, b, static_cast<int>(i));
    }
    for (const mx::array& buffer : buffers_) recording_.buffers.emplace_back(buffer.shape(), buffer.dtype());
    const int inputs = static_cast<int>(low_.inputs.size());
    if (low_.outputs.size() != high_.outputs.size() || low_.outputs.size() < buffers_.size())
      refuse("the calls do not have the same results");
    for (size_t i = 0; i < buffers_.size(); i++) {
      name(buffers_[i], buffers_[i], inputs + static_cast<int>(i));
      version_of_[inputs + static_cast<int>(i)] = i;
    }
    for (size_t i = 0; i < low_.outputs.size(); i++) find_counters(low_.outputs[i], high_.outputs[i]);
    next_ = recording_.given();
    for (size_t i = 0; i < low_.outputs.size(); i++) visit(low_.outputs[i], high_.outputs[i]);
    recording_.values = next_;
    finish();
  }

  using Pair = std::pair<mx::array, mx::array>;

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

  // Depth-first over pairs of arrays: calls `leave` after a pair's inputs, and skips pairs for which `enter` is false.
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
        name(a, b, recording_.given());
        recording_.counters.push_back({*more, a.dtype()});
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
    if (recording_.nodes.empty()) recording_.stream = a.primitive().stream();
    if (a.primitive().stream() != recording_.stream) refuse("it computes on several streams");
    Node node{Kind::kOperation, a.primitive_ptr(), a.inputs(), {}, {}, {}};
    for (size_t i = 0; i < a.inputs().size(); i++) {
      const int value = number_.at(a.inputs()[i].id());
      if (value == kConstant) continue;
      node.varying.push_back({static_cast<int>(i), value});
      node.constants[i] = nothing_;  // and not the graph, nor buffers
      users_[value].push_back({static_cast<int>(recording_.nodes.size()), static_cast<int>(i)});
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
    if (node.kind == Kind::kRead) recording_.reads[next_] = static_cast<int>(recording_.nodes.size());
    order_sums(node);
    next_ += static_cast<int>(outputs.size());
    recording_.nodes.push_back(std::move(node));
  }

  // Whether both operations are equal. Some primitives of MLX do not implement the comparison.
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
    if (name == "KernWriteRows") {
      node.kind = Kind::kWrite;
      version_of_[next_] = version->second;
      const auto &low = static_cast<const WriteRows&>(a.primitive()), &high = static_cast<const WriteRows&>(b.primitive());
      if (!low.is_same(high, by_) || a.inputs()[1].shape() != b.inputs()[1].shape()) refuse("keys are not written alike");
      return true;
    }
    if (name == "Slice") {
      std::tie(start, end, strides) = static_cast<const mx::Slice&>(a.primitive()).state();
      std::tie(other_start, other_end, other_strides) = static_cast<const mx::Slice&>(b.primitive()).state();
      node.kind = Kind::kRead;
    } else {
      return false;
    }
    node.axis = -1;
    for (size_t i = 0; i < start.size(); i++) {
      if (strides[i] != 1 || other_strides[i] != 1 || start[i] < 0) refuse("keys are not neighbours");
      const int more = other_end[i] - end[i], later = other_start[i] - start[i];
      if (more == 0 && later == 0) continue;
      if (more != by_ || (later != by_ && later != 0) || node.axis >= 0)
        refuse("keys are not read up to the position");
      node.axis = static_cast<int>(i);
      node.slides = later == by_;
    }
    if (node.axis < 0) refuse("keys are read at a fixed place");
    node.start = std::move(start);
    mx::Shape expected = a.shape();
    if (!node.slides) expected[node.axis] += by_;
    if (b.shape() != expected) refuse("keys are not as long as the position says");
    return true;
  }

  // Who uses what, and what the results are.
  void finish() {
    for (const auto& [value, users] : users_)
      for (auto [user, input] : users) {
        const Node& node = recording_.nodes[user];
        if (node.kind == Kind::kWrite && input == 0 && users.size() > 1) refuse("keys are read while they are written");
        if (node.kind == Kind::kOperation && version_of_.count(value) != 0) refuse("a buffer is used as a whole");
        const bool attends = std::strcmp(node.primitive->name(), "KernAttention") == 0 && (input == 1 || input == 2);
        if (recording_.reads.count(value) != 0 && !attends)
          refuse(std::string("keys are read by ") + node.primitive->name());
      }
    const size_t results = low_.outputs.size() - buffers_.size();
    for (size_t i = 0; i < low_.outputs.size(); i++) {
      const int value = number_.at(low_.outputs[i].id());
      if (i < results) {
        if (value < recording_.given() || recording_.reads.count(value) != 0 || version_of_.count(value) != 0)
          refuse("a result is not computed");
        recording_.results.push_back(value);
      } else {
        const auto version = version_of_.find(value);
        if (version == version_of_.end() || version->second != i - results) refuse("a buffer is not left in its place");
      }
    }
  }

  static constexpr int kConstant = -1;

  Recording& recording_;
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

}  // namespace phalanx_cpu
