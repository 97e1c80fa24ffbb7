/* Products with 8-bit weights and activations, a scale for each group of inputs of each row.
 *
 * Activations become 0..255 around 128. Weights stay within -63..63: two products of 255 * 63 still fit the
 * 16-bit sums of AVX2. Integer sums are exact, so a result depends neither on the machine nor on other rows. */
#ifndef RF_QUANTISED_H
#define RF_QUANTISED_H

#include "linear.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { RF_MOST_WEIGHT = 63, RF_MOST_ACTIVATION = 127, RF_MIDDLE = 128, RF_QUAD = 4 };

/* Inputs of a group; 0 where a row of this width cannot be quantised. */
static inline int rf_group_size(int num_inputs) { return num_inputs % 64 == 0 ? 64 : num_inputs % 32 == 0 ? 32 : 0; }
static inline int rf_num_groups(int num_inputs) { return num_inputs / rf_group_size(num_inputs); }

/* Of a panel and a group: scales, what the middle of the activations adds up to, and codes by quads of inputs. */
static inline size_t rf_group_bytes(int group_size) { return (size_t)RF_PANEL * (8 + (size_t)group_size); }

static inline uint8_t *rf_group(const rf_matrix *matrix, int panel, int group) {
    const int size = rf_group_size(matrix->num_inputs), count = matrix->num_inputs / size;
    return matrix->codes + ((size_t)panel * count + group) * rf_group_bytes(size);
}

static float rf_most(const float *values, int count) {
    rf_vec most = rf_all(0.0f);
    for (int i = 0; i < count; i += RF_WIDTH) {
        const rf_vec value = rf_load(values + i), size = rf_select(value < rf_all(0.0f), -value, value);
        most = rf_select(size > most, size, most);
    }
    float highest = most[0];
    for (int lane = 1; lane < RF_WIDTH; lane++) highest = most[lane] > highest ? most[lane] : highest;
    return highest;
}

/* One row of activations. */
static void rf_quantise_row(const float *row, int num_inputs, uint8_t *codes, float *scales) {
    const int size = rf_group_size(num_inputs);
    for (int start = 0; start < num_inputs; start += size) {
        const float most = rf_most(row + start, size), inverse = most > 0.0f ? RF_MOST_ACTIVATION / most : 0.0f;
        scales[start / size] = most / RF_MOST_ACTIVATION;
        for (int i = 0; i < size; i += RF_WIDTH) {
            /* Rounds to nearest: the sum is positive. */
            const rf_vec scaled = rf_load(row + start + i) * rf_all(inverse) + rf_all(RF_MIDDLE + 0.5f);
            const rf_ivec rounded = __builtin_convertvector(scaled, rf_ivec);
            for (int lane = 0; lane < RF_WIDTH; lane++) codes[start + i + lane] = (uint8_t)rounded[lane];
        }
    }
}

static void rf_write_quantised(rf_matrix *matrix, int output, const float *row) {
    const int size = rf_group_size(matrix->num_inputs), lane = output % RF_PANEL;
    for (int start = 0; start < matrix->num_inputs; start += size) {
        uint8_t *group = rf_group(matrix, output / RF_PANEL, start / size);
        float *scales = (float *)group;
        int32_t *offsets = (int32_t *)(scales + RF_PANEL);
        int8_t *codes = (int8_t *)(offsets + RF_PANEL);
        const float most = rf_most(row + start, size), inverse = most > 0.0f ? RF_MOST_WEIGHT / most : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < size; i++) {
            const int8_t code = (int8_t)lrintf(row[start + i] * inverse);
            codes[((size_t)(i / RF_QUAD) * RF_PANEL + lane) * RF_QUAD + i % RF_QUAD] = code;
            sum += code;
        }
        scales[lane] = most / RF_MOST_WEIGHT;
        offsets[lane] = -RF_MIDDLE * sum;
    }
}

static void rf_read_quantised(const rf_matrix *matrix, int output, float *row) {
    const int size = rf_group_size(matrix->num_inputs), lane = output % RF_PANEL;
    for (int i = 0; i < matrix->num_inputs; i++) {
        const uint8_t *group = rf_group(matrix, output / RF_PANEL, i / size);
        const int8_t *codes = (const int8_t *)(group + (size_t)RF_PANEL * 8);
        const int at = i % size;
        row[i] = ((const float *)group)[lane] * codes[((size_t)(at / RF_QUAD) * RF_PANEL + lane) * RF_QUAD + at % RF_QUAD];
    }
}

#if defined(__AVX512VNNI__)
typedef __m512i rf_quads;
#define RF_LOAD_QUADS(from) _mm512_loadu_si512(from)
#define RF_ALL_QUADS(value) _mm512_set1_epi32(value)
#define RF_ADD_QUADS(sum, activations, weights) _mm512_dpbusd_epi32(sum, activations, weights)
#define RF_QUADS_TO_FLOATS(sum) ((rf_vec)_mm512_cvtepi32_ps(sum))
enum { RF_QUAD_WIDTH = 16 };
#elif defined(__AVX512BW__)
typedef __m512i rf_quads;
#define RF_LOAD_QUADS(from) _mm512_loadu_si512(from)
#define RF_ALL_QUADS(value) _mm512_set1_epi32(value)
#define RF_ADD_QUADS(sum, activations, weights) \
    _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(activations, weights), _mm512_set1_epi16(1)))
