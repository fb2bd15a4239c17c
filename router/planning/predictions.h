/* Predicts when each worker begins with a request, and when each encoder's device begins with new work. It computes what
   `predictions.py` explains and computes with numpy; a test holds the two equal. `route_search.c` includes this header,
   and it is the only one that does. All arrays belong to the caller; a column has a value for each slot. */

#include <math.h>
#include <stdint.h>

#include "structures.h"

/* The columns of workers, by the names that `WorkerColumns` in `member_columns.py` gives them. */
DECLARED(Workers,
  int64_t num, stride, max_awaited; /* slots, their capacity, and the moments that each has room for */
  const double *num_open, *open_units, *num_pending, *pending_units, *report_at_s, *state_at_s, *is_reported, *queued_tokens,
      *num_decoding, *max_step_tokens, *num_there, *max_sequences, *residence_s, *kv_blocks_total, *kv_blocks_used,
      *kv_blocks_coming, *reported_base_s, *reported_decode_s, *step_left_s, *pending_blocks, *num_awaited, *block_size,
      *base_s, *per_token_s, *barred_until_s, *delivery_s;
  const double *awaited; /* [2 * max_awaited][stride]: moments, then weighted tokens */
);

typedef struct {
  double now, stale_after_s, max_silence_s, num_tokens, scale_tokens, num_text_first;
  const int32_t *depths;
  const double *promised_tokens; /* or null */
} Request;

typedef struct { /* [slots] each */
  double *held, *covered, *weighted, *own_s, *queue_s, *shared_s, *s_per_token, *last_s, *start_s, *free_s, *ahead,
      *room, *decode_s;
} Times;

typedef struct {
  double step_s, s_per_token, room, full_s;
} Steps;

static double most(double a, double b) { return a > b ? a : b; }
static double least(double a, double b) { return a < b ? a : b; }

static double seconds(const Steps *steps, double num_tokens) {
  double num_full = floor(num_tokens / steps->room), rest = num_tokens - num_full * steps->room;
  return num_full * steps->full_s + (rest > 0.0 ? steps->step_s + steps->s_per_token * rest : 0.0);
}

static double before_last(const Steps *steps, double num_tokens) { return floor((num_tokens - 1.0) / steps->room); }

/* Return when, from now, tokens of other requests become computable on a worker, and how many these are. */
static double due_s(const Workers *all, int64_t w, int64_t entry, double now) {
  return most(all->awaited[entry * all->stride + w] - now, 0.0);
}

static double due_tokens(const Workers *all, int64_t w, int64_t entry) {
  return all->awaited[(all->max_awaited + entry) * all->stride + w];
}

/* Returns the steps of a worker on which so many sequences decode. */
static Steps steps_of(const Workers *all, int64_t w, double num_decoding) {
  double base_s = all->base_s[w], s_per_token = all->per_token_s[w], decode_s = s_per_token;
  if (all->reported_decode_s[w] > 0.0) {
    double measured_s = all->reported_base_s[w];
    decode_s = all->reported_decode_s[w] * (measured_s > 0.0 ? base_s / most(measured_s, 1e-12) : 1.0);
  }
  Steps steps = {base_s + decode_s * num_decoding, s_per_token, most(1.0, all->max_step_tokens[w] - num_decoding), 0.0};
  steps.full_s = most(steps.step_s + s_per_token * steps.room, 1e-12);
  return steps;
}

/* Returns the tokens that are ahead of a request when the running step has ended, and writes when that is. */
static double tokens_ahead(const Workers *all, int64_t w, double now, const Steps *steps, double num_decoding,
                           double pending, double num_pending, double *remaining_s) {
  double queued = all->queued_tokens[w], age_s = most(now - all->state_at_s[w], 0.0) - all->step_left_s[w];
  double work_s = seconds(steps, queued);
  if (age_s < 0.0) { /* The step that ran at the report has not ended. */
    *remaining_s = -age_s;
    return pending + queued;
  }
  if (queued > 0.0 && age_s < work_s) {
    double num_begun = floor(age_s / steps->full_s) + 1.0, num_left = most(queued - num_begun * steps->room, 0.0);
    *remaining_s = (num_left > 0.0 ? num_begun * steps->full_s : work_s) - age_s;
    return pending + num_left;
  }
  if (num_decoding > 0.0) {
    *remaining_s = 0.5 * steps->step_s;
    return pending;
  }
  double first = least(pending / most(num_pending, 1.0), steps->room);
  *remaining_s = 0.5 * (steps->step_s * (first > 0.0) + steps->s_per_token * first);
  return pending - first;
}

