/* Attention of runs of positions to themselves and to the runs behind which they begin, in bfloat16 on a CPU, and its
   gradient; kernel_library.py compiles it, attention_kernels.py calls it.

   Queries that read the same keys are rows of one product with a block of 64 keys, and the softmax goes from block to
   block with the largest score so far (Dao et al., FlashAttention-2, 2023). Scores and sums are float; their weights are
   rounded for the next product. The bits of what a query sees depend on nothing but what it sees and where its run
   begins, as long as all numbers are finite: neither on the queries beside it nor on the number of threads. */

#include <math.h>
#include <omp.h>

#include "cpu_numbers.h"

#define BLOCK 64  /* keys of a block, and about as many rows of queries at the same time */
#define LOWEST -3e38f  /* in place of the score of a key that is not seen */

/* Positions that follow one another, of which the last `queries` are asked. Their keys lie `step` numbers apart, `head`
   numbers those of one head from those of the next. They begin behind the first `behind` positions of run `parent`, or of
   none (-1); `before` are all that come before them there. `first` is the row of the first query. They are packed behind
   `place` positions of other runs. */
struct run {
    uint16_t *keys, *values;
    int64_t step, head, length, before, parent, behind, first, queries, place;
};

/* What a call is about: heads of keys, each read by `group` heads of queries; window: the most positions that a query
   sees, its own included; 0: all. places: positions of all runs together, as packed. */
struct shape {
    int64_t kv, group, dim, window, places;
    float scale;
};

static inline int64_t filled(int64_t count) { return (count + 15) / 16 * 16; }
static inline int64_t in_pairs(int64_t count) { return (count + 1) / 2 * 2; }
static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }
static inline int64_t rows_at_once(int64_t group) { return group < BLOCK ? BLOCK : group; }
static inline int64_t tokens_at_once(int64_t group) { return group < BLOCK ? BLOCK / group : 1; }

/* Rows [rows, 16 * vectors] of a product, see `add_products`, or added to what is there. */
static inline __attribute__((always_inline)) void some_rows(const uint16_t *given, int64_t step, int64_t width,
                                                            const uint16_t *packed, int64_t block, float *out,
                                                            int64_t outs, int adding, const int rows,
                                                            const int vectors) {
    floats sums[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            if (adding)
                memcpy(&sums[r][v], out + r * outs + 16 * v, sizeof sums[r][v]);
            else
                sums[r][v] = (floats){0};
    add_products(sums, given, step, width, packed, block, rows, vectors);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) memcpy(out + r * outs + 16 * v, &sums[r][v], sizeof sums[r][v]);
}

static inline __attribute__((always_inline)) void all_rows(const uint16_t *given, int64_t step, int64_t width,
                                                           const uint16_t *packed, int64_t block, float *out,
                                                           int64_t outs, int adding, int64_t rows, const int vectors) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4)
        some_rows(given + row * step, step, width, packed, block, out + row * outs, outs, adding, 4, vectors);
    if (row + 2 <= rows) {
        some_rows(given + row * step, step, width, packed, block, out + row * outs, outs, adding, 2, vectors);
        row += 2;
    }
    if (row < rows)
        some_rows(given + row * step, step, width, packed, block, out + row * outs, outs, adding, 1, vectors);
}

/* out [rows, columns] = given [rows, width] times packed [width / 2, block, 2], or added to what is there. Rows of `given`
   lie `step` apart, those of `out` `outs`; the width is even, and columns are a multiple of 16. */
static void multiply(const uint16_t *given, int64_t step, int64_t width, const uint16_t *packed, int64_t block,
                     float *out, int64_t outs, int adding, int64_t rows, int64_t columns) {
    for (int64_t at = 0; at < columns; at += 64) {
        const uint16_t *part = packed + 2 * at;
        switch (least(columns - at, 64) / 16) {
        case 4: all_rows(given, step, width, part, block, out + at, outs, adding, rows, 4); break;
        case 3: all_rows(given, step, width, part, block, out + at, outs, adding, rows, 3); break;
        case 2: all_rows(given, step, width, part, block, out + at, outs, adding, rows, 2); break;
        default: all_rows(given, step, width, part, block, out + at, outs, adding, rows, 1);
        }
    }
}

