/* What lies between the matrix products of a Llama layer and of its gradient, in bfloat16 on a CPU, and a whole layer for
   one new token of each of a few rows; kernel_library.py compiles it, cpu_kernels.py calls it.

   Every row is computed by itself, by one thread, so that its bits do not depend on the rows beside it. Numbers that
   are none (NaN) stay none. */

#include <omp.h>

#include "cpu_numbers.h"

#define AT_ONCE 256   /* positions whose scores exist at the same time */
#define BLOCKS 32     /* of rows whose sums are added at last: as many however many threads there are */

/* stream [rows, width] += added (NULL: nothing); out = RMS norm of it, factors [rows] those of the rows, if not NULL. */
void palestra_norm(float *restrict stream, const uint16_t *restrict added, const float *restrict weight, float eps,
                   uint16_t *restrict out, float *restrict factors, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > SHORT)
    for (int64_t row = 0; row < rows; row++) {
        float *x = stream + row * width, sum = 0;
        const uint16_t *more = added ? added + row * width : NULL;
        uint16_t *to = out + row * width;
        if (more)
            for (int64_t i = 0; i < width; i++) x[i] += wide(more[i]);
        for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
        float factor = 1.0f / __builtin_sqrtf(sum / (float)width + eps);
        for (int64_t i = 0; i < width; i++) to[i] = rounded(x[i] * factor * weight[i]);
        if (factors) factors[row] = factor;
    }
}

/* of_stream [rows, width] = more + gradient of a norm's input, given `of_out`, that of its result; of_weight
   [BLOCKS, width], zeros before, sums to that of its weights. */
void palestra_norm_gradient(const uint16_t *restrict of_out, const float *restrict stream,
                            const float *restrict factors, const float *restrict weight, const float *restrict more,
                            float *restrict of_stream, float *restrict of_weight, int64_t rows, int64_t width) {
    int64_t size = (rows + BLOCKS - 1) / BLOCKS;
#pragma omp parallel for schedule(static) if (rows * width > SHORT)
    for (int64_t block = 0; block < BLOCKS; block++) {
        int64_t last = (block + 1) * size < rows ? (block + 1) * size : rows;
        float *sums = of_weight + block * width;
        for (int64_t row = block * size; row < last; row++) {
            const uint16_t *given = of_out + row * width;
            const float *x = stream + row * width;
            float *to = of_stream + row * width, factor = factors[row], along = 0;
            for (int64_t i = 0; i < width; i++) {
                float of_even = wide(given[i]) * weight[i], even = x[i] * factor;
                along += of_even * even;
                sums[i] += wide(given[i]) * even;
            }
            along /= (float)width;
            for (int64_t i = 0; i < width; i++)
                to[i] = (wide(given[i]) * weight[i] - x[i] * factor * along) * factor;
            if (more)
                for (int64_t i = 0; i < width; i++) to[i] += more[row * width + i];
        }
    }
}

/* out [rows, heads, dim] = given, its first `turned` heads by rotary embedding; cosines, sines [rows, dim]. */
void palestra_rotate(const uint16_t *restrict given, const float *restrict cosines, const float *restrict sines,
                     uint16_t *restrict out, int64_t rows, int64_t heads, int64_t turned, int64_t dim) {
    int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows * heads * dim > SHORT)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cosines + row * dim, *s = sines + row * dim;
        for (int64_t head = 0; head < turned; head++) {
            const uint16_t *from = given + (row * heads + head) * dim;
            uint16_t *to = out + (row * heads + head) * dim;
            for (int64_t i = 0; i < half; i++) {
                float low = wide(from[i]), high = wide(from[i + half]);
                to[i] = rounded(low * c[i] + high * s[i]);
                to[i + half] = rounded(high * c[i + half] + low * s[i + half]);
            }
        }
        int64_t rest = (row * heads + turned) * dim;
        memcpy(out + rest, given + rest, (size_t)((heads - turned) * dim) * sizeof *out);
    }
}

