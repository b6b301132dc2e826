/* SPDX-License-Identifier: MIT */
/*
 * qkv layer: the self-attention layer of a real language model. Computes it
 * from recorded inputs and weights, compares every number with PyTorch's and
 * with f64, and shows which token attends to which.
 */
#include "layer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "qkv layer [--data DIR] [--input sentence|text] [--isa NAME] [--head N|mean]\n"
    "                 [--token WORD] [--svg FILE] [--no-map]";

static const char help[] =
    "usage: %s\n\n"
    "Computes a self-attention layer of a language model with qkv, compares all of\n"
    "its numbers with PyTorch's, and shows which token attends to which.\n\n"
    "  --data DIR     the recorded layer (default: tests/data/minilm)\n"
    "  --input NAME   sentence (default) or text: which recorded input\n"
    "  --isa NAME     use this instruction set (see qkv info)\n"
    "  --token WORD   show what this token attends to in every head (default: it)\n"
    "  --head N|mean  the head of the map (default: the one where the token attends\n"
    "                 most to one other word), or the mean of all heads\n"
    "  --svg FILE     write a picture of the weights of every head\n"
    "  --no-map       print the comparison and the time only\n\n"
    "Exit code 1 if a number differs from PyTorch's by more than its tolerance,\n"
    "which follows from the rounding errors of both (bench/tool/layer_reference.c).\n";

struct options {
    const char *folder, *input, *isa, *head, *token, *svg;
    bool no_map;
};

/* What qkv computes. */
struct result {
    float *out, *context, *weights;
    double seconds; /* median time of one layer */
    int64_t runs;
};

/* ---------------------------------------------------------------- computing */

static qkv_linear linear(const struct layer_data *data, int matrix)
{
    return (qkv_linear){.weight = data->w[matrix].data, .bias = data->b[matrix].data};
}

static qkv_self_attention_desc describe(const struct layer_data *data, float *out)
{
    return (qkv_self_attention_desc){
        .size = sizeof(qkv_self_attention_desc),
        .seq_len = data->tokens,
        .model_dim = data->hidden,
        .q_heads = data->heads,
        .head_dim = data->head_dim,
        .input = {.data = data->x.data},
        .wq = linear(data, LAYER_Q),
        .wk = linear(data, LAYER_K),
        .wv = linear(data, LAYER_V),
        .wo = linear(data, LAYER_O),
        .out = {.data = out},
    };
}

/* Runs a layer once, and then again for the median time if 'result' is given. */
static qkv_status run_layer(const qkv_self_attention_desc *desc, struct result *result)
{
    enum { MOST_RUNS = 1000 };
    double seconds[MOST_RUNS], spent = 0.0;
    size_t size;
    qkv_status status = qkv_self_attention_scratch_size(desc, &size);
    void *scratch = status ? NULL : tool_scratch(size);
    if (!scratch)
        return status ? status : QKV_E_SCRATCH;

    status = qkv_self_attention(desc, scratch, size);
    if (result) {
        for (result->runs = 0; !status && result->runs < MOST_RUNS && spent < 0.5;) {
            const double start = tool_seconds();
            status = qkv_self_attention(desc, scratch, size);
            seconds[result->runs] = tool_seconds() - start;
            spent += seconds[result->runs++];
        }
        result->seconds = result->runs ? tool_median(seconds, result->runs) : 0.0;
    }
    free(scratch);
    return status;
}

/* One projection as [heads][tokens][head_dim]. */
static qkv_status project(const struct layer_data *data, int matrix, float *out)
{
    const qkv_project_desc desc = {
        .size = sizeof desc,
        .rows = data->tokens,
        .in_dim = data->hidden,
        .heads = data->heads,
        .head_dim = data->head_dim,
        .input = {.data = data->x.data},
        .linear = linear(data, matrix),
        .out = {.data = out},
    };
    size_t size;
    qkv_status status = qkv_project_scratch_size(&desc, &size);
    void *scratch = status ? NULL : tool_scratch(size);
    if (!status)
        status = scratch ? qkv_project(&desc, scratch, size) : QKV_E_SCRATCH;
    free(scratch);
    return status;
}

