/* Attention of one row over the keys and values of its slot, for the query heads that share them.
 *
 * Keys are stored in blocks of RF_LANES positions, dimension by dimension, so that the scores of a
 * block are computed side by side without sums across lanes. While scores are computed the values
 * are fetched, and while those are weighted the keys of the next task. */
#ifndef RF_ATTENTION_H
#define RF_ATTENTION_H

#include "vectors.h"

/* Scores of H heads for one block of positions. */
#define RF_SCORES(NAME, H)                                                                           \
    RF_INLINE void NAME(const float *query, const float *keys, const float *ahead, float *scores, int dim, \
                        int stride) {                                                                \
        rf_vec sums[H][RF_PARTS];                                                                    \
        _Pragma("GCC unroll 16") for (int h = 0; h < H; h++)                                         \
            _Pragma("GCC unroll 16") for (int part = 0; part < RF_PARTS; part++)                     \
                sums[h][part] = rf_all(0.0f);                                                        \
        for (int d = 0; d < dim; d++) {                                                              \
            __builtin_prefetch(ahead + (size_t)d * RF_LANES, 0, 3);                                  \
            _Pragma("GCC unroll 16") for (int part = 0; part < RF_PARTS; part++) {                   \
                rf_vec key = rf_load(keys + (size_t)d * RF_LANES + part * RF_WIDTH);                 \
                RF_KEEP(key);                                                                        \
                _Pragma("GCC unroll 16") for (int h = 0; h < H; h++)                                 \
                    sums[h][part] += key * query[h * dim + d];                                       \
            }                                                                                        \
        }                                                                                            \
        _Pragma("GCC unroll 16") for (int h = 0; h < H; h++)                                         \
            _Pragma("GCC unroll 16") for (int part = 0; part < RF_PARTS; part++)                     \
                rf_store(scores + (size_t)h * stride + part * RF_WIDTH, sums[h][part]);              \
    }
RF_SCORES(rf_scores_3, 3)
RF_SCORES(rf_scores_2, 2)
RF_SCORES(rf_scores_1, 1)

/* Weighted values of H heads, RF_LANES dimensions. */
#define RF_WEIGHTED(NAME, H)                                                                            \
    RF_INLINE void NAME(const float *weights, const float *values, const float *ahead, float *out, int dim, \
                        int length, int stride) {                                                       \
        rf_vec sums[H][RF_PARTS];                                                                       \
        _Pragma("GCC unroll 16") for (int h = 0; h < H; h++)                                            \
            _Pragma("GCC unroll 16") for (int part = 0; part < RF_PARTS; part++)                        \
                sums[h][part] = rf_all(0.0f);                                                           \
        for (int position = 0; position < length; position++) {                                         \
            __builtin_prefetch(ahead + (size_t)position * RF_LANES, 0, 2);                              \
            _Pragma("GCC unroll 16") for (int part = 0; part < RF_PARTS; part++) {                      \
                rf_vec value = rf_load(values + (size_t)position * dim + part * RF_WIDTH);              \
                RF_KEEP(value);                                                                         \
                _Pragma("GCC unroll 16") for (int h = 0; h < H; h++)                                    \
                    sums[h][part] += value * weights[(size_t)h * stride + position];                    \
            }                                                                                           \
        }                                                                                               \
        _Pragma("GCC unroll 16") for (int h = 0; h < H; h++)                                            \
            _Pragma("GCC unroll 16") for (int part = 0; part < RF_PARTS; part++)                        \
                rf_store(out + (size_t)h * dim + part * RF_WIDTH, sums[h][part]);                       \
    }
RF_WEIGHTED(rf_weighted_3, 3)
RF_WEIGHTED(rf_weighted_2, 2)
RF_WEIGHTED(rf_weighted_1, 1)

/* Weighted values of one head in one dimension. */
static float rf_weighted_value(const float *weights, const float *values, int dim, int length) {
    float sum = 0.0f;
    for (int position = 0; position < length; position++) sum += values[(size_t)position * dim] * weights[position];
    return sum;
}

/* Turn scores into weights that sum up to 1; those from `length` on, up to a whole block, become 0. */
static void rf_softmax(float *scores, int length) {
    const int padded = (length + RF_LANES - 1) / RF_LANES * RF_LANES;
    for (int position = length; position < padded; position++) scores[position] = -INFINITY;
    rf_vec most = rf_load(scores);
    for (int position = RF_WIDTH; position < padded; position += RF_WIDTH) {
        const rf_vec score = rf_load(scores + position);
        most = rf_select(score > most, score, most);
    }
    float highest = most[0];
    for (int lane = 1; lane < RF_WIDTH; lane++) highest = most[lane] > highest ? most[lane] : highest;
    rf_vec sums[RF_PARTS];
    for (int part = 0; part < RF_PARTS; part++) sums[part] = rf_all(0.0f);
    for (int start = 0; start < padded; start += RF_LANES)
        RF_UNROLL for (int part = 0; part < RF_PARTS; part++) {
            float *at = scores + start + part * RF_WIDTH;
            const rf_vec weight = rf_exp(rf_load(at) - rf_all(highest));
            rf_store(at, weight);
            sums[part] += weight;
        }
    const rf_vec scale = rf_all(1.0f / rf_sum(sums));
    for (int position = 0; position < padded; position += RF_WIDTH)
        rf_store(scores + position, rf_load(scores + position) * scale);
}

/* `scores` is room for num_heads x stride numbers, stride a multiple of RF_LANES; `next` are the keys needed next. */
static void rf_attend(const float *query, const float *keys, const float *values, const float *next, float *scores,
                      float *out, int num_heads, int dim, int length, int stride) {
    int head = 0;
#define RF_HEADS(H)                                                                                              \
    for (; head + H <= num_heads; head += H) {                                                                   \
        float *weights = scores + (size_t)head * stride;                                                         \
        for (int start = 0; start < length; start += RF_LANES)                                                   \
            rf_scores_##H(query + (size_t)head * dim, keys + (size_t)start * dim, values + (size_t)start * dim,  \
                          weights + start, dim, stride);                                                         \
        for (int h = 0; h < H; h++) rf_softmax(weights + (size_t)h * stride, length);                            \
        int start = 0;                                                                                           \
        for (; start + RF_LANES <= dim; start += RF_LANES)                                                       \
            rf_weighted_##H(weights, values + start, next + (size_t)start * length, out + (size_t)head * dim + start, \
                            dim, length, stride);                                                                \
        for (; start < dim; start++)                                                                             \
            for (int h = 0; h < H; h++)                                                                          \
                out[(size_t)(head + h) * dim + start] =                                                          \
                    rf_weighted_value(weights + (size_t)h * stride, values + start, dim, length);                \
    }
    RF_HEADS(3)
    RF_HEADS(2)
    RF_HEADS(1)
#undef RF_HEADS
}

#endif
