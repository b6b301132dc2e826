/* SPDX-License-Identifier: MIT */
#if defined(__linux__)
#define _GNU_SOURCE /* sched_setaffinity, CPU_SET */
#include <sched.h>
#else
#define _POSIX_C_SOURCE 200809L
#include <sched.h>
#endif

#include "timing.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

/* Shorter samples would measure the clock. */
#define SAMPLE_NS 50e3
/* How long one work may hold up the others that it takes turns with. */
#define TURN_NS 10e6
/* Work whose single run takes this long in all rounds together is cut short. */
#define LONG_NS 10e9

static clockid_t clock_id = CLOCK_MONOTONIC;

double bench_now(void)
{
    struct timespec t;
    clock_gettime(clock_id, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

void bench_use_cpu_clock(void)
{
    clock_id = CLOCK_THREAD_CPUTIME_ID;
}

#if defined(__linux__)
static cpu_set_t allowed;
static pthread_once_t allowed_once = PTHREAD_ONCE_INIT;

/* Before the first pinning: afterwards only one core is allowed. */
static void read_allowed(void)
{
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        CPU_ZERO(&allowed);
}

bool bench_pin(int nth)
{
    pthread_once(&allowed_once, read_allowed);
    const int count = CPU_COUNT(&allowed);
    if (count == 0)
        return false;
    /* From the last core down: the first ones serve most interrupts. */
    int skip = count - 1 - nth % count;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed) || skip-- > 0)
            continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        return sched_setaffinity(0, sizeof one, &one) == 0;
    }
    return false;
}
#else
bool bench_pin(int nth)
{
    (void)nth;
    return false;
}
#endif

/* --------------------------------------------------------------- workers */

static struct {
    int count; /* the caller included */
    pthread_t threads[BENCH_THREADS_MAX];
    const bench_work *work;
    atomic_uint ticket; /* moves on when there is work */
    atomic_int running; /* workers that have not finished it */
    atomic_bool stop;
} workers = {.count = 1};

/* Waiting threads look again and again: waking a sleeping one takes longer
 * than the shortest works. They give way if somebody needs the core. */
static void wait_for(unsigned seen)
{
    for (int i = 0; atomic_load_explicit(&workers.ticket, memory_order_acquire) == seen; i++)
        if (i > 1000)
            sched_yield();
}

static void *worker_main(void *arg)
{
    const int worker = (int)(intptr_t)arg;
    bench_pin(worker);
    for (unsigned seen = 0;; seen++) {
        wait_for(seen);
        if (atomic_load(&workers.stop))
            return NULL;
        workers.work->run(workers.work->context, worker);
        atomic_fetch_sub_explicit(&workers.running, 1, memory_order_release);
    }
}

void bench_workers_start(int count)
{
    for (workers.count = 1; workers.count < count; workers.count++)
        if (pthread_create(&workers.threads[workers.count], NULL, worker_main,
                           (void *)(intptr_t)workers.count) != 0)
            abort();
}

void bench_workers_stop(void)
{
    atomic_store(&workers.stop, true);
    atomic_fetch_add_explicit(&workers.ticket, 1, memory_order_release);
    for (int i = 1; i < workers.count; i++)
        pthread_join(workers.threads[i], NULL);
    workers.count = 1;
}

void bench_run_once(const bench_work *work)
{
    if (work->begin)
        work->begin(work->context);
    if (workers.count == 1 || work->one) {
        work->run(work->context, 0);
        return;
    }
    workers.work = work;
    atomic_store(&workers.running, workers.count - 1);
    atomic_fetch_add_explicit(&workers.ticket, 1, memory_order_release);
    work->run(work->context, 0);
    for (int i = 0; atomic_load_explicit(&workers.running, memory_order_acquire) > 0; i++)
        if (i > 1000)
            sched_yield();
}

/* ----------------------------------------------------------- disturbance */

/*
 * Does something else run on this core's other hardware thread? It takes
 * every second slot of the front end, which fewer than one instruction in
 * four of a loop of multiply-adds need, but nearly all of an attention kernel:
 * the work slows down and its limit does not. Instructions that do nothing
 * but pass through the front end show it.
 */
static bool only_alone;
static int core; /* the next one is tried where this one is shared */

/* A core alone takes the same time for them again and again. */
#define ALONE_TOLERANCE 1.1

void bench_only_alone(void)
{
    only_alone = true;
}

/* Of the wall clock where there are several workers: also who had to wait for a core shows. */
static void probe(void *context, int worker)
{
    double *ns = context;
    const double start = bench_now();
#if defined(__GNUC__) && (defined(__x86_64__) || defined(__aarch64__))
    for (int i = 0; i < 1000; i++)
        __asm__ volatile(".rept 64\n nop\n .endr");
#endif
    ns[worker] = bench_now() - start;
}

