/* SPDX-License-Identifier: MIT */
/*
 * What every test uses: effort, seeds, guarded buffers, comparison and the
 * tally. Criterion runs each test in a process of its own, so nothing here
 * is shared between tests except the tally, which lives in a mapped file.
 */
#ifndef TEST_HARNESS_H
#define TEST_HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <criterion/criterion.h>

#include "isas.h"

/* ---------------------------------------------------------------- effort */

/*
 * QKV_TEST_EFFORT=quick thins random shapes and exhaustive walks, for
 * emulators; "full" is the full suite, and "long" is more than that in the
 * tests that say so. Without it the suite is full, unless it is compiled with
 * a sanitizer.
 */
bool effort_is_full(void);
bool effort_is_long(void);

/* From now on quick, in this test, whatever the variable says. */
void effort_thin(void);

/* 'full' cases, or about an eighth of them (at least one). */
int64_t effort_cases(int64_t full);

/* In loops over every size: false for sizes that a quick run leaves out. */
bool effort_takes(int64_t size);

/* ------------------------------------------------------------------ seed */

/* One seed a run: QKV_TEST_SEED, or a constant. */
uint64_t test_seed(void);

typedef struct rng {
    uint64_t state;
} rng;

/* A stream of its own for 'name', so that tests do not move each other's. */
rng rng_make(const char *name);
uint64_t rng_bits(rng *r);
int64_t rng_int(rng *r, int64_t low, int64_t high); /* both ends included */
float rng_uniform(rng *r, float low, float high);
float rng_normal(rng *r);

void fill_normal(rng *r, float *x, int64_t n, float sigma);
/* Integers of magnitude <= limit: sums of products are exact while small. */
void fill_integers(rng *r, float *x, int64_t n, int limit);
/* Magnitudes over many binades, both signs. */
void fill_binades(rng *r, float *x, int64_t n, int low, int high);

/* --------------------------------------------------------------- buffers */

/*
 * A guarded buffer lies between two pages that may not be touched. Its
 * place is where in between:
 *
 *     0         its last byte is the last before the page behind it
 *     1         its first byte is the first after the page before it
 *     2 .. 17   like 1, but place - 1 floats further on: every alignment
 *
 * What it holds at first, and what surrounds it, is CANARY: a quiet NaN, so
 * that a read of it shows in a result as well.
 *
 * A slot is one such buffer; taking it again invalidates what it gave
 * before. guards_intact() fails the test if anything around the buffers in
 * use has changed.
 */
enum { PLACES = 18, PLACE_AT_END = 0, PLACE_AT_START = 1, SLOTS = 24 };
/* The same for elements of 2 bytes and of 1: places 1 .. 33, 2 bytes apart, and
 * 1 .. 65, 1 byte apart. */
enum { PLACES_16 = 34, PLACES_8 = 66 };
#define CANARY UINT32_C(0xffc0dead)

float *guarded(int slot, int64_t count, int place);
void *guarded_bytes(int slot, size_t bytes, int place);
uint16_t *guarded_16(int slot, int64_t count, int place);
/* Of elements of 'align' bytes: 1, 2 or 4. */
void *guarded_elements(int slot, size_t bytes, int place, size_t align);
int places_of(size_t align);
void guards_intact(void);

/*
 * A frozen buffer faults when it is written: inputs are frozen while a kernel
 * runs. Taking the slot again thaws it.
 */
void guarded_freeze(int slot);
void guarded_thaw(int slot);

/* Fill with CANARY again; are these floats still all CANARY? */
void canary_fill(float *x, int64_t n);
bool canary_intact(const float *x, int64_t n);

/* Rows of a strided matrix: the gaps between rows must still be CANARY. */
void gaps_intact(const char *what, const float *x, int64_t rows, int64_t stride, int64_t cols);

/* Plain memory, freed when the test's process ends. */
void *scratch_alloc(size_t bytes);    /* aligned to 64 bytes */
double *doubles(int slot, int64_t n); /* zeroed; valid until the slot is taken again */

/* ------------------------------------------------------------ comparison */

/* What is being tested now, for messages: printf-like. */
void context(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *context_text(void);

/* Fails the test with the context in front. */
void fail_with(const char *format, ...) __attribute__((format(printf, 1, 2)));

/*
 * Every got[i] is within bound[i] of want[i]; NaN matches NaN, an infinity
 * matches itself. The message names the first that is not. For matrices
 * 'got' has rows 'stride' apart, 'want' and 'bound' are packed.
 */
void expect_close(const char *what, const float *got, const double *want, const double *bound,
                  int64_t n);
void expect_close_rows(const char *what, const float *got, int64_t stride, const double *want,
                       const double *bound, int64_t rows, int64_t cols);

/* Bitwise equality. */
void expect_same_bits(const char *what, const float *got, const float *want, int64_t n);

/* Equal, where any NaN equals any other. */
void expect_same_values(const char *what, const float *got, const float *want, int64_t n);

uint32_t bits_of(float x);
float float_of(uint32_t bits);

/* ----------------------------------------------------------------- tally */

/* 'n' more (kernel, ISA, shape) checks, for the closing report. */
void tally(int isa, int64_t n);

/* Worst error of an exponential so far, in ulp: 0 is exp, 1 is exp2. */
void tally_ulp(int which, int isa, double ulp, float at);

/* Skip the running test, loudly: it counts in the closing report. */
#define skip_test(...) skip_test_at(__VA_ARGS__)
void skip_test_at(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
