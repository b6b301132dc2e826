/* SPDX-License-Identifier: MIT */
#include "cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "limits.h"

static const bench_entry entries[] = {
#define QKV_KERNEL(op, scalar, avx2, avx512, neon) {#op, false, false, bench_make_##op},
#include "kernels.def"
#undef QKV_KERNEL
    {"qkv_dot", false, false, bench_make_dot},
    {"qkv_scale_softmax", false, false, bench_make_scale_softmax},
    {"qkv_weighted_sum", false, false, bench_make_weighted_sum},
    {"qkv_attention", true, true, bench_make_attention},
    {"qkv_kv_append", false, true, bench_make_kv_append},
    {"qkv_kv_append_rotary", false, true, bench_make_kv_append_rotary},
    {"qkv_project", false, true, bench_make_project},
    {"qkv_self_attention", false, true, bench_make_self_attention},
};

int bench_entry_count(void)
{
    return (int)(sizeof entries / sizeof *entries);
}

const bench_entry *bench_entry_at(int index)
{
    return &entries[index];
}

static void *checked(void *memory)
{
    if (!memory) {
        fputs("qkv-bench: out of memory\n", stderr);
        exit(1);
    }
    return memory;
}

void *bench_alloc(size_t bytes)
{
    return checked(calloc(1, bytes));
}

void bench_keep(float result)
{
    bench_sink = result;
}

enum { LINE = 64, PAGE = 4096 };

bench_arena bench_arena_new(int64_t floats)
{
    const int64_t bytes = (floats * 4 + 17 * LINE + PAGE) / PAGE * PAGE;
    char *base = checked(aligned_alloc(PAGE, (size_t)bytes));
    memset(base, 0, (size_t)bytes);
    return (bench_arena){.base = base, .size = bytes};
}

float *bench_take(bench_arena *arena, int64_t floats)
{
    char *p = arena->base + arena->used;
    arena->used += (floats * 4 + LINE - 1) / LINE * LINE;
    if (arena->used > arena->size)
        abort(); /* the case asked for too little */
    return (float *)(void *)p;
}

/* splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* The sum of four 16-bit uniforms is close enough to normal here. */
void bench_fill_normal(float *x, int64_t n, uint64_t seed)
{
    uint64_t state = seed;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t z = next(&state);
        const uint64_t sum = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);
        x[i] = ((float)sum / 65536.0f - 2.0f) * 1.7320508f;
    }
}

void bench_fill_range(float *x, int64_t n, float low, float high, uint64_t seed)
{
    uint64_t state = seed;
    for (int64_t i = 0; i < n; i++)
        x[i] = low + (high - low) * ((float)(next(&state) >> 40) / 16777216.0f);
}

void bench_shuffle(int32_t *x, int64_t n, uint64_t seed)
{
    uint64_t state = seed;
    for (int64_t i = n - 1; i > 0; i--) {
        const int64_t j = (int64_t)(next(&state) % (uint64_t)(i + 1));
        const int32_t kept = x[i];
        x[i] = x[j];
        x[j] = kept;
    }
}

void bench_free_memory(void *context)
{
    bench_memory *x = context;
    free(x->in.base);
    free(x->out.base);
    free(x);
}

void bench_finish(bench_case *c, bench_memory *context, void (*run)(void *, int),
                  double (*max_error)(void *))
{
    c->data = context->in.base;
    c->bytes = context->in.used;
    c->copies = 1;
    c->work = (bench_work){.run = run, .context = context};
    c->max_error = max_error;
    c->destroy = bench_free_memory;
}
