// Checksums of vectors that ranks sum (src/phalanx/dist/reduce.py): what travels, and what is read off its sum.
#pragma once
#include "kern/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// wire[r] = y[r], then sum(y[r] * weights) as one number in fp32 and as two, high and low, in 16 bits, then the
// magnitude, sqrt(sum(y[r]^2)) / width, which fp16 can hold for many ranks together, then the tag. y [rows, width], wire
// [rows, width + 3 or 4] without gaps.
typedef struct {
  const void* y;
  const float* weights;  // [width]
  const float* tag;      // one
  void* wire;
  int64_t rows, width;
  int64_t y_stride;
  int type;  // of y and wire
} kern_checksum_load_args;
KERN_API int kern_checksum_load(const kern_checksum_load_args* args);

// sums[r] = wire[r][0, width); figures[r] = (sum(sums[r] * weights) minus the checksum, the magnitude, the tag). The tag
// is NaN if an element or the magnitude is not finite: a residual that is infinite must not pass beside a limit that is,
// and every residual passes such a limit.
typedef struct {
  const void* wire;  // as above
  const float* weights;
  void* sums;      // [rows, width], of the wire's type
  float* figures;  // [rows, 3]
  int64_t rows, width;
  int64_t wire_stride;
  int type;
} kern_checksum_read_args;
KERN_API int kern_checksum_read(const kern_checksum_read_args* args);

// flags[s] = 0 if each of the site's rows is right, which is |residual| <= relative * magnitude + least and the tag as
// expected; else `flag`. What is not a number is wrong.
typedef struct {
  const float* figures;  // [sites, rows, 3], as above
  const float* limits;   // [sites, 2]: relative, least
  const float* tag;      // one
  float* flags;          // [sites]
  int64_t sites, rows;
  float flag;
} kern_checksum_judge_args;
KERN_API int kern_checksum_judge(const kern_checksum_judge_args* args);

#ifdef __cplusplus
}
#endif
