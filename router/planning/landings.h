/* Assigns the media of a request to encoders, and predicts when their features land at a worker. `landings.py` explains
   the model, and `landing_search.py` holds the same algorithm in Python; a test holds the two equal. All times are
   seconds from now. `route_search.c` includes this header, and it is the only one that does.

   The arrays that `Problem` points to belong to the caller. An array [x][stride] has a row for each x and a column for
   each slot of an encoder. Nothing is kept between two calls. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "structures.h"

#define MAX_DECODERS 16
#define MAX_CLASSES 8
#define NONE (-1)
#define MAX_TURNS 6
#define FAR 1e30

/* The arrays of a problem, by the names that `LandingProblem` in `landing_search.py` gives them. */
DECLARED(Problem,
  int64_t num_items, num_units, num_encoders, stride, num_bins, num_classes;
  const int64_t *modality;      /* [items] */
  const int64_t *first_unit;    /* [items + 1] */
  const double *cost;           /* [items] */
  const double *unit_share;     /* [units]: the share of the item's work that is done when the unit is */
  const double *unit_bytes;     /* [units] */
  const double *rates;          /* [modalities][6][stride]: decode, device and encode, each base and per cost */
  const uint8_t *is_able;       /* [modalities][stride] */
  const double *decoder_free_s; /* [stride]: when a decode process is free */
  const int64_t *num_decoders;  /* [stride] */
  const double *waits_s;        /* [bins][stride]: when new work begins that is behind so many bins of the queue */
  const double *bin_sizes_s;    /* [bins - 1][stride]: new work of this size is behind the bin */
  const double *ready_s;        /* [items][stride]: when a feature that is there or on its way is complete, or -1 */
  const double *alpha_s;        /* [classes] */
  const double *s_per_byte;     /* [classes] */
);

/* A `Lane` is what an encoder has been given of this request. */
typedef struct {
  double decoder_free_s[MAX_DECODERS];
  double device_free_s, own_s;
  uint64_t modalities;
  int num_decoders;
} Lane;

static double at(const Problem *p, int64_t item, int stage, int64_t encoder, int is_slope) {
  return p->rates[(p->modality[item] * 6 + 2 * stage + is_slope) * p->stride + encoder];
}

static void open_lane(const Problem *p, int64_t encoder, Lane *lane) {
  int64_t num = p->num_decoders[encoder];
  lane->num_decoders = (int)(num < 1 ? 1 : num > MAX_DECODERS ? MAX_DECODERS : num);
  for (int k = 0; k < lane->num_decoders; k++) lane->decoder_free_s[k] = p->decoder_free_s[encoder];
  lane->device_free_s = lane->own_s = 0.0;
  lane->modalities = 0;
}

static double wait_of(const Problem *p, int64_t encoder, double own_s) {
  int64_t bin = 0;
  while (bin < p->num_bins - 1 && p->bin_sizes_s[bin * p->stride + encoder] <= own_s) bin++;
  return p->waits_s[bin * p->stride + encoder];
}

/* Puts an item into a lane and returns when its last unit is complete. Writes when each unit is, and the item's terms
   (wait, decode wait, decode, device, encode, done), where the pointers are not null. */
