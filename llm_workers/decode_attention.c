/* Attention of one query per sequence over paged keys and values in bfloat16, read where they lie.
 *
 * For processors with AVX512-BF16; compiled at first use by `native_attention.py`, which checks every precondition.
 * Scores of sixteen tokens at a time: their keys are transposed in registers, so that a lane is a token and no sum runs
 * across lanes. Softmax and sums are in float32. What lies behind a sequence's last token is never added up.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#ifndef __AVX512BF16__
#error "needs AVX512-BF16"
#endif

#define LANES 16
#define MAX_GROUP 8

typedef struct {
  const uint16_t *queries;              /* (num_rows, num_heads, head_dim) */
  const uint16_t *keys, *values;        /* (num_slots, num_kv_heads, head_dim) */
  const int64_t *blocks, *contexts;     /* (num_rows, max_blocks), (num_rows) */
  uint16_t *out;                        /* as queries */
  int64_t num_rows, num_heads, num_kv_heads, head_dim, block_size, max_blocks;
  float scale;
} Step;

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
  x = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _mm512_set1_ps(-126.0f));
  __m512 whole = _mm512_roundscale_ps(x, 0), part = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(1.33335581e-3f);
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.61812911e-3f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.55041087e-2f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.40226507e-1f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.93147181e-1f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, whole);
}

/* Computes scores[g * width + 0..15] of sixteen tokens from `keys` on, `stride` values apart. `ahead` is what the same
 * head reads next: it is fetched meanwhile, a line at a time and not into the first-level cache, whose few outstanding
 * fetches the loads of this block need (measured on a Zen 4 core: 11 ms instead of 25 for 32 contexts of 288). */
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

/* sums[g * head_dim ...] += weights[g * width + token] * values of `num_tokens` tokens, two tokens in one operation.
 * Their values are interleaved in registers, so the sums of each 32 values lie in the order that `unwoven` undoes. */
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
      /* What lies behind the last token may be NaN, which a weight of zero would not silence. */
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

/* 32 sums as `gather` leaves them, times `share`, in their own order and rounded. */
static inline __m512i unwoven(const float *sums, __m512 share) {
  __m512 low = _mm512_mul_ps(_mm512_loadu_ps(sums), share), high = _mm512_mul_ps(_mm512_loadu_ps(sums + 16), share);
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  return (__m512i)_mm512_cvtne2ps_pbh(
      _mm512_permutex2var_ps(low, second, high), _mm512_permutex2var_ps(low, first, high));
}

#define FOR_GROUP(group, call)                                                                                         \
  switch (group) {                                                                                                     \
    case 1: call(1); break;                                                                                            \
    case 2: call(2); break;                                                                                            \
    case 3: call(3); break;                                                                                            \
    case 4: call(4); break;                                                                                            \
    case 5: call(5); break;                                                                                            \
    case 6: call(6); break;                                                                                            \
    case 7: call(7); break;                                                                                            \
    default: call(8);                                                                                                  \
  }

/* Turns `context` scores into weights in bfloat16, which take the first half of their place; returns one over the sum
 * of the weights as they were rounded, so that rounding moves no mass. A last odd token is followed by a zero. */
static float soften(float *scores, int64_t context, float scale) {
  __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
  for (int64_t at = 0; at < context; at += LANES) {
    __mmask16 seen = context - at >= LANES ? 0xffff : (__mmask16)((1u << (context - at)) - 1);
    most = _mm512_mask_max_ps(most, seen, most, _mm512_loadu_ps(scores + at));
  }
  /* A negative scale would want the least: `native_attention.py` lets none pass. */
  __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most)), factor = _mm512_set1_ps(scale);
  uint16_t *weights = (uint16_t *)scores;
  for (int64_t at = 0; at < context; at += LANES) {
    __mmask16 seen = context - at >= LANES ? 0xffff : (__mmask16)((1u << (context - at)) - 1);
    __m512 shifted = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + at), top), factor);
    __m256i weight = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(seen, exponential(shifted)));
    _mm256_storeu_si256((__m256i *)(weights + at), weight);
    total = _mm512_add_ps(total, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(weight), 16)));
  }
  return 1.0f / _mm512_reduce_add_ps(total);
}

/* The first of the sixteen tokens from position `at` on in `pages`. */
static inline const uint16_t *tokens_at(
    const Step *step, const uint16_t *pages, const int64_t *blocks, int64_t at) {
  return pages + (blocks[at / step->block_size] * step->block_size + at % step->block_size) *
                     step->num_kv_heads * step->head_dim;
}

/* Attends the heads [first, last) of keys and values of one row. While sixteen tokens are computed, the second-level
 * cache fetches the next ones: behind the keys come the values, and behind those the next row's keys. `scores`: room for their queries' heads times `width`. */
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

/* 0, or 1 when there is no memory for the scores. */
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
