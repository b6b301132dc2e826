/* SPDX-License-Identifier: MIT */
#include "cpu.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

/*
 * Intel SDM volume 1, 14.3 and 15.2-15.4: an extension may be used only if
 * its CPUID bit is set, OSXSAVE (leaf 1 ECX bit 27) tells that XGETBV works,
 * and XCR0 tells that the operating system saves the registers it needs.
 */
enum {
    LEAF1_ECX_FMA = 1 << 12,
    LEAF1_ECX_OSXSAVE = 1 << 27,
    LEAF1_ECX_AVX = 1 << 28,
    LEAF1_ECX_F16C = 1 << 29,
    LEAF7_EBX_AVX2 = 1 << 5,
    LEAF7_EBX_AVX512F = 1 << 16,
    LEAF7_EBX_AVX512DQ = 1 << 17,
    LEAF7_EBX_AVX512CD = 1 << 28,
    LEAF7_EBX_AVX512BW = 1 << 30,
    XCR0_YMM = 0x06, /* XMM and YMM upper halves */
    XCR0_ZMM = 0xe6, /* and opmasks, ZMM upper halves, ZMM16-31 */
    HWCAP_ADVSIMD = 1 << 1
};
#define LEAF7_EBX_AVX512VL (UINT32_C(1) << 31)

static const char *missing_avx2(const qkv_x86_regs *r)
{
    if (!(r->leaf1_ecx & LEAF1_ECX_AVX))
        return "the CPU lacks AVX";
    if (!(r->leaf1_ecx & LEAF1_ECX_OSXSAVE))
        return "the operating system has not enabled XSAVE";
    if ((r->xcr0 & XCR0_YMM) != XCR0_YMM)
        return "the operating system does not save the YMM registers";
    if (r->max_leaf < 7 || !(r->leaf7_ebx & LEAF7_EBX_AVX2))
        return "the CPU lacks AVX2";
    if (!(r->leaf1_ecx & LEAF1_ECX_FMA))
        return "the CPU lacks FMA";
    if (!(r->leaf1_ecx & LEAF1_ECX_F16C))
        return "the CPU lacks F16C";
    return NULL;
}

static const char *missing_avx512(const qkv_x86_regs *r)
{
    const char *lower = missing_avx2(r);
    if (lower)
        return lower;
    if (!(r->leaf7_ebx & LEAF7_EBX_AVX512F))
        return "the CPU lacks AVX-512F";
    if (!(r->leaf7_ebx & LEAF7_EBX_AVX512BW))
        return "the CPU lacks AVX-512BW";
    if (!(r->leaf7_ebx & LEAF7_EBX_AVX512DQ))
        return "the CPU lacks AVX-512DQ";
    if (!(r->leaf7_ebx & LEAF7_EBX_AVX512VL))
        return "the CPU lacks AVX-512VL";
    if (!(r->leaf7_ebx & LEAF7_EBX_AVX512CD))
        return "the CPU lacks AVX-512CD";
    /* macOS enables ZMM state on demand and hides it from XCR0 until then;
     * taking XCR0 at its word means AVX2 there, which is always safe. */
    if ((r->xcr0 & XCR0_ZMM) != XCR0_ZMM)
        return "the operating system does not save the ZMM registers";
    return NULL;
}

qkv_isa_verdicts qkv_isas_from_x86(const qkv_x86_regs *regs)
{
    qkv_isa_verdicts v = {{NULL}};
    v.missing[QKV_ISA_avx2] = missing_avx2(regs);
    v.missing[QKV_ISA_avx512] = missing_avx512(regs);
    v.missing[QKV_ISA_neon] = "the CPU is not an AArch64";
    return v;
}

qkv_isa_verdicts qkv_isas_from_arm(const qkv_arm_regs *regs)
{
    qkv_isa_verdicts v = {{NULL}};
    v.missing[QKV_ISA_avx2] = "the CPU is not an x86-64";
    v.missing[QKV_ISA_avx512] = "the CPU is not an x86-64";
    if (!(regs->hwcap & HWCAP_ADVSIMD))
        v.missing[QKV_ISA_neon] = "the CPU or the operating system lacks Advanced SIMD";
    return v;
}

#if defined(__x86_64__) && defined(__GNUC__)

static uint64_t read_xcr0(void)
{
    uint32_t low, high;
    /* xgetbv with ECX 0; as bytes, since old assemblers do not know it. */
    __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

qkv_isa_verdicts qkv_isas_detect(void)
{
    qkv_x86_regs r = {0};
    uint32_t ignored;

    __cpuid(0, r.max_leaf, ignored, ignored, ignored);
    if (r.max_leaf >= 1)
        __cpuid(1, ignored, ignored, r.leaf1_ecx, r.leaf1_edx);
    if (r.max_leaf >= 7) {
        __cpuid_count(7, 0, r.leaf7_eax, r.leaf7_ebx, r.leaf7_ecx, r.leaf7_edx);
        if (r.leaf7_eax >= 1)
            __cpuid_count(7, 1, r.leaf7_1_eax, ignored, ignored, ignored);
    }
    if (r.leaf1_ecx & LEAF1_ECX_OSXSAVE)
        r.xcr0 = read_xcr0();
    return qkv_isas_from_x86(&r);
}

#elif defined(__aarch64__)

qkv_isa_verdicts qkv_isas_detect(void)
{
    /* Advanced SIMD is part of every AArch64 ABI outside Linux too (macOS,
     * Windows, the BSDs); only Linux can be asked, so it is. */
    qkv_arm_regs r = {.hwcap = HWCAP_ADVSIMD};
#if defined(__linux__)
    r.hwcap = getauxval(AT_HWCAP);
    r.hwcap2 = getauxval(AT_HWCAP2);
#endif
    return qkv_isas_from_arm(&r);
}

#else

qkv_isa_verdicts qkv_isas_detect(void)
{
    qkv_isa_verdicts v = {{NULL}};
    for (int i = 1; i < QKV_ISA_COUNT; i++)
        v.missing[i] = "the CPU is neither an x86-64 nor an AArch64";
    return v;
}

#endif

static const char *const isa_names[QKV_ISA_COUNT] = {
#define QKV_ISA(name, ...) #name,
#include "isas.def"
#undef QKV_ISA
};

int qkv_isa_choose(uint32_t usable, const char *name, int *ignored)
{
    int best = 0;
    for (int i = 0; i < QKV_ISA_COUNT; i++)
        if (usable >> i & 1)
            best = i;

    *ignored = 0;
    if (!name || !*name)
        return best;
    for (int i = 0; i < QKV_ISA_COUNT; i++)
        if (strcmp(name, isa_names[i]) == 0 && usable >> i & 1)
            return i;
    *ignored = 1;
    return best;
}