/* Returns when a worker has a place and blocks for a request. A worker without a rate makes room by giving up blocks
   that it must compute again, which delays `begin_s`. */
static double room_at_s(const Workers *all, int64_t w, const Steps *steps, double need_blocks, double *begin_s) {
  double num_over = all->num_there[w] + all->num_pending[w] + 1.0 - all->max_sequences[w], free_s = 0.0;
  if (all->max_sequences[w] > 0.0 && num_over > 0.0)
    free_s = all->residence_s[w] * num_over / most(all->max_sequences[w], 1.0);
  double used = all->kv_blocks_used[w] + all->kv_blocks_coming[w] + all->pending_blocks[w];
  double lacking = all->kv_blocks_total[w] > 0.0 ? most(need_blocks + used - all->kv_blocks_total[w], 0.0) : 0.0;
  if (lacking > 0.0) {
    double blocks_per_s = all->residence_s[w] > 0.0 ? all->kv_blocks_used[w] / most(all->residence_s[w], 1e-12) : 0.0;
    if (blocks_per_s > 0.0)
      free_s = most(free_s, lacking / blocks_per_s);
    else
      *begin_s += seconds(steps, least(lacking, need_blocks) * all->block_size[w]);
  }
  return free_s;
}

/* Returns the tokens that land for other requests until `at_s`. */
static double landed_tokens(const Workers *all, int64_t w, double now, double at_s) {
  double num_landed = 0.0;
  for (int64_t k = 0; k < (int64_t)all->num_awaited[w]; k++)
    if (due_s(all, w, k, now) <= at_s) num_landed += due_tokens(all, w, k);
  return num_landed;
}

/* Returns for how long a worker has been silent, within the limit. */
static double silence_of(const Workers *all, int64_t w, const Request *request) {
  if (all->is_reported[w] == 0.0) return request->max_silence_s;
  double silence_s = request->now - request->stale_after_s - all->report_at_s[w];
  return least(most(silence_s, 0.0), request->max_silence_s);
}

/* Returns the tokens of the prompt that need no computing: the cached ones, and those that requests ahead compute. */
static double covered_tokens(const Workers *all, int64_t w, const Request *request, double held, double num_shared) {
  if (!request->promised_tokens) return held;
  double promised = least(request->promised_tokens[w], most(request->num_tokens - 1.0, 0.0)) - ceil(num_shared);
  double block_size = most(all->block_size[w], 1.0);
  return most(held, floor(promised / block_size) * block_size);
}