/* Numbers of a position as inputs of a product, [dim / 2, keys of a block, 2], for scores. */
static void pack_across(const uint16_t *from, int64_t step, int64_t count, int64_t dim, uint16_t *to) {
    for (int64_t start = 0; start < count; start += BLOCK, to += BLOCK * filled(dim)) {
        int64_t keys = least(count - start, BLOCK), columns = filled(keys);
        for (int64_t pair = 0; pair < dim / 2; pair++) {
            uint16_t *row = to + 2 * pair * columns;
            for (int64_t key = 0; key < keys; key++) memcpy(row + 2 * key, from + (start + key) * step + 2 * pair, 4);
            memset(row + 2 * keys, 0, (size_t)(columns - keys) * 4);
        }
    }
}

/* Numbers of a position as outputs of a product, [positions / 2, dim, 2], both filled up with zeros. */
static void pack_along(const uint16_t *from, int64_t step, int64_t count, int64_t dim, uint16_t *to) {
    int64_t wide_dim = filled(dim), all = filled(count);
    for (int64_t at = 0; at < all; at += 2, to += 2 * wide_dim) {
        if (at + 1 < count) {
            const uint16_t *one = from + at * step, *other = one + step;
            for (int64_t i = 0; i < dim; i++) to[2 * i] = one[i], to[2 * i + 1] = other[i];
            memset(to + 2 * dim, 0, (size_t)(wide_dim - dim) * 4);
        } else {
            memset(to, 0, (size_t)wide_dim * 4);
            for (int64_t i = 0; at < count && i < dim; i++) to[2 * i] = from[at * step + i];
        }
    }
}

/* Put what the queries of a run bring, of a head, behind what is there: rows `stride` numbers apart. */
static void keep(const struct run *run, int64_t head, int64_t dim, const uint16_t *brought, int64_t stride, uint16_t *kept) {
    uint16_t *to = kept + head * run->head + (run->length - run->queries) * run->step;
    const uint16_t *from = brought + run->first * stride + head * dim;
    for (int64_t row = 0; row < run->queries; row++) memcpy(to + row * run->step, from + row * stride, (size_t)dim * sizeof *to);
}

/* Where a run's keys of a head are in a part of the room [kv, places, filled(dim)]. */
static inline int64_t packed_at(const struct run *run, int64_t head, struct shape shape) {
    return (head * shape.places + run->place) * filled(shape.dim);
}

/* A block of queries, and how far the walk over what they see has come: `limit` positions of run `at`, from `start`. */
struct walk {
    const struct run *runs, *at;
    int64_t first, window, start, limit, next;
};

static struct walk begin_walk(const struct run *runs, const struct run *run, int64_t from, int64_t tokens, int64_t window) {
    return (struct walk){runs, run, run->before + from, window, 0, from + tokens, 0};
}

/* Go on to the next block of keys of which at least one query sees some; return how many keys, or 0: that was all. */
static int64_t next_block(struct walk *walk) {
    for (;;) {
        walk->start = walk->next;
        if (walk->start >= walk->limit) {
            if (walk->at->parent < 0) return 0;
            walk->limit = walk->at->behind, walk->at = walk->runs + walk->at->parent, walk->next = 0;
            continue;
        }
        int64_t keys = least(walk->limit - walk->start, BLOCK);
        walk->next = walk->start + BLOCK;
        if (!walk->window || walk->first - (walk->at->before + walk->start + keys - 1) < walk->window) return keys;
    }
}

