// Keeps a model call and runs it again, at other positions and for other tokens, without building its graph.
//
// Where a token takes milliseconds, a large part of them is Python, which builds the same few hundred operations again,
// and MLX, which orders them, allocates their memory and dispatches them one by one. Such a call depends only on its
// inputs, the keys and values before them, and the number of these (`recording.h`). A plan therefore allocates memory
// once, prepares the native kernels once, and dispatches all native kernels between two of MLX's operations together.
//
// A replay writes keys and values in place. The caller must make sure that no lazy array still reads the overwritten
// elements.
#pragma once
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "recording.h"
#include "simple.h"

namespace phalanx_cpu {

// A recording prepared for buffers at their addresses.
//
// A value is fixed, with memory that stays the same, or fresh, with memory that MLX allocates in each replay. Fresh
// values that native kernels read are copied to fixed memory.
class Plan : public std::enable_shared_from_this<Plan> {
 public:
  Plan(std::shared_ptr<const Recording> recording, const Arrays& buffers)
      : owner_(std::move(recording)), recording_(*owner_) {
    for (const mx::array& buffer : buffers) places_.push_back(data(buffer));
    classify();
    build(buffers);
  }

  bool is_for(const Arrays& buffers) const {
    for (size_t i = 0; i < buffers.size(); i++)
      if (data(buffers[i]) != places_[i]) return false;
    return true;
  }

  // MLX's operations that are handed over one by one.
  std::vector<std::string> handed() const {
    std::vector<std::string> names;
    for (const Step& step : steps_)
      if (step.node != nullptr) names.push_back(step.node->primitive->name());
    return names;
  }

  Arrays run(const Arrays& inputs, int position) {
    auto& encoder = mx::cpu::get_command_encoder(recording_.stream);
    const int by = position - recording_.low;
    Arrays fresh = inputs;
    fresh.reserve(fresh_count_);
    encoder.dispatch([self = shared_from_this(), inputs, position] {
      for (const auto& [input, place] : self->given_)
        std::memcpy(const_cast<void*>(data(place)), data(inputs[input]), place.nbytes());
      for (size_t i = 0; i < self->counters_.size(); i++)
        self->counters_[i].data<int32_t>()[0] = position + self->recording_.counters[i].more;
    });
    for (const Step& step : steps_) {
      if (!step.tasks.empty())
        encoder.dispatch([&step, self = shared_from_this(), by] {
          for (const Task& task : step.tasks) task(by);
        });
      if (step.node != nullptr) evaluate(step, fresh);
    }
    Arrays results;
    for (int result : recording_.results) results.push_back(fresh[slot_[result]]);
    encoder.dispatch([self = shared_from_this(), fresh = std::move(fresh),
                      temporaries = std::exchange(encoder.temporaries(), {})] {});
    return results;
  }

 private:
  using Kind = Recording::Kind;
  using Node = Recording::Node;

  static constexpr size_t kMost = size_t{64} << 20;  // of fresh values, which live until the end of a call
  static constexpr size_t kHeld = size_t{8} << 20;   // of what is the same in every call, as long as it is kept

  // Native kernels, then one operation of MLX, then copies of its results.
  struct Step {
    std::vector<Task> tasks;
    const Node* node = nullptr;
    Arrays in;                                // those that are not fresh
    std::vector<std::pair<int, int>> fresh;   // input, its slot
    std::vector<std::pair<int, mx::array>> landings;  // output, its fixed place
  };

  // Views, of which some may have to copy.
  static bool may_copy(const mx::Primitive& primitive) {
    const std::string name = primitive.name();
    return name == "Contiguous" || name == "Flatten" || name == "Reshape" || name == "Unflatten";
  }
  static bool is_view(const mx::Primitive& primitive) {
    const std::string name = primitive.name();
    return may_copy(primitive) || name == "Broadcast" || name == "ExpandDims" || name == "Slice" ||
           name == "Squeeze" || name == "Transpose";
  }

  bool is_simple(const Node& node) const {
    simple::Likes in;
    for (const mx::array& constant : node.constants) in.push_back({constant.shape(), constant.dtype()});
    for (auto [input, value] : node.varying) in[input] = likes_[value];
    return node.outputs.size() == 1 && simple::knows(*node.primitive, in, node.outputs[0]);
  }

  // What is the same in every call: computed once, as far as there is room for it.
  bool is_constant(const Node& node) {
    size_t bytes = 0;
    for (const auto& [shape, dtype] : node.outputs) bytes += bytes_of(shape, dtype);
    for (auto [input, value] : node.varying)
      if (!is_constant_[value]) return false;
    if (node.kind != Kind::kOperation || held_ + bytes > kHeld ||
        dynamic_cast<const mx::distributed::DistPrimitive*>(node.primitive.get()) != nullptr)
      return false;
    held_ += bytes;
    return true;
  }

