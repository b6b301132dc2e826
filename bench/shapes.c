/* SPDX-License-Identifier: MIT */
#include "shapes.h"

#include <stdio.h>
#include <stdlib.h>
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

/* A server's batch: sequences of all lengths, in pages. */
static const char batch_name[] = "Dbatch";
static const char batch_text[] = "32,8,1,17+100+511+1000+1024+3000+5000+9000,128,128p16";

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

/* "17+100+9": one length or several. */
static bool parse_lens(const char *text, bench_shape *s)
{
    for (s->sequences = 0; s->sequences < BENCH_SEQUENCES_MAX;) {
        char *end;
        const int64_t len = strtoll(text, &end, 10);
        if (*text == '+' || end == text || len < 1 || len > SIZE_LIMIT || (*end && *end != '+'))
            return false;
        s->lens[s->sequences++] = len;
        s->kv_len = len > s->kv_len ? len : s->kv_len;
        if (!*end)
            return true;
        text = end + 1;
    }
    return false;
}

/* What follows the sizes: c, pN or both. */
static bool parse_tail(const char *text, bench_shape *s)
{
    s->causal = *text == 'c';
    text += s->causal;
    if (!*text)
        return true;
    char *end;
    s->page_size = *text == 'p' ? strtoll(text + 1, &end, 10) : 0;
    return s->page_size >= 8 && s->page_size <= 256 && !(s->page_size & (s->page_size - 1)) &&
           !*end;
}

static bool parse_attention(const char *text, bench_shape *s)
{
    long long v[5];
    char lens[64], tail[8] = "";
    const int n = sscanf(text, "%lld,%lld,%lld,%63[0-9+],%lld,%lld%7s", &v[0], &v[1], &v[2], lens,
                         &v[3], &v[4], tail);
    if (n < 6 || !parse_lens(lens, s) || !parse_tail(tail, s))
        return false;
    s->q_heads = v[0];
    s->kv_heads = v[1];
    s->q_len = v[2];
    s->head_dim = v[3];
    s->value_dim = v[4];
    const int64_t sizes[] = {v[0], v[1], v[2], bench_shape_keys(s), v[3], v[4]};
    return in_range(sizes, 6) && v[0] % v[1] == 0;
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

static bool parse_sizes(const char *text, bench_shape *shape)
{
    *shape = (bench_shape){0};
    if (strlen(text) >= sizeof shape->name)
        return false;
    snprintf(shape->name, sizeof shape->name, "%s", text);
    return parse_attention(text, shape) || parse_product(text, shape);
}

bool bench_shape_named(int index, bench_shape *shape)
{
    const int names = (int)(sizeof named / sizeof *named);
    if (index < 0 || index > names)
        return false;
    if (index == names) {
        const bool known = parse_sizes(batch_text, shape);
        snprintf(shape->name, sizeof shape->name, "%s", batch_name);
        return known;
    }
    *shape = (bench_shape){
        .causal = named[index].causal,
        .q_heads = named[index].q_heads,
        .kv_heads = named[index].kv_heads,
        .q_len = named[index].q_len,
        .kv_len = named[index].kv_len,
        .head_dim = named[index].head_dim,
        .value_dim = named[index].head_dim,
        .sequences = 1,
        .lens = {named[index].kv_len},
    };
    snprintf(shape->name, sizeof shape->name, "%s", named[index].name);
    return true;
}

bool bench_shape_parse(const char *text, bench_shape *shape)
{
    for (int i = 0; bench_shape_named(i, shape); i++)
        if (strcmp(text, shape->name) == 0)
            return true;
    return parse_sizes(text, shape);
}

bool bench_shape_is_batch(const bench_shape *s)
{
    return s->sequences > 1 || s->page_size;
}

int64_t bench_shape_keys(const bench_shape *s)
{
    int64_t keys = 0;
    for (int b = 0; b < s->sequences; b++)
        keys += s->lens[b];
    return keys;
}

int64_t bench_shape_pages(const bench_shape *s)
{
    int64_t pages = 0;
    for (int b = 0; s->page_size && b < s->sequences; b++)
        pages += (s->lens[b] + s->page_size - 1) / s->page_size;
    return pages;
}

int64_t bench_shape_visible(const bench_shape *s, int sequence, int64_t i)
{
    const int64_t len = s->lens[sequence];
    if (!s->causal)
        return len;
    const int64_t keys = i + 1 + len - s->q_len;
    return keys < 0 ? 0 : keys < len ? keys : len;
}

double bench_shape_pairs(const bench_shape *s)
{
    double pairs = 0.0;
    for (int b = 0; b < s->sequences; b++)
        for (int64_t i = 0; i < s->q_len; i++)
            pairs += (double)bench_shape_visible(s, b, i);
    return pairs;
}
