/* Defines vectors of float32, with the compiler's own vector types (GCC's and Clang's), for the C sources of all
 * packages. LANES is the number of values in a vector; the including file may define it first, else it is that of the
 * processor. `fabric/c_library.py` finds this header for every source. This file knows nothing of models. */
#ifndef WEFT_VECTORS_H
#define WEFT_VECTORS_H

#include <stdint.h>

/* A vector of the processor holds NATIVE_LANES values. A product computes NATIVE_ROWS rows at a time, because their
 * sums, two vectors each, then stay in registers. */
#if defined(__AVX512F__)
#define NATIVE_LANES 16
#define NATIVE_ROWS 12
#elif defined(__aarch64__)
#define NATIVE_LANES 4
#define NATIVE_ROWS 12
#elif defined(__AVX__)
#define NATIVE_LANES 8
#define NATIVE_ROWS 6
#else
#define NATIVE_LANES 4
#define NATIVE_ROWS 6
#endif

#ifndef LANES
#define LANES NATIVE_LANES
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float unaligned_lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t whole_lanes __attribute__((vector_size(4 * LANES)));

static inline lanes load(const float *from) { return *(const unaligned_lanes *)from; }
static inline void store(float *to, lanes x) { *(unaligned_lanes *)to = x; }

/* Returns `first` where all bits of `is_first` are set, and `second` where none is. */
static inline lanes chosen(whole_lanes is_first, lanes first, lanes second) {
  return (lanes)((is_first & (whole_lanes)first) | (~is_first & (whole_lanes)second));
}

/* Returns 2 to the power of `exponent`, which is at least -126 and at most 128; 2 to the 128 is infinite, and NaN stays
 * NaN. The bits of the result give 2 to the whole part of the exponent, and a polynomial gives 2 to the rest (with an
 * error of 6e-9). */
static inline lanes power_of_two(lanes exponent) {
  /* The constant is 1.5 * 2^23. Adding it rounds to a whole number, which lies in the low bits. */
  const lanes shifted = exponent + 12582912.0f;
  const lanes part = exponent - (shifted - 12582912.0f);
  lanes sum = part * 1.52527338e-5f + 1.54035304e-4f;
  sum = sum * part + 1.33335581e-3f;
  sum = sum * part + 9.61812911e-3f;
  sum = sum * part + 5.55041087e-2f;
  sum = sum * part + 2.40226507e-1f;
  sum = sum * part + 6.93147181e-1f;
  sum = sum * part + 1.0f;
  return sum * (lanes)(((whole_lanes)shifted - 0x4b400000 + 127) << 23);
}

#if defined(__AVX512BF16__)
#include <immintrin.h>

/* Returns sixteen values of bfloat16 as float32. */
static inline __m512 widened(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}
#endif

#endif
