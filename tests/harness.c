/* SPDX-License-Identifier: MIT */
#include "harness.h"

#include <criterion/hooks.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

/* Where Valgrind's header is there, it is told what counts as uninitialised. */
#if defined(__has_include)
#if __has_include(<valgrind/memcheck.h>)
#include <valgrind/memcheck.h>
#endif
#endif
#ifndef VALGRIND_MAKE_MEM_UNDEFINED
#define VALGRIND_MAKE_MEM_UNDEFINED(at, bytes) ((void)(at), (void)(bytes))
#define VALGRIND_MAKE_MEM_DEFINED(at, bytes) ((void)(at), (void)(bytes))
#endif

/* ---------------------------------------------------------------- effort */

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

static bool thinned;

void effort_thin(void)
{
    thinned = true;
}

bool effort_is_full(void)
{
    if (thinned)
        return false;
    const char *effort = getenv("QKV_TEST_EFFORT");
    return effort && *effort ? strcmp(effort, "quick") != 0 : !SANITIZED;
}

bool effort_is_long(void)
{
    const char *effort = getenv("QKV_TEST_EFFORT");
    return !thinned && effort && strcmp(effort, "long") == 0;
}

int64_t effort_cases(int64_t full)
{
    return effort_is_full() ? full : (full + 7) / 8;
}

bool effort_takes(int64_t size)
{
    /* All small sizes and the neighbours of multiples of 16; else a fifth. */
    const int64_t rest = size % 16;
    return effort_is_full() || size <= 9 || rest <= 1 || rest == 15 || size % 5 == 0;
}

/* ------------------------------------------------------------------ seed */

uint64_t test_seed(void)
{
    const char *text = getenv("QKV_TEST_SEED");
    return text && *text ? strtoull(text, NULL, 0) : UINT64_C(20170612);
}

/* splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
 * generators", 2014. */
uint64_t rng_bits(rng *r)
{
    uint64_t z = r->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

rng rng_make(const char *name)
{
    rng r = {test_seed()};
    for (; *name; name++)
        r.state = (r.state ^ (unsigned char)*name) * UINT64_C(0x100000001b3);
    rng_bits(&r);
    return r;
}

int64_t rng_int(rng *r, int64_t low, int64_t high)
{
    return low + (int64_t)(rng_bits(r) % (uint64_t)(high - low + 1));
}

float rng_uniform(rng *r, float low, float high)
{
    const double unit = (double)(rng_bits(r) >> 11) * 0x1p-53;
    return (float)((double)low + unit * ((double)high - (double)low));
}

float rng_normal(rng *r)
{
    /* The sum of 12 uniform numbers: close enough to normal, and portable
     * to the last bit, unlike libm's logarithm. */
    double sum = -6.0;
    for (int i = 0; i < 12; i++)
        sum += (double)(rng_bits(r) >> 11) * 0x1p-53;
    return (float)sum;
}

void fill_normal(rng *r, float *x, int64_t n, float sigma)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = rng_normal(r) * sigma;
}

void fill_integers(rng *r, float *x, int64_t n, int limit)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)rng_int(r, -limit, limit);
}

void fill_binades(rng *r, float *x, int64_t n, int low, int high)
{
    for (int64_t i = 0; i < n; i++) {
        const float sign = rng_bits(r) & 1 ? -1.0f : 1.0f;
        x[i] = sign * ldexpf(rng_uniform(r, 1.0f, 2.0f), (int)rng_int(r, low, high));
    }
}

/* --------------------------------------------------------------- buffers */

enum { MARGIN = 256 }; /* bytes of canary on each side of a buffer */

typedef struct guarded_slot {
    unsigned char *map, *data; /* the usable part of the mapping; the buffer */
    size_t map_size, size;
    bool frozen;
} guarded_slot;

static guarded_slot slots[SLOTS];

static void fill_pattern(unsigned char *at, size_t bytes)
{
    const uint32_t canary = CANARY;
    /* In step with addresses that are multiples of 4, whatever the start. */
    for (size_t i = 0; i < bytes; i++)
        at[i] = (unsigned char)(canary >> ((uintptr_t)(at + i) % 4 * 8));
}

