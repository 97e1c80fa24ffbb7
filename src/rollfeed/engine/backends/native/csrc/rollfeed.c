/* What Python calls; every pointer is checked there. See library.py. */
#include "forward.h"
#include "sampling.h"

#define RF_PUBLIC __attribute__((visibility("default")))

RF_PUBLIC void rf_model_free(rf_model *model) {
    if (!model) return;
    if (model->pool) rf_pool_free(model->pool);
    for (int layer = 0; model->layers && layer < model->sizes.num_layers; layer++) {
        for (int which = 0; which < RF_NUM_MATRICES; which++) rf_free_matrix(&model->layers[layer].matrices[which]);
        for (int which = 0; which < RF_NUM_NORMS; which++) free(model->layers[layer].norms[which]);
    }
    rf_free_matrix(&model->head);
    if (model->keys) munmap(model->keys, model->cache_bytes);
    if (model->values) munmap(model->values, model->cache_bytes);
    void *owned[] = {model->layers, model->embedding, model->norm,    model->cos,    model->sin,   model->hidden,
                     model->normed, model->qkv,       model->attended, model->gate_up, model->gated, model->scores,
                     model->block_sums, model->codes, model->code_scales};
    for (size_t index = 0; index < sizeof owned / sizeof *owned; index++) free(owned[index]);
    free(model);
}

static float *rf_floats(size_t count) { return rf_allocate(count * sizeof(float)); }

static bool rf_allocate_layers(rf_model *model) {
    const rf_sizes *s = &model->sizes;
    const int heads = (s->num_heads + 2 * s->num_kv_heads) * s->head_dim;
    model->layers = calloc((size_t)s->num_layers, sizeof *model->layers);
    bool complete = model->layers != NULL;
    for (int layer = 0; complete && layer < s->num_layers; layer++) {
        rf_matrix *matrices = model->layers[layer].matrices;
        complete = rf_new_matrix(&matrices[RF_QKV], heads, s->hidden_size, s->quantised) &&
                   rf_new_matrix(&matrices[RF_OUTPUT], s->hidden_size, s->num_heads * s->head_dim, s->quantised) &&
                   rf_new_matrix(&matrices[RF_GATE_UP], 2 * s->intermediate_size, s->hidden_size, s->quantised) &&
                   rf_new_matrix(&matrices[RF_DOWN], s->hidden_size, s->intermediate_size, s->quantised);
    }
    return complete && rf_new_matrix(&model->head, s->vocab_size, s->hidden_size, s->quantised);
}

static bool rf_allocate_buffers(rf_model *model, int num_threads) {
    const rf_sizes *s = &model->sizes;
    const int heads = (s->num_heads + 2 * s->num_kv_heads) * s->head_dim;
    const size_t rows = (size_t)s->max_rows, cache = rf_head_cache(model, s->num_layers, 0, 0) * sizeof(float);
    model->cache_bytes = cache;
    model->keys = rf_map(cache);
    model->values = rf_map(cache);
    model->embedding = rf_floats((size_t)s->vocab_size * s->hidden_size);
    model->norm = rf_floats((size_t)s->hidden_size);
    model->cos = rf_floats((size_t)s->capacity * s->head_dim / 2);
    model->sin = rf_floats((size_t)s->capacity * s->head_dim / 2);
    model->hidden = rf_floats(rows * rf_padded(s->hidden_size));
    model->normed = rf_floats(rows * s->hidden_size);
    model->qkv = rf_floats(rows * rf_padded(heads));
    model->attended = rf_floats(rows * s->num_heads * s->head_dim);
    model->gate_up = rf_floats(rows * rf_padded(2 * s->intermediate_size));
    model->gated = rf_floats(rows * s->intermediate_size);
    model->scores = rf_floats((size_t)num_threads * (s->num_heads / s->num_kv_heads) * s->capacity);
    model->block_sums = rf_allocate((size_t)num_threads * rf_num_vocab_blocks(s->vocab_size) * sizeof(double));
    const int heads_size = s->num_heads * s->head_dim;
    int widest = s->hidden_size > s->intermediate_size ? s->hidden_size : s->intermediate_size;
    widest = heads_size > widest ? heads_size : widest;
    model->codes = rf_allocate(s->quantised ? rows * widest : 0);
    model->code_scales = rf_floats(s->quantised ? rows * widest / 32 : 0);
    return model->codes && model->code_scales && model->keys && model->values && model->embedding && model->norm && model->cos && model->sin &&
           model->hidden && model->normed && model->qkv && model->attended && model->gate_up && model->gated &&
           model->scores && model->block_sums;
}

/* A model whose weights are still to be written, or NULL when memory is short. Quantised ones take inputs of a
 * multiple of 32 only. */
RF_PUBLIC rf_model *rf_model_new(const rf_sizes *sizes, int num_threads) {
    rf_model *model = calloc(1, sizeof *model);
    if (!model) return NULL;
    model->sizes = *sizes;
    model->pool = rf_pool_new(num_threads);
    if (model->pool && rf_allocate_layers(model) && rf_allocate_buffers(model, num_threads)) return model;
    rf_model_free(model);
    return NULL;
}

/* Replace the threads; the buffers are for as many as the model was made with. */
RF_PUBLIC bool rf_model_set_threads(rf_model *model, int num_threads) {
    rf_pool *pool = rf_pool_new(num_threads);
    if (!pool) return false;
    rf_pool_free(model->pool);
    model->pool = pool;
    return true;
}

/* A matrix of a layer, or the head for layer -1. */
RF_PUBLIC rf_matrix *rf_model_matrix(rf_model *model, int layer, int which) {
    return layer < 0 ? &model->head : &model->layers[layer].matrices[which];
}

