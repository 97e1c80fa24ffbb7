/* Sampling of one token a row from logits.
 *
 * In this order: temperature, top-k, top-p of what top-k left, a draw by inverting the cumulative
 * distribution: first over blocks of the vocabulary, then inside the block. Temperature 0 takes the
 * first most likely token, whose log-probability is reported at temperature 1 and unrestricted. */
#ifndef RF_SAMPLING_H
#define RF_SAMPLING_H

#include "model.h"

enum { RF_VOCAB_BLOCK = 256, RF_DIGIT_BITS = 11, RF_NUM_DIGITS = 1 << RF_DIGIT_BITS };

typedef struct {
    rf_model *model;
    int vocab_size, stride;
    float *logits; /* changed in place */
    const float *temperatures;
    const int64_t *top_ks; /* vocab_size for all */
    const double *top_ps, *uniforms;
    int64_t *token_ids;
    float *logprobs;
    uint8_t *finite;
} rf_draws;

static inline int rf_num_vocab_blocks(int vocab_size) { return (vocab_size + RF_VOCAB_BLOCK - 1) / RF_VOCAB_BLOCK; }

/* Integers in the order of the numbers they stand for. */
static inline uint32_t rf_ordered(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static float rf_unordered(uint32_t ordered) {
    const uint32_t bits = ordered & 0x80000000u ? ordered & 0x7FFFFFFFu : ~ordered;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* exp of one block, shifted by the highest logit; what is beyond the vocabulary gives 0. */
static void rf_block_weights(const float *logits, int count, float highest, float *weights) {
    int i = 0;
    for (; i + RF_WIDTH <= count; i += RF_WIDTH) rf_store(weights + i, rf_exp(rf_load(logits + i) - rf_all(highest)));
    if (i < count) {
        float rest[RF_WIDTH];
        for (int lane = 0; lane < RF_WIDTH; lane++) rest[lane] = i + lane < count ? logits[i + lane] : -INFINITY;
        rf_store(weights + i, rf_exp(rf_load(rest) - rf_all(highest)));
        i += RF_WIDTH;
    }
    for (; i < RF_VOCAB_BLOCK; i++) weights[i] = 0.0f;
}

static int rf_block_count(int vocab_size, int block) {
    const int rest = vocab_size - block * RF_VOCAB_BLOCK;
    return rest < RF_VOCAB_BLOCK ? rest : RF_VOCAB_BLOCK;
}

/* Fill the sums of all blocks and return their sum. */
static double rf_sum_blocks(const float *logits, int vocab_size, float highest, double *block_sums) {
    float weights[RF_VOCAB_BLOCK];
    double total = 0.0;
    for (int block = 0; block < rf_num_vocab_blocks(vocab_size); block++) {
        rf_block_weights(logits + block * RF_VOCAB_BLOCK, rf_block_count(vocab_size, block), highest, weights);
        rf_vec sums[RF_PARTS];
        for (int part = 0; part < RF_PARTS; part++) sums[part] = rf_all(0.0f);
        for (int i = 0; i < RF_VOCAB_BLOCK; i += RF_LANES)
            RF_UNROLL for (int part = 0; part < RF_PARTS; part++) sums[part] += rf_load(weights + i + part * RF_WIDTH);
        block_sums[block] = rf_sum(sums);
        total += block_sums[block];
    }
    return total;
}

/* The lowest of the logits that are needed, from the highest down, for their amounts to reach `wanted`; each
 * amounts to 1, or to its weight. Found digit by digit of its ordered bits. Equal logits are needed together. */
static float rf_lowest_needed(const float *logits, int vocab_size, float floor, float highest, bool by_weight,
                              double wanted) {
    static const int shifts[] = {21, 10, 0};
    double amounts[RF_NUM_DIGITS];
    uint32_t prefix = 0, mask = 0;
    double before = 0.0;
    for (int pass = 0; pass < 3; pass++) {
        const uint32_t digits = (pass == 2 ? 1u << 10 : RF_NUM_DIGITS) - 1;
        memset(amounts, 0, sizeof amounts);
        for (int start = 0; start < vocab_size; start += RF_VOCAB_BLOCK) {
            const int count = rf_block_count(vocab_size, start / RF_VOCAB_BLOCK);
            float weights[RF_VOCAB_BLOCK];
            if (by_weight) rf_block_weights(logits + start, count, highest, weights);
            for (int i = 0; i < count; i++) {
                const uint32_t ordered = rf_ordered(logits[start + i]);
                if ((ordered & mask) != prefix || logits[start + i] < floor) continue;
                amounts[ordered >> shifts[pass] & digits] += by_weight ? weights[i] : 1.0;
            }
        }
        int chosen = -1;
        double sum = before;
        for (int digit = (int)digits; digit >= 0 && (chosen < 0 || sum < wanted); digit--) {
            if (amounts[digit] <= 0.0) continue;
            chosen = digit;
            before = sum;
            sum += amounts[digit];
        }
        if (chosen < 0) return floor;
        prefix |= (uint32_t)chosen << shifts[pass];
        mask |= digits << shifts[pass];
    }
    return rf_unordered(prefix);
}

/* Put what top-k and top-p leave out at minus infinity. */
static void rf_restrict(float *logits, int vocab_size, float highest, int64_t top_k, double top_p, double *block_sums) {
    float floor = -INFINITY;
    if (top_k < vocab_size) floor = rf_lowest_needed(logits, vocab_size, floor, highest, false, (double)top_k);
    if (top_p < 1.0) {
        for (int i = 0; i < vocab_size; i++) logits[i] = logits[i] < floor ? -INFINITY : logits[i];
        const double total = rf_sum_blocks(logits, vocab_size, highest, block_sums);
        floor = rf_lowest_needed(logits, vocab_size, floor, highest, true, top_p * total);
    }
    for (int i = 0; i < vocab_size; i++) logits[i] = logits[i] < floor ? -INFINITY : logits[i];
}

/* Divide by the temperature and find the highest; false when a logit is not a number or none is finite. */
static bool rf_scale(float *logits, int vocab_size, float temperature, float *highest, int64_t *first) {
    rf_vec most = rf_all(-INFINITY);
    rf_ivec odd = {0};
    int i = 0;
    const float divisor = temperature > 0.0f ? temperature : 1.0f;
    for (; i + RF_WIDTH <= vocab_size; i += RF_WIDTH) {
        rf_vec value = rf_load(logits + i);
        if (divisor != 1.0f) rf_store(logits + i, value = value / rf_all(divisor));
        most = rf_select(value > most, value, most);
        odd |= value != value;
    }
    bool valid = true;
    *highest = -INFINITY;
    for (int lane = 0; lane < RF_WIDTH; lane++) {
        valid = valid && !odd[lane];
        *highest = most[lane] > *highest ? most[lane] : *highest;
    }
    for (; i < vocab_size; i++) {
        logits[i] /= divisor;
        valid = valid && logits[i] == logits[i];
        *highest = logits[i] > *highest ? logits[i] : *highest;
    }
    for (*first = 0; *first < vocab_size - 1 && logits[*first] != *highest; ++*first) {}
    return valid && isfinite(*highest);
}

/* The token whose share of the cumulative distribution holds `target`; never one of weight 0. */
static int64_t rf_invert(const float *logits, int vocab_size, float highest, const double *block_sums, double target) {
    int chosen = -1;
    for (int block = 0; block < rf_num_vocab_blocks(vocab_size); block++) {
        if (block_sums[block] <= 0.0) continue;
        if (chosen >= 0) target -= block_sums[chosen];
        chosen = block;
        if (target < block_sums[block]) break;
    }
    float weights[RF_VOCAB_BLOCK];
    rf_block_weights(logits + chosen * RF_VOCAB_BLOCK, rf_block_count(vocab_size, chosen), highest, weights);
    int token = 0;
    double sum = 0.0;
    for (int i = 0; i < RF_VOCAB_BLOCK && sum <= target; i++) {
        if (weights[i] <= 0.0f) continue;
        token = i;
        sum += weights[i];
    }
    return (int64_t)chosen * RF_VOCAB_BLOCK + token;
}

static void rf_sample_task(void *context, int row, int thread) {
    const rf_draws *draws = context;
    const int vocab_size = draws->vocab_size;
    float *logits = draws->logits + (size_t)row * draws->stride;
    double *block_sums = draws->model->block_sums + (size_t)thread * rf_num_vocab_blocks(vocab_size);
    float highest;
    int64_t token;
    draws->finite[row] = rf_scale(logits, vocab_size, draws->temperatures[row], &highest, &token);
    draws->token_ids[row] = token;
    draws->logprobs[row] = 0.0f;
    if (!draws->finite[row]) return;
    const bool greedy = draws->temperatures[row] == 0.0f;
    if (!greedy && (draws->top_ks[row] < vocab_size || draws->top_ps[row] < 1.0))
        rf_restrict(logits, vocab_size, highest, draws->top_ks[row], draws->top_ps[row], block_sums);
    const double total = rf_sum_blocks(logits, vocab_size, highest, block_sums);
    if (!greedy) token = rf_invert(logits, vocab_size, highest, block_sums, draws->uniforms[row] * total);
    draws->token_ids[row] = token;
    draws->logprobs[row] = (float)((double)(logits[token] - highest) - log(total));
}

#endif