/* out [rows, width] = silu(gate) * up, of both [rows, 2 * width]. */
void palestra_gate(const uint16_t *restrict both, uint16_t *restrict out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > SHORT)
    for (int64_t row = 0; row < rows; row++) {
        const uint16_t *gate = both + 2 * row * width, *up = gate + width;
        uint16_t *to = out + row * width;
        for (int64_t i = 0; i < width; i++) {
            float g = wide(gate[i]), power = power_of_e(-g);
            power = g < -88.0f ? __builtin_inff() : power;
            to[i] = rounded(wide(rounded(g / (1.0f + power))) * wide(up[i]));
        }
    }
}

/* Given gate and up `both` [rows, 2 * width] and the gradient of silu(gate) * up, [rows, width]: that result again, and
   the gradient of both. */
void palestra_gate_gradient(const uint16_t *restrict both, const uint16_t *restrict of_out, uint16_t *restrict again,
                            uint16_t *restrict of_both, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > SHORT)
    for (int64_t row = 0; row < rows; row++) {
        const uint16_t *gate = both + 2 * row * width, *up = gate + width, *given = of_out + row * width;
        uint16_t *of_gate = of_both + 2 * row * width, *of_up = of_gate + width, *to = again + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = wide(gate[i]), u = wide(up[i]), d = wide(given[i]), power = power_of_e(-g);
            power = g < -88.0f ? __builtin_inff() : power;
            float part = 1.0f / (1.0f + power), active = wide(rounded(g / (1.0f + power)));
            to[i] = rounded(active * u);
            of_up[i] = rounded(d * active);
            of_gate[i] = rounded(wide(rounded(d * u)) * part * (1.0f + g * (1.0f - part)));
        }
    }
}

/* What the queries of one head of keys see, [group, dim], of positions first to last. Where `dim` is a constant, compilers
   keep a query in registers. */
static inline __attribute__((always_inline)) void see(const uint16_t *queries, const uint16_t *keys,
                                                      const uint16_t *values, int64_t first, int64_t last,
                                                      int64_t group, int64_t dim, float scale, uint16_t *out) {
    for (int64_t g = 0; g < group; g++) {
        float query[dim], seen[dim], scores[AT_ONCE], most = -3e38f, sum = 0;
        for (int64_t i = 0; i < dim; i++) query[i] = wide(queries[g * dim + i]) * scale, seen[i] = 0;
        for (int64_t start = first; start <= last; start += AT_ONCE) {
            int64_t count = last + 1 - start < AT_ONCE ? last + 1 - start : AT_ONCE;
            const uint16_t *key = keys + start * dim, *value = values + start * dim;
            float largest = most, total = 0;
            for (int64_t p = 0; p < count; p++) {
                float product = 0;
                for (int64_t i = 0; i < dim; i++) product += query[i] * wide(key[p * dim + i]);
                scores[p] = product;
                largest = product > largest ? product : largest;
            }
            float earlier = power_of_e(most - largest);  /* what was summed before weighs less by this */
            for (int64_t p = 0; p < count; p++) scores[p] = power_of_e(scores[p] - largest), total += scores[p];
            for (int64_t i = 0; i < dim; i++) seen[i] *= earlier;
            for (int64_t p = 0; p < count; p++)
                for (int64_t i = 0; i < dim; i++) seen[i] += scores[p] * wide(value[p * dim + i]);
            sum = sum * earlier + total, most = largest;
        }
        for (int64_t i = 0; i < dim; i++) out[g * dim + i] = rounded(seen[i] / sum);
    }
}

/* Attention of one new token a row, whose keys and values are put behind those of its row.

   queries [rows, kv * group, dim], new_keys and new_values [rows, kv, dim]: rows lie `stride` numbers apart.
   keys, values [rows, kv, capacity, dim], of which `lengths` positions are filled. window: the most positions that
   are seen, the new one included; 0: all. out [rows, kv * group, dim]. */
