/* SPDX-License-Identifier: MIT */
#include "measure.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "limits.h"

/* One run of the loop of multiply-adds takes some microseconds; with threads
 * more, next to which it takes no time to start them. */
enum { FMA_STEPS = 1000, FMA_STEPS_THREADS = 20000 };

typedef struct limit_context {
    const bench_limits *limits;
    const char *data;
    char *to;
    int64_t bytes, to_bytes, copies, copy;
    int64_t fma_steps;
    int threads, variant;
} limit_context;

static void fma_run(void *context, int worker)
{
    (void)worker;
    const limit_context *x = context;
    x->limits->fma(x->fma_steps);
}

static void read_begin(void *context)
{
    limit_context *x = context;
    x->copy = x->copy + 1 < x->copies ? x->copy + 1 : 0;
}

/* Each worker reads its share, in whole cache lines. */
static void read_run(void *context, int worker)
{
    const limit_context *x = context;
    const int64_t lines = x->bytes / 64;
    const int64_t begin = lines * worker / x->threads * 64;
    const int64_t end = lines * (worker + 1) / x->threads * 64;
    x->limits->read[x->variant](x->data + x->copy * x->bytes + begin, end - begin);
}

/* The last way is the C library's, and reading what it leaves. */
static void copy_run(void *context, int worker)
{
    (void)worker;
    const limit_context *x = context;
    if (x->variant < BENCH_COPIES) {
        const int way = x->limits->copy[x->variant] ? x->variant : 0;
        x->limits->copy[way](x->data, x->bytes, x->to, x->to_bytes);
        return;
    }
    const int64_t both = x->to_bytes < x->bytes ? x->to_bytes : x->bytes;
    memcpy(x->to, x->data, (size_t)both);
    x->limits->read[0](x->data + both, x->bytes - both);
}

/* The fastest of several ways to read or copy this much memory is the limit. */
static bench_work fastest(bench_work work, limit_context *x, int variants)
{
    double best = HUGE_VAL;
    int best_variant = 0;
    for (x->variant = 0; x->variant < variants; x->variant++) {
        const double ns = bench_quick(&work);
        if (ns < best) {
            best = ns;
            best_variant = x->variant;
        }
    }
    x->variant = best_variant;
    return work;
}

static bench_work read_work(limit_context *x)
{
    const bench_work work = {
        .begin = read_begin, .run = read_run, .context = x, .one = x->threads == 1};
    return fastest(work, x, BENCH_READS);
}

void bench_warm_up(int isa, double seconds)
{
    const double end = bench_now() + 1e9 * seconds;
    while (bench_now() < end)
        bench_limits_of(isa)->fma(FMA_STEPS);
}

static double bytes_moved(const bench_case *c)
{
    return (double)c->bytes + (c->bound == BENCH_COPY ? (double)c->to_bytes : 0.0);
}

/* The limit of each round beside the work of that round; 'read' is a copy where
 * that is the bound. */
static void judge(const bench_case *c, const bench_times *times, int fma, int read,
                  double fma_flops, bench_result *r)
{
    double fraction[BENCH_ROUNDS_MAX], fma_rate[BENCH_ROUNDS_MAX], read_rate[BENCH_ROUNDS_MAX];
    double fma_time = 0.0, read_time = 0.0;
    for (int i = 0; i < times[0].rounds; i++) {
        const double f = fma ? c->flops * times[fma].round[i] / fma_flops : 0.0;
        const double b = read ? times[read].round[i] : 0.0;
        fma_rate[i] = fma ? fma_flops / times[fma].round[i] : 0.0;
        read_rate[i] = read ? bytes_moved(c) / times[read].round[i] : 0.0;
        fraction[i] = fmax(f, b) / times[0].round[i];
        fma_time += f;
        read_time += b;
    }
    if (!fma && !read)
        return;
    const bool by_fma = fma_time >= read_time;
    r->limit = by_fma ? "fma" : c->bound == BENCH_COPY ? "copy" : "read";
    r->limit_rate = bench_median(by_fma ? fma_rate : read_rate, times[0].rounds);
    r->fraction = bench_median(fraction, times[0].rounds);
}

static void fill(const bench_case *c, bench_times *times, bench_result *r)
{
    r->rounds = times->rounds;
    r->alone = times->alone;
    r->median_ns = bench_median(times->round, times->rounds);
    r->min_ns = times->min;
    r->gflops = c->flops > 0.0 ? c->flops / r->median_ns : BENCH_NONE;
    r->gelems = c->elements > 0.0 ? c->elements / r->median_ns : BENCH_NONE;
    r->gbps = c->bound == BENCH_NO_BOUND ? BENCH_NONE : bytes_moved(c) / r->median_ns;
}

static limit_context limit_context_of(const bench_order *order, const bench_case *c, int threads)
{
    return (limit_context){
        .limits = bench_limits_of(order->isa),
        .data = c->data,
        .bytes = c->bytes,
        .to_bytes = c->to_bytes,
        .copies = c->copies,
        .fma_steps = order->threads > 1 ? FMA_STEPS_THREADS : FMA_STEPS,
        .threads = threads,
    };
}

/* On all threads and on one: the work, multiply-adds, reading. */
enum { WORK_ALL, WORK_ONE, FMA_ALL, FMA_ONE, READ_ALL, READ_ONE, SPEEDUP_WORKS };
_Static_assert((int)SPEEDUP_WORKS <= (int)BENCH_WORKS_MAX, "room for all");

