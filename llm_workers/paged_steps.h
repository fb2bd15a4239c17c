/* What both sources of paged attention share: the steps that they are given, and how these are shared out to threads.
 * The including file has defined `number` before, the type of keys, values, queries and results. */
#include <stdint.h>
#include <stdlib.h>

#define LANES 16    /* tokens at a time, which lie in one block */
#define MAX_GROUP 8 /* queries at a time of those that share a head of keys, where one token each decodes */
#define MAX_ROWS 96 /* queries at a time of a chunk */
#define MAX_DIM 256

/* One query per sequence. */
typedef struct {
  const number *queries;            /* (num_rows, num_heads, head_dim), dense */
  const number *keys, *values;      /* (num_slots, num_kv_heads, head_dim) */
  const int64_t *blocks, *contexts; /* (num_rows, max_blocks), (num_rows) */
  number *out;                      /* as queries */
  int64_t num_rows, num_heads, num_kv_heads, head_dim, block_size, max_blocks;
  float scale; /* above zero */
} Step;

/* Chunks of prompts, whose keys and values lie in the pages already. */
typedef struct {
  const number *queries;                 /* (num_tokens, num_heads, head_dim), tokens `query_stride` numbers apart */
  const number *keys, *values;           /* as in Step */
  const int64_t *tables;                 /* (num_chunks, max_blocks) */
  const int64_t *firsts, *starts, *ends; /* (num_chunks): first row of the packed step, positions [start, end) */
  number *out;                           /* (num_tokens, num_heads, head_dim), dense */
  int64_t query_stride, num_chunks, num_heads, num_kv_heads, head_dim, block_size, max_blocks;
  float scale;
} Chunks;

/* The first of the tokens from position `at` on in `pages`. */
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

/* What a thread works in; each source has its own. */
typedef struct Room Room;

/* Attends `num_tokens` tokens of a chunk, from position `start` on and from row `first` of the step, with the query heads
 * of one head of keys: MAX_ROWS queries at most. */
static void attend_piece(
    const Chunks *step, const int64_t *blocks, int64_t first, int64_t start, int64_t num_tokens, int64_t head,
    Room *room);

/* Attends all chunks, a piece at a time; 0, or 1 when there is no memory for the threads' rooms. */
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
      /* The last pieces see most: they come first, so that no thread is left alone with one. */
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