static double put(const Problem *p, int64_t item, int64_t encoder, Lane *lane, double *done_s, double *terms) {
  int64_t first = p->first_unit[item], end = p->first_unit[item + 1];
  double ready = p->ready_s[item * p->stride + encoder];
  if (ready >= 0.0) {
    for (int64_t u = first; done_s && u < end; u++) done_s[u] = ready;
    if (terms) { terms[0] = terms[5] = ready; terms[1] = terms[2] = terms[3] = terms[4] = 0.0; }
    return ready;
  }
  double cost = p->cost[item];
  double decode_s = at(p, item, 0, encoder, 0) + at(p, item, 0, encoder, 1) * cost;
  double device_s = at(p, item, 1, encoder, 0) + at(p, item, 1, encoder, 1) * cost;
  double work_s = at(p, item, 2, encoder, 1) * cost;
  uint64_t bit = 1ull << p->modality[item];
  double base_s = lane->modalities & bit ? 0.0 : at(p, item, 2, encoder, 0);
  int decoder = 0;
  for (int k = 1; k < lane->num_decoders; k++)
    if (lane->decoder_free_s[k] < lane->decoder_free_s[decoder]) decoder = k;
  double begin_s = lane->decoder_free_s[decoder];
  lane->decoder_free_s[decoder] = begin_s + decode_s;
  lane->modalities |= bit;
  lane->own_s += device_s + base_s + work_s;
  double waited_s = wait_of(p, encoder, lane->own_s);
  double now_s = lane->device_free_s > waited_s ? lane->device_free_s : waited_s;
  double share = 0.0;
  if (device_s > 0.0) { /* The device takes an item as a whole once it is decoded. */
    if (begin_s + decode_s > now_s) now_s = begin_s + decode_s;
    now_s += device_s;
  }
  for (int64_t u = first; u < end; u++) {
    double decoded_s = begin_s + decode_s * p->unit_share[u];
    if (decoded_s > now_s) now_s = decoded_s;
    if (u == first) now_s += base_s;
    now_s += work_s * (p->unit_share[u] - share);
    share = p->unit_share[u];
    if (done_s) done_s[u] = now_s;
  }
  lane->device_free_s = now_s;
  if (terms) {
    terms[0] = waited_s; terms[1] = begin_s; terms[2] = decode_s; terms[3] = device_s; terms[4] = base_s + work_s;
    terms[5] = now_s;
  }
  return now_s;
}

/* Predicts all landings of one assignment. `encoders` holds the slot of each item, or NONE for an item that the worker
   does not lack; its units land at -FAR. `terms` [items][6] may be null. */
static void land(const Problem *p, const uint8_t *classes, const int64_t *encoders, double *landings_s, double *terms) {
  static const double start[MAX_CLASSES];
  double done_s[p->num_units + 1], link_free_s[MAX_CLASSES];
  Lane lanes[p->num_items];
  int64_t lane_encoders[p->num_items], heads[p->num_items], num_lanes = 0, num_left = 0;
  memcpy(link_free_s, start, sizeof(start));
  for (int64_t i = 0; i < p->num_items; i++) {
    int64_t encoder = encoders[i], lane = 0;
    heads[i] = p->first_unit[i];
    if (encoder == NONE) {
      for (int64_t u = p->first_unit[i]; u < p->first_unit[i + 1]; u++) landings_s[u] = -FAR;
      heads[i] = p->first_unit[i + 1];
      continue;
    }
    num_left += p->first_unit[i + 1] - p->first_unit[i];
    while (lane < num_lanes && lane_encoders[lane] != encoder) lane++;
    if (lane == num_lanes) {
      lane_encoders[num_lanes++] = encoder;
      open_lane(p, encoder, &lanes[lane]);
    }
    put(p, i, encoder, &lanes[lane], done_s, terms ? terms + 6 * i : 0);
  }
  for (; num_left > 0; num_left--) { /* The unit that is complete first takes the link first. */
    int64_t next = NONE;
    for (int64_t i = 0; i < p->num_items; i++)
      if (heads[i] < p->first_unit[i + 1] && (next == NONE || done_s[heads[i]] < done_s[heads[next]])) next = i;
    int64_t unit = heads[next]++;
    int class = classes[encoders[next]];
    double begin_s = done_s[unit] > link_free_s[class] ? done_s[unit] : link_free_s[class];
    link_free_s[class] = begin_s + p->s_per_byte[class] * p->unit_bytes[unit];
    landings_s[unit] = link_free_s[class] + p->alpha_s[class];
  }
}

/* An `Offer` is an encoder with the time at which one item alone would be complete there. */
typedef struct {
  double alone_s;
  int64_t turn, encoder;
} Offer;

static int is_sooner(const Offer *a, const Offer *b) {
  return a->alone_s != b->alone_s ? a->alone_s < b->alone_s : a->turn < b->turn;
}

/* Sorts offers. It merges sorted stretches and copies none that are in order already, because the offers of one item
   come in the order of another item's, and the two orders are nearly the same. `spare` has room for as many offers. */
