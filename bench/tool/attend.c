/* SPDX-License-Identifier: MIT */
/* qkv attend: fused attention on .npy files. */
#include "tool.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "qkv attend Q.npy K.npy V.npy -o O.npy [--causal] [--scale S] [--isa NAME]\n"
    "                  [--weights A.npy] [--lse L.npy] [--repeat N]";

static const char help[] =
    "usage: %s\n\n"
    "Computes softmax(scale * Q K^T) V. The arrays are f32 or f16, of the shapes\n"
    "[tokens, head size], [heads, tokens, head size] or [batch, heads, tokens, head\n"
    "size], all three alike. Several heads of Q may share one of K and V.\n\n"
    "  -o O.npy         the output, f32\n"
    "  --causal         the last query sees every key, each one before it one key less\n"
    "  --scale S        instead of 1/sqrt(head size)\n"
    "  --isa NAME       use this instruction set (see qkv info)\n"
    "  --weights A.npy  also write the weights, [.., query, key]\n"
    "  --lse L.npy      also write the log-sum-exp of every row, [.., query]\n"
    "  --repeat N       compute N times and print the median time\n";

struct options {
    const char *inputs[3];
    const char *out, *weights, *lse, *isa, *scale_text, *repeat_text;
    bool causal;
    float scale;
    int64_t repeat;
};

struct problem {
    struct npy query, key, value;
    int ndim;
    int64_t batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim;
    float *out, *lse;
};

/* Dimension 'from_last' (0 is the last) of an array; 1 where it has none. */
static int64_t dimension(const struct npy *array, int from_last)
{
    return from_last < array->ndim ? array->shape[array->ndim - 1 - from_last] : 1;
}

static int mismatch(const char *path, const struct npy *array, const char *other_path,
                    const struct npy *other, const char *what)
{
    char shape[NPY_SHAPE_TEXT], other_shape[NPY_SHAPE_TEXT];
    return tool_error("%s: the shape %s does not suit %s %s: %s", path,
                      npy_shape_text(array->ndim, array->shape, shape), other_path,
                      npy_shape_text(other->ndim, other->shape, other_shape), what);
}

static int check_rank(const char *path, const struct npy *array)
{
    char shape[NPY_SHAPE_TEXT];
    (void)npy_shape_text(array->ndim, array->shape, shape);
    if (array->ndim < 2)
        return tool_error("%s: the shape %s has fewer than 2 dimensions", path, shape);
    /* The number of tokens may be 0; nothing else can be. */
    for (int d = 0; d < array->ndim; d++)
        if (array->shape[d] == 0 && d != array->ndim - 2)
            return tool_error("%s: the shape %s has no elements", path, shape);
    return TOOL_OK;
}

/* Names the first disagreement, so that the message says what to mend. */
static int check_shapes(const struct options *options, struct problem *p)
{
    const char *const *path = options->inputs;
    const struct npy *q = &p->query, *k = &p->key, *v = &p->value;

    if (check_rank(path[0], q) || check_rank(path[1], k) || check_rank(path[2], v))
        return TOOL_ERROR;
    if (k->ndim != q->ndim)
        return mismatch(path[1], k, path[0], q, "the number of dimensions differs");
    if (v->ndim != k->ndim)
        return mismatch(path[2], v, path[1], k, "the number of dimensions differs");
    if (dimension(k, 3) != dimension(q, 3))
        return mismatch(path[1], k, path[0], q, "the batch differs");
    if (dimension(v, 3) != dimension(k, 3))
        return mismatch(path[2], v, path[1], k, "the batch differs");
    if (dimension(v, 2) != dimension(k, 2))
        return mismatch(path[2], v, path[1], k, "the number of heads differs");
    if (dimension(q, 2) % dimension(k, 2) != 0)
        return mismatch(path[1], k, path[0], q, "Q's heads are not a multiple of K's");
    if (dimension(v, 1) != dimension(k, 1))
        return mismatch(path[2], v, path[1], k, "the number of tokens differs");
    if (dimension(k, 0) != dimension(q, 0))
        return mismatch(path[1], k, path[0], q, "the head size (last dimension) differs");

    p->ndim = q->ndim;
    p->batch = dimension(q, 3);
    p->q_heads = dimension(q, 2);
    p->kv_heads = dimension(k, 2);
    p->q_len = dimension(q, 1);
    p->kv_len = dimension(k, 1);
    p->head_dim = dimension(q, 0);
    p->value_dim = dimension(v, 0);
    return TOOL_OK;
}

static qkv_attention_desc describe(const struct options *options, struct problem *p)
{
    return (qkv_attention_desc){
        .size = sizeof(qkv_attention_desc),
        .flags = (options->causal ? QKV_CAUSAL : 0) | (options->scale_text ? QKV_SCALE_SET : 0),
        .scale = options->scale,
        .batch = p->batch,
        .q_heads = p->q_heads,
        .kv_heads = p->kv_heads,
        .q_len = p->q_len,
        .kv_len = p->kv_len,
        .head_dim = p->head_dim,
        .value_dim = p->value_dim,
        .query = {.data = p->query.data},
        .key = {.data = p->key.data},
        .value = {.data = p->value.data},
        .out = {.data = p->out},
        .lse = {.data = p->lse},
    };
}

/* a * b for numbers from 0 on, or -1 (which stays -1) if it does not fit. */
static int64_t product(int64_t a, int64_t b)
{
    if (a < 0 || b < 0 || (b > 0 && a > INT64_MAX / b))
        return -1;
    return a * b;
}

