/* Keeps which members hold which block of a tree of prefixes, in a table of a fixed number of entries.
 *
 * An entry is a block: its key, the entry of the block before it, the number of entries below it, the set of its
 * holders, and its place in a list from the most to the least recently used entry. Entry 0 is the root of all chains
 * and the head of that list. Equal sets of holders exist once, so that a block costs a number and not a bit per member.
 *
 * The key of a block is made of 64 of the 128 bits of its hash. An entry is found by its key and counts only if its
 * parent is the block before it, so a wrong answer takes two blocks with equal keys below one parent: among a million
 * blocks this has a probability of less than 3e-8. Equal keys elsewhere cost a block that is not recorded.
 *
 * When the table is full, the least recently used block that has no block below it makes room, so that no entry loses
 * its parent. A block with others below it that reaches the end of the list moves to the front instead. A member that
 * leaves is masked out at once, and `ht_sweep` takes it out of the sets of all entries a piece at a time.
 *
 * One thread uses a table. The code knows nothing of events, epochs and names of members. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define NONE UINT32_MAX
#define CACHE 1024          /* remembered results of adding a member to a set, or of removing it */
#define SET_BUDGET 10       /* bytes per entry that sets may take */
#define MIN_SETS 64
#define RESCUES_AHEAD 2     /* entries that each new one moves from the end of the list while the table fills up */
#define AHEAD 8             /* blocks between asking for memory and reading it */
#define SWEPT_WHEN_FULL 32  /* entries that a full table sweeps before it evicts */

typedef struct {
    uint64_t key;
    uint32_t parent;   /* NONE in a free entry */
    uint32_t children; /* the next free entry in a free one */
    uint32_t set;
    uint32_t newer, older;
} Entry;

/* The buckets are probed one after the other. A part of the key's hash stands beside the entry's number, so that a
 * search reads hardly any entry but the one that it finds. */
typedef struct {
    uint32_t entry; /* 0 in an empty bucket */
    uint32_t hash;
} Bucket;

typedef struct {
    uint64_t hash;  /* the xor of its members' numbers, mixed */
    uint32_t refs;  /* entries that have this set; 0 in a free set */
    uint32_t next;  /* in the chain of the bucket, or the next free set */
} Set;

typedef struct {
    uint32_t set, member, result;
} Flip;

typedef struct {
    uint32_t max_entries, high, num, free_entry;
    uint32_t bucket_mask, set_mask;
    uint32_t max_sets, high_set, num_sets, free_set;
    uint32_t words;                       /* 64-bit words of a set */
    uint32_t num_members, cursor;         /* `cursor` is the entry that the sweep looks at next, 0 without a sweep */
    uint64_t evicted, refused, rescued;
    Entry *entries;
    Bucket *buckets;
    Set *sets;
    uint64_t *bits;                       /* `words` words per set */
    uint32_t *set_heads;
    uint64_t *live, *leaving, *left;      /* members: present; being swept out; to be swept out next */
    uint64_t *held;                       /* scratch of a lookup */
    int32_t *slots;                       /* the caller's number of each member */
    uint8_t *has_stored;
    uint32_t *free_members;
    uint32_t num_free_members;
    Flip cache[CACHE];
} Table;

static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline uint64_t key_of(const uint8_t *hash) {
    uint64_t low, high;
    memcpy(&low, hash, 8);
    memcpy(&high, hash + 8, 8);
    return low ^ high * 0x9e3779b97f4a7c15u;
}

static inline uint32_t hash_of(uint64_t key) { return (uint32_t)((key * 0xff51afd7ed558ccdu) >> 32); }

static inline uint64_t *bits_of(const Table *t, uint32_t set) { return t->bits + (size_t)set * t->words; }

static inline int has(const uint64_t *bits, uint32_t member) { return bits[member >> 6] >> (member & 63) & 1; }

/* ---------------------------------------------------------------- life */