  static size_t bytes_of(const mx::Shape& shape, mx::Dtype dtype) {
    size_t bytes = mx::size_of(dtype);
    for (int n : shape) bytes *= static_cast<size_t>(n);
    return bytes;
  }

  // Which values are fixed, and which fresh ones are needed in a fixed place as well.
  void classify() {
    const Recording& r = recording_;
    is_fixed_.assign(r.values, false);
    is_constant_.assign(r.values, false);
    lands_.assign(r.values, false);
    last_use_.assign(r.values, -1);
    slot_.assign(r.values, -1);
    likes_ = r.inputs;
    likes_.insert(likes_.end(), r.buffers.begin(), r.buffers.end());
    for (const Recording::Counter& counter : r.counters) likes_.push_back({mx::Shape{}, counter.dtype});
    std::vector<bool> is_result(r.values, false);
    for (int result : r.results) is_result[result] = true;
    for (int value = r.values, i = static_cast<int>(r.nodes.size()); i-- > 0;) {
      const Node& node = r.nodes[i];
      value -= static_cast<int>(node.outputs.size());
      bool result = false;
      for (size_t o = 0; o < node.outputs.size(); o++) result = result || is_result[value + static_cast<int>(o)];
      // What MLX makes of an array may be another view of it.
      if (result && dynamic_cast<const Native*>(node.primitive.get()) == nullptr)
        for (auto [input, from] : node.varying) is_result[from] = true;
    }
    const int inputs = static_cast<int>(r.inputs.size());
    for (int value = inputs; value < r.given(); value++) is_fixed_[value] = true;
    int next = r.given();
    size_t fresh = 0;  // bytes
    for (const Node& node : r.nodes) {
      bool fixed = !may_copy(*node.primitive) || !node.varying.empty(), result = false;
      for (auto [input, value] : node.varying) fixed = fixed && is_fixed_[value];
      for (size_t i = 0; i < node.outputs.size(); i++) result = result || is_result[next + static_cast<int>(i)];
      const bool view = is_view(*node.primitive) && node.kind == Kind::kOperation;
      const bool ours = dynamic_cast<const Native*>(node.primitive.get()) != nullptr || is_simple(node);
      const bool moves = node.kind != Kind::kOperation;
      const bool constant = !result && is_constant(node);
      is_ours_.push_back(moves || constant || (!result && (view ? fixed : ours)));
      for (auto [input, value] : node.varying)
        if (!is_ours_.back() && r.reads.count(value) != 0) refuse("what attends to keys is a result");
      for (auto [input, value] : node.varying) {
        last_use_[value] = static_cast<int>(is_ours_.size()) - 1;
        if (is_ours_.back() && !is_fixed_[value]) lands_[value] = true;
      }
      for (size_t i = 0; i < node.outputs.size(); i++, next++) {
        const auto& [shape, dtype] = node.outputs[i];
        const bool takes = !is_ours_.back() && (!view || may_copy(*node.primitive));
        if (takes && (fresh += bytes_of(shape, dtype)) > kMost) refuse("its results take too much memory at once");
        is_fixed_[next] = is_ours_.back();
        is_constant_[next] = constant;
        likes_.push_back(node.outputs[i]);
      }
    }
  }

  void build(const Arrays& buffers) {
    const Recording& r = recording_;
    const int inputs = static_cast<int>(r.inputs.size());
    fresh_count_ = inputs;
    for (int value = 0; value < inputs; value++) slot_[value] = value;
    std::vector<std::optional<mx::array>> fixed(r.values);
    for (int value = 0; value < inputs; value++) {
      if (!lands_[value]) continue;
      fixed[value] = mx::zeros(r.inputs[value].first, r.inputs[value].second, r.stream);
      fixed[value]->eval();
      given_.push_back({value, *fixed[value]});
    }
    for (size_t i = 0; i < buffers.size(); i++) fixed[inputs + i] = buffers[i];
    for (const Recording::Counter& counter : r.counters) {
      counters_.push_back(mx::array(r.low + counter.more, counter.dtype));
      fixed[inputs + buffers.size() + counters_.size() - 1] = counters_.back();
    }
    int value = r.given();
    for (size_t i = 0; i < r.nodes.size(); i++) {
      const Node& node = r.nodes[i];
      Arrays in = node.constants;
      for (auto [input, from] : node.varying)
        if (fixed[from]) in[input] = *fixed[from];
      if (is_ours_[i]) {
        Arrays out = is_constant_[value] ? compute(node, in) : prepare(node, in);
        for (size_t o = 0; o < out.size(); o++) fixed[value + o] = out[o];
      } else {
        Step step;
        step.tasks = std::exchange(pending_, {});
        step.node = &node;
        for (auto [input, from] : node.varying)
          if (!is_fixed_[from]) step.fresh.push_back({input, slot_[from]});
        step.in = std::move(in);
        for (size_t o = 0; o < node.outputs.size(); o++) {
          const int out = value + static_cast<int>(o);
          slot_[out] = fresh_count_++;
          if (lands_[out]) {
            fixed[out] = place(node, o);
            step.landings.push_back({static_cast<int>(o), *fixed[out]});
          }
        }
        steps_.push_back(std::move(step));
      }
      value += static_cast<int>(node.outputs.size());
      for (auto [input, from] : node.varying)
        if (last_use_[from] == static_cast<int>(i)) fixed[from].reset();
    }
    if (!pending_.empty()) {
      steps_.emplace_back();
      steps_.back().tasks = std::exchange(pending_, {});
    }
  }

