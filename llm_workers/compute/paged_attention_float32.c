/* Computes attention over paged keys and values in float32. For one query per sequence (decoding) it reads them in
 * place; it also handles chunks of prompts.
 *
 * The code is for any processor, because it uses the vector extensions of GCC and Clang. `native_attention.py` compiles
 * it at first use and checks every precondition. Values behind a sequence's last token are never read. If a value among
 * the sequence's tokens is not finite, every result that sees the value shows it; the only exception is a key whose
 * score is -inf. This file knows nothing of requests or models.
 */
#include <math.h>
#include <string.h>

typedef float number;
#include "paged_steps.h"
#include "vectors.h"

typedef float half_lanes __attribute__((vector_size(2 * LANES)));
typedef float quarter_lanes __attribute__((vector_size(LANES)));

static inline float sum_of(lanes x) {
  const union {
    lanes all;
    half_lanes halves[2];
  } sixteen = {.all = x};
  const union {
    half_lanes all;
    quarter_lanes halves[2];
  } eight = {.all = sixteen.halves[0] + sixteen.halves[1]};
  const quarter_lanes four = eight.halves[0] + eight.halves[1];
  return (four[0] + four[1]) + (four[2] + four[3]);
}

/* Returns e to the power of x, for x <= 0; NaN stays NaN. */
static inline lanes exponential(lanes x) {
  x *= 1.44269504f;
  return power_of_two(chosen(x < -126.0f, (lanes){0} - 126.0f, x));
}

/* Computes scores[g * width + token] of `num_tokens` tokens for the `group` query heads of one KV head. `ahead` is the
 * memory that the same head reads next; it is prefetched into the second-level cache. */
static inline __attribute__((always_inline)) void score(
    const float *queries, const float *keys, const float *ahead, int64_t stride, int64_t dim, int64_t num_tokens,
    float *scores, int64_t width, const int group) {
  for (int64_t token = 0; token < num_tokens; token++) {
    const float *key = keys + token * stride;
    lanes sums[MAX_GROUP];
    for (int g = 0; g < group; g++) sums[g] = (lanes){0};
    for (int64_t d = 0; d < dim; d += LANES) {
      const lanes values = load(key + d);
      __builtin_prefetch(ahead + token * stride + d, 0, 2);
      for (int g = 0; g < group; g++) sums[g] += load(queries + g * dim + d) * values;
    }
    for (int g = 0; g < group; g++) scores[g * width + token] = sum_of(sums[g]);
  }
}

/* Computes sums[g * dim ...] += weights[g * width + token] * values of `num_tokens` tokens. */
static inline __attribute__((always_inline)) void gather(
    const float *values, const float *ahead, int64_t stride, int64_t dim, int64_t num_tokens, const float *weights,
    int64_t width, float *sums, const int group) {
  for (int64_t d = 0; d < dim; d += 2 * LANES) {
    lanes low[MAX_GROUP], high[MAX_GROUP];
    for (int g = 0; g < group; g++) {
      low[g] = load(sums + g * dim + d);
      high[g] = load(sums + g * dim + d + LANES);
    }
    for (int64_t token = 0; token < num_tokens; token++) {
      const float *at = values + token * stride + d;
      const lanes first = load(at), second = load(at + LANES);
      __builtin_prefetch(ahead + token * stride + d, 0, 2);
      __builtin_prefetch(ahead + token * stride + d + LANES, 0, 2);
      for (int g = 0; g < group; g++) {
        const float weight = weights[g * width + token];
        low[g] += weight * first;
        high[g] += weight * second;
      }
    }
    for (int g = 0; g < group; g++) {
      store(sums + g * dim + d, low[g]);
      store(sums + g * dim + d + LANES, high[g]);
    }
  }
}

/* Turns `context` scores into weights. The memory behind the scores must have room up to a multiple of LANES. Returns 1
 * divided by the sum of the weights. */