/* Returns zeroed memory, in large pages if the system gives some: a table is read in random order, which takes half the
 * time if few pages hold it. Returns NULL without memory. */
static void *large(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(memory, size, MADV_HUGEPAGE);
#endif
    return memory;
}

/* Has the system give the pages of a memory now. */
static void take_pages(void *memory, size_t size) {
    for (size_t at = 0; at < size; at += 4096) ((volatile char *)memory)[at] = 0;
}

static size_t entries_size(const Table *t) { return ((size_t)t->max_entries + 1) * sizeof(Entry); }

static size_t buckets_size(const Table *t) { return ((size_t)t->bucket_mask + 1) * sizeof(Bucket); }

void ht_free(Table *t) {
    if (!t) return;
    if (t->entries) munmap(t->entries, entries_size(t));
    if (t->buckets) munmap(t->buckets, buckets_size(t));
    void *all[] = {t->sets, t->bits, t->set_heads, t->live, t->leaving, t->left,
                   t->held, t->slots, t->has_stored, t->free_members, t};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static int grow_members(Table *t, uint32_t words) {
    uint64_t *bits = calloc(t->max_sets, 8 * (size_t)words);
    uint64_t *live = calloc(words, 8), *leaving = calloc(words, 8), *left = calloc(words, 8), *held = calloc(words, 8);
    int32_t *slots = calloc(words, 64 * sizeof *slots);
    uint8_t *has_stored = calloc(words, 64);
    uint32_t *free_members = calloc(words, 64 * sizeof *free_members);
    if (!bits || !live || !leaving || !left || !held || !slots || !has_stored || !free_members) {
        void *all[] = {bits, live, leaving, left, held, slots, has_stored, free_members};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
        return 0;
    }
    if (t->words) {
        size_t size = 8 * (size_t)t->words, count = 64 * (size_t)t->words;
        for (uint32_t s = 0; s < t->high_set; s++) memcpy(bits + (size_t)s * words, bits_of(t, s), size);
        memcpy(live, t->live, size);
        memcpy(leaving, t->leaving, size);
        memcpy(left, t->left, size);
        memcpy(slots, t->slots, count * sizeof *slots);
        memcpy(has_stored, t->has_stored, count);
        memcpy(free_members, t->free_members, count * sizeof *free_members);
        void *all[] = {t->bits, t->live, t->leaving, t->left, t->held, t->slots, t->has_stored, t->free_members};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    }
    t->bits = bits, t->live = live, t->leaving = leaving, t->left = left, t->held = held;
    t->slots = slots, t->has_stored = has_stored, t->free_members = free_members, t->words = words;
    return 1;
}

/* Returns a table, or NULL without memory. The pages of the entries are taken as entries are used. Those of the buckets
 * are taken here: a few hundred blocks use all of them, and so many pages at once take up to a tenth of a second. */
Table *ht_new(uint32_t max_entries) {
    Table *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    uint32_t bits = 4, set_bits = 6;
    while (bits < 31 && (1u << bits) < max_entries + max_entries / 2) bits++;
    while (set_bits < 17 && (8u << set_bits) < max_entries) set_bits++;
    t->max_entries = max_entries;
    t->bucket_mask = (1u << bits) - 1;
    t->set_mask = (1u << set_bits) - 1;
    t->max_sets = (uint32_t)((uint64_t)max_entries * SET_BUDGET / (sizeof(Set) + 8)) + MIN_SETS;
    t->high = t->high_set = 1;
    t->entries = large(entries_size(t));
    t->buckets = large(buckets_size(t));
    t->sets = malloc((size_t)t->max_sets * sizeof(Set));
    t->set_heads = calloc((size_t)t->set_mask + 1, 4);
    if (!t->entries || !t->buckets || !t->sets || !t->set_heads || !grow_members(t, 1)) {
        ht_free(t);
        return NULL;
    }
    take_pages(t->buckets, buckets_size(t));
    t->sets[0] = (Set){0, 1, 0};
    return t;
}

/* ---------------------------------------------------------------- the order of use */

static inline void detach(Table *t, uint32_t e) {
    t->entries[t->entries[e].newer].older = t->entries[e].older;
    t->entries[t->entries[e].older].newer = t->entries[e].newer;
}

/* Puts the entry directly behind `ahead` in the list; 0 is the head of the list. */
static inline void attach(Table *t, uint32_t e, uint32_t ahead) {
    uint32_t behind = t->entries[ahead].older;
    t->entries[e].newer = ahead;
    t->entries[e].older = behind;
    t->entries[ahead].older = e;
    t->entries[behind].newer = e;
}

static inline void touch(Table *t, uint32_t e) {
    if (t->entries[0].older == e) return;
    detach(t, e);
    attach(t, e, 0);
}

/* ---------------------------------------------------------------- sets of holders */

static void release_set(Table *t, uint32_t set) {
    if (!set || --t->sets[set].refs) return;
    uint32_t *at = &t->set_heads[t->sets[set].hash & t->set_mask];
    while (*at != set) at = &t->sets[*at].next;
    *at = t->sets[set].next;
    t->sets[set].next = t->free_set;
    t->free_set = set;
    t->num_sets--;
}

static int evict_one(Table *t);

/* Returns the most sets that fit into their budget. */
static inline uint32_t set_limit(const Table *t) {
    uint64_t limit = (uint64_t)t->max_entries * SET_BUDGET / (sizeof(Set) + 8 * (uint64_t)t->words) + MIN_SETS;
    return limit < t->max_sets ? (uint32_t)limit : t->max_sets;
}

/* Returns the set that differs from `set` in one member, with one more reference to it, or NONE without room. */
static uint32_t flipped(Table *t, uint32_t set, uint32_t member) {
    uint64_t hash = t->sets[set].hash ^ mixed(member);
    Flip *known = &t->cache[(set * 31 + member) & (CACHE - 1)];
    uint32_t found = known->result;
    /* A set that was freed since, or that has other members now, has another hash. */
    if (known->set == set && known->member == member && found < t->high_set && t->sets[found].refs &&
        t->sets[found].hash == hash) {
        if (found) t->sets[found].refs++;
        return found;
    }
    const uint64_t *old = bits_of(t, set);
    uint64_t flip = 1ull << (member & 63);
    found = 0;
    if (hash) { /* the empty set is set 0 */
        for (found = t->set_heads[hash & t->set_mask]; found; found = t->sets[found].next) {
            if (t->sets[found].hash != hash) continue;
            const uint64_t *bits = bits_of(t, found);
            uint32_t w = 0;
            while (w < t->words && bits[w] == (old[w] ^ (w == member >> 6 ? flip : 0))) w++;
            if (w == t->words) break;
        }
        if (!found) {
            while (t->num_sets + 1 >= set_limit(t))
                if (!evict_one(t)) break;
            if (t->free_set) {
                found = t->free_set;
                t->free_set = t->sets[found].next;
            } else if (t->high_set < t->max_sets) {
                found = t->high_set++;
            } else {
                return NONE;
            }
            uint64_t *bits = bits_of(t, found);
            memcpy(bits, old, 8 * (size_t)t->words);
            bits[member >> 6] ^= flip;
            t->sets[found] = (Set){hash, 0, t->set_heads[hash & t->set_mask]};
            t->set_heads[hash & t->set_mask] = found;
            t->num_sets++;
        }
        t->sets[found].refs++;
    }
    *known = (Flip){set, member, found};
    return found;
}

/* Adds the member to the entry's set, or removes it. Returns 0 if there is no room for one more set. */
static int flip(Table *t, uint32_t e, uint32_t member) {
    uint32_t old = t->entries[e].set;
    t->entries[e].children++; /* keeps the entry from being evicted for the room of its set */
    uint32_t set = flipped(t, old, member);
    t->entries[e].children--;
    if (set == NONE) return 0;
    t->entries[e].set = set;
    release_set(t, old);
    return 1;
}

/* ---------------------------------------------------------------- entries */

static uint32_t find(const Table *t, uint64_t key) {
    uint32_t hash = hash_of(key), i = hash & t->bucket_mask;
    for (; t->buckets[i].entry; i = (i + 1) & t->bucket_mask)
        if (t->buckets[i].hash == hash && t->entries[t->buckets[i].entry].key == key) return t->buckets[i].entry;
    return 0;
}

static void enter_bucket(Table *t, uint32_t e) {
    uint32_t hash = hash_of(t->entries[e].key), i = hash & t->bucket_mask;
    while (t->buckets[i].entry) i = (i + 1) & t->bucket_mask;
    t->buckets[i] = (Bucket){e, hash};
}

/* Empties the entry's bucket, and moves up those behind it that a search would no longer reach. */
static void leave_bucket(Table *t, uint32_t e) {
    uint32_t mask = t->bucket_mask, gap = hash_of(t->entries[e].key) & mask;
    while (t->buckets[gap].entry != e) gap = (gap + 1) & mask;
    for (uint32_t i = (gap + 1) & mask; t->buckets[i].entry; i = (i + 1) & mask) {
        uint32_t home = t->buckets[i].hash & mask;
        if (((i - home) & mask) < ((i - gap) & mask)) continue;
        t->buckets[gap] = t->buckets[i];
        gap = i;
    }
    t->buckets[gap].entry = 0;
}

/* Finds the entry of a block whose neighbour in the chain is `near`: chains mostly lie side by side. */
static inline uint32_t find_near(const Table *t, uint64_t key, uint32_t near) {
    if (near) {
        if (near + 1 < t->high && t->entries[near + 1].key == key && t->entries[near + 1].parent != NONE)
            return near + 1;
        if (near > 1 && t->entries[near - 1].key == key && t->entries[near - 1].parent != NONE) return near - 1;
    }
    return find(t, key);
}

/* Deletes the entry, which has no children, and then those of its ancestors that have neither holders nor children. */
static void delete_entry(Table *t, uint32_t e) {
    for (;;) {
        uint32_t parent = t->entries[e].parent;
        leave_bucket(t, e);
        detach(t, e);
        release_set(t, t->entries[e].set);
        t->entries[e].parent = NONE;
        t->entries[e].children = t->free_entry;
        t->free_entry = e;
        t->num--;
        if (--t->entries[parent].children || !parent || t->entries[parent].set) return;
        e = parent;
    }
}

static inline void delete_if_void(Table *t, uint32_t e) {
    if (e && !t->entries[e].set && !t->entries[e].children) delete_entry(t, e);
}

/* Evicts the least recently used entry without children. Returns 0 if there is none. */
static int evict_one(Table *t) {
    for (uint32_t tried = 0; tried <= t->num; tried++) {
        uint32_t e = t->entries[0].newer;
        if (!e) return 0;
        if (!t->entries[e].children) {
            uint32_t before = t->num;
            delete_entry(t, e);
            t->evicted += before - t->num;
            return 1;
        }
        touch(t, e);
        t->rescued++;
    }
    return 0;
}

uint32_t ht_sweep(Table *t, uint32_t count);

/* Makes room for `count` entries, as far as sweeping and evicting can. The caller keeps what must stay from being
 * evicted by counting it as a parent. */
static void make_room(Table *t, uint32_t count) {
    uint32_t ahead = t->entries[0].newer;
    for (int i = 0; i < AHEAD; i++) ahead = t->entries[ahead].newer;
    while (t->max_entries - t->num < count) {
        __builtin_prefetch(&t->buckets[hash_of(t->entries[ahead].key) & t->bucket_mask], 1);
        ahead = t->entries[ahead].newer; /* in an entry that was freed since, this leads to another entry */
        if (t->cursor) {
            uint32_t before = t->num;
            ht_sweep(t, SWEPT_WHEN_FULL);
            if (t->num < before) continue;
        }
        if (!evict_one(t)) return;
    }
}

/* Adds an entry without holders below `parent`, behind `ahead` in the order of use. Returns 0 without room. */
static uint32_t add_entry(Table *t, uint64_t key, uint32_t parent, uint32_t ahead) {
    uint32_t e = t->free_entry;
    if (e) t->free_entry = t->entries[e].children;
    else if (t->high <= t->max_entries) e = t->high++;
    else return 0;
    t->entries[e] = (Entry){.key = key, .parent = parent};
    t->entries[parent].children++;
    enter_bucket(t, e);
    attach(t, e, ahead);
    t->num++;
    /* Blocks with others below them gather at the end of the list, because a lookup touches only the last block that
     * it finds. Moving a few of them with each new entry spares the first eviction from moving all of them. */
    for (int i = 0; i < RESCUES_AHEAD && t->num > t->max_entries / 2; i++) {
        uint32_t last = t->entries[0].newer;
        if (!t->entries[last].children) break;
        touch(t, last);
    }
    return e;
}

/* ---------------------------------------------------------------- members */

/* Adds a member with the caller's number `slot`. Returns the table's number of the member, or NONE without memory. */
uint32_t ht_join(Table *t, int32_t slot) {
    uint32_t member;
    if (t->num_free_members) {
        member = t->free_members[--t->num_free_members];
    } else {
        if (t->num_members == 64 * t->words && !grow_members(t, 2 * t->words)) return NONE;
        member = t->num_members++;
    }
    t->slots[member] = slot;
    t->has_stored[member] = 0;
    t->live[member >> 6] |= 1ull << (member & 63);
    return member;
}

static void begin_sweep(Table *t) {
    memcpy(t->leaving, t->left, 8 * (size_t)t->words);
    memset(t->left, 0, 8 * (size_t)t->words);
    t->cursor = 0;
    for (uint32_t w = 0; w < t->words; w++)
        if (t->leaving[w]) t->cursor = 1;
}

/* Removes a member: no lookup sees it any more. Its number is used again after the sweep. */
void ht_leave(Table *t, uint32_t member) {
    t->live[member >> 6] &= ~(1ull << (member & 63));
    if (!t->has_stored[member]) {
        t->free_members[t->num_free_members++] = member;
        return;
    }
    t->left[member >> 6] |= 1ull << (member & 63);
    if (!t->cursor) begin_sweep(t);
}

/* Takes the members that left out of the next `count` entries, and deletes entries without a holder. Returns 0 if
 * there is nothing left to sweep. */
uint32_t ht_sweep(Table *t, uint32_t count) {
    uint32_t clean = 0; /* a set without members that left; the empty set is one */
    for (; t->cursor && count; count--) {
        if (t->cursor >= t->high) {
            for (uint32_t member = 0; member < t->num_members; member++)
                if (has(t->leaving, member)) t->free_members[t->num_free_members++] = member;
            memset(t->leaving, 0, 8 * (size_t)t->words);
            begin_sweep(t);
            clean = 0; /* other members leave now */
            continue;
        }
        uint32_t e = t->cursor++;
        if (t->entries[e].parent == NONE || t->entries[e].set == clean) continue;
        uint32_t set = t->entries[e].set, changed = 0;
        for (uint32_t w = 0; w < t->words; w++) {
            uint64_t gone = bits_of(t, set)[w] & t->leaving[w];
            for (; gone; gone &= gone - 1) {
                changed = 1;
                /* Without room for the smaller set the entry loses all its holders, which only undercounts. */
                if (!flip(t, e, 64 * w + (uint32_t)__builtin_ctzll(gone))) {
                    release_set(t, t->entries[e].set);
                    t->entries[e].set = 0;
                    gone = 0, w = t->words;
                    break;
                }
                set = t->entries[e].set;
            }
        }
        clean = changed ? 0 : set; /* a change may have given the number of a clean set to another one */
        delete_if_void(t, e);
    }
    return t->cursor;
}

/* ---------------------------------------------------------------- blocks */

/* Asks for the memory in which block `i + AHEAD` of a run will be looked for. */
static inline void prefetch(const Table *t, const uint8_t *hashes, uint32_t i, uint32_t count) {
    if (i + AHEAD < count)
        __builtin_prefetch(&t->buckets[hash_of(key_of(hashes + 16 * (size_t)(i + AHEAD))) & t->bucket_mask], 1);
}

/* Records that the member holds a run of `count` blocks below `parent` (NULL at the root). Returns how many of them
 * were recorded: none if the parent is unknown, and not all if the run alone is longer than the table. */
uint32_t ht_store(Table *t, uint32_t member, const uint8_t *parent, const uint8_t *hashes, uint32_t count) {
    uint32_t p = 0, added = 0, i;
    if (parent && !(p = find(t, key_of(parent)))) {
        t->refused += count;
        return 0;
    }
    t->has_stored[member] = 1;
    for (i = 0; i < count; i++) {
        prefetch(t, hashes, i, count);
        uint64_t key = key_of(hashes + 16 * (size_t)i);
        uint32_t e = find_near(t, key, p);
        if (e && t->entries[e].parent != p) break; /* another block has the same key */
        if (!e) {
            t->entries[p].children++; /* keeps the parent from being evicted */
            if (!added) make_room(t, count - i);
            e = add_entry(t, key, p, added);
            t->entries[p].children--;
            added = e;
            if (!e) {
                if (p && !t->entries[p].set && !t->entries[p].children) delete_entry(t, p), p = 0;
                break;
            }
        }
        if (!has(bits_of(t, t->entries[e].set), member) && !flip(t, e, member)) {
            delete_if_void(t, e);
            added = 0;
            break;
        }
        p = e;
    }
    t->refused += count - i;
    if (p && !added) touch(t, p);
    return i;
}

/* Records that the member no longer holds these blocks. */
void ht_remove(Table *t, uint32_t member, const uint8_t *hashes, uint32_t count) {
    uint32_t near = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t e = find_near(t, key_of(hashes + 16 * (size_t)i), near);
        if (!e) continue;
        near = e;
        if (!has(bits_of(t, t->entries[e].set), member)) continue;
        if (!flip(t, e, member)) {
            release_set(t, t->entries[e].set);
            t->entries[e].set = 0;
        }
        delete_if_void(t, e);
    }
}