/* Multiply the scores [columns] of the walk's query number `token`; those of keys that it does not see become LOWEST. */
static inline void scale_seen(const struct walk *walk, int64_t token, int64_t keys, int64_t columns, float scale,
                              float *score) {
    int64_t place = walk->first + token - (walk->at->before + walk->start);
    int64_t first = walk->window && place + 1 > walk->window ? least(place + 1 - walk->window, columns) : 0;
    int64_t end = place < 0 ? 0 : least(place + 1, keys);
    for (int64_t i = 0; i < columns; i++) score[i] *= scale;
    for (int64_t i = 0; i < first; i++) score[i] = LOWEST;
    for (int64_t i = end; i < columns; i++) score[i] = LOWEST;
}

/* The largest of some scores and of one from before. */
static inline float largest_of(const float *restrict score, int64_t columns, float largest) {
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < columns; i++) largest = score[i] > largest ? score[i] : largest;
    return largest;
}

/* score [columns] = exponents of scores less a number, 0 for keys that are not seen; weights are the same, rounded. */
static inline void weigh(float *restrict score, int64_t columns, float less, uint16_t *restrict weights) {
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) {
        float weight = power_of_e(score[i] - less);
        score[i] = score[i] <= LOWEST ? 0 : weight;
        weights[i] = rounded(score[i]);
    }
}

/* A loop of its own, because GCC 12 has made a wrong sum of one that rounds as well (kernel_trial.py would say so). */
static inline float sum_of(const float *restrict weights, int64_t columns) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < columns; i++) sum += weights[i];
    return sum;
}

/* of_scores [columns] = gradients of scores, given weights, products of a query's gradient with the values, and `along`,
   that of its gradient with what it saw; 0 where a weight is 0. */
static inline void weigh_gradients(const float *restrict weight, const float *restrict product, int64_t columns,
                                   float along, float scale, uint16_t *restrict of_scores) {
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) {
        float of_score = weight[i] * (product[i] - along) * scale;
        of_scores[i] = rounded(weight[i] == 0 ? 0 : of_score);
    }
}

/* rows [tokens * group, dim] = the heads of tokens that lie `stride` numbers apart. */
static void gather(const uint16_t *given, int64_t stride, int64_t tokens, int64_t group, int64_t dim, uint16_t *rows) {
    for (int64_t token = 0; token < tokens; token++)
        memcpy(rows + token * group * dim, given + token * stride, (size_t)(group * dim) * sizeof *rows);
}

/* What a block of queries of a run, from position `from` on, sees in one head of keys. own: a thread's part of the room. */
static void see(const struct run *runs, const struct run *run, int64_t from, int64_t head, const uint16_t *queries,
                int64_t stride, uint16_t *out, float *sums, int64_t all_queries, const uint16_t *keys,
                const uint16_t *values, struct shape shape, float *own) {
    int64_t group = shape.group, dim = shape.dim, wide_dim = filled(dim);
    int64_t tokens = least(tokens_at_once(group), run->length - from), rows = tokens * group;
    int64_t row = run->first + from - (run->length - run->queries);
    float *scores = own, *seen = scores + rows * BLOCK, *most = seen + rows * wide_dim, *total = most + rows;
    uint16_t *asked = (uint16_t *)(total + rows), *weights = asked + rows * dim;
    gather(queries + row * stride + head * group * dim, stride, tokens, group, dim, asked);
    memset(seen, 0, (size_t)(rows * wide_dim) * sizeof *seen);
    for (int64_t r = 0; r < rows; r++) most[r] = LOWEST, total[r] = 0;

    struct walk walk = begin_walk(runs, run, from, tokens, shape.window);
    for (int64_t count; (count = next_block(&walk));) {
        int64_t at = packed_at(walk.at, head, shape) + walk.start * wide_dim, columns = filled(count);
        multiply(asked, dim, dim, keys + at, filled(least(walk.at->length - walk.start, BLOCK)), scores, BLOCK, 0, rows,
                 columns);
        for (int64_t r = 0; r < rows; r++) {
            float *score = scores + r * BLOCK;
            scale_seen(&walk, r / group, count, columns, shape.scale, score);
            float largest = largest_of(score, columns, most[r]);
            weigh(score, columns, largest, weights + r * BLOCK);
            float earlier = power_of_e(most[r] - largest);  /* what was summed before weighs less by this */
            if (earlier != 1.0f)
                for (int64_t i = 0; i < wide_dim; i++) seen[r * wide_dim + i] *= earlier;
            total[r] = total[r] * earlier + sum_of(score, columns), most[r] = largest;
        }
        multiply(weights, BLOCK, in_pairs(count), values + at, wide_dim, seen, wide_dim, 1, rows, wide_dim);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t place = (row + r / group) * shape.kv * group + head * group + r % group;
        for (int64_t i = 0; i < dim; i++) out[place * dim + i] = rounded(seen[r * wide_dim + i] / total[r]);
        if (sums) sums[place % (shape.kv * group) * all_queries + row + r / group] = most[r] + logf(total[r]);
    }
}

