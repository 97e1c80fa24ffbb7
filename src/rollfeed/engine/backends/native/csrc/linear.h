/* Products of rows with weights, y[r][o] = sum over i of x[r][i] w[o][i].
 *
 * Weights are stored in panels of RF_PANEL outputs, input by input. An output is summed up over blocks
 * of RF_BLOCK_INPUTS inputs in order, and the blocks' sums after each other, whatever the number of rows: a row's
 * result does not depend on its neighbours, and is the same on every machine with fused multiply-add. The blocks
 * keep rounding errors small, and a panel's block stays in the first-level cache while all rows pass. A panel takes
 * exactly the memory of its rows, the last one rounded up. */
#ifndef RF_LINEAR_H
#define RF_LINEAR_H

#include <stdbool.h>

#include "vectors.h"

#if RF_WIDTH == 16
enum { RF_TILE_ROWS = 8, RF_TILE_VECS = 3 };
#elif RF_WIDTH == 8
enum { RF_TILE_ROWS = 4, RF_TILE_VECS = 3 };
#else
enum { RF_TILE_ROWS = 4, RF_TILE_VECS = 4 };
#endif
enum {
    RF_PANEL = RF_WIDTH * RF_TILE_VECS,
    RF_BLOCK_INPUTS = 192,
};

typedef struct {
    int num_outputs, num_inputs;
    float *panels;  /* NULL where the weights are quantised, */
    uint8_t *codes; /* and then these, see quantised.h. */
    float *bias;    /* NULL without one; RF_PANEL * num_panels long. */
} rf_matrix;

static inline int rf_num_panels(const rf_matrix *matrix) { return (matrix->num_outputs + RF_PANEL - 1) / RF_PANEL; }
static inline int rf_padded(int num_outputs) { return (num_outputs + RF_PANEL - 1) / RF_PANEL * RF_PANEL; }

static inline float *rf_weight(const rf_matrix *matrix, int output, int input) {
    const size_t column = (size_t)(output / RF_PANEL) * matrix->num_inputs + input;
    return matrix->panels + column * RF_PANEL + output % RF_PANEL;
}

/* M rows times one panel, over `count` inputs; memory from `ahead` on is fetched meanwhile, `step` bytes an input. */
#define RF_TILE(NAME, M)                                                                                         \
    RF_INLINE void NAME(const float *x, int ldx, const float *panel, int count, float *y, int ldy, bool add,     \
                        const char *ahead, int step) {                                                           \
        rf_vec sums[M][RF_TILE_VECS];                                                                            \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) _Pragma("GCC unroll 16") for (int v = 0; v < RF_TILE_VECS; v++)                   \
            sums[m][v] = rf_all(0.0f);                       \
        for (int i = 0; i < count; i++) {                                                                        \
            rf_vec weights[RF_TILE_VECS];                                                                        \
            _Pragma("GCC unroll 16") for (int v = 0; v < RF_TILE_VECS; v++) {                                    \
                weights[v] = *(const rf_vec *)(panel + (size_t)i * RF_PANEL + v * RF_WIDTH);                     \
                RF_KEEP(weights[v]);                                                                             \
            }                                                                                                    \
            __builtin_prefetch(ahead + (size_t)i * step, 0, 2);                                                  \
            _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) {                                                              \
                const float value = x[(size_t)m * ldx + i];                                                      \
                _Pragma("GCC unroll 16") for (int v = 0; v < RF_TILE_VECS; v++) sums[m][v] += weights[v] * value;               \
            }                                                                                                    \
        }                                                                                                        \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)                                                     \
            _Pragma("GCC unroll 16") for (int v = 0; v < RF_TILE_VECS; v++) {                                    \
                float *to = y + (size_t)m * ldy + v * RF_WIDTH;                                                  \
                rf_store(to, add ? rf_load(to) + sums[m][v] : sums[m][v]);                                       \
            }                                                                                                    \
    }
#if RF_WIDTH == 16
RF_TILE(rf_tile_8, 8)
#endif
RF_TILE(rf_tile_4, 4)
RF_TILE(rf_tile_1, 1)

/* One panel's outputs of all rows; with `add` they are added to y. */
static void rf_linear_panel(const rf_matrix *matrix, int panel, const float *x, int ldx, int num_rows, float *y,
                            int ldy, bool add) {
    const int num_inputs = matrix->num_inputs;
    const float *weights = matrix->panels + (size_t)panel * num_inputs * RF_PANEL;
    y += (size_t)panel * RF_PANEL;
    if (matrix->bias) {
        for (int row = 0; row < num_rows; row++)
            for (int o = 0; o < RF_PANEL; o++) {
                float *sum = y + (size_t)row * ldy + o;
                *sum = (add ? *sum : 0.0f) + matrix->bias[panel * RF_PANEL + o];
            }
        add = true;
    }
    const int num_tiles = num_rows / RF_TILE_ROWS + (num_rows % RF_TILE_ROWS != 0);
    const int step = RF_PANEL * (int)sizeof(float) / num_tiles;
    for (int start = 0; start < num_inputs; start += RF_BLOCK_INPUTS) {
        const int count = num_inputs - start < RF_BLOCK_INPUTS ? num_inputs - start : RF_BLOCK_INPUTS;
        const float *part = weights + (size_t)start * RF_PANEL;
        const bool add_now = add || start > 0;
        /* The next block, fetched in equal shares while the tiles of this one are computed. */
        const char *ahead = (const char *)(part + (size_t)count * RF_PANEL);
        int row = 0;
#define RF_ROWS(TILE, M)                                                                                        \
    for (; row + M <= num_rows; row += M, ahead += (size_t)count * step)                                        \
        TILE(x + (size_t)row * ldx + start, ldx, part, count, y + (size_t)row * ldy, ldy, add_now, ahead, step);
#if RF_WIDTH == 16
        RF_ROWS(rf_tile_8, 8)
#endif
        RF_ROWS(rf_tile_4, 4)
        RF_ROWS(rf_tile_1, 1)
#undef RF_ROWS
    }
}

static void rf_write_rows(rf_matrix *matrix, int first, int num_rows, const float *rows) {
    const int num_inputs = matrix->num_inputs;
    for (int row = 0; row < num_rows;) {
        const int left = RF_PANEL - (first + row) % RF_PANEL, count = left < num_rows - row ? left : num_rows - row;
        float *to = rf_weight(matrix, first + row, 0);
        for (int i = 0; i < num_inputs; i++)
            for (int o = 0; o < count; o++)
                to[(size_t)i * RF_PANEL + o] = rows[(size_t)(row + o) * num_inputs + i];
        row += count;
    }
}

static void rf_read_rows(const rf_matrix *matrix, int first, int num_rows, float *rows) {
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < matrix->num_inputs; i++)
            rows[(size_t)row * matrix->num_inputs + i] = *rf_weight(matrix, first + row, i);
}

#endif