static float soften(float *scores, int64_t context, float scale) {
  lanes top = (lanes){0} - INFINITY, total = (lanes){0};
  for (int64_t at = context; at % LANES; at++) scores[at] = -INFINITY;
  for (int64_t at = 0; at < context; at += LANES) {
    const lanes x = load(scores + at);
    top = chosen(x > top, x, top); /* The maximum ignores NaN. */
  }
  float most = -INFINITY;
  for (int i = 0; i < LANES; i++) most = top[i] > most ? top[i] : most;
  for (int64_t at = 0; at < context; at += LANES) {
    const lanes weights = exponential((load(scores + at) - most) * scale);
    /* A weight behind the last token is 1e-38: it does not change the sum, and no code reads it later. */
    store(scores + at, weights);
    total += weights;
  }
  return 1.0f / sum_of(total);
}

/* Attends the KV heads [first, last) of one row. While some tokens are computed, the second-level cache fetches the
 * next ones: the values follow the keys, and the next row's keys follow the values. */
static void attend_row(const Step *step, int64_t row, int64_t first, int64_t last, float *scores, int64_t width) {
  const int64_t dim = step->head_dim, stride = step->num_kv_heads * dim;
  const int64_t group = step->num_heads / step->num_kv_heads, context = step->contexts[row];
  const int64_t *blocks = step->blocks + row * step->max_blocks;
  const int64_t *followers = step->blocks + (row + 1 < step->num_rows ? row + 1 : row) * step->max_blocks;
  const float *queries = step->queries + row * step->num_heads * dim;
  float *out = step->out + row * step->num_heads * dim;
  for (int64_t at = 0; at < context; at += LANES) {
    const int64_t num_tokens = context - at < LANES ? context - at : LANES;
    const float *keys = tokens_at(step, step->keys, blocks, at);
    const float *ahead =
        at + LANES < context ? tokens_at(step, step->keys, blocks, at + LANES) : tokens_at(step, step->values, blocks, 0);
    for (int64_t head = first; head < last; head++) {
      for (int64_t part = 0; part < group; part += MAX_GROUP) {
        const float *query = queries + (head * group + part) * dim;
        float *score_at = scores + ((head - first) * group + part) * width + at;
#define CALL(n) score(query, keys + head * dim, ahead + head * dim, stride, dim, num_tokens, score_at, width, n)
        FOR_GROUP(group - part, CALL)
#undef CALL
      }
    }
  }
  float shares[(last - first) * group];
  for (int64_t head = 0; head < (last - first) * group; head++)
    shares[head] = soften(scores + head * width, context, step->scale);
  memset(out + first * group * dim, 0, (last - first) * group * dim * sizeof(float));
  for (int64_t at = 0; at < context; at += LANES) {
    const int64_t num_tokens = context - at < LANES ? context - at : LANES;
    const float *values = tokens_at(step, step->values, blocks, at);
    const float *ahead = at + LANES < context ? tokens_at(step, step->values, blocks, at + LANES)
                                              : tokens_at(step, step->keys, followers, 0);
    for (int64_t head = first; head < last; head++) {
      for (int64_t part = 0; part < group; part += MAX_GROUP) {
        const float *weights = scores + ((head - first) * group + part) * width + at;
        float *sums = out + (head * group + part) * dim;
#define CALL(n) gather(values + head * dim, ahead + head * dim, stride, dim, num_tokens, weights, width, sums, n)
        FOR_GROUP(group - part, CALL)
#undef CALL
      }
    }
  }
  for (int64_t head = first * group; head < last * group; head++)
    for (int64_t d = 0; d < dim; d++) out[head * dim + d] *= shares[head - first * group];
}

/* Attends one query per sequence. Returns 0, or 1 if there is no memory for the scores. */
int weft_decode_attention(const Step *step, int num_threads) {
  const int64_t parts = step->num_rows < 4 * num_threads ? step->num_kv_heads : 1;
  const int64_t heads = step->num_kv_heads / parts, group = step->num_heads / step->num_kv_heads;
  int64_t longest = 0;
  int is_full = 0;
  for (int64_t row = 0; row < step->num_rows; row++)
    if (step->contexts[row] > longest) longest = step->contexts[row];
  const int64_t width = (longest + LANES - 1) / LANES * LANES;
#pragma omp parallel num_threads(num_threads) reduction(| : is_full)
  {
    float *scores = malloc(sizeof(float) * heads * group * width);
    if (scores == NULL) is_full = 1;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < step->num_rows * parts; task++) {
      if (scores == NULL) continue;
      const int64_t first = task % parts * heads;
      attend_row(step, task / parts, first, first + heads, scores, width);
    }
    free(scores);
  }
  return is_full;
}