void palestra_attend(const uint16_t *queries, const uint16_t *new_keys, const uint16_t *new_values, int64_t stride,
                     uint16_t *keys, uint16_t *values, const int64_t *lengths, uint16_t *out, int64_t rows, int64_t kv,
                     int64_t group, int64_t dim, int64_t capacity, int64_t window, float scale) {
#pragma omp parallel for schedule(static) if (rows * kv * capacity * dim > SHORT)
    for (int64_t place = 0; place < rows * kv; place++) {
        int64_t row = place / kv, head = place % kv, last = lengths[row];
        int64_t first = window && last + 1 > window ? last + 1 - window : 0;
        uint16_t *k = keys + place * capacity * dim, *v = values + place * capacity * dim;
        memcpy(k + last * dim, new_keys + row * stride + head * dim, (size_t)dim * sizeof *k);
        memcpy(v + last * dim, new_values + row * stride + head * dim, (size_t)dim * sizeof *v);
        const uint16_t *q = queries + row * stride + head * group * dim;
        uint16_t *to = out + place * group * dim;
        if (dim == 64)
            see(q, k, v, first, last, group, 64, scale, to);
        else if (dim == 128)
            see(q, k, v, first, last, group, 128, scale, to);
        else
            see(q, k, v, first, last, group, dim, scale, to);
    }
}

/* A matrix as oneDNN packs it: outputs in blocks of 64 or 32, inputs in pairs, [blocks, pairs, block, 2], where the pairs
   are filled up to a multiple of 16 and the last block to a whole one. Biases [outs], or NULL. */
struct matrix {
    const uint16_t *packed, *biases;
    int64_t width, outs, block;
};

/* The most rows that `palestra_product` multiplies faster than oneDNN does (docs/benchmarks.md). With the tiles of AMX,
   which only oneDNN uses, a guess: as long as a product is a reading of the weights. */
int64_t palestra_most_rows(void) {
#if defined(__AMX_BF16__)
    return 8;
#elif defined(__AVX512BF16__)
    return 128;
#else
    return 0;
#endif
}

/* Products of `rows` rows, given [rows, width], with 16 * `vectors` columns of a block, of which `count` are outputs; see
   `add_products`. */
static inline __attribute__((always_inline)) void multiply(const uint16_t *given, int64_t width, const uint16_t *packed,
                                                           int64_t block, const uint16_t *biases, uint16_t *out,
                                                           int64_t outs, int64_t count, const int rows,
                                                           const int vectors) {
    floats sums[4][4];
    float first[64] = {0};
    for (int64_t i = 0; biases && i < count; i++) first[i] = wide(biases[i]);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        floats start;
        memcpy(&start, first + 16 * v, sizeof start);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sums[r][v] = start;
    }
    add_products(sums, given, width, width, packed, block, rows, vectors);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        float found[64];
        uint16_t halves[64];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) memcpy(found + 16 * v, &sums[r][v], sizeof sums[r][v]);
        for (int i = 0; i < 16 * vectors; i++) halves[i] = rounded(found[i]);  /* as many as a constant: in vectors */
        memcpy(out + r * outs, halves, (size_t)count * sizeof *halves);
    }
}

/* As `multiply`, of any number of rows. A part of a block stays in the processor's cache meanwhile. */
static inline __attribute__((always_inline)) void multiply_all(const uint16_t *given, int64_t width,
                                                               const uint16_t *packed, int64_t block,
                                                               const uint16_t *biases, uint16_t *out, int64_t outs,
                                                               int64_t count, int64_t rows, const int vectors) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4)
        multiply(given + row * width, width, packed, block, biases, out + row * outs, outs, count, 4, vectors);
    if (row + 2 <= rows) {
        multiply(given + row * width, width, packed, block, biases, out + row * outs, outs, count, 2, vectors);
        row += 2;
    }
    if (row < rows) multiply(given + row * width, width, packed, block, biases, out + row * outs, outs, count, 1, vectors);
}