static bool pattern_intact(const unsigned char *at, size_t bytes)
{
    const uint32_t canary = CANARY;
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != (unsigned char)(canary >> ((uintptr_t)(at + i) % 4 * 8)))
            return false;
    return true;
}

static void slot_map(guarded_slot *slot, size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (slot->map)
        munmap(slot->map - page, slot->map_size + 2 * page);
    slot->map_size = (bytes + bytes / 2 + page) / page * page;
    unsigned char *all =
        mmap(NULL, slot->map_size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all + page, slot->map_size, PROT_READ | PROT_WRITE))
        fail_with("no memory for a buffer of %zu bytes", bytes);
    slot->map = all + page;
}

static size_t before(const guarded_slot *slot)
{
    const size_t room = (size_t)(slot->data - slot->map);
    return room < MARGIN ? room : MARGIN;
}

static size_t behind(const guarded_slot *slot)
{
    const size_t room = slot->map_size - (size_t)(slot->data - slot->map) - slot->size;
    return room < MARGIN ? room : MARGIN;
}

static void slot_protect(guarded_slot *slot, bool frozen)
{
    if (!slot->map || slot->frozen == frozen)
        return;
    if (mprotect(slot->map, slot->map_size, PROT_READ | (frozen ? 0 : PROT_WRITE)))
        fail_with("a buffer's protection cannot be changed");
    slot->frozen = frozen;
}

void guarded_freeze(int slot)
{
    slot_protect(&slots[slot], true);
}

void guarded_thaw(int slot)
{
    slot_protect(&slots[slot], false);
}

/* 'shift' bytes after the page before it, or flush with the page behind it. */
static void *slot_take(int number, size_t bytes, bool at_end, size_t shift)
{
    guarded_slot *slot = &slots[number];
    const size_t needed = bytes + PLACES * sizeof(float);
    guarded_thaw(number);
    if (!slot->map || slot->map_size < needed)
        slot_map(slot, needed);

    slot->size = bytes;
    slot->data = slot->map + (at_end ? slot->map_size - bytes : shift);
    fill_pattern(slot->data - before(slot), before(slot) + bytes + behind(slot));
    VALGRIND_MAKE_MEM_UNDEFINED(slot->data, bytes);
    return slot->data;
}

void *guarded_elements(int slot, size_t bytes, int place, size_t align)
{
    return slot_take(slot, bytes, place == PLACE_AT_END, (size_t)(place - 1) * align);
}

int places_of(size_t align)
{
    return align == 1 ? PLACES_8 : align == 2 ? PLACES_16 : PLACES;
}

void *guarded_bytes(int slot, size_t bytes, int place)
{
    return guarded_elements(slot, bytes, place, sizeof(float));
}

uint16_t *guarded_16(int slot, int64_t count, int place)
{
    return guarded_elements(slot, (size_t)count * sizeof(uint16_t), place, sizeof(uint16_t));
}

float *guarded(int slot, int64_t count, int place)
{
    return guarded_bytes(slot, (size_t)count * sizeof(float), place);
}

void guards_intact(void)
{
    for (int i = 0; i < SLOTS; i++) {
        const guarded_slot *slot = &slots[i];
        if (!slot->data)
            continue;
        if (!pattern_intact(slot->data - before(slot), before(slot)))
            fail_with("memory before the buffer in slot %d has been written", i);
        if (!pattern_intact(slot->data + slot->size, behind(slot)))
            fail_with("memory behind the buffer in slot %d has been written", i);
    }
}

void canary_fill(float *x, int64_t n)
{
    const uint32_t canary = CANARY;
    for (int64_t i = 0; i < n; i++)
        memcpy(x + i, &canary, sizeof canary);
    VALGRIND_MAKE_MEM_UNDEFINED(x, (size_t)(n > 0 ? n : 0) * sizeof *x);
}