#define RF_QUADS_TO_FLOATS(sum) ((rf_vec)_mm512_cvtepi32_ps(sum))
enum { RF_QUAD_WIDTH = 16 };
#elif defined(__AVX2__) && !defined(__AVX512F__)
typedef __m256i rf_quads;
#define RF_LOAD_QUADS(from) _mm256_loadu_si256((const __m256i *)(from))
#define RF_ALL_QUADS(value) _mm256_set1_epi32(value)
#define RF_ADD_QUADS(sum, activations, weights) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(activations, weights), _mm256_set1_epi16(1)))
#define RF_QUADS_TO_FLOATS(sum) ((rf_vec)_mm256_cvtepi32_ps(sum))
enum { RF_QUAD_WIDTH = 8 };
#endif

#if defined(RF_ADD_QUADS)
/* M rows times one group of a panel, added to y. */
#define RF_QUANTISED_TILE(NAME, M)                                                                                  \
    RF_INLINE void NAME(const uint8_t *x, int ldx, const float *x_scales, int ldscales, const uint8_t *group,       \
                        int group_size, float *y, int ldy) {                                                        \
        const float *scales = (const float *)group;                                                                 \
        const int32_t *offsets = (const int32_t *)(scales + RF_PANEL);                                              \
        const uint8_t *codes = (const uint8_t *)(offsets + RF_PANEL);                                               \
        rf_quads sums[M][RF_TILE_VECS];                                                                             \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)                                                        \
            _Pragma("GCC unroll 16") for (int v = 0; v < RF_TILE_VECS; v++)                                         \
                sums[m][v] = RF_LOAD_QUADS(offsets + v * RF_QUAD_WIDTH);                                            \
        for (int i = 0; i < group_size; i += RF_QUAD)                                                               \
            _Pragma("GCC unroll 16") for (int v = 0; v < RF_TILE_VECS; v++) {                                       \
                rf_quads weights = RF_LOAD_QUADS(codes + (size_t)i * RF_PANEL + v * RF_QUAD_WIDTH * RF_QUAD);       \
                RF_KEEP(weights);                                                                                   \
                _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) {                                              \
                    int32_t quad;                                                                                   \
                    memcpy(&quad, x + (size_t)m * ldx + i, sizeof quad);                                            \
                    sums[m][v] = RF_ADD_QUADS(sums[m][v], RF_ALL_QUADS(quad), weights);                             \
                }                                                                                                   \
            }                                                                                                       \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)                                                        \
            _Pragma("GCC unroll 16") for (int v = 0; v < RF_TILE_VECS; v++) {                                       \
                float *to = y + (size_t)m * ldy + v * RF_WIDTH;                                                     \
                const rf_vec scale = rf_load(scales + v * RF_WIDTH) * x_scales[(size_t)m * ldscales];               \
                rf_store(to, rf_load(to) + RF_QUADS_TO_FLOATS(sums[m][v]) * scale);                                 \
            }                                                                                                       \
    }
#else
#define RF_QUANTISED_TILE(NAME, M)                                                                                  \
    RF_INLINE void NAME(const uint8_t *x, int ldx, const float *x_scales, int ldscales, const uint8_t *group,       \
                        int group_size, float *y, int ldy) {                                                        \
        const float *scales = (const float *)group;                                                                 \
        const int32_t *offsets = (const int32_t *)(scales + RF_PANEL);                                              \
        const int8_t *codes = (const int8_t *)(offsets + RF_PANEL);                                                 \
        for (int m = 0; m < M; m++)                                                                                 \
            for (int o = 0; o < RF_PANEL; o++) {                                                                    \
                int32_t sum = offsets[o];                                                                           \
                for (int i = 0; i < group_size; i++)                                                                \
                    sum += (int32_t)x[(size_t)m * ldx + i] *                                                        \
                           codes[((size_t)(i / RF_QUAD) * RF_PANEL + o) * RF_QUAD + i % RF_QUAD];                   \
                y[(size_t)m * ldy + o] += (float)sum * (scales[o] * x_scales[(size_t)m * ldscales]);                \
            }                                                                                                       \
    }
#endif
#if RF_WIDTH == 16
RF_QUANTISED_TILE(rf_quantised_8, 8)
#endif
RF_QUANTISED_TILE(rf_quantised_4, 4)
RF_QUANTISED_TILE(rf_quantised_1, 1)

/* One panel's outputs of all rows of quantised activations; see rf_linear_panel. */
static void rf_quantised_panel(const rf_matrix *matrix, int panel, const uint8_t *x, const float *x_scales,
                               int num_rows, float *y, int ldy, bool add) {
    const int num_inputs = matrix->num_inputs, size = rf_group_size(num_inputs), num_groups = num_inputs / size;
    y += (size_t)panel * RF_PANEL;
    for (int row = 0; row < num_rows; row++)
        for (int o = 0; o < RF_PANEL; o++) {
            float *sum = y + (size_t)row * ldy + o;
            *sum = (add ? *sum : 0.0f) + (matrix->bias ? matrix->bias[panel * RF_PANEL + o] : 0.0f);
        }
    for (int group = 0; group < num_groups; group++) {
        const uint8_t *weights = rf_group(matrix, panel, group);
        const uint8_t *part = x + (size_t)group * size;
        int row = 0;
#define RF_QUANTISED_ROWS(M)                                                                                      \
    for (; row + M <= num_rows; row += M)                                                                         \
        rf_quantised_##M(part + (size_t)row * num_inputs, num_inputs, x_scales + (size_t)row * num_groups + group, \
                         num_groups, weights, size, y + (size_t)row * ldy, ldy);
#if RF_WIDTH == 16
        RF_QUANTISED_ROWS(8)
#endif
        RF_QUANTISED_ROWS(4)
        RF_QUANTISED_ROWS(1)
#undef RF_QUANTISED_ROWS
    }
}

#endif
