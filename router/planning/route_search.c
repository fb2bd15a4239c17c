/* Chooses the route of one request in one call: the worker with the earliest first token, encoders for the items that it
   lacks, and the best other workers. `route_plan.py` explains the score and holds the same search in Python, for
   machines without a compiler; a test holds the two equal. All times are seconds from now.

   A worker's score without its media is a bound of its score. So the search predicts landings for a worker only while
   its bound leaves it a place among the near-equal workers or among the alternatives: the others change nothing in the
   plan. Workers that lack the same items and have the same links share their landings, which are one row.

   The caller owns all memory. Nothing is kept between two calls. */

#pragma STDC FP_CONTRACT OFF
#if defined(__GNUC__) && !defined(__clang__)
/* A fused operation rounds differently than Python does: it can move a floor, and decide between equal members. */
#pragma GCC optimize("fp-contract=off")
#endif

#include "landings.h"
#include "predictions.h"

#define NO_WORKER (-1)
#define NO_ENCODER (-2)
#define MAX_ALTERNATIVES 15

typedef struct {
  double tolerance, affinity_limit_s, exploration, explored, tie_break, explore;
  int64_t num_alternatives, max_trials;
} Choice;

/* A `Question` is the request, and what the indexes and the columns of links say of it. */
typedef struct {
  Request request;
  Choice choice;
  int64_t priority, feature_row_bytes, num_modalities, num_classes;
  int64_t num_items, num_units, num_runs, num_barred_workers, num_barred_encoders, num_kept, num_ready;
  const int64_t *pattern_of_worker; /* [worker slots] */
  const uint8_t *pattern_classes;   /* [patterns][encoder stride] */
  const double *links;              /* [classes][2]: alpha and beta */
} Question;

/* The media of the request stand side by side in an array of numbers, in the order of these pointers. */
typedef struct {
  const int64_t *items;   /* [items][4]: row of the modality, cost, levels, number of units */
  const int64_t *tokens;  /* [units] */
  const int64_t *runs;    /* [runs][4]: offset, length, item or NONE, unit of the item */
  const int64_t *barred_workers, *barred_encoders; /* the slots of members that the request must not use */
  const int64_t *kept;    /* [kept][2]: an item, and the slot of a worker that keeps it */
  const int64_t *ready;   /* [ready][2]: an item, and the slot of an encoder that has it, or makes it */
  const double *ready_s;  /* [ready] */
} Media;

/* A `Memory` gives out pieces of the caller's scratch. It goes on counting when there is no more. */
typedef struct {
  char *begin;
  int64_t used, size;
} Memory;

static void *take(Memory *memory, int64_t num, int64_t size) {
  int64_t at = memory->used;
  memory->used += (num * size + 15) / 16 * 16;
  return memory->used <= memory->size ? memory->begin + at : 0;
}

/* A `Search` is the state of one call. Arrays have a value for each worker slot, unless it says otherwise. */
typedef struct {
  const Workers *workers;
  const Encoders *encoders;
  const Question *q;
  Media media;
  Times times;
  uint8_t *is_usable;
  double *end_s, *ttft_s, *choice_s; /* The last two are infinite for a worker that can't be chosen. */
  double least_own_s;                /* the least time of the request's own work on any usable worker */
  int is_landed;                     /* says that a usable worker lacks a part of an item */
  Problem problem;
  Offer *offers;
  int64_t *run_units;                        /* [runs]: the number of the unit, or NONE */
  double *run_ends, *run_behind, *item_ends; /* [runs], [runs], [items] */
  uint8_t *kept;                             /* [slots][items], or null */
  int64_t num_rows, num_buckets, *buckets, *row_of_worker;
  int64_t *row_patterns, *row_encoders; /* [rows], [rows][items] */
  uint8_t *row_lacks;                   /* [rows][items] */
  double *row_landings_s;               /* [rows][units] */
} Search;