  // Memory for an output, until nothing refers to it.
  mx::array place(const Node& node, size_t output) {
    const auto& [shape, dtype] = node.outputs[output];
    mx::array out(shape, dtype, node.primitive, Arrays{});
    const size_t bytes = std::max<size_t>(out.nbytes(), 64);
    const mx::array* block = nullptr;
    for (const mx::array& free : blocks_) {
      const bool fits = free.nbytes() >= bytes && free.nbytes() <= 4 * bytes;
      if (fits && free.data_shared_ptr().use_count() == 1 && (block == nullptr || free.nbytes() < block->nbytes()))
        block = &free;
    }
    if (block == nullptr) {
      blocks_.emplace_back(mx::allocator::malloc(bytes), mx::Shape{static_cast<int>(bytes)}, mx::uint8);
      block = &blocks_.back();
    }
    int long_axes = 0;
    for (int n : shape) long_axes += n > 1;
    out.copy_shared_buffer(*block, out.strides(), {true, true, long_axes <= 1}, out.size());
    return out;
  }

  Arrays prepare(const Node& node, const Arrays& in) {
    if (node.kind == Kind::kWrite) {
      Arrays out{in[0]};
      pending_.push_back(dynamic_cast<const Native&>(*node.primitive).prepare(in, out, false));
      return out;
    }
    if (node.kind == Kind::kRead) return {read(node, in[0])};
    if (is_view(*node.primitive)) {
      Arrays out{mx::array(node.outputs[0].first, node.outputs[0].second, node.primitive, Arrays{})};
      node.primitive->eval_cpu(in, out);
      if (out[0].data_shared_ptr() == in[0].data_shared_ptr()) return out;
      mx::array packed = place(node, 0);  // its elements do not lie so that a view could have that shape
      pending_.push_back([to = static_cast<char*>(data(packed)), from = static_cast<const char*>(data(in[0])),
                          shape = in[0].shape(), places = row_major_strides(in[0].shape()), strides = in[0].strides(),
                          size = in[0].itemsize()](int) { copy_elements(to, from, shape, places, strides, size); });
      return {packed};
    }
    Arrays out;
    for (size_t o = 0; o < node.outputs.size(); o++) out.push_back(place(node, o));
    const auto* native = dynamic_cast<const Native*>(node.primitive.get());
    Preparation preparation;
    int grow = 0, slide = 0;  // keys and values that are read up to the position
    for (auto [input, value] : node.varying)
      if (auto read = recording_.reads.find(value); read != recording_.reads.end())
        ++(recording_.nodes[read->second].slides ? slide : grow);
    if (grow % 2 != 0 || slide % 2 != 0 || grow + slide > 2) refuse("keys and values are not read alike");
    Task task = native != nullptr ? native->prepare(in, out, slide != 0) : simple::prepare(*node.primitive, in, out[0]);
    for (Task& before : preparation.tasks) pending_.push_back(std::move(before));
    kept_.insert(kept_.end(), preparation.kept.begin(), preparation.kept.end());
    if (grow + slide != 0)
      pending_.push_back(std::move(task));
    else
      pending_.push_back([task = std::move(task)](int) { task(0); });
    return out;
  }

  Arrays compute(const Node& node, const Arrays& in) {
    Arrays out;
    for (const auto& [shape, dtype] : node.outputs) out.emplace_back(shape, dtype, node.primitive, Arrays{});
    node.primitive->eval_cpu(in, out);
    mx::synchronize(recording_.stream);
    kept_.insert(kept_.end(), out.begin(), out.end());
    return out;
  }

  static int64_t first(const mx::array& buffer, const mx::Shape& from) {
    int64_t offset = 0;
    for (size_t i = 0; i < from.size(); i++) offset += from[i] * buffer.strides(static_cast<int>(i));
    return offset;
  }

