// The tile registers of processors that have AMX.
#pragma once
#include <initializer_list>

#include "simd.h"

#if defined(KERN_AVX512)

namespace kern {

extern const bool has_tiles;  // the processor and its system let this process use them, and nobody asked for less

}  // namespace kern

namespace kern::KERN_NS {

// What this thread's registers look like while it lives, from the first on; the others are not used.
class Tiles {
 public:
  struct Shape {
    int64_t rows, row_bytes;
  };

  explicit Tiles(std::initializer_list<Shape> shapes) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, unused[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } layout;
    int i = 0;
    for (const Shape& shape : shapes) {
      layout.rows[i] = static_cast<uint8_t>(shape.rows);
      layout.row_bytes[i++] = static_cast<uint16_t>(shape.row_bytes);
    }
    asm volatile("" : : "m"(layout));  // the intrinsic does not say that it reads all of it
    _tile_loadconfig(&layout);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

}  // namespace kern::KERN_NS

#endif