/* A `Candidate` is a worker with its encoders. */
typedef struct {
  int64_t slot, *encoders;            /* [items] */
  double end_s, *landings_s, *stages; /* [units], [items][6] */
} Candidate;

/* ------------------------------------------------------------ the problem */

static Media cut(const Question *q, const int64_t *numbers) {
  Media media;
  media.items = numbers;
  media.tokens = media.items + 4 * q->num_items;
  media.runs = media.tokens + q->num_units;
  media.barred_workers = media.runs + 4 * q->num_runs;
  media.barred_encoders = media.barred_workers + q->num_barred_workers;
  media.kept = media.barred_encoders + q->num_barred_encoders;
  media.ready = media.kept + 2 * q->num_kept;
  media.ready_s = (const double *)(media.ready + 2 * q->num_ready);
  return media;
}

/* Takes the memory of everything that has to do with workers. Returns 0 if there is not enough. */
static int open_workers(Search *s, Memory *memory) {
  int64_t num = s->workers->num;
  int64_t num_times = (int64_t)(sizeof(Times) / sizeof(double *));
  double *times = take(memory, num_times * num, sizeof(double));
  s->end_s = take(memory, num, sizeof(double));
  s->ttft_s = take(memory, num, sizeof(double));
  s->choice_s = take(memory, num, sizeof(double));
  s->is_usable = take(memory, num, 1);
  double **arrays = (double **)&s->times;
  for (int64_t k = 0; times && k < num_times; k++) arrays[k] = times + k * num;
  return memory->used <= memory->size;
}

/* Takes the memory of everything that has to do with media. Returns 0 if there is not enough. */
static int open_media(Search *s, Memory *memory) {
  const Question *q = s->q;
  Problem *p = &s->problem;
  int64_t num = s->workers->num, items = q->num_items, units = q->num_units, stride = s->encoders->stride;
  p->num_items = items;
  p->num_units = units;
  p->num_encoders = s->encoders->num;
  p->stride = stride;
  p->num_bins = s->encoders->num_bins + 1;
  p->num_classes = q->num_classes;
  p->modality = take(memory, items, sizeof(int64_t));
  p->first_unit = take(memory, items + 1, sizeof(int64_t));
  p->cost = take(memory, items, sizeof(double));
  p->unit_share = take(memory, units, sizeof(double));
  p->unit_bytes = take(memory, units, sizeof(double));
  p->is_able = take(memory, (q->num_modalities + 1) * stride, 1); /* One more is row 0 before any encoder was here. */
  p->decoder_free_s = take(memory, stride, sizeof(double));
  p->num_decoders = take(memory, stride, sizeof(int64_t));
  p->waits_s = take(memory, p->num_bins * stride, sizeof(double));
  p->bin_sizes_s = take(memory, p->num_bins * stride, sizeof(double));
  p->ready_s = take(memory, items * stride, sizeof(double));
  p->alpha_s = take(memory, q->num_classes, sizeof(double));
  p->s_per_byte = take(memory, q->num_classes, sizeof(double));
  p->rates = s->encoders->rates;
  s->offers = take(memory, items * p->num_encoders, sizeof(Offer));
  s->run_units = take(memory, q->num_runs, sizeof(int64_t));
  s->run_ends = take(memory, q->num_runs, sizeof(double));
  s->run_behind = take(memory, q->num_runs, sizeof(double));
  s->item_ends = take(memory, items, sizeof(double));
  s->kept = q->num_kept ? take(memory, num * items, 1) : 0;
  for (s->num_buckets = 16; s->num_buckets < 2 * num;) s->num_buckets *= 2;
  s->buckets = take(memory, s->num_buckets, sizeof(int64_t));
  s->row_of_worker = take(memory, num, sizeof(int64_t));
  s->row_patterns = take(memory, num, sizeof(int64_t));
  s->row_encoders = take(memory, num * items, sizeof(int64_t));
  s->row_lacks = take(memory, (num + 1) * items, 1); /* One more is the draft of the next row. */
  s->row_landings_s = take(memory, num * units, sizeof(double));
  return memory->used <= memory->size;
}