void worker_times(const Workers *all, const Request *request, const Times *out) {
  for (int64_t w = 0; w < all->num; w++) {
    double silence_s = silence_of(all, w, request);
    int is_silent = silence_s > 0.0;
    double pending = is_silent ? all->open_units[w] : all->pending_units[w];
    double num_pending = is_silent ? all->num_open[w] : all->num_pending[w];
    double num_decoding = is_silent ? most(all->num_decoding[w], all->num_open[w]) : all->num_decoding[w];
    Steps steps = steps_of(all, w, num_decoding);
    double free_at_s = 0.0;
    double ahead = tokens_ahead(all, w, request->now, &steps, num_decoding, pending, num_pending, &free_at_s);
    double num_full = floor(ahead / steps.room), begin_s = free_at_s + num_full * steps.full_s;
    double num_shared = ahead - num_full * steps.room;

    /* What the worker has of the prompt. */
    double block_size = most(all->block_size[w], 1.0);
    double num_blocks = least(request->depths[w], floor((request->num_tokens - 1.0) / block_size));
    int is_forgotten = is_silent && all->is_reported[w] > 0.0; /* The cache has changed since the last report. */
    if (is_forgotten) num_blocks = 0.0;
    double held = num_blocks * block_size;
    double covered = is_forgotten ? held : covered_tokens(all, w, request, held, num_shared);
    double missing = request->num_tokens - covered;
    double weighted = missing * (1.0 + (covered + 0.5 * missing) / request->scale_tokens);
    double num_in_use = request->promised_tokens ? least(request->promised_tokens[w], request->num_tokens) : 0.0;
    double need_blocks = ceil(request->num_tokens / block_size) - floor(num_in_use / block_size);
    double free_s = room_at_s(all, w, &steps, need_blocks, &begin_s);

    /* What has landed for other requests by then fills the step with the last token ahead of the first medium. */
    double num_first = most(least(request->num_text_first, request->num_tokens) - covered, 0.0) + num_shared;
    double num_before = most(before_last(&steps, num_first), 0.0);
    double last_begin_s = most(begin_s, free_s) + num_before * steps.full_s;
    double num_landed = is_silent ? 0.0 : landed_tokens(all, w, request->now, last_begin_s);
    double num_beside = least(num_landed, steps.room - (num_first - num_before * steps.room));

    double own_steps = before_last(&steps, missing), num_more = before_last(&steps, num_shared + missing) - own_steps;
    double shared_s = steps.s_per_token * (num_shared + num_beside) + steps.step_s * num_more;
    double queue_s = most(begin_s, free_s);
    shared_s = most(begin_s + shared_s - queue_s, 0.0);
    queue_s += silence_s;
    out->held[w] = held;
    out->covered[w] = covered;
    out->weighted[w] = weighted;
    out->queue_s[w] = queue_s;
    out->shared_s[w] = shared_s;
    out->s_per_token[w] = steps.s_per_token + own_steps * steps.step_s / most(weighted, 1.0);
    out->own_s[w] = out->s_per_token[w] * weighted;
    out->last_s[w] = steps.step_s;
    out->start_s[w] = queue_s + shared_s;
    out->free_s[w] = free_at_s + silence_s;
    out->ahead[w] = ahead;
    out->room[w] = steps.room;
    out->decode_s[w] = num_decoding > 0.0 ? steps.step_s : 0.0;
  }
}

/* A `Schedule` is what a worker does for other requests, as far as it is known: the steps that have room left, with the
   tokens in them, and when the full steps ahead of each begin. The worker is idle from the end of a step until then. */
typedef struct {
  double free_s, *busy_s, *begin_s, *end_s, *tokens;
  int64_t num;
} Schedule;

/* Fills the schedule of a worker, whose arrays have room for one step more than the worker has entries. */
static void fill_schedule(Schedule *plan, const Workers *all, int64_t w, double now, const Steps *steps, double ahead,
                          double decode_s) {
  double at_s = plan->free_s, busy_s = at_s, left = ahead;
  int64_t next = 0, num_due = (int64_t)all->num_awaited[w];
  plan->num = 0;
  for (;;) {
    for (; next < num_due && due_s(all, w, next, now) <= at_s; next++) left += due_tokens(all, w, next);
    if (left >= steps->room) {
      double num_full = floor(left / steps->room);
      at_s += num_full * steps->full_s;
      left -= num_full * steps->room;
    } else if (left > 0.0 || at_s > busy_s) { /* Without tokens, it says when full steps end. */
      plan->busy_s[plan->num] = busy_s;
      plan->begin_s[plan->num] = at_s;
      plan->tokens[plan->num] = left;
      if (left > 0.0) at_s += steps->step_s + steps->s_per_token * left;
      plan->end_s[plan->num++] = busy_s = at_s;
      left = 0.0;
    } else if (next < num_due) {
      at_s = busy_s = due_s(all, w, next, now) + 0.5 * decode_s;
    } else {
      break;
    }
  }
}

/* Returns when tokens that become computable at `at_s` are as good as begun: when their step begins, and what it spends on
   other requests. */
static double joined_s(const Schedule *plan, const Steps *steps, double decode_s, double at_s, double num_tokens) {
  double free_s = plan->free_s;
  for (int64_t k = 0; k < plan->num; k++) {
    if (at_s <= plan->begin_s[k]) {
      if (at_s <= plan->busy_s[k] && plan->busy_s[k] > free_s) break; /* It is idle before the steps that end here. */
      double num_more = before_last(steps, plan->tokens[k] + num_tokens) - before_last(steps, num_tokens);
      return plan->begin_s[k] + steps->s_per_token * plan->tokens[k] + steps->step_s * num_more;
    }
    free_s = plan->end_s[k];
  }
  return at_s > free_s ? at_s + 0.5 * decode_s : free_s;
}

