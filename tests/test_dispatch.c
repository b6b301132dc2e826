/* SPDX-License-Identifier: MIT */
/*
 * Which ISA is chosen: from registers of many machines, from QKV_ISA, by
 * call, and by threads that all come first. Every test is a process of its
 * own, so each sees the library before its first use.
 */
#include "harness.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/*
 * Registers of processors, composed from the vendors' published CPUID tables
 * and from published register dumps; only what detection looks at must be
 * exact. XCR0 3 is x87 and SSE, 7 adds AVX, 0xe7 adds AVX-512, bit 9 is
 * protection keys, 0x60000 AMX.
 */
typedef struct machine {
    const char *name, *best;
    qkv_x86_regs regs;
} machine;

#define OSXSAVE UINT32_C(0x08000000)
#define FMA UINT32_C(0x00001000)
#define F16C UINT32_C(0x20000000)

static const machine machines[] = {
    {"Nehalem: before AVX", "scalar", {.max_leaf = 0xb, .leaf1_ecx = 0x009ce3bd}},
    {"Sandy Bridge: AVX, no AVX2", "scalar", {.max_leaf = 0xd, .leaf1_ecx = 0x1fbae3ff, .xcr0 = 7}},
    {"Ivy Bridge: AVX and F16C, no AVX2",
     "scalar",
     {.max_leaf = 0xd, .leaf1_ecx = 0x7fbae3ff, .leaf7_ebx = 0x00000281, .xcr0 = 7}},
    {"Piledriver: AVX, FMA and F16C, no AVX2",
     "scalar",
     {.max_leaf = 0xd, .leaf1_ecx = 0x3e98320b, .leaf7_ebx = 0x00000008, .xcr0 = 7}},
    {"Haswell",
     "avx2",
     {.max_leaf = 0xd, .leaf1_ecx = 0x7ffafbff, .leaf7_ebx = 0x000027ab, .xcr0 = 7}},
    {"Haswell, the system saves no YMM registers",
     "scalar",
     {.max_leaf = 0xd, .leaf1_ecx = 0x7ffafbff, .leaf7_ebx = 0x000027ab, .xcr0 = 3}},
    {"Haswell, the system saves YMM but not XMM",
     "scalar",
     {.max_leaf = 0xd, .leaf1_ecx = 0x7ffafbff, .leaf7_ebx = 0x000027ab, .xcr0 = 5}},
    {"Haswell, XSAVE not enabled",
     "scalar",
     {.max_leaf = 0xd, .leaf1_ecx = 0x7ffafbff & ~OSXSAVE, .leaf7_ebx = 0x000027ab}},
    {"Haswell, a hypervisor hides FMA",
     "scalar",
     {.max_leaf = 0xd, .leaf1_ecx = 0x7ffafbff & ~FMA, .leaf7_ebx = 0x000027ab, .xcr0 = 7}},
    {"Haswell, a hypervisor hides F16C",
     "scalar",
     {.max_leaf = 0xd, .leaf1_ecx = 0x7ffafbff & ~F16C, .leaf7_ebx = 0x000027ab, .xcr0 = 7}},
    {"Haswell, limited to leaf 6, which answers for leaf 7 as well",
     "scalar",
     {.max_leaf = 6, .leaf1_ecx = 0x7ffafbff, .leaf7_ebx = 0xffffffff, .xcr0 = 7}},
    {"Zen 2",
     "avx2",
     {.max_leaf = 0x10, .leaf1_ecx = 0x7ed8320b, .leaf7_ebx = 0x219c91a9, .xcr0 = 7}},
    {"Zen 3",
     "avx2",
     {.max_leaf = 0x10, .leaf1_ecx = 0x7ed8320b, .leaf7_ebx = 0x219c97a9, .xcr0 = 0x207}},
    {"Zen 4",
     "avx512",
     {.max_leaf = 0x10, .leaf1_ecx = 0x7ef8320b, .leaf7_ebx = 0xf1bf97a9, .xcr0 = 0x2e7}},
    {"Knights Landing: AVX-512 F and CD alone",
     "avx2",
     {.max_leaf = 0xd, .leaf1_ecx = 0x7ff8f3bf, .leaf7_ebx = 0x1c0d23ab, .xcr0 = 0xe7}},
    {"Skylake-X",
     "avx512",
     {.max_leaf = 0x16, .leaf1_ecx = 0x7ffefbff, .leaf7_ebx = 0xd39ffffb, .xcr0 = 0x2ff}},
    {"Skylake-X, the system saves no ZMM registers",
     "avx2",
     {.max_leaf = 0x16, .leaf1_ecx = 0x7ffefbff, .leaf7_ebx = 0xd39ffffb, .xcr0 = 7}},
    {"Skylake-X, the system saves the low 16 ZMM registers only",
     "avx2",
     {.max_leaf = 0x16, .leaf1_ecx = 0x7ffefbff, .leaf7_ebx = 0xd39ffffb, .xcr0 = 0x67}},
    {"Skylake-X, the system saves no opmasks",
     "avx2",
     {.max_leaf = 0x16, .leaf1_ecx = 0x7ffefbff, .leaf7_ebx = 0xd39ffffb, .xcr0 = 0xc7}},
    {"Skylake-X, a hypervisor hides VL",
     "avx2",
     {.max_leaf = 0x16, .leaf1_ecx = 0x7ffefbff, .leaf7_ebx = 0x539ffffb, .xcr0 = 0xe7}},
    {"Skylake-X, a hypervisor hides FMA",
     "scalar",
     {.max_leaf = 0x16, .leaf1_ecx = 0x7ffefbff & ~FMA, .leaf7_ebx = 0xd39ffffb, .xcr0 = 0xe7}},
    {"Ice Lake",
     "avx512",
     {.max_leaf = 0x1b, .leaf1_ecx = 0x7ffafbff, .leaf7_ebx = 0xf2bf27ef, .xcr0 = 0x2e7}},
    {"Sapphire Rapids",
     "avx512",
     {.max_leaf = 0x20, .leaf1_ecx = 0x7ffefbff, .leaf7_ebx = 0xf1bfffef, .xcr0 = 0x602e7}},
    {"Alder Lake, a client of two kinds of cores",
     "avx2",
     {.max_leaf = 0x20, .leaf1_ecx = 0x7ffafbff, .leaf7_ebx = 0x239c27eb, .xcr0 = 0x207}},
    {"no CPUID at all", "scalar", {.max_leaf = 0}},
};