static void sort_offers(Offer *own, int64_t num, Offer *spare) {
  const int64_t short_length = 8;
  for (int64_t begin = 0; begin < num; begin += short_length) {
    int64_t end = begin + short_length < num ? begin + short_length : num;
    for (int64_t k = begin + 1; k < end; k++) {
      Offer offer = own[k];
      int64_t at = k;
      for (; at > begin && is_sooner(&offer, own + at - 1); at--) own[at] = own[at - 1];
      own[at] = offer;
    }
  }
  for (int64_t length = short_length; length < num; length *= 2)
    for (int64_t begin = 0; begin + length < num; begin += 2 * length) {
      int64_t middle = begin + length, end = middle + length < num ? middle + length : num;
      if (!is_sooner(own + middle, own + middle - 1)) continue;
      memcpy(spare, own + begin, sizeof(Offer) * (size_t)length);
      for (int64_t left = 0, right = middle, at = begin; left < length; at++)
        own[at] = right < end && is_sooner(own + right, spare + left) ? own[right++] : spare[left++];
    }
}

/* Returns whether two items take equally long on every encoder, as pictures of one size do. */
static int is_alike(const Problem *p, int64_t item, int64_t other) {
  int64_t num_units = p->first_unit[item + 1] - p->first_unit[item];
  return p->modality[item] == p->modality[other] && p->cost[item] == p->cost[other] &&
         num_units == p->first_unit[other + 1] - p->first_unit[other] &&
         !memcmp(p->unit_share + p->first_unit[item], p->unit_share + p->first_unit[other],
                 sizeof(double) * (size_t)num_units) &&
         !memcmp(p->ready_s + item * p->stride, p->ready_s + other * p->stride,
                 sizeof(double) * (size_t)p->num_encoders);
}

/* Writes each item's offers [items][num_encoders], the earliest first; equal ones in turn from the slot `first`. Behind
   the last one is an offer of NONE, unless every encoder is able. An item of the same modality as the one before it
   begins with the order of that one, and one that is like it has the same offers. */
static void make_offers(const Problem *p, int64_t first, Offer *offers) {
  Offer spare[p->num_encoders + 1];
  int64_t num = 0;
  for (int64_t i = 0; i < p->num_items; i++) {
    Offer *own = offers + i * p->num_encoders, *former = own - p->num_encoders;
    int is_same_kind = i > 0 && p->modality[i] == p->modality[i - 1];
    if (is_same_kind && is_alike(p, i, i - 1)) {
      memcpy(own, former, sizeof(Offer) * (size_t)p->num_encoders);
      continue;
    }
    int64_t num_tried = is_same_kind ? num : p->num_encoders;
    num = 0;
    for (int64_t k = 0; k < num_tried; k++) {
      int64_t e = is_same_kind ? former[k].encoder : k;
      if (!p->is_able[p->modality[i] * p->stride + e]) continue;
      Lane lane;
      open_lane(p, e, &lane);
      own[num++] = (Offer){put(p, i, e, &lane, 0, 0), e < first ? e - first + p->num_encoders : e - first, e};
    }
    sort_offers(own, num, spare);
    if (num < p->num_encoders) own[num].encoder = NONE;
  }
}

/* A `Row` is a set of lacking items with the class of the link to each encoder. */
typedef struct {
  const uint8_t *classes, *lacks;
  int64_t quota, num_of_class[MAX_CLASSES];
} Row;

static Row make_row(const Problem *p, const uint8_t *classes, const uint8_t *lacks) {
  Row row = {classes, lacks, 2, {0}};
  for (int64_t i = 0; i < p->num_items; i++) row.quota += lacks[i];
  for (int64_t e = 0; e < p->num_encoders; e++) row.num_of_class[classes[e]]++;
  return row;
}

/* Writes the offers that an item considers in a row and returns how many they are: the best of each link class, two more
   than the row lacks items. In any assignment one of these encoders is free for the item, so a worse one can't help. */