static int run(const qkv_attention_desc *desc, int64_t repeat)
{
    size_t size;
    qkv_status status = qkv_attention_scratch_size(desc, 1, &size);
    if (status)
        return tool_error("attention: %s", qkv_strerror(status));
    void *scratch = tool_scratch(size);
    double *seconds = tool_alloc(repeat, sizeof *seconds);

    int result = scratch && seconds ? TOOL_OK : TOOL_ERROR;
    for (int64_t i = 0; i < repeat && result == TOOL_OK; i++) {
        const double start = tool_seconds();
        status = qkv_attention(desc, scratch, size);
        seconds[i] = tool_seconds() - start;
        if (status)
            result = tool_error("attention: %s", qkv_strerror(status));
    }
    if (result == TOOL_OK && repeat > 1)
        printf("median %.6f ms of %lld runs, %s\n", 1e3 * tool_median(seconds, repeat),
               (long long)repeat, qkv_isa_name());
    free(seconds);
    free(scratch);
    return result;
}

/* One head's weights by the first two of the library's three steps. */
static qkv_status head_weights(const qkv_attention_desc *desc, const float *queries,
                               const float *keys, float *weights)
{
    const float scale =
        desc->flags & QKV_SCALE_SET ? desc->scale : 1.0f / sqrtf((float)desc->head_dim);
    const int64_t q_len = desc->q_len, kv_len = desc->kv_len, n = desc->head_dim;

    qkv_status status = qkv_dot(queries, n, keys, n, weights, kv_len, q_len, kv_len, n);
    if (status || !(desc->flags & QKV_CAUSAL))
        return status ? status
                      : qkv_scale_softmax(weights, kv_len, weights, kv_len, NULL, q_len, kv_len,
                                          scale);
    for (int64_t i = 0; i < q_len && !status; i++) {
        float *row = weights + i * kv_len;
        const int64_t last = i + kv_len - q_len; /* the last key that query i sees */
        const int64_t visible = last < 0 ? 0 : last + 1;
        status = qkv_scale_softmax(row, kv_len, row, kv_len, NULL, 1, visible, scale);
        for (int64_t j = visible; j < kv_len; j++)
            row[j] = 0.0f;
    }
    return status;
}

static int write_weights(const char *path, const qkv_attention_desc *desc, const struct problem *p)
{
    const int64_t heads = product(p->batch, p->q_heads);
    const int64_t head_size = product(p->q_len, p->kv_len);
    float *weights = tool_alloc(product(heads, head_size), sizeof *weights);
    if (!weights)
        return TOOL_ERROR;

    const int64_t group = p->q_heads / p->kv_heads;
    qkv_status status = QKV_OK;
    for (int64_t h = 0; h < heads && !status; h++)
        status = head_weights(desc, p->query.data + h * p->q_len * p->head_dim,
                              p->key.data + h / group * p->kv_len * p->head_dim,
                              weights + h * head_size);
    const int64_t shape[] = {p->batch, p->q_heads, p->q_len, p->kv_len};
    const int result = status ? tool_error("weights: %s", qkv_strerror(status))
                              : tool_save(path, weights, p->ndim, shape + 4 - p->ndim);
    free(weights);
    return result;
}

static int write_results(const struct options *options, const qkv_attention_desc *desc,
                         const struct problem *p)
{
    const int64_t shape[] = {p->batch, p->q_heads, p->q_len, p->value_dim};
    int result = tool_save(options->out, p->out, p->ndim, shape + 4 - p->ndim);
    if (!result && options->lse)
        result = tool_save(options->lse, p->lse, p->ndim - 1, shape + 4 - p->ndim);
    if (!result && options->weights)
        result = write_weights(options->weights, desc, p);
    return result;
}

static int attend(const struct options *options, struct problem *p)
{
    if (tool_load(options->inputs[0], &p->query) || tool_load(options->inputs[1], &p->key) ||
        tool_load(options->inputs[2], &p->value) || check_shapes(options, p))
        return TOOL_ERROR;

    const int64_t rows = product(product(p->batch, p->q_heads), p->q_len);
    p->out = tool_alloc(product(rows, p->value_dim), sizeof *p->out);
    p->lse = options->lse ? tool_alloc(rows, sizeof *p->lse) : NULL;
    if (!p->out || (options->lse && !p->lse))
        return TOOL_ERROR;

    const qkv_attention_desc desc = describe(options, p);
    const int result = run(&desc, options->repeat);
    return result ? result : write_results(options, &desc, p);
}

static int read_options(int argc, char **argv, struct options *o)
{
    const struct tool_option table[] = {
        {"o", &o->out, NULL},          {"causal", NULL, &o->causal},
        {"isa", &o->isa, NULL},        {"scale", &o->scale_text, NULL},
        {"lse", &o->lse, NULL},        {"repeat", &o->repeat_text, NULL},
        {"weights", &o->weights, NULL}};
    if (tool_options(argc, argv, table, sizeof table / sizeof *table, o->inputs, 3, usage))
        return TOOL_ERROR;
    if (!o->out) {
        fprintf(stderr, "qkv: the output's name is missing: -o O.npy\nusage: %s\n", usage);
        return TOOL_ERROR;
    }
    if (tool_parse_float("--scale", o->scale_text, &o->scale) ||
        tool_parse_count("--repeat", o->repeat_text, 1, 1000000, &o->repeat))
        return TOOL_ERROR;
    return tool_select_isa(o->isa);
}

int tool_attend(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        printf(help, usage);
        return TOOL_OK;
    }
    struct options options = {.repeat = 1};
    if (read_options(argc, argv, &options))
        return TOOL_ERROR;

    struct problem problem = {0};
    const int result = attend(&options, &problem);
    npy_free(&problem.query);
    npy_free(&problem.key);
    npy_free(&problem.value);
    free(problem.out);
    free(problem.lse);
    return result;
}
