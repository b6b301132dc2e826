/* SPDX-License-Identifier: MIT */
#include "shapes.h"

#include <stdio.h>
#include <string.h>

/* q_heads, kv_heads, q_len, kv_len, head_dim. P: prompt, D: decoding one token. */
static const struct {
    const char *name;
    int16_t q_heads, kv_heads;
    int32_t q_len, kv_len, head_dim;
    bool causal;
} named[] = {
    {"P512", 8, 8, 512, 512, 64, false},     {"P512c", 8, 8, 512, 512, 64, true},
    {"P1024", 8, 2, 1024, 1024, 128, false}, {"P1024c", 8, 2, 1024, 1024, 128, true},
    {"P4096", 8, 2, 4096, 4096, 128, false}, {"P4096c", 8, 2, 4096, 4096, 128, true},
    {"ViT197", 12, 12, 197, 197, 64, false}, {"D1024", 32, 8, 1, 1024, 128, false},
    {"D4096", 32, 8, 1, 4096, 128, false},   {"D32768", 32, 8, 1, 32768, 128, false},
    {"Dmha512", 12, 12, 1, 512, 64, false},
};

bool bench_shape_named(int index, bench_shape *shape)
{
    if (index < 0 || index >= (int)(sizeof named / sizeof *named))
        return false;
    *shape = (bench_shape){
        .causal = named[index].causal,
        .q_heads = named[index].q_heads,
        .kv_heads = named[index].kv_heads,
        .q_len = named[index].q_len,
        .kv_len = named[index].kv_len,
        .head_dim = named[index].head_dim,
        .value_dim = named[index].head_dim,
    };
    snprintf(shape->name, sizeof shape->name, "%s", named[index].name);
    return true;
}

/* Nothing that is measured needs more; it keeps every product in range. */
#define SIZE_LIMIT (INT64_C(1) << 24)

static bool in_range(const int64_t *sizes, int n)
{
    double product = 1.0;
    for (int i = 0; i < n; i++) {
        if (sizes[i] < 1 || sizes[i] > SIZE_LIMIT)
            return false;
        product *= (double)sizes[i];
    }
    return product < 1e15;
}

static bool parse_attention(const char *text, bench_shape *s)
{
    long long v[6];
    char tail[3] = "";
    const int n = sscanf(text, "%lld,%lld,%lld,%lld,%lld,%lld%2s", &v[0], &v[1], &v[2], &v[3],
                         &v[4], &v[5], tail);
    if (n < 6 || (n == 7 && strcmp(tail, "c") != 0))
        return false;
    const int64_t sizes[] = {v[0], v[1], v[2], v[3], v[4], v[5]};
    if (!in_range(sizes, 6) || v[0] % v[1] != 0)
        return false;
    s->causal = n == 7;
    s->q_heads = v[0];
    s->kv_heads = v[1];
    s->q_len = v[2];
    s->kv_len = v[3];
    s->head_dim = v[4];
    s->value_dim = v[5];
    return true;
}

static bool parse_product(const char *text, bench_shape *s)
{
    long long v[3];
    char tail[2] = "";
    if (sscanf(text, "%lldx%lldx%lld%1s", &v[0], &v[1], &v[2], tail) != 3)
        return false;
    const int64_t sizes[] = {v[0], v[1], v[2]};
    if (!in_range(sizes, 3))
        return false;
    s->product = true;
    s->rows = v[0];
    s->in_dim = v[1];
    s->out_dim = v[2];
    return true;
}

bool bench_shape_parse(const char *text, bench_shape *shape)
{
    for (int i = 0; bench_shape_named(i, shape); i++)
        if (strcmp(text, shape->name) == 0)
            return true;
    *shape = (bench_shape){0};
    if (strlen(text) >= sizeof shape->name)
        return false;
    snprintf(shape->name, sizeof shape->name, "%s", text);
    return parse_attention(text, shape) || parse_product(text, shape);
}

int64_t bench_shape_visible(const bench_shape *s, int64_t i)
{
    if (!s->causal)
        return s->kv_len;
    const int64_t keys = i + 1 + s->kv_len - s->q_len;
    return keys < 0 ? 0 : keys < s->kv_len ? keys : s->kv_len;
}

double bench_shape_pairs(const bench_shape *s)
{
    double pairs = 0.0;
    for (int64_t i = 0; i < s->q_len; i++)
        pairs += (double)bench_shape_visible(s, i);
    return pairs;
}
