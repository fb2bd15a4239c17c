/* Computes RMS norm and rotary positions over rows of bfloat16, each in one pass, on processors with AVX512-BF16.
 * `fused_layers.py` compiles this file at first use and checks every precondition. The code knows nothing of
 * models. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#ifndef __AVX512BF16__
#error "needs AVX512-BF16"
#endif

#define LANES 16
#include "vectors.h"

static inline __m512 widen(const uint16_t *at) { return widened(_mm256_loadu_si256((const __m256i *)at)); }

static inline void narrow(uint16_t *at, __m512 values) {
  _mm256_storeu_si256((__m256i *)at, (__m256i)_mm512_cvtneps_pbh(values));
}

static inline __m512 rounded(__m512 values) { return widened((__m256i)_mm512_cvtneps_pbh(values)); }

/* Writes the RMS norm of `x` to `out`, both (num_rows, width), with `weight` (width). The values are rounded before
 * they are multiplied by the weight, as in transformers. */
void weft_row_norm(
    const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t num_rows, int64_t width, float epsilon,
    int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t row = 0; row < num_rows; row++) {
    const uint16_t *from = x + row * width;
    uint16_t *to = out + row * width;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t at = 0; at < width; at += LANES) {
      __m512 values = widen(from + at);
      squares = _mm512_fmadd_ps(values, values, squares);
    }
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / width + epsilon));
    for (int64_t at = 0; at < width; at += LANES)
      narrow(to + at, _mm512_mul_ps(rounded(_mm512_mul_ps(widen(from + at), scale)), widen(weight + at)));
  }
}

/* Rotates `x` (num_rows, num_heads, dim), whose rows are `stride` values apart, by `cos` and `sin` (num_rows, dim), and
 * writes to `out`, which is dense and has the shape of x. */
void weft_rotate(
    const uint16_t *x, int64_t stride, const uint16_t *cos, const uint16_t *sin, uint16_t *out, int64_t num_rows,
    int64_t num_heads, int64_t dim, int num_threads) {
  const int64_t half = dim / 2;
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t row = 0; row < num_rows; row++)
    for (int64_t at = 0; at < half; at += LANES) {
      const __m512 cos_low = widen(cos + row * dim + at), cos_high = widen(cos + row * dim + half + at);
      const __m512 sin_low = widen(sin + row * dim + at), sin_high = widen(sin + row * dim + half + at);
      for (int64_t head = 0; head < num_heads; head++) {
        const uint16_t *from = x + row * stride + head * dim + at;
        uint16_t *to = out + (row * num_heads + head) * dim + at;
        const __m512 low = widen(from), high = widen(from + half);
        narrow(to, _mm512_fmsub_ps(low, cos_low, _mm512_mul_ps(high, sin_low)));
        narrow(to + half, _mm512_fmadd_ps(high, cos_high, _mm512_mul_ps(low, sin_high)));
      }
    }
}