bool canary_intact(const float *x, int64_t n)
{
    VALGRIND_MAKE_MEM_DEFINED(x, (size_t)(n > 0 ? n : 0) * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        if (bits_of(x[i]) != CANARY)
            return false;
    return true;
}

void gaps_intact(const char *what, const float *x, int64_t rows, int64_t stride, int64_t cols)
{
    for (int64_t i = 0; i + 1 < rows && cols > 0; i++)
        if (!canary_intact(x + i * stride + cols, stride - cols))
            fail_with("%s: the gap behind row %" PRId64 " has been written", what, i);
}

void *scratch_alloc(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, QKV_SCRATCH_ALIGN, bytes ? bytes : 1))
        fail_with("no memory for %zu bytes", bytes);
    return memory;
}

double *doubles(int number, int64_t n)
{
    static double *memory[SLOTS];
    static int64_t room[SLOTS];
    if (room[number] < n || !memory[number]) {
        free(memory[number]);
        room[number] = n + n / 2 + 1;
        memory[number] = malloc((size_t)room[number] * sizeof(double));
        if (!memory[number])
            fail_with("no memory for %" PRId64 " doubles", n);
    }
    memset(memory[number], 0, (size_t)n * sizeof(double));
    return memory[number];
}

/* ------------------------------------------------------------ comparison */

static char context_buffer[512];

void context(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(context_buffer, sizeof context_buffer, format, args);
    va_end(args);
}

const char *context_text(void)
{
    return context_buffer;
}

void fail_with(const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    cr_assert(false, "%s: %s", context_buffer, text);
    abort(); /* never reached: it tells the compiler that nothing returns */
}

uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static bool is_close(float got, double want, double bound)
{
    if (isnan(want))
        return isnan(got);
    if (isinf(want))
        return (double)got == want;
    /* Written so that a NaN in any of the three fails. */
    return fabs((double)got - want) <= bound;
}

void expect_close_rows(const char *what, const float *got, int64_t stride, const double *want,
                       const double *bound, int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c++)
            if (!is_close(got[i * stride + c], want[i * cols + c], bound[i * cols + c]))
                fail_with("%s[%" PRId64 "][%" PRId64 "] is %.9g (0x%08" PRIx32
                          "), expected %.17g within %.3g, off by %.3g",
                          what, i, c, (double)got[i * stride + c], bits_of(got[i * stride + c]),
                          want[i * cols + c], bound[i * cols + c],
                          fabs((double)got[i * stride + c] - want[i * cols + c]));
}

void expect_close(const char *what, const float *got, const double *want, const double *bound,
                  int64_t n)
{
    expect_close_rows(what, got, n, want, bound, 1, n);
}

void expect_same_bits(const char *what, const float *got, const float *want, int64_t n)
{
    if (n <= 0 || memcmp(got, want, (size_t)n * sizeof *got) == 0)
        return;
    for (int64_t i = 0; i < n; i++)
        if (bits_of(got[i]) != bits_of(want[i]))
            fail_with("%s[%" PRId64 "] is %.9g (0x%08" PRIx32
                      "), expected the bits of %.9g (0x%08" PRIx32 ")",
                      what, i, (double)got[i], bits_of(got[i]), (double)want[i], bits_of(want[i]));
}

void expect_same_values(const char *what, const float *got, const float *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!(got[i] == want[i] || (isnan(got[i]) && isnan(want[i]))))
            fail_with("%s[%" PRId64 "] is %.9g, expected %.9g", what, i, (double)got[i],
                      (double)want[i]);
}

/* ----------------------------------------------------------------- tally */

/* Lives in a file that the runner makes and every test's process maps. */
typedef struct tally_page {
    _Atomic int64_t checks[TEST_ISA_COUNT];
    _Atomic int64_t skips;
    char skip_text[32][160];
    /* (ulp in units of 2^-16) << 32 | bits of the argument: one atomic word */
    _Atomic uint64_t worst[2][TEST_ISA_COUNT];
} tally_page;

