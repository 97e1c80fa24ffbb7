/* One pass through the decoder: rows are tokens of any slots at any positions.
 *
 * A row's result depends on its token, its position and what its slot holds before it; not on the
 * other rows, and not on whether a prompt is computed whole or in pieces. */
#ifndef RF_FORWARD_H
#define RF_FORWARD_H

#include <time.h>

#include "attention.h"
#include "model.h"

typedef struct {
    rf_model *model;
    int num_rows;
    const int32_t *token_ids, *positions, *slots;
    int layer;
    /* What the present phase works on. */
    const rf_matrix *matrix;
    const float *input;
    float *output;
    int input_stride, output_stride;
    bool add;
    const float *norm;
} rf_pass;

static inline int64_t rf_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void rf_phase(rf_pass *pass, int num_tasks, rf_task run, int part) {
    const int64_t started = rf_now();
    rf_run(pass->model->pool, num_tasks, run, pass);
    pass->model->nanoseconds[part] += rf_now() - started;
}

static void rf_norm_row(const float *row, const float *weight, float *out, int size, float eps) {
    rf_vec squares[RF_PARTS];
    for (int part = 0; part < RF_PARTS; part++) squares[part] = rf_all(0.0f);
    for (int i = 0; i < size; i += RF_LANES) {
        float rest[RF_LANES] = {0};
        const float *from = row + i;
        if (size - i < RF_LANES) from = memcpy(rest, from, (size_t)(size - i) * sizeof *rest);
        RF_UNROLL for (int part = 0; part < RF_PARTS; part++) {
            const rf_vec value = rf_load(from + part * RF_WIDTH);
            squares[part] += value * value;
        }
    }
    const float scale = 1.0f / sqrtf(rf_sum(squares) / (float)size + eps);
    for (int i = 0; i < size; i++) out[i] = row[i] * scale * weight[i];
}

static void rf_norm_task(void *context, int row, int thread) {
    (void)thread;
    const rf_pass *pass = context;
    const rf_sizes *s = &pass->model->sizes;
    rf_norm_row(pass->input + (size_t)row * pass->input_stride, pass->norm,
                pass->output + (size_t)row * pass->output_stride, s->hidden_size, s->rms_norm_eps);
}

static void rf_linear_task(void *context, int panel, int thread) {
    (void)thread;
    const rf_pass *pass = context;
    if (pass->matrix->codes) {
        rf_quantised_panel(pass->matrix, panel, pass->model->codes, pass->model->code_scales, pass->num_rows,
                           pass->output, pass->output_stride, pass->add);
        return;
    }
    rf_linear_panel(pass->matrix, panel, pass->input, pass->input_stride, pass->num_rows, pass->output,
                    pass->output_stride, pass->add);
}

static void rf_quantise_task(void *context, int row, int thread) {
    (void)thread;
    const rf_pass *pass = context;
    const int num_inputs = pass->matrix->num_inputs;
    rf_quantise_row(pass->input + (size_t)row * pass->input_stride, num_inputs,
                    pass->model->codes + (size_t)row * num_inputs,
                    pass->model->code_scales + (size_t)row * rf_num_groups(num_inputs));
}

static void rf_linear(rf_pass *pass, const rf_matrix *matrix, const float *input, int input_stride, float *output,
                      bool add, int part) {
    pass->matrix = matrix;
    pass->input = input;
    pass->input_stride = input_stride;
    pass->output = output;
    pass->output_stride = rf_padded(matrix->num_outputs);
    pass->add = add;
    if (matrix->codes) rf_phase(pass, pass->num_rows, rf_quantise_task, RF_TIME_QUANTISE);
    rf_phase(pass, rf_num_panels(matrix), rf_linear_task, part);
}

static void rf_norms(rf_pass *pass, const float *weight) {
    rf_model *model = pass->model;
    pass->norm = weight;
    pass->input = model->hidden;
    pass->input_stride = rf_padded(model->sizes.hidden_size);
    pass->output = model->normed;
    pass->output_stride = model->sizes.hidden_size;
    rf_phase(pass, pass->num_rows, rf_norm_task, RF_TIME_NORM);
}

/* Normalise where the model does, and rotate the pairs (i, i + D / 2) of a head. */
static void rf_rotate_head(const rf_model *model, float *head, int position, const float *norm) {
    const int half = model->sizes.head_dim / 2;
    if (norm) rf_norm_row(head, norm, head, model->sizes.head_dim, model->sizes.rms_norm_eps);
    const float *cos = model->cos + (size_t)position * half, *sin = model->sin + (size_t)position * half;
    for (int i = 0; i < half; i++) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cos[i] - second * sin[i];
        head[i + half] = second * cos[i] + first * sin[i];
    }
}