/* Describes the items, and where their placeholders are. */
static void describe_items(Search *s) {
  const Question *q = s->q;
  const Media *media = &s->media;
  Problem *p = &s->problem;
  int64_t *modality = (int64_t *)p->modality, *first_unit = (int64_t *)p->first_unit, unit = 0;
  double *cost = (double *)p->cost, *share = (double *)p->unit_share, *nbytes = (double *)p->unit_bytes;
  for (int64_t i = 0; i < q->num_items; i++) {
    const int64_t *item = media->items + 4 * i;
    int64_t total = 0, done = 0, levels = item[2] > 1 ? item[2] : 1;
    modality[i] = item[0];
    cost[i] = (double)item[1];
    first_unit[i] = unit;
    s->item_ends[i] = 0.0;
    for (int64_t u = unit; u < unit + item[3]; u++) total += media->tokens[u];
    for (int64_t end = unit + item[3]; unit < end; unit++) {
      done += media->tokens[unit];
      share[unit] = (double)done / (double)(total > 1 ? total : 1);
      nbytes[unit] = (double)(media->tokens[unit] * q->feature_row_bytes * levels);
    }
  }
  first_unit[q->num_items] = unit;
  for (int64_t r = 0; r < q->num_runs; r++) {
    const int64_t *run = media->runs + 4 * r;
    double offset = (double)run[0], rest = q->request.num_tokens - offset;
    s->run_units[r] = run[1] > 0 && run[2] != NONE ? first_unit[run[2]] + run[3] : NONE;
    s->run_ends[r] = (double)(run[0] + run[1]);
    s->run_behind[r] = rest * (1.0 + (offset + 0.5 * rest) / q->request.scale_tokens);
    if (s->run_units[r] != NONE) s->item_ends[run[2]] = most(s->item_ends[run[2]], s->run_ends[r]);
  }
  if (s->kept) memset(s->kept, 0, (size_t)(s->workers->num * q->num_items));
  for (int64_t k = 0; k < q->num_kept; k++) s->kept[media->kept[2 * k + 1] * q->num_items + media->kept[2 * k]] = 1;
}

/* Describes the encoders as they are now. */
static void describe_encoders(Search *s) {
  const Question *q = s->q;
  const Encoders *all = s->encoders;
  Problem *p = &s->problem;
  double now = q->request.now, stale_after_s = q->request.stale_after_s;
  uint8_t *is_able = (uint8_t *)p->is_able;
  int64_t *num_decoders = (int64_t *)p->num_decoders;
  double *free_s = (double *)p->decoder_free_s, *ready_s = (double *)p->ready_s;
  int is_long = 0;
  device_waits(all, now, stale_after_s, q->request.max_silence_s, q->priority, (double *)p->waits_s,
               (double *)p->bin_sizes_s);
  memset(is_able, 0, (size_t)((q->num_modalities + 1) * p->stride));
  for (int64_t m = 0; m < q->num_modalities; m++)
    for (int64_t e = 0; e < all->num; e++)
      is_able[m * p->stride + e] = all->is_able[m * p->stride + e] && all->barred_until_s[e] <= now;
  for (int64_t k = 0; k < q->num_barred_encoders; k++)
    for (int64_t m = 0; m < q->num_modalities; m++) is_able[m * p->stride + s->media.barred_encoders[k]] = 0;
  for (int64_t i = 0; i < q->num_items; i++) is_long |= s->media.items[4 * i + 3] > 1;
  const double *queue_s = is_long ? all->decode_queue_s : all->decode_short_s;
  for (int64_t e = 0; e < all->num; e++) {
    double age_s = all->is_reported[e] > 0.0 ? now - all->state_at_s[e] : 0.0;
    double waiting_s = (queue_s[e] + all->pending_decode_s[e]) / most(all->num_decoders[e], 1.0);
    free_s[e] = most(all->decode_left_s[e] + waiting_s - age_s, 0.0);
    num_decoders[e] = (int64_t)all->num_decoders[e];
  }
  for (int64_t k = 0; k < q->num_items * p->stride; k++) ready_s[k] = -1.0;
  for (int64_t k = 0; k < q->num_ready; k++) {
    int64_t item = s->media.ready[2 * k], e = s->media.ready[2 * k + 1];
    if (now - all->report_at_s[e] <= stale_after_s || all->is_reported[e] == 0.0)
      ready_s[item * p->stride + e] = s->media.ready_s[k];
  }
  for (int64_t k = 0; k < q->num_classes; k++) {
    ((double *)p->alpha_s)[k] = q->links[2 * k];
    ((double *)p->s_per_byte)[k] = q->links[2 * k + 1];
  }
}