static int64_t shortlist(const Problem *p, const Row *row, const Offer *own, const Offer **list) {
  int64_t wanted[MAX_CLASSES], num_wanted = 0, num = 0;
  for (int64_t k = 0; k < p->num_classes; k++) {
    wanted[k] = row->num_of_class[k] < row->quota ? row->num_of_class[k] : row->quota;
    num_wanted += wanted[k];
  }
  for (int64_t k = 0; k < p->num_encoders && own[k].encoder != NONE && num_wanted > 0; k++) {
    int class = row->classes[own[k].encoder];
    if (wanted[class] == 0) continue;
    wanted[class]--;
    num_wanted--;
    list[num++] = own + k;
  }
  return num;
}

/* Gives each lacking item, in the given order, to the encoder from which its last unit lands first; among equal ones
   the first offer is taken. The items of one encoder queue in this order; `land` queues them in order of index. It
   considers the offers of `shortlist`, and stops where even the closest link makes no later offer the better one. */
static void choose_greedily(const Problem *p, const uint8_t *classes, const uint8_t *lacks, const Offer *offers,
                            const int64_t *order, int64_t *encoders) {
  Lane lanes[p->num_items];
  int64_t lane_encoders[p->num_items], num_lanes = 0, quota = 2;
  for (int64_t i = 0; i < p->num_items; i++) quota += lacks[i];
  for (int64_t k = 0; k < p->num_items; k++) {
    int64_t item = order ? order[k] : k, best = NONE, lane = 0, num_taken[MAX_CLASSES] = {0};
    const Offer *own = offers + item * p->num_encoders;
    double best_s = FAR, least_link_s = FAR, link_s[MAX_CLASSES];
    encoders[item] = NONE;
    if (!lacks[item]) continue;
    double nbytes = p->unit_bytes[p->first_unit[item + 1] - 1];
    for (int64_t c = 0; c < p->num_classes; c++) {
      link_s[c] = p->alpha_s[c] + p->s_per_byte[c] * nbytes;
      if (link_s[c] < least_link_s) least_link_s = link_s[c];
    }
    for (int64_t c = 0; c < p->num_encoders && own[c].encoder != NONE; c++) {
      int64_t encoder = own[c].encoder;
      int class = classes[encoder];
      double done_s = own[c].alone_s;
      if (done_s + least_link_s >= best_s) break;
      if (num_taken[class]++ >= quota || done_s + link_s[class] >= best_s) continue;
      for (lane = 0; lane < num_lanes && lane_encoders[lane] != encoder;) lane++;
      if (lane < num_lanes) {
        Lane copy = lanes[lane];
        done_s = put(p, item, encoder, &copy, 0, 0);
      }
      if (done_s + link_s[class] < best_s) { best = encoder; best_s = done_s + link_s[class]; }
    }
    if (best == NONE) continue;
    for (lane = 0; lane < num_lanes && lane_encoders[lane] != best;) lane++;
    if (lane == num_lanes) {
      lane_encoders[num_lanes++] = best;
      open_lane(p, best, &lanes[lane]);
    }
    put(p, item, best, &lanes[lane], 0, 0);
    encoders[item] = best;
  }
}

/* Writes the offers, and for each row the greedy assignment [items] and its landings [units]. */
void land_rows(const Problem *p, int64_t num_rows, const uint8_t *classes, const uint8_t *lacks, int64_t first,
               Offer *offers, int64_t *encoders, double *landings_s) {
  make_offers(p, first, offers);
  for (int64_t r = 0; r < num_rows; r++) {
    const uint8_t *own = classes + r * p->stride;
    choose_greedily(p, own, lacks + r * p->num_items, offers, 0, encoders + r * p->num_items);
    land(p, own, encoders + r * p->num_items, landings_s + r * p->num_units, 0);
  }
}

/* Writes the landings [units] of the greedy assignment of one row with every queue empty, and with all features complete
   that are on their way. */