/* How much faster the limit becomes with more threads is how much the work may. */
static void judge_speedup(const bench_case *c, const bench_times *times, double fma_flops,
                          bench_result *r)
{
    const int rounds = times[0].rounds;
    double speedup[BENCH_ROUNDS_MAX], allowed[BENCH_ROUNDS_MAX], fraction[BENCH_ROUNDS_MAX];
    int by_fma = 0;
    for (int i = 0; i < rounds; i++) {
        const double runs = c->flops / fma_flops;
        const double fma_all = times[FMA_ALL].round[i] * runs / r->threads;
        const double fma_one = times[FMA_ONE].round[i] * runs;
        const double roof = fmax(fma_all, times[READ_ALL].round[i]);
        speedup[i] = times[WORK_ONE].round[i] / times[WORK_ALL].round[i];
        allowed[i] = fmax(fma_one, times[READ_ONE].round[i]) / roof;
        allowed[i] = fmin(allowed[i], r->threads);
        fraction[i] = speedup[i] / allowed[i];
        by_fma += fma_all >= times[READ_ALL].round[i];
    }
    r->limit = 2 * by_fma > rounds ? "fma" : "read";
    r->speedup = bench_median(speedup, rounds);
    r->speedup_limit = bench_median(allowed, rounds);
    r->fraction = bench_median(fraction, rounds);
}

static void measure_speedup(const bench_order *order, const bench_case *c, bench_result *r)
{
    limit_context all = limit_context_of(order, c, order->threads);
    limit_context one = limit_context_of(order, c, 1);
    const bench_work works[SPEEDUP_WORKS] = {
        [WORK_ALL] = c->work,
        [WORK_ONE] = {.run = c->run_one, .context = c->work.context, .one = true},
        [FMA_ALL] = {.run = fma_run, .context = &all},
        [FMA_ONE] = {.run = fma_run, .context = &one, .one = true},
        [READ_ALL] = read_work(&all),
        [READ_ONE] = read_work(&one),
    };
    bench_times times[BENCH_WORKS_MAX];
    bench_measure(works, SPEEDUP_WORKS, order->seconds, order->rounds, times);
    judge_speedup(c, times, (double)all.limits->fma_flops * (double)all.fma_steps, r);
    fill(c, times, r);
}

static void measure(const bench_order *order, const bench_case *c, bench_result *r)
{
    limit_context context = limit_context_of(order, c, order->threads);
    bench_work works[BENCH_WORKS_MAX] = {c->work};
    bench_times times[BENCH_WORKS_MAX];
    int n = 1, fma = 0, read = 0;
    if (c->bound == BENCH_FMA || c->bound == BENCH_ROOF) {
        fma = n++;
        works[fma] = (bench_work){.run = fma_run, .context = &context};
    }
    if (c->bound == BENCH_READ || c->bound == BENCH_ROOF) {
        read = n++;
        works[read] = read_work(&context);
    }
    bench_arena to = {0};
    if (c->bound == BENCH_COPY) {
        /* Elsewhere: stores past the caches would take the work's output out of them. */
        to = bench_arena_new(c->to_bytes / 4);
        context.to = to.base;
        read = n++;
        const bench_work copy = {.run = copy_run, .context = &context};
        works[read] = fastest(copy, &context, BENCH_COPIES + 1);
    }
    bench_measure(works, n, order->seconds, order->rounds, times);
    free(to.base);

    const double fma_flops =
        (double)context.limits->fma_flops * (double)context.fma_steps * (double)order->threads;
    judge(c, times, fma, read, fma_flops, r);
    fill(c, times, r);
}

const char *bench_dtype_name(int32_t dtype)
{
    static const char *const names[] = {"f32", "f16",     "bf16",    "q8_0",
                                        "i8",  "f8_e4m3", "f8_e5m2", "q4_0"};
    return names[dtype];
}

static bool make(const bench_order *order, bench_case *c)
{
    const bench_wish wish = {
        .shape = order->shape,
        .kernels = qkv_kernels_of(order->isa),
        .threads = order->threads,
        .dtype = order->dtype,
        .cold = order->cold,
    };
    if (order->dtype != QKV_F32 && !order->entry->dtypes)
        return false;
    *c = (bench_case){.kernel = order->entry->name};
    if (qkv_isa_select(wish.kernels->name) != QKV_OK)
        abort(); /* only usable ISAs are ordered */
    return order->entry->make(&wish, c);
}

bool bench_run_case(const bench_order *order)
{
    bench_case c;
    if (!make(order, &c))
        return false;
    bench_run_once(&c.work);
    c.destroy(c.work.context);
    return true;
}

bool bench_measure_case(const bench_order *order, bench_result *result)
{
    bench_case c;
    if (!make(order, &c))
        return false;
    *result = (bench_result){
        .kernel = c.kernel,
        .shape = order->shape->name,
        .isa = qkv_isa_name(),
        .dtype = bench_dtype_name(order->dtype),
        .threads = order->threads,
        .limit = "none",
        .limit_rate = BENCH_NONE,
        .fraction = BENCH_NONE,
        .speedup = BENCH_NONE,
        .speedup_limit = BENCH_NONE,
        .max_error = BENCH_NONE,
    };
    if (order->by_fma)
        c.bound = BENCH_FMA;
    if (order->speedup)
        measure_speedup(order, &c, result);
    else
        measure(order, &c, result);
    if (c.max_error)
        result->max_error = c.max_error(c.work.context);
    c.destroy(c.work.context);
    return true;
}
