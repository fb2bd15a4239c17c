/* Computes attention over paged keys and values in bfloat16, which it reads in place. It handles one query per sequence
 * (decoding) and chunks of prompts.
 *
 * The code is for processors with AVX512-BF16. `native_attention.py` compiles it at first use and checks every
 * precondition. Softmax and sums are in float32. Values behind a sequence's last token are never added to a sum. If a
 * value among the sequence's tokens is not finite, every result that sees the value shows it; the only exception is a
 * key whose score is -inf. This file knows nothing of requests or models.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef __AVX512BF16__
#error "needs AVX512-BF16"
#endif

typedef uint16_t number;
#include "paged_steps.h"
#include "vectors.h"

static inline void transpose(__m512i r[LANES]) {
  __m512i t[LANES];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

static inline __m512 exponential(__m512 x) {
  /* With the operands of the maximum in this order, NaN stays NaN. */
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
  __m512 whole = _mm512_roundscale_ps(x, 0), part = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(1.33335581e-3f);
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.61812911e-3f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.55041087e-2f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.40226507e-1f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.93147181e-1f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, whole);
}

/* ---- Decoding. The code computes the scores of sixteen tokens at a time. Their keys are transposed in registers, so
 * that each lane is a token and no sum runs across lanes. ---- */

/* Computes scores[g * width + 0..15] of sixteen tokens, whose keys begin at `keys` and lie `stride` values apart.
 * `ahead` is the memory that the same head reads next. It is prefetched during the computation, one line at a time and
 * not into the first-level cache: that cache allows few outstanding fetches, and the loads of this block need them. A
 * measurement on a Zen 4 core gives 11 ms instead of 25 for 32 contexts of 288 tokens. */
static inline __attribute__((always_inline)) void score(
    const uint16_t *queries, const uint16_t *keys, const uint16_t *ahead, int64_t stride, int64_t head_dim,
    float *scores, int64_t width, const int group) {
  __m512 sums[MAX_GROUP];
  for (int g = 0; g < group; g++) sums[g] = _mm512_setzero_ps();
  for (int64_t d = 0; d < head_dim; d += 32) {
    __m512i pairs[LANES];
    for (int token = 0; token < LANES; token++) {
      pairs[token] = _mm512_loadu_si512(keys + token * stride + d);
      _mm_prefetch((const char *)(ahead + token * stride + d), _MM_HINT_T1);
    }
    transpose(pairs);
    for (int g = 0; g < group; g++) {
      const int32_t *query = (const int32_t *)(queries + g * head_dim + d);
      for (int pair = 0; pair < LANES; pair++)
        sums[g] = _mm512_dpbf16_ps(sums[g], (__m512bh)pairs[pair], (__m512bh)_mm512_set1_epi32(query[pair]));
    }
  }
  for (int g = 0; g < group; g++) _mm512_storeu_ps(scores + g * width, sums[g]);
}

/* Computes sums[g * head_dim ...] += weights[g * width + token] * values of `num_tokens` tokens, two tokens in one
 * operation. The values of the two tokens are interleaved in registers, so the sums of each 32 values lie in another
 * order, which `unwoven` undoes. */