static void land_idle(const Problem *p, const uint8_t *classes, const uint8_t *lacks, double *landings_s) {
  Problem idle = *p;
  int64_t num_ready = p->num_items * p->stride, encoders[p->num_items];
  double *zeros = calloc((size_t)(p->stride + num_ready), sizeof(double)), *ready_s = zeros + p->stride;
  Offer *offers = malloc(sizeof(Offer) * (size_t)(p->num_items * p->num_encoders + 1));
  if (zeros && offers) {
    for (int64_t k = 0; k < num_ready; k++) ready_s[k] = p->ready_s[k] < 0.0 ? p->ready_s[k] : 0.0;
    idle.num_bins = 1;
    idle.waits_s = idle.decoder_free_s = zeros;
    idle.ready_s = ready_s;
    land_rows(&idle, 1, classes, lacks, 0, offers, encoders, landings_s);
  } else { /* A bound of nothing is still a bound. */
    for (int64_t u = 0; u < p->num_units; u++) landings_s[u] = 0.0;
  }
  free(zeros);
  free(offers);
}

/* A `Goal` is a worker: a unit that lands at t ends the prefill at t + s_per_token * behind[unit] at the earliest. */
typedef struct {
  double least_s;       /* The prefill ends no earlier, however soon the features land. */
  double s_per_token;
  const double *behind; /* [units]: the weighted tokens from the unit's first missing one to the end of the prompt */
} Goal;

typedef struct {
  double end_s, landings_sum_s;
  int64_t unit; /* The unit that decides, or NONE. */
} Score;

static Score judge(const Problem *p, const Goal *goal, const double *landings_s) {
  Score score = {goal->least_s, 0.0, NONE};
  for (int64_t u = 0; u < p->num_units; u++) {
    if (landings_s[u] <= -FAR) continue;
    double end_s = landings_s[u] + goal->s_per_token * goal->behind[u];
    score.landings_sum_s += landings_s[u];
    if (end_s > score.end_s) { score.end_s = end_s; score.unit = u; }
  }
  return score;
}

static int is_better(Score a, Score b) {
  if (a.end_s != b.end_s) return a.end_s < b.end_s;
  return a.landings_sum_s < b.landings_sum_s;
}

/* A `Move` gives an item to another encoder, and the item `other`, unless that is NONE, to the item's present one. */
typedef struct {
  int64_t item, encoder, other;
  Score score;
} Move;

/* Scores a move, keeps it in `best` if it is better, and takes it back. */
static void try_move(const Problem *p, const Row *row, const Goal *goal, Move move, int64_t *encoders,
                     double *landings_s, Move *best, int64_t *trials_left) {
  int64_t present = encoders[move.item];
  encoders[move.item] = move.encoder;
  if (move.other != NONE) encoders[move.other] = present;
  land(p, row->classes, encoders, landings_s, 0);
  move.score = judge(p, goal, landings_s);
  if (is_better(move.score, best->score)) *best = move;
  encoders[move.item] = present;
  if (move.other != NONE) encoders[move.other] = move.encoder;
  --*trials_left;
}

/* Moves items off the encoder that decides the end, or swaps them with items of other encoders, while that helps. With
   `is_wide` it moves items of all encoders, because what delays the deciding unit may be the link. */
static Score climb(const Problem *p, const Row *row, const Goal *goal, const Offer *offers, int is_wide,
                   int64_t *encoders, int64_t *trials_left) {
  double landings_s[p->num_units + 1];
  const Offer *list[p->num_encoders + 1];
  land(p, row->classes, encoders, landings_s, 0);
  Move best = {NONE, NONE, NONE, judge(p, goal, landings_s)};
  while (best.score.unit != NONE && *trials_left > 0) {
    int64_t decider = 0;
    while (p->first_unit[decider + 1] <= best.score.unit) decider++;
    int64_t deciding = encoders[decider];
    best.item = NONE;
    for (int64_t i = 0; i < p->num_items; i++) {
      int64_t full = encoders[i];
      if (full == NONE || (full != deciding && !is_wide)) continue;
      int64_t last = p->first_unit[i + 1] - 1, num = shortlist(p, row, offers + i * p->num_encoders, list);
      for (int64_t c = 0; c < num && *trials_left > 0; c++) {
        int64_t encoder = list[c]->encoder;
        int class = row->classes[encoder];
        double least_s = list[c]->alone_s + p->alpha_s[class] + p->s_per_byte[class] * p->unit_bytes[last];
        if (encoder == full || least_s + goal->s_per_token * goal->behind[last] > best.score.end_s) continue;
        try_move(p, row, goal, (Move){i, encoder, NONE, best.score}, encoders, landings_s, &best, trials_left);
      }
      for (int64_t k = 0; k < p->num_items && *trials_left > 0; k++) {
        int64_t other = encoders[k];
        if (other == NONE || other == full || !p->is_able[p->modality[i] * p->stride + other] ||
            !p->is_able[p->modality[k] * p->stride + full])
          continue;
        try_move(p, row, goal, (Move){i, other, k, best.score}, encoders, landings_s, &best, trials_left);
      }
    }
    if (best.item == NONE) break;
    if (best.other != NONE) encoders[best.other] = encoders[best.item];
    encoders[best.item] = best.encoder;
  }
  return best.score;
}