/* ------------------------------------------------------------ the scores */

/* Writes which items a worker lacks, and returns whether it can get them all. */
static int find_lacking(const Search *s, int64_t w, uint8_t *lacks) {
  int64_t num = s->problem.num_items;
  int is_possible = 1;
  for (int64_t i = 0; i < num; i++) {
    lacks[i] = s->item_ends[i] > s->times.held[w] && !(s->kept && s->kept[w * num + i]);
    is_possible &= !lacks[i] || (s->problem.num_encoders && s->offers[i * s->problem.num_encoders].encoder != NONE);
  }
  return is_possible;
}

/* Returns the row of a worker. It predicts the landings of a new row. */
static int64_t find_row(Search *s, int64_t w) {
  const Problem *p = &s->problem;
  int64_t num = p->num_items, pattern = s->q->pattern_of_worker[w], row = s->num_rows;
  uint8_t *lacks = s->row_lacks + row * num;
  find_lacking(s, w, lacks);
  uint64_t hash = (uint64_t)pattern;
  for (int64_t i = 0; i < num; i++) hash = (hash ^ lacks[i]) * 0x100000001B3ull;
  int64_t bucket = (int64_t)((hash ^ hash >> 29) & (uint64_t)(s->num_buckets - 1));
  for (; s->buckets[bucket] != NONE; bucket = (bucket + 1) & (s->num_buckets - 1)) {
    int64_t other = s->buckets[bucket];
    if (s->row_patterns[other] == pattern && !memcmp(s->row_lacks + other * num, lacks, (size_t)num)) return other;
  }
  const uint8_t *classes = s->q->pattern_classes + pattern * p->stride;
  choose_greedily(p, classes, lacks, s->offers, 0, s->row_encoders + row * num);
  land(p, classes, s->row_encoders + row * num, s->row_landings_s + row * p->num_units, 0);
  s->row_patterns[row] = pattern;
  s->buckets[bucket] = row;
  return s->num_rows++;
}

/* Returns what the choice adds to the score of a worker whose queue is too long for a prefix to bind a request to it: the
   time that the prefix saves there. */
static double released_s(const Search *s, int64_t w) {
  if (s->times.queue_s[w] <= s->q->choice.affinity_limit_s) return 0.0;
  double num = s->q->request.num_tokens, whole = num * (1.0 + 0.5 * num / s->q->request.scale_tokens);
  return s->times.s_per_token[w] * (whole - s->times.weighted[w]);
}

/* Computes the score of one worker, whose `end_s` is that of its work alone until then. */
static void evaluate(Search *s, int64_t w) {
  const Question *q = s->q;
  const Times *t = &s->times;
  if (s->is_landed) {
    int64_t row = s->row_of_worker[w] = find_row(s, w);
    const double *landed = s->row_landings_s + row * s->problem.num_units;
    await_landings(s->workers, q->request.now, t, w, landed, q->num_runs, s->run_units, s->run_ends, s->run_behind,
                   &s->end_s[w]);
  }
  s->ttft_s[w] = s->end_s[w] + t->last_s[w] + s->workers->delivery_s[w];
  s->choice_s[w] = s->ttft_s[w] + released_s(s, w);
}