static inline __attribute__((always_inline)) void gather(
    const uint16_t *values, const uint16_t *ahead, int64_t stride, int64_t head_dim, const uint16_t *weights,
    int64_t width, int64_t num_tokens, float *sums, const int group) {
  for (int64_t d = 0; d < head_dim; d += 32) {
    __m512 low[MAX_GROUP], high[MAX_GROUP];
    for (int g = 0; g < group; g++) {
      low[g] = _mm512_loadu_ps(sums + g * head_dim + d);
      high[g] = _mm512_loadu_ps(sums + g * head_dim + d + 16);
    }
    for (int64_t token = 0; token < num_tokens; token += 2) {
      const uint16_t *at = values + token * stride + d;
      /* Values behind the last token may be NaN, which a weight of zero would not remove. */
      __m512i even = _mm512_loadu_si512(at);
      __m512i odd = token + 1 < num_tokens ? _mm512_loadu_si512(at + stride) : _mm512_setzero_si512();
      _mm_prefetch((const char *)(ahead + token * stride + d), _MM_HINT_T1);
      _mm_prefetch((const char *)(ahead + (token + 1) * stride + d), _MM_HINT_T1);
      __m512bh first = (__m512bh)_mm512_unpacklo_epi16(even, odd);
      __m512bh second = (__m512bh)_mm512_unpackhi_epi16(even, odd);
      for (int g = 0; g < group; g++) {
        __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(weights + g * width + token));
        low[g] = _mm512_dpbf16_ps(low[g], first, pair);
        high[g] = _mm512_dpbf16_ps(high[g], second, pair);
      }
    }
    for (int g = 0; g < group; g++) {
      _mm512_storeu_ps(sums + g * head_dim + d, low[g]);
      _mm512_storeu_ps(sums + g * head_dim + d + 16, high[g]);
    }
  }
}

/* Takes 32 sums in the order of `gather`, multiplies them by `share`, and returns them rounded and in their original
 * order. */
static inline __m512i unwoven(const float *sums, __m512 share) {
  __m512 low = _mm512_mul_ps(_mm512_loadu_ps(sums), share), high = _mm512_mul_ps(_mm512_loadu_ps(sums + 16), share);
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  return (__m512i)_mm512_cvtne2ps_pbh(
      _mm512_permutex2var_ps(low, second, high), _mm512_permutex2var_ps(low, first, high));
}

/* Turns `context` scores into weights in bfloat16, which occupy the first half of the memory of the scores. Returns 1
 * divided by the sum of the rounded weights, so that rounding does not change the total. A zero follows a last odd
 * token. */
static float soften(float *scores, int64_t context, float scale) {
  __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
  for (int64_t at = 0; at < context; at += LANES) {
    __mmask16 seen = context - at >= LANES ? 0xffff : (__mmask16)((1u << (context - at)) - 1);
    /* The maximum ignores NaN. */
    most = _mm512_mask_max_ps(most, seen, _mm512_loadu_ps(scores + at), most);
  }
  /* A negative scale would require the minimum instead; `native_attention.py` rejects negative scales. */
  __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most)), factor = _mm512_set1_ps(scale);
  uint16_t *weights = (uint16_t *)scores;
  for (int64_t at = 0; at < context; at += LANES) {
    __mmask16 seen = context - at >= LANES ? 0xffff : (__mmask16)((1u << (context - at)) - 1);
    __m512 shifted = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + at), top), factor);
    __m256i weight = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(seen, exponential(shifted)));
    _mm256_storeu_si256((__m256i *)(weights + at), weight);
    total = _mm512_add_ps(total, widened(weight));
  }
  return 1.0f / _mm512_reduce_add_ps(total);
}

/* Attends the KV heads [first, last) of one row. While sixteen tokens are computed, the second-level cache fetches the
 * next ones: the values follow the keys, and the next row's keys follow the values. `scores` has room for `width`
 * scores of each query head of these KV heads. */