/* The bias of a matrix; made and set to zero where there was none. */
RF_PUBLIC float *rf_matrix_bias(rf_matrix *matrix) {
    const size_t bytes = (size_t)rf_padded(matrix->num_outputs) * sizeof(float);
    if (!matrix->bias && (matrix->bias = rf_allocate(bytes))) memset(matrix->bias, 0, bytes);
    return matrix->bias;
}

/* The weight of a norm of a layer, made where there was none; for layer -1 the last norm's. */
RF_PUBLIC float *rf_model_norm(rf_model *model, int layer, int which, int size) {
    if (layer < 0) return model->norm;
    float **norm = &model->layers[layer].norms[which];
    return *norm ? *norm : (*norm = rf_floats((size_t)size));
}

RF_PUBLIC float *rf_model_embedding(rf_model *model) { return model->embedding; }
RF_PUBLIC float *rf_model_rotary(rf_model *model, bool sines) { return sines ? model->sin : model->cos; }
RF_PUBLIC int64_t *rf_model_nanoseconds(rf_model *model) { return model->nanoseconds; }
RF_PUBLIC int rf_logits_stride(const rf_model *model) { return rf_padded(model->sizes.vocab_size); }

RF_PUBLIC void rf_matrix_write(rf_matrix *matrix, int first, int num_rows, const float *rows) {
    if (matrix->panels) rf_write_rows(matrix, first, num_rows, rows);
    else
        for (int row = 0; row < num_rows; row++)
            rf_write_quantised(matrix, first + row, rows + (size_t)row * matrix->num_inputs);
}

RF_PUBLIC void rf_matrix_read(const rf_matrix *matrix, int first, int num_rows, float *rows) {
    if (matrix->panels) rf_read_rows(matrix, first, num_rows, rows);
    else
        for (int row = 0; row < num_rows; row++)
            rf_read_quantised(matrix, first + row, rows + (size_t)row * matrix->num_inputs);
}

/* Compute num_rows <= max_rows tokens; hidden states before the last norm go to `hidden`, num_rows x hidden_size. */
RF_PUBLIC void rf_forward(rf_model *model, int num_rows, const int32_t *token_ids, const int32_t *positions,
                          const int32_t *slots, float *hidden) {
    const int size = model->sizes.hidden_size, stride = rf_padded(size);
    rf_pass pass = {.model = model, .num_rows = num_rows, .token_ids = token_ids, .positions = positions,
                    .slots = slots};
    for (int row = 0; row < num_rows; row++)
        memcpy(model->hidden + (size_t)row * stride, model->embedding + (size_t)token_ids[row] * size,
               (size_t)size * sizeof(float));
    for (pass.layer = 0; pass.layer < model->sizes.num_layers; pass.layer++) rf_layer_pass(&pass);
    for (int row = 0; row < num_rows; row++)
        memcpy(hidden + (size_t)row * size, model->hidden + (size_t)row * stride, (size_t)size * sizeof(float));
}

/* Logits of num_rows <= max_rows hidden states, rf_logits_stride() apart. */
RF_PUBLIC void rf_logits(rf_model *model, int num_rows, const float *hidden, float *logits) {
    const int size = model->sizes.hidden_size, stride = rf_padded(size);
    for (int row = 0; row < num_rows; row++)
        memcpy(model->hidden + (size_t)row * stride, hidden + (size_t)row * size, (size_t)size * sizeof(float));
    rf_pass pass = {.model = model, .num_rows = num_rows};
    rf_norms(&pass, model->norm);
    rf_linear(&pass, &model->head, model->normed, size, logits, false, RF_TIME_HEAD);
}

RF_PUBLIC void rf_sample(rf_model *model, int num_rows, float *logits, int stride, const float *temperatures,
                         const int64_t *top_ks, const double *top_ps, const double *uniforms, int64_t *token_ids,
                         float *logprobs, uint8_t *finite) {
    rf_draws draws = {.model = model, .vocab_size = model->sizes.vocab_size, .stride = stride, .logits = logits,
                      .temperatures = temperatures, .top_ks = top_ks, .top_ps = top_ps, .uniforms = uniforms,
                      .token_ids = token_ids, .logprobs = logprobs, .finite = finite};
    const int64_t started = rf_now();
    rf_run(model->pool, num_rows, rf_sample_task, &draws);
    model->nanoseconds[RF_TIME_SAMPLING] += rf_now() - started;
}

/* Give `slot` the keys and values of another one's positions start to end; whole blocks of keys are copied. */
RF_PUBLIC void rf_copy_positions(rf_model *model, int donor, int slot, int start, int end) {
    const rf_sizes *s = &model->sizes;
    const size_t dim = (size_t)s->head_dim, first = (size_t)start / RF_LANES * RF_LANES;
    const size_t count = ((size_t)end + RF_LANES - 1) / RF_LANES * RF_LANES - first;
    for (int layer = 0; layer < s->num_layers; layer++)
        for (int head = 0; head < s->num_kv_heads; head++) {
            const size_t from = rf_head_cache(model, layer, donor, head) + first * dim;
            const size_t to = rf_head_cache(model, layer, slot, head) + first * dim;
            memcpy(model->keys + to, model->keys + from, count * dim * sizeof(float));
            memcpy(model->values + to, model->values + from, count * dim * sizeof(float));
        }
}

RF_PUBLIC void rf_erase_slot(rf_model *model, int slot) {
    const rf_sizes *s = &model->sizes;
    const size_t count = (size_t)s->num_kv_heads * s->capacity * s->head_dim;
    for (int layer = 0; layer < s->num_layers; layer++) {
        const size_t at = rf_head_cache(model, layer, slot, 0);
        memset(model->keys + at, 0, count * sizeof(float));
        memset(model->values + at, 0, count * sizeof(float));
    }
}