static int is_ahead(const double *values, int64_t slot, int64_t other) {
  return values[slot] != values[other] ? values[slot] < values[other] : slot < other;
}

/* Puts a slot into a short list that is ordered by a value of each slot, the least first, and drops the last one if the
   list is longer than `most_kept`. */
static void insert(int64_t *list, int64_t *length, int64_t most_kept, const double *values, int64_t slot) {
  int64_t at = *length;
  if (at == most_kept && !is_ahead(values, slot, list[at - 1])) return;
  if (at < most_kept) ++*length;
  else at--;
  for (; at > 0 && is_ahead(values, slot, list[at - 1]); at--) list[at] = list[at - 1];
  list[at] = slot;
}

/* Scores all workers that can matter to the plan, and writes the best ones, the best first. Returns how many they
   are. */
static int64_t score_workers(Search *s, int64_t *best) {
  const Choice *choice = &s->q->choice;
  int64_t num = s->workers->num, most_kept = choice->num_alternatives + 1, num_best = 0, num_first = 0;
  int64_t first[MAX_ALTERNATIVES + 1];
  int is_exploring = choice->explore < choice->exploration;
  double best_s = INFINITY;
  for (int64_t w = 0; w < num; w++) { /* `choice_s` holds the bound until the worker is evaluated. */
    s->ttft_s[w] = s->choice_s[w] = INFINITY;
    if (!s->is_usable[w]) continue;
    s->choice_s[w] = s->end_s[w] + s->times.last_s[w] + s->workers->delivery_s[w];
    insert(first, &num_first, most_kept, s->choice_s, w);
  }
  for (int64_t k = -num_first; k < num; k++) {
    int64_t w = k < 0 ? first[k + num_first] : k;
    if (!s->is_usable[w] || s->ttft_s[w] < INFINITY) continue;
    double near_s = is_exploring ? choice->explored * best_s : best_s + choice->tolerance * s->least_own_s;
    if (num_best == most_kept && s->choice_s[w] > most(near_s, s->ttft_s[best[num_best - 1]])) {
      s->choice_s[w] = INFINITY;
      continue;
    }
    evaluate(s, w);
    best_s = least(best_s, s->choice_s[w]);
    insert(best, &num_best, most_kept, s->ttft_s, w);
  }
  return num_best;
}

/* Returns the worker to take, and writes from how many near-equal ones chance takes it. */
static int64_t choose(const Search *s, int is_exploring, int64_t *num_near) {
  const Choice *choice = &s->q->choice;
  const double *num_open = s->workers->num_open;
  double best_s = INFINITY, least_open = INFINITY;
  int64_t num = s->workers->num, num_taken = 0;
  for (int64_t w = 0; w < num; w++) best_s = least(best_s, s->choice_s[w]);
  double near_s = is_exploring ? choice->explored * best_s : best_s + choice->tolerance * s->least_own_s;
  for (int64_t w = 0; w < num; w++)
    if (s->choice_s[w] <= near_s) {
      if (num_open[w] < least_open && !is_exploring) num_taken = 0;
      least_open = least(least_open, num_open[w]);
      num_taken += is_exploring || num_open[w] == least_open;
    }
  *num_near = num_taken;
  int64_t number = (int64_t)(choice->tie_break * (double)num_taken);
  for (int64_t w = 0; w < num; w++)
    if (s->choice_s[w] <= near_s && (is_exploring || num_open[w] == least_open) && number-- == 0) return w;
  return NONE;
}

/* ------------------------------------------------------------ the encoders of a candidate */

/* Writes, for each unit, the weighted tokens that a worker computes from the unit's first missing run on. A unit without
   such a run decides nothing. */
static void find_behind(const Search *s, int64_t w, double *behind) {
  for (int64_t u = 0; u < s->problem.num_units; u++) behind[u] = -FAR;
  for (int64_t r = 0; r < s->q->num_runs; r++) {
    int64_t unit = s->run_units[r];
    if (unit == NONE || s->run_ends[r] <= s->times.covered[w]) continue;
    behind[unit] = most(behind[unit], least(s->run_behind[r], s->times.weighted[w]));
  }
}

