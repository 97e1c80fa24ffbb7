/* Vectors of the machine's width, and sums whose order does not depend on that width.
 *
 * Everything that adds up in lanes uses RF_LANES of them, however many registers that takes, so that
 * a result has the same bits with AVX2, AVX-512 and NEON. */
#ifndef RF_VECTORS_H
#define RF_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define RF_WIDTH 16
#elif defined(__AVX2__)
#define RF_WIDTH 8
#else
#define RF_WIDTH 4
#endif

/* Keep a vector in a register: compilers otherwise load it again for every use of it. */
#if defined(__x86_64__)
#define RF_KEEP(value) __asm__("" : "+x"(value))
#elif defined(__aarch64__)
#define RF_KEEP(value) __asm__("" : "+w"(value))
#else
#define RF_KEEP(value)
#endif

#define RF_LANES 16
#define RF_PARTS (RF_LANES / RF_WIDTH)
#define RF_UNROLL _Pragma("GCC unroll 16")
#define RF_INLINE static inline __attribute__((always_inline))

typedef float rf_vec __attribute__((vector_size(RF_WIDTH * 4)));
typedef float rf_vec_unaligned __attribute__((vector_size(RF_WIDTH * 4), aligned(4)));
typedef int32_t rf_ivec __attribute__((vector_size(RF_WIDTH * 4)));

RF_INLINE rf_vec rf_load(const float *from) { return *(const rf_vec_unaligned *)from; }
RF_INLINE void rf_store(float *to, rf_vec value) { *(rf_vec_unaligned *)to = value; }
RF_INLINE rf_vec rf_all(float value) { return value - (rf_vec){0}; }
RF_INLINE rf_vec rf_select(rf_ivec mask, rf_vec yes, rf_vec no) {
    return (rf_vec)((mask & (rf_ivec)yes) | (~mask & (rf_ivec)no));
}

/* exp(x): the nearest power of two times the Taylor polynomial of degree 7 of what is left, whose
 * remainder is below 6e-9 on [-ln 2 / 2, ln 2 / 2]. Below -87 the result is 0. */
RF_INLINE rf_vec rf_exp(rf_vec x) {
    const rf_ivec too_small = x < rf_all(-87.0f);
    x = rf_select(too_small, rf_all(-87.0f), x);
    x = rf_select(x > rf_all(88.0f), rf_all(88.0f), x);
    /* Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum. */
    const rf_vec shifted = x * rf_all(1.44269504f) + rf_all(12582912.0f);
    const rf_vec power = shifted - rf_all(12582912.0f);
    const rf_vec rest = (x - power * rf_all(0.693359375f)) - power * rf_all(-2.12194440e-4f);
    rf_vec sum = rf_all(1.0f / 5040);
    sum = sum * rest + rf_all(1.0f / 720);
    sum = sum * rest + rf_all(1.0f / 120);
    sum = sum * rest + rf_all(1.0f / 24);
    sum = sum * rest + rf_all(1.0f / 6);
    sum = sum * rest + rf_all(0.5f);
    sum = sum * rest + rf_all(1.0f);
    sum = sum * rest + rf_all(1.0f);
    const rf_ivec exponent = ((rf_ivec)shifted - (rf_ivec)rf_all(12582912.0f) + 127) << 23;
    return rf_select(too_small, rf_all(0.0f), sum * (rf_vec)exponent);
}

/* Sum of RF_LANES lanes, pairwise. */
RF_INLINE float rf_sum(const rf_vec *parts) {
    float lanes[RF_LANES];
    for (int part = 0; part < RF_PARTS; part++) rf_store(lanes + part * RF_WIDTH, parts[part]);
    for (int step = RF_LANES / 2; step > 0; step /= 2)
        for (int lane = 0; lane < step; lane++) lanes[lane] += lanes[lane + step];
    return lanes[0];
}

/* Memory aligned for any vector, not initialised; NULL when there is none. */
static void *rf_allocate(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes ? bytes : 64) == 0 ? memory : NULL;
}

#endif