  // A view with the length of the lowest position. It is never flagged contiguous, which is always safe.
  static mx::array read(const Node& node, const mx::array& buffer) {
    mx::array out(node.outputs[0].first, node.outputs[0].second, node.primitive, Arrays{});
    int64_t last = 0;
    for (int i = 0; i < static_cast<int>(out.ndim()); i++) last += (out.shape(i) - 1) * buffer.strides(i);
    out.copy_shared_buffer(buffer, buffer.strides(), {false, false, false}, last + 1, first(buffer, node.start));
    return out;
  }

  static void evaluate(const Step& step, Arrays& fresh) {
    Arrays in = step.in, out;
    for (auto [input, slot] : step.fresh) in[input] = fresh[slot];
    out.reserve(step.node->outputs.size());
    for (const auto& [shape, dtype] : step.node->outputs)
      out.emplace_back(shape, dtype, step.node->primitive, Arrays{});
    step.node->primitive->eval_cpu(in, out);
    auto& encoder = mx::cpu::get_command_encoder(step.node->primitive->stream());
    for (const auto& [output, place] : step.landings) {
      const mx::array& from = out[output];
      encoder.dispatch([to = static_cast<char*>(const_cast<void*>(data(place))),
                        from = static_cast<const char*>(data(from)), shape = from.shape(), places = place.strides(),
                        strides = from.strides(), size = from.itemsize()] {
        copy_elements(to, from, shape, places, strides, size);
      });
    }
    for (mx::array& o : out) fresh.push_back(std::move(o));
  }

  const std::shared_ptr<const Recording> owner_;
  const Recording& recording_;
  std::vector<const void*> places_;  // of the buffers
  std::vector<bool> is_ours_;        // nodes
  std::vector<bool> is_fixed_, is_constant_, lands_;
  std::vector<int> last_use_, slot_;
  Recording::Like likes_;
  int fresh_count_ = 0;
  size_t held_ = 0;  // bytes
  Arrays counters_, blocks_, kept_;
  std::vector<std::pair<int, mx::array>> given_;  // inputs, and the fixed places of those that our kernels read
  std::vector<Task> pending_;
  std::vector<Step> steps_;
};

class Replay {
 public:
  // Throws std::invalid_argument with the reason if the call cannot be replayed.
  Replay(const Call& low, const Call& high, Arrays buffers)
      : recording_(std::make_shared<Recording>(Comparison::record(low, high, buffers))) {
    plan_ = plan(buffers);
  }

  int low() const { return recording_->low; }
  int high() const { return recording_->high; }
  size_t size() const { return recording_->nodes.size(); }
  std::vector<std::string> handed() const { return plan_->handed(); }

  // The call at `position`: its results, which the stream is still computing. The buffers have been written when the
  // stream comes to whatever is evaluated next.
  Arrays run(const Arrays& inputs, const Arrays& buffers, int position) {
    check(inputs, buffers, position);
    if (!plan_->is_for(buffers)) plan_ = plan(buffers);
    Arrays results;
    for (const mx::array& coming : plan_->run(inputs, position))
      results.emplace_back(coming.shape(), coming.dtype(), std::make_shared<Coming>(recording_->stream, coming),
                           Arrays{});
    return results;
  }

 private:
  // A result that the stream is computing. Evaluating it waits for the stream, as for any other array.
  class Coming : public mx::Primitive {
   public:
    Coming(mx::Stream stream, mx::array result) : mx::Primitive(stream), result_(std::move(result)) {}
    void eval_cpu(const Arrays&, Arrays& out) override { out[0].copy_shared_buffer(result_); }
    void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error("phalanx_cpu runs on the CPU only"); }
    const char* name() const override { return "KernReplayed"; }

   private:
    mx::array result_;
  };

  std::shared_ptr<Plan> plan(const Arrays& buffers) const {
    return std::make_shared<Plan>(recording_, buffers);
  }

  static bool fit(const Arrays& arrays, const Recording::Like& like) {
    bool fit = arrays.size() == like.size();
    for (size_t i = 0; fit && i < arrays.size(); i++)
      fit = is_known(arrays[i]) && arrays[i].flags().row_contiguous && arrays[i].shape() == like[i].first &&
            arrays[i].dtype() == like[i].second;
    return fit;
  }

  void check(const Arrays& inputs, const Arrays& buffers, int position) const {
    if (position < low() || position > high())
      refuse("replay: position " + std::to_string(position) + " is not one of " + std::to_string(low()) + " to " +
             std::to_string(high()));
    if (!fit(inputs, recording_->inputs)) refuse("replay: these are not the inputs of the call");
    if (!fit(buffers, recording_->buffers)) refuse("replay: these are not the buffers of the call");
  }

  std::shared_ptr<Recording> recording_;
  std::shared_ptr<Plan> plan_;
};

}  // namespace phalanx_cpu