static bool is_alone(void)
{
    static double fastest = 1e300;
    double ns[BENCH_THREADS_MAX];
    bench_run_once(&(bench_work){.run = probe, .context = ns});
    double slowest = 0.0;
    for (int i = 0; i < workers.count; i++) {
        fastest = ns[i] < fastest ? ns[i] : fastest;
        slowest = ns[i] > slowest ? ns[i] : slowest;
    }
    return slowest <= ALONE_TOLERANCE * fastest;
}

/* --------------------------------------------------------------- samples */

static double sample(const bench_work *work, int64_t batch)
{
    const double start = bench_now();
    for (int64_t i = 0; i < batch; i++)
        bench_run_once(work);
    return (bench_now() - start) / (double)batch;
}

/* How many runs make a sample. The runs made to find out warm the caches up. */
static int64_t calibrate(const bench_work *work, double *run_ns)
{
    int64_t batch = 1;
    for (;;) {
        *run_ns = sample(work, batch);
        if (*run_ns * (double)batch >= SAMPLE_NS || batch >= INT64_C(1) << 30)
            return batch;
        const double want = 1.2 * SAMPLE_NS / (*run_ns + 1.0);
        batch = want > 2.0 * (double)batch ? (int64_t)want : 2 * batch;
    }
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *values, int n)
{
    if (n == 0)
        return (double)NAN;
    qsort(values, (size_t)n, sizeof *values, by_value);
    return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

double bench_quick(const bench_work *work)
{
    double best;
    const int64_t batch = calibrate(work, &best);
    for (int i = 0; i < 5; i++) {
        const double ns = sample(work, batch);
        best = ns < best ? ns : best;
    }
    return best;
}

/* The samples of one work in one round. */
enum { SAMPLES_MAX = 4096 };
typedef struct turn {
    int64_t batch;
    int n;
    double ns[SAMPLES_MAX];
} turn;

static void take(const bench_work *work, turn *t, double *min)
{
    if (only_alone && !is_alone()) {
        if (workers.count > 1)
            return;
        bench_pin(++core);
        if (!is_alone())
            return;
    }
    const double ns = sample(work, t->batch);
    if (only_alone && !is_alone())
        return;
    *min = ns < *min ? ns : *min;
    if (t->n < SAMPLES_MAX)
        t->ns[t->n++] = ns;
}

/* One round: a sample of works[0], then the others for as long, again and again. */
static void measure_round(const bench_work *works, int n_works, double round_ns, turn *turns,
                          bench_times *times)
{
    /* How much longer a round may last where samples are refused. */
    const double patience = only_alone ? 20.0 : 1.0;
    double spent = 0.0;
    do {
        const double start = bench_now();
        take(&works[0], &turns[0], &times[0].min);
        const double taken = bench_now() - start;
        spent += taken;
        for (int i = 1; i < n_works; i++) {
            const double end = bench_now() + (taken < TURN_NS ? 0.5 * taken : TURN_NS);
            do {
                take(&works[i], &turns[i], &times[i].min);
            } while (bench_now() < end);
        }
    } while ((spent < round_ns || (turns[0].n < 3 && spent < patience * round_ns)) &&
             turns[0].n < SAMPLES_MAX);
}

static bool all_taken(const turn *turns, int n_works)
{
    for (int i = 0; i < n_works; i++)
        if (turns[i].n == 0)
            return false;
    return true;
}

static void measure(const bench_work *works, int n_works, double seconds, int rounds,
                    bench_times *times)
{
    static turn turns[BENCH_WORKS_MAX];
    double run_ns = 0.0;
    for (int i = n_works - 1; i >= 0; i--) {
        turns[i].batch = calibrate(&works[i], &run_ns);
        times[i] = (bench_times){.min = 1e300};
    }
    if (run_ns * rounds > LONG_NS) {
        rounds = (int)(LONG_NS / run_ns);
        rounds = rounds < 1 ? 1 : rounds;
    }
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < n_works; i++)
            turns[i].n = 0;
        measure_round(works, n_works, seconds * 1e9 / rounds, turns, times);
        if (!all_taken(turns, n_works))
            continue;
        for (int i = 0; i < n_works; i++)
            times[i].round[times[i].rounds++] = bench_median(turns[i].ns, turns[i].n);
    }
}

void bench_measure(const bench_work *works, int n_works, double seconds, int rounds,
                   bench_times *times)
{
    measure(works, n_works, seconds, rounds, times);
    times[0].alone = only_alone && times[0].rounds > 0;
    if (times[0].rounds > 0)
        return;
    only_alone = false;
    measure(works, n_works, seconds, rounds, times);
    only_alone = true;
    times[0].alone = false;
}