/* How many floats a thread needs for itself, for values or also for gradients. */
int64_t palestra_attend_runs_own(int64_t group, int64_t dim, int64_t gradient) {
    int64_t rows = filled(rows_at_once(group)), wide_dim = filled(dim);
    int64_t floats = rows * (BLOCK + wide_dim + 2), halves = rows * (wide_dim + BLOCK);
    if (gradient) floats += rows * BLOCK, halves = rows * (4 * wide_dim + 3 * BLOCK);
    return floats + halves / 2;
}

/* out [queries, kv * group, dim]: what each query of `count` runs sees, given queries whose rows lie `stride` numbers apart.

   new_keys, new_values: those of the queries, rows as far apart, which are put behind what is there; NULL: they are there.
   blocks [asked, 2]: a run, and the position in it of the first query of a block of `tokens_at_once` queries.
   sums [kv * group, all_queries], or NULL: logarithms of the sums of the scores' exponents. room: for
   2 * kv * places * filled(dim) numbers. own [threads, ...]: see `palestra_attend_runs_own`. */
void palestra_attend_runs(const struct run *runs, int64_t count, const int64_t *blocks, int64_t asked,
                          const uint16_t *queries, const uint16_t *new_keys, const uint16_t *new_values, int64_t stride,
                          uint16_t *out, float *sums, int64_t all_queries, uint16_t *room, float *own, int64_t threads,
                          int64_t places, int64_t kv, int64_t group, int64_t dim, int64_t window, float scale) {
    struct shape shape = {kv, group, dim, window, places, scale};
    int64_t each = palestra_attend_runs_own(group, dim, 0);
    uint16_t *keys = room, *values = room + kv * places * filled(dim);
#pragma omp parallel num_threads((int)threads) if (places * kv * group * dim > SHORT)
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < count * kv; item++) {
            const struct run *run = runs + item / kv;
            int64_t head = item % kv, at = packed_at(run, head, shape);
            if (new_keys) {
                keep(run, head, dim, new_keys, stride, run->keys);
                keep(run, head, dim, new_values, stride, run->values);
            }
            pack_across(run->keys + head * run->head, run->step, run->length, dim, keys + at);
            pack_along(run->values + head * run->head, run->step, run->length, dim, values + at);
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < asked * kv; item++) {
            const int64_t *block = blocks + item / kv * 2;
            see(runs, runs + block[0], block[1], item % kv, queries, stride, out, sums, all_queries, keys, values, shape,
                own + omp_get_thread_num() * each);
        }
    }
}

/* What a gradient is computed from: of what `palestra_attend_runs` returned, `of_out` [queries, kv * group, dim], and from
   what it was given and returned. */
struct given {
    const uint16_t *of_out, *out, *queries;
    const float *sums;
    int64_t stride, all_queries;
};

/* Keys and values of all runs as packed for a gradient: keys and values for scores, keys as what is added up. */
struct packed {
    uint16_t *keys, *values, *along;
};