static void attend_row(const Step *step, int64_t row, int64_t first, int64_t last, float *scores, float *sums) {
  const int64_t follower = row + 1 < step->num_rows ? row + 1 : row;
  const uint16_t *next = tokens_at(step, step->keys, step->blocks + follower * step->max_blocks, 0);
  const int64_t dim = step->head_dim, stride = step->num_kv_heads * dim;
  const int64_t group = step->num_heads / step->num_kv_heads, context = step->contexts[row];
  const int64_t width = (context + LANES - 1) / LANES * LANES;
  const int64_t *blocks = step->blocks + row * step->max_blocks;
  const uint16_t *queries = step->queries + row * step->num_heads * dim;
  for (int64_t at = 0; at < context; at += LANES) {
    const uint16_t *keys = tokens_at(step, step->keys, blocks, at);
    const uint16_t *ahead =
        at + LANES < context ? tokens_at(step, step->keys, blocks, at + LANES) : tokens_at(step, step->values, blocks, 0);
    for (int64_t head = first; head < last; head++) {
      for (int64_t part = 0; part < group; part += MAX_GROUP) {
        const uint16_t *query = queries + (head * group + part) * dim;
        float *score_at = scores + ((head - first) * group + part) * width + at;
#define CALL(n) score(query, keys + head * dim, ahead + head * dim, stride, dim, score_at, width, n)
        FOR_GROUP(group - part, CALL)
#undef CALL
      }
    }
  }
  float shares[(last - first) * group];
  for (int64_t head = 0; head < (last - first) * group; head++)
    shares[head] = soften(scores + head * width, context, step->scale);
  for (int64_t at = 0; at < (last - first) * group * dim; at++) sums[at] = 0.0f;
  for (int64_t at = 0; at < context; at += LANES) {
    const uint16_t *values = tokens_at(step, step->values, blocks, at);
    const uint16_t *ahead = at + LANES < context ? tokens_at(step, step->values, blocks, at + LANES) : next;
    const int64_t num_tokens = context - at < LANES ? context - at : LANES;
    for (int64_t head = first; head < last; head++) {
      for (int64_t part = 0; part < group; part += MAX_GROUP) {
        const uint16_t *weights = (const uint16_t *)(scores + ((head - first) * group + part) * width) + at;
        float *sum = sums + ((head - first) * group + part) * dim;
#define CALL(n) gather(values + head * dim, ahead + head * dim, stride, dim, weights, 2 * width, num_tokens, sum, n)
        if (num_tokens == LANES) {
#define FULL(n) gather(values + head * dim, ahead + head * dim, stride, dim, weights, 2 * width, LANES, sum, n)
          FOR_GROUP(group - part, FULL)
#undef FULL
        } else {
          FOR_GROUP(group - part, CALL)
        }
#undef CALL
      }
    }
  }
  uint16_t *out = step->out + (row * step->num_heads + first * group) * dim;
  for (int64_t at = 0; at < (last - first) * group * dim; at += 2 * LANES)
    _mm512_storeu_si512(out + at, unwoven(sums + at, _mm512_set1_ps(shares[at / dim])));
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
    float *room = malloc(sizeof(float) * heads * group * (width + step->head_dim));
    if (room == NULL) is_full = 1;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < step->num_rows * parts; task++) {
      if (room == NULL) continue;
      const int64_t first = task % parts * heads;
      attend_row(step, task / parts, first, first + heads, room, room + heads * group * width);
    }
    free(room);
  }
  return is_full;
}

/* ---- Chunks of prompts. Keys and values of BLOCK tokens at a time are laid out once for many queries. Then both
 * products run over pairs of values, with twelve rows by 32 columns in registers, and the softmax is updated block by
 * block. ---- */

#define BLOCK 128
#define TILE 32
#define ROWS 12
struct Room {
  uint16_t queries[MAX_ROWS * MAX_DIM];        /* Rows lie MAX_DIM apart. */
  uint16_t keys[BLOCK * MAX_DIM];              /* Has shape (BLOCK / TILE, head_dim / 2, TILE, 2). */
  /* The values have shape (head_dim / TILE, BLOCK / 2, TILE, 2), with the columns in the order of the unpack
   * instructions. */
  uint16_t values[BLOCK * MAX_DIM];
  float scores[ROWS * BLOCK];
  uint16_t weights[ROWS * BLOCK];
  float sums[MAX_ROWS * MAX_DIM];              /* Rows lie head_dim apart, with columns as in `values`. */
  float most[MAX_ROWS], totals[MAX_ROWS];
} __attribute__((aligned(64)));

/* Multiplies a (ROWS, 2 * num_pairs) by b (num_pairs, TILE, 2). The product replaces c (ROWS, TILE), or, with `adds`,
 * is added to it. */