static uint32_t usable_of(const qkv_isa_verdicts *v)
{
    uint32_t usable = 0;
    for (int i = 0; i < QKV_ISA_COUNT; i++)
        usable |= (uint32_t)!v->missing[i] << i;
    return usable;
}

Test(dispatch, x86_machines)
{
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        const qkv_isa_verdicts v = qkv_isas_from_x86(&machines[i].regs);
        int ignored;
        const int best = qkv_isa_choose(usable_of(&v), NULL, &ignored);
        cr_assert_str_eq(test_isa_of(best).name, machines[i].best, "%s: chose %s", machines[i].name,
                         test_isa_of(best).name);
        cr_assert_null(v.missing[QKV_ISA_scalar]);
        cr_assert_not_null(v.missing[QKV_ISA_neon], "%s", machines[i].name);
        for (int isa = 0; isa < QKV_ISA_COUNT; isa++)
            cr_assert(!v.missing[isa] || (*v.missing[isa] && !strchr(v.missing[isa], '\n')),
                      "%s: no reason", machines[i].name);
        tally(best, 1);
    }
}

/* Each single bit that a bundle needs: without it the bundle is refused. */
Test(dispatch, every_needed_bit)
{
    const qkv_x86_regs full = {
        .max_leaf = 0x16, .leaf1_ecx = 0x7ffefbff, .leaf7_ebx = 0xd39ffffb, .xcr0 = 0xe7};
    const uint32_t leaf1[] = {OSXSAVE, FMA, F16C, UINT32_C(1) << 28};
    const uint32_t leaf7[] = {UINT32_C(1) << 16, UINT32_C(1) << 17, UINT32_C(1) << 28,
                              UINT32_C(1) << 30, UINT32_C(1) << 31};
    for (int i = 0; i < 4; i++) {
        qkv_x86_regs r = full;
        r.leaf1_ecx &= ~leaf1[i];
        const qkv_isa_verdicts v = qkv_isas_from_x86(&r);
        cr_assert(v.missing[QKV_ISA_avx2] && v.missing[QKV_ISA_avx512], "leaf 1, %d", i);
    }
    for (int i = 0; i < 5; i++) {
        qkv_x86_regs r = full;
        r.leaf7_ebx &= ~leaf7[i];
        const qkv_isa_verdicts v = qkv_isas_from_x86(&r);
        cr_assert(!v.missing[QKV_ISA_avx2] && v.missing[QKV_ISA_avx512], "leaf 7, %d", i);
    }
    for (int bit = 0; bit < 8; bit++) {
        qkv_x86_regs r = full;
        r.xcr0 &= ~(UINT64_C(1) << bit);
        const qkv_isa_verdicts v = qkv_isas_from_x86(&r);
        const bool ymm = bit == 1 || bit == 2, zmm = ymm || bit >= 5;
        cr_assert_eq(v.missing[QKV_ISA_avx2] != NULL, ymm, "XCR0 bit %d", bit);
        cr_assert_eq(v.missing[QKV_ISA_avx512] != NULL, zmm, "XCR0 bit %d", bit);
    }
}

