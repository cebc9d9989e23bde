/* Numbers in bfloat16 and products of them, for cpu_kernels.c and attention_kernels.c.

   bfloat16 is the upper half of a float, and lies in uint16_t. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define SHORT 16384  /* numbers for which a second thread is not worth while */

static inline float wide(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

/* To the nearest, and to even between two, as torch rounds. */
static inline uint16_t rounded(float given) {
    uint32_t bits;
    memcpy(&bits, &given, sizeof bits);
    uint16_t even = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return (bits & 0x7fffffff) > 0x7f800000 ? (uint16_t)0x7fc0 : even;
}

/* e^x within 2e-7 of it, in a form that compilers turn into vector instructions; 0 below e^-87, and at most e^88.
   x = n ln 2 + r with ln 2 in two parts, then a polynomial in r (S. Moshier, Cephes, expf). */
static inline float power_of_e(float given) {
    float x = given < -87.0f ? -87.0f : given;
    x = x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504088896341f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return given < -87.0f ? 0 : p * scale;
}

typedef float floats __attribute__((vector_size(64)));
typedef uint32_t pairs __attribute__((vector_size(64)));

/* sum + x[0] * weights[., 0] + x[1] * weights[., 1], of two numbers x. */
static inline floats with_products(floats sum, uint32_t x, pairs weights) {
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)weights);
#else  /* so that it compiles everywhere; it is called only where `palestra_most_rows` is more than 0 */
    return sum + wide((uint16_t)x) * (floats)(weights << 16) + wide((uint16_t)(x >> 16)) * (floats)(weights & 0xffff0000u);
#endif
}

/* sums += given [rows, width], whose rows lie `step` apart, times 16 * vectors columns of packed [width / 2, block, 2].
   Rows and vectors are constants where this is called, so that all sums stay in registers. */
static inline __attribute__((always_inline)) void add_products(floats sums[4][4], const uint16_t *given, int64_t step,
                                                               int64_t width, const uint16_t *packed, int64_t block,
                                                               const int rows, const int vectors) {
    for (int64_t at = 0; at < width; at += 2) {
        pairs weights[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) memcpy(&weights[v], packed + at * block + 32 * v, sizeof weights[v]);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            uint32_t x;
            memcpy(&x, given + r * step + at, sizeof x);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[r][v] = with_products(sums[r][v], x, weights[v]);
        }
    }
}