#define TALLY_VARIABLE "QKV_TEST_TALLY"

static tally_page *tally_map(void)
{
    static tally_page *page;
    if (page)
        return page;
    const char *path = getenv(TALLY_VARIABLE);
    const int file = path ? open(path, O_RDWR) : -1;
    void *map = MAP_FAILED;
    if (file >= 0) {
        map = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    if (map == MAP_FAILED) {
        static tally_page nowhere;
        map = &nowhere;
    }
    return page = map;
}

void tally(int isa, int64_t n)
{
    atomic_fetch_add(&tally_map()->checks[isa], n);
}

void tally_ulp(int which, int isa, double ulp, float at)
{
    const uint64_t word = (uint64_t)(fmin(ulp, 65535.0) * 65536.0) << 32 | bits_of(at);
    _Atomic uint64_t *worst = &tally_map()->worst[which][isa];
    uint64_t old = atomic_load(worst);
    while (old < word && !atomic_compare_exchange_weak(worst, &old, word))
        continue;
}

void skip_test_at(const char *format, ...)
{
    char text[160];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);

    tally_page *page = tally_map();
    const int64_t n = atomic_fetch_add(&page->skips, 1);
    if (n < (int64_t)(sizeof page->skip_text / sizeof page->skip_text[0]))
        memcpy(page->skip_text[n], text, sizeof text);
    cr_skip_test("%s", text);
}

static char tally_path[] = "/tmp/qkv-tests-XXXXXX";

ReportHook(PRE_ALL)(struct criterion_test_set *set)
{
    (void)set;
    const int file = mkstemp(tally_path);
    if (file >= 0 && ftruncate(file, sizeof(tally_page)) == 0)
        setenv(TALLY_VARIABLE, tally_path, 1);
    if (file >= 0)
        close(file);
    fprintf(stderr, "qkv tests: seed %" PRIu64 " (QKV_TEST_SEED), effort %s (QKV_TEST_EFFORT)\n",
            test_seed(),
            effort_is_long()   ? "long"
            : effort_is_full() ? "full"
                               : "quick: fewer random shapes and sizes, exponentials by stride");
}

static void report_skips(const tally_page *page)
{
    const int64_t most = (int64_t)(sizeof page->skip_text / sizeof page->skip_text[0]);
    for (int64_t i = 0; i < page->skips && i < most; i++) {
        bool seen = false;
        for (int64_t k = 0; k < i; k++)
            seen |= strcmp(page->skip_text[k], page->skip_text[i]) == 0;
        if (!seen)
            fprintf(stderr, "qkv tests: SKIPPED: %s\n", page->skip_text[i]);
    }
}

static void report_exponentials(const tally_page *page)
{
    static const char *const names[2] = {"exp", "exp2"};
    for (int which = 0; which < 2; which++)
        for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
            if (page->worst[which][isa])
                fprintf(stderr, "qkv tests: %s, %s: worst error %.4f ulp, at %.9g\n", names[which],
                        test_isa_of(isa).name, (double)(page->worst[which][isa] >> 32) / 65536.0,
                        (double)float_of((uint32_t)page->worst[which][isa]));
}

ReportHook(POST_ALL)(struct criterion_global_stats *stats)
{
    const tally_page *page = tally_map();
    int64_t checks = 0;
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
        checks += page->checks[isa];

    fprintf(stderr, "\n");
    report_exponentials(page);
    report_skips(page);
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
        const test_isa info = test_isa_of(isa);
        if (info.missing)
            fprintf(stderr, "qkv tests: %s did not run: %s\n", info.name, info.missing);
        else
            fprintf(stderr, "qkv tests: %s: %" PRId64 " checks\n", info.name, page->checks[isa]);
    }
    fprintf(stderr,
            "qkv tests: %zu tests, %zu passed, %zu failed, %zu skipped; %" PRId64
            " (kernel, ISA, shape) checks\n",
            stats->nb_tests, stats->tests_passed, stats->tests_failed, stats->tests_skipped,
            checks);
    unlink(tally_path);
}