/* The fused layer never stores its weights: here they come step by step. */
static qkv_status compute_weights(const struct layer_data *data, float *q, float *k, float *weights)
{
    const int64_t tokens = data->tokens, n = data->head_dim;
    qkv_status status = project(data, LAYER_Q, q);
    if (!status)
        status = project(data, LAYER_K, k);
    for (int64_t h = 0; h < data->heads && !status; h++) {
        float *head = weights + h * tokens * tokens;
        status =
            qkv_dot(q + h * tokens * n, n, k + h * tokens * n, n, head, tokens, tokens, tokens, n);
        if (!status)
            status = qkv_scale_softmax(head, tokens, head, tokens, NULL, tokens, tokens,
                                       1.0f / sqrtf((float)n));
    }
    return status;
}

static int compute(const struct layer_data *data, struct result *result)
{
    const int64_t elements = data->x.count;
    result->out = tool_alloc(elements, sizeof *result->out);
    result->context = tool_alloc(elements, sizeof *result->context);
    result->weights = tool_alloc(data->weights.count, sizeof *result->weights);
    float *q = tool_alloc(elements, sizeof *q);
    float *k = tool_alloc(elements, sizeof *k);

    int code = TOOL_ERROR;
    if (result->out && result->context && result->weights && q && k) {
        qkv_self_attention_desc desc = describe(data, result->out);
        qkv_status status = run_layer(&desc, result);
        desc.wo = (qkv_linear){0};
        desc.out.data = result->context;
        if (!status)
            status = run_layer(&desc, NULL);
        if (!status)
            status = compute_weights(data, q, k, result->weights);
        code = status ? tool_error("the layer: %s", qkv_strerror(status)) : TOOL_OK;
    }
    free(q);
    free(k);
    return code;
}

/* ---------------------------------------------------------------- comparing */

/* Prints one line; true if every element is within its tolerance. */
static bool compare(const char *name, const float *ours, const struct npy *theirs,
                    const double *exact, const double *tolerance)
{
    double difference = 0.0, share = 0.0, our_error = 0.0, their_error = 0.0;
    bool within = true;
    for (int64_t e = 0; e < theirs->count; e++) {
        const double a = (double)ours[e], b = (double)theirs->data[e];
        within &= fabs(a - b) <= tolerance[e]; /* false for a NaN */
        difference = fmax(difference, fabs(a - b));
        share = fmax(share, fabs(a - b) / tolerance[e]);
        our_error = fmax(our_error, fabs(a - exact[e]));
        their_error = fmax(their_error, fabs(b - exact[e]));
    }
    printf("  %-8s %14.1e %13.1f %%  %13.1e %13.1e%s\n", name, difference, 100.0 * share, our_error,
           their_error, within ? "" : "  BEYOND THE TOLERANCE");
    return within;
}

static int compare_all(const struct layer_data *data, const struct result *result)
{
    struct layer_reference reference;
    if (layer_reference(data, &reference))
        return TOOL_ERROR;

    printf("largest      from PyTorch    of tolerance    from exact   PyTorch from\n"
           "difference                                                       exact\n");
    bool within =
        compare("output", result->out, &data->out, reference.out, reference.out_tolerance);
    within &= compare("context", result->context, &data->context, reference.context,
                      reference.context_tolerance);
    within &= compare("weights", result->weights, &data->weights, reference.weights,
                      reference.weights_tolerance);
    layer_reference_free(&reference);
    return within ? TOOL_OK : TOOL_MISMATCH;
}

/* ------------------------------------------------------------------ showing */

static int64_t find_word(const struct layer_data *data, const char *word)
{
    for (int64_t i = 0; i < data->tokens; i++)
        if (strcmp(data->words[i], word) == 0)
            return i;
    return -1;
}

/* [CLS] and [SEP] are no words. */
static bool is_special(const char *word)
{
    return word[0] == '[' && word[1] != '\0' && word[strlen(word) - 1] == ']';
}

/* The head where 'token' attends most to one other word, and to which. */
static int64_t sharpest_head(const struct layer_data *data, const float *weights, int64_t token,
                             int64_t *target)
{
    int64_t best = 0;
    float largest = -1.0f;
    *target = token;
    for (int64_t h = 0; h < data->heads; h++) {
        const float *row = weights + (h * data->tokens + token) * data->tokens;
        for (int64_t j = 0; j < data->tokens; j++) {
            if (j != token && !is_special(data->words[j]) && row[j] > largest) {
                largest = row[j];
                best = h;
                *target = j;
            }
        }
    }
    return best;
}

