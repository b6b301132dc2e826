/* SPDX-License-Identifier: MIT */
/*
 * A check without a test framework, for places where Criterion does not run:
 * emulated processors, other ways to link or load the library, ThreadSanitizer,
 * and runs of hours. It uses the public header and the f64 oracle alone.
 *
 * usage: selfcheck [--expect ISA] [--cases N] [--threads N] [--fork] [--seconds S]
 *
 *   --expect ISA   the automatic choice must be ISA
 *   --cases N      random problems on each ISA against the oracle (24)
 *   --threads N    that many threads make the first call of all at once (1)
 *   --fork         a child of the process must compute the same bits
 *   --seconds S    then N threads go on with random problems for so long: the
 *                  bits must stay those of the first time, and the memory of
 *                  the process must not grow
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <qkv/qkv.h>

#include "oracle/oracle.h"

static void die(const char *what)
{
    fprintf(stderr, "selfcheck: %s (%s)\n", what, qkv_isa_name());
    exit(1);
}

static void check(bool condition, const char *what)
{
    if (!condition)
        die(what);
}

static void *allocate(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, QKV_SCRATCH_ALIGN, bytes + 1))
        die("no memory");
    return memory;
}

/* --------------------------------------------------------------- problems */

/* splitmix64 */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static int64_t between(uint64_t *state, int64_t low, int64_t high)
{
    return low + (int64_t)(next(state) % (uint64_t)(high - low + 1));
}