static Candidate open_candidate(const Problem *p, Memory *memory) {
  Candidate found = {NONE, 0, 0.0, 0, 0};
  found.encoders = take(memory, p->num_items, sizeof(int64_t));
  found.landings_s = take(memory, p->num_units, sizeof(double));
  found.stages = take(memory, 6 * p->num_items, sizeof(double));
  return found;
}

/* Fills a candidate with the encoders of its row; with `is_improved` it improves them for this worker. */
static void fill(const Search *s, int64_t w, int is_improved, double *behind, Candidate *found) {
  const Problem *p = &s->problem;
  found->slot = w;
  found->end_s = s->end_s[w];
  if (!s->is_landed) return;
  int64_t row = s->row_of_worker[w];
  const uint8_t *classes = s->q->pattern_classes + s->row_patterns[row] * p->stride;
  const uint8_t *lacks = s->row_lacks + row * p->num_items;
  memcpy(found->encoders, s->row_encoders + row * p->num_items, sizeof(int64_t) * (size_t)p->num_items);
  if (is_improved) {
    double least_s = s->times.start_s[w] + s->times.own_s[w];
    find_behind(s, w, behind);
    improve(p, s->offers, classes, lacks, least_s, s->times.s_per_token[w], behind, s->q->choice.max_trials,
            found->encoders, found->landings_s, found->stages);
    found->end_s = least_s; /* The search counts with the landings alone, and the end with the worker's steps. */
    await_landings(s->workers, s->q->request.now, &s->times, w, found->landings_s, s->q->num_runs, s->run_units,
                   s->run_ends, s->run_behind, &found->end_s);
  } else {
    land(p, classes, found->encoders, found->landings_s, found->stages);
  }
}

/* Returns the time by which the choice compares candidates. */
static double choice_of(const Search *s, const Candidate *each) {
  int64_t w = each->slot;
  double least_s = s->times.start_s[w] + s->times.own_s[w];
  return most(least_s, each->end_s) + (s->times.last_s[w] + s->workers->delivery_s[w]) + released_s(s, w);
}

/* Returns the time to first token on a candidate's worker with every queue empty and the encoders chosen again for that
   case. If the encoders as they were chosen give less, it returns that. */
static double lower_bound_s(const Search *s, const Candidate *best, double *behind, double *landings_s) {
  const Problem *p = &s->problem;
  int64_t w = best->slot;
  double weighted = s->times.weighted[w], num_missing = s->q->request.num_tokens - s->times.covered[w];
  double last_s = s->workers->base_s[w];
  double num_before_last = floor((num_missing - 1.0) / most(1.0, s->workers->max_step_tokens[w]));
  double s_per_token = s->workers->per_token_s[w] + num_before_last * last_s / most(weighted, 1.0);
  double end_s = s_per_token * weighted;
  if (s->is_landed) {
    int64_t row = s->row_of_worker[w];
    double idle_s = -INFINITY, chosen_s = -INFINITY;
    find_behind(s, w, behind);
    land_idle(p, s->q->pattern_classes + s->row_patterns[row] * p->stride, s->row_lacks + row * p->num_items, landings_s);
    for (int64_t u = 0; u < p->num_units; u++) {
      idle_s = most(idle_s, landings_s[u] + s_per_token * behind[u]);
      chosen_s = most(chosen_s, best->landings_s[u] + s_per_token * behind[u]);
    }
    end_s = most(end_s, least(idle_s, chosen_s));
  }
  return end_s + last_s + s->workers->delivery_s[w];
}

/* Writes the terms of a candidate: slot, held tokens, covered tokens, queue, prefill, held, last step, time to first
   token, delivery and what the choice adds; then, for each item, its encoder or NONE, whether that has the feature or makes it, wait, decode
   wait, decode, device, encode, transfer, landing and bytes. Returns the end of what it wrote. */