/* Gradients of a block of queries, to of_new [queries, kv * group + 2 * kv, dim], and what they add to those of the keys and
   values that they see: to of_keys and of_values [kv, places, filled(dim)], each block of keys as [dim, keys]. */
static void see_gradient(const struct run *runs, const struct run *run, int64_t from, int64_t head, struct given given,
                         struct packed packed, uint16_t *of_new, float *of_keys, float *of_values, struct shape shape,
                         float *own) {
    int64_t group = shape.group, dim = shape.dim, wide_dim = filled(dim), heads = shape.kv * group;
    int64_t tokens = least(tokens_at_once(group), run->length - from), rows = tokens * group, even = in_pairs(rows);
    int64_t row = run->first + from - (run->length - run->queries), place = row * heads + head * group;
    float *scores = own, *products = scores + rows * BLOCK, *of_asked = products + rows * BLOCK;
    float *sums = of_asked + rows * wide_dim, *along = sums + rows;
    uint16_t *asked = (uint16_t *)(along + rows), *of_seen = asked + rows * dim, *asked_t = of_seen + rows * dim;
    uint16_t *of_seen_t = asked_t + dim * even, *weights = of_seen_t + dim * even, *of_scores = weights + rows * BLOCK;
    uint16_t *paired = of_scores + rows * BLOCK;  /* filled(rows) * BLOCK */
    gather(given.queries + row * given.stride + head * group * dim, given.stride, tokens, group, dim, asked);
    gather(given.of_out + place * dim, heads * dim, tokens, group, dim, of_seen);
    memset(of_asked, 0, (size_t)(rows * wide_dim) * sizeof *of_asked);
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = r / group, own = place + token * heads + r % group;
        float sum = 0;
        for (int64_t i = 0; i < dim; i++) sum += wide(of_seen[r * dim + i]) * wide(given.out[own * dim + i]);
        along[r] = sum, sums[r] = given.sums[(head * group + r % group) * given.all_queries + row + token];
    }
    for (int64_t i = 0; i < dim; i++) {
        for (int64_t r = 0; r < rows; r++)
            asked_t[i * even + r] = asked[r * dim + i], of_seen_t[i * even + r] = of_seen[r * dim + i];
        if (rows < even) asked_t[i * even + rows] = of_seen_t[i * even + rows] = 0;
    }

    struct walk walk = begin_walk(runs, run, from, tokens, shape.window);
    for (int64_t count; (count = next_block(&walk));) {
        int64_t at = packed_at(walk.at, head, shape) + walk.start * wide_dim, columns = filled(count);
        int64_t lying = filled(least(walk.at->length - walk.start, BLOCK));
        multiply(asked, dim, dim, packed.keys + at, lying, scores, BLOCK, 0, rows, columns);
        multiply(of_seen, dim, dim, packed.values + at, lying, products, BLOCK, 0, rows, columns);
        for (int64_t r = 0; r < rows; r++) {
            float *score = scores + r * BLOCK, *product = products + r * BLOCK;
            scale_seen(&walk, r / group, count, columns, shape.scale, score);
            weigh(score, columns, sums[r], weights + r * BLOCK);
            weigh_gradients(score, product, columns, along[r], shape.scale, of_scores + r * BLOCK);
        }
        multiply(of_scores, BLOCK, in_pairs(count), packed.along + at, wide_dim, of_asked, wide_dim, 1, rows, wide_dim);
        pack_along(weights, BLOCK, rows, columns, paired);
        multiply(of_seen_t, even, even, paired, columns, of_values + at, lying, 1, dim, columns);
        pack_along(of_scores, BLOCK, rows, columns, paired);
        multiply(asked_t, even, even, paired, columns, of_keys + at, lying, 1, dim, columns);
    }
    for (int64_t r = 0; r < rows; r++) {
        uint16_t *to = of_new + ((row + r / group) * (heads + 2 * shape.kv) + head * group + r % group) * dim;
        for (int64_t i = 0; i < dim; i++) to[i] = rounded(of_asked[r * wide_dim + i]);
    }
}

