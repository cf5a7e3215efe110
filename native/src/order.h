// Order among keys. Compiled once, for any processor: what std:: instantiates must not be shared between objects that
// were compiled for different ones.
#pragma once
#include <stdint.h>

namespace kern {

// Moves the `keep` smallest of keys [0, count) to the front.
void keep_smallest(uint64_t* keys, int64_t count, int64_t keep);
void sort_keys(uint64_t* keys, int64_t count);

}  // namespace kern