/* Sets `depths[slot]` to the number of leading blocks that the member of each slot holds, and all others of the
 * `num_slots` depths to 0. It marks the last block that was found as used. */
void ht_lookup(Table *t, const uint8_t *hashes, uint32_t count, int32_t *depths, uint32_t num_slots) {
    memset(depths, 0, num_slots * sizeof *depths);
    memcpy(t->held, t->live, 8 * (size_t)t->words);
    uint32_t p = 0, last_set = NONE, depth = 0;
    for (; depth < count; depth++) {
        uint32_t e = find_near(t, key_of(hashes + 16 * (size_t)depth), p);
        if (!e || t->entries[e].parent != p) break;
        uint32_t set = t->entries[e].set;
        if (set != last_set) {
            const uint64_t *bits = bits_of(t, set);
            uint64_t any = 0;
            for (uint32_t w = 0; w < t->words; w++) {
                uint64_t gone = t->held[w] & ~bits[w];
                any |= t->held[w] &= bits[w];
                if (depth)
                    for (; gone; gone &= gone - 1)
                        depths[t->slots[64 * w + (uint32_t)__builtin_ctzll(gone)]] = (int32_t)depth;
            }
            if (!any) break;
            last_set = set;
        }
        p = e;
    }
    if (!p) return;
    touch(t, p);
    for (uint32_t w = 0; w < t->words; w++)
        for (uint64_t held = t->held[w]; held; held &= held - 1)
            depths[t->slots[64 * w + (uint32_t)__builtin_ctzll(held)]] = (int32_t)depth;
}

