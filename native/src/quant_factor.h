// Finds the factors of scales (kern_factored).
#pragma once
#include "quant_format.h"

namespace kern::KERN_NS {

constexpr int kMostUnits = 64;  // of a number: GGUF's factors have 6 bits

// Whether numbers of one row and 8 groups, kRepackedRows apart, are so many units each.
inline bool has_factors(const float* numbers, float unit, int8_t* factors) {
  for (int g = 0; g < 8; g++) {
    const float number = numbers[g * kRepackedRows], factor = unit == 0.0f ? 0.0f : __builtin_rintf(number / unit);
    if (factor * unit != number) return false;
    factors[g * kRepackedRows] = static_cast<int8_t>(factor);
  }
  return true;
}

// Of W rows: the largest number is some whole number of units, and only few of its fractions are a float16.
inline bool factor_rows(const float* numbers, int8_t* factors, uint16_t* units) {
  float largest[W] = {};
  for (int g = 0; g < 8; g++)
    for (int r = 0; r < W; r++) {
      const float number = numbers[g * kRepackedRows + r];
      if (__builtin_fabsf(number) > __builtin_fabsf(largest[r])) largest[r] = number;
    }
  vf of_rows;
  memcpy(&of_rows, largest, sizeof of_rows);
  bool found[W] = {};
  int left = W;
  for (int k = 1; k <= kMostUnits && left > 0; k++) {
    const vf unit = of_rows / splat(static_cast<float>(k));
    f16 halves[W];
    store(halves, unit);
    const vi same = load(halves) == unit;
    int32_t some = 0;
    for (int r = 0; r < W; r++) some |= same[r];
    if (some == 0) continue;
    for (int r = 0; r < W; r++) {
      if (same[r] == 0 || found[r] || !has_factors(numbers + r, unit[r], factors + r)) continue;
      units[r] = halves[r].bits;
      found[r] = true;
      left--;
    }
  }
  return left == 0;
}

inline int factor(kern_factor_args* args) {
  const kern_factor_args& a = *args;
  if (a.columns % 8 != 0) return KERN_UNSUPPORTED;
  int failed = 0;
  chunks(a.panels * a.columns / 8, 64, [&](int64_t first, int64_t last) {
    bool exact = true;
    for (int64_t i = first; i < last && exact; i++)
      for (int r = 0; r < kRepackedRows; r += W)
        exact &= factor_rows(a.numbers + i * 8 * kRepackedRows + r, &a.out[i].factors[0][r], &a.out[i].units[r]);
    if (!exact) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
  });
  args->exact = !failed;
  return KERN_OK;
}

}  // namespace kern::KERN_NS
