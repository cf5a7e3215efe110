// One pool of threads for all kernels of a process.
//
// A job is a range of indices handed out in chunks. A thread takes them from a part of its own, one behind the other, so
// that it reads memory as it lies, and then from what others have left. Any subset of the workers may take part: the
// caller works too, and waits only for workers that have entered the job, so a worker that the system has descheduled
// does not hold it up. Workers spin for a moment after a job, then sleep. A second caller, a nested call and a forked
// child compute alone.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace kern {

using ChunkFn = void (*)(void* context, int64_t first, int64_t last);

// Calls fn on [first, last) pieces of at most `step`, which cover [0, count) once, in any order, on any thread.
void run_chunks(int64_t count, int64_t step, ChunkFn fn, void* context);

// Thread-local memory of at least `bytes`, aligned to 64, with 64 readable bytes behind it. It lives until the same
// thread asks for the same slot again. The caller of run_chunks also runs chunks: what chunks read and what they
// scribble on need different slots.
enum Slot : int { SLOT_SHARED, SLOT_SHARED_2, SLOT_SHARED_3, SLOT_CHUNK, SLOT_CHUNK_2, SLOT_CHUNK_3, SLOTS };
void* scratch(Slot slot, size_t bytes);

int threads();

}  // namespace kern
