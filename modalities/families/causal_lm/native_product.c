/* Multiplies float32 rows by the weights of a linear layer, y = x W^T, and applies the operations that follow the
 * product. The weights are rearranged once. They are kept in bfloat16 where that loses nothing, and are widened during
 * the product, because a product of few rows takes as long as reading its weights.
 *
 * The code runs on any processor: the vectors are the compiler's own (GCC's and Clang's vector extensions).
 * `projection.py` compiles it at first use and checks every precondition. A row's result does not depend on the
 * other rows. The code knows nothing of models.
 */
#include <stdlib.h>

#include "vectors.h"

#define ROWS NATIVE_ROWS   /* Rows are computed this many at a time. */
#define PANEL (2 * LANES)  /* Outputs are computed this many at a time. */
#define DEPTH 1024         /* Inputs are processed this many at a time. */
#define ROWS_AT_ONCE 240   /* With this many rows, DEPTH inputs of a panel and of the rows stay in L2 cache. */
#define PREFETCH_DEPTH 32  /* Inputs are prefetched this many ahead. */

typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint32_t unaligned_words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
  const float *x;      /* Has shape (num_rows, num_in), dense. */
  const void *panels;  /* Holds the weights as `weft_lay_out` arranges them. */
  /* Has shape (num_rows, num_out), dense: y = x W^T, then in this order + bias, silu, * factor, + addend. */
  float *y;
  const float *bias;   /* Is NULL, or has shape (num_out). */
  const float *factor; /* Is NULL, or has the shape of y. */
  const float *addend; /* Is NULL, or has the shape of y. */
  int64_t num_rows, num_in, num_out;
  int32_t has_silu;  /* Says whether y becomes y / (1 + exp(-y)). */
  int32_t is_narrow; /* Says whether the weights are kept in bfloat16. */
} Product;

/* Returns the number of outputs that are computed at a time: `num_out` must be a multiple of it. */
int64_t weft_panel_width(void) { return PANEL; }

/* Rearranges `weight` (num_out, num_in) into panels of PANEL outputs, each (num_in, PANEL). The values stay float32, or
 * become bfloat16, where one word holds output i in its low half and output LANES + i in its high half. In that case
 * bfloat16 must hold every value exactly. */
void weft_lay_out(const uint32_t *weight, int64_t num_out, int64_t num_in, int is_narrow, uint32_t *panels) {
  const int64_t words = is_narrow ? LANES : PANEL;
#pragma omp parallel for
  for (int64_t panel = 0; panel < num_out / PANEL; panel++) {
    const uint32_t *from = weight + panel * PANEL * num_in;
    uint32_t *to = panels + panel * num_in * words;
    for (int64_t in = 0; in < num_in; in++)
      for (int64_t word = 0; word < words; word++) {
        const uint32_t first = from[word * num_in + in];
        to[in * words + word] = is_narrow ? first >> 16 | from[(word + LANES) * num_in + in] : first;
      }
  }
}

/* Returns x / (1 + exp(-x)); NaN stays NaN. */
static inline lanes silu(lanes x) {
  lanes exponent = x * -1.44269504f;
  exponent = chosen(exponent < -126.0f, (lanes){0} - 126.0f, exponent);
  exponent = chosen(exponent > 128.0f, (lanes){0} + 128.0f, exponent);
  return x / (power_of_two(exponent) + 1.0f);
}

/* Applies the operations that follow a product to LANES values of `row`, from output `out` on. */
static inline lanes followed(const Product *product, int64_t row, int64_t out, lanes y) {
  const int64_t place = row * product->num_out + out;
  if (product->bias) y += load(product->bias + out);
  if (product->has_silu) y = silu(y);
  if (product->factor) y *= load(product->factor + place);
  if (product->addend) y += load(product->addend + place);
  return y;
}

/* Computes `num_rows` rows (at most ROWS) from `row` on and one panel of outputs from `out` on, over `depth` inputs,
 * which are the first ones (`is_first`), the last ones (`is_last`), or some between. */
