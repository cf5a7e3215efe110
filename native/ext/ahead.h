// Limits how far the dispatch of a graph may run ahead of its computation.
//
// MLX blocks the dispatching thread as soon as ten nodes are queued. Nodes of a decode step take microseconds, so that
// thread wakes after each of them, on a core on which a kernel computes, while the computing thread runs out of nodes.
// MLX's limit of ten bounds memory. This class therefore counts memory instead: while the queued nodes hold little, it
// reports more ended tasks to MLX than have ended.
#pragma once
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>

#include "mlx/device.h"
#include "mlx/scheduler.h"
#include "mlx/stream.h"

namespace phalanx_cpu {

namespace mx = mlx::core;

class Ahead {
 public:
  // One for all operations of the process. Leaked on purpose: MLX's threads may outlive the destructors of statics.
  static Ahead& get() {
    static Ahead* ahead = new Ahead();
    return *ahead;
  }

  // With `allowed` false, MLX's own limit applies.
  void allow(bool allowed) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_allowed_.store(allowed, std::memory_order_relaxed);
    }
    if (!allowed) set(false, mx::default_stream(mx::Device::cpu));
  }

  // Counts an operation with results of `bytes` bytes as queued while the returned pointer lives: until it has been
  // computed, has failed, or was dropped.
  std::shared_ptr<void> enter(size_t bytes, const mx::Stream& stream) {
    const size_t now = waiting_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    if (now > kMost) set(false, stream);
    if (now < kMost / 2) set(true, stream);
    return {this, [bytes, stream](Ahead* ahead) { ahead->leave(bytes, stream); }};
  }

 private:
  static constexpr size_t kMost = size_t{64} << 20;  // a prompt's ten nodes are several times as much
  static constexpr int kNodes = 1024;                // more than a token has, of most models

  void leave(size_t bytes, const mx::Stream& stream) {
    if (waiting_.fetch_sub(bytes, std::memory_order_relaxed) - bytes < kMost / 2) set(true, stream);
  }

  bool is_due(bool far) const {
    const bool allowed = !far || is_allowed_.load(std::memory_order_relaxed);
    return allowed && is_far_.load(std::memory_order_relaxed) != far;
  }

  void set(bool far, const mx::Stream& stream) {
    if (!is_due(far)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_due(far)) return;
    for (int i = 0; i < kNodes; i++)
      far ? mx::scheduler::notify_task_completion(stream) : mx::scheduler::notify_new_task(stream);
    is_far_.store(far, std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::atomic<size_t> waiting_{0};
  std::atomic<bool> is_allowed_{true}, is_far_{false};
};

}  // namespace phalanx_cpu