static double *write_terms(const Search *s, const Candidate *each, double *out) {
  const Problem *p = &s->problem;
  const Times *t = &s->times;
  int64_t w = each->slot;
  double least_s = t->start_s[w] + t->own_s[w], end_s = most(least_s, each->end_s);
  double delivery_s = s->workers->delivery_s[w];
  double terms[10] = {(double)w,
                      t->held[w],
                      t->covered[w],
                      t->queue_s[w],
                      t->shared_s[w] + t->own_s[w],
                      end_s - least_s,
                      t->last_s[w],
                      end_s + t->last_s[w] + delivery_s,
                      delivery_s,
                      released_s(s, w)};
  memcpy(out, terms, sizeof(terms));
  out += 10;
  for (int64_t i = 0; s->is_landed && i < p->num_items; i++, out += 10) {
    int64_t encoder = each->encoders[i];
    const double *stages = each->stages + 6 * i;
    double landing_s = -FAR, nbytes = 0.0;
    out[0] = (double)encoder;
    if (encoder == NONE) continue;
    for (int64_t u = p->first_unit[i]; u < p->first_unit[i + 1]; u++) {
      landing_s = most(landing_s, each->landings_s[u]);
      nbytes += p->unit_bytes[u];
    }
    out[1] = p->ready_s[i * p->stride + encoder] >= 0.0;
    memcpy(out + 2, stages, 5 * sizeof(double));
    out[7] = landing_s - stages[5];
    out[8] = landing_s;
    out[9] = nbytes;
  }
  return out;
}

/* ------------------------------------------------------------ the search */

/* Finds out which workers the request may use, and when they would have computed it without its media. Returns whether
   there is one. */
static int begin_workers(Search *s) {
  const Question *q = s->q;
  double last_end = 0.0;
  int is_any = 0;
  worker_times(s->workers, &q->request, &s->times);
  for (int64_t r = 0; r < q->num_runs; r++)
    if (s->media.runs[4 * r + 1] > 0) last_end = most(last_end, (double)(s->media.runs[4 * r] + s->media.runs[4 * r + 1]));
  for (int64_t w = 0; w < s->workers->num; w++) s->is_usable[w] = s->workers->barred_until_s[w] <= q->request.now;
  for (int64_t k = 0; k < q->num_barred_workers; k++) s->is_usable[s->media.barred_workers[k]] = 0;
  for (int64_t w = 0; w < s->workers->num; w++) {
    s->end_s[w] = s->times.start_s[w] + s->times.own_s[w];
    is_any |= s->is_usable[w];
    s->is_landed |= s->is_usable[w] && s->times.held[w] < last_end;
  }
  return is_any;
}

/* Prepares the landings, and rules out workers that lack an item that no encoder can take. Returns whether a worker is
   left. */
static int begin_media(Search *s) {
  int is_any = 0, are_all_able = s->problem.num_encoders > 0 || !s->problem.num_items;
  describe_items(s);
  describe_encoders(s);
  make_offers(&s->problem, (int64_t)(s->q->choice.tie_break * (double)s->problem.num_encoders), s->offers);
  for (int64_t k = 0; k < s->num_buckets; k++) s->buckets[k] = NONE;
  for (int64_t i = 0; are_all_able && i < s->problem.num_items; i++)
    are_all_able = s->offers[i * s->problem.num_encoders].encoder != NONE;
  for (int64_t w = 0; w < s->workers->num; w++) {
    if (!are_all_able && s->is_usable[w]) s->is_usable[w] = (uint8_t)find_lacking(s, w, s->row_lacks);
    is_any |= s->is_usable[w];
  }
  return is_any;
}

/* Improves the encoders of the next workers too, as far as their links or their lacking media differ: what is gained
   there may be more. The best candidate is in `best` at the end, and `spare` holds another one. */