static inline __attribute__((always_inline)) void tile(
    const Product *product, const float *x, const uint32_t *panel, int64_t row, int64_t out, int64_t depth,
    int is_first, int is_last, const int num_rows, const int is_narrow) {
  lanes low[ROWS], high[ROWS];
  for (int i = 0; i < num_rows; i++) low[i] = high[i] = (lanes){0};
  for (int64_t in = 0; in < depth; in++) {
    lanes first, second;
    if (is_narrow) {
      const words both = *(const unaligned_words *)(panel + in * LANES);
      first = (lanes)(both << 16);
      second = (lanes)(both & 0xffff0000u);
      __builtin_prefetch(panel + (in + PREFETCH_DEPTH) * LANES, 0, 3);
    } else {
      first = load((const float *)panel + in * PANEL);
      second = load((const float *)panel + in * PANEL + LANES);
      __builtin_prefetch(panel + (in + PREFETCH_DEPTH) * PANEL, 0, 3);
      __builtin_prefetch(panel + (in + PREFETCH_DEPTH) * PANEL + LANES, 0, 3);
    }
    __builtin_prefetch(x + (in + PREFETCH_DEPTH) * ROWS, 0, 3);
    for (int i = 0; i < num_rows; i++) {
      const float value = x[in * ROWS + i];
      low[i] += value * first;
      high[i] += value * second;
    }
  }
  for (int i = 0; i < num_rows; i++) {
    float *y = product->y + (row + i) * product->num_out + out;
    if (!is_first) {
      low[i] += load(y);
      high[i] += load(y + LANES);
    }
    store(y, is_last ? followed(product, row + i, out, low[i]) : low[i]);
    store(y + LANES, is_last ? followed(product, row + i, out + LANES, high[i]) : high[i]);
  }
}

#define FOR_ROWS(num_rows, call)                                                                                       \
  switch (num_rows) {                                                                                                  \
    case 1: call(1); break;                                                                                            \
    case 2: call(2); break;                                                                                            \
    case 3: call(3); break;                                                                                            \
    case 4: call(4); break;                                                                                            \
    case 5: call(5); break;                                                                                            \
    case 6: call(6); break;                                                                                            \
    case 7: call(7 < ROWS ? 7 : ROWS); break;                                                                          \
    case 8: call(8 < ROWS ? 8 : ROWS); break;                                                                          \
    case 9: call(9 < ROWS ? 9 : ROWS); break;                                                                          \
    case 10: call(10 < ROWS ? 10 : ROWS); break;                                                                       \
    case 11: call(11 < ROWS ? 11 : ROWS); break;                                                                       \
    default: call(ROWS);                                                                                               \
  }

/* Computes one panel of the rows [first, last), which lie in `laid` as `lay_rows` arranges them. */
static void fill_panel(const Product *product, int64_t panel, int64_t first, int64_t last, const float *laid) {
  const int64_t num_in = product->num_in, out = panel * PANEL;
  const uint32_t *weights = (const uint32_t *)product->panels + panel * num_in * (product->is_narrow ? LANES : PANEL);
  for (int64_t in = 0; in < num_in; in += DEPTH) {
    const int64_t depth = num_in - in < DEPTH ? num_in - in : DEPTH;
    const int is_first = in == 0, is_last = in + depth == num_in;
    for (int64_t row = first; row < last; row += ROWS) {
      const float *x = laid + (row - first) * num_in + in * ROWS;
#define NARROW(n) tile(product, x, weights + in * LANES, row, out, depth, is_first, is_last, n, 1)
#define WIDE(n) tile(product, x, weights + in * PANEL, row, out, depth, is_first, is_last, n, 0)
      if (product->is_narrow)
        FOR_ROWS(last - row, NARROW)
      else
        FOR_ROWS(last - row, WIDE)
#undef NARROW
#undef WIDE
    }
  }
}

/* Copies the rows from `first` on, at most ROWS and none from `last` on, into `laid`, input by input. */
static void lay_rows(const Product *product, int64_t first, int64_t last, float *laid) {
  const int64_t num_in = product->num_in, num_rows = last - first < ROWS ? last - first : ROWS;
  for (int64_t row = 0; row < num_rows; row++)
    for (int64_t in = 0; in < num_in; in++) laid[in * ROWS + row] = product->x[(first + row) * num_in + in];
}

/* Computes a whole product. Returns 0, or 1 when there is no memory for the rearranged rows. */
int weft_product(const Product *product, int num_threads) {
  const int64_t num_rows = product->num_rows, num_in = product->num_in;
  if (num_rows == 0) return 0;
  const int64_t at_once = num_rows < ROWS_AT_ONCE ? (num_rows + ROWS - 1) / ROWS * ROWS : ROWS_AT_ONCE;
  float *laid = malloc(sizeof(float) * at_once * num_in);
  if (laid == NULL) return 1;
#pragma omp parallel num_threads(num_threads)
  for (int64_t first = 0; first < num_rows; first += at_once) {
    const int64_t last = first + at_once < num_rows ? first + at_once : num_rows;
#pragma omp for schedule(static)
    for (int64_t row = first; row < last; row += ROWS) lay_rows(product, row, last, laid + (row - first) * num_in);
#pragma omp for schedule(dynamic)
    for (int64_t panel = 0; panel < product->num_out / PANEL; panel++) fill_panel(product, panel, first, last, laid);
  }
  free(laid);
  return 0;
}
