#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <thread>

#include "kern/base.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kern {
namespace {

constexpr int kMaxThreads = 256;
constexpr auto kSpin = std::chrono::microseconds(100);
// A worker that has run for this long yields its core between two jobs. Another process then takes the core there, and
// not within a chunk, for which all workers would wait.
constexpr auto kTurn = std::chrono::milliseconds(1);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int allowed_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  int n = static_cast<int>(std::thread::hardware_concurrency());
  return n > 0 ? n : 1;
}

// A worker on the same core as its caller moves away, because it would only take time from the caller; at most once in
// this time. Schedulers may leave both on one core for seconds while other processes use the rest.
constexpr auto kLeave = std::chrono::milliseconds(1);

int current_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// The state of the current job in one word: its number in the high half, whether it is open, how many workers are in.
constexpr uint64_t kOpen = 1u << 31;
constexpr uint64_t kCount = kOpen - 1;

// The indices of a job, in a part for each thread that may come.
struct Job {
  struct alignas(64) Part {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  ChunkFn fn = nullptr;
  void* context = nullptr;
  int64_t step = 1;
  int64_t count = 0;  // parts
  Part parts[kMaxThreads];

  void divide(int64_t indices, int64_t chunk, int threads) {
    step = chunk;
    const int64_t steps = (indices + step - 1) / step;
    count = threads < steps ? threads : steps;
    for (int64_t i = 0, begin = 0; i < count; i++) {
      const int64_t end = i + 1 < count ? steps * (i + 1) / count * step : indices;
      parts[i].next.store(begin, std::memory_order_relaxed);
      parts[i].end = end;
      begin = end;
    }
  }

  void work(int thread) {
    for (int64_t i = 0; i < count; i++) {
      Part& part = parts[(thread + i) % count];
      while (part.next.load(std::memory_order_relaxed) < part.end) {
        const int64_t first = part.next.fetch_add(step, std::memory_order_relaxed);
        if (first < part.end) fn(context, first, first + step < part.end ? first + step : part.end);
      }
    }
  }
};

class Pool {
 public:
  // Leaked on purpose: workers may outlive the destructors of statics.
  static Pool& get() {
    static Pool* pool = make();
    return *pool;
  }

  int size() const { return size_.load(std::memory_order_relaxed); }

  void resize(int wanted) {
    if (wanted <= 0) wanted = allowed_cpus();
    if (wanted > kMaxThreads) wanted = kMaxThreads;
    size_.store(wanted, std::memory_order_relaxed);
  }

  void run(int64_t count, int64_t step, ChunkFn fn, void* context) {
    if (count <= 0) return;
    if (step < 1) step = 1;
    if (size() <= 1 || count <= step || !lock_.try_lock()) {
      for (int64_t first = 0; first < count; first += step) fn(context, first, first + step < count ? first + step : count);
      return;
    }
    start_missing();
    job_.fn = fn;
    job_.context = context;
    job_.divide(count, step, size());
    caller_cpu_.store(current_cpu(), std::memory_order_relaxed);
    ++number_;
    state_.store(static_cast<uint64_t>(number_) << 32 | kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      wake_.fetch_add(1, std::memory_order_seq_cst);
      wake_.notify_all();
    }
    job_.work(0);
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; (state_.load(std::memory_order_acquire) & kCount) != 0;) {
      relax();
      if (++spins == 256) {
        spins = 0;
        std::this_thread::yield();
      }
    }
    lock_.unlock();
  }

 private:
  static Pool* make() {
    Pool* pool = new Pool();
    const char* asked = getenv("KERN_THREADS");
    pool->resize(asked != nullptr ? atoi(asked) : 0);
    instance_ = pool;
    pthread_atfork(nullptr, nullptr, [] { instance_->forget(); });
    return pool;
  }

  // In a forked child: the workers are gone, and a lock that was held stays held. Everything starts anew.
  void forget() {
    int size = this->size();
    new (this) Pool();
    resize(size);
  }

  void start_missing() {
    while (started_ < size() - 1) {
      int id = started_ + 1;
      try {
        std::thread([this, id] { serve(id); }).detach();
      } catch (const std::system_error&) {  // no more threads are to be had: go on with those there are
        resize(started_ + 1);
        return;
      }
      started_ = id;
    }
  }

  // Moves this thread off a processor, if it may be on another. Where it may be stays as it is.
  static void leave(int cpu) {
#if defined(__linux__)
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    others = allowed;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0)
      sched_setaffinity(0, sizeof allowed, &allowed);
#endif
  }

  bool may_enter(uint64_t state, uint32_t seen, int id) const {
    return (state & kOpen) != 0 && static_cast<uint32_t>(state >> 32) != seen && id < size();
  }

  void serve(int id) {
    uint32_t seen = 0;
    auto idle_since = std::chrono::steady_clock::now(), turn_since = idle_since, left_since = idle_since;
    for (int spins = 0;;) {
      uint64_t state = state_.load(std::memory_order_acquire);
      if (may_enter(state, seen, id)) {
        const int cpu = current_cpu();
        if (cpu >= 0 && cpu == caller_cpu_.load(std::memory_order_relaxed)) {
          const auto now = std::chrono::steady_clock::now();
          if (now - left_since > kLeave) {
            left_since = now;
            leave(cpu);
            continue;
          }
        }
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
        seen = static_cast<uint32_t>(state >> 32);
        job_.work(id);
        state_.fetch_sub(1, std::memory_order_release);
        idle_since = std::chrono::steady_clock::now();
        spins = 0;
        if (idle_since - turn_since > kTurn) {
          std::this_thread::yield();
          turn_since = idle_since = std::chrono::steady_clock::now();
        }
        continue;
      }
      relax();
      if (++spins < 64) continue;
      spins = 0;
      if (std::chrono::steady_clock::now() - idle_since < kSpin) continue;
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      uint32_t ticket = wake_.load(std::memory_order_seq_cst);
      if (!may_enter(state_.load(std::memory_order_seq_cst), seen, id)) wake_.wait(ticket);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      idle_since = std::chrono::steady_clock::now();
    }
  }

  static inline Pool* instance_ = nullptr;
  std::mutex lock_;
  Job job_;
  uint32_t number_ = 0;
  int started_ = 0;
  std::atomic<int> size_{1};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<int> caller_cpu_{-1};
};

struct Arena {
  void* memory[SLOTS] = {};
  size_t size[SLOTS] = {};
  ~Arena() {
    for (void* p : memory) free(p);
  }
};

}  // namespace

void run_chunks(int64_t count, int64_t step, ChunkFn fn, void* context) { Pool::get().run(count, step, fn, context); }

int threads() { return Pool::get().size(); }

void* scratch(Slot slot, size_t bytes) {
  static thread_local Arena arena;
  bytes += 64;
  if (bytes > arena.size[slot]) {
    free(arena.memory[slot]);
    arena.size[slot] = (bytes + 4095) & ~static_cast<size_t>(4095);
    arena.memory[slot] = aligned_alloc(64, arena.size[slot]);
    if (arena.memory[slot] == nullptr) {
      arena.size[slot] = 0;
      throw std::bad_alloc();
    }
  }
  return arena.memory[slot];
}

}  // namespace kern

extern "C" void kern_set_threads(int threads) { kern::Pool::get().resize(threads); }
extern "C" int kern_threads(void) { return kern::threads(); }