/* Writes the best assignment of all lacking items to one encoder and returns its score; the score is FAR if no encoder
   can take them all. Only the encoders that the first lacking item considers are tried. */
static Score choose_single(const Problem *p, const Row *row, const Goal *goal, const Offer *offers, int64_t *encoders) {
  double landings_s[p->num_units + 1];
  const Offer *list[p->num_encoders + 1];
  int64_t trial[p->num_items], item = 0;
  Score best = {FAR, FAR, NONE};
  while (item < p->num_items - 1 && !row->lacks[item]) item++;
  int64_t num = shortlist(p, row, offers + item * p->num_encoders, list);
  for (int64_t c = 0; c < num; c++) {
    int is_able = 1;
    for (int64_t i = 0; i < p->num_items; i++) {
      trial[i] = row->lacks[i] ? list[c]->encoder : NONE;
      is_able &= !row->lacks[i] || p->is_able[p->modality[i] * p->stride + list[c]->encoder];
    }
    if (!is_able) continue;
    land(p, row->classes, trial, landings_s, 0);
    Score score = judge(p, goal, landings_s);
    if (is_better(score, best)) { best = score; memcpy(encoders, trial, sizeof(trial)); }
  }
  return best;
}

/* Improves the assignment of one row for one worker. It climbs from the given assignment, from the best single encoder,
   and from greedy choices in descending order of cost, in reverse order and in order from later items on, goes on from
   the best one with items of all encoders, and returns its end. Writes its assignment, landings [units] and terms
   [items][6]. With `max_trials` 0 the given assignment stays. */
double improve(const Problem *p, const Offer *offers, const uint8_t *classes, const uint8_t *lacks, double least_s,
               double s_per_token, const double *behind, int64_t max_trials, int64_t *encoders, double *landings_s,
               double *terms) {
  const Goal goal = {least_s, s_per_token, behind};
  Row row = make_row(p, classes, lacks);
  int64_t order[p->num_items], trial[p->num_items], trials_left = max_trials / 4, num_lacking = row.quota - 2;
  Score best = climb(p, &row, &goal, offers, 0, encoders, &trials_left);
  int64_t num_starts = 3 + (p->num_items - 1 < MAX_TURNS ? p->num_items - 1 : MAX_TURNS);
  for (int64_t start = 0; start < num_starts && max_trials > 0 && best.unit != NONE && num_lacking > 1; start++) {
    if (start == 0) {
      if (choose_single(p, &row, &goal, offers, trial).end_s >= FAR) continue;
    } else {
      for (int64_t i = 0; i < p->num_items; i++) {
        int64_t at = i;
        if (start >= 2) { /* in reverse order, and then in order from each of the first items on */
          order[i] = start == 2 ? p->num_items - 1 - i : (i + start - 2) % p->num_items;
          continue;
        }
        for (; at > 0 && p->cost[order[at - 1]] < p->cost[i]; at--) order[at] = order[at - 1];
        order[at] = i;
      }
      choose_greedily(p, classes, lacks, offers, order, trial);
    }
    trials_left = max_trials / 4;
    Score score = climb(p, &row, &goal, offers, 0, trial, &trials_left);
    if (is_better(score, best)) { best = score; memcpy(encoders, trial, sizeof(trial)); }
  }
  if (max_trials > 0 && num_lacking > 1) {
    trials_left = max_trials;
    best = climb(p, &row, &goal, offers, 1, encoders, &trials_left);
  }
  land(p, classes, encoders, landings_s, terms);
  return best.end_s;
}