static float *random_floats(uint64_t *state, int64_t n)
{
    float *x = allocate((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)((double)(next(state) >> 11) * 0x1p-51 - 2.0);
    return x;
}

typedef struct problem {
    qkv_attention_desc desc;
    float *q, *k, *v, *out, *lse;
    int64_t rows, outputs;
} problem;

/* The problem that a seed stands for: every kind of head sizes and lengths. */
static problem make_problem(uint64_t seed)
{
    uint64_t state = seed * UINT64_C(0x2545f4914f6cdd1d) + 1;
    const int64_t kv_heads = between(&state, 1, 3), group = between(&state, 1, 4);
    const int64_t batch = between(&state, 1, 2), kv_len = between(&state, 0, seed % 4 ? 90 : 700);
    const int64_t q_len = between(&state, 1, seed % 3 ? 6 : 60);
    const int64_t dim = between(&state, 1, 96), value_dim = between(&state, 1, 96);
    problem p = {.rows = batch * kv_heads * group * q_len};
    p.outputs = p.rows * value_dim;
    p.q = random_floats(&state, p.rows * dim);
    p.k = random_floats(&state, batch * kv_heads * kv_len * dim);
    p.v = random_floats(&state, batch * kv_heads * kv_len * value_dim);
    p.out = allocate((size_t)p.outputs * sizeof *p.out);
    p.lse = allocate((size_t)p.rows * sizeof *p.lse);
    p.desc = (qkv_attention_desc){.size = sizeof p.desc,
                                  .flags = seed % 2 ? QKV_CAUSAL : 0,
                                  .batch = batch,
                                  .q_heads = kv_heads * group,
                                  .kv_heads = kv_heads,
                                  .q_len = q_len,
                                  .kv_len = kv_len,
                                  .head_dim = dim,
                                  .value_dim = value_dim,
                                  .query = {.data = p.q},
                                  .key = {.data = p.k},
                                  .value = {.data = p.v},
                                  .out = {.data = p.out},
                                  .lse = {.data = p.lse}};
    return p;
}

static void free_problem(problem *p)
{
    free(p->q);
    free(p->k);
    free(p->v);
    free(p->out);
    free(p->lse);
}

static void run_problem(problem *p)
{
    size_t bytes = 0;
    check(qkv_attention_scratch_size(&p->desc, 1, &bytes) == QKV_OK, "no scratch size");
    void *scratch = allocate(bytes);
    check(qkv_attention(&p->desc, scratch, bytes) == QKV_OK, "qkv_attention() fails");
    free(scratch);
}

/* FNV-1a over the outputs' bits. */
static uint64_t hash_of(const problem *p)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    const float *const parts[] = {p->out, p->lse};
    const int64_t counts[] = {p->outputs, p->rows};
    for (int part = 0; part < 2; part++) {
        const unsigned char *bytes = (const unsigned char *)parts[part];
        for (int64_t i = 0; i < counts[part] * (int64_t)sizeof(float); i++)
            hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static uint64_t bits_of_seed(uint64_t seed)
{
    problem p = make_problem(seed);
    run_problem(&p);
    const uint64_t hash = hash_of(&p);
    free_problem(&p);
    return hash;
}

/* -------------------------------------------------------------- the oracle */

static double *doubles_of(const float *x, int64_t n)
{
    double *all = allocate((size_t)n * sizeof *all);
    for (int64_t i = 0; i < n; i++)
        all[i] = (double)x[i];
    return all;
}

static void expect(const float *got, const double *want, const double *bound, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        check(isinf(want[i]) ? (double)got[i] == want[i]
                             : fabs((double)got[i] - want[i]) <= bound[i],
              "a result is not within its bound");
}

static void check_problem(uint64_t seed)
{
    problem p = make_problem(seed);
    const qkv_attention_desc *d = &p.desc;
    oracle_attention o = {
        .batch = d->batch,
        .q_heads = d->q_heads,
        .kv_heads = d->kv_heads,
        .q_len = d->q_len,
        .kv_len = d->kv_len,
        .head_dim = d->head_dim,
        .value_dim = d->value_dim,
        .causal = d->flags & QKV_CAUSAL,
        .scale = 1.0 / sqrt((double)d->head_dim),
        .q = doubles_of(p.q, p.rows * d->head_dim),
        .k = doubles_of(p.k, d->batch * d->kv_heads * d->kv_len * d->head_dim),
        .v = doubles_of(p.v, d->batch * d->kv_heads * d->kv_len * d->value_dim),
        .out = allocate((size_t)p.outputs * sizeof(double)),
        .out_bound = allocate((size_t)p.outputs * sizeof(double)),
        .lse = allocate((size_t)p.rows * sizeof(double)),
        .lse_bound = allocate((size_t)p.rows * sizeof(double)),
    };
    oracle_attention_run(&o);
    run_problem(&p);
    expect(p.out, o.out, o.out_bound, p.outputs);
    expect(p.lse, o.lse, o.lse_bound, p.rows);
    free((void *)(uintptr_t)o.q);
    free((void *)(uintptr_t)o.k);
    free((void *)(uintptr_t)o.v);
    free(o.out);
    free(o.out_bound);
    free(o.lse);
    free(o.lse_bound);
    free_problem(&p);
}

/* ---------------------------------------------------------------- threads */

enum { SEEDS = 64, MOST_THREADS = 64 };
static _Atomic uint64_t first_bits[SEEDS];
static atomic_bool stop, go;
static _Atomic int64_t runs;
static const char *_Atomic chosen[MOST_THREADS];

/* The bits that a seed had the first time, or has them now for the first time. */
static void check_bits(uint64_t seed)
{
    const uint64_t hash = bits_of_seed(seed) | 1;
    uint64_t expected = 0;
    check(atomic_compare_exchange_strong(&first_bits[seed], &expected, hash) || expected == hash,
          "other bits than the first time");
    atomic_fetch_add(&runs, 1);
}

static void *work(void *argument)
{
    const uintptr_t number = (uintptr_t)argument;
    uint64_t state = number;
    while (!atomic_load(&go))
        continue;
    chosen[number] = qkv_isa_name(); /* the first call of the process, with the others' */
    check_bits(number % SEEDS);
    while (!atomic_load(&stop))
        check_bits(next(&state) % SEEDS);
    return NULL;
}

static long most_memory(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

static void watch(double seconds)
{
    const struct timespec pause = {.tv_nsec = 100 * 1000 * 1000};
    const time_t begin = time(NULL);
    long warm = 0;
    while (difftime(time(NULL), begin) < seconds) {
        nanosleep(&pause, NULL);
        /* Until every problem has been run, the largest may be still to come. */
        if (!warm && atomic_load(&runs) > 16 * SEEDS)
            warm = most_memory();
    }
    if (warm) /* KiB; an allocation kept a call would be far more */
        check(most_memory() <= warm + warm / 8 + 4096, "the memory grows");
}

static void run_threads(int64_t threads, double seconds)
{
    pthread_t all[MOST_THREADS];
    for (int64_t i = 0; i < threads; i++)
        check(pthread_create(&all[i], NULL, work, (void *)(uintptr_t)i) == 0, "no thread");
    atomic_store(&go, true);
    watch(seconds);
    atomic_store(&stop, true);
    for (int64_t i = 0; i < threads; i++) {
        pthread_join(all[i], NULL);
        check(strcmp(chosen[i], chosen[0]) == 0, "threads chose different ISAs");
    }
}

/* ------------------------------------------------------------------ main */

static int64_t check_isas(int64_t cases)
{
    int64_t isas = 0;
    for (int32_t i = 0; i < qkv_isa_count(); i++) {
        qkv_isa_info info;
        check(qkv_isa_get(i, &info) == QKV_OK, "qkv_isa_get() fails");
        if (!info.compiled || !info.supported)
            continue;
        check(qkv_isa_select(info.name) == QKV_OK, "an ISA cannot be selected");
        for (int64_t seed = 0; seed < cases; seed++)
            check_problem((uint64_t)seed);
        isas++;
    }
    check(qkv_isa_select(NULL) == QKV_OK, "no automatic choice");
    return isas;
}

static void check_fork(void)
{
    const uint64_t bits = bits_of_seed(3);
    const pid_t child = fork();
    check(child >= 0, "fork fails");
    if (child == 0)
        _exit(bits_of_seed(3) == bits ? 0 : 1);
    int status = 1;
    waitpid(child, &status, 0);
    check(status == 0, "a forked child computes other bits");
}

int main(int argc, char **argv)
{
    const char *expected = NULL;
    int64_t cases = 24, threads = 1;
    double seconds = 0;
    bool forks = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";
        if (strcmp(argv[i], "--fork") == 0) {
            forks = true;
            continue;
        }
        if (strcmp(argv[i], "--expect") == 0)
            expected = value;
        else if (strcmp(argv[i], "--cases") == 0)
            cases = atoll(value);
        else if (strcmp(argv[i], "--threads") == 0)
            threads = atoll(value);
        else if (strcmp(argv[i], "--seconds") == 0)
            seconds = atof(value);
        else
            return fprintf(stderr, "selfcheck: unknown option %s\n", argv[i]), 2;
        i++;
    }
    if (threads < 1 || threads > MOST_THREADS)
        return fprintf(stderr, "selfcheck: 1 to %d threads\n", MOST_THREADS), 2;

    run_threads(threads, seconds);
    if (expected)
        check(strcmp(qkv_isa_name(), expected) == 0, "another ISA was expected");
    const char *name = qkv_isa_name();
    if (forks)
        check_fork();
    const int64_t isas = check_isas(cases);
    printf("selfcheck: %s chosen; %lld problems on %lld ISAs, %lld runs on %lld threads, %ld MiB\n",
           name, (long long)cases, (long long)isas, (long long)runs, (long long)threads,
           most_memory() / 1024);
    return 0;
}