/* Writes the slots of the members that hold a block without a parent, in ascending order of the table's numbers.
 * Returns how many they are. */
uint32_t ht_holders(Table *t, const uint8_t *hash, int32_t *slots) {
    uint32_t e = find(t, key_of(hash)), count = 0;
    if (!e) return 0;
    touch(t, e);
    const uint64_t *bits = bits_of(t, t->entries[e].set);
    for (uint32_t w = 0; w < t->words; w++)
        for (uint64_t held = bits[w] & t->live[w]; held; held &= held - 1)
            slots[count++] = t->slots[64 * w + (uint32_t)__builtin_ctzll(held)];
    return count;
}

/* Writes the holders of several blocks one after the other, and how many each has. Returns how many they are in all. */
uint32_t ht_holders_of(Table *t, const uint8_t *hashes, uint32_t num, uint32_t *counts, int32_t *slots) {
    uint32_t total = 0;
    for (uint32_t k = 0; k < num; k++) total += counts[k] = ht_holders(t, hashes + 16 * (size_t)k, slots + total);
    return total;
}

/* ---------------------------------------------------------------- what is known about the table */

/* Writes: entries, evicted, refused, bytes in use, sets, moved from the end of the list, entry that is swept next. */
void ht_stats(const Table *t, uint64_t *out) {
    out[0] = t->num;
    out[1] = t->evicted;
    out[2] = t->refused;
    out[3] = sizeof *t + (uint64_t)t->high * sizeof(Entry) + buckets_size(t) +
             4 * ((uint64_t)t->set_mask + 1) + t->high_set * (sizeof(Set) + 8 * (uint64_t)t->words) +
             (uint64_t)t->words * (4 * 8 + 64 * 9);
    out[4] = t->num_sets;
    out[5] = t->rescued;
    out[6] = t->cursor;
}