static void improve_others(const Search *s, const int64_t *others, int64_t num, double *behind, Candidate *best,
                           Candidate *spare) {
  int64_t rows[MAX_ALTERNATIVES + 2] = {s->row_of_worker[best->slot]}, num_rows = 1;
  double best_s = choice_of(s, best);
  for (int64_t k = 0; k < num; k++) {
    int64_t w = others[k], is_met = 0;
    for (int64_t r = 0; r < num_rows; r++) is_met |= rows[r] == s->row_of_worker[w];
    double least_s = s->times.start_s[w] + s->times.own_s[w] + s->times.last_s[w] + released_s(s, w);
    if (is_met || least_s >= best_s) continue;
    rows[num_rows++] = s->row_of_worker[w];
    fill(s, w, 1, behind, spare);
    if (choice_of(s, spare) < best_s) {
      Candidate better = *spare;
      *spare = *best;
      *best = better;
      best_s = choice_of(s, best);
    }
  }
}

/* Writes the best workers other than the winner, and returns how many they are. */
static int64_t find_others(const Search *s, const int64_t *best, int64_t num_best, int64_t winner, int64_t *others) {
  int64_t num = 0;
  for (int64_t k = 0; k < num_best && num < s->q->choice.num_alternatives; k++)
    if (best[k] != winner) others[num++] = best[k];
  return num;
}

/* Writes the answer: the lower bound, whether the worker is explored, how many workers are near-equal, how many can
   serve, whether the candidates have items, how many candidates there are, and the terms of each, the winner's first.
   Returns 0, NO_WORKER, NO_ENCODER, or the number of bytes of scratch that it needs if that is more than there is.
   `answer` has room for `num_alternatives` + 1 candidates. */
int64_t search_route(const Workers *workers, const Encoders *encoders, const Question *question, const int64_t *numbers,
                     char *scratch, int64_t scratch_bytes, double *answer) {
  Memory memory = {scratch, 0, scratch_bytes};
  Search search = {.workers = workers, .encoders = encoders, .q = question, .media = cut(question, numbers)}, *s = &search;
  const Choice *choice = &question->choice;
  int64_t best[MAX_ALTERNATIVES + 1], others[MAX_ALTERNATIVES + 1], num_near, num_usable = 0;
  int is_exploring = choice->explore < choice->exploration;
  int has_room = open_workers(s, &memory);
  if (has_room && !begin_workers(s)) return NO_WORKER;
  if (!has_room || s->is_landed) has_room = open_media(s, &memory);
  Candidate winner = open_candidate(&s->problem, &memory), spare = open_candidate(&s->problem, &memory);
  double *behind = take(&memory, s->problem.num_units, sizeof(double));
  double *landings_s = take(&memory, s->problem.num_units, sizeof(double));
  if (memory.used > memory.size) return memory.used;
  if (s->is_landed && !begin_media(s)) return NO_ENCODER;

  s->least_own_s = INFINITY;
  for (int64_t w = 0; w < workers->num; w++) {
    if (!s->is_usable[w]) continue;
    s->least_own_s = least(s->least_own_s, s->times.own_s[w] + s->times.last_s[w]);
    num_usable++;
  }
  int64_t num_best = score_workers(s, best);
  winner.slot = choose(s, is_exploring, &num_near);
  int64_t num_others = find_others(s, best, num_best, winner.slot, others);
  fill(s, winner.slot, 1, behind, &winner);
  if (s->is_landed && !is_exploring && s->problem.num_items > 1) {
    improve_others(s, others, num_others, behind, &winner, &spare);
    num_others = find_others(s, best, num_best, winner.slot, others);
  }
  answer[0] = lower_bound_s(s, &winner, behind, landings_s);
  answer[1] = is_exploring;
  answer[2] = (double)num_near;
  answer[3] = (double)num_usable;
  answer[4] = s->is_landed;
  answer[5] = (double)(num_others + 1);
  double *out = write_terms(s, &winner, answer + 6);
  for (int64_t k = 0; k < num_others; k++) {
    fill(s, others[k], 0, behind, &spare);
    out = write_terms(s, &spare, out);
  }
  return 0;
}