static int print_mean_map(const struct layer_data *data, const float *weights, struct style style)
{
    const int64_t square = data->tokens * data->tokens;
    float *mean = tool_alloc(square, sizeof *mean);
    if (!mean)
        return TOOL_ERROR;
    for (int64_t e = 0; e < square; e++) {
        double sum = 0.0;
        for (int64_t h = 0; h < data->heads; h++)
            sum += (double)weights[h * square + e];
        mean[e] = (float)(sum / (double)data->heads);
    }
    printf("\nWhat each token attends to, mean of the %lld heads:\n", (long long)data->heads);
    const int result = map_print(data, mean, style);
    free(mean);
    return result;
}

/* The token's heads first, then the map of one head or the mean. */
static int show(const struct options *options, const struct layer_data *data, const float *weights)
{
    const struct style style = style_of_terminal();
    const int64_t token = find_word(data, options->token ? options->token : "it");
    int64_t head = -1, target = 0;

    if (token < 0 && options->token)
        return tool_error("--token: the input has no token '%s'", options->token);
    if (token >= 0) {
        head = sharpest_head(data, weights, token, &target);
        printf("\nWhat \"%s\" (token %lld) attends to, head by head:\n", data->words[token],
               (long long)token);
        map_print_token(data, weights, token, style);
        printf("\nHead %lld gives %.2f of the attention of \"%s\" to \"%s\".\n", (long long)head,
               (double)weights[(head * data->tokens + token) * data->tokens + target],
               data->words[token], data->words[target]);
    }
    if (options->head && strcmp(options->head, "mean") == 0)
        head = -1;
    else if (tool_parse_count("--head", options->head, 0, data->heads - 1, &head))
        return TOOL_ERROR;
    if (head < 0)
        return print_mean_map(data, weights, style);
    printf("\nWhat each token attends to in head %lld:\n", (long long)head);
    return map_print(data, weights + head * data->tokens * data->tokens, style);
}

static int run(const struct options *options, const struct layer_data *data, struct result *result)
{
    if (compute(data, result))
        return TOOL_ERROR;
    printf("A self-attention layer of a language model: %lld tokens, hidden size %lld,\n"
           "%lld heads of %lld, f32, ISA %s\n\n",
           (long long)data->tokens, (long long)data->hidden, (long long)data->heads,
           (long long)data->head_dim, qkv_isa_name());
    const int verdict = compare_all(data, result);
    if (verdict == TOOL_ERROR)
        return TOOL_ERROR;
    printf("\ntime  %.3f ms a layer (median of %lld, one thread), %.0f tokens/s\n",
           1e3 * result->seconds, (long long)result->runs, (double)data->tokens / result->seconds);

    if (!options->no_map && show(options, data, result->weights))
        return TOOL_ERROR;
    if (options->svg && heatmap_write(options->svg, data, result->weights))
        return TOOL_ERROR;
    if (verdict == TOOL_MISMATCH)
        (void)tool_error("a result differs from PyTorch's by more than its tolerance");
    return verdict;
}

int tool_layer(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        printf(help, usage);
        return TOOL_OK;
    }
    struct options options = {.folder = "tests/data/minilm", .input = "sentence"};
    const struct tool_option table[] = {
        {"data", &options.folder, NULL},   {"input", &options.input, NULL},
        {"isa", &options.isa, NULL},       {"head", &options.head, NULL},
        {"token", &options.token, NULL},   {"svg", &options.svg, NULL},
        {"no-map", NULL, &options.no_map},
    };
    if (tool_options(argc, argv, table, sizeof table / sizeof *table, NULL, 0, usage) ||
        tool_select_isa(options.isa))
        return TOOL_ERROR;

    struct layer_data data;
    struct result result = {0};
    int code = layer_load(&data, options.folder, options.input);
    if (code == TOOL_OK)
        code = run(&options, &data, &result);
    free(result.out);
    free(result.context);
    free(result.weights);
    layer_free(&data);
    return code;
}
