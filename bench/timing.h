/* SPDX-License-Identifier: MIT */
/*
 * Time measured so that two figures can be divided by each other: the work
 * and the limits it is compared with take turns, sample by sample, in the
 * same process and on the same core.
 */
#ifndef BENCH_TIMING_H
#define BENCH_TIMING_H

#include <stdbool.h>
#include <stdint.h>

enum { BENCH_ROUNDS_MAX = 99, BENCH_THREADS_MAX = 256 };

/* Nanoseconds of the monotonic clock, or of this thread's CPU time. */
double bench_now(void);
void bench_use_cpu_clock(void);

/*
 * From now on only samples count during which the core's other hardware
 * thread was idle, as far as a probe before and after can tell; with several
 * workers, those of all their cores, which then are not left. A round
 * without one does not count; where there is none at all, the work is measured
 * again as it comes and 'alone' is false.
 */
void bench_only_alone(void);

/* Keep the calling thread on the nth core that it may use; false if there is no way. */
bool bench_pin(int nth);

/*
 * Something that can be repeated. 'begin' (or NULL) runs first, on one
 * thread; 'run' then runs once on every worker at the same time.
 */
typedef struct bench_work {
    void (*begin)(void *context);
    void (*run)(void *context, int worker);
    void *context;
    bool one; /* on the calling thread alone, however many workers there are */
} bench_work;

/* The workers: the caller is worker 0, the others wait on threads of their own. */
void bench_workers_start(int count);
void bench_workers_stop(void);
void bench_run_once(const bench_work *work);

/* Times of one run, in nanoseconds. */
typedef struct bench_times {
    int rounds;
    double round[BENCH_ROUNDS_MAX]; /* the median of each round's samples */
    double min;                     /* the fastest sample of all */
    bool alone;                     /* only samples with the core alone, see below */
} bench_times;

/*
 * Measures works[0] for about 'seconds' in 'rounds' rounds, and works[1],
 * ... in turns with it. A sample is as many runs as take 50 microseconds.
 * A work of which one run takes seconds gets fewer rounds, at least one.
 */
enum { BENCH_WORKS_MAX = 6 };
void bench_measure(const bench_work *works, int n_works, double seconds, int rounds,
                   bench_times *times);

/* The fastest of a few samples, for choosing between variants. */
double bench_quick(const bench_work *work);

double bench_median(double *values, int n); /* sorts 'values'; NaN of none */

#endif