/* out [rows, outs] = given [rows, width] times a matrix, plus its biases. The width is even. Each thread has a share of
   the outputs in parts of 32, of which two that are one block are multiplied together. */
void palestra_product(const struct matrix *matrix, const uint16_t *given, uint16_t *out, int64_t rows) {
    int64_t width = matrix->width, outs = matrix->outs, block = matrix->block, parts = (outs + 31) / 32;
    int64_t size = (width + 31) / 32 * 32 * block;
#pragma omp parallel if (rows * width * outs > 4 * SHORT)
    {
        int64_t threads = omp_get_num_threads(), here = omp_get_thread_num();
        int64_t part = parts * here / threads, end = parts * (here + 1) / threads;
        while (part < end) {
            int64_t start = part * 32, left = outs - start, together = block == 64 && part % 2 == 0 && part + 1 < end;
            const uint16_t *packed = matrix->packed + start / block * size + start % block * 2;
            const uint16_t *biases = matrix->biases ? matrix->biases + start : NULL;
            if (together)
                multiply_all(given, width, packed, block, biases, out + start, outs, left < 64 ? left : 64, rows, 4);
            else
                multiply_all(given, width, packed, block, biases, out + start, outs, left < 32 ? left : 32, rows, 2);
            part += together ? 2 : 1;
        }
    }
}

/* Rows of a cache [layers, 2, places, kv, capacity, dim], in each of which `lengths` positions are filled. */
struct cached {
    uint16_t *storage;
    const int64_t *lengths;
    int64_t rows, places, capacity;
};

/* stream [rows, hidden] += what a layer adds to it: attention of one new token a row, then the gated block.

   matrices: of queries, keys and values together; of what attention returns; of gate and up together; of the block's
   result. norms: before both. parts: all rows of the cache, in their order. room: for
   rows * (2 * hidden + 2 * outs of the first matrix + heads * dim + 3 * inner) numbers. */
void palestra_layer(float *stream, int64_t rows, int64_t hidden, const struct matrix *matrices, const float *before,
                    float eps_before, const float *behind, float eps_behind, const float *cosines, const float *sines,
                    const struct cached *parts, int64_t layer, int64_t heads, int64_t kv, int64_t dim, int64_t window,
                    float scale, uint16_t *room) {
    int64_t all = heads + 2 * kv, inner = matrices[3].width;
    uint16_t *normed = room, *added = normed + rows * hidden, *given = added + rows * hidden;
    uint16_t *turned = given + rows * all * dim, *seen = turned + rows * all * dim, *both = seen + rows * heads * dim;
    uint16_t *active = both + rows * 2 * inner;

    palestra_norm(stream, NULL, before, eps_before, normed, NULL, rows, hidden);
    palestra_product(&matrices[0], normed, given, rows);
    palestra_rotate(given, cosines, sines, turned, rows, all, heads + kv, dim);
    for (int64_t start = 0; start < rows; start += (parts++)->rows) {
        const uint16_t *query = turned + start * all * dim, *key = query + heads * dim, *value = key + kv * dim;
        int64_t size = parts->places * kv * parts->capacity * dim;
        uint16_t *keys = parts->storage + 2 * layer * size;
        palestra_attend(query, key, value, all * dim, keys, keys + size, parts->lengths, seen + start * heads * dim,
                        parts->rows, kv, heads / kv, dim, parts->capacity, window, scale);
    }
    palestra_product(&matrices[1], seen, added, rows);
    palestra_norm(stream, added, behind, eps_behind, normed, NULL, rows, hidden);
    palestra_product(&matrices[2], normed, both, rows);
    palestra_gate(both, active, rows, inner);
    palestra_product(&matrices[3], active, added, rows);
    for (int64_t i = 0; i < rows * hidden; i++) stream[i] += wide(added[i]);
}