static inline __attribute__((always_inline)) void multiply(
    const uint16_t *a, const int64_t a_stride, const uint16_t *b, int64_t num_pairs, float *c, int64_t c_stride,
    const int adds) {
  __m512 low[ROWS], high[ROWS];
  for (int row = 0; row < ROWS; row++) {
    low[row] = adds ? _mm512_loadu_ps(c + row * c_stride) : _mm512_setzero_ps();
    high[row] = adds ? _mm512_loadu_ps(c + row * c_stride + LANES) : _mm512_setzero_ps();
  }
  for (int64_t pair = 0; pair < num_pairs; pair++) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(b + pair * 2 * TILE);
    const __m512bh second = (__m512bh)_mm512_loadu_si512(b + pair * 2 * TILE + TILE);
    for (int row = 0; row < ROWS; row++) {
      const __m512bh each = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(a + row * a_stride + 2 * pair));
      low[row] = _mm512_dpbf16_ps(low[row], first, each);
      high[row] = _mm512_dpbf16_ps(high[row], second, each);
    }
  }
  for (int row = 0; row < ROWS; row++) {
    _mm512_storeu_ps(c + row * c_stride, low[row]);
    _mm512_storeu_ps(c + row * c_stride + LANES, high[row]);
  }
}

/* Lays out keys and values of one head for the positions [at, end); `end` is at most `at` + BLOCK. Values behind `end`
 * are set to zero up to the next multiple of TILE; keys behind `end` are undefined. */
static void lay_out(const Chunks *step, const int64_t *blocks, int64_t head, int64_t at, int64_t end, Room *room) {
  const int64_t dim = step->head_dim, stride = step->num_kv_heads * dim;
  for (int64_t first = 0; first < end - at; first += LANES) {
    const int64_t block = blocks[(at + first) / step->block_size], place = (at + first) % step->block_size;
    const int64_t slot = (block * step->block_size + place) * stride + head * dim;
    const uint16_t *keys = step->keys + slot, *values = step->values + slot;
    for (int64_t d = 0; d < dim; d += TILE) {
      __m512i rows[LANES];
      for (int token = 0; token < LANES; token++) rows[token] = _mm512_loadu_si512(keys + token * stride + d);
      transpose(rows);
      uint16_t *tile = room->keys + first / TILE * TILE * dim + d * TILE + first % TILE * 2;
      for (int pair = 0; pair < LANES; pair++) _mm512_storeu_si512(tile + pair * 2 * TILE, rows[pair]);
      uint16_t *to = room->values + d * BLOCK + first * TILE;
      for (int token = 0; token < LANES; token += 2) {
        const int64_t left = end - at - first - token;
        const __m512i even = left > 0 ? _mm512_loadu_si512(values + token * stride + d) : _mm512_setzero_si512();
        const __m512i odd = left > 1 ? _mm512_loadu_si512(values + (token + 1) * stride + d) : _mm512_setzero_si512();
        _mm512_storeu_si512(to + token * TILE, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(to + token * TILE + TILE, _mm512_unpackhi_epi16(even, odd));
      }
    }
  }
  const int64_t laid = (end - at + LANES - 1) / LANES * LANES, wanted = (end - at + TILE - 1) / TILE * TILE;
  for (int64_t d = 0; d < dim && laid < wanted; d += TILE)
    for (int64_t token = laid; token < wanted; token++)
      _mm512_storeu_si512(room->values + d * BLOCK + token * TILE, _mm512_setzero_si512());
}

/* Turns one row's scores of `seen` tokens of a block into weights, which are zero from `seen` to `width`. Scales the
 * earlier sums to the new largest score. */
static inline void soften_along(
    const float *scores, uint16_t *weights, int64_t seen, int64_t width, float scale, float *most, float *total,
    float *sums, int64_t dim) {
  __m512 top = _mm512_set1_ps(*most), sum = _mm512_setzero_ps();
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t at = 0; at < seen; at += LANES) {
    const __mmask16 mask = seen - at >= LANES ? 0xffff : (__mmask16)((1u << (seen - at)) - 1);
    /* The maximum ignores NaN. */
    top = _mm512_mask_max_ps(top, mask, _mm512_loadu_ps(scores + at), top);
  }
  const float largest = _mm512_reduce_max_ps(top);
  top = _mm512_set1_ps(largest);
  for (int64_t at = 0; at < width; at += LANES) {
    const __mmask16 mask =
        seen - at >= LANES ? 0xffff : seen > at ? (__mmask16)((1u << (seen - at)) - 1) : (__mmask16)0;
    const __m512 shifted = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + at), top), factor);
    const __m256i weight = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(mask, exponential(shifted)));
    _mm256_storeu_si256((__m256i *)(weights + at), weight);
    sum = _mm512_add_ps(sum, widened(weight));
  }
  if (largest != *most) {
    const __m512 shrunk = exponential(_mm512_mul_ps(_mm512_set1_ps(*most - largest), factor));
    for (int64_t d = 0; d < dim; d += LANES)
      _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), shrunk));
    *total *= _mm512_cvtss_f32(shrunk);
    *most = largest;
  }
  *total += _mm512_reduce_add_ps(sum);
}

