/* Computes the activation x + sin(x * alpha)^2 / beta over rows of float32, in one pass, on any processor: the compiler
 * makes vectors of the inner loop. `code2wav_network.py` compiles this file at first use and checks every precondition.
 * The code knows nothing of models. */
#include <stdint.h>

/* Adding and subtracting this number rounds a float32 below 2^22 to a whole number. */
#define ROUND 12582912.0f
#define HALF_PI 1.57079637f

/* Writes to `out`, which may be `x`; both are dense (num_rows, width). Row i has the scales `alpha[i % num_channels]`
 * and `inverse[i % num_channels]`. The square of the sine has the period pi, so the argument is reduced to one period
 * in three exact steps; the series of the sine ends at r^11, whose error is 6e-8. */
void weft_snake(
    const float *x, const float *alpha, const float *inverse, float *out, int64_t num_rows, int64_t num_channels,
    int64_t width, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t row = 0; row < num_rows; row++) {
    const float *from = x + row * width;
    float *to = out + row * width;
    const float scale = alpha[row % num_channels], factor = inverse[row % num_channels];
    for (int64_t at = 0; at < width; at++) {
      const float angle = from[at] * scale;
      const float periods = (angle * 0.318309886f + ROUND) - ROUND;
      float r = angle - periods * 3.140625f;
      r = r - periods * 0.000967502593994140625f;
      r = r - periods * 1.50995799097e-7f;
      r = r > HALF_PI ? HALF_PI : r; /* This limits what rounding leaves of an angle that is too large. */
      r = r < -HALF_PI ? -HALF_PI : r;
      const float square = r * r;
      float series = -2.50521084e-8f;
      series = series * square + 2.75573192e-6f;
      series = series * square - 1.98412698e-4f;
      series = series * square + 8.33333333e-3f;
      series = series * square - 1.66666667e-1f;
      const float sine = r + r * square * series;
      to[at] = from[at] + factor * sine * sine;
    }
  }
}
