#include "order.h"

#include <algorithm>

namespace kern {

void keep_smallest(uint64_t* keys, int64_t count, int64_t keep) {
  if (keep < count) std::nth_element(keys, keys + keep, keys + count);
}

void sort_keys(uint64_t* keys, int64_t count) { std::sort(keys, keys + count); }

}  // namespace kern
