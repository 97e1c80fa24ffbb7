/* A decoder, its keys and values, and the memory one pass needs. */
#ifndef RF_MODEL_H
#define RF_MODEL_H

#include <sys/mman.h>

#include "quantised.h"
#include "threads.h"

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif

typedef struct {
    int32_t vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
    int32_t num_slots, capacity, max_rows;
    float rms_norm_eps;
    int32_t quantised; /* whether weights and activations have 8 bits */
} rf_sizes;

enum { RF_QKV, RF_OUTPUT, RF_GATE_UP, RF_DOWN, RF_NUM_MATRICES };
enum { RF_ATTENTION_NORM, RF_MLP_NORM, RF_QUERY_NORM, RF_KEY_NORM, RF_NUM_NORMS };
/* Parts of a step whose time is told apart. */
enum { RF_TIME_NORM, RF_TIME_QUANTISE, RF_TIME_QKV, RF_TIME_ROTATE, RF_TIME_ATTENTION, RF_TIME_OUTPUT, RF_TIME_GATE_UP, RF_TIME_GATE,
       RF_TIME_DOWN, RF_TIME_HEAD, RF_TIME_SAMPLING, RF_NUM_TIMES };

typedef struct {
    rf_matrix matrices[RF_NUM_MATRICES];
    float *norms[RF_NUM_NORMS]; /* NULL where the model has none. */
} rf_layer;

typedef struct {
    rf_sizes sizes;
    rf_pool *pool;
    rf_layer *layers;
    rf_matrix head;
    float *embedding, *norm;
    float *cos, *sin;    /* capacity x head_dim / 2 */
    float *keys;         /* layers, slots, kv heads, capacity / RF_LANES, head_dim, RF_LANES */
    float *values;       /* layers, slots, kv heads, capacity, head_dim */
    size_t cache_bytes;  /* of each of the two */
    float *hidden, *normed, *qkv, *attended, *gate_up, *gated;
    uint8_t *codes;      /* rows of quantised activations, */
    float *code_scales;  /* and their scales, a group each */
    float *scores;       /* threads x heads that share a key head x capacity */
    double *block_sums;  /* threads x blocks of the vocabulary; sampling */
    int64_t nanoseconds[RF_NUM_TIMES];
} rf_model;

/* Memory that reads as zero and is taken page by page as it is written. */
static float *rf_map(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static inline size_t rf_head_cache(const rf_model *model, int layer, int slot, int kv_head) {
    const rf_sizes *s = &model->sizes;
    return (((size_t)layer * s->num_slots + slot) * s->num_kv_heads + kv_head) * s->capacity * s->head_dim;
}

static size_t rf_matrix_bytes(const rf_matrix *matrix, bool quantised) {
    if (!quantised) return (size_t)rf_padded(matrix->num_outputs) * matrix->num_inputs * sizeof(float);
    const size_t group_bytes = rf_group_bytes(rf_group_size(matrix->num_inputs));
    return (size_t)rf_num_panels(matrix) * rf_num_groups(matrix->num_inputs) * group_bytes;
}

static bool rf_new_matrix(rf_matrix *matrix, int num_outputs, int num_inputs, bool quantised) {
    *matrix = (rf_matrix){.num_outputs = num_outputs, .num_inputs = num_inputs};
    float *memory = rf_map(rf_matrix_bytes(matrix, quantised));
    if (quantised) matrix->codes = (uint8_t *)memory;
    else matrix->panels = memory;
    return memory != NULL;
}

static void rf_free_matrix(rf_matrix *matrix) {
    if (matrix->panels) munmap(matrix->panels, rf_matrix_bytes(matrix, false));
    if (matrix->codes) munmap(matrix->codes, rf_matrix_bytes(matrix, true));
    free(matrix->bias);
}

#endif