/* ---- Chunks of prompts. The scores of each token lie together, with all queries side by side: each lane is a query,
 * and neither the softmax nor a product adds across lanes. Keys and values of BLOCK tokens at a time are copied
 * together once for many queries. ---- */

#define BLOCK 128

#define PART NATIVE_LANES /* This is the number of values in a vector of the processor. */
#define ROWS NATIVE_ROWS  /* This many rows are computed at a time. */
#define TILE (2 * PART)
#define PADDED (BLOCK + ROWS - 1)

typedef float part __attribute__((vector_size(4 * PART)));
typedef float unaligned_part __attribute__((vector_size(4 * PART), aligned(4), may_alias));

struct Room {
  float queries[MAX_DIM * MAX_ROWS]; /* Has shape (head_dim, MAX_ROWS). */
  float keys[PADDED * MAX_DIM];      /* Has shape (PADDED, head_dim) and is zero behind the last token. */
  float values[BLOCK * MAX_DIM];     /* Has shape (BLOCK, head_dim). */
  float scores[PADDED * MAX_ROWS];   /* Has shape (PADDED, MAX_ROWS). */
  float sums[MAX_ROWS * MAX_DIM];    /* Has shape (MAX_ROWS, head_dim). */
  float most[MAX_ROWS], totals[MAX_ROWS];
  /* This is the position behind the last one that a row sees; it is 0 for rows that were not requested. */
  int32_t ends[MAX_ROWS];
} __attribute__((aligned(64)));

/* Multiplies `a` (ROWS, depth) by `b` (depth, TILE). The product replaces c (ROWS, TILE), or, with `adds`, is added to
 * it. `a` has separate strides in both directions. */
static inline __attribute__((always_inline)) void multiply(
    const float *a, int64_t a_row, int64_t a_depth, const float *b, int64_t b_stride, int64_t depth, float *c,
    int64_t c_stride, const int adds) {
  part low[ROWS], high[ROWS];
  for (int row = 0; row < ROWS; row++) low[row] = high[row] = (part){0};
  for (int64_t at = 0; at < depth; at++) {
    const part first = *(const unaligned_part *)(b + at * b_stride);
    const part second = *(const unaligned_part *)(b + at * b_stride + PART);
    for (int row = 0; row < ROWS; row++) {
      const float each = a[row * a_row + at * a_depth];
      low[row] += each * first;
      high[row] += each * second;
    }
  }
  for (int row = 0; row < ROWS; row++) {
    unaligned_part *to = (unaligned_part *)(c + row * c_stride), *behind = (unaligned_part *)(c + row * c_stride + PART);
    if (adds) low[row] += *to, high[row] += *behind;
    *to = low[row];
    *behind = high[row];
  }
}

/* Lays out the queries of a piece by dimension and resets the sums. A row is one query head of one token; the heads of
 * a token are adjacent. */
static void lay_queries(
    const Chunks *step, int64_t first, int64_t start, int64_t num_rows, int64_t head, Room *room) {
  const int64_t dim = step->head_dim, group = step->num_heads / step->num_kv_heads;
  for (int64_t row = 0; row < MAX_ROWS; row++) {
    const int is_asked = row < num_rows;
    const float *query = step->queries + (first + row / group) * step->query_stride + (head * group + row % group) * dim;
    for (int64_t d = 0; d < dim; d++) room->queries[d * MAX_ROWS + row] = is_asked ? query[d] : 0.0f;
    room->most[row] = -INFINITY;
    room->totals[row] = 0.0f;
    room->ends[row] = is_asked ? start + row / group + 1 : 0;
  }
  memset(room->sums, 0, MAX_ROWS * dim * sizeof(float));
}

