/* SPDX-License-Identifier: MIT */
/*
 * The calling convention, watched: abi_watched() makes a copy of an ISA's
 * table in which every kernel goes through a trampoline in assembler. Each
 * call then finds
 *
 *     callee-saved registers       filled with patterns, compared afterwards
 *     the stack pointer            aligned to 16 bytes and no more, at each of
 *                                  the four places modulo 64 in turn
 *     the stack below, the vector  signalling rubbish, so that nothing read
 *     registers without arguments  before it is written can pass for 0
 *     MXCSR or FPCR                in the mode that abi_mode() sets; its
 *                                  control bits are compared afterwards
 *     the upper vector state       clean on x86, and to be left clean
 *     the direction flag, the x87  as the ABI wants them, before and after
 *     state
 *
 * and a test fails at the first call that breaks one. The checks' own code
 * runs in the default floating-point mode: only kernels see another one.
 * Where the trampoline is not written (an ABI that is neither System V on
 * x86-64 nor AAPCS64, both on ELF) the copy is the table itself.
 */
#ifndef TEST_ABI_H
#define TEST_ABI_H

#include "harness.h"

/*
 * The copy lives in static memory: the next call overwrites it. Without
 * 'upper_state' that is not watched: it is the compiler's matter, which leaves
 * it dirty where a vector is a structure, as through SIMDe.
 */
const qkv_kernels *abi_watched(const qkv_kernels *table, bool upper_state);

/* False where calls cannot be watched on this platform. */
bool abi_can_watch(void);

/* What 'function' breaks, or "": the test does not fail. */
const char *abi_verdict(void (*function)(void));

typedef enum abi_fp_mode {
    ABI_DEFAULT, /* round to nearest, denormals as IEEE 754 has them */
    ABI_FLUSH,   /* denormal results and operands count as 0 (FTZ and DAZ; FZ) */
    ABI_UPWARD,  /* round towards +infinity */
    ABI_MODES
} abi_fp_mode;

/* The mode that watched kernels are called in from now on. */
void abi_mode(abi_fp_mode mode);

#endif