Test(dispatch, arm_machines)
{
    /* Cortex-A53 (fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid), Neoverse
     * N1, Graviton 3 with SVE, and a kernel that says nothing. */
    const struct {
        qkv_arm_regs regs;
        bool neon;
    } arms[] = {{{0x8ff, 0}, true},
                {{0x119fff, 0}, true},
                {{0x10ffffff, 0x1ff}, true},
                {{0x1, 0}, false},
                {{0, 0}, false}};
    for (int i = 0; i < 5; i++) {
        const qkv_isa_verdicts v = qkv_isas_from_arm(&arms[i].regs);
        cr_assert_eq(v.missing[QKV_ISA_neon] == NULL, arms[i].neon, "machine %d", i);
        cr_assert(v.missing[QKV_ISA_avx2] && v.missing[QKV_ISA_avx512]);
        cr_assert_null(v.missing[QKV_ISA_scalar]);
    }
}

Test(dispatch, choose)
{
    const uint32_t s = 1u << QKV_ISA_scalar, a2 = 1u << QKV_ISA_avx2, a5 = 1u << QKV_ISA_avx512;
    const struct {
        uint32_t usable;
        const char *name;
        int want, ignored;
    } cases[] = {
        {s, NULL, QKV_ISA_scalar, 0},
        {s | a2, NULL, QKV_ISA_avx2, 0},
        {s | a2 | a5, NULL, QKV_ISA_avx512, 0},
        {s | a2 | a5, "", QKV_ISA_avx512, 0},
        {s | a2 | a5, "avx2", QKV_ISA_avx2, 0},
        {s | a2 | a5, "scalar", QKV_ISA_scalar, 0},
        {s | a2 | a5, "avx512", QKV_ISA_avx512, 0},
        {s | a2, "avx512", QKV_ISA_avx2, 1},
        {s | a2, "neon", QKV_ISA_avx2, 1},
        {s | a2, "AVX2", QKV_ISA_avx2, 1},
        {s | a2, "avx", QKV_ISA_avx2, 1},
        {s | a2, "avx2 ", QKV_ISA_avx2, 1},
        {s | a2, "nonsense", QKV_ISA_avx2, 1},
        {s, "avx2", QKV_ISA_scalar, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int ignored = -1;
        const int got = qkv_isa_choose(cases[i].usable, cases[i].name, &ignored);
        cr_assert_eq(got, cases[i].want, "case %zu", i);
        cr_assert_eq(ignored, cases[i].ignored, "case %zu", i);
    }
}

/* ------------------------------------------------ this machine, this process */

static const char *best_here(void)
{
    const char *best = "";
    for (int i = 0; i < QKV_ISA_COUNT; i++) {
        const test_isa isa = test_isa_of(i);
        if (!isa.missing)
            best = isa.name;
    }
    return best;
}

static qkv_isa_info info_of(const char *name)
{
    qkv_isa_info info = {0};
    for (int i = 0; i < qkv_isa_count(); i++)
        if (qkv_isa_get(i, &info) == QKV_OK && strcmp(info.name, name) == 0)
            return info;
    cr_assert(false, "%s is not listed", name);
    return info;
}

Test(dispatch, automatic_choice)
{
    unsetenv("QKV_ISA");
    cr_assert_str_eq(qkv_isa_name(), best_here());
    int selected = 0;
    for (int i = 0; i < qkv_isa_count(); i++) {
        qkv_isa_info info;
        cr_assert_eq(qkv_isa_get(i, &info), QKV_OK);
        const test_isa isa = test_isa_of(i);
        cr_assert_eq(info.compiled && info.supported, isa.missing == NULL, "%s", info.name);
        cr_assert(info.reason && *info.reason);
        selected += info.selected;
        cr_assert_eq(info.selected, strcmp(info.name, best_here()) == 0);
    }
    cr_assert_eq(selected, 1);
    cr_assert_eq(qkv_isa_get(-1, &(qkv_isa_info){0}), QKV_E_INDEX);
    cr_assert_eq(qkv_isa_get(qkv_isa_count(), &(qkv_isa_info){0}), QKV_E_INDEX);
    cr_assert_eq(qkv_isa_get(0, NULL), QKV_E_NULL);
}

Test(dispatch, variable_lowers)
{
    setenv("QKV_ISA", "scalar", 1);
    cr_assert_str_eq(qkv_isa_name(), "scalar");
    const char *reason = info_of("scalar").reason;
    cr_assert(strcmp(best_here(), "scalar") == 0 || strstr(reason, "QKV_ISA"), "%s", reason);
    /* It is read once. */
    unsetenv("QKV_ISA");
    cr_assert_eq(qkv_isa_select(NULL), QKV_OK);
    cr_assert_str_eq(qkv_isa_name(), "scalar");
}

Test(dispatch, variable_of_this_machine)
{
    setenv("QKV_ISA", best_here(), 1);
    cr_assert_str_eq(qkv_isa_name(), best_here());
}

Test(dispatch, variable_unknown_is_ignored)
{
    setenv("QKV_ISA", "quantum", 1);
    cr_assert_str_eq(qkv_isa_name(), best_here());
    const char *reason = info_of(best_here()).reason;
    cr_assert(strstr(reason, "QKV_ISA") && strstr(reason, "ignored"), "%s", reason);
}

Test(dispatch, variable_unsupported_is_ignored)
{
    for (int i = 0; i < QKV_ISA_COUNT; i++) {
        const test_isa isa = test_isa_of(i);
        if (!isa.missing)
            continue;
        setenv("QKV_ISA", isa.name, 1);
        cr_assert_str_eq(qkv_isa_name(), best_here());
        cr_assert(strstr(info_of(best_here()).reason, "ignored"));
        return;
    }
    skip_test("every ISA of the list is supported here");
}

Test(dispatch, select_by_call)
{
    const char *before = qkv_isa_name();
    const char *wrong[] = {"quantum", "", "AVX2", "avx2 ", "scalar\n"};
    for (int i = 0; i < 5; i++) {
        cr_assert_eq(qkv_isa_select(wrong[i]), QKV_E_ISA, "'%s'", wrong[i]);
        cr_assert_str_eq(qkv_isa_name(), before);
    }
    for (int i = 0; i < QKV_ISA_COUNT; i++) {
        const test_isa isa = test_isa_of(i);
        before = qkv_isa_name();
        cr_assert_eq(qkv_isa_select(isa.name), isa.missing ? QKV_E_ISA : QKV_OK);
        cr_assert_str_eq(qkv_isa_name(), isa.missing ? before : isa.name);
        cr_assert_eq(info_of(qkv_isa_name()).selected, 1);
    }
    cr_assert_eq(qkv_isa_select(NULL), QKV_OK);
    cr_assert_str_eq(qkv_isa_name(), best_here());
}

/* The call wins over the variable, which only bounds the automatic choice. */
Test(dispatch, call_over_variable)
{
    setenv("QKV_ISA", "scalar", 1);
    cr_assert_eq(qkv_isa_select(best_here()), QKV_OK);
    cr_assert_str_eq(qkv_isa_name(), best_here());
    cr_assert_eq(qkv_isa_select(NULL), QKV_OK);
    cr_assert_str_eq(qkv_isa_name(), "scalar");
}

enum { THREADS = 16 };
static pthread_barrier_t barrier;

static void *first_use(void *result)
{
    const float ones[40] = {[0] = 1, [39] = 1};
    float score = 0;
    pthread_barrier_wait(&barrier);
    qkv_dot(ones, 40, ones, 40, &score, 1, 1, 1, 40);
    *(const char **)result = score == 2.0f ? qkv_isa_name() : "wrong";
    return NULL;
}

Test(dispatch, threads_at_first_use)
{
    pthread_t threads[THREADS];
    const char *names[THREADS];
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, first_use, &names[i]), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS; i++)
        cr_assert_str_eq(names[i], best_here(), "thread %d: %s", i, names[i]);
}