/* Copies keys and values of one head for the positions [at, end). */
static void copy_tokens(const Chunks *step, const int64_t *blocks, int64_t head, int64_t at, int64_t end, Room *room) {
  const int64_t dim = step->head_dim, stride = step->num_kv_heads * dim, size = dim * sizeof(float);
  for (int64_t token = at; token < end; token++) {
    const int64_t slot = blocks[token / step->block_size] * step->block_size + token % step->block_size;
    memcpy(room->keys + (token - at) * dim, step->keys + slot * stride + head * dim, size);
    memcpy(room->values + (token - at) * dim, step->values + slot * stride + head * dim, size);
  }
  memset(room->keys + (end - at) * dim, 0, (ROWS - 1) * size);
}

/* Turns the scores of LANES rows at the positions [at, end) into weights, which are zero where a row does not see the
 * position. Scales the earlier sums to the new largest score. */
static void soften_along(Room *room, int64_t row, int64_t at, int64_t end, int64_t dim, float scale) {
  float *scores = room->scores + row;
  const whole_lanes ends = *(const whole_lanes *)(room->ends + row);
  const lanes before = load(room->most + row);
  lanes top = before, total = {0};
  for (int64_t token = at; token < end; token++) {
    const lanes x = load(scores + (token - at) * MAX_ROWS);
    /* The maximum ignores NaN. */
    top = chosen((ends > (int32_t)token) & (x > top), x, top);
  }
  for (int64_t token = at; token < end; token++) {
    float *score = scores + (token - at) * MAX_ROWS;
    const lanes weights = chosen(ends > (int32_t)token, exponential((load(score) - top) * scale), (lanes){0});
    store(score, weights);
    total += weights;
  }
  const lanes shrunk = chosen(top != before, exponential((before - top) * scale), (lanes){0} + 1.0f);
  for (int lane = 0; lane < LANES; lane++) {
    if (top[lane] == before[lane]) continue;
    float *sums = room->sums + (row + lane) * dim;
    for (int64_t d = 0; d < dim; d += LANES) store(sums + d, load(sums + d) * shrunk[lane]);
  }
  store(room->totals + row, load(room->totals + row) * shrunk + total);
  store(room->most + row, top);
}

static void attend_piece(
    const Chunks *step, const int64_t *blocks, int64_t first, int64_t start, int64_t num_tokens, int64_t head,
    Room *room) {
  const int64_t dim = step->head_dim, group = step->num_heads / step->num_kv_heads, num_rows = num_tokens * group;
  lay_queries(step, first, start, num_rows, head, room);
  for (int64_t at = 0; at < start + num_tokens; at += BLOCK) {
    const int64_t end = start + num_tokens - at < BLOCK ? start + num_tokens : at + BLOCK;
    copy_tokens(step, blocks, head, at, end, room);
    for (int64_t row = 0; row < num_rows; row += TILE) {
      const int64_t last = row + TILE < num_rows ? row + TILE : num_rows, seen = room->ends[last - 1];
      for (int64_t token = at; token < end && token < seen; token += ROWS)
        multiply(
            room->keys + (token - at) * dim, dim, 1, room->queries + row, MAX_ROWS, dim,
            room->scores + (token - at) * MAX_ROWS + row, MAX_ROWS, 0);
    }
    for (int64_t row = 0; row < num_rows; row += LANES) soften_along(room, row, at, end, dim, step->scale);
    for (int64_t row = 0; row < num_rows; row += ROWS) {
      const int64_t seen = room->ends[row + ROWS < num_rows ? row + ROWS - 1 : num_rows - 1];
      for (int64_t d = 0; d < dim && seen > at; d += TILE)
        multiply(
            room->scores + row, 1, MAX_ROWS, room->values + d, dim, (seen < end ? seen : end) - at,
            room->sums + row * dim + d, dim, 1);
    }
  }
  for (int64_t row = 0; row < num_rows; row++) {
    float *out = step->out + ((first + row / group) * step->num_heads + head * group + row % group) * dim;
    const float share = 1.0f / room->totals[row];
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(room->sums + row * dim + d) * share);
  }
}

/* Attends chunks of prompts. Returns 0, or 1 if there is no memory to work in. */
int weft_chunk_attention(const Chunks *step, int num_threads) {
  return attend_chunks(step, sizeof(Room), num_threads);
}