/* Raises `end_s`, the end of a worker's prefill, where the landings of the units permit no earlier end. Runs are those of
   placeholders, in any order. A run without a unit decides nothing, and neither does one whose landing is negative,
   because the worker has its unit. */
static void await_landings(const Workers *all, double now, const Times *times, int64_t w, const double *landings_s,
                           int64_t num_runs, const int64_t *run_units, const double *run_ends, const double *run_behind,
                           double *end_s) {
  int64_t most_steps = all->max_awaited + 1;
  double busy_s[most_steps], begins_s[most_steps], ends_s[most_steps], in_steps[most_steps];
  double step_s = times->last_s[w], s_per_token = all->per_token_s[w], room = times->room[w];
  Steps steps = {step_s, s_per_token, room, most(step_s + s_per_token * room, 1e-12)};
  Schedule plan = {times->free_s[w], busy_s, begins_s, ends_s, in_steps, -1};
  for (int64_t r = 0; r < num_runs; r++) {
    if (run_units[r] < 0 || run_ends[r] <= times->covered[w] || landings_s[run_units[r]] < 0.0) continue;
    double behind = least(run_behind[r], times->weighted[w]), own_s = times->s_per_token[w] * behind;
    if (plan.num < 0) fill_schedule(&plan, all, w, now, &steps, times->ahead[w], times->decode_s[w]);
    double awaited_s = joined_s(&plan, &steps, times->decode_s[w], landings_s[run_units[r]], behind) + own_s;
    if (awaited_s > *end_s) *end_s = awaited_s;
  }
}

/* The columns of encoders, by the names that `EncoderColumns` in `member_columns.py` gives them. */
DECLARED(Encoders,
  int64_t num, stride, num_bins;
  const double *profiles, *pending_profiles; /* [2 * bins][stride]: seconds, then moments */
  const double *is_reported, *report_at_s, *state_at_s, *forward_left_s, *unit_s, *patience, *open_units, *pending_units,
      *decode_left_s, *decode_queue_s, *decode_short_s, *num_decoders, *pending_decode_s, *barred_until_s;
  const double *rates;    /* [modalities][6][stride] */
  const uint8_t *is_able; /* [modalities][stride] */
);

/* Writes the waits [bins + 1][stride] behind the first bins of each queue, and the sizes [bins][stride] from which on new
   work is behind each bin. */
void device_waits(const Encoders *all, double now, double stale_after_s, double max_silence_s, int64_t priority,
                  double *waits_s, double *sizes_s) {
  for (int64_t e = 0; e < all->num; e++) {
    int is_reported = all->is_reported[e] > 0.0;
    double age_s = is_reported ? now - all->state_at_s[e] : 0.0, since_s = age_s - all->forward_left_s[e];
    double silence_s = is_reported ? now - stale_after_s - all->report_at_s[e] : max_silence_s, total_s = 0.0;
    silence_s = least(most(silence_s, 0.0), max_silence_s);
    double extra_s = silence_s + (silence_s > 0.0 ? all->open_units[e] - all->pending_units[e] : 0.0);
    for (int64_t k = 0; k < all->num_bins; k++) {
      int64_t at = k * all->stride + e, moment_at = (all->num_bins + k) * all->stride + e;
      double in_bin_s = all->profiles[at] + all->pending_profiles[at];
      double moment = all->profiles[moment_at] + all->pending_profiles[moment_at];
      waits_s[at] = total_s;
      total_s += in_bin_s;
      sizes_s[at] = -INFINITY;
      if (priority && k > 0)
        sizes_s[at] = priority > 0 ? -INFINITY : INFINITY;
      else if (in_bin_s > 0.0)
        sizes_s[at] = (moment / most(in_bin_s, 1e-12) - age_s) / most(all->patience[e], 1e-9) * (1.0 - 1e-9);
    }
    waits_s[all->num_bins * all->stride + e] = total_s;
    double in_the_way_s = since_s > 0.0 ? most(least(0.5 * all->unit_s[e], total_s - since_s), 0.0) : 0.0;
    for (int64_t k = 0; k <= all->num_bins; k++)
      waits_s[k * all->stride + e] = most(waits_s[k * all->stride + e] - since_s, in_the_way_s) + extra_s;
  }
}