/* Attends one piece of a chunk. A row of the room is one query head of one token; the heads of a token are adjacent. */
static void attend_piece(
    const Chunks *step, const int64_t *blocks, int64_t first, int64_t start, int64_t num_tokens, int64_t head,
    Room *room) {
  const int64_t dim = step->head_dim, group = step->num_heads / step->num_kv_heads;
  const int64_t num_rows = num_tokens * group, padded = (num_rows + ROWS - 1) / ROWS * ROWS;
  memset(room->queries + num_rows * MAX_DIM, 0, (padded - num_rows) * MAX_DIM * sizeof(uint16_t));
  memset(room->sums, 0, padded * dim * sizeof(float));
  for (int64_t row = 0; row < padded; row++) {
    room->most[row] = -INFINITY;
    room->totals[row] = 0.0f;
    if (row < num_rows) {
      const uint16_t *query = step->queries + (first + row / group) * step->query_stride;
      memcpy(room->queries + row * MAX_DIM, query + (head * group + row % group) * dim, dim * sizeof(uint16_t));
    }
  }
  const int64_t end = start + num_tokens;
  for (int64_t at = 0; at < end; at += BLOCK) {
    lay_out(step, blocks, head, at, end - at < BLOCK ? end : at + BLOCK, room);
    for (int64_t row = 0; row < padded; row += ROWS) {
      const int64_t last = row + ROWS < num_rows ? row + ROWS - 1 : num_rows - 1;
      int64_t width = start + last / group + 1 - at;
      if (width <= 0) continue;
      width = width < BLOCK ? (width + TILE - 1) / TILE * TILE : BLOCK;
      for (int64_t tile = 0; tile < width; tile += TILE)
        multiply(room->queries + row * MAX_DIM, MAX_DIM, room->keys + tile * dim, dim / 2, room->scores + tile, BLOCK, 0);
      for (int64_t each = row; each < row + ROWS; each++) {
        const int64_t place = each - row, sees = start + each / group + 1 - at;
        const int64_t seen = each >= num_rows || sees < 0 ? 0 : sees < width ? sees : width;
        uint16_t *weights = room->weights + place * BLOCK;
        if (seen > 0)
          soften_along(
              room->scores + place * BLOCK, weights, seen, width, step->scale, room->most + each, room->totals + each,
              room->sums + each * dim, dim);
        else
          memset(weights, 0, width * sizeof(uint16_t));
      }
      for (int64_t d = 0; d < dim; d += TILE)
        multiply(room->weights, BLOCK, room->values + d * BLOCK, width / 2, room->sums + row * dim + d, dim, 1);
    }
  }
  for (int64_t row = 0; row < num_rows; row++) {
    uint16_t *out = step->out + ((first + row / group) * step->num_heads + head * group + row % group) * dim;
    const __m512 share = _mm512_set1_ps(1.0f / room->totals[row]);
    for (int64_t d = 0; d < dim; d += TILE) _mm512_storeu_si512(out + d, unwoven(room->sums + row * dim + d, share));
  }
}

/* Attends chunks of prompts. Returns 0, or 1 if there is no memory to work in. */
int weft_chunk_attention(const Chunks *step, int num_threads) {
  return attend_chunks(step, sizeof(Room), num_threads);
}
