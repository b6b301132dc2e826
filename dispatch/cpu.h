/* SPDX-License-Identifier: MIT */
/*
 * From raw CPU registers to the set of usable ISAs. The mapping is a pure
 * function of what was read, so that it can be tested with the registers of
 * machines that are not at hand.
 */
#ifndef QKV_CPU_H
#define QKV_CPU_H

#include <stdint.h>

#include "internal.h"

/* What CPUID and XGETBV told; a leaf that the CPU does not have reads 0. */
typedef struct qkv_x86_regs {
    uint32_t max_leaf; /* leaf 0, EAX */
    uint32_t leaf1_ecx, leaf1_edx;
    uint32_t leaf7_eax, leaf7_ebx, leaf7_ecx, leaf7_edx; /* sub-leaf 0; EAX: last sub-leaf */
    uint32_t leaf7_1_eax;                                /* sub-leaf 1 */
    uint64_t xcr0;                                       /* 0 without OSXSAVE */
} qkv_x86_regs;

/* What the kernel told a process on AArch64: AT_HWCAP and AT_HWCAP2. */
typedef struct qkv_arm_regs {
    uint64_t hwcap, hwcap2;
} qkv_arm_regs;

/*
 * The verdict on each ISA of isas.def: NULL if the registers confirm it,
 * otherwise one line that says what is missing first.
 */
typedef struct qkv_isa_verdicts {
    const char *missing[QKV_ISA_COUNT];
} qkv_isa_verdicts;

qkv_isa_verdicts qkv_isas_from_x86(const qkv_x86_regs *regs);
qkv_isa_verdicts qkv_isas_from_arm(const qkv_arm_regs *regs);

/* Read this CPU's registers and judge them. */
qkv_isa_verdicts qkv_isas_detect(void);

/*
 * Apply the environment variable QKV_ISA to a set of ISAs (bit i: ISA i of
 * isas.def is usable). Returns the index to select: the highest usable one,
 * lowered to the one 'name' gives if that is usable. '*ignored' tells that
 * a name was given and passed over.
 */
int qkv_isa_choose(uint32_t usable, const char *name, int *ignored);

#endif
