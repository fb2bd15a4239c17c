/* Defines the parts that both sources of paged attention share: the structs of a step, and the distribution of its
 * chunks to threads. The including file must first define `number`, the type of keys, values, queries and results. This
 * file knows nothing of requests or models. */
#include <stdint.h>
#include <stdlib.h>

#define LANES 16    /* This many tokens are processed at a time; they lie in one block. */
#define MAX_GROUP 8 /* Decoding processes at most this many of the queries that share a KV head at a time. */
#define MAX_ROWS 96 /* A chunk processes this many queries at a time. */
#define MAX_DIM 256

/* Describes a decode step with one query per sequence. */
typedef struct {
  const number *queries;            /* Has shape (num_rows, num_heads, head_dim) and is dense. */
  const number *keys, *values;      /* Have shape (num_slots, num_kv_heads, head_dim). */
  const int64_t *blocks, *contexts; /* Have shapes (num_rows, max_blocks) and (num_rows). */
  number *out;                      /* Has the shape of `queries`. */
  int64_t num_rows, num_heads, num_kv_heads, head_dim, block_size, max_blocks;
  float scale; /* The scale is above zero. */
} Step;

/* Describes chunks of prompts. Their keys and values must already lie in the pages. */
typedef struct {
  /* The shape is (num_tokens, num_heads, head_dim); tokens lie `query_stride` numbers apart. */
  const number *queries;
  const number *keys, *values;           /* Have the same shape as in Step. */
  const int64_t *tables;                 /* Has shape (num_chunks, max_blocks). */
  /* Each has shape (num_chunks). A chunk has a first row in the packed step and covers the positions [start, end). */
  const int64_t *firsts, *starts, *ends;
  number *out;                           /* Has shape (num_tokens, num_heads, head_dim) and is dense. */
  int64_t query_stride, num_chunks, num_heads, num_kv_heads, head_dim, block_size, max_blocks;
  float scale;
} Chunks;

/* Returns the address of the token at position `at` in `pages`; the tokens that follow it in its block lie behind
 * it. */
static inline const number *tokens_at(const Step *step, const number *pages, const int64_t *blocks, int64_t at) {
  return pages + (blocks[at / step->block_size] * step->block_size + at % step->block_size) *
                     step->num_kv_heads * step->head_dim;
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

/* This is the working memory of a thread; each source defines its own struct. */
typedef struct Room Room;

/* Attends `num_tokens` tokens of a chunk, which begin at position `start` and at row `first` of the step, with the
 * query heads of one KV head. The piece has at most MAX_ROWS queries. */
static void attend_piece(
    const Chunks *step, const int64_t *blocks, int64_t first, int64_t start, int64_t num_tokens, int64_t head,
    Room *room);

/* Attends all chunks, one piece at a time. Returns 0, or 1 if there is no memory for the rooms of the threads. */
static int attend_chunks(const Chunks *step, size_t room_size, int num_threads) {
  const int64_t group = step->num_heads / step->num_kv_heads, at_once = group < MAX_ROWS ? MAX_ROWS / group : 1;
  int64_t num_tasks = 0;
  int is_full = 0;
  for (int64_t chunk = 0; chunk < step->num_chunks; chunk++)
    num_tasks += (step->ends[chunk] - step->starts[chunk] + at_once - 1) / at_once * step->num_kv_heads;
#pragma omp parallel num_threads(num_threads) reduction(| : is_full)
  {
    Room *room = aligned_alloc(64, room_size);
    if (room == NULL) is_full = 1;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < num_tasks; task++) {
      if (room == NULL) continue;
      /* The last pieces see the most tokens. They come first, so that no thread works alone on such a piece at the
       * end. */
      int64_t left = num_tasks - 1 - task, chunk = 0, pieces;
      for (;; chunk++, left -= pieces * step->num_kv_heads) {
        pieces = (step->ends[chunk] - step->starts[chunk] + at_once - 1) / at_once;
        if (left < pieces * step->num_kv_heads) break;
      }
      const int64_t skipped = left / step->num_kv_heads * at_once, start = step->starts[chunk] + skipped;
      const int64_t num_tokens = step->ends[chunk] - start < at_once ? step->ends[chunk] - start : at_once;
      attend_piece(
          step, step->tables + chunk * step->max_blocks, step->firsts[chunk] + skipped, start, num_tokens,
          left % step->num_kv_heads, room);
    }
    free(room);
  }
  return is_full;
}