/* What a run's parts of a gradient [parts, kv, places, filled(dim)] sum to, in a head, to rows of `out`, `stride` apart. */
static void sum_parts(const struct run *run, int64_t head, const float *sums, int64_t parts, uint16_t *out,
                      int64_t stride, struct shape shape) {
    int64_t dim = shape.dim, size = shape.kv * shape.places * filled(dim);
    for (int64_t start = 0; start < run->length; start += BLOCK) {
        int64_t keys = least(run->length - start, BLOCK), lying = filled(keys);
        const float *from = sums + packed_at(run, head, shape) + start * filled(dim);
        for (int64_t key = 0; key < keys; key++) {
            uint16_t *to = out + (run->first + start + key) * stride + head * dim;
            for (int64_t i = 0; i < dim; i++) {
                float sum = 0;
                for (int64_t part = 0; part < parts; part++) sum += from[part * size + i * lying + key];
                to[i] = rounded(sum);
            }
        }
    }
}

/* Gradients of all queries, keys and values, beside one another in of_new [queries, kv * group + 2 * kv, dim], of runs whose
   positions are all asked.

   trees [tree_count + 1]: the first block of each, and one past the last; runs of two trees do not see one another. The
   blocks of a tree are computed in `parts` parts, each of which sums by itself: added [2, parts, kv, places, filled(dim)],
   zeros before. room: for 3 * kv * places * filled(dim) numbers. All else as in `palestra_attend_runs`. */
void palestra_attend_runs_gradient(const struct run *runs, int64_t count, const int64_t *blocks, const int64_t *trees,
                                   int64_t tree_count, const uint16_t *of_out, const uint16_t *out,
                                   const uint16_t *queries, int64_t stride, const float *sums, int64_t all_queries,
                                   uint16_t *of_new, float *added, int64_t parts, uint16_t *room, float *own,
                                   int64_t threads, int64_t places, int64_t kv, int64_t group, int64_t dim, int64_t window,
                                   float scale) {
    struct shape shape = {kv, group, dim, window, places, scale};
    struct given given = {of_out, out, queries, sums, stride, all_queries};
    int64_t size = kv * places * filled(dim);
    int64_t each = palestra_attend_runs_own(group, dim, 1);
    struct packed packed = {room, room + size, room + 2 * size};
    float *added_values = added + parts * size;
#pragma omp parallel num_threads((int)threads) if (places * kv * group * dim > SHORT)
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < count * kv; item++) {
            const struct run *run = runs + item / kv;
            int64_t head = item % kv, at = packed_at(run, head, shape);
            pack_across(run->keys + head * run->head, run->step, run->length, dim, packed.keys + at);
            pack_across(run->values + head * run->head, run->step, run->length, dim, packed.values + at);
            pack_along(run->keys + head * run->head, run->step, run->length, dim, packed.along + at);
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < tree_count * kv * parts; item++) {
            int64_t tree = item / (kv * parts), head = item / parts % kv, part = item % parts;
            for (int64_t number = trees[tree] + part; number < trees[tree + 1]; number += parts) {
                const int64_t *block = blocks + 2 * number;
                see_gradient(runs, runs + block[0], block[1], head, given, packed, of_new, added + part * size,
                             added_values + part * size, shape, own + omp_get_thread_num() * each);
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < count * kv; item++) {
            uint16_t *of_keys = of_new + kv * group * dim, *of_values = of_keys + kv * dim;
            int64_t outs = (kv * group + 2 * kv) * dim;
            sum_parts(runs + item / kv, item % kv, added, parts, of_keys, outs, shape);
            sum_parts(runs + item / kv, item % kv, added_values, parts, of_values, outs, shape);
        }
    }
}