/* Returns 0 if the table is consistent, and else the number of the rule that is broken. */
int ht_check(const Table *t) {
    uint32_t *children = calloc(t->high, 4), *refs = calloc(t->high_set, 4), num = 0, listed = 0, num_sets = 0;
    int broken = children && refs ? 0 : 1;
    for (uint32_t e = 1; !broken && e < t->high; e++) {
        const Entry *entry = &t->entries[e];
        if (entry->parent == NONE) continue;
        num++;
        if (entry->parent >= t->high || (entry->parent && t->entries[entry->parent].parent == NONE)) broken = 2;
        else if (!entry->set && !entry->children) broken = 3; /* It has neither holders nor children. */
        else if (entry->set >= t->high_set || (entry->set && !t->sets[entry->set].refs)) broken = 4;
        else if (find(t, entry->key) != e) broken = 5;
        else children[entry->parent]++, refs[entry->set]++;
    }
    for (uint32_t e = 1; !broken && e < t->high; e++)
        if (t->entries[e].parent != NONE && t->entries[e].children != children[e]) broken = 6;
    for (uint32_t e = t->entries[0].older; !broken && e; e = t->entries[e].older)
        if (t->entries[e].parent == NONE || t->entries[t->entries[e].older].newer != e || ++listed > num) broken = 7;
    for (uint32_t s = 1; !broken && s < t->high_set; s++) {
        uint64_t hash = 0;
        for (uint32_t member = 0; member < t->num_members; member++)
            if (has(bits_of(t, s), member)) hash ^= mixed(member);
        if (t->sets[s].refs != refs[s] || (refs[s] && hash != t->sets[s].hash)) broken = 8;
        num_sets += refs[s] > 0;
    }
    if (!broken && (num != t->num || listed != num || num > t->max_entries)) broken = 9;
    if (!broken && (num_sets != t->num_sets || t->sets[0].refs != 1 || t->sets[0].hash)) broken = 10;
    free(children);
    free(refs);
    return broken;
}