/* Rotate queries and keys of a row, and put its key and value into its slot. */
static void rf_rotate_task(void *context, int row, int thread) {
    (void)thread;
    const rf_pass *pass = context;
    rf_model *model = pass->model;
    const rf_sizes *s = &model->sizes;
    const rf_layer *layer = &model->layers[pass->layer];
    const int dim = s->head_dim, position = pass->positions[row];
    float *query = model->qkv + (size_t)row * rf_padded((s->num_heads + 2 * s->num_kv_heads) * dim);
    const float scale = 1.0f / sqrtf((float)dim);
    for (int head = 0; head < s->num_heads; head++) {
        rf_rotate_head(model, query + head * dim, position, layer->norms[RF_QUERY_NORM]);
        for (int i = 0; i < dim; i++) query[head * dim + i] *= scale;
    }
    float *key = query + s->num_heads * dim, *value = key + s->num_kv_heads * dim;
    for (int head = 0; head < s->num_kv_heads; head++, key += dim, value += dim) {
        rf_rotate_head(model, key, position, layer->norms[RF_KEY_NORM]);
        const size_t cache = rf_head_cache(model, pass->layer, pass->slots[row], head);
        float *keys = model->keys + cache + (size_t)(position / RF_LANES) * dim * RF_LANES + position % RF_LANES;
        for (int i = 0; i < dim; i++) keys[(size_t)i * RF_LANES] = key[i];
        memcpy(model->values + cache + (size_t)position * dim, value, (size_t)dim * sizeof *value);
    }
}

static void rf_attention_task(void *context, int task, int thread) {
    const rf_pass *pass = context;
    rf_model *model = pass->model;
    const rf_sizes *s = &model->sizes;
    const int row = task / s->num_kv_heads, kv_head = task % s->num_kv_heads, dim = s->head_dim;
    const int shared = s->num_heads / s->num_kv_heads;
    const int next = task + 1 < pass->num_rows * s->num_kv_heads ? task + 1 : task;
    const size_t cache = rf_head_cache(model, pass->layer, pass->slots[row], kv_head);
    const size_t next_cache =
        rf_head_cache(model, pass->layer, pass->slots[next / s->num_kv_heads], next % s->num_kv_heads);
    const size_t stride = rf_padded((s->num_heads + 2 * s->num_kv_heads) * dim);
    rf_attend(model->qkv + (size_t)row * stride + (size_t)kv_head * shared * dim, model->keys + cache,
              model->values + cache, model->keys + next_cache, model->scores + (size_t)thread * shared * s->capacity,
              model->attended + ((size_t)row * s->num_heads + (size_t)kv_head * shared) * dim, shared, dim,
              pass->positions[row] + 1, s->capacity);
}

static void rf_gate_task(void *context, int row, int thread) {
    (void)thread;
    const rf_pass *pass = context;
    rf_model *model = pass->model;
    const int size = model->sizes.intermediate_size;
    const float *gate = model->gate_up + (size_t)row * rf_padded(2 * size), *up = gate + size;
    float *out = model->gated + (size_t)row * size;
    for (int i = 0; i < size; i += RF_WIDTH) {
        float rest[RF_WIDTH] = {0};
        const bool whole = size - i >= RF_WIDTH;
        if (!whole) memcpy(rest, gate + i, (size_t)(size - i) * sizeof *rest);
        const rf_vec value = rf_load(whole ? gate + i : rest);
        const rf_vec activated = value / (rf_all(1.0f) + rf_exp(-value));
        rf_store(whole ? out + i : rest, activated);
        if (!whole) memcpy(out + i, rest, (size_t)(size - i) * sizeof *rest);
    }
    for (int i = 0; i < size; i++) out[i] *= up[i];
}

static void rf_layer_pass(rf_pass *pass) {
    rf_model *model = pass->model;
    const rf_sizes *s = &model->sizes;
    rf_layer *layer = &model->layers[pass->layer];
    rf_norms(pass, layer->norms[RF_ATTENTION_NORM]);
    rf_linear(pass, &layer->matrices[RF_QKV], model->normed, s->hidden_size, model->qkv, false, RF_TIME_QKV);
    rf_phase(pass, pass->num_rows, rf_rotate_task, RF_TIME_ROTATE);
    rf_phase(pass, pass->num_rows * s->num_kv_heads, rf_attention_task, RF_TIME_ATTENTION);
    rf_linear(pass, &layer->matrices[RF_OUTPUT], model->attended, s->num_heads * s->head_dim, model->hidden, true,
              RF_TIME_OUTPUT);
    rf_norms(pass, layer->norms[RF_MLP_NORM]);
    rf_linear(pass, &layer->matrices[RF_GATE_UP], model->normed, s->hidden_size, model->gate_up, false,
              RF_TIME_GATE_UP);
    rf_phase(pass, pass->num_rows, rf_gate_task, RF_TIME_GATE);
    rf_linear(pass, &layer->matrices[RF_DOWN], model->gated, s->intermediate_size, model->hidden, true, RF_TIME_DOWN);
}

#endif
