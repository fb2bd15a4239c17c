/* Computes RMS norm and rotary positions over rows of float32, each in one pass, on any processor, with the compiler's
 * own vectors (GCC's and Clang's). `fused_layers.py` compiles this file at first use and checks every precondition.
 * The code knows nothing of models. */
#include <math.h>
#include <stdint.h>

#define LANES 16
#include "vectors.h"

/* Writes the RMS norm of `x` to `out`, both (num_rows, width), with `weight` (width). */
void weft_row_norm(
    const float *x, const float *weight, float *out, int64_t num_rows, int64_t width, float epsilon, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t row = 0; row < num_rows; row++) {
    const float *from = x + row * width;
    float *to = out + row * width, total = 0.0f;
    lanes squares = {0};
    for (int64_t at = 0; at < width; at += LANES) squares += load(from + at) * load(from + at);
    for (int lane = 0; lane < LANES; lane++) total += squares[lane];
    const float scale = 1.0f / sqrtf(total / width + epsilon);
    for (int64_t at = 0; at < width; at += LANES) store(to + at, load(from + at) * scale * load(weight + at));
  }
}

/* Rotates `x` (num_rows, num_heads, dim), whose rows are `stride` values apart, by `cos` and `sin` (num_rows, dim), and
 * writes to `out`, which is dense and has the shape of x. */
void weft_rotate(
    const float *x, int64_t stride, const float *cos, const float *sin, float *out, int64_t num_rows, int64_t num_heads,
    int64_t dim, int num_threads) {
  const int64_t half = dim / 2;
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t row = 0; row < num_rows; row++)
    for (int64_t at = 0; at < half; at += LANES) {
      const lanes cos_low = load(cos + row * dim + at), cos_high = load(cos + row * dim + half + at);
      const lanes sin_low = load(sin + row * dim + at), sin_high = load(sin + row * dim + half + at);
      for (int64_t head = 0; head < num_heads; head++) {
        const float *from = x + row * stride + head * dim + at;
        float *to = out + (row * num_heads + head) * dim + at;
        const lanes low = load(from), high = load(from + half);
        store(to, low * cos_low - high * sin_low);
        store(to + half, high * cos_high + low * sin_high);
      }
    }
}
